"""A run of three concepts, of which two are evaluated and attacked.

No result is overwritten, each number belongs to its concept, and the concept without an evaluation
is named.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import concept_eraser
from concept_eraser.cli.main import app
from concept_eraser.exporting.hub import push_to_hub
from concept_eraser.reporting import run_results
from tests.conftest import short

ANCHORS = {"star": "circle", "moon": "cross", "fish": "tree"}


def run_command(*arguments: str) -> str:
    """Run a command quietly and return its output."""
    result = CliRunner().invoke(app, [*arguments, "-q"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("concepts") / "three"
    forget = [
        {"prompts": f"tiny_{a}", "loss": "anchor", "anchor": {"shape": b}, "n": 4}
        for a, b in ANCHORS.items()
    ]
    concept_eraser.erase(
        short(model="tiny-sd", training__steps=1, retain__prompts="tiny_five_rest", forget=forget)
        | {"concepts": "together"},
        output=folder,
    )
    return folder


@pytest.fixture(scope="module")
def evaluated_run(run: Path) -> tuple[Path, str]:
    """The run after two suites and two attacks, and the output of the second evaluation."""
    run_command("evaluate", str(run), "--suite", "tiny_five_star", "-n", "2")
    output = run_command("evaluate", str(run), "--suite", "tiny_five_moon", "-n", "2")
    run_command(
        "attack",
        str(run),
        "--suite",
        "tiny_five_star",
        "-a",
        "seed_search",
        "-n",
        "2",
        "--set",
        "tries=1",
    )
    run_command(
        "attack",
        str(run),
        "--suite",
        "tiny_five_moon",
        "-a",
        "seed_search",
        "-n",
        "2",
        "--set",
        "tries=1",
        "-o",
        str(run / "attacks" / "of_the_moon"),
    )
    return run, output


def test_a_second_suite_is_kept_beside_the_first(
    evaluated_run: tuple[Path, str], tmp_path: Path
) -> None:
    run, output = evaluated_run
    beside = run / "evaluations" / "tiny_five_moon"
    for folder, concept in ((run, "star"), (beside, "moon")):
        assert json.loads((folder / "evaluation.json").read_text())["protocol"]["concept"] == {
            "shape": concept
        }
        assert (folder / "report.html").is_file()
    assert "is of another suite and was not replaced" in output
    assert "evaluations/tiny_five_moon/evaluation.json" in output.replace("\n", "")
    numbers = (run / "evaluation.json").read_text()
    run_command("evaluate", str(run), "--suite", "tiny_five_moon", "-n", "3")
    assert (run / "evaluation.json").read_text() == numbers
    assert (
        json.loads((beside / "evaluation.json").read_text())["protocol"]["groups"]["direct"]["n"]
        == 3
    )
    run_command("evaluate", str(run), "--suite", "tiny_five_star", "-n", "3")
    assert (run / "evaluation.json").read_text() != numbers, (
        "a suite again, with more images, is written over its own"
    )
    assert sorted(p.name for p in (run / "evaluations").iterdir()) == ["tiny_five_moon"]
    result = CliRunner().invoke(app, ["compare", str(beside), str(beside / "evaluation.json")])
    assert "given twice" in str(result.exception)


def test_a_report_shows_the_attacks_on_its_own_concept(evaluated_run: tuple[Path, str]) -> None:
    run, _ = evaluated_run
    victim = (
        json.loads((run / "evaluation.json").read_text())["models"]["after"]
        .rsplit(" (", 1)[-1]
        .rstrip(")")
    )
    for concept, mine, other in (
        ("star", "seed_search", "of_the_moon (for the concept moon)"),
        ("moon", "seed_search", "seed_search (for the concept star)"),
    ):
        attacks, unlike = run_results.attacks_of(run, victim, [], {"shape": concept})
        assert [one["protocol"]["suite"]["concept"]["shape"] for one in attacks.values()] == [
            concept
        ]
        assert (list(attacks), unlike) == ([mine], [other])
    page = (run / "report.html").read_text()
    run_command("report", str(run))
    page = (run / "report.html").read_text()
    assert "for the concept moon" in page


def test_the_card_names_every_concept_and_what_was_not_evaluated(
    evaluated_run: tuple[Path, str],
) -> None:
    run, _ = evaluated_run
    text = concept_eraser.card(run)
    assert "after erasing **star (shape), moon (shape), tiny_fish** with" in text
    star, moon = text.index("### star (shape)"), text.index("### moon (shape)")
    for place, folder in ((star, run), (moon, run / "evaluations" / "tiny_five_moon")):
        assert (
            text.index(json.loads((folder / "evaluation.json").read_text())["protocol_hash"])
            > place
        )
    assert text.index(json.loads((run / "evaluation.json").read_text())["protocol_hash"]) < moon
    assert "| attack | concept | family | options |" in text
    for concept in ("star", "moon"):
        assert f"| seed_search | {concept} (shape) | control |" in text
    limits = text[text.index("## Limits") : text.index("## Intended use")]
    assert "the concept returns" not in limits
    for sentence in (
        r"(Under the attack|None of the attacks).*seed_search.*star \(shape\)",
        r"(Under the attack|None of the attacks).*of_the_moon.*moon \(shape\)",
        r"No attack was run on tiny_fish\.",
        r"Not measured: the concept rate and the retain accuracy of tiny_fish\.",
    ):
        assert re.search(sentence, limits), sentence
    assert "> **Of what it forgot was not evaluated: tiny_fish.**" in text
    assert "**Not measured: tiny_fish.**" in text
    assert "**Not attacked: tiny_fish.**" in text


def test_without_any_measurement_every_concept_is_named(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("evaluation*", "attacks", "pipeline"))
    text = concept_eraser.card(bare)
    assert "**tiny_star, tiny_moon, tiny_fish**" in text
    assert "the retain accuracy of tiny_star, tiny_moon, tiny_fish." in text
    assert "No attack was run on tiny_star, tiny_moon, tiny_fish." in text
    assert "evaluate runs/bare --suite SUITE" in text


def test_an_evaluation_of_other_weights_is_left_out(
    evaluated_run: tuple[Path, str], tmp_path: Path
) -> None:
    copy = tmp_path / "copied"
    shutil.copytree(evaluated_run[0], copy, ignore=shutil.ignore_patterns("pipeline"))
    path = copy / "evaluations" / "tiny_five_moon" / "evaluation.json"
    content = json.loads(path.read_text())
    path.write_text(
        json.dumps({**content, "models": {**content["models"], "after": "somebody (0123456789)"}})
    )
    text = concept_eraser.card(copy)
    assert "### moon" not in text
    assert "other weights than those evaluated: tiny_five_moon" in text


def test_every_suite_is_uploaded(evaluated_run: tuple[Path, str]) -> None:
    names = [one.name for one in push_to_hub(evaluated_run[0], "me/three", dry_run=True).uploads]
    assert {
        "concept_eraser/evaluation.json",
        "concept_eraser/evaluations/tiny_five_moon/evaluation.json",
    } <= set(names)
