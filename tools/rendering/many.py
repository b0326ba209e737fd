"""Pages of the studies that erase several concepts: one row a way of doing it, one column a concept."""

from __future__ import annotations

from tools.rendering.common import RESULTS, change, load, mean, pooled, provenance, results, setting, share, table


def _of_suite(runs: list[dict], suite: str) -> list[dict]:
    """The runs as those of a study of one suite are kept."""
    return [{"evaluation": run["evaluations"][suite]} for run in runs]


def _row(runs: list[dict], when: str = "after") -> list[str]:
    seen = {suite: _of_suite(runs, suite) for suite in runs[0]["evaluations"]}
    concepts = [share(pooled(some, "concept_share", "direct", when)) for some in seen.values()]
    others = [mean(some, "concept_share", "synonyms", when) for some in seen.values()]
    kept = [mean(some, "accuracy_shape", "retained", when) for some in seen.values()]
    points = [change(some, "accuracy_shape", "retained") for some in seen.values()]
    fids = [
        mean(some, "fid_judge", "retained", when) for some in seen.values() if results(some[0], "fid_judge", "retained")
    ]
    average = lambda values: sum(values) / len(values)  # noqa: E731
    shown = [*concepts, f"{100 * average(others):.1f}", f"{100 * average(kept):.1f}" + (f" ({average(points):+.1f})" if when == "after" else "")]  # fmt: skip
    if when == "before":
        return ["before", "", *shown, "", "", "", ""]
    took = [run["took"] for run in runs]
    return [runs[0]["label"], setting(runs[0]["point"]), *shown, f"{average(fids):.1f}" if fids else "-", f"{took[0]['gradients']}", f"{average([t['seconds'] for t in took]):.0f}", str(len(runs))]  # fmt: skip


def page(study: str, title: str) -> str:
    found = load(study)
    first = next(iter(found.values()))
    names = [next(iter(e["protocol"]["concept"].values())) for e in first[0]["evaluations"].values()]
    head = ["erased", "lr", *(f"{name}, direct %" for name in names), "synonyms, mean %", "other shapes % (points)", "FID (judge)", "gradients", "training s", "seeds"]  # fmt: skip
    rows = [head, _row(first[:1], "before"), *(_row(runs) for runs in found.values())]
    every = {f"{name}/{suite}": _of_suite(runs, suite) for name, runs in found.items() for suite in runs[0]["evaluations"]}  # fmt: skip
    about = "Shares of pictures that still show the concept, with 95 % Wilson intervals over the pictures of all seeds. Of models erased one at a time each column is the model of that concept, and what was kept is their mean. Gradients: of one loss over one batch, all runs that it took together."  # fmt: skip
    notes = RESULTS / study / "notes.md"
    said = [notes.read_text().rstrip(), ""] if notes.exists() else []
    made = f"Rendered from `{study}/*.json` by `python -m tools.render_results`; made by `python -m tools.many eval/studies/{study}.yaml`, which goes on where it was stopped."
    return "\n".join([f"# {title}", "", made, about, "", table(rows), "", provenance(every), "", *said])


TITLES = {"tiny_five": "Five concepts at once"}
PAGES = {study: (lambda study=study, title=title: page(study, title)) for study, title in TITLES.items()}
