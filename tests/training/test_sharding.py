"""The state of an optimizer that two real processes share (training.shard: optimizer), gloo on the
CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import processes

# Two processes step their share of seven tensors, and write what `state_dict` returns. All
# collectives of tensors are counted; those of objects also use them.
RUNNER = """
import sys
import torch
from accelerate import PartialState
from torch import distributed
from torch.distributed import distributed_c10d
from concept_eraser.training.distributed.sharding import ShardedOptimizer
from tests.training.test_sharding import MAKERS, SIZES, gradients, parameters

state = PartialState(cpu=True)
params = parameters()
optimizer = ShardedOptimizer(MAKERS[sys.argv[1]], params, state.process_index, 2)
for step in range(2):
    for parameter, gradient in zip(params, gradients(step), strict=True):
        parameter.grad = gradient
    optimizer.step()
largest = 0

def counted(collective):
    def call(tensor, *args, **options):
        global largest
        largest = max(largest, tensor.numel() * tensor.element_size())
        return collective(tensor, *args, **options)
    return call

for name in ("send", "recv", "gather", "broadcast"):
    call = counted(getattr(distributed, name))
    setattr(distributed, name, call)
    setattr(distributed_c10d, name, call)
content = optimizer.state_dict()
torch.save([content, largest], f"state_{state.process_index}.pt")
if state.process_index == 0:
    torch.save([parameter.detach() for parameter in params], "params.pt")
distributed.barrier()
"""
SIZES = (40_000, 1, 300, 50_000, 7, 20_000, 60_000)
MAKERS: dict[str, Any] = {
    "adam": lambda some: torch.optim.Adam(some, lr=0.1, weight_decay=0.01),
    "sgd": lambda some: torch.optim.SGD(some, lr=0.1, momentum=0.9),
    "adafactor": lambda some: torch.optim.Adafactor(some, lr=0.1),
}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(size, 2, generator=generator).squeeze()) for size in SIZES
    ]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(size, 2, generator=generator).squeeze() for size in SIZES]


@pytest.mark.parametrize("name", list(MAKERS))
def test_the_first_process_has_the_whole_state_tensor_by_tensor(tmp_path: Path, name: str) -> None:
    """No message is larger than the largest tensor: a GPU has no memory for the whole state."""
    (tmp_path / "run.py").write_text(RUNNER)
    processes.Ranks(name, folder=tmp_path, script=tmp_path / "run.py").wait(400)
    whole = parameters()
    optimizer = MAKERS[name](whole)
    for step in range(2):
        for parameter, gradient in zip(whole, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    for parameter, other in zip(whole, torch.load(tmp_path / "params.pt"), strict=True):
        assert torch.equal(parameter, other)
    (state, first), (empty, second) = (
        torch.load(tmp_path / f"state_{rank}.pt", weights_only=True) for rank in (0, 1)
    )
    assert empty == {}
    expected = optimizer.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert list(state["state"]) == list(range(len(SIZES)))
    for position, values in expected["state"].items():
        assert state["state"][position].keys() == values.keys()
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(state["state"][position][key]), value), (
                position,
                key,
            )
    assert 0 < first <= 8 * max(SIZES)
    assert 0 < second <= 8 * max(SIZES)
