"""The documents: paths exist, sentences are short, and retired terms are not used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").is_file())
DESIGN = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "design").glob("*.md"))]
RENDERED_PAGES = {"licences.md"}  # a command writes it from other sources
GUIDES = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in RENDERED_PAGES]
DOCUMENTS = [*DESIGN, *GUIDES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
TOP = "concept_eraser|studies|tests|tools|docs|eval|pipelines|prompts|benchmarks|examples"
PATHS = re.compile(rf"(?<![\w/.-])(?:{TOP})/[\w./-]*")
MODULES = re.compile(r"python -m ((?:studies|tests|benchmarks|tools)[\w.]*)")
LINKS = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
LONGEST_SENTENCE = 30  # words
RETIRED_TERMS = re.compile(
    r"\b((?<!cassette )players?|boards?|pictures?|drawings?|surely|told|(?<!Nash )bargain\w*"
    r"|forecasts?|none share|concept share)\b",
    re.I,
)


def _relative_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _without_code(text: str) -> str:
    """Prose only: no rendered tables and no code blocks; code in a line counts as one word."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    text = re.sub(r"^ {4,}.*$", "", text, flags=re.M)
    return re.sub(r"`[^`]+`", "code", text)


def _sentences(text: str) -> list[str]:
    """Sentences, headings, list items and table cells, as one line each."""
    plain = re.sub(r"\]\([^)]*\)", "]", _without_code(text))
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.|#+|\|)\s)|\|", plain)
    lines = (" ".join(block.split()) for block in blocks)
    return [sentence for line in lines for sentence in re.split(r"(?<=[.!?])\s+", line) if sentence]


@pytest.mark.parametrize("path", DESIGN, ids=_relative_name)
def test_paths_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    paths = {match.rstrip(".") for match in PATHS.findall(text)}
    missing = sorted(name for name in paths if not (ROOT / name).exists())
    assert not missing, (
        f"{_relative_name(path)} names paths that do not exist: {', '.join(missing)}"
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=_relative_name)
def test_modules_and_links_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    modules = {name: ROOT / name.replace(".", "/") for name in MODULES.findall(text)}
    missing = [
        name
        for name, file in modules.items()
        if not (file.with_suffix(".py").exists() or file.is_dir())
    ]
    missing += [link for link in LINKS.findall(text) if not (path.parent / link).exists()]
    assert not missing, f"{_relative_name(path)} names what does not exist: {', '.join(missing)}"


def test_every_design_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "design" / "README.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs" / "design").glob("*.md")} - {"README.md"}
    assert pages == {link for link in LINKS.findall(index) if "/" not in link}


def test_lengths() -> None:
    lines = {
        _relative_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in DESIGN
    }
    assert lines.pop("CONTRIBUTING.md") <= 120
    assert {name: n for name, n in lines.items() if not 10 <= n <= 40} == {}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_relative_name)
def test_sentences_are_short(path: Path) -> None:
    sentences = _sentences(path.read_text(encoding="utf-8"))
    long = [sentence for sentence in sentences if len(sentence.split()) > LONGEST_SENTENCE]
    assert not long, f"{_relative_name(path)}: more than {LONGEST_SENTENCE} words: {long}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_relative_name)
def test_retired_terms_are_not_used(path: Path) -> None:
    terms = sorted(
        {
            word.lower()
            for word in RETIRED_TERMS.findall(_without_code(path.read_text(encoding="utf-8")))
        }
    )
    assert not terms, (
        f"{_relative_name(path)} uses {', '.join(terms)}; "
        "the terms are image, objective, leaderboard, ..."
    )


def test_comments_of_the_data_files_use_the_same_terms() -> None:
    wrong = {}
    for path in [
        file
        for folder in ("pipelines", "prompts", "eval")
        for file in (ROOT / folder).glob("*.yaml")
    ]:
        comments = re.findall(r"(?:^|\s)# (.*)$", path.read_text(encoding="utf-8"), flags=re.M)
        if terms := RETIRED_TERMS.findall("\n".join(comments)):
            wrong[_relative_name(path)] = terms
    assert not wrong


def test_the_checks_detect_violations() -> None:
    """Long sentences in paragraphs, lists and cells are detected; code and rendered tables are
    not.
    """
    long = "word " * 31
    for text in (long, f"* {long}", f"| a | {long} |", f"Short. {long}"):
        assert any(len(sentence.split()) > LONGEST_SENTENCE for sentence in _sentences(text))
    for text in (
        f"```\n{long}\n```",
        f"    {long}",
        f"`{long}`",
        f"<!-- a -->\n{long}\n<!-- /a -->",
    ):
        assert all(len(sentence.split()) <= LONGEST_SENTENCE for sentence in _sentences(text))
    assert PATHS.findall("see `concept_eraser/methods/base.py` and my/tests/x.py") == [
        "concept_eraser/methods/base.py"
    ]
    assert RETIRED_TERMS.findall(_without_code("a `player` of the board")) == ["board"]
