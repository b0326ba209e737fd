"""Numbers of a study's runs as text: rates with intervals, differences in points, tables."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from concept_eraser.evaluation.statistics import Interval, wilson
from studies import grids
from studies.result_tables import STUDIES, Results, new_keys
from studies.result_tables import table as table_rows

LIMITS = """**Protocol 1: limits.** The reported prompts include prompts of the training. One judge
selects the settings and reports the results. The number of settings that were tried differs
between methods. The attack success rate is a mean over attacks, and one of these, `seed_search`,
is a control. The intervals pool the images of all training seeds as if they were independent."""

# Phrases in the labels of stored results, and what the pages show in their place. The labels stay,
# because the draws of ranks.py follow from them.
LABEL_PHRASES = {
    "SHs (Scissorhands)": "new weights + PCGrad (after SHs)",
    "SalUn (relabel + mask)": "plain sum with a mask",  # the loss is no relabelling either
    "SalUn, 8e-4": "relabelling with a mask, 8e-4",  # on images of the anchor
    "SalUn, the board's 4e-4": "relabelling with a mask, 4e-4",
    "at an eighth of the rate": "at an eighth of the learning rate",
    "empty prompts on both sides": "empty prompts in both sets",
    "in place of the bargain": "in place of MUNBa",
    "pictures": "images",
    "SPM at the leaderboard's setting": "SPM with adapters on all layers",
    "SPM, the leaderboard's 4e-3": "SPM on all layers, 4e-3",
    "SPM, 8e-3": "SPM on all layers, 8e-3",
    "six players": "six objectives",
    "the board's": "the leaderboard's",
    "the rate rising": "the learning rate rising",
}


def limits(study: str) -> str:
    """Return the limits of a page, with those of its attacks by `p4d-k`.

    Before the results of attacks had the key `family`, the attack had one free token fewer than
    published. Its texts begin with the prompt's first word then, in place of a free token.
    """
    keys = sorted({*table_rows(study), *new_keys(study)})
    contents = [content for key in keys if (content := Results(study).get(key)) is not None]
    labels = {c["entry"]: c["label"] for c in contents if "entry" in c and "label" in c}
    counts: dict[str, list[int]] = {}
    for content in contents:
        protocol = content.get("protocol")
        if isinstance(protocol, dict) and protocol.get("attack") == "p4d-k":
            victim = content["victim"]
            label = str(content.get("label") or labels.get(victim, victim))
            count = counts.setdefault(label, [0, 0])
            count[0] += "family" not in content
            count[1] += 1
    older, total = (sum(count[i] for count in counts.values()) for i in range(2))
    if not older:
        return LIMITS
    if older == total:
        return f"{LIMITS} The attack `p4d-k` has one free token fewer than published."
    names = "; ".join(
        label if old == n else f"{label} ({old} of {n})"
        for label, (old, n) in counts.items()
        if old
    )
    return (
        f"{LIMITS} In {older} of {total} attacks, `p4d-k` has one free token fewer than published. "
        f"These are the ones on: {names}."
    )


def fill_blocks(text: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return a text with the content of every block whose marks it has.

    Raises:
        SystemExit: A block is opened and not closed, or has its marks twice.
    """
    for name, render in blocks.items():
        first, last = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if first not in text and last not in text:
            continue
        before, opening, rest = text.partition(first)
        _, closing, after = rest.partition(last)
        if not (opening and closing) or last in before or first in after or last in after:
            raise SystemExit(
                f"the text needs one line <!-- {name} --> and below it one line <!-- /{name} -->"
            )
        text = f"{before}{first}{render()}\n{last}{after}"
    return text


def current_label(text: str) -> str:
    """Return a stored label, or a page with stored labels, in the terms of today."""
    for phrase, term in LABEL_PHRASES.items():
        text = text.replace(phrase, term)
    return text


def load(study: str) -> dict[str, list[dict]]:
    """Return the reported runs of a study by entry, in the order of the study file."""
    import yaml

    order = list(yaml.safe_load((STUDIES / f"{study}.yaml").read_text())["entries"])
    runs: dict[str, list[dict]] = defaultdict(list)
    for content in Results(study).values():
        runs[content["entry"]].append(content)
    return {name: runs[name] for name in order if name in runs}


def notes(study: str) -> str:
    """Return the text that somebody wrote about the results of a study, or "" if there is none.

    Its links are relative to the page.
    """
    path = STUDIES / f"{study}.md"
    return path.read_text().rstrip() if path.exists() else ""


def source(study: str, command: str) -> str:
    """Return the sentence of a page that names its table and the command that made it."""
    return (
        f"Rendered from `{study}.jsonl.xz` by `python -m studies.render_results`; made by "
        f"`{command}`"
    )


def results(run: dict, metric: str, group: str) -> dict | None:
    """Return the result of a metric on a group, or None."""
    return next(
        (r for r in run["evaluation"]["results"] if (r["metric"], r["group"]) == (metric, group)),
        None,
    )


def pool(runs: list[dict], metric: str, group: str, when: str = "after") -> Interval | None:
    """Return a rate over the images of all training seeds, with its Wilson interval."""
    rows = [results(run, metric, group) for run in runs]
    if any(row is None for row in rows):
        return None
    counts = [(round(row[when]["value"] * row[when]["n"]), row[when]["n"]) for row in rows if row]
    return wilson(sum(k for k, _ in counts), sum(n for _, n in counts))


def share(value: Interval | None) -> str:
    """Return a rate and its interval as text, in percent.

    An interval of nan is that of values that are all alike.
    """
    if value is None:
        return "-"
    if math.isnan(value.low):
        return f"{100 * value.value:.1f} (all alike)"
    return f"{100 * value.value:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def change(runs: list[dict], metric: str, group: str) -> float:
    """Return the mean over the training seeds of after minus before, in points."""
    rows = [row for run in runs if (row := results(run, metric, group))]
    return 100 * sum(row["after"]["value"] - row["before"]["value"] for row in rows) / len(rows)


def worst_value(runs: list[dict], metric: str) -> tuple[str, float]:
    """Return the value of the retain set (a shape, a colour) with the largest loss, in points."""
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
    """Return the mean over the training seeds of after relative to before, in percent."""
    rows = [row for run in runs if (row := results(run, metric, group))]
    return 100 * (
        sum(row["after"]["value"] / row["before"]["value"] for row in rows) / len(rows) - 1
    )


def mean(runs: list[dict], metric: str, group: str, when: str) -> float:
    """Return the mean of a metric over the training seeds."""
    rows = [row for run in runs if (row := results(run, metric, group))]
    return sum(row[when]["value"] for row in rows) / len(rows)


def machine_note(content: Mapping[str, Any]) -> str:
    """Return where a benchmark was measured: torch, threads or the GPU, and what else ran."""
    where = content["environment"]
    threads = "1 thread" if where["threads"] == 1 else f"{where['threads']} threads"
    cores = f"{threads} of {where['cpu_count']} cores"
    place = cores if where["device"] == "cpu" else where["device"]
    torch_version = where["versions"]["torch"]
    return f"torch {torch_version}, {place}; state of the machine: {content['state']}."


def table(rows: list[list[str]]) -> str:
    """Return rows of cells as a Markdown table. The first row is the head."""
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def provenance(runs_by_name: dict[str, list[dict]]) -> str:
    """Return the sentence with the commits, versions, device and protocols of runs."""
    environments = [
        run["evaluation"]["environment"] for runs in runs_by_name.values() for run in runs
    ]
    commits = sorted(
        {
            str(e["commit"])[:12] + ("+changes" if "+changes" in str(e["commit"]) else "")
            for e in environments
        }
    )
    packages = ", ".join(
        f"{name} {_distinct(environment['versions'][name] for environment in environments)}"
        for name in ("torch", "diffusers", "transformers")
    )
    devices, threads = (
        _distinct(environment[key] for environment in environments) for key in ("device", "threads")
    )
    hashes = sorted(
        {run["evaluation"]["protocol_hash"] for runs in runs_by_name.values() for run in runs}
    )
    return (
        f"Commits {', '.join(commits)}; {packages}; {devices}, {threads} thread(s) a run; "
        f"protocols {', '.join(hashes)}."
    )


def _distinct(values: Iterable[Any]) -> str:
    """Return the different values as text, in order."""
    return " and ".join(sorted({str(value) for value in values}))


def setting(point: Mapping[str, Any], marks: Mapping[str, str] | None = None) -> str:
    """Return a setting of a grid as text, e.g. "cross_attention 0.0005".

    Args:
        point: The setting.
        marks: The marks of values at an edge (studies/grids.py), by option.
    """
    return " ".join(
        (value if isinstance(value, str) else f"{value:g}") + (marks or {}).get(key, "")
        for key, value in point.items()
    )


def learning_rate(run: Mapping[str, Any]) -> str:
    """Return the learning rate of a run, with the mark of an edge.

    Other values of the setting follow if they lie at an edge.
    """
    marks = grids.of_row(run)
    others = [
        f"{key.rpartition('.')[2]} {run['point'][key]:g}{mark}"
        for key, mark in marks.items()
        if key != "training.lr"
    ]
    rate = f"{run['recipe']['training']['lr']:g}{marks.get('training.lr', '')}"
    return "; ".join([rate, *others])


def cell(value: Any) -> str:
    """Return a value as the text of a table cell. The mean of one seed has no deviation, None."""
    if isinstance(value, list):
        numbers = [cell(v) for v in value if v is not None]
        return numbers[0] if len(numbers) == 1 else "[" + ", ".join(numbers) + "]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
