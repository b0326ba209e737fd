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
import yaml
from huggingface_hub import parse_eval_result_entries
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError
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
        r"No attack was run on star \(shape\), moon \(shape\), tiny_fish\.",
        r"The controls \(of_the_moon, seed_search\) are no attacks\.",
        r"Not measured: the concept rate and the retain accuracy of tiny_fish\.",
    ):
        assert re.search(sentence, limits), sentence
    assert "> **Of what it forgot was not evaluated: tiny_fish.**" in text
    assert "**Not measured: tiny_fish.**" in text
    assert "**Not attacked: star (shape), moon (shape), tiny_fish.**" in text  # controls alone


def test_the_card_names_the_concept_that_each_attack_recovers(
    evaluated_run: tuple[Path, str], tmp_path: Path
) -> None:
    run = tmp_path / "attacked"
    shutil.copytree(evaluated_run[0], run)
    for file in run.glob("attacks/*/attack.json"):
        content = json.loads(file.read_text()) | {"family": "typed prompts"}
        file.write_text(json.dumps(content))
    text = concept_eraser.card(run)
    limits = text[text.index("## Limits") : text.index("## Intended use")]
    for sentence in (
        r"(Under the attack|None of the attacks).*seed_search.*star \(shape\)",
        r"(Under the attack|None of the attacks).*of_the_moon.*moon \(shape\)",
        r"No attack was run on tiny_fish\. Erased",
    ):
        assert re.search(sentence, limits), sentence


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


def test_the_numbers_in_the_form_of_the_hub(
    evaluated_run: tuple[Path, str], tmp_path: Path
) -> None:
    """The hub's own reader finds every finite number of both suites, and no other.

    Every task is one of the benchmark's, and every source is a file of the upload.
    """
    run, _ = evaluated_run
    arguments = ["card", str(run), "--benchmark", "me/erasure", "--results", str(tmp_path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    tasks = yaml.safe_load((tmp_path / "dataset" / "eval.yaml").read_text())["tasks"]
    uploads = push_to_hub(run, "me/three", benchmark="me/erasure", dry_run=True).uploads
    contents = {one.name: one.content for one in uploads}
    entries = []
    for suite, folder in (("star", run), ("tiny_five_moon", run / "evaluations/tiny_five_moon")):
        content = contents[f".eval_results/{suite}.yaml"]
        assert isinstance(content, bytes)
        rows = yaml.safe_load(content)
        without_source = [{k: v for k, v in row.items() if k != "source"} for row in rows]
        file = tmp_path / "model" / ".eval_results" / f"{suite}.yaml"
        assert yaml.safe_load(file.read_text()) == without_source
        entries += parse_eval_result_entries(rows)
        evaluation = json.loads((folder / "evaluation.json").read_text())
        measured = [
            row
            for row in evaluation["results"]
            if row["after"]["value"] is not None and ":" not in row["group"]
        ]
        key = evaluation["protocol_hash"]
        values = {
            one.task_id: one.value for one in entries if str(one.notes).endswith(f"protocol {key}")
        }
        assert len(values) == len(measured) > 3
        for row in measured:
            task = f"{suite}_{key[:8]}_{row['metric']}_{row['group']}"
            assert values[task] == pytest.approx(row["after"]["value"], abs=1e-6)
    attacks = [one.task_id for one in entries if "_asr_" in one.task_id]
    assert [re.sub("_[0-9a-f]{8}_", " ", one) for one in attacks] == [
        "star asr_seed_search",
        "tiny_five_moon asr_of_the_moon",
    ]
    assert {one.dataset_id for one in entries} == {"me/erasure"}
    assert {one.task_id for one in entries} <= {task["id"] for task in tasks}
    for one in entries:
        place = str(one.source_url).removeprefix("https://huggingface.co/me/three/blob/main/")
        assert place in contents


def test_no_number_is_written_if_the_card_is_not(
    evaluated_run: tuple[Path, str], tmp_path: Path
) -> None:
    numbers, card = tmp_path / "numbers", tmp_path / "README.md"
    card.write_text("mine\n")
    options = ["--benchmark", "me/erasure", "--results", str(numbers), "-o", str(card)]
    result = CliRunner().invoke(app, ["card", str(evaluated_run[0]), *options])
    assert "exists already; give another --output" in str(result.exception)
    assert not numbers.exists()


def test_numbers_in_the_form_of_the_hub_need_a_benchmark_and_a_measurement(
    run: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["card", str(run), "--benchmark", "me/erasure"])
    assert "--benchmark and --results belong together" in str(result.exception)
    options = ["--benchmark", "me/erasure", "--results", str(tmp_path / "hub")]
    call = ["card", str(run), *options, "--control", "tiny-sd-without-star"]
    assert "--control is for the card" in str(CliRunner().invoke(app, call).exception)
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("evaluation*", "attacks"))
    with pytest.raises(UserError, match="has no number of a suite or an attack"):
        concept_eraser.push_to_hub(bare, "me/three", benchmark="me/erasure", dry_run=True)
    with pytest.raises(UserError, match="is no hub id"):
        concept_eraser.push_to_hub(run, "me/three", benchmark="erasure", dry_run=True)
