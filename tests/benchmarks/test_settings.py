"""benchmarks/settings.py: the step under settings that the package does not use."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks import settings
from benchmarks.floor import OBJECTIVES, Floor, build, eraser_of
from studies.rendering.common import fill_blocks


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


def test_the_seconds_of_compiling_have_those_of_the_compilers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`torch.compile` starts compilers of C++, which are processes of their own."""
    seconds = 2
    program = f"import time\nwhile time.process_time() < {seconds}: pass"
    make = settings.engine_step

    def with_a_compiler(*words: Any, setting: str, **options: Any) -> Any:
        eraser, plain = make(*words, setting=settings.OWN, **options)
        first = [setting == "compiled"]

        def step(number: int) -> None:
            if first[0]:
                subprocess.run([sys.executable, "-c", program], check=True)
            first[0] = False
            plain(number)

        return eraser, step

    monkeypatch.setattr(settings, "engine_step", with_a_compiler)
    row = settings.measure("cross-attention", 1, 1, settings=("compiled", "sum, one pass"))
    assert row["compiling_cpu_seconds"] >= seconds


def test_the_page_shows_what_was_measured() -> None:
    content, page = json.loads(settings.FILE.read_text()), settings.PAGE.read_text()
    assert fill_blocks(page, {"settings": lambda: settings.table(content)}) == page
    rows = content["rows"]
    names = ("MUNBa / sum, one pass each", "MUNBa in two passes / sum in one")
    ratios = [row["ratio"][name][0] for row in rows for name in names]
    assert f"; {min(ratios):.2f} to {max(ratios):.2f} against one gradient of their sum |" in page
    beyond = {
        name: {row["trained"] for row in rows if not low(row, name) <= 1 <= high(row, name)}
        for name in ("fused Adam", "channels last")
    }
    assert not beyond["fused Adam"]
    assert "* Fused Adam changes the time by less than the scatter." in page
    assert beyond["channels last"] == {"default LoRA, bf16", "cross-attention"}
    more, less = (
        [100 * abs(r["ratio"]["channels last"][0] - 1) for r in rows if r["trained"] == trained]
        for trained in ("default LoRA, bf16", "cross-attention")
    )
    assert f"takes {min(more):.0f} to {max(more):.0f} % more with the default LoRA in bf16" in page
    assert f"and {min(less):.0f} % less with the cross-attention." in page


def low(row: dict[str, Any], name: str) -> float:
    return float(row["ratio"][name][1])


def high(row: dict[str, Any], name: str) -> float:
    return float(row["ratio"][name][2])


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
