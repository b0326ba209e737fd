"""The tab Attack: run an attack and show its progress."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from concept_eraser import registry
from concept_eraser.demo import figures, image_html, presets, safety
from concept_eraser.demo.context import Desk, alert, error_text, minutes, notice, quiet
from concept_eraser.demo.jobs import DemoJob
from concept_eraser.storage.readers import MEGABYTE, read_json
from concept_eraser.utils.errors import UserError

# Options that make an attack generate an image more often than by default, so that the page shows
# its progress.
CADENCE: Mapping[str, dict[str, Any]] = {
    "unlearn_diff": {"iterations": 10, "times": 200},
    "concept_inversion": {"every": 25},
    "p4d": {"every": 10},
    "mma_diffusion": {"every": 20},
    "ring_a_bell": {"every": 50},
    "relearning": {"every": 5},
    "soft_prompt": {"every": 10},
}


LARGEST = 16 * MEGABYTE  # largest size of the file of an ended attack


def names() -> list[str]:
    return registry.names("attack")


def start(
    desk: Desk, run: str, attack: str, n: Any, rounds: Any, seconds: Any, seed: Any
) -> DemoJob:
    """Check the settings and put the attack into the queue. Raises UserError."""
    safety.require_choice("run", run, desk.library.finished_runs())
    safety.require_choice("attack", attack, names())
    safety.require_inside(desk.library.folder(run))
    numbers = {
        "n": safety.whole_number("prompts", n),
        "rounds": safety.whole_number("rounds", rounds),
        "seconds": safety.number("seconds", seconds),
        "seed": safety.whole_number("training seed", seed),
    }
    recipe = desk.library.recipe(run)
    if recipe is None:
        raise UserError(
            f"{run} has no recipe that says what it forgot; use `concept-eraser attack` "
            "with --suite"
        )
    safety.require_no_code(recipe)
    suite = presets.suite_of(recipe, desk.library.folder(run))
    if attack == "paraphrase" and suite != "tiny_star":
        raise UserError(
            "the attack 'paraphrase' has other names for the star only; choose another attack"
        )
    attacks = desk.library.folder(run) / "attacks"
    with safety.claimed(attacks, "", f"demo-{attack}", "attack") as folder:
        spec: dict[str, Any] = {
            "kind": "attack",
            "run": str(desk.library.folder(run)),
            "base": recipe.model,
            "suite": suite,
            "attack": attack,
            "options": CADENCE.get(attack, {}),
            "folder": str(folder),
            **numbers,
        }
        if desk.library.controls:
            spec["controls"] = list(desk.library.controls)
        return desk.jobs.add("attack", f"{attack} on {run}", spec, folder)


def progress_html(desk: Desk, job: DemoJob | None) -> str:
    """Return the progress of an attack as HTML: text, curves, and the best image so far."""
    if job is None:
        return (
            '<p class="ce-quiet">The loss, and the image that is closest to the '
            "concept, appear here after every round.</p>"
        )
    rows = figures.rows(job.folder / "rounds.jsonl", "round")
    loss = figures.points(rows, "round", "loss")
    curves = figures.curves(
        "Loss of the search", {"loss": loss} if loss else {}, "round", last=len(rows)
    )
    confidence = {
        "best so far": figures.points(rows, "round", "best"),
        "this round": figures.points(rows, "round", "shows"),
    }
    curves += figures.curves(
        "Probability that the concept is shown",
        confidence if rows else {},
        "round",
        low=0,
        high=1,
        last=len(rows),
    )
    return (
        f"{_describe(desk, job, rows)}{_against_controls(job)}{_best(job, rows)}"
        f'<div class="ce-figures">{curves}</div>'
    )


def _read_summary(path: Path) -> dict[str, Any]:
    """Return the file of an ended attack. It is empty before the end."""
    try:
        content = read_json(path, limit=LARGEST)
    except UserError:  # not written
        return {}
    return content if isinstance(content, dict) else {}


def _against_controls(job: DemoJob) -> str:
    """Return the rates on the run and on the controls as HTML. "" without a control."""
    if not job.spec.get("controls"):
        return ""
    summary = _read_summary(job.folder / "found.json")
    notes = "".join(
        quiet(f"without a never-learned model: {reason}") for reason in summary.get("left_out", ())
    )
    if "control" not in summary:
        is_missing = bool(summary) and not job.active and "left_out" not in summary
        text = "the attack on the never-learned model did not end, so there is no excess recovery"
        return notes or (quiet(text) if is_missing else "")
    from concept_eraser.reporting import control_tables

    rows = control_tables.excess_rows(summary)
    if not rows:
        return quiet("one prompt has no rate with an interval; attack more prompts") + notes
    head = "".join(f'<th scope="col">{name}</th>' for name in control_tables.EXCESS_COLUMNS)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        '<div class="ce-scroll" tabindex="0" role="region" aria-label="excess recovery">'
        "<p>Excess recovery: the success on the run minus that on a model that never learned the "
        "concept, by the same attack on the same prompts and seeds. Intervals are 95 %.</p>"
        f'<table class="ce-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{notes}"
    )


def _describe(desk: Desk, job: DemoJob, rows: list[dict[str, Any]]) -> str:
    success_text = (
        f"{rows[-1]['fell']} of {rows[-1]['n']} prompts succeeded after {len(rows)} rounds"
        if rows
        else "no round yet"
    )
    if job.state == "waiting":
        return notice(
            f"#{job.number} {job.title}: {desk.jobs.position(job)} before it, "
            f"{minutes(job.seconds)} so far"
        )
    if job.state == "running":
        return notice(
            f"#{job.number} {job.title}: {success_text}, {minutes(job.seconds)}; now: {job.what}"
        )
    if job.state == "failed":
        return alert(f"#{job.number} {job.title}: {job.error}")
    summary = _read_summary(job.folder / "found.json")
    end_reason = str(summary.get("ended", "stopped by hand"))
    return notice(
        f"#{job.number} {job.title}: {success_text}; {end_reason} ({minutes(job.seconds)})"
    )


def _best(job: DemoJob, rows: list[dict[str, Any]]) -> str:
    """Return the image of the clean prompt, the best images and the text of the best as HTML."""
    from concept_eraser.evaluation.attacks import controlled

    cells = ""
    files = {
        "before.png": "clean prompt",
        "best.png": "best so far",
        f"{controlled.FOLDER}/best.png": "best on the never-learned model",
    }
    for name, title in files.items():
        path = job.folder / name
        if path.exists():
            file = path.read_bytes()
            judgement = _judgement(job, file)
            alt = f"{title}: {judgement.text or 'not judged'}"
            cells += (
                "<figure "
                f'class="ce-cell">{image_html.image_cell(file, alt, judgement)}'
                f"<figcaption><b>{title}</b> {escape(judgement.text)}</figcaption></figure>"
            )
    text = ""
    if rows:
        last = rows[-1]
        source_text = (
            escape(last["text"])
            if last["text"] is not None
            else "(no text: an embedding or changed weights)"
        )
        text = (
            "<dl "
            f'class="ce-texts"><dt>prompt</dt><dd>{escape(last["prompt"])}</dd>'
            f"<dt>best attack</dt><dd><code>{source_text}</code></dd>"
            f"<dt>seed</dt><dd>{last['seed']}</dd></dl>"
        )
    return f'<div class="ce-best">{cells}{text}</div>' if cells else ""


def _judgement(job: DemoJob, file: bytes) -> image_html.Judgement:
    """Judge an image of an attack. It is sensitive if the suite is, whatever the judge says."""
    import io

    import numpy as np
    import torch
    from PIL import Image

    array = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
    return image_html.judge_images(
        torch.from_numpy(array.copy())[None],
        "auto",
        base=job.spec["base"],
        sensitive=presets.is_suite_sensitive(job.spec["suite"]),
    )[0]


def tab(gr: Any, desk: Desk) -> dict[str, Any]:
    """Build the tab. Returns the components that the timer updates, by name."""
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=280):
            run = gr.Dropdown(
                [], allow_custom_value=True, label="Erased model", elem_id="attack-run"
            )
            attack = gr.Dropdown(
                [
                    (f"{registry.summary('attack', name).partition(':')[0]} ({name})", name)
                    for name in names()
                ],
                value="unlearn_diff",
                label="Attack",
                elem_id="attack-name",
            )
            seconds = gr.Slider(
                *safety.LIMITS["seconds"],
                120,
                step=5,
                label="Budget: seconds",
                elem_id="attack-seconds",
            )
            rounds = gr.Slider(
                *safety.LIMITS["rounds"],
                60,
                step=1,
                label="Budget: rounds",
                elem_id="attack-rounds",
            )
            with gr.Accordion("Prompts and seed", open=False):
                n = gr.Slider(
                    *safety.LIMITS["prompts"],
                    4,
                    step=1,
                    label="Prompts attacked at once",
                    elem_id="attack-n",
                )
                seed = gr.Number(0, label="Seed of the attack", precision=0, elem_id="attack-seed")
            go = gr.Button("Attack", variant="primary", elem_id="attack-go")
            gr.HTML(
                '<p class="ce-quiet">To stop at any time: Cancel, at the top. The best '
                "image remains. For rates with intervals use <code>concept-eraser "
                "attack</code>.</p>"
            )
            if desk.library.controls:
                gr.HTML(
                    '<p class="ce-quiet">The same attack then runs on the models that never '
                    "learned the concept. The budget holds for each model.</p>"
                )
        with gr.Column(scale=5, min_width=300):
            message = gr.HTML(elem_id="attack-said")
            live_view = gr.HTML(progress_html(desk, None), elem_id="attack-live", min_height=260)

    def begin(*values: Any) -> str:
        try:
            job = start(desk, *values)
        except Exception as error:
            return alert(error_text(error))
        return quiet(f"#{job.number} was put into the queue, {desk.jobs.position(job)} before it")

    event = go.click(
        begin, [run, attack, n, rounds, seconds, seed], message, queue=False, api_name="attack"
    )
    return {"shown": live_view, "run": run, "events": [event]}
