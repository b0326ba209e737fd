"""The forget loss that carries the change by never learning one concept over to another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from concept_eraser import api, registry
from concept_eraser.models.base import Model
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs.job import Job
from concept_eraser.utils.progress import silent
from studies import excess_recovery
from studies.never_learned_change import RANGES, NeverLearnedChange, at_times, measure
from studies.runs import recipe_of
from tests.conftest import ROOT, short

STUDY = yaml.safe_load((ROOT / "studies" / "configs" / "candidates.yaml").read_text())


def test_each_time_step_has_the_number_of_its_range() -> None:
    values = at_times([1.0, 2.0, 3.0, 4.0], torch.tensor([0, 249, 250, 999]))
    assert values.shape == (4, 1, 1, 1)
    assert values.flatten().tolist() == [1.0, 1.0, 2.0, 4.0]


def test_the_loss_is_the_distance_from_the_shares_of_the_way_to_the_anchor(
    tiny: Any, tmp_path: Path
) -> None:
    """At the original weights it is the squared length of the target's change."""
    conditional, unconditional = (1.5, 0.5), (0.9, 0.1)
    loss = NeverLearnedChange(conditional, unconditional, empty=0.25)
    eraser = Job(recipes.load(short(forget__loss=loss)), tiny, tmp_path, silent).eraser()
    draw = eraser.draw("forget", range(8))
    with torch.no_grad():
        own, anchor = (tiny.denoise(draw.noisy, draw.t, c) for c in (draw.condition, draw.anchor))
    lengths = (anchor - own).square().flatten(1).mean(1)
    late = (draw.t >= 500).long()
    assert 0 < late.sum() < 8
    shares = torch.tensor([conditional, unconditional])[:, late].square()
    expected = (torch.tensor([[0.75], [0.25]]) * shares).sum(0) @ lengths / 8
    value = eraser.loss("forget", draw)
    assert float(value.detach()) == pytest.approx(float(expected), rel=1e-5)
    value.backward()
    assert any(weight.grad.any() for weight in eraser.trainable().values())


def test_a_model_beside_itself_has_no_change(tiny: Model) -> None:
    texts, anchors = ["a red heart", "a blue heart"], ["a red circle", "a blue circle"]
    values = measure(tiny, tiny, texts, anchors, seed=0)
    assert values == {name: [0.0] * RANGES for name in ("conditional", "unconditional")}


@pytest.mark.parametrize("name", ["change", "change_conditional"])
def test_the_entries_have_a_number_for_each_range(name: str) -> None:
    erasure = excess_recovery.erasure_of(STUDY, name, "star")
    loss = recipe_of(erasure, {}, 0).resolved()["forget"]["loss"]
    assert len(loss["conditional"]) == RANGES
    assert any(loss["unconditional"]) == (name == "change")
    assert registry.in_memory(loss["name"])


def test_a_finished_run_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`erase` would refuse it, since a file records no object."""
    small = {
        "forget.n": 4,
        "retain.n": 4,
        "generation.steps": 2,
        "training.steps": 1,
        "training.batch_size": 2,
    }
    entry = STUDY["entries"]["change"]
    study = {**STUDY, "entries": {"change": {**entry, "set": {**entry["set"], **small}}}}
    case: Any = SimpleNamespace(name="star")
    first = excess_recovery.train(study, case, "change", point={}, seed=0, work=tmp_path)
    monkeypatch.setattr(api, "erase", None)  # a second training would be an error
    second = excess_recovery.train(study, case, "change", point={}, seed=0, work=tmp_path)
    for one, other in zip(first.denoiser.parameters(), second.denoiser.parameters(), strict=True):
        assert torch.equal(one, other)
