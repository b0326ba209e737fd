"""Pages of the studies that erase several concepts: a row for each procedure, a column for each
concept.
"""

from __future__ import annotations

from studies import grids
from studies.rendering.common import (
    LIMITS,
    change,
    load,
    mean,
    notes,
    pool,
    provenance,
    results,
    setting,
    share,
    source,
    table,
)


def _of_suite(runs: list[dict], suite: str) -> list[dict]:
    """Return the runs in the form of a study with one suite."""
    return [{"evaluation": run["evaluations"][suite]} for run in runs]


def _row(runs: list[dict], when: str = "after") -> list[str]:
    """Return the row of an entry, or of the original with `when="before"`."""
    runs_by_suite = {suite: _of_suite(runs, suite) for suite in runs[0]["evaluations"]}
    concepts = [
        share(pool(some, "concept_rate", "direct", when)) for some in runs_by_suite.values()
    ]
    others = [mean(some, "concept_rate", "synonyms", when) for some in runs_by_suite.values()]
    accuracies = [mean(some, "accuracy_shape", "retained", when) for some in runs_by_suite.values()]
    points = [change(some, "accuracy_shape", "retained") for some in runs_by_suite.values()]
    fids = [
        mean(some, "fid_judge", "retained", when)
        for some in runs_by_suite.values()
        if results(some[0], "fid_judge", "retained")
    ]
    average = lambda values: sum(values) / len(values)  # noqa: E731
    rates = [
        *concepts,
        f"{100 * average(others):.1f}",
        f"{100 * average(accuracies):.1f}"
        + (f" ({average(points):+.1f})" if when == "after" else ""),
    ]
    if when == "before":
        return ["before", "", *rates, "", "", "", ""]
    took = [run["took"] for run in runs]
    return [
        runs[0]["label"],
        setting(runs[0]["point"], grids.of_row(runs[0])),
        *rates,
        f"{average(fids):.1f}" if fids else "-",
        f"{took[0]['gradients']}",
        f"{average([t['seconds'] for t in took]):.0f}",
        str(len(runs)),
    ]


def page(study: str, title: str) -> str:
    """Return the page of a study."""
    runs_by_entry = load(study)
    first = next(iter(runs_by_entry.values()))
    names = [
        next(iter(e["protocol"]["concept"].values())) for e in first[0]["evaluations"].values()
    ]
    head = [
        "procedure",
        "lr",
        *(f"{name}, direct %" for name in names),
        "synonyms, mean %",
        "retain accuracy, other shapes % (points)",
        "FID (judge)",
        "gradients",
        "training s",
        "seeds",
    ]
    rows = [head, _row(first[:1], "before"), *(_row(runs) for runs in runs_by_entry.values())]
    every = {
        f"{name}/{suite}": _of_suite(runs, suite)
        for name, runs in runs_by_entry.items()
        for suite in runs[0]["evaluations"]
    }
    about = (
        "The cells are concept rates with 95 % Wilson intervals over the images of all training "
        "seeds. Where each concept has a model of its own, its column is that model's. The retain "
        "accuracy is then a mean over the models. Gradients: the number of gradients of one loss "
        "over one batch, in all runs together."
    )
    text_parts = [text, ""] if (text := notes(study)) else []
    commits = (
        source(study, f"python -m studies.several_concepts studies/configs/{study}.yaml")
        + ". The command continues where it stopped."
    )
    return "\n".join(
        [
            f"# {title}",
            "",
            commits,
            about,
            "",
            LIMITS,
            "",
            grids.with_note(table(rows)),
            "",
            provenance(every),
            "",
            *text_parts,
        ]
    )


TITLES = {"tiny_five": "Five concepts at once"}
PAGES = {
    study: (lambda study=study, title=title: page(study, title)) for study, title in TITLES.items()
}
