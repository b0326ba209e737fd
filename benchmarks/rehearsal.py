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

HERE = Path(__file__).parent
FILE, PAGE, GPU_FILE = HERE / "rehearsal.json", HERE / "README.md", HERE / "gpu.json"


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
    """Return the table: what one step does, for each job and batch size.

    The last two columns are those of a GPU, where it was measured.
    """
    lines = [
        "| Job | Batch | Synchronisations | To the device, KB | To the host, KB | Peak, MB | GPU: "
        "synchronisations | GPU: peak, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    measured = _on_a_gpu()
    for row in content["rows"]:
        there = measured.get((row["job"], row["batch"]), {})
        peak = f"{there['memory_mb'] * 2**20 / 1e6:.1f}" if there else ""
        lines.append(
            f"| {row['job']} | {row['batch']} | {row['syncs']} | "
            f"{row['bytes_to_device'] / 1e3:.1f} | {row['bytes_to_host'] / 1e3:.1f} | "
            f"{row['peak_bytes'] / 1e6:.1f} | {there.get('syncs', '')} | {peak} |"
        )
    where = content["environment"]
    note = f"torch {where['versions']['torch']}, commit {(where['commit'] or '?')[:12]}."
    return "\n".join([*lines, "", note])


def _on_a_gpu() -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of gpu.json for the bundled model, by job and batch size."""
    if not GPU_FILE.exists():
        return {}
    rows = json.loads(GPU_FILE.read_text())["rows"]
    return {(row["job"], row["batch"]): row for row in rows if row["family"] == "tiny"}


def render(page: str, content: dict[str, Any]) -> str:
    return fill_blocks(page, {"rehearsal": lambda: table(content)})


def write_page() -> None:
    """Render the table of README.md from the data file."""
    PAGE.write_text(render(PAGE.read_text(), json.loads(FILE.read_text())))
