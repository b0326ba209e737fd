"""Recipes: every mistake at once, with paths and suggestions; overrides; fingerprints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from concept_eraser import registry
from concept_eraser.losses import denoiser, labelled, text_encoder
from concept_eraser.recipes import objective_fields, overrides, recipe
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError
from tests.conftest import LABELLED, short


def test_a_new_setting_leaves_the_fingerprints_of_older_recipes_as_they_were() -> None:
    """Runs and evaluations on the user's disk are found by it. So a new key is None by default."""
    content = {
        "model": "tiny-sd",
        "target": "denoiser",
        "forget": {"prompts": "tiny_star", "loss": "anchor", "anchor": {"shape": "circle"}},
        "retain": {"prompts": "tiny_rest"},
        "method": {"name": "munba"},
        "training": {"steps": 4},
    }
    assert recipe.load(content).fingerprint == "967e3f9e9f496754"


def test_five_mistakes_are_five_lines() -> None:
    wrong = short(
        forget__loss="ancor",
        method__formula="exat",
        trainable__select="crossattention",
        training__steps=0,
        training__lr="fast",
    )
    wrong["forget"]["anchr"] = "x"
    with pytest.raises(UserError) as error:
        recipe.load(wrong)
    lines = str(error.value).splitlines()
    assert lines[0] == "6 mistakes in the recipe:"
    text = {line.strip().split(":")[0]: line for line in lines[1:]}
    assert "did you mean 'anchor'" in text["forget.loss"]
    assert "did you mean 'anchor'" in text["forget.anchr"]
    assert "did you mean 'exact'" in text["method"]
    assert "did you mean 'cross_attention'" in text["trainable.select"]
    assert "found 0" in text["training.steps"]
    assert "'fast'" in text["training.lr"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method__name": "munbaa"}, "did you mean 'munba'"),
        ({"method__xii": 1}, "unknown option of method 'munba' 'xii'; did you mean 'xi'"),
        ({"method__xi": 2.0}, "xi must lie in"),
        ({"forget__prompts": "tiny_starr"}, "did you mean 'tiny_star'"),
        ({"forget__prompts": []}, "empty"),
        ({"forget__anchor": None}, "needs an anchor"),
        ({"retain__images": "free"}, "needs images"),
        ({"forget__timesteps": [500, 100]}, "low < high"),
        ({"retain": None}, "needs a retain set"),
        ({"trainable__select": "re:["}, "no regular expression"),
        ({"target": "vaee"}, "'denoiser', 'text_encoder'"),
        ({"target": "vae"}, "forget: the target 'vae' needs data"),
        (
            {"target": "text_encoder", "forget__loss": "resteer"},
            "forget.loss: unknown loss of target 'text_encoder' 'resteer'",
        ),
        ({"forget__loss": "slider"}, "needs a mixture"),
        ({"forget__mixture": {"a square": 1}}, "mixture is a setting of the loss 'slider'"),
        (
            {"forget__loss": "slider", "forget__mixture": {"": 1, "a star": 2}},
            "sum of the factors must be 1, as of one prediction, found 3",
        ),
        ({"forget__data": "digits"}, "not both"),
        ({"forget__classes": [1]}, "belong to labelled data"),
        ({"forgett": 1}, "did you mean 'forget'"),
        ({"training__steps": True}, "training.steps: expected a number, found true"),
        (
            {"training__lr": False},
            "training.lr: expected a number, found false, as YAML also reads",
        ),
        ({"forget__timesteps": [False, 1000]}, "forget.timesteps: expected a number, found false"),
        ({"trainable__lora": {"rank": True}}, "trainable.lora.rank: expected a number"),
    ],
)
def test_each_mistake_is_an_error_with_a_next_step(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        recipe.load(short(**changes))


HISTOGRAM = {"method": "uno-hat", "forget__loss": "data", "retain__loss": "data"}
ATTACKED = {"method": "adversarial", "attack": {"n": 4}}
WITH_ITSELF = "compares the model with itself under teacher: current"


@pytest.mark.parametrize("bounds", [[-50, 0], [500, 100], [0, 1001]])
def test_the_time_steps_of_a_histogram_ascend(bounds: list[int]) -> None:
    histogram = {"concept": {"shape": "star"}, "timesteps": bounds}
    with pytest.raises(UserError, match=r"histogram\.timesteps: .*0 <= low < high <= 1000"):
        recipe.load(short(**HISTOGRAM, histogram=histogram))


@pytest.mark.parametrize("concept", [{}, {"shape": "star", "color": "red"}])
def test_a_histogram_is_of_one_concept(concept: dict[str, str]) -> None:
    with pytest.raises(
        UserError, match=r"histogram\.concept: expected one attribute and its value"
    ):
        recipe.load(short(**HISTOGRAM, histogram={"concept": concept}))


@pytest.mark.parametrize(
    "target",
    [LABELLED, {"target": "text_encoder", "trainable": {"select": "all"}, "method": "uno-hat"}],
)
def test_a_histogram_needs_a_target_that_generates(target: dict) -> None:
    content = copy.deepcopy(target) | {"histogram": {"concept": {"shape": "star"}}}
    with pytest.raises(UserError, match="generates no samples for a judge; use denoiser or vae"):
        recipe.load(short(**content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**ATTACKED, "attack": {"n": 4, "warmup": 4}}, "attack.warmup: 4 leaves none of the 4"),
        (
            {"training__decay": "step", "training__milestones": [4, 9]},
            "milestones: all lie after the last of the 4 training steps",
        ),
        ({"trainable__batchnorm": "train"}, "'denoiser' does not use it"),
        (
            {"target": "text_encoder", "trainable": {"select": "all", "batchnorm": "train"}},
            "'text_encoder' does not use it",
        ),
        ({"forget__loss": "distill", "forget__teacher": "current"}, f"forget: .*{WITH_ITSELF}"),
        ({"retain__loss": "distill", "retain__teacher": "current"}, f"retain: .*{WITH_ITSELF}"),
        (
            {**ATTACKED, "retain__loss": "distill", "retain__teacher": "current"},
            f"retain: .*{WITH_ITSELF}",
        ),
        (
            {
                "target": "text_encoder",
                "retain__loss": "distill_prediction",
                "retain__teacher": "current",
            },
            f"retain: the loss 'distill_prediction' {WITH_ITSELF}",
        ),
        (
            {**LABELLED, "forget__loss": "diverge", "forget__teacher": "current"},
            f"forget: the loss 'diverge' {WITH_ITSELF}",
        ),
        (
            {**LABELLED, "retain__distill": 0.5, "retain__teacher": "current"},
            rf"retain\.distill {WITH_ITSELF}",
        ),
        ({**LABELLED, "forget__beta": 1.0}, "beta is a setting of the loss 'npo'"),
    ],
)
def test_a_setting_without_effect_is_an_error(changes: dict, message: str) -> None:
    changed = copy.deepcopy(changes)
    with pytest.raises(UserError, match=message):
        recipe.load(short(**changed))


@pytest.mark.parametrize(
    "changes",
    [
        {**ATTACKED, "attack": {"n": 4, "warmup": 3}},
        {"training__decay": "step", "training__milestones": [3, 9]},
        {"training__warmup": 9},  # a short run of a recipe with a warm-up
        {"watch": {"suite": "tiny_star", "every": 5}},  # a short trial
        {**ATTACKED, "forget__loss": "distill", "forget__teacher": "current"},
        {
            "retain__loss": "distill",
            "retain__teacher": "current",
            "retain__elastic": {"weight": 1.0},
        },
        {**LABELLED, "retain__loss": "distill", "retain__teacher": "current", "retain__l1": 1e-4},
        {**LABELLED, "forget__loss": "npo", "forget__beta": 1.0},
        {
            **LABELLED,
            "forget__loss": "diverge",
            "forget__teacher": "current",
            "trainable__batchnorm": "train",
        },
    ],
)
def test_a_setting_with_some_effect_is_accepted(changes: dict) -> None:
    recipe.load(short(**copy.deepcopy(changes)))


def test_the_recipe_of_an_earlier_run_is_read(tmp_path: Path) -> None:
    """It could have settings without effect."""
    content = short(**copy.deepcopy(ATTACKED), attack__warmup=4)
    content["retain"] |= {"loss": "distill", "teacher": "current"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    assert recipe.load_run(tmp_path).attack.warmup == 4
    with pytest.raises(UserError, match=r"attack\.warmup"):
        recipe.load(str(tmp_path / "recipe.yaml"))


def test_missing_forget_is_named() -> None:
    with pytest.raises(UserError, match="forget: required"):
        recipe.load({"model": "tiny-sd"})


def test_shorthands_mean_the_same() -> None:
    long = recipe.load(
        {
            "forget": {"prompts": "tiny_star", "loss": "esd"},
            "retain": {"prompts": "tiny_rest"},
            "method": {"name": "munba"},
            "trainable": {"select": "all"},
        }
    )
    brief = recipe.load(
        {
            "forget": {"prompts": "tiny_star", "loss": "esd"},
            "retain": "tiny_rest",
            "method": "munba",
            "trainable": "all",
        }
    )
    assert long.fingerprint == brief.fingerprint


def test_overrides() -> None:
    job = recipe.load(
        "tiny_star_munba",
        ["training.lr=1e-5", "method=ngdiff", "forget.anchor.shape=square", "training.steps=3"],
    )
    assert (job.training.lr, job.method.name, job.training.steps) == (1e-5, "ngdiff", 3)
    assert job.forget.anchor == {"shape": "square"}
    assert job.fingerprint != recipe.load("tiny_star_munba").fingerprint
    assert recipe.load(
        {"forget": "tiny_star", "retain": "tiny_rest", "method": "munba"},
        ["forget.loss=esd", "method.xi=0.5"],
    ).method.options == {"xi": 0.5}


@pytest.mark.parametrize("lora", [8, False, True, "none", {"rank": 8}])
def test_an_override_of_a_lora_in_its_short_form(lora: Any) -> None:
    job = recipe.load(short(trainable__lora=lora), ["trainable.lora.rank=2"])
    assert job.trainable.lora is not None
    assert (job.trainable.lora.rank, job.trainable.lora.alpha) == (2, 2)
    conv = recipe.load(short(trainable__lora=8), ["trainable.lora.conv=true"]).trainable.lora
    assert conv is not None
    assert (conv.rank, conv.conv) == (8, True)


@pytest.mark.parametrize("bad", ["training.lr", "=3", "model.x=1"])
def test_bad_overrides(bad: str) -> None:
    with pytest.raises(UserError):
        recipe.load("tiny_star_munba", [bad])


@pytest.mark.parametrize("text", ["a 😀 face", "a\u2028b\x85c\x7f\uffff", '"\\ud83d" é', ["😀"]])
def test_a_value_of_an_override_keeps_every_character(text: Any) -> None:
    content: dict[str, Any] = {}
    overrides.apply(content, f"forget.anchor={overrides.as_text(text)}")
    assert content == {"forget": {"anchor": text}}


def test_yaml_numbers_that_are_strings() -> None:
    """YAML reads 1e-5 as a string; annotations decide."""
    assert recipe.load(short(method__xi=yaml.safe_load("1e-5"))).method.options["xi"] == "1e-5"
    assert registry.build("method", "munba", {"xi": "1e-5"}).xi == 1e-5


def test_resolved_recipe_round_trips(tmp_path: Path) -> None:
    first = recipe.load("tiny_star_munba")
    path = tmp_path / "again.yaml"
    path.write_text(recipe.dump(first, "concept-eraser erase again.yaml"))
    assert recipe.load(str(path)).fingerprint == first.fingerprint
    assert path.read_text().startswith("# concept-eraser erase again.yaml\n")


def test_not_yaml(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("forget: [unclosed")
    with pytest.raises(UserError, match="no valid YAML"):
        recipe.load(str(path))
    path.write_text("- a list")
    with pytest.raises(UserError, match="expected a mapping"):
        recipe.load(str(path))


def test_names_repeated_in_the_recipe_are_those_of_the_losses() -> None:
    tables = {
        "denoiser": denoiser.LOSSES,
        "text_encoder": text_encoder.LOSSES,
        "classifier": labelled.CLASSIFIER_LOSSES,
        "clip": labelled.CLASSIFIER_LOSSES,
        "vae": labelled.VAE_LOSSES,
    }
    for target, table in tables.items():
        own = {"histogram"} & set(table)  # which has a section of its own
        if target == "clip":  # whose logits are no linear layer's
            own = {"expand"}
        assert set(table) == {*objective_fields.LOSS_NAMES[target], *own}, target
    table = denoiser.LOSSES
    assert {k for k, v in table.items() if v.needs_anchor} == set(objective_fields.ANCHORED)
    assert {k for k, v in table.items() if v.needs_images} == set(objective_fields.WITH_TARGET)
    assert {k for k, v in table.items() if v.holds_empty} == set(objective_fields.WITH_EMPTY)
    assert registry.builtin("loss") == tuple(sorted(set().union(*tables.values())))


def test_every_shipped_recipe_is_valid_and_opens_with_its_command() -> None:
    names = resources.names("pipelines")
    assert len(names) >= 13
    for name in names:
        assert recipe.load(name).model
        text = resources.find("pipelines", name).read_text()
        assert text.startswith(f"# concept-eraser erase {name}\n"), name


@pytest.mark.parametrize("name", ["a", "ga", "a-d", "sa", "a-s"])
def test_a_method_that_promises_ascent_does_not_train_on_the_forgotten(name: str) -> None:
    content = {
        "target": "classifier",
        "forget": {"data": "digits", "classes": [3]},
        "retain": "rest",
        "method": name,
    }
    with pytest.raises(
        UserError, match=rf"the method '{name}' ascends the loss.*set forget.loss: ascent"
    ):
        recipe.load(content)
    content["forget"] = {"data": "digits", "classes": [3], "loss": "ascent"}
    assert recipe.load(content).forget.loss == "ascent"


def test_the_error_of_a_mistake_names_the_overrides() -> None:
    with pytest.raises(
        UserError,
        match=r"tiny_star_esd.yaml with retain.loss=distill:\n  retain: give either prompts",
    ):
        recipe.load("tiny_star_esd", ["retain.loss=distill"])
    with pytest.raises(UserError, match=r"tiny_star_esd.yaml:\n"):  # too many to repeat
        recipe.load(
            "tiny_star_esd",
            ["retain.loss=distill", "training.lr=1", "training.steps=2", "training.seed=1"],
        )
