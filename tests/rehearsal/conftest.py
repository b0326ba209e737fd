"""The rehearsal device of benchmarks/rehearsal_device.py as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import rehearsal_device
from benchmarks.rehearsal_device import Counts


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The rehearsal device, which the package uses like a GPU during the test."""
    if not rehearsal_device.is_possible():
        pytest.skip("this torch has no backends that are written in Python")
    with rehearsal_device.rehearsal() as one:
        yield one


@pytest.fixture
def steps(device: torch.device) -> Iterator[list[Counts]]:
    """The counts of each training step of the test."""
    with rehearsal_device.count_steps() as counts:
        yield counts
