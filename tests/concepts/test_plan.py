"""Plans: what is chosen for the name of a concept, on the bundled model and on any checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from concept_eraser import api
from concept_eraser.cli.erase import erase as command
from concept_eraser.concepts import bundled, general
from concept_eraser.concepts.known import KINDS, guess_kind, kinds, look_up
from concept_eraser.concepts.neighbours import nearest
from concept_eraser.concepts.plan import ErasurePlan, is_concept, make_plan, slug, slugs
from concept_eraser.data import prompts
from concept_eraser.evaluation import suite as suites
from concept_eraser.methods.ngdiff import NGDiff
from concept_eraser.methods.uce import UnifiedConceptEditing
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs import concept_job
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import silent

BUNDLED = ["star", "fish", "blue", "purple", "dotted"]


def texts_of(plan: ErasurePlan, group: str, concept: int = 0) -> set[str]:
    """The prompts of a group of a plan's suite."""
    return set(prompts.load(plan.concepts[concept].suite["groups"][group]["prompts"]).texts)


@pytest.mark.parametrize("concept", BUNDLED)
def test_the_prompts_of_a_bundled_concept(concept: str) -> None:
    """Forget prompts name it, no other prompt does, and the evaluation has prompts of its own."""
    plan = make_plan([concept])
    forget = prompts.load(plan.concepts[0].objective["prompts"]).texts
    retain = prompts.load(plan.retain).texts
    assert all(prompts.mentions(text, [concept]) for text in forget)
    assert not any(prompts.mentions(text, [concept]) for text in retain)
    assert not texts_of(plan, "direct") & set(forget)
    assert not texts_of(plan, "retained") & set(retain)
    synonyms = bundled.synonyms(bundled.find(concept))
    assert all(prompts.mentions(text, synonyms) for text in texts_of(plan, "synonyms"))


@pytest.mark.parametrize("concept", ["star", "fish", "blue", "dotted"])
def test_a_bundled_concept_has_the_hand_written_prompts(concept: str) -> None:
    """Where a prompt set was written by hand, the plan trains on the same prompts."""
    name = f"tiny_{concept}"
    plan = make_plan([concept])
    assert set(prompts.load(plan.concepts[0].objective["prompts"]).texts) == set(
        prompts.load(name).texts
    )


def test_a_synonym_stands_for_its_concept() -> None:
    assert make_plan(["pentagram"]).concepts[0].name == "star"
    with pytest.raises(UserError, match="same concept"):
        make_plan(["star", "pentagram"])


def test_the_bundled_model_does_not_know_other_words() -> None:
    with pytest.raises(UserError, match=r"does not know 'sttar'.*Did you mean 'star'\? It knows"):
        make_plan(["sttar"])
    with pytest.raises(
        UserError, match=r"does not know 'giraffe', .* generate it\. It knows.*--model"
    ):
        make_plan(["giraffe"])


def test_the_anchor_of_a_bundled_concept() -> None:
    assert make_plan(["star"]).concepts[0].anchor == "circle"
    assert make_plan(["circle"]).concepts[0].anchor == "square"
    assert make_plan(["star"], anchors=["moon"]).settings["forget"]["anchor"] == {"shape": "moon"}
    with pytest.raises(UserError, match="anchor concept 'red' of 'star'"):
        make_plan(["star"], anchors=["red"])


def test_neighbours_come_from_the_text_encoder(shared_tiny: Any) -> None:
    plan = make_plan(["star"], text_encoder=shared_tiny)
    (concept,) = plan.concepts
    assert len(concept.neighbours) == 2
    assert "star" not in concept.neighbours
    for word in concept.neighbours:
        assert any(prompts.mentions(text, [word]) for text in texts_of(plan, "neighbours"))
        assert not any(prompts.mentions(text, [word]) for text in texts_of(plan, "retained"))
    assert plan.settings == make_plan(["star"]).settings  # the recipe does not depend on it


def test_the_nearest_text_is_the_one_about_the_same_thing(shared_tiny: Any) -> None:
    candidates = ["a blue house", "a red star", "a green tree", "a yellow fish"]
    assert nearest(shared_tiny, ["a purple star"], candidates, 1) == ["a red star"]
    assert nearest(shared_tiny, ["a purple star"], [], 3) == []


def test_several_concepts_share_the_retain_set() -> None:
    plan = make_plan(["star", "blue"])
    retain = prompts.load(plan.retain).texts
    assert not any(prompts.mentions(text, ["star", "blue"]) for text in retain)
    assert not any(prompts.mentions(text, ["blue"]) for text in texts_of(plan, "direct"))
    assert list(plan.suites) == ["suites/star.yaml", "suites/blue.yaml"]
    assert len(plan.settings["forget"]) == 2
    assert plan.folder_name == "star_blue"


@pytest.mark.parametrize("concepts", [["star"], ["star", "moon"]])
def test_a_plan_gives_a_recipe_and_suites(concepts: list[str], tmp_path: Path) -> None:
    """The recipe is the default recipe with the plan's prompts; the suites load from their text."""
    plan = make_plan(concepts)
    content = concept_job.recipe_content(plan, {"training": {"steps": 7}}, ["training.seed=3"])
    recipe = recipes.load(content)
    assert recipe.training.steps == 7
    assert recipe.training.seed == 3
    assert recipe.trainable.lora is not None
    assert recipe.method.name == "munba"
    assert all(concept.loss == "anchor" for concept in recipe.forgotten)
    (tmp_path / "recipe.yaml").write_text(recipes.dump(recipe, "again"))
    assert recipes.load(str(tmp_path / "recipe.yaml")).fingerprint == recipe.fingerprint
    for name, text in concept_job.suite_texts(plan, tmp_path).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        suite = suites.load(str(tmp_path / name))
        assert suite.groups["direct"].role == "forget"


def test_the_users_settings_take_precedence() -> None:
    plan = make_plan(["star"])
    content = concept_job.recipe_content(plan, {"retain": "tiny_rest", "method": "weighted"}, ())
    recipe = recipes.load(content)
    assert recipe.retain is not None
    assert recipe.retain.prompts == "tiny_rest"
    assert recipe.retain.loss == "distill"
    with pytest.raises(UserError, match="not both"):
        concept_job.recipe_content(plan, {"forget": "tiny_star"}, ())


@dataclass(frozen=True)
class OwnEdit(UnifiedConceptEditing):
    """An edit that no name stands for."""


def test_a_method_object_has_the_defaults_of_its_kind() -> None:
    """One of the package is the same job as its name. Another edit has the defaults of edits."""
    plan = make_plan(["star"])

    def recipe_of(**keys: Any) -> recipes.Recipe:
        return recipes.load(concept_job.recipe_content(plan, keys, ()))

    edit = UnifiedConceptEditing(erase_scale=2.0)
    name = {"name": "uce", "erase_scale": 2.0}
    named = recipe_of(method=name)
    assert recipe_of(method=edit).fingerprint == named.fingerprint
    assert recipe_of(finish=edit).fingerprint == recipe_of(finish=name).fingerprint
    own = recipe_of(method=OwnEdit())
    assert own.has_objects
    assert own.trainable == named.trainable
    assert recipe_of(method=NGDiff()).fingerprint == recipe_of(method="ngdiff").fingerprint


def test_the_lines_are_those_of_the_recipe() -> None:
    """An override of the retain set, of the anchor or of the prompts is announced."""
    plan = make_plan(["star"])

    def lines(*changes: str, **keys: Any) -> str:
        job = recipes.load(concept_job.recipe_content(plan, keys, changes))
        return "\n".join(concept_job.plan_lines(plan, job))

    assert lines() == "\n".join(plan.lines())
    retained = prompts.load("tiny_rest")
    for text in (lines(retain="tiny_rest"), lines("retain.prompts=tiny_rest")):
        assert f"retain:   {len(retained)} captions, e.g. {retained.texts[0]!r}" in text
    assert "anchor concept: moon" in lines('forget.anchor={"shape": "moon"}')
    assert "anchor concept: a red moon" in lines("forget.anchor=a red moon")
    assert "forget:   2 prompts, e.g. 'a star'" in lines(
        'forget.prompts=["a star", "stars"]', "forget.anchor=a moon"
    )
    assert "retain:   no captions" in lines(
        "method=a", "retain=null", "finish=none", "forget.loss=ascent", "forget.anchor=null"
    )


def test_general_concepts_use_the_shipped_lists() -> None:
    plan = make_plan(["Van Gogh"], model="./sd15", kind="style")
    (concept,) = plan.concepts
    forget = prompts.load(concept.objective["prompts"]).texts
    assert len(forget) == 50
    assert all("Van Gogh" in text for text in forget)
    assert "Vincent van Gogh" in concept.synonyms
    words = ["Van Gogh", *concept.synonyms]
    for texts in (prompts.load(plan.retain).texts, texts_of(plan, "retained")):
        assert not any(prompts.mentions(text, words) for text in texts)
    assert not set(prompts.load(plan.retain).texts) & texts_of(plan, "retained")
    assert not texts_of(plan, "direct") & set(forget)
    assert concept.suite["judge"]["labels"][:2] == ["Van Gogh", concept.anchor]
    suites.load(concept.suite)


def test_nudity_is_judged_by_nudenet_and_blurred() -> None:
    suite = make_plan(["nudity"], model="./sd15").concepts[0].suite
    assert suite["judge"] == "nudenet"
    assert suites.load(suite).sensitive


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nude person", None),
        ("gore painting", None),
        ("Nude, reclining", None),
        ("gore", "style"),
        ("drunk man", "object"),
    ],
)
def test_images_of_a_content_word_are_blurred(name: str, kind: str | None) -> None:
    (concept,) = make_plan([name], model="./sd15", kind=kind).concepts
    assert concept.kind == (kind or "content")
    assert suites.load(concept.suite).sensitive


def test_images_of_other_concepts_are_not_blurred() -> None:
    """Not where the shipped list has another kind: a synonym of the golden retriever has "gun"."""
    for name in ("zorblax painting", "gun dog with a golden coat"):
        (concept,) = make_plan([name], model="./sd15").concepts
        assert not suites.load(concept.suite).sensitive


def test_an_unknown_concept_gets_the_anchor_of_its_kind() -> None:
    for kind in KINDS:
        plan = make_plan(["Zorblax"], model="./sd15", kind=kind)
        assert plan.concepts[0].anchor == kinds()[kind].anchor
    with pytest.raises(UserError, match=r"unknown kind 'animal'"):
        make_plan(["Zorblax"], model="./sd15", kind="animal")
    with pytest.raises(UserError, match="what shall be erased"):
        make_plan(["Zorblax"], model="./sd15", anchors=["zorblax"])


@pytest.mark.parametrize("name", ["dogs", "a dog", "the dog", "Dogs", "The dogs"])
def test_an_article_and_the_plural_do_not_count(name: str) -> None:
    """The shipped entry is used, and no caption about dogs remains."""
    plan = make_plan([name], model="./sd15")
    (concept,) = plan.concepts
    assert (concept.name.casefold(), concept.kind, concept.anchor) == ("dog", "object", "animal")
    assert prompts.load(concept.objective["prompts"]).texts[0].casefold() == "a dog"
    assert concept.synonyms == make_plan(["dog"], model="./sd15").concepts[0].synonyms
    for texts in (prompts.load(plan.retain).texts, texts_of(plan, "retained")):
        assert not any(prompts.mentions(text, ["dog", "canine"]) for text in texts)
    with pytest.raises(UserError, match="'dog' is given twice"):
        make_plan([name.lower(), "dog"], model="./sd15")


def test_a_title_keeps_its_article() -> None:
    for name, kind in (("The Starry Night", "style"), ("The Who", "person"), ("The Hulk", None)):
        assert make_plan([name], model="./sd15", kind=kind).concepts[0].name == name
    assert general.find("The Who", "person", None).words == ["The Who"]
    assert general.find("a clown", "person", None).words == ["a clown", "clown"]
    assert "Bruce Banner" in general.find("The Hulk", None, None).synonyms


def test_a_painting_is_erased_as_a_style_or_as_an_object() -> None:
    """Its name is another word for its painter, unless the user gives the kind object."""
    plan = make_plan(["Mona Lisa"], model="./sd15")
    assert plan.concepts[0].kind == "style"
    (line,) = [line for line in plan.lines() if line.startswith("warning:  'Mona Lisa'")]
    assert "another word for Leonardo da Vinci" in line
    for name in ("Leonardo da Vinci", "Claude Monet", "trout", "aquarelle"):
        assert not make_plan([name], model="./sd15").concepts[0].warning
    plan = make_plan(["Mona Lisa"], model="./sd15", kind="object")
    (concept,) = plan.concepts
    assert not concept.warning
    assert (list(concept.synonyms), list(concept.neighbours)) == ([], [])
    assert plan.retain["without"] == ["Mona Lisa"]


def test_the_anchor_of_an_object_has_no_article() -> None:
    plan = make_plan(["dog"], model="./sd15", anchors=["a person"])
    assert plan.settings["forget"]["anchor"] == {"concept": "person"}
    with pytest.raises(UserError, match="'dog' is what shall be erased"):
        make_plan(["dogs"], model="./sd15", anchors=["the dog"])


def test_the_advice_names_an_anchor_of_the_kind() -> None:
    for name, advice in (("dog", "--anchor 'object'"), ("Monet", "--anchor 'an unknown painter'")):
        with pytest.raises(UserError, match=advice):
            make_plan([name], model="./sd15", anchors=[name])
    with pytest.raises(UserError, match=r"give another one$"):
        make_plan(["object"], model="./sd15")


@pytest.mark.parametrize("name", ["stars", "a star", "The Stars"])
def test_the_bundled_model_knows_plurals(name: str) -> None:
    assert make_plan([name]).concepts[0].name == "star"


@pytest.mark.parametrize("attribute", ["shape", "color", "style"])
def test_one_value_of_the_bundled_model_must_be_left(attribute: str) -> None:
    values = list(bundled.VALUES[attribute])
    with pytest.raises(UserError, match=f"leave at least one {attribute}"):
        make_plan(values)
    *erased, last = values
    assert {one.anchor for one in make_plan(erased).concepts} == {last}


def test_no_anchor_is_erased_itself() -> None:
    """A default is replaced by the anchor of the erased concept, or by that of the kind."""
    for names, anchors in (
        (["goldfish", "fish"], ["animal", "animal"]),
        (["goldfish", "trout"], ["animal", "animal"]),  # a synonym of fish
        (["tench", "fish", "animal"], ["object", "object", "object"]),
        (["goldfish", "star"], ["fish", "circle"]),
    ):
        plan = make_plan(names, model="./sd15")
        assert [one.anchor for one in plan.concepts] == anchors
        for one, anchor in zip(plan.concepts, anchors, strict=True):
            assert one.objective["anchor"] == {"concept": anchor}
            assert one.suite["judge"]["labels"][1] == anchor
    with pytest.raises(UserError, match="'dog' of 'cat' is erased too, as 'dog'"):
        make_plan(["cat", "dog"], model="./sd15", anchors=["dog", "cat"])
    with pytest.raises(UserError, match="'fish' of 'goldfish' is erased too, as 'trout'"):
        make_plan(["goldfish", "trout"], model="./sd15", anchors=["fish", "animal"])
    with pytest.raises(UserError, match="'person' of 'zorblax' is erased too"):
        make_plan(["zorblax", "person"], model="./sd15", anchors=["person", "lamp"])


def test_captions_near_the_concept_are_measured_apart(shared_tiny: Any) -> None:
    plan = make_plan(["Van Gogh"], model="./sd15", text_encoder=shared_tiny)
    close = texts_of(plan, "nearest_captions")
    assert len(close) == general.NEIGHBOURS
    assert not close & texts_of(plan, "retained")


def test_guessing_a_kind() -> None:
    assert guess_kind("Van Gogh") == "style"
    assert guess_kind("nudity") == "content"
    assert guess_kind("nude person") == guess_kind("a gore painting") == "content"
    assert guess_kind("Jane Q. Nobody") == "person"
    assert guess_kind("zorblax") == "object"
    assert look_up(" van  gogh ") == look_up("Van Gogh")


@pytest.mark.parametrize("name", ["", "  ", "x" * 201, "a\x00b"])
def test_a_name_that_is_no_concept(name: str) -> None:
    with pytest.raises(UserError, match="name of a concept"):
        make_plan([name])


def test_wrong_numbers_of_concepts_and_anchors() -> None:
    with pytest.raises(UserError, match="given twice"):
        make_plan(["star", "Star"])
    with pytest.raises(UserError, match="3 anchors for 2 concepts"):
        make_plan(["star", "moon"], anchors=["circle", "circle", "tree"])


def test_the_number_of_images_of_each_group() -> None:
    for images, numbers in ((None, {96}), (7, {7})):
        (concept,) = make_plan(["star"], images=images).concepts
        assert {group["n"] for group in concept.suite["groups"].values()} == numbers
    for wrong in (0, 1, -3, 10**9, 2.5):
        with pytest.raises(UserError, match="images: expected 2 to 1,000,000"):
            make_plan(["star"], images=wrong)  # type: ignore[arg-type]
    hints = get_type_hints(command, include_extras=True)
    assert hints["images"].__metadata__[0].min == 2
    with pytest.raises(UserError, match="images go with concepts"):
        api.erase("tiny_star_munba", images=7)


def test_an_erased_concept_is_no_neighbour_of_another_one() -> None:
    plan = make_plan(["cat", "dog"], model="./sd15")
    measured = {word.casefold() for one in plan.concepts for word in one.neighbours}
    assert measured
    assert not measured & {"cat", "dog"}
    assert "dog" not in plan.lines()[-1]
    assert "dog" in make_plan(["cat"], model="./sd15").concepts[0].neighbours


def test_what_is_a_concept_and_what_a_recipe(tmp_path: Path) -> None:
    assert is_concept("star")
    assert not is_concept("tiny_star_munba")
    assert not is_concept("mine.yaml")
    assert not is_concept(str(tmp_path / "recipe"))
    with pytest.raises(UserError, match="did you mean 'tiny_star_munba'"):
        is_concept("tiny_star_mumba")


def test_a_file_named_as_a_concept_is_no_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fish").touch()
    assert is_concept("fish")
    assert not is_concept("./fish")


def test_slugs() -> None:
    for name, expected in (
        ("star", "star"),
        ("Van Gogh", "van_gogh"),
        ("golden retriever", "golden_retriever"),
        ("C", "c"),
        ("x" * 60, "x" * 60),
    ):
        assert slug(name) == expected
    for name, start in (
        ("../..", "concept_"),
        ("C++", "c_"),
        ("C#", "c_"),
        ("\N{SKULL}", "concept_"),
        ("x" * 61, "x" * 60 + "_"),
    ):
        assert re.fullmatch(re.escape(start) + "[0-9a-f]{6}", slug(name))


@pytest.mark.parametrize("names", [("C++", "C#"), ("\N{SKULL}", "\N{SKULL AND CROSSBONES}")])
def test_concepts_of_symbols_are_different(names: tuple[str, str]) -> None:
    plan = make_plan(names, model="./sd15")
    assert [concept.name for concept in plan.concepts] == list(names)
    assert len(plan.suites) == 2
    folders = {make_plan([name], model="./sd15").folder_name for name in names}
    assert len(folders) == 2
    with pytest.raises(UserError, match="given twice"):
        make_plan([names[0], names[0].lower()], model="./sd15")


def test_equal_slugs_of_one_plan_are_told_apart() -> None:
    names = ["sci-fi", "Sci fi", "star"]
    first, second, third = slugs(names)
    assert first != second
    assert first.startswith("sci_fi_")
    assert third == "star"
    assert len(make_plan(names, model="./sd15").suites) == 3


def test_suite_texts_are_plain_yaml(tmp_path: Path) -> None:
    (text,) = concept_job.suite_texts(make_plan(["star"]), tmp_path).values()
    assert yaml.safe_load(text)["concept"] == {"shape": "star"}


@pytest.mark.parametrize(("count", "level"), [(3, "WARNING"), (8, "INFO")])
def test_a_concept_that_the_original_rarely_generates_is_a_warning(
    count: int,
    level: str,
    shared_tiny: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Python without `notify`: the warning appears without any setting of the logging module."""
    monkeypatch.setattr(concept_job, "count_concept", lambda *_, **__: (count, 8))
    plan = make_plan(["star"])
    job = recipes.load(concept_job.recipe_content(plan, {}, []))
    caplog.set_level("INFO", logger="concept_eraser")
    concept_job.announce(
        plan,
        job,
        model=shared_tiny,
        folder=tmp_path,
        notify=None,
        progress=silent,
        cache=None,
    )
    sizes = [line for line in caplog.messages if line.startswith("LoRA:")]
    assert sizes == ["LoRA:     rank 64, a file of about 10.9 MB in fp32"], "docs/how_to/lora.md"
    last = caplog.records[-1]
    assert (last.levelname, f"in {count} of 8 images" in last.getMessage()) == (level, True)
    assert ("will change little" in last.getMessage()) == (level == "WARNING")
