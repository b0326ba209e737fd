"""Prompt sets: expansion, anchors, selection and refused inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from concept_eraser.data import prompts, tables
from concept_eraser.data.prompts import Prompt
from concept_eraser.recipes import recipe
from concept_eraser.targets import cross_attention_edit
from concept_eraser.targets.context import Context, resolve
from concept_eraser.utils import limits, resources
from concept_eraser.utils.errors import UserError
from tests.conftest import short


def write(folder: Path, text: str, name: str = "set.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_expansion_gives_words_and_values(tmp_path: Path) -> None:
    prompt_set = prompts.load(
        write(
            tmp_path,
            (
                "expand: {templates: ['a(n) {color} {shape}'], color: [orange, [crimson, "
                "red]], shape: star}"
            ),
        )
    )
    assert prompt_set.texts == ["an orange star", "a crimson star"]
    assert prompt_set.prompts[1].fields == {"color": "red", "shape": "star"}
    assert prompt_set.prompts[1].anchor_prompt({"shape": "octagon"}) == "a crimson octagon"
    assert prompt_set.prompts[1].anchor_prompt("a(n) {color} thing") == "a crimson thing"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("F.TXT", "a star\na moon: full\n"),
        ("F.Yaml", "prompts: [a star, 'a moon: full']\n"),
        ("F.CSV", "prompt,seed\na star,1\na moon: full,2\n"),
        ("F.TSV", "prompt\tseed\na star\t1\na moon: full\t2\n"),
        ("F.JSONL", '{"prompt": "a star"}\n{"prompt": "a moon: full"}\n'),
        ("F.Json", '["a star", "a moon: full"]'),
    ],
)
def test_the_case_of_an_ending_does_not_count(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, text, name)
    monkeypatch.chdir(tmp_path)
    assert resources.is_file_name("prompts", name)
    for source in (path, name, f"./{name}"):
        assert prompts.load(source).texts == ["a star", "a moon: full"]
    if Path(name).suffix.lower() in tables.SUFFIXES:
        assert prompts.load(write(tmp_path, f"file: {name}\n")).texts[0] == "a star"
        monkeypatch.setenv("CONCEPT_ERASER_DATA", str(tmp_path))
        assert prompts.load(write(tmp_path, f"file: data://{name}\n")).texts[0] == "a star"


def test_a_list_of_expansions_is_joined_without_duplicates(tmp_path: Path) -> None:
    text = """
expand:
- {templates: ['a {color} {shape}'], color: [red, blue], shape: [star]}
- {templates: ['a {color} {shape}', 'a {shape}'], color: [blue], shape: [star, circle]}
"""
    prompt_set = prompts.load(write(tmp_path, text))
    assert prompt_set.texts == ["a red star", "a blue star", "a blue circle", "a star", "a circle"]
    assert prompt_set.prompts[2].anchor_prompt({"shape": "moon"}) == "a blue moon"
    both = """
expand:
- {templates: ['{a}'], b: [x]}
- {templates: ['{c}'], b: [x]}
"""
    with pytest.raises(UserError, match=r"(?s)2 mistakes.*'a'.*'c'"):
        prompts.load(write(tmp_path, both))


def test_the_size_of_a_list_of_expansions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [{"templates": "x"}] * (limits.PRODUCTS + 1)
    with pytest.raises(UserError, match=f"at most {limits.PRODUCTS} products"):
        prompts.load({"expand": many})
    monkeypatch.setattr(limits, "ROWS", 20)
    products = [{"templates": f"{mark} {{a}}", "a": list("abcdefgh")} for mark in "xyz"]
    assert len(prompts.load({"expand": products[:2]})) == 16
    with pytest.raises(UserError, match="more than 20 prompts"):
        prompts.load({"expand": products})


def test_rows_and_plain_text(tmp_path: Path) -> None:
    rows = prompts.load(write(tmp_path, "prompts: [a tench, {text: a church, class: church}]"))
    assert rows.prompts == (Prompt("a tench"), Prompt("a church", {"class": "church"}))
    assert prompts.load({"prompts": [{"text": ""}]}).prompts == (Prompt(""),)
    lines = prompts.load(write(tmp_path, "# comment\na tench\n\n a church \n", "set.txt"))
    assert lines.texts == ["a tench", "a church"]
    odd = "a\u2028tench\r\na\x85church\ra\x0cstar, red\n"  # three lines, as editors count
    assert len(prompts.load(write(tmp_path, odd, "odd.txt"))) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompts: []", "empty"),
        ("about: nothing", "empty"),
        ("prompts: [3]", "expected a prompt"),
        ("prompts: [{text: '', shape: star}]", "expected a prompt"),
        ("- a", "expected a mapping"),
        ("expand: {templates: ['{colour} x'], color: [red]}", "'colour'"),
        ("prompts: [", "no valid YAML"),
    ],
)
def test_malformed_sets(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prompts.load(write(tmp_path, text))


def test_anchors_that_cannot_be_filled() -> None:
    with pytest.raises(UserError, match="needs the field 'color'"):
        Prompt("a star").anchor_prompt("a {color} circle")
    with pytest.raises(UserError, match="has none; write the anchor as a text"):
        Prompt("a star").anchor_prompt({"shape": "circle"})
    with pytest.raises(UserError, match="changes nothing"):
        prompts.load("tiny_star").prompts[0].anchor_prompt({"size": "big"})


def test_overlap_is_refused_with_an_example() -> None:
    with pytest.raises(UserError, match=r"1 prompts are in both.*'a red star'"):
        prompts.require_disjoint(
            prompts.load(["a red star"]), prompts.load(["a red star", "a house"])
        )


def test_take_is_seeded_and_even() -> None:
    many = prompts.load(list("abcdefghijklmnopqrst"))
    assert many.take(30, 1) != many.take(30, 2)
    some = prompts.load(["a", "b", "c"])
    assert some.take(7, 1) == some.take(7, 1)
    assert sorted(some.take(6, 0).texts) == ["a", "a", "b", "b", "c", "c"]


def test_shipped_sets_name_origin_and_licence_and_do_not_overlap() -> None:
    names = resources.names("prompts")
    assert len(names) >= 12
    for name in names:
        text = resources.find("prompts", name).read_text()
        assert "Licence:" in text.splitlines()[0], name
        if "\nfile: " not in text:  # tables elsewhere are tested in test_tables.py
            assert len(prompts.load(name)) >= 100, name
    star = prompts.load("tiny_star")
    for other in ("tiny_star_synonyms", "tiny_rest", "tiny_star_neighbours"):
        prompts.require_disjoint(star, prompts.load(other))
    assert not any(
        " star" in text and "five-pointed" not in text
        for text in prompts.load("tiny_star_synonyms").texts
    )


@pytest.mark.parametrize(
    ("anchor", "suggestions"),
    [
        ({"shape": "circel"}, ["circle"]),
        ({"shape": "circle", "color": "gren"}, ["green"]),
        ({"shape": "circle"}, []),
        ({"shape": "spaceship"}, []),  # a word that no prompt has
        ({"shape": "stars"}, []),  # similar to the replaced word, which is no mistake
        ("a circel", []),
        (None, []),
    ],
)
def test_a_mistyped_anchor_is_noticed(anchor: Any, suggestions: list[str]) -> None:
    messages = prompts.slips(
        {"forget": anchor},
        {"forget": prompts.load("tiny_star"), "retain": prompts.load("tiny_rest")},
    )
    assert len(messages) == len(suggestions)
    assert all(
        f"did you mean {word!r}?" in message
        for word, message in zip(suggestions, messages, strict=True)
    )


def test_values_that_are_numbers_are_compared_as_words(tmp_path: Path) -> None:
    numbers = prompts.load(
        write(tmp_path, "expand: {templates: ['{number} stars'], number: [[3, three], [5, five]]}")
    )
    assert prompts.slips({"forget": {"number": 4}}, {"forget": numbers, "retain": numbers}) == []  # type: ignore[dict-item]


def test_a_mistyped_anchor_is_logged_before_training(
    shared_tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for changes in (
        {},
        {"method": {"name": "uce"}, "retain__n": 400, "trainable__select": "cross_attention_kv"},
    ):
        caplog.clear()
        star_recipe = recipe.load(short(forget__anchor={"shape": "circel"}, **changes))
        if changes:
            cross_attention_edit.projection_request(shared_tiny, star_recipe, "all", {})
        else:
            resolve(Context(star_recipe, shared_tiny))
        assert "did you mean 'circle'?" in caplog.text


@pytest.mark.parametrize(
    "template",
    ["{a.b}", "{a[0]}", "{a!r}", "{a:>1000000000}", "{}", "{0}", "{", "}", "{a!}", "{ }", "{{}"],
)
def test_templates_and_anchors_fill_in_plain_names_only(template: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the template .*(braces|brace)"):
        prompts.load(write(tmp_path, f"expand: {{templates: ['{template}'], a: [x]}}"))
    with pytest.raises(UserError, match=r"the template"):
        Prompt("a star", {"a": "x"}).anchor_prompt(template)
    with pytest.raises(UserError, match=r"the template"):
        recipe.load(short(forget__anchor=template))


def test_doubled_braces_are_braces(tmp_path: Path) -> None:
    prompt_set = prompts.load(
        write(
            tmp_path, "expand: {templates: ['{{{a}}} {{a}} {my-field 2}'], a: [x], my-field 2: [y]}"
        )
    )
    assert prompt_set.texts == ["{x} {a} y"]
    assert Prompt("a", {"a": "x"}).anchor_prompt("{{{a}}}") == "{x}"


def test_all_mistakes_in_a_set_are_reported_at_once(tmp_path: Path) -> None:
    text = """
about: [a]
promts: [x]
prompts: [3, {text: ' '}, {text: b, seed: many}, {text: c, x: {}}]
expand: {templates: ['{shape} {colour}', '{}'], shape: [[a], {b: c}], color: null}
file: ../table.csv
where: [x]
"""
    with pytest.raises(UserError) as error_info:
        prompts.load(write(tmp_path, text))
    lines = str(error_info.value).splitlines()
    assert lines[0].startswith(f"{len(lines) - 1} mistakes in ")
    for words in (
        "about: expected",
        "'promts'; did you mean 'prompts'?",
        "prompt 1: expected a prompt",
        "prompt 2: expected",
        "prompt 3: seed",
        "prompt 4: x",
        "color",
        "expand.shape, value 1",
        "expand.shape, value 2",
        "template 2: the template '{}'",
        "leads out",
        "where: expected",
    ):
        assert any(words in line for line in lines), (words, lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("expand: [a]", "expand: expected a mapping"),
        ("expand: {templates: {a: b}}", "templates is a list of texts"),
        ("expand: {color: [red]}", "templates is a list of texts"),
        ("expand: {templates: [3]}", "templates is a list of texts"),
        ("expand: {templates: ['{templates} x']}", "'templates', which has no list"),
        ("expand: {templates: [' {a} '], a: ['']}", "without any text"),
        ("expand: {templates: ['{a}'], a: [2020-01-01]}", "put a date in quotes"),
        ("expand: {templates: ['{a}'], a: [[a, b, c]]}", "a list stands for"),
        ("prompts: {a: b}", "expected a list"),
        ('prompts: ["a\\0b"]', "null byte"),
        ('prompts: ["\\ud800"]', "half of a character|no valid YAML"),
        ("where: {a: b}", "no `file`"),
        ("file: [a]", "file: expected the path"),
        ("file: words.txt", "is no table"),
        ("file: /etc/passwd.csv", "leads out"),
        ("file: hf://a/b/../../c.csv", "no address of a file on the hub"),
        ("file: hf://a/b", "names no file"),
        ("{file: t.csv, where: {a: {b: c}}}", "a word, a number or a comparison"),
        ("{file: t.csv, where: {a: '> x'}}", "compares with no number"),
        ("{file: t.csv, where: {a: '> 1.2.3'}}", "compares with no number"),
    ],
)
def test_hostile_sets_are_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        prompts.load(write(tmp_path, text))


def test_the_size_of_an_expansion_is_known_before_it_is_made(tmp_path: Path) -> None:
    import time

    letters = "abcdefghijklmnop"
    values = "".join(f", {letter}: [{', '.join(map(str, range(40)))}]" for letter in letters)
    wide = (
        f"expand: {{templates: ['{' '.join('{' + letter + '}' for letter in letters)}']{values}}}"
    )
    long = f"expand: {{templates: ['{'{a} ' * 1000}'], a: [{'x' * 5000}]}}"
    heavy = (
        f"expand: {{templates: ['{{a}} {{b}} {{c}}'], a: {[*range(100)]}, b: "
        f"{[*range(100)]}, c: [{'x' * 9000}, {'y' * 9000}]}}"
    )
    start = time.process_time()
    for text, words in (
        (wide, "prompts; at most 200,000 are made"),
        (long, "characters; at most 10,000"),
        (heavy, "characters in all"),
    ):
        with pytest.raises(UserError, match=words):
            prompts.load(write(tmp_path, text))
    assert time.process_time() - start < 2
    with pytest.raises(UserError, match="at most 10,000 are read"):
        prompts.load(["x" * 10_001])


def test_a_sets_table_lies_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("prompt\nsecret\n")
    inner = tmp_path / "theirs"
    (inner / "tables").mkdir(parents=True)
    (inner / "tables" / "own.csv").write_text("prompt\nfine\n")
    (inner / "link.csv").symlink_to(tmp_path / "secret.csv")
    (inner / "near.csv").symlink_to(inner / "tables" / "own.csv")
    assert prompts.load(write(inner, "file: tables/own.csv")).texts == ["fine"]
    assert prompts.load(write(inner, "file: near.csv")).texts == ["fine"]
    for file in (
        "../secret.csv",
        str(tmp_path / "secret.csv"),
        "tables/../../secret.csv",
        "link.csv",
    ):
        with pytest.raises(UserError, match="leads out of the set's folder"):
            prompts.load(write(inner, f"file: {file}"))
