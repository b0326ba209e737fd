"""The device of the tests as a fixture: a GPU if there is one, else the rehearsal device.

On a machine with a GPU of CUDA, the same tests run on it:

    python -m pytest tests/rehearsal -m "slow or not slow"
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import rehearsal_device
from benchmarks.device_counts import Counts


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device that the package uses during the test: a GPU, or the rehearsal device."""
    if torch.cuda.is_available():
        yield torch.device("cuda", 0)
        return
    if not rehearsal_device.is_possible():
        pytest.skip("this torch has no backends that are written in Python")
    with rehearsal_device.rehearsal() as one:
        yield one


@pytest.fixture
def steps(device: torch.device) -> Iterator[list[Counts]]:
    """The counts of each training step of the test."""
    with rehearsal_device.count_steps() as counts:
        yield counts
