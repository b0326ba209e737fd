"""The README is correct and short: commands exist, Python runs, images and links exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from concept_eraser.cli import quickstart
from tests.conftest import ROOT

TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.S)


def test_images_and_links_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(targets) >= 5
    for target in targets:
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make (\w+)", "\n".join(blocks("sh"))))
    assert {"quickstart", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_commands_parse(cli) -> None:
    """The real parser accepts every `concept-eraser` line of the README."""
    commands = [
        line
        for block in blocks("sh")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip().startswith("concept-eraser")
    ]
    assert len(commands) >= 5
    for line in commands:
        words = shlex.split(line.split("#")[0])[1:]
        result = cli(words[0], "--help")
        assert result.returncode == 0, line
        flags = {w.split("=")[0] for w in words if w.startswith("--")}
        assert all(flag in result.stdout for flag in flags), line


def test_the_python_example_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    example, in_diffusers = blocks("python")
    few = [*["training.steps=1", "training.batch_size=2", "generation.steps=1"], "forget.n=2"]
    call = 'concept_eraser.erase("fish", output="runs/fish")'
    few_images = f"images=2, overrides={[*few, 'retain.n=2']})"
    short = example.replace(call, f"{call[:-1]}, {few_images}")
    short = short.replace("evaluate(run.folder)", "evaluate(run.folder, n=2)")
    assert len(short) > len(example)
    exec(compile(short, "README.md", "exec"), {})
    assert (tmp_path / "runs" / "fish" / "report.html").is_file()
    (tmp_path / "concept_eraser").symlink_to(ROOT / "concept_eraser")  # as in the checkout
    exec(compile(in_diffusers, "README.md", "exec"), {})
    assert (tmp_path / "after.png").is_file()


def prose() -> list[str]:
    """The sentences of the README, without code, tables and links."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", TEXT, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=\* )|\n(?=#)", text)
    lines = [" ".join(one.split()) for one in paragraphs if not one.strip().startswith(("|", "#"))]
    sentences = [one for line in lines for one in re.split(r"(?<=[.:;?])\s+", line)]
    return [re.sub(r"[`*]", "", one) for one in sentences if re.search(r"\w", one)]


def syllables(word: str) -> int:
    """An estimate: groups of vowels, without a silent e at the end."""
    groups = len(re.findall(r"[aeiouy]+", word.lower()))
    return max(1, groups - (word.lower().endswith("e") and groups > 1))


def test_it_is_short_and_easy_to_read() -> None:
    """At most 150 lines, no sentence over 30 words, and a Flesch reading ease of at least 50."""
    assert len(TEXT.splitlines()) <= 150
    words_by_sentence = [re.findall(r"[A-Za-z][\w'-]*", sentence) for sentence in prose()]
    longest = max(words_by_sentence, key=len)
    assert len(longest) <= 30, " ".join(longest)
    words = [word for words in words_by_sentence for word in words]
    sentences = sum(bool(words) for words in words_by_sentence)
    ease = 206.835 - 1.015 * len(words) / sentences
    ease -= 84.6 * sum(map(syllables, words)) / len(words)
    assert ease >= 50, ease


def test_a_second_make_does_not_install_again() -> None:
    if not (ROOT / ".venv" / ".installed").exists():
        pytest.skip("this environment was not made by make")
    process = subprocess.run(["make", "-n", "quickstart"], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0
    assert "pip" not in process.stdout
    assert "concept-eraser quickstart" in process.stdout


def test_the_readmes_numbers_are_from_quickstarts_recipe() -> None:
    facts = json.loads((ROOT / "eval" / "results" / "quickstart.json").read_text())
    assert facts["recipe"] == quickstart.RECIPE
