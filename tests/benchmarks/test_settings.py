"""benchmarks/settings.py: the step under settings that the package does not use."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks import settings
from benchmarks.floor import OBJECTIVES, Floor, build, eraser_of


@pytest.mark.parametrize("trained", ["cross-attention", "LoRA, rank 64"])
def test_the_loop_has_the_gradient_of_the_sum_of_both_losses(trained: str) -> None:
    model = build("tiny", torch.device("cpu"))
    teacher = copy.deepcopy(model.denoiser)
    loop = settings.SumLoop(eraser_of(model, trained, 2), teacher, "fp32")
    with torch.no_grad():  # another model than the teacher, so that no gradient is zero
        for number, parameter in enumerate(loop.params):
            generator = torch.Generator().manual_seed(number)
            parameter.add_(1e-2 * torch.randn(parameter.shape, generator=generator))
    loop.draw(0, 2)
    floor = Floor(loop.eraser.module, teacher, loop.params)
    forget, retain = loop.draws["forget"], loop.draws["retain"]
    assert forget.anchor is not None
    assert list(OBJECTIVES) == ["retain", "forget"]
    each = [floor.gradient(retain, retain.condition), floor.gradient(forget, forget.anchor)]
    taken: list[torch.Tensor] = []
    loop.optimizer.step = lambda *_: taken.extend(  # type: ignore[method-assign,assignment]
        parameter.grad.clone() for parameter in loop.params
    )
    loop.step()
    expected = torch.cat([(a + b).flatten() for a, b in zip(*each, strict=True)])
    found = torch.cat([gradient.flatten() for gradient in taken])
    assert expected.norm() > 0
    assert (found - expected).norm() <= 1e-4 * expected.norm()


def test_a_measurement_gives_ratios_and_the_share_of_the_prefix() -> None:
    names = tuple(name for name in settings.SETTINGS if name != "compiled")  # it takes a minute
    row = settings.measure("cross-attention", 1, 2, settings=names)
    assert set(row["ratio"]) == set(settings.RATIOS) - {"compiled"}
    assert all(low <= median <= high for median, low, high in row["ratio"].values())
    assert 0 < row["prefix_share"] < 0.5


def test_the_table_has_a_row_for_each_measurement() -> None:
    row = {
        "trained": "all weights",
        "batch": 4,
        "n": 3,
        "commit": "a" * 40,
        "cpu_seconds": {settings.OWN: 0.25},
        "compiling_cpu_seconds": 52.7,
        "ratio": {name: [1.0, 0.9, 1.1] for name in settings.RATIOS},
        "prefix_share": 0.0123,
    }
    where = {"versions": {"torch": "2"}, "device": "cpu", "threads": 1, "cpu_count": 2}
    text = settings.table({"environment": where, "state": "idle", "rows": [row]})
    assert "| all weights | 4 | 0.250 | 1.00 [0.90, 1.10] |" in text
    assert "| 53 | 1.2 | 3 |" in text
