"""Time to unlearn: when the concept's share is first below a bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from concept_eraser import api
from concept_eraser.evaluation.time_to_unlearn import Watch, crossing
from concept_eraser.storage import output_folder
from concept_eraser.utils.errors import UserError
from tests.conftest import short

ASKED = {"suite": "tiny_star", "every": 2, "n": 4}


def looks(*shares: float) -> list[dict[str, float]]:
    return [{"step": 10 * i, "seconds": 2.0 * i, "share": share} for i, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("shares", "steps"),
    [
        ((1.0, 0.5, 0.0), 19.6),
        ((1.0, 0.02, 0.01), 10.0),
        ((0.0,), 0.0),
        ((1.0, 0.9), None),
        ((), None),
    ],
)
def test_the_crossing_is_interpolated(shares: tuple[float, ...], steps: float | None) -> None:
    found = crossing(looks(*shares), 0.02)
    assert found["steps"] == (None if steps is None else pytest.approx(steps))
    assert found["seconds"] == (None if steps is None else pytest.approx(steps / 5))


def test_looks_end_when_the_concept_is_gone_and_are_taken_again_after_a_kill(
    tmp_path: Path,
) -> None:
    shares = iter([1.0, 0.5, 0.0])
    output_folder.claim(tmp_path, "run")
    watch = Watch(lambda: next(shares), tmp_path / "watch.jsonl", every=5, below=0.02)
    for step in range(40):
        watch(step, step / 10)
    assert [row["step"] for row in watch.rows] == [0, 5, 10]
    with watch.path.open("a") as file:
        file.write('{"step": 15, "sec')  # cut off by a kill
    again = Watch(lambda: 0.25, watch.path, every=5, below=0.02)
    again(5, 0.5)  # resumed from a state of step 5: what was seen later is forgotten
    assert [(row["step"], row["share"]) for row in again.rows] == [(0, 1.0), (5, 0.25)]


def test_watching_changes_nothing_and_says_how_long(tmp_path: Path) -> None:
    plain = api.erase(short(), output=tmp_path / "plain")
    seen = api.erase(short(watch=ASKED), output=tmp_path / "seen")
    weights = [load_file(run.folder / "weights.safetensors") for run in (plain, seen)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    forgotten = json.loads((seen.folder / "done.json").read_text())["forgotten"]
    assert [look["step"] for look in forgotten["looks"]] == [0, 2, 4]
    assert forgotten["looks"][0]["share"] >= 0.75  # the untouched model still shows it
    # looking is not counted
    assert forgotten["looks"][-1]["seconds"] == pytest.approx(seen.seconds, abs=0.01)


def test_a_group_that_the_suite_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"unknown group of the suite to watch 'dirct'; did you mean 'direct'"
    ):
        api.erase(short(watch={**ASKED, "group": "dirct"}), output=tmp_path)
    with pytest.raises(UserError, match=r"watch\.suite: .*tiny_sta"):
        api.erase(short(watch={"suite": "tiny_sta"}), output=tmp_path / "b")
