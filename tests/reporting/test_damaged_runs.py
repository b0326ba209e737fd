"""Run folders that another person or a failing disk has changed.

The error is one sentence that names the file and the next step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from concept_eraser.exporting import hub, model_card
from concept_eraser.reporting import compare, run_results, write
from concept_eraser.utils.errors import UserError
from tests import shared_drawing
from tests.campaigns import targets_runs
from tests.campaigns.targets_runs import ATTACK, DONE_FILE, ENVIRONMENT, EVALUATION, LOG


def with_value(content: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """A copy with another value at `a.b.0.c`; None removes it."""
    copy = json.loads(json.dumps(content))
    inner = copy
    *parents, last = place.split(".")
    for key in parents:
        inner = inner[int(key) if key.isdigit() else key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return copy


def run_with(folder: Path, name: str, content: Any) -> Path:
    return targets_runs._run_folder(
        folder, name, content if isinstance(content, bytes) else json.dumps(content).encode()
    )


READERS: dict[str, Callable[[Path], Any]] = {
    "evaluation.json": run_results.read_evaluation,
    "attacks/random_tokens/attack.json": lambda run: list(run_results.read_attacks(run)),
    "done.json": model_card.finished_run,
    "environment.json": model_card.card,
}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("evaluation.json", [], "expected a mapping, found list"),
        ("evaluation.json", b"\x00\xff", "no text in UTF-8"),
        ("evaluation.json", b"[" * 100_000, "nested deeper"),
        (
            "evaluation.json",
            with_value(EVALUATION, "models.after", None),
            "models.after is missing",
        ),
        (
            "evaluation.json",
            with_value(EVALUATION, "protocol.groups", "x"),
            "protocol.groups is 'x', not a mapping",
        ),
        (
            "evaluation.json",
            with_value(EVALUATION, "protocol.concept", {}),
            "protocol.concept is {}, not a mapping of one entry",
        ),
        (
            "evaluation.json",
            with_value(EVALUATION, "results.0.after.value", "many"),
            "results[0].after.value is 'many', not a whole number or a number",
        ),
        (
            "evaluation.json",
            with_value(EVALUATION, "results.0.after.n", 10**40),
            "not a number below 1e15",
        ),
        (
            "evaluation.json",
            with_value(EVALUATION, "results.0.after", {}),
            "results[0].after.value is missing",
        ),
        (
            "evaluation.json",
            with_value(EVALUATION, "environment", []),
            "environment is [], not a mapping",
        ),
        (
            "attacks/random_tokens/attack.json",
            {"protocol": {}, "rates": {}},
            "protocol.attack is missing",
        ),
        (
            "attacks/random_tokens/attack.json",
            with_value(ATTACK, "rates.asr", 1),
            "rates.asr is 1, not a mapping",
        ),
        (
            "attacks/random_tokens/attack.json",
            with_value(ATTACK, "curves", [[{"round": "x", "fell": 1}]]),
            "curves[0][0].round is 'x'",
        ),
        ("done.json", {}, "seconds is missing"),
        ("done.json", [], "expected a mapping, found list"),
        (
            "done.json",
            with_value(DONE_FILE, "trained_parameters", "x"),
            "trained_parameters is 'x', not a whole number",
        ),
        (
            "environment.json",
            with_value(ENVIRONMENT, "prompts", [1]),
            "prompts is [1], not a mapping",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: Any, message: str) -> None:
    run = run_with(tmp_path, name, content)
    with pytest.raises(UserError) as error_info:
        READERS[name](run)
    assert message in str(error_info.value)
    assert name in str(error_info.value)
    assert len(str(error_info.value)) < 1000
    assert "\n" not in str(error_info.value)


@pytest.mark.parametrize(
    "log",
    [
        bytes(range(256)),
        b'{"step": "x", "losses": []}\n[1]\n',
        b'{"step": 1, "losses": {"forget": "x"}, "cosine": {}, "norms": []}\n',
    ],
)
def test_a_binary_log_gives_no_figure(tmp_path: Path, log: bytes) -> None:
    from concept_eraser.reporting import plots

    rows = write._facts(run_with(tmp_path, "log.jsonl", log)).log
    plots.curves(rows)
    assert plots.conflict(rows) is None


def test_two_logs_have_two_figures() -> None:
    from concept_eraser.reporting import plots

    norms = {"retain": 1.0, "forget": 2.0}
    logs = [[{"cosine": c, "norms": norms, "weights": norms}] * 2 for c in (-0.5, 0.5)]
    with shared_drawing.each_drawn():
        figures = [plots.conflict(rows) for rows in logs]
    assert all(figure and figure.startswith(b"\x89PNG") for figure in figures)
    assert figures[0] != figures[1]


def test_a_valid_log_is_read(tmp_path: Path) -> None:
    rows = write._facts(run_with(tmp_path, "done.json", DONE_FILE)).log
    assert [row["losses"] for row in rows] == [row["losses"] for row in LOG]


def test_numbers_of_an_evaluation_without_models_are_compared(tmp_path: Path) -> None:
    """`compare` also accepts a file that `evaluate` did not write: metrics with a protocol are
    enough.
    """
    content = {
        "protocol": {"seed": 1},
        "protocol_hash": "x",
        "results": [
            {
                "metric": "fid",
                "group": "images",
                "after": {"value": 1.0, "low": None, "high": None, "n": 3},
            }
        ],
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    path, evaluation = compare.read(tmp_path)
    assert compare.table({str(path): evaluation}) == [["fid, images", "1"]]


@pytest.mark.parametrize("link", ["pipeline/secret.json", "evaluation.json", "pipeline"])
def test_a_link_out_of_a_run_is_not_uploaded(tmp_path: Path, link: str) -> None:
    run = run_with(tmp_path, "done.json", DONE_FILE)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text(json.dumps(EVALUATION))
    place = run / link
    if place.is_dir():
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.unlink(missing_ok=True)
        place.symlink_to(outside / "secret.json")
    with pytest.raises(
        UserError,
        match=(
            r"is a link that leads out of .*, so it is not uploaded; "
            r"put the file itself in its place"
        ),
    ):
        hub.push_to_hub(run, "me/mine", dry_run=True)


def test_a_link_inside_a_run_is_uploaded(tmp_path: Path) -> None:
    run = run_with(tmp_path, "done.json", DONE_FILE)
    (run / "pipeline" / "again.json").symlink_to("model_index.json")
    assert "again.json" in [
        one.name for one in hub.push_to_hub(run, "me/mine", dry_run=True).uploads
    ]
