"""The tab Results: tables of eval/results, numbers of the local runs, and a plot of both."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatch
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from concept_eraser.demo import figures, presets, safety
from concept_eraser.demo.context import Desk, alert, error_text, minutes, notice, quiet
from concept_eraser.demo.jobs import DemoJob
from concept_eraser.demo.state import recipe_in
from concept_eraser.storage.readers import MEGABYTE, read_compressed_lines, read_json
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.migration import migrate_results

LOCAL_RUNS = "runs of this page"
LARGEST = 16 * MEGABYTE  # largest size of a run's JSON file that the page reads
ATTACKS = 50  # largest number of attacks of a run in the table
CELL = 200  # largest number of characters of a cell


def studies() -> list[str]:
    """List the names of the studies with a table."""
    folder = resources.folder("eval") / "results"
    return sorted(path.stem for path in folder.glob("*.md"))


def studies_in_plot() -> list[str]:
    """List the studies with an evaluation per run. Only these can be plotted."""
    return [name for name in studies() if study_points(name)]


def table(name: str) -> str:
    """Return the table of a study as Markdown.

    Images and links to files are removed, because the files are in eval/results. Raises UserError
    for an unknown name.
    """
    path = (
        resources.folder("eval")
        / "results"
        / f"{safety.require_choice('result', name, studies())}.md"
    )
    text = path.read_text(encoding="utf-8").split("\n## Contact sheets")[0]
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


def _shares(content: dict[str, Any]) -> tuple[float, float] | None:
    """Return the concept rate and the retain accuracy of the erased model, in percent.

    The retain accuracy is that of the concept's attribute. Returns None if they were not measured,
    or the content is damaged.
    """
    try:
        rows = {
            (str(r["metric"]), str(r["group"])): r["after"]["value"]
            for r in content.get("results", [])
        }
        (attribute,) = content["protocol"]["concept"]
    except (TypeError, KeyError, AttributeError, ValueError):
        return None
    concept_rate = _number(rows.get(("concept_rate", "direct")))
    accuracy = _number(rows.get((f"accuracy_{attribute}", "retained")))
    return (
        None if concept_rate is None or accuracy is None else (100 * concept_rate, 100 * accuracy)
    )


def _number(value: Any) -> float | None:
    """Return a finite number, or None for any other value of a file."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12
    return float(value) if is_number else None


@lru_cache(maxsize=64)
def study_points(name: str) -> list[tuple[str, float, float]]:
    """Return the label of each entry of a study, and its means over the seeds.

    Returns [] if the study has no evaluation per run.
    """
    path = resources.folder("eval") / "results" / f"{name}.jsonl.xz"
    points_by_entry: dict[str, list[tuple[float, float]]] = {}
    for content in read_compressed_lines(path) if path.exists() else ():
        key = content["key"]  # a key with a folder, e.g. attacks/, belongs to another measurement
        shares = (
            _shares(content.get("evaluation") or {})
            if fnmatch(key, "*_seed*") and "/" not in key
            else None
        )
        if shares:
            label = " ".join(filter(None, (content.get("task"), content.get("label", key))))
            points_by_entry.setdefault(label, []).append(shares)
    return [
        (label, sum(a for a, _ in points) / len(points), sum(b for _, b in points) / len(points))
        for label, points in points_by_entry.items()
    ]


def local_points(desk: Desk) -> list[tuple[str, float, float]]:
    points = []
    for name, folder in desk.library.folders().items():
        if shares := measured_rates(folder):
            points.append((name, *shares))
    return points


def measured_rates(folder: Path) -> tuple[float, float] | None:
    """Return the two rates of a run's own evaluation, or None."""
    return _facts(folder / "evaluation.json")[0]


def _facts(path: Path) -> tuple[Any, ...]:
    """Return the values of a run's JSON file for the table, with a cache.

    The page calls this every second. A file is read again only after a change.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return (None, None, "", "")
    return _read_facts(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4096)
def _read_facts(path: Path, modification_time: int, size: int) -> tuple[Any, ...]:
    """Read the facts of an evaluation, a training or an attack.

    They are the two rates, the seconds of a training, the successes of an attack, and the numbers
    against a control. Missing values are None, None, "" and "".
    """
    try:
        content = migrate_results(read_json(path, limit=LARGEST))
    except UserError:
        return (None, None, "", "")
    successes = f"{content['broken']}/{content['n']}" if {"broken", "n"} <= content.keys() else ""
    seconds = _number(content.get("seconds"))
    return (_shares(content), seconds, successes[:20], _against_control(content))


def _against_control(content: dict[str, Any]) -> str:
    """Return the excess recovery of an attack, or the gap to retraining of an evaluation.

    The gap is the distance of the noise predictions from the never-learned model over that of the
    original, on the first forget group. Returns "" without a control, and for damaged content.
    """
    try:
        control = content["control"]
        if "predictions" in control:
            rows = [row for row in control["predictions"] if row["role"] == "forget"]
            ratio = _number(rows[0]["relative_to_original"]["value"])
            return "" if ratio is None else f"gap {ratio:.2f}"
        first = control["models"][0]["excess"]["asr"]["difference"]
        excess = _number(first["value"])
        name = str(content["protocol"]["attack"])
        return "" if excess is None else f"{name} {100 * excess:+.1f}"
    except (TypeError, KeyError, IndexError, AttributeError):
        return ""


def _control_text(folder: Path) -> str:
    """Return the numbers of a run against its controls: its evaluation, then its newest attacks."""
    try:
        names = sorted(os.listdir(folder / "attacks"))[-ATTACKS:]
    except OSError:
        names = []
    files = [folder / "evaluation.json"]
    for name in names:
        files += [folder / "attacks" / name / file for file in ("attack.json", "found.json")]
    return ", ".join(text for path in files if (text := _facts(path)[3]))


def _attacks(folder: Path) -> list[str]:
    """Return the number of successful prompts of the newest attacks on a run, at most ATTACKS."""
    try:
        names = sorted(os.listdir(folder / "attacks"))[-ATTACKS:]
    except OSError:
        return []
    successes = (_facts(folder / "attacks" / name / "found.json")[2] for name in names)
    return [text for text in successes if text]


def pareto(desk: Desk, name: str) -> str:
    """Plot the retain accuracy against the concept rate as SVG.

    Raises UserError for an unknown name.
    """
    points = (
        local_points(desk)
        if safety.require_choice("plot", name, [LOCAL_RUNS, *studies_in_plot()]) == LOCAL_RUNS
        else study_points(name)
    )
    return figures.scatter(
        f"{name}: filled points are those that no other point beats on both axes",
        points,
        "concept rate, % (lower is better)",
        "retain accuracy, %",
    )


def runs_table(desk: Desk) -> str:
    """Return the table of the local runs: concept, method, training time and numbers."""
    cells_by_run: list[list[str]] = []
    for name, folder in desk.library.folders().items():
        recipe = recipe_in(folder)
        if recipe is None:
            continue
        concept, shares, seconds = (
            presets.concept_of(recipe),
            measured_rates(folder),
            _facts(folder / "done.json")[1],
        )
        state = f"{seconds:.0f} s" if seconds is not None else "unfinished"
        cells = [
            name,
            recipe.target,
            concept[1] if concept else presets.forgotten_text(recipe),
            recipe.method.name,
            str(recipe.training.steps),
            state,
            f"{shares[0]:.1f}" if shares else "",
            f"{shares[1]:.1f}" if shares else "",
            ", ".join(_attacks(folder)),
            _control_text(folder),
        ]
        cells_by_run.append(cells)
    heads = [
        "run",
        "target",
        "forgot",
        "method",
        "steps",
        "training",
        "concept rate %",
        "retain accuracy %",
        "attack successes",
        "against a never-learned model",
    ]
    if not any(cells[-1] for cells in cells_by_run):  # no run has a control
        heads, cells_by_run = heads[:-1], [cells[:-1] for cells in cells_by_run]
    rows = [
        "".join(f"<td>{escape(str(cell)[:CELL])}</td>" for cell in cells) for cells in cells_by_run
    ]
    head = "".join(f'<th scope="col">{h}</th>' for h in heads)
    if not rows:
        return '<p class="ce-quiet">There are no runs yet. New runs are listed here.</p>'
    return (
        '<div class="ce-scroll" tabindex="0" role="region" aria-label="runs"><table '
        f'class="ce-table"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table></div>"
    )


def measure(desk: Desk, run: str, n: Any) -> DemoJob:
    """Evaluate a run by its suite, as a job. Raises UserError."""
    safety.require_choice("run", run, desk.library.finished_runs())
    recipe = desk.library.recipe(run)
    if recipe is None:
        raise UserError(
            f"{run} has no recipe that says what it forgot; use `concept-eraser "
            "evaluate` with --suite"
        )
    folder = desk.library.folder(run)
    safety.require_no_code(recipe)
    safety.require_inside(folder)
    spec: dict[str, Any] = {
        "kind": "measure",
        "folder": str(folder),
        "suite": presets.suite_of(recipe, folder),
        "n": safety.whole_number("images a group", n),
    }
    if desk.library.controls and recipe.target == "denoiser":
        spec["controls"] = list(desk.library.controls)
    return desk.jobs.add("measure", f"measuring {run}", spec, folder)


def progress_html(desk: Desk, job: DemoJob | None) -> str:
    """Return the progress of the last measurement as HTML, or its end, or its error."""
    if job is None:
        return ""
    title = f"#{job.number} {job.title}"
    if job.state == "waiting":
        return notice(
            f"{title}: {desk.jobs.position(job)} before it, {minutes(job.seconds)} so far"
        )
    if job.state == "running":
        progress = f"{job.what} {job.count} of {job.total}" if job.total else job.what
        return notice(f"{title}: {progress}, {minutes(job.seconds)}")
    if job.state == "cancelled":
        return notice(f"{title}: cancelled; nothing was measured")
    if job.state == "failed":
        return alert(f"{title}: {job.error}")
    message = notice(
        f"{title}: done in {minutes(job.seconds)}; the numbers are in the table, the "
        "full report is report.html in its folder"
    )
    return message + alert(job.note)


def tab(gr: Any, desk: Desk) -> dict[str, Any]:
    """Build the tab. Returns the components that the timer updates, by name."""
    with gr.Row(equal_height=False):
        with gr.Column(scale=3, min_width=300):
            gr.HTML("<h2>Local runs</h2>")
            mine = gr.HTML(elem_id="runs-table")
            with gr.Row():
                run = gr.Dropdown(
                    [], allow_custom_value=True, label="Run", elem_id="measure-run", min_width=160
                )
                n = gr.Slider(
                    *safety.LIMITS["images a group"],
                    50,
                    step=2,
                    label="Images per group",
                    elem_id="measure-n",
                    min_width=160,
                )
                go = gr.Button("Measure", variant="primary", elem_id="measure-go", min_width=100)
            message = gr.HTML(elem_id="measure-said")
            state = gr.HTML(elem_id="measure-live")
        with gr.Column(scale=3, min_width=300):
            plots = [LOCAL_RUNS, *studies_in_plot()]
            first = "tiny_star" if "tiny_star" in plots else LOCAL_RUNS
            plot_menu = gr.Dropdown(plots, value=first, label="Plot", elem_id="plot-name")
            plot = gr.HTML(pareto(desk, first), elem_id="plot")
    name = gr.Dropdown(
        studies(),
        value="tiny_star" if "tiny_star" in studies() else None,
        label="Published tables",
        elem_id="table-name",
    )
    study_table = gr.Markdown(
        table("tiny_star") if "tiny_star" in studies() else "",
        elem_id="table",
        elem_classes="ce-scroll",
    )

    def safely(function: Any) -> Any:
        def call(*values: Any) -> str:
            try:
                return function(*values)
            except Exception as error:
                return alert(error_text(error))

        return call

    plot_menu.change(
        safely(lambda value: pareto(desk, value)),
        plot_menu,
        plot,
        queue=False,
        api_visibility="private",
    )
    name.change(safely(table), name, study_table, queue=False, api_name="table")
    event = go.click(
        safely(
            lambda value, size: quiet(
                f"#{measure(desk, value, size).number} was put into the queue"
            )
        ),
        [run, n],
        message,
        queue=False,
        api_name="measure",
    )
    return {
        "shown": state,
        "mine": mine,
        "run": run,
        "which": plot_menu,
        "plot": plot,
        "events": [event],
    }
