"""log.jsonl: one line for each step, consistent with the checkpoint when a run is resumed."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from concept_eraser.methods.vectors import cosine
from concept_eraser.storage.readers import read_lines
from concept_eraser.storage.writers import append_line, finite, write_growing
from concept_eraser.utils.devices import gpu_module


class Log:
    """Appends one JSON object per step.

    Lines after `keep` steps are dropped, since the resumed run writes them again.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        rows = [row for row in read(path) if row["step"] <= keep]
        write_growing(path, "".join(json.dumps(row) + "\n" for row in rows))

    def write(self, row: dict[str, Any]) -> None:
        append_line(self.path, finite(row))


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a log. A last line that a killed process cut off is left out."""
    return [row for row in read_lines(path) if isinstance(row.get("step"), int)]


def describe_gram(
    objectives: tuple[str, ...], gram: Tensor | None, weights: Tensor | None
) -> dict[str, Any]:
    """Return entries of the log: gradient norms, the cosine of two objectives, and the weights."""
    row: dict[str, Any] = {}
    # a method may leave out additional objectives (an attack, a judge)
    count = len(gram) if gram is not None else 0
    if gram is not None:
        row["norms"] = {
            objective: float(gram[i, i].sqrt()) for i, objective in enumerate(objectives[:count])
        }
        row["cosine"] = cosine(gram) if count > 1 else float("nan")
    if weights is not None:
        row["weights"] = {
            objective: float(weight) for objective, weight in zip(objectives, weights, strict=False)
        }
    return row


def peak_memory() -> float:
    """Return the peak memory so far in MB: of the GPU if there is one, else of the process.

    It is nan on a system that does not tell it.
    """
    gpu = gpu_module()
    if gpu is not None:
        return int(gpu.max_memory_allocated()) / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss of a child starts at its parent's peak
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) / 2**10
    try:
        import resource
    except ImportError:  # not on Windows
        return math.nan
    scale = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def reset_peak_memory() -> float:
    """Reset the peak, if the system can (CUDA, Linux). Returns the memory in use now, in MB."""
    gpu = gpu_module()
    if gpu is not None:
        gpu.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()
