"""The tab Results: the rendered tables of eval/results, the local runs' numbers, and a plot of
both.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatch
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from concept_eraser.demo import figures, presets, safety
from concept_eraser.demo.context import Desk, alert, minutes, notice, quiet, sentence
from concept_eraser.demo.jobs import DemoJob
from concept_eraser.demo.state import recipe_in
from concept_eraser.storage.readers import MEGABYTE, read_compressed_lines, read_json
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.migration import migrate_results

HERE = "runs of this page"
LARGEST = 16 * MEGABYTE  # bytes of a run's JSON file that the page reads
ATTACKS = 50  # of a run, that the table names
CELL = 200  # characters of a cell


def studies() -> list[str]:
    """Names of the rendered results."""
    folder = resources.folder("eval") / "results"
    return sorted(path.stem for path in folder.glob("*.md"))


def studies_in_plot() -> list[str]:
    """Studies with an evaluation a run, which have a place in the plot."""
    return [name for name in studies() if study_points(name)]


def table(name: str) -> str:
    """A rendered result as Markdown, without its images and links to files (they lie beside it in
    eval/results). Raises UserError.
    """
    path = resources.folder("eval") / "results" / f"{safety.one_of('result', name, studies())}.md"
    text = path.read_text(encoding="utf-8").split("\n## Contact sheets")[0]
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


def _shares(content: dict[str, Any]) -> tuple[float, float] | None:
    """Percent of forget prompts that still show the concept, and percent of retained prompts drawn
    as asked, after.

    None where they were not measured, or the content is damaged."""
    try:
        rows = {
            (str(r["metric"]), str(r["group"])): r["after"]["value"]
            for r in content.get("results", [])
        }
    except (TypeError, KeyError, AttributeError):
        return None
    concept_rate = _number(rows.get(("concept_rate", "direct")))
    accuracies = [
        _number(v)
        for (metric, group), v in rows.items()
        if group == "retained" and metric.startswith("accuracy")
    ]
    finite = [value for value in accuracies if value is not None]
    return None if concept_rate is None or not finite else (100 * concept_rate, 100 * finite[0])


def _number(value: Any) -> float | None:
    """A finite number; None for anything else that a file may hold there."""
    right = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12
    return float(value) if right else None


@lru_cache(maxsize=64)
def study_points(name: str) -> list[tuple[str, float, float]]:
    """Of each entry of a study: its label, and the means over the seeds. [] where the study has no
    evaluation a run.
    """
    path = resources.folder("eval") / "results" / f"{name}.jsonl.xz"
    points_by_entry: dict[str, list[tuple[float, float]]] = {}
    for content in read_compressed_lines(path) if path.exists() else ():
        key = content["key"]  # a key with a folder, e.g. attacks/, is of another measurement
        shares = (
            _shares(content.get("evaluation") or {})
            if fnmatch(key, "*_seed*") and "/" not in key
            else None
        )
        if shares:
            label = " ".join(filter(None, (content.get("task"), content.get("label", key))))
            points_by_entry.setdefault(label, []).append(shares)
    return [
        (label, sum(a for a, _ in some) / len(some), sum(b for _, b in some) / len(some))
        for label, some in points_by_entry.items()
    ]


def local_points(desk: Desk) -> list[tuple[str, float, float]]:
    points = []
    for name, folder in desk.library.folders().items():
        if shares := measured_rates(folder):
            points.append((name, *shares))
    return points


def measured_rates(folder: Path) -> tuple[float, float] | None:
    """The two numbers of a run's own evaluation; None where it has none."""
    return _facts(folder / "evaluation.json")[0]


def _facts(path: Path) -> tuple[Any, ...]:
    """What the table says of a JSON file of a run, read again only where the file changed: the page
    asks every second.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return (None, None, "")
    return _read_facts(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4096)
def _read_facts(path: Path, modification_time: int, size: int) -> tuple[Any, ...]:
    """Shares of an evaluation, seconds of a training, prompts broken by an attack; None, None and
    "" where there are none.
    """
    try:
        content = migrate_results(read_json(path, limit=LARGEST))
    except UserError:
        return (None, None, "")
    successes = f"{content['broken']}/{content['n']}" if {"broken", "n"} <= content.keys() else ""
    return (_shares(content), _number(content.get("seconds")), successes[:20])


def _attacks(folder: Path) -> list[str]:
    """How many prompts each attack on a run broke, of the newest ATTACKS."""
    try:
        names = sorted(os.listdir(folder / "attacks"))[-ATTACKS:]
    except OSError:
        return []
    successes = (_facts(folder / "attacks" / name / "found.json")[2] for name in names)
    return [text for text in successes if text]


def pareto(desk: Desk, name: str) -> str:
    """What was kept against what still shows, as SVG. Raises UserError for a name that is not
    offered.
    """
    points = (
        local_points(desk)
        if safety.one_of("plot", name, [HERE, *studies_in_plot()]) == HERE
        else study_points(name)
    )
    return figures.scatter(
        f"{name}: kept against forgotten; filled: no other is better on both",
        points,
        "still shows the concept, % (less is better)",
        "retained drawn as asked, %",
    )


def runs_table(desk: Desk) -> str:
    """The runs at hand: what they forgot, how, how long it took, and what was measured."""
    rows = []
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
        ]
        rows.append("".join(f"<td>{escape(str(cell)[:CELL])}</td>" for cell in cells))
    head = "".join(
        f'<th scope="col">{h}</th>'
        for h in (
            "run",
            "target",
            "forgot",
            "method",
            "steps",
            "training",
            "still shows %",
            "retained %",
            "broken by attacks",
        )
    )
    if not rows:
        return '<p class="ce-quiet">No runs yet: erase something, and it is listed here.</p>'
    return (
        '<div class="ce-scroll" tabindex="0" role="region" aria-label="runs"><table '
        f'class="ce-table"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table></div>"
    )


def measure(desk: Desk, run: str, n: Any) -> DemoJob:
    """Evaluate a run by its suite, as a job. Raises UserError."""
    safety.one_of("run", run, desk.library.finished_runs())
    recipe = desk.library.recipe(run)
    if recipe is None:
        raise UserError(
            f"{run} has no recipe that says what it forgot; use `concept-eraser "
            "evaluate` with --suite"
        )
    folder = desk.library.folder(run)
    safety.require_no_code(recipe)
    safety.require_inside(folder)
    spec = {
        "kind": "measure",
        "folder": str(folder),
        "suite": presets.suite_of(recipe),
        "n": safety.whole("images a group", n),
    }
    return desk.jobs.add("measure", f"measuring {run}", spec, folder)


def live(desk: Desk, job: DemoJob | None) -> str:
    """How the last measurement stands: where it is, what it found, or why there is nothing."""
    if job is None:
        return ""
    title = f"#{job.number} {job.title}"
    if job.state == "waiting":
        return notice(
            f"{title}: {desk.jobs.position(job)} before it, {minutes(job.seconds)} so far"
        )
    if job.state == "running":
        far = f"{job.what} {job.done} of {job.total}" if job.total else job.what
        return notice(f"{title}: {far}, {minutes(job.seconds)}")
    if job.state == "cancelled":
        return notice(f"{title}: cancelled; nothing was measured")
    if job.state == "failed":
        return alert(f"{title}: {job.error}")
    message = notice(
        f"{title}: done in {minutes(job.seconds)}; the numbers stand in the table, the "
        "whole report in report.html of its folder"
    )
    return message + alert(job.note)


def tab(gr: Any, desk: Desk) -> dict[str, Any]:
    """Build the tab; the components that the clock changes, by name."""
    with gr.Row(equal_height=False):
        with gr.Column(scale=3, min_width=300):
            gr.HTML("<h2>Runs here</h2>")
            mine = gr.HTML(elem_id="runs-table")
            with gr.Row():
                run = gr.Dropdown(
                    [], allow_custom_value=True, label="Run", elem_id="measure-run", min_width=160
                )
                n = gr.Slider(
                    *safety.LIMITS["images a group"],
                    50,
                    step=2,
                    label="Images a group",
                    elem_id="measure-n",
                    min_width=160,
                )
                go = gr.Button("Measure", variant="primary", elem_id="measure-go", min_width=100)
            message = gr.HTML(elem_id="measure-said")
            state = gr.HTML(elem_id="measure-live")
        with gr.Column(scale=3, min_width=300):
            plots = [HERE, *studies_in_plot()]
            first = "tiny_star" if "tiny_star" in plots else HERE
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
                return alert(sentence(error))

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
