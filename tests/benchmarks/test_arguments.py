"""Benchmarks refuse values with which they could measure nothing, before they begin."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from benchmarks import attack_steps, floor, peers, scale, step_parts


@pytest.mark.parametrize(
    ("benchmark", "words", "message"),
    [
        (floor, "--repetitions 0", "expected a whole number from 1, found '0'"),
        (floor, "--batches 4 -1", "expected a whole number from 1, found '-1'"),
        (step_parts, "--batches x", "expected a whole number from 1, found 'x'"),
        (attack_steps, "--repetitions 0", "expected a whole number from 1, found '0'"),
        (scale, "--repetitions 0", "expected a whole number from 1, found '0'"),
        (peers, "--judged 0", "expected a whole number from 1, found '0'"),
        (floor, "--device cuda", "there is no GPU here"),
        (floor, "--device tpu", "expected cpu or cuda, found 'tpu'"),
    ],
)
def test_values_that_cannot_be_measured(
    benchmark: ModuleType,
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(benchmark, "measure", lambda *values: pytest.fail("it measures"))
    monkeypatch.setattr(sys, "argv", ["benchmark", *words.split()])
    with pytest.raises(SystemExit) as end:
        benchmark.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
