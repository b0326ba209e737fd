"""The tables of benchmarks/gpu.json and benchmarks/full_size.json, where they were measured."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import profile_phases
from studies.rendering.common import table
from studies.result_tables import ROOT

FILE = ROOT / "benchmarks" / "gpu.json"
FULL_SIZE = ROOT / "benchmarks" / "full_size.json"


def page(content: dict[str, Any]) -> str:
    """Return the page: a table for each architecture, with a row for each job and batch size."""
    where = content["environment"]
    parts = [
        (
            "# Time and memory on a GPU\n\nRendered from `gpu.json` by `python -m "
            "studies.render_results`; made by `python -m benchmarks.gpu`. "
            f"{where['device']}, {where.get('cpu_count', '?')} CPU cores, torch "
            f"{where['versions']['torch']}, commit {(where['commit'] or '?')[:12]}."
        ),
        GPU_COLUMNS,
    ]
    for family in dict.fromkeys(row["family"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["family"] == family]
        lines = [
            ["job", "batch", "seconds", "allocated, GB", "reserved", "taken", "estimate", "waits"]
        ]
        lines += [[row["job"], str(row["batch"]), *_cells(row)] for row in rows]
        others = sorted({row["commit"][:12] for row in rows if "commit" in row})
        note = f"\n\nCommit of some rows: {', '.join(others)}." if others else ""
        parts.append(f"{_title(rows)}\n\n{table(lines)}{note}")
    return "\n\n".join(parts) + "\n"


GPU_COLUMNS = """\
* Seconds: of a training step, the median with the quickest and the slowest one; of an image
  where the job is generating. Rows without seconds were measured beside other processes.
* Allocated and reserved: the largest memory of tensors, and what torch took for them, in GB of
  2^30 bytes.
* Taken: allocated, and what CUDA itself took beside torch. A dry run's estimate is of this.
* Waits: how often the host waited for the GPU in the last step."""


def _cells(row: dict[str, Any]) -> list[str]:
    if not row["fits"]:
        return ["does not fit", "", "", "", "", ""]
    return [
        _seconds(row),
        _gigabytes(row["memory_mb"]),
        _gigabytes(row.get("reserved_mb")),
        _gigabytes(taken_mb(row)),
        _gigabytes(row.get("estimate_mb")) if taken_mb(row) is not None else "",
        str(row.get("syncs", "")),
    ]


def _seconds(row: dict[str, Any]) -> str:
    if "images_per_second" in row:
        return f"{1 / row['images_per_second']:.2f} an image"
    if row["seconds"] is None:
        return ""
    return f"{row['seconds']:.3f} [{row['quickest']:.3f}, {row['slowest']:.3f}]"


def _gigabytes(megabytes: float | None) -> str:
    return "" if megabytes is None else f"{megabytes / 1024:.2f}"


def taken_mb(row: dict[str, Any]) -> float | None:
    """Return the memory of the tensors and of CUDA itself, or None if it was not measured."""
    beside = row.get("beside_mb")
    return None if beside is None else float(row["memory_mb"] + beside)


FULL_SIZE_COLUMNS = [
    "step",
    "seconds",
    "CPU seconds",
    "peak memory, MB",
    "above the libraries",
    "estimate",
    "disk",
]


def full_size_page(content: dict[str, Any]) -> str:
    """Return the page of the commands at full size: a table for each architecture."""
    where = content["environment"]
    parts = [
        (
            "# The commands on a checkpoint of full size\n\nRendered from `full_size.json` by "
            "`python -m studies.render_results`; made by `python -m benchmarks.full_size`. "
            f"{where['device']}, {where['threads']} threads, torch {where['versions']['torch']}, "
            f"commit {(where['commit'] or '?')[:12]}. The weights are random."
        )
    ]
    for family, pixels in dict.fromkeys((row["family"], row["pixels"]) for row in content["rows"]):
        rows = [
            row for row in content["rows"] if (row["family"], row["pixels"]) == (family, pixels)
        ]
        libraries = next((r["memory_mb"] for r in rows if r["step"] == "libraries alone"), None)
        lines = [FULL_SIZE_COLUMNS]
        plans = {r["step"].removeprefix("dry run: "): r for r in rows if "disk_estimate_mb" in r}
        for row in rows:
            memory = row.get("memory_mb")
            is_run = row["step"].startswith("erase")
            plan = plans.get(row["step"].partition(": ")[2]) if is_run else None
            lines.append(
                [
                    row["step"],
                    f"{row['seconds']:.0f}",
                    f"{row['cpu_seconds']:.0f}" if "cpu_seconds" in row else "",
                    f"beyond {row['beyond_gb']:g} GB" if "beyond_gb" in row else str(memory or ""),
                    "" if memory is None or libraries is None else str(memory - libraries),
                    f"{plan['memory_estimate_mb']} MB" if plan else "",
                    _disk(row, plan),
                ]
            )
        differences = [row["differences"] for row in rows if "differences" in row]
        text = ", ".join(f"{name} {value}" for one in differences for name, value in one.items())
        if text:
            text = f"\n\nLargest difference from the image with the run's LoRA, of 255: {text}."
        commits = sorted({row.get("commit") or where["commit"] or "?" for row in rows})
        other = [one[:12] for one in commits if one != where["commit"]]
        measured = f"\n\nCommit of some rows: {', '.join(other)}." if other else ""
        parts.append(f"{_title(rows)}\n\n{table(lines)}{text}{measured}")
        parts += [_phases(row) for row in rows if "phases" in row]
    return "\n\n".join(parts) + "\n"


def _phases(row: dict[str, Any]) -> str:
    """Return the largest costs of the phases of a job, under torch's profiler."""
    job = row["step"].removeprefix("profile: ")
    return "\n".join([f"Largest costs: {job}.", "", *profile_phases.lines(row["phases"])])


def _title(rows: list[dict[str, Any]]) -> str:
    return f"## {rows[0]['family']}, {rows[0]['pixels']} x {rows[0]['pixels']}"


def _disk(row: dict[str, Any], plan: dict[str, Any] | None) -> str:
    if "disk_mb" not in row:
        return ""
    estimate = f" (estimate with states {plan['disk_estimate_mb']:.0f})" if plan else ""
    return f"{row['disk_mb']} MB{estimate}"


def pages() -> dict[Any, str]:
    """Return the pages by path, without those that were not measured."""
    renderers = {FILE: page, FULL_SIZE: full_size_page}
    return {
        file.with_suffix(".md"): render(json.loads(file.read_text()))
        for file, render in renderers.items()
        if file.exists()
    }
