"""The table of what a training step asks of a GPU, counted on the rehearsal device.

    python -m benchmarks.gpu --device rehearsal

measures the jobs of benchmarks/gpu.py on the bundled model, writes rehearsal.json and renders the
table of README.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import rehearsal_device
from benchmarks.device_counts import Counts
from studies.rendering.common import fill_blocks

FILE, PAGE = Path(__file__).parent / "rehearsal.json", Path(__file__).parent / "README.md"


@contextmanager
def on_the_device() -> Iterator[list[Counts]]:
    """Make the device available inside the context. Yields the counts of each training step."""
    with rehearsal_device.rehearsal(), rehearsal_device.count_steps() as steps:
        yield steps


def summary(steps: Sequence[Counts]) -> dict[str, Any]:
    """Return the counts of the last step, and the largest memory of all steps."""
    last = steps[-1]
    return {
        "syncs": last.syncs,
        "copies_to_device": last.copies_to_device,
        "bytes_to_device": last.bytes_to_device,
        "bytes_to_host": last.bytes_to_host,
        "peak_bytes": max(step.peak_bytes for step in steps),
    }


def table(content: dict[str, Any]) -> str:
    """Return the table: what one step does, for each job and batch size."""
    lines = [
        "| Job | Batch | Synchronisations | To the device, KB | To the host, KB | Peak, MB |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['job']} | {row['batch']} | {row['syncs']} | {row['bytes_to_device'] / 1e3:.1f} | "
        f"{row['bytes_to_host'] / 1e3:.1f} | {row['peak_bytes'] / 1e6:.1f} |"
        for row in content["rows"]
    ]
    where = content["environment"]
    note = f"torch {where['versions']['torch']}, commit {(where['commit'] or '?')[:12]}."
    return "\n".join([*lines, "", note])


def render(page: str, content: dict[str, Any]) -> str:
    return fill_blocks(page, {"rehearsal": lambda: table(content)})


def write_page() -> None:
    """Render the table of README.md from the data file."""
    PAGE.write_text(render(PAGE.read_text(), json.loads(FILE.read_text())))
