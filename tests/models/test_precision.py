"""bfloat16 on a CPU that emulates it: images are computed in fp32, and the cache records it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from concept_eraser.data import generate
from concept_eraser.models import base


@pytest.mark.parametrize("has_bf16", [True, False])
def test_bf16_is_not_emulated(
    shared_tiny: Any, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    monkeypatch.setattr(base, "_cpu_has_bf16", lambda: has_bf16)
    context = shared_tiny.precision(torch.bfloat16)
    assert isinstance(context, torch.autocast if has_bf16 else nullcontext)
    assert isinstance(shared_tiny.precision(None), nullcontext)


def test_weights_in_bf16_need_autocast(shared_tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_cpu_has_bf16", lambda: False)
    monkeypatch.setattr(shared_tiny, "frozen_dtype", torch.bfloat16)
    assert isinstance(shared_tiny.precision(torch.bfloat16), torch.autocast)


def test_the_cache_keeps_both_precisions_apart(
    shared_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = generate.Sampling(2, 1.0, 1, "bf16")
    folders = []
    for has_bf16 in (True, False):
        monkeypatch.setattr(base, "_cpu_has_bf16", lambda value=has_bf16: value)
        folders.append(generate.request_images(shared_tiny, ["a red star"], [0], sampling).folder)
    assert folders[0] != folders[1]
