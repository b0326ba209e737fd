"""The tab Erase: choose a concept, its anchor and a method, and watch the training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concept_eraser.demo import figures, presets, safety
from concept_eraser.demo.context import Desk, alert, error_text, minutes, notice, quiet
from concept_eraser.demo.jobs import DemoJob
from concept_eraser.demo.state import BUNDLED
from concept_eraser.recipes import recipe as recipes
from concept_eraser.storage.writers import write_text
from concept_eraser.utils.commands import erase_command
from concept_eraser.utils.errors import UserError

STEPS, IMAGES = 80, 96  # defaults of a run of one or two minutes on two cores


@dataclass(frozen=True)
class Form:
    """The fields of the form.

    forget and retain are the user's own prompts, one a line. With them `concept` is ignored.
    """

    concept: str = "shape: star"
    anchor: str = "circle"
    method: str = next(iter(presets.METHODS))
    steps: Any = STEPS
    images: Any = IMAGES
    seed: Any = 0
    lr: Any = 0
    name: str = ""
    model: str = BUNDLED
    forget: str = ""
    retain: str = ""


def models(desk: Desk) -> list[str]:
    """List the models to erase from: the bundled one, the originals of the runs, and the runs."""
    names = desk.library.finished_runs()
    bases = [base for base in desk.library.bases_of(names) if not safety.names_code(base)]
    return list(dict.fromkeys([BUNDLED, *bases, *names]))


def start(desk: Desk, form: Form) -> DemoJob:
    """Check the form, make the run's folder and put the job into the queue.

    Raises UserError, and then leaves no folder.
    """
    method = safety.require_choice("method", form.method, list(presets.METHODS))
    numbers = {
        "steps": safety.whole_number("training steps", form.steps),
        "images": safety.whole_number("images per prompt set", form.images),
        "seed": safety.whole_number("training seed", form.seed),
    }
    lr = safety.number("learning rate", form.lr or 0) or None
    base_model = safety.require_choice("model", form.model, models(desk))
    is_run = base_model != BUNDLED and base_model in desk.library.folders()
    model = str(desk.library.folder(base_model)) if is_run else base_model
    if safety.names_code(model):
        raise UserError(
            f"{model[:80]!r} names code, and the page runs no code that a recipe names; "
            "choose another model"
        )
    own_prompts = (
        safety.prompts("prompts to forget", form.forget),
        safety.prompts("prompts to retain", form.retain),
    )
    if bool(own_prompts[0]) != bool(own_prompts[1]):
        raise UserError(
            "prompts of your own are needed for both objectives: what to forget, and what to retain"
        )
    title = own_prompts[0][0] if own_prompts[0] else form.concept.partition(": ")[2]
    proposal = f"{title}-{presets.METHODS[method].removeprefix('tiny_star_')}"
    with safety.claimed(desk.runs, form.name.strip(), proposal) as folder:
        if own_prompts[0]:
            objectives: dict[str, Any] = {
                "forget": own_prompts[0],
                "retain": own_prompts[1],
                "anchor": safety.prompt(form.anchor),
            }
        else:
            objectives = _bundled_objectives(form, folder)
        content = presets.content(method, model=model, lr=lr, **objectives, **numbers)
        recipes.load(content)
        return desk.jobs.add(
            "erase",
            f"erasing {title} ({folder.name})",
            {"kind": "erase", "recipe": content, "folder": str(folder)},
            folder,
        )


def _bundled_objectives(form: Form, folder: Path) -> dict[str, Any]:
    """Return the objectives for a concept of the bundled data set.

    Their prompt files are written into the run's folder.
    """
    safety.require_choice("concept", form.concept, presets.concepts())
    attribute, _, value = form.concept.partition(": ")
    anchor = safety.require_choice("anchor", form.anchor, presets.other_values(form.concept))
    values = {"forget": [value], "retain": [v for v in presets.WORLD[attribute] if v != value]}
    for objective, objective_values in values.items():
        write_text(folder / f"{objective}.yaml", presets.prompt_set(attribute, objective_values))
    return {name: str(folder / f"{name}.yaml") for name in values} | {"anchor": {attribute: anchor}}


def resume(desk: Desk, name: str) -> DemoJob:
    """Continue an unfinished run. Raises UserError for any other run."""
    safety.require_choice("unfinished run", name, desk.library.unfinished_runs())
    folder = desk.library.folder(name)
    recipe = desk.library.recipe(name)
    if recipe is not None:
        safety.require_no_code(recipe)
    safety.require_inside(folder)
    safety.require_space(folder)
    return desk.jobs.add(
        "erase", f"resuming {name}", {"kind": "erase", "folder": str(folder)}, folder
    )


def progress_html(desk: Desk, job: DemoJob | None) -> str:
    """Return the progress of an erasure as HTML: text and curves."""
    if job is None:
        return (
            '<p class="ce-quiet">Losses and the cosine of the two gradients appear here during '
            "the training.</p>"
        )
    rows = figures.rows(job.folder / "log.jsonl", "step")
    last = rows[-1]["step"] if rows else 0
    losses = {
        objective: figures.points(rows, "step", "losses", objective)
        for objective in ("forget", "retain")
    }
    angle = figures.points(rows, "step", "cosine")
    steps = job.spec.get("recipe", {}).get("training", {}).get("steps") or max(last, job.total)
    curves = figures.curves(
        "Losses", {k: v for k, v in losses.items() if v}, "step", last=steps, log=True
    )
    curves += figures.curves(
        "Cosine of the two gradients", {"cosine": angle}, "step", low=-1, high=1, last=steps
    )
    return f'{_describe(desk, job)}<div class="ce-figures">{curves}</div>'


def _describe(desk: Desk, job: DemoJob) -> str:
    if job.state == "waiting":
        return notice(
            f"#{job.number} {job.title}: {desk.jobs.position(job)} before it, "
            f"{minutes(job.seconds)} so far"
        )
    if job.state == "running":
        progress = f"{job.what} {job.count} of {job.total}" if job.total else job.what
        return notice(
            f"#{job.number} {job.title}: {progress}, {minutes(job.seconds)}. "
            f"{'Stopping after this step.' if job.cancelling else ''}"
        )
    if job.state == "done":
        return notice(
            f"#{job.number} {job.title}: done in {minutes(job.seconds)}; "
            f"{job.folder.name} can be selected in Compare"
        )
    if job.state == "cancelled":
        recipe = job.folder / "recipe.yaml"
        remedy = f"; it can be resumed here, or with {erase_command(job.folder, '--resume')}"
        is_resumable = recipe.is_file()
        return notice(f"#{job.number} {job.title}: cancelled{remedy if is_resumable else ''}")
    return alert(f"#{job.number} {job.title}: {job.error}")


def latest_job(desk: Desk, kind: str) -> DemoJob | None:
    """Return the running job of a kind, else the newest one."""
    jobs = [job for job in desk.jobs.all() if job.kind == kind]
    return next((job for job in jobs if job.state == "running"), jobs[-1] if jobs else None)


def tab(gr: Any, desk: Desk) -> dict[str, Any]:
    """Build the tab. Returns the components that the timer updates, by name."""
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=280):
            concept = gr.Dropdown(
                presets.concepts(), value="shape: star", label="Forget", elem_id="concept"
            )
            anchor = gr.Dropdown(
                presets.other_values("shape: star"),
                value="circle",
                label="Anchor concept (generated instead)",
                allow_custom_value=True,
                elem_id="anchor",
            )
            method = gr.Dropdown(
                list(presets.METHODS),
                value=Form.method,
                label="Method",
                info=(
                    "losses, trainable parameters and learning rate are those of the bundled "
                    "recipe of this name"
                ),
                elem_id="method",
            )
            steps = gr.Slider(5, 500, STEPS, step=5, label="Training steps", elem_id="train-steps")
            with gr.Accordion("Size, seed, name", open=False):
                size = gr.Slider(
                    4,
                    400,
                    IMAGES,
                    step=4,
                    label="Images per prompt set",
                    info="the model generates them before the training",
                    elem_id="train-images",
                )
                seed = gr.Number(0, label="Training seed", precision=0, elem_id="train-seed")
                lr = gr.Number(0, label="Learning rate", info="0: the recipe's", elem_id="train-lr")
                name = gr.Textbox(
                    "",
                    label="Name of the run",
                    placeholder="automatic",
                    elem_id="run-name",
                    max_length=200,
                )
            with gr.Accordion("Another model, prompts of your own", open=False):
                model = gr.Dropdown(
                    [BUNDLED],
                    value=BUNDLED,
                    allow_custom_value=True,
                    label="Erase from",
                    elem_id="erase-model",
                )
                forget = gr.Textbox(
                    "", label="Prompts to forget, one a line", lines=3, elem_id="own-forget"
                )
                retain = gr.Textbox(
                    "",
                    label="Prompts to retain, one a line",
                    lines=3,
                    info="with these, the anchor is a prompt, e.g. a person wearing clothes",
                    elem_id="own-retain",
                )
            go = gr.Button("Erase", variant="primary", elem_id="erase-go")
            with gr.Accordion("Resume a cancelled run", open=False):
                unfinished_runs = gr.Dropdown(
                    [], allow_custom_value=True, label="Unfinished runs", elem_id="unfinished"
                )
                resume_button = gr.Button("Resume", elem_id="resume-go")
        with gr.Column(scale=5, min_width=300):
            message = gr.HTML(elem_id="erase-said")
            live_view = gr.HTML(progress_html(desk, None), elem_id="erase-live", min_height=260)

    fields = [concept, anchor, method, steps, size, seed, lr, name, model, forget, retain]
    return {
        "shown": live_view,
        "left": unfinished_runs,
        "model": model,
        "events": _wire(
            gr,
            desk,
            fields=fields,
            message=message,
            unfinished_runs=unfinished_runs,
            go=go,
            resume_button=resume_button,
        ),
    }


def _wire(
    gr: Any,
    desk: Desk,
    fields: list,
    message: Any,
    unfinished_runs: Any,
    go: Any,
    resume_button: Any,
) -> list[Any]:
    """Connect the controls. Returns the events that put a job into the queue."""

    def other(value: str) -> Any:
        values = presets.other_values(value)
        return gr.Dropdown(values, value=values[0] if values else "")

    def begin(*values: Any) -> str:
        try:
            job = start(desk, Form(*values))
        except Exception as error:
            return alert(error_text(error))
        return quiet(f"#{job.number} was put into the queue, {desk.jobs.position(job)} before it")

    def go_on(value: str) -> str:
        try:
            return quiet(f"#{resume(desk, value).number} was put into the queue")
        except Exception as error:
            return alert(error_text(error))

    concept, anchor = fields[:2]
    concept.change(other, concept, anchor, queue=False, api_visibility="private")
    return [
        go.click(begin, fields, message, queue=False, api_name="erase"),
        resume_button.click(go_on, unfinished_runs, message, queue=False, api_name="resume"),
    ]
