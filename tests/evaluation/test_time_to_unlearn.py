"""Time to unlearn: the step at which the concept rate first falls below a bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from concept_eraser import api
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.time_to_unlearn import Watch, concept_rate_of, crossing
from concept_eraser.storage import output_folder
from concept_eraser.utils.errors import UserError
from tests.conftest import short

WATCH = {"suite": "tiny_star", "every": 2, "n": 4}


def measurements(*rates: float) -> list[dict[str, float]]:
    return [
        {"step": 10 * i, "seconds": 2.0 * i, "concept_rate": rate} for i, rate in enumerate(rates)
    ]


@pytest.mark.parametrize(
    ("rates", "steps"),
    [
        ((1.0, 0.5, 0.0), 19.6),
        ((1.0, 0.02, 0.01), 10.0),
        ((0.0,), 0.0),
        ((1.0, 0.9), None),
        ((), None),
    ],
)
def test_the_crossing_is_interpolated(rates: tuple[float, ...], steps: float | None) -> None:
    result = crossing(measurements(*rates), 0.02)
    assert result["steps"] == (None if steps is None else pytest.approx(steps))
    assert result["seconds"] == (None if steps is None else pytest.approx(steps / 5))


def test_measurements_end_below_the_bound_and_continue_after_a_kill(
    tmp_path: Path,
) -> None:
    rates = iter([1.0, 0.5, 0.0])
    output_folder.claim(tmp_path, "run")
    watch = Watch(lambda: next(rates), tmp_path / "watch.jsonl", every=5, below=0.02)
    for step in range(40):
        watch(step, step / 10)
    assert [row["step"] for row in watch.rows] == [0, 5, 10]
    with watch.path.open("a") as file:
        file.write('{"step": 15, "sec')  # truncated by a kill
    again = Watch(lambda: 0.25, watch.path, every=5, below=0.02)
    again(5, 0.5)  # resumed from a state of step 5: later measurements are dropped
    assert [(row["step"], row["concept_rate"]) for row in again.rows] == [(0, 1.0), (5, 0.25)]


def test_watching_changes_no_weights_and_records_the_time(tmp_path: Path) -> None:
    plain_run = api.erase(short(model="tiny-sd"), output=tmp_path / "plain")
    watch_run = api.erase(short(model="tiny-sd", watch=WATCH), output=tmp_path / "seen")
    weights = [load_file(run.folder / "weights.safetensors") for run in (plain_run, watch_run)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    summary = json.loads((watch_run.folder / "done.json").read_text())["time_to_unlearn"]
    assert [row["step"] for row in summary["measurements"]] == [0, 2, 4]
    assert (
        summary["measurements"][0]["concept_rate"] >= 0.75
    )  # the original model shows the concept
    # the time of the measurements is not counted
    assert summary["measurements"][-1]["seconds"] == pytest.approx(watch_run.seconds, abs=0.01)


def test_the_watched_images_are_those_of_the_suite(shared_tiny, tmp_path: Path) -> None:
    """A prompt's own seed and guidance count, as in an evaluation."""
    rows = [{"text": "a red star", "seed": i, "guidance": 0 if i % 2 else 5} for i in range(12)]
    suite = suites.load(
        {
            "concept": {"shape": "star"},
            "sampling": {"steps": 4, "batch_size": 8, "guidance": 5},
            "groups": {"direct": {"prompts": {"prompts": rows}, "role": "forget", "n": 12}},
        }
    )
    images = suites.generate_group(shared_tiny, suite, "direct", "before", cache=tmp_path)
    stars = (suite.build_judge().classify(images)["shape"] == "star").mean()
    assert concept_rate_of(shared_tiny, suite, "direct", 12)() == stars < 1


def test_a_group_that_the_suite_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"unknown group of the suite to watch 'dirct'; did you mean 'direct'"
    ):
        api.erase(short(watch={**WATCH, "group": "dirct"}), output=tmp_path)
    with pytest.raises(UserError, match=r"watch\.suite: .*tiny_sta"):
        api.erase(short(watch={"suite": "tiny_sta"}), output=tmp_path / "b")
