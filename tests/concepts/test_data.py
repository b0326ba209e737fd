"""The shipped lists: kinds, known concepts and general captions. No model runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from concept_eraser.concepts import general, known
from concept_eraser.concepts.known import KINDS, known_concepts, look_up
from concept_eraser.data import prompts, templates
from concept_eraser.storage.readers import read_yaml
from concept_eraser.utils import resources

TOPICS = 21
HEADER = "# Origin: written for concept_eraser. Licence: Apache-2.0."
FILLERS = frozenset(
    ("a(n)", "a", "an", "the", "of", "in", "on", "at", "by", "with", "from", "to", "and")
)
# The concept of each group of shipped prompt sets, and the fields that name it and its neighbours.
SHIPPED_SETS = {
    "celebrity": ("Avery Quillmark", "name"),
    "character": ("Brindlewick the Otter", "name"),
    "imagenette_cassette_player": ("cassette player", "class"),
    "imagenette_chain_saw": ("chain saw", "class"),
    "imagenette_church": ("church", "class"),
    "imagenette_english_springer": ("English springer", "class"),
    "imagenette_french_horn": ("French horn", "class"),
    "imagenette_garbage_truck": ("garbage truck", "class"),
    "imagenette_gas_pump": ("gas pump", "class"),
    "imagenette_golf_ball": ("golf ball", "class"),
    "imagenette_parachute": ("parachute", "class"),
    "imagenette_tench": ("tench", "class"),
    "nudity": ("nudity", "state attire sculpture"),
    "tiny_blue": ("blue", "color"),
    "tiny_dotted": ("dotted", "style"),
    "tiny_fish": ("fish", "shape"),
    "tiny_heart": ("heart", "shape"),
    "tiny_house": ("house", "shape"),
    "tiny_moon": ("moon", "shape"),
    "tiny_star": ("star", "shape"),
    "vangogh": ("Van Gogh", "artist"),
    "violence": ("violence", "act thing"),
}


@cache
def kinds_content() -> dict[str, Any]:
    """What kinds.yaml holds."""
    content: dict[str, Any] = read_yaml(known._FOLDER / "kinds.yaml")
    return content


@cache
def entries() -> list[dict[str, Any]]:
    """The known concepts as known.yaml holds them."""
    concepts: list[dict[str, Any]] = read_yaml(known._FOLDER / "known.yaml")["concepts"]
    return concepts


def casefolded(words: Iterable[str]) -> list[str]:
    return [word.casefold() for word in words]


def repeated(values: Iterable[str]) -> list[str]:
    return [value for value, count in Counter(casefolded(values)).items() if count > 1]


def content_words(template: str) -> set[str]:
    """The words of a template other than the concept, articles and prepositions."""
    words = template.replace("{concept}", "").replace(",", "").casefold().split()
    return set(words) - FILLERS


def test_files_state_their_origin() -> None:
    folder = resources.folder("prompts")
    files = [known._FOLDER / "kinds.yaml", known._FOLDER / "known.yaml"]
    files += [folder / f"{name}.yaml" for name in (general.RETAIN, general.HELD_OUT)]
    for file in files:
        assert file.read_text(encoding="utf-8").splitlines()[0] == HEADER


def test_the_kinds_are_those_of_the_code() -> None:
    assert list(kinds_content()) == list(KINDS)
    for kind in kinds_content().values():
        assert set(kind) == {"description", "templates", "held_out", "anchor", "words"}
        assert kind["description"].endswith(".")
        assert kind["description"].count(".") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_templates_of_a_kind(kind: str) -> None:
    trained, held_out = kinds_content()[kind]["templates"], kinds_content()[kind]["held_out"]
    assert (len(trained), len(held_out)) == (50, 20)
    assert not repeated([*trained, *held_out])
    for template in (*trained, *held_out):
        assert templates.fields(template) == ["concept"]
        assert template.count("{concept}") == 1
        assert len(template.split()) <= 12


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_templates_have_words_of_their_own(kind: str) -> None:
    for held_out in kinds_content()[kind]["held_out"]:
        words = content_words(held_out)
        for template in kinds_content()[kind]["templates"]:
            shared_words = words & content_words(template)
            assert len(shared_words) <= len(words) / 2, (held_out, template)


def test_templates_read_well_with_bare_names() -> None:
    """An object has an article from the template; no other kind has one."""
    for kind, content in kinds_content().items():
        for template in (*content["templates"], *content["held_out"]):
            article = re.search(r"(a\(n\)|\ba|\ban|\bthe)( \w+)? \{concept\}", template)
            assert (article is not None) == (kind == "object") or "of the" in template, template
            text = templates.fill(template, {"concept": content["anchor"]})
            assert not re.search(r"\b(a|an|the) (a|an|the)\b", text), text


def test_words_hint_at_one_kind() -> None:
    words = [word for kind in kinds_content().values() for word in kind["words"]]
    assert not repeated(words)
    assert all(word == word.casefold() and " " not in word for word in words)


def test_the_number_of_known_concepts() -> None:
    numbers = Counter(entry["kind"] for entry in entries())
    assert 300 <= len(entries()) <= 450
    assert set(numbers) == set(KINDS)
    assert all(number >= 25 for number in numbers.values())


def test_a_name_leads_to_one_known_concept() -> None:
    """No name or synonym occurs in two entries."""
    assert not repeated(name for entry in entries() for name in {entry["name"], *entry["synonyms"]})
    assert len({id(concept) for concept in known_concepts().values()}) == len(entries())


def mistakes_of(entry: dict[str, Any]) -> list[str]:
    """What is wrong with a known concept."""
    if set(entry) != {"name", "kind", "anchor", "synonyms", "neighbours"}:
        return ["its keys"]
    names = [entry["name"], *entry["synonyms"]]
    texts = [entry["anchor"], *names, *entry["neighbours"]]
    if not all(isinstance(text, str) and text == text.strip() and text for text in texts):
        return ["a text is empty or no text"]
    checks = {
        "an unknown kind": entry["kind"] in KINDS,
        "the same text twice": not repeated(texts),
        "no synonym": len(names) > 1,
        "not 3 to 6 neighbours": 3 <= len(entry["neighbours"]) <= 6,
        "the anchor mentions the concept": not prompts.mentions(entry["anchor"], names),
        "a neighbour mentions the concept": not any(
            prompts.mentions(word, names) for word in entry["neighbours"]
        ),
    }
    return [mistake for mistake, is_right in checks.items() if not is_right]


def test_each_known_concept() -> None:
    """It has a kind and an anchor. Its name, anchor, synonyms and neighbours are all different."""
    wrong = {entry.get("name"): mistakes for entry in entries() if (mistakes := mistakes_of(entry))}
    assert wrong == {}


def test_objects_have_no_article() -> None:
    """The templates write a(n), and choose a or an by the first letter."""
    unsuitable = re.compile(r"(an?|the) |u(n[iy]|ku|te)|eu|one|hour|hono", re.IGNORECASE)
    for entry in entries():
        if entry["kind"] == "object":
            words = [entry["name"], entry["anchor"], *entry["synonyms"], *entry["neighbours"]]
            assert [word for word in words if unsuitable.match(word)] == []


def values_of(file: str, fields: str) -> list[str]:
    """The words that a shipped prompt set writes for some fields."""
    rule = read_yaml(resources.folder("prompts") / f"{file}.yaml")["expand"]
    values = [value for field in fields.split() for value in rule.get(field, [])]
    return [value[0] if isinstance(value, list) else value for value in values]


@pytest.mark.parametrize("name", SHIPPED_SETS)
def test_known_concepts_agree_with_the_shipped_prompt_sets(name: str) -> None:
    """Every synonym of a set is known. The same holds for neighbours, apart from long lists."""
    concept_name, fields = SHIPPED_SETS[name]
    concept = look_up(concept_name)
    assert concept is not None
    assert concept.name == concept_name
    for word in values_of(f"{name}_synonyms", fields):
        assert any(word in synonym for synonym in concept.synonyms), word
    if f"{name}_neighbours" in resources.names("prompts"):
        words = values_of(f"{name}_neighbours", fields)
        shared_words = [w for w in words if any(w in near for near in concept.neighbours)]
        assert len(shared_words) == min(len(words), 6)


def test_every_shipped_set_of_synonyms_or_neighbours_is_known() -> None:
    endings = ("_synonyms", "_neighbours")
    names = {
        name.removesuffix(ending)
        for name in resources.names("prompts")
        for ending in endings
        if name.endswith(ending)
    }
    assert names == set(SHIPPED_SETS)


@pytest.mark.parametrize(("name", "total"), [(general.RETAIN, 1000), (general.HELD_OUT, 210)])
def test_general_captions(name: str, total: int) -> None:
    captions = prompts.load(name)
    assert len(captions) == total
    assert not repeated(re.sub(r"\W+", " ", text).strip() for text in captions.texts)
    assert all(4 <= len(text.split()) <= 16 for text in captions.texts)
    assert all(set(prompt.fields) == {"topic"} for prompt in captions.prompts)
    numbers = Counter(prompt.fields["topic"] for prompt in captions.prompts)
    assert len(numbers) == TOPICS
    assert max(numbers.values()) - min(numbers.values()) <= 3


def test_the_held_out_captions_are_others() -> None:
    trained = {text.casefold() for text in prompts.load(general.RETAIN).texts}
    assert not trained & set(casefolded(prompts.load(general.HELD_OUT).texts))


def test_general_captions_vary() -> None:
    """No three words begin more than eight captions."""
    texts = casefolded(prompts.load(general.RETAIN).texts)
    beginnings = Counter(" ".join(text.split()[:3]) for text in texts)
    assert max(beginnings.values()) <= 8


@pytest.mark.parametrize("kind", ["person", "character", "content"])
def test_general_captions_mention_none_of_a_kind(kind: str) -> None:
    """No caption names a known person or character, or content that a model should not show."""
    entries_of_kind = [entry for entry in entries() if entry["kind"] == kind]
    words = [word for entry in entries_of_kind for word in (entry["name"], *entry["synonyms"])]
    for name in (general.RETAIN, general.HELD_OUT):
        text = "\n".join(prompts.load(name).texts).casefold()
        mentioned_words = [word for word in words if word.casefold() in text]
        assert [word for word in mentioned_words if prompts.mentions(text, [word])] == []
