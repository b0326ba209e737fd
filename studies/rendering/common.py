"""Numbers of a study's runs as text: shares with intervals, changes in points, tables."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from concept_eraser.evaluation.statistics import Interval, wilson
from studies.result_tables import STUDIES, Results


def load(study: str) -> dict[str, list[dict]]:
    """The reported runs of a study, by entry, in the order of the study file."""
    import yaml

    order = list(yaml.safe_load((STUDIES / f"{study}.yaml").read_text())["entries"])
    runs: dict[str, list[dict]] = defaultdict(list)
    for content in Results(study).values():
        runs[content["entry"]].append(content)
    return {name: runs[name] for name in order if name in runs}


def notes(study: str) -> str:
    """What was written by hand about the results of a study; its links are relative to the page. ""
    where there is nothing.
    """
    path = STUDIES / f"{study}.md"
    return path.read_text().rstrip() if path.exists() else ""


def source(study: str, command: str) -> str:
    """The sentence of a page that says what it was rendered from, and which command made that."""
    return (
        f"Rendered from `{study}.jsonl.xz` by `python -m studies.render_results`; made by "
        f"`{command}`"
    )


def results(run: dict, metric: str, group: str) -> dict | None:
    return next(
        (r for r in run["evaluation"]["results"] if (r["metric"], r["group"]) == (metric, group)),
        None,
    )


def pool(runs: list[dict], metric: str, group: str, when: str = "after") -> Interval | None:
    """A share over all seeds' images, with its Wilson interval."""
    rows = [results(run, metric, group) for run in runs]
    if any(row is None for row in rows):
        return None
    counts = [(round(row[when]["value"] * row[when]["n"]), row[when]["n"]) for row in rows if row]
    return wilson(sum(k for k, _ in counts), sum(n for _, n in counts))


def share(value: Interval | None) -> str:
    return (
        "-"
        if value is None
        else f"{100 * value.value:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"
    )


def change(runs: list[dict], metric: str, group: str) -> float:
    """Mean over seeds of after - before, in points."""
    rows = [row for run in runs if (row := results(run, metric, group))]
    return 100 * sum(row["after"]["value"] - row["before"]["value"] for row in rows) / len(rows)


def worst_value(runs: list[dict], metric: str) -> tuple[str, float]:
    """The retained value (shape, colour) that lost most, pooled over seeds."""
    names = {
        r["group"]
        for r in runs[0]["evaluation"]["results"]
        if r["metric"] == metric and ":" in r["group"]
    }
    return min(
        ((name.split(":")[1], change(runs, metric, name)) for name in sorted(names)),
        key=lambda item: item[1],
    )


def ratio(runs: list[dict], metric: str, group: str) -> float:
    rows = [row for run in runs if (row := results(run, metric, group))]
    return 100 * (
        sum(row["after"]["value"] / row["before"]["value"] for row in rows) / len(rows) - 1
    )


def mean(runs: list[dict], metric: str, group: str, when: str) -> float:
    rows = [row for run in runs if (row := results(run, metric, group))]
    return sum(row[when]["value"] for row in rows) / len(rows)


def table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def provenance(runs_by_name: dict[str, list[dict]]) -> str:
    environments = [
        run["evaluation"]["environment"] for runs in runs_by_name.values() for run in runs
    ]
    commits = sorted(
        {
            str(e["commit"])[:12] + ("+changes" if "+changes" in str(e["commit"]) else "")
            for e in environments
        }
    )
    versions = environments[0]["versions"]
    packages = ", ".join(f"{k} {versions[k]}" for k in ("torch", "diffusers", "transformers"))
    hashes = sorted(
        {run["evaluation"]["protocol_hash"] for runs in runs_by_name.values() for run in runs}
    )
    return (
        f"Commits {', '.join(commits)}; {packages}; {environments[0]['device']}, "
        f"{environments[0]['threads']} thread(s) a run; protocols {', '.join(hashes)}."
    )


def setting(point: dict[str, Any]) -> str:
    """A point of a grid, e.g. "cross_attention 0.0005"."""
    return " ".join(value if isinstance(value, str) else f"{value:g}" for value in point.values())


def cell(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(cell(v) for v in value) + "]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
