"""What goes onto the pages: reports of one run and pages about several, from run folders. `api` passes both on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from concept_eraser import recipe as recipes
from concept_eraser.errors import UserError
from concept_eraser.evaluation import entries, pages, shapes
from concept_eraser.evaluation import overview as overviews
from concept_eraser.evaluation import report as reports
from concept_eraser.evaluation.suite import Evaluation
from concept_eraser.evaluation.triples import Studio
from concept_eraser.progress import Progress, silent
from concept_eraser.storage.readers import read_text
from concept_eraser.storage.writers import probe
from concept_eraser.training import log as logs


def _facts(run: Path) -> reports.RunFacts:
    """What a folder tells about the making of its model; nothing where it is no run."""
    path = run / "recipe.yaml"
    if not path.is_file():
        return reports.RunFacts()
    text, done = read_text(path), entries.recorded(run, "done.json")
    if done:
        shapes.require(done, shapes.DONE, run / "done.json")
    return reports.RunFacts(text, (text.splitlines() or [""])[0].lstrip("# "), _plain_rows(logs.read(run / "log.jsonl")), done.get("seconds"))  # fmt: skip


def _plain_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a log that are drawn: what is not a number where one is needed is left out, as is a row without a step."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if _is_number(row.get("step")):
            groups: dict[str, Any] = {key: _numbers(row[key]) for key in ("losses", "norms", "weights") if key in row}
            cosine: Any = row["cosine"] if _is_number(row.get("cosine")) else None
            kept.append({**row, **groups, "cosine": cosine})
    return kept


def _numbers(value: Any) -> dict[str, Any]:
    return {str(k): v for k, v in value.items() if _is_number(v)} if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    """Whether a value is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_labelled(run: Path) -> bool:
    """Whether a folder is a run on labelled data, which no suite of prompts can measure."""
    path = run / "recipe.yaml"
    return path.is_file() and recipes.load(str(path)).target not in recipes.PROMPTED


def require_prompted(run: Path) -> None:
    """Raise UserError for a run on labelled data."""
    if is_labelled(run):
        raise UserError(f"{run} erased from labelled data, which has no report of pictures; its numbers: concept-eraser evaluate {run}")  # fmt: skip


def report(
    evaluation: Evaluation,
    path: str | Path,
    *,
    run: str | Path | None = None,
    attacks: Sequence[str | Path] = (),
    show_sensitive: bool = False,
    progress: Progress = silent,
    cache: Path | None = None,
) -> Path:
    """Write report.html.

    run: adds the recipe, the command and the curves of a run folder, and the attacks on its model in its folder attacks/;
    attacks: more folders of attacks on it; show_sensitive: do not blur the pictures of a sensitive suite.

    Raises UserError where `path` is taken by something that is no report, or a folder of attacks holds none on this model.
    """
    pages.require_ours(Path(path))
    probe(Path(path))
    facts, attacked = reports.RunFacts(), ""
    if run is not None:
        folder, more, after = Path(run), [Path(one) for one in attacks], evaluation.models["after"]
        facts = _facts(folder)
        entries.require_useful(more, [after])
        found = entries.attacks_of(folder, entries.weights_of(after), more, evaluation.suite.concept)
        entry = entries.Entry(folder.resolve().name, folder, evaluation.as_dict(), facts, *found)
        attacked = overviews.attacked(entry, Studio(show_sensitive, cache, progress))
    return reports.write(evaluation, facts, Path(path), attacked, show_sensitive=show_sensitive)


def overview(
    runs: Sequence[str | Path],
    path: str | Path = "report.html",
    *,
    attacks: Sequence[str | Path] = (),
    show_sensitive: bool = False,
    progress: Progress = silent,
    cache: Path | None = None,
) -> Path:
    """Write one page about several evaluated runs: table, Pareto plot, pictures, attacks, training, how to repeat it.

    attacks: folders of attacks besides those in the runs' own folders attacks/, each matched to the run whose weights it
    attacked; show_sensitive: do not blur the pictures of a sensitive suite. Pictures are made again from their seeds.

    Raises UserError for runs that were not evaluated, or not alike, for labelled data, and where `path` is taken by
    something that is no report.
    """
    where, folders = Path(path), [Path(run) for run in runs]
    pages.require_ours(where)
    probe(where)
    for folder in folders:
        require_prompted(folder)
    found = entries.read(folders, {folder: _facts(folder) for folder in folders}, [Path(one) for one in attacks])
    return pages.write(overviews.render(found, Studio(show_sensitive, cache, progress)), where)
