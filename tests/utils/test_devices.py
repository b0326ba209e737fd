"""The GPU that a process takes on its own. CUDA is given, since no GPU is here."""

from __future__ import annotations

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from concept_eraser.utils import devices


@pytest.mark.parametrize(
    ("rank", "count", "index"), [("0", 4, 0), ("2", 4, 2), ("3", 2, 1), ("1", 1, 0)]
)
def test_each_process_of_a_launch_takes_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, rank: str, count: int, index: int
) -> None:
    """Also before accelerate has set it. Otherwise all would evaluate on the first one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert devices.find_gpu() == torch.device("cuda", index)
    state = object.__new__(PartialState)  # the device of a launch, by accelerate's own rule
    monkeypatch.setattr(
        state,
        "__dict__",
        {
            "device": None,
            "distributed_type": DistributedType.MULTI_GPU,
            "local_process_index": int(rank),
        },
    )
    if int(rank) < count:  # versions of accelerate differ for more processes than GPUs
        state.set_device()
        assert state.device == devices.find_gpu()


def test_a_single_process_takes_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert devices.find_gpu() == torch.device("cuda")
