"""The tables of benchmarks/gpu.json, if somebody has measured it on a GPU."""

from __future__ import annotations

import json
from typing import Any

from studies.result_tables import ROOT

FILE = ROOT / "benchmarks" / "gpu.json"


def page(content: dict[str, Any]) -> str:
    """Return the page: seconds of a step (quickest to slowest) and peak memory.

    A table has a row for each job and a column for each batch size.
    """
    where = content["environment"]
    parts = [
        (
            "# Time and memory on a GPU\n\nRendered from `gpu.json` by `python -m "
            "studies.render_results`; made by `python -m benchmarks.gpu`. "
            f"{where['device']}, torch {where['versions']['torch']}, commit "
            f"{(where['commit'] or '?')[:12]}."
        )
    ]
    for family in dict.fromkeys(row["family"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["family"] == family]
        batches = sorted({row["batch"] for row in rows})
        lines = [["job", *(f"batch {batch}" for batch in batches)], ["---"] * (len(batches) + 1)]
        for job in dict.fromkeys(row["job"] for row in rows):
            rows_by_batch = {row["batch"]: row for row in rows if row["job"] == job}
            lines.append(
                [
                    job,
                    *(
                        _cell(rows_by_batch[batch]) if batch in rows_by_batch else ""
                        for batch in batches
                    ),
                ]
            )
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"## {family}, {rows[0]['pixels']} x {rows[0]['pixels']}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def _cell(row: dict[str, Any]) -> str:
    if not row["fits"]:
        return "does not fit"
    memory = f"{row['memory_mb'] / 1024:.1f} GB"
    if "images_per_second" in row:
        return f"{row['images_per_second']:.2f} images/s, {memory}"
    return f"{row['seconds']:.3f} s [{row['quickest']:.3f}, {row['slowest']:.3f}], {memory}"


def pages() -> dict[Any, str]:
    """Return the page by its path, or {} without measurements."""
    return {FILE.with_suffix(".md"): page(json.loads(FILE.read_text()))} if FILE.exists() else {}
