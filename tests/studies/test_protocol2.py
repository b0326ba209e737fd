"""Protocol 2: its files are what its function makes, and its splits are disjoint."""

from __future__ import annotations

import itertools
from collections import defaultdict
from functools import cache

import pytest

from concept_eraser.data import prompts
from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.judges.tiny import TinyJudge
from concept_eraser.tiny import painter
from concept_eraser.utils import resources
from studies import protocol2
from studies.protocol2 import CONCEPTS, SPLITS

ATTRIBUTES = ("shape", "color", "style")


@cache
def sets(concept: str, split: str) -> dict[str, tuple[Prompt, ...]]:
    """The prompts of a split as the package reads the shipped files, by the name of their group."""
    if split == "train":
        return {
            "direct": prompts.load(f"protocol2_{concept}").prompts,
            "retained": prompts.load(f"protocol2_{concept}_retain").prompts,
        }
    suite = suites.load(f"protocol2_{concept}" + ("_test" if split == "test" else ""))
    return {name: prompts.load(group.prompts).prompts for name, group in suite.groups.items()}


def every(concept: str, split: str) -> list[Prompt]:
    return [prompt for rows in sets(concept, split).values() for prompt in rows]


def require_disjoint(parts: dict[str, set[object]], *, complete: bool = True) -> None:
    for one, other in itertools.combinations(SPLITS, 2):
        assert not parts[one] & parts[other], (one, other)
    assert all(parts.values()) or not complete


def test_the_files_are_what_the_function_makes() -> None:
    names = set()
    for path, text in protocol2.files():
        assert path.read_text() == text, f"run python -m studies.protocol2: {path.name}"
        names.add(path)
    shipped = [
        path
        for kind in ("prompts", "eval")
        for path in resources.folder(kind).glob("protocol2_*.yaml")
    ]
    assert set(shipped) == names
    assert len(names) == 24
    assert list(protocol2.files()) == list(protocol2.files())


def test_the_concepts_of_development_and_of_the_report_are_others() -> None:
    assert not set(protocol2.DEVELOPMENT) & set(protocol2.REPORTED)
    assert sorted(protocol2.DEVELOPMENT.values()) == sorted(protocol2.REPORTED.values())


@pytest.mark.parametrize("concept", CONCEPTS)
def test_the_splits_share_no_template_no_combination_and_no_prompt(concept: str) -> None:
    attribute = CONCEPTS[concept]
    others = [name for name in ATTRIBUTES if name != attribute]
    texts, templates, combinations = {}, {}, {}
    for split in SPLITS:
        rows = every(concept, split)
        assert all(prompt.template is not None for prompt in rows)
        texts[split] = {prompt.text for prompt in rows}
        templates[split] = {prompt.template for prompt in rows}
        combinations[split] = {tuple(prompt.fields[name] for name in others) for prompt in rows}
    for parts in (texts, templates, combinations):
        require_disjoint(parts)


@pytest.mark.parametrize("concept", CONCEPTS)
def test_the_splits_share_no_synonym(concept: str) -> None:
    attribute = CONCEPTS[concept]
    words = {
        split: {row.words[attribute] for row in sets(concept, split).get("synonyms", ())}
        for split in SPLITS
    }
    require_disjoint(words, complete=False)
    assert not words["train"]
    everything = set().union(*words.values())
    assert concept not in everything
    known = {**painter.SYNONYMS, **painter.COLOR_SYNONYMS, **painter.STYLE_WORDS}[concept]
    assert everything == set(known) - {concept}
    assert words["test"] or concept == "striped"


@pytest.mark.parametrize("concept", CONCEPTS)
def test_whole_concepts_are_held_out_of_the_retain_set(concept: str) -> None:
    attribute = CONCEPTS[concept]
    train = sets(concept, "train")
    shapes = {row.fields["shape"] for row in train["retained"]}
    assert shapes | {row.fields["shape"] for row in train["direct"]} == set(
        protocol2.SHAPES["train"]
    )
    values = {split: {row.fields[attribute] for row in every(concept, split)} for split in SPLITS}
    trained = {row.fields[attribute] for row in train["retained"]}
    assert concept not in trained
    unseen = {row.fields["shape"] for row in sets(concept, "test")["unseen"]}
    held_out = {row.fields["shape"] for row in sets(concept, "select")["held_out"]}
    assert (len(unseen), len(held_out)) == (3, 2)
    assert not unseen & held_out
    assert not (unseen | held_out) & shapes
    # no suite to choose settings by has them
    assert not unseen & {row.fields["shape"] for row in every(concept, "select")}
    if attribute != "shape":
        near = {row.fields[attribute] for row in sets(concept, "test")["neighbours"]}
        assert set(protocol2.NEIGHBOURS[concept]) <= near
        assert not near & (values["train"] | values["select"])


def test_the_three_unseen_shapes_are_in_no_retain_set_of_any_concept() -> None:
    rows = [row for concept in CONCEPTS for row in sets(concept, "train")["retained"]]
    assert not {row.fields["shape"] for row in rows} & set(protocol2.SHAPES["test"])
    assert {shape for split in SPLITS for shape in protocol2.SHAPES[split]} == set(painter.SHAPES)


@pytest.mark.parametrize("concept", CONCEPTS)
def test_every_split_has_every_value_and_enough_prompts(concept: str) -> None:
    """Else a split would differ from the others in more than its combinations."""
    attribute = CONCEPTS[concept]
    for split in SPLITS:
        rows = sets(concept, split)["direct"]
        assert {row.fields[attribute] for row in rows} == {concept}
        counts: dict[str, set[str]] = defaultdict(set)
        for row in rows:
            for name in (*ATTRIBUTES, "background"):
                counts[name].add(row.fields.get(name, "none"))
        for name in ATTRIBUTES:
            expected = set(protocol2.SHAPES["train"] if name == "shape" else protocol2.VALUES[name])
            assert counts[name] == ({concept} if name == attribute else expected), (split, name)
        assert counts["background"] == {*painter.BACKGROUNDS, "none"}
        assert len(rows) >= (48 if split == "test" else 45)


def test_the_combinations_are_a_latin_square() -> None:
    for first, second in itertools.product(range(4), repeat=2):
        row = [protocol2.combination_split(first, column) for column in range(second, second + 4)]
        assert sorted(row) == ["select", "test", "train", "train"]


@pytest.mark.parametrize("concept", CONCEPTS)
def test_no_select_or_test_prompt_is_one_of_protocol_1(concept: str) -> None:
    old = {
        text
        for name in resources.names("prompts")
        if name.startswith("tiny_")
        for text in prompts.load(name).texts
    }
    for split in ("select", "test"):
        assert not old & {row.text for row in every(concept, split)}


@pytest.mark.parametrize("concept", CONCEPTS)
def test_the_judge_knows_every_value_and_no_retain_prompt_states_the_concept(concept: str) -> None:
    attribute, classes = CONCEPTS[concept], TinyJudge.classes
    for split in SPLITS:
        for name, rows in sets(concept, split).items():
            is_forgotten = name in ("direct", "synonyms")
            for row in rows:
                assert all(value in classes[key] for key, value in row.fields.items())
                assert (row.fields[attribute] == concept) == is_forgotten
            if not is_forgotten:
                assert not [row.text for row in rows if prompts.mentions(row.text, [concept])]
