"""The tab Images: reconstructions of a VAE and predictions of a classifier, before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from concept_eraser.demo import image_html, safety
from concept_eraser.demo.context import Desk, alert, error_text, quiet
from concept_eraser.demo.jobs import DemoJob
from concept_eraser.demo.state import BUNDLED
from concept_eraser.utils.errors import UserError

TARGETS = ("vae", "classifier", "clip")
# small runs that the page offers, from bundled models and data
OFFERED_RUNS: Mapping[str, dict[str, Any]] = {
    "star-clip": {
        "model": BUNDLED,
        "target": "clip",
        "templates": ["a picture of a {}"],
        "forget": {
            "data": "painted",
            "options": {"n": 400},
            "classes": ["star"],
            "loss": "relabel",
        },
        "retain": "rest",
        "trainable": "text_attention",
        "training": {"steps": 60, "batch_size": 64, "lr": 1e-3},
    },
    "star-vae": {
        "model": BUNDLED,
        "target": "vae",
        "forget": {
            "data": "painted",
            "options": {"n": 200},
            "classes": ["star"],
            "loss": "ascent",
            "kl": 1e-6,
        },
        "retain": {"data": "rest", "loss": "distill"},
        "training": {"steps": 20, "batch_size": 8, "lr": 1e-4},
    },
}
SHOWN_CLASSES = 3  # number of classes to show, those with the largest probabilities


@dataclass(frozen=True)
class Pair:
    """The modules before and after, with examples of the run's own data.

    `before` is None if the original was in memory and cannot be loaded. The first `forgotten`
    examples are of the forget set.
    """

    target: str
    before: Any
    after: Any
    names: tuple[str, ...]
    inputs: Any  # [n, ...] examples of the forgotten data, then of the retained
    labels: Sequence[int]
    forgotten: int


def make(desk: Desk, name: str) -> DemoJob:
    """Put one of the offered runs into the queue.

    Raises UserError if it exists already or the queue is full, and then leaves no new folder.
    """
    content = OFFERED_RUNS[safety.require_choice("run to make", name, list(OFFERED_RUNS))]
    with safety.claimed(desk.runs, name, name) as folder:
        return desk.jobs.add(
            "erase",
            f"training {name}",
            {"kind": "erase", "recipe": content, "folder": str(folder)},
            folder,
        )


def pair(desk: Desk, run: str) -> Pair:
    """Load both models of a run on labelled data, with a cache.

    Raises UserError if they cannot be loaded.
    """
    safety.require_choice("run", run, desk.library.finished_runs(TARGETS))
    folder = desk.library.folder(run)
    return _pair(
        folder, max((folder / name).stat().st_mtime for name in ("done.json", "recipe.yaml"))
    )


@lru_cache(maxsize=2)
def _pair(folder: Path, stamp: float) -> Pair:
    from concept_eraser.demo import presets
    from concept_eraser.models.families.clip import Clip
    from concept_eraser.models.loading import load_part
    from concept_eraser.targets.labelled_data import select_rows

    recipe = presets.read_recipe(folder)
    if recipe is None:
        raise UserError(f"{folder.name} has a recipe of another version; erase again")
    safety.require_no_code(recipe)
    after = load_part(folder, recipe.target)
    selected_rows = select_rows(recipe)
    data, forget_rows = selected_rows["forget"]
    rows = forget_rows[:4].tolist()
    inputs, labels = data.inputs(rows), data.labels[rows].tolist()
    if "retain" in selected_rows:
        import torch

        other, retain_rows = selected_rows["retain"]
        other_rows = retain_rows[:4].tolist()
        inputs = torch.cat([inputs, other.inputs(other_rows)])
        labels += other.labels[other_rows].tolist()
    is_reloadable = not (recipe.model.endswith("in memory") or recipe.model.startswith("a fresh "))

    def module(loaded_model: Any) -> Any:
        return (
            loaded_model.zero_shot(data.names, recipe.templates)
            if isinstance(loaded_model, Clip)
            else loaded_model.parts[recipe.target]
        )

    before = module(load_part(recipe.model, recipe.target)) if is_reloadable else None
    return Pair(
        recipe.target,
        before,
        after=module(after),
        names=data.names,
        inputs=inputs,
        labels=labels,
        forgotten=len(rows),
    )


def as_inputs(files: Sequence[str], like: Any) -> Any:
    """Convert uploaded images to the shape and range of the data [n, ...].

    Raises UserError if a file is not an image, or the data are not images.
    """
    import torch
    from PIL import Image

    from concept_eraser.data.images import read_image

    if len(files) > safety.UPLOADS:
        raise UserError(f"{len(files)} images; at most {safety.UPLOADS} are allowed at once")
    shape = tuple(like.shape[1:])
    side = round(shape[0] ** 0.5) if len(shape) == 1 else shape[-1]
    channels = shape[0] if len(shape) == 3 else 1
    if (len(shape) == 1 and side * side != shape[0]) or len(shape) > 3 or channels not in (1, 3):
        raise UserError(f"this run's data are not images (an example has the shape {list(shape)})")
    low, high = value_range(like)
    inputs = []
    for file in files:
        _require_small(Path(file))
        image = Image.fromarray(read_image(Path(file)))
        image = image.convert("RGB" if channels == 3 else "L").resize(
            (side, shape[-2] if len(shape) > 1 else side)
        )
        array = torch.from_numpy(np.asarray(image, np.float32).copy()) / 255 * (high - low) + low
        inputs.append(
            array.permute(2, 0, 1).reshape(shape) if channels == 3 else array.reshape(shape)
        )
    return torch.stack(inputs)


def _require_small(path: Path) -> None:
    """Raise UserError if a file is not an image of an allowed format and size.

    The image data are not decoded.
    """
    from PIL import Image

    try:
        with Image.open(path, formats=safety.FORMATS) as image:
            width, height = image.size
    except Exception as error:  # Pillow raises many types of errors for damaged files
        raise UserError(
            f"{path.name[:80]} cannot be read as an image ({type(error).__name__}); "
            f"give a file of {', '.join(safety.FORMATS)}"
        ) from None
    if width * height > safety.PIXELS:
        raise UserError(
            f"{path.name[:80]} has {width} x {height} pixels; at most "
            f"{safety.PIXELS // 10**6} million are allowed, so scale it down"
        )


def value_range(data: Any) -> tuple[float, float]:
    """Return the values of black and of white in the examples [n, ...] of a run's own data."""
    return -1.0 if float(data.min()) < 0 else 0.0, max(1.0, float(data.max()))


def as_images(values: Any, like: Any) -> np.ndarray:
    """Convert examples [n, ...] in the range of the data `like` to images [n, h, w, 3] uint8."""
    low, high = value_range(like)
    array = values.detach().cpu().float().numpy()
    array = np.clip((array - low) / (high - low), 0, 1)
    if array.ndim == 2:
        side = round(array.shape[1] ** 0.5)
        array = array.reshape(-1, 1, side, array.shape[1] // side)
    array = array[:, None] if array.ndim == 3 else array
    array = array.repeat(3, 1) if array.shape[1] == 1 else array[:, :3]
    return (array.transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)


def show(desk: Desk, run: str, files: Sequence[str]) -> str:
    """Show the results of the models before and after on images, as HTML.

    The images are the uploaded ones, or examples of the run's own data.
    """
    import torch

    models = pair(desk, run)
    inputs = as_inputs(files, models.inputs) if files else models.inputs
    labels = (
        [None] * len(inputs)
        if files
        else [models.names[i] if i < len(models.names) else str(i) for i in models.labels]
    )
    with torch.no_grad():
        answers = {
            when: _answers(models, module, inputs)
            for when, module in (("before", models.before), ("after", models.after))
            if module is not None
        }
    rows = ""
    for i, image in enumerate(as_images(inputs, models.inputs)):
        file = image_html.png(image, {"example": i})
        cells = "".join(
            f'<td><span class="ce-when">{when}</span>{answers[when][i]}</td>' for when in answers
        )
        heading = (
            "your image"
            if labels[i] is None
            else f"{labels[i]} ({'forgotten' if i < models.forgotten else 'retained'})"
        )
        rows += (
            '<tr><th scope="row"><img class="ce-pixels ce-small" '
            f'src="{image_html.uri(file)}" '
            f'alt="{escape(heading)}"><br>{escape(heading)}</th>{cells}</tr>'
        )
    head = "".join(f'<th scope="col">{when}</th>' for when in answers)
    note = (
        (
            '<p class="ce-quiet">The original model was in memory and cannot be loaded. Only '
            "the erased model is shown.</p>"
        )
        if models.before is None
        else ""
    )
    return (
        f'{note}<div class="ce-scroll"><table class="ce-table"><thead><tr><th '
        f'scope="col">image</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _answers(pair: Pair, module: Any, inputs: Any) -> list[str]:
    """Return a cell per image: the reconstruction with its PSNR, or the most probable classes."""
    from concept_eraser.models.base import moments
    from concept_eraser.models.base import to_pixels as decoded

    inputs = inputs.to(next(module.parameters()).device)
    if pair.target == "vae":
        reconstructions = (
            decoded(module.decode(moments(module.encode(inputs))[0])).reshape(inputs.shape).float()
        )
        low, high = value_range(pair.inputs)
        span = high - low
        errors = (reconstructions - inputs).square().flatten(1).mean(1).clamp(min=1e-12)
        images = [
            image_html.uri(image_html.png(p, {"reconstruction": i}))
            for i, p in enumerate(as_images(reconstructions, pair.inputs))
        ]
        return [
            (
                f'<img class="ce-pixels ce-small" src="{image}" alt="reconstruction, '
                f"{10 * np.log10(span**2 / float(e)):.1f} "
                f'dB"><br>{10 * np.log10(span**2 / float(e)):.1f} dB'
            )
            for image, e in zip(images, errors, strict=True)
        ]
    top_classes = module(inputs).softmax(1).topk(min(SHOWN_CLASSES, len(pair.names)))
    return [
        "".join(
            (
                '<div class="ce-prob" '
                f'style="--p:{100 * float(p):.0f}%"><span>{escape(pair.names[int(k)])}</span>'
                f"<span>{float(p):.0%}</span></div>"
            )
            for p, k in zip(ps, ks, strict=True)
        )
        for ps, ks in zip(top_classes.values, top_classes.indices, strict=True)
    ]


def tab(gr: Any, desk: Desk) -> dict[str, Any]:
    """Build the tab. Returns the components that the timer updates, by name."""
    with gr.Row(equal_height=False):
        with gr.Column(scale=2, min_width=280):
            run = gr.Dropdown(
                [],
                allow_custom_value=True,
                label="Run with target vae, classifier or clip",
                elem_id="images-run",
            )
            files = gr.File(
                label=(f"Your images, at most {safety.UPLOADS} (default: the run's own data)"),
                file_count="multiple",
                file_types=["image"],
                elem_id="images-files",
            )
            go = gr.Button("Show", variant="primary", elem_id="images-go")
            gr.HTML(
                '<p class="ce-quiet"><code>concept-eraser erase</code> or Python makes such '
                "runs (docs/targets.md). Two small examples, one minute each:</p>"
            )
            with gr.Row():
                offers = {
                    name: gr.Button(
                        f"Make {name}", size="sm", min_width=110, elem_id=f"make-{name}"
                    )
                    for name in OFFERED_RUNS
                }
        with gr.Column(scale=5, min_width=300):
            table = gr.HTML(elem_id="images-shown", min_height=200)

    def answer(name: str, rows: list[str] | None) -> str:
        try:
            return show(desk, name, rows or [])
        except Exception as error:
            return alert(error_text(error))

    def order(name: str) -> Callable[[], str]:
        def add() -> str:
            try:
                return quiet(
                    f"#{make(desk, name).number} was put into the queue; it can be "
                    "selected here when it is done"
                )
            except Exception as error:
                return alert(error_text(error))

        return add

    events = [
        button.click(order(name), None, table, queue=False, api_visibility="private")
        for name, button in offers.items()
    ]
    go.click(
        answer,
        [run, files],
        table,
        concurrency_id="draw",
        concurrency_limit=1,
        api_visibility="private",
    )
    return {"run": run, "events": events}
