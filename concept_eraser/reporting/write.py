"""Write the pages about one run and about several from run folders, for `api.report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from concept_eraser.evaluation import result_schema
from concept_eraser.evaluation.suite import PromptEvaluation
from concept_eraser.recipes import recipe as recipes
from concept_eraser.reporting import html, plots, run_results
from concept_eraser.reporting import several_runs as overviews
from concept_eraser.reporting import single_run as reports
from concept_eraser.reporting.galleries import ImageRenderer
from concept_eraser.reporting.run_results import RunFacts
from concept_eraser.storage.readers import read_text
from concept_eraser.storage.writers import probe
from concept_eraser.training import log as logs
from concept_eraser.utils.commands import shell_command
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress, silent

PAIRS = 12  # images in a row of before_after.png


def _facts(run: Path) -> RunFacts:
    """Read the facts about the training from a run folder. They are empty for other folders."""
    path = run / "recipe.yaml"
    if not path.is_file():
        return RunFacts()
    text, summary = read_text(path), run_results.read_record(run, "done.json")
    if summary:
        result_schema.require(summary, result_schema.DONE, run / "done.json")
    command = (text.splitlines() or [""])[0].lstrip("# ")
    rows = _plain_rows(logs.read(run / "log.jsonl"))
    return RunFacts(recipe=text, command=command, log=rows, seconds=summary.get("seconds"))


def _plain_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a log for plotting: rows with a step, and only their numbers."""
    plain: list[dict[str, Any]] = []
    for row in rows:
        if _is_number(row.get("step")):
            groups: dict[str, Any] = {
                key: _numbers(row[key]) for key in ("losses", "norms", "weights") if key in row
            }
            cosine: Any = row["cosine"] if _is_number(row.get("cosine")) else None
            plain.append({**row, **groups, "cosine": cosine})
    return plain


def _numbers(value: Any) -> dict[str, Any]:
    return {str(k): v for k, v in value.items() if _is_number(v)} if isinstance(value, dict) else {}


def _is_number(value: Any) -> bool:
    """Whether a value is a number that can be plotted."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_labelled(run: object) -> TypeGuard[str | Path]:
    """Whether a folder is a run on labelled data, which no suite of prompts can measure."""
    path = Path(run) / "recipe.yaml" if isinstance(run, str | Path) else None
    if path is None or not path.is_file():
        return False
    return recipes.load_run(path.parent).target not in recipes.PROMPTED


def require_prompted(run: Path) -> None:
    """Raise UserError for a run on labelled data."""
    if is_labelled(run):
        raise UserError(
            f"{run} is a run on labelled data, which has no report of images; "
            f"its numbers: {shell_command('evaluate', run)}"
        )


def has_numbers_only(folder: Path) -> bool:
    """Whether a folder holds an evaluation without a model, as for another checkpoint."""
    model = any((folder / name).is_file() for name in ("recipe.yaml", "model_index.json"))
    return not model and (folder / "evaluation.json").is_file()


def report_evaluation(
    evaluation: PromptEvaluation,
    path: Path,
    *,
    run: str | Path | None,
    attacks: Sequence[str | Path],
    show_sensitive: bool,
    progress: Progress = silent,
    cache: Path | None = None,
) -> Path:
    """Write the page of one evaluation; see `api.report`."""
    html.require_ours(path)
    probe(path)
    facts, section = RunFacts(), None
    if run is not None:
        folder, attack_folders, after = (
            Path(run),
            list(map(Path, attacks)),
            evaluation.models["after"],
        )
        facts = _facts(folder)
        run_results.require_useful(attack_folders, [after])
        attacks_on_it, unlike = run_results.attacks_of(
            folder, run_results.sampled_model(after), attack_folders, evaluation.suite.concept
        )
        entry = run_results.Entry(
            name=folder.resolve().name,
            folder=folder,
            content=evaluation.as_dict(),
            facts=facts,
            attacks=attacks_on_it,
            unlike=unlike,
        )
        section = overviews.attack_section([entry], ImageRenderer(show_sensitive, cache, progress))
    text = reports.render(evaluation, facts, section, show_sensitive=show_sensitive)
    return html.write(text, path)


def report_runs(
    runs: Sequence[str | Path],
    path: Path,
    *,
    attacks: Sequence[str | Path],
    show_sensitive: bool,
    progress: Progress = silent,
    cache: Path | None = None,
) -> Path:
    """Write the page of several evaluated folders; see `api.report`."""
    folders = [Path(run) for run in runs]
    html.require_ours(path)
    probe(path)
    for folder in folders:
        require_prompted(folder)
    facts = {folder: _facts(folder) for folder in folders}
    measured_runs = run_results.read(folders, facts, [Path(folder) for folder in attacks])
    text = overviews.render(measured_runs, ImageRenderer(show_sensitive, cache, progress))
    return html.write(text, path)


def save_before_after(evaluation: PromptEvaluation, path: Path, pairs: int = PAIRS) -> Path:
    """Write images of the first forget group and the last retain group, before above after.

    They are blurred if the suite is sensitive.

    Args:
        evaluation: The evaluation with its images.
        path: The PNG file.
        pairs: Images in a row.

    Returns:
        The path.
    """
    from torch import cat

    groups = evaluation.groups.values()
    example_groups = [next(group for group in groups if group.role == "forget")]
    example_groups += [group for group in groups if group.role == "retain"][-1:]
    before, after = (
        cat([group.images[when][:pairs] for group in example_groups])
        for when in ("before", "after")
    )
    if html.is_sensitive(evaluation.as_dict()):
        before, after = html.all_blurred(before), html.all_blurred(after)
    plots.save(plots.grid(before, after, pairs), path)
    return path
