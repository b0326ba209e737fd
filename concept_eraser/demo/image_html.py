"""Images as HTML with the judge's detections. Sensitive images are blurred.

All user text is escaped here.
"""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from html import escape
from typing import Any

import numpy as np

from concept_eraser.storage import base_model
from concept_eraser.utils.errors import UserError

ENLARGED_WIDTH = 224  # images below this width are enlarged without smoothing, in pixels
ZIP_LIMIT = 6 * 2**20  # largest size of all images that the page offers in one file, in bytes
JUDGES = ("auto", "bundled judge", "NudeNet", "none")


@dataclass(frozen=True)
class Judgement:
    """A judge's result on an image. boxes: label, score, (left, top, width, height) in pixels."""

    text: str = ""
    sensitive: bool = False
    # whether the image shows the erased concept; None if the judge does not know it
    shows: bool | None = None
    boxes: Sequence[tuple[str, float, tuple[int, int, int, int]]] = ()


@dataclass(frozen=True)
class ImageColumn:
    """One model's images [n, h, w, 3] uint8. `settings` has the metadata of each image's file."""

    title: str
    images: Any
    judgements: Sequence[Judgement]
    settings: Sequence[Mapping[str, Any]]
    before: bool = False
    files: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.files.extend(
            png(p, s) for p, s in zip(np.asarray(self.images), self.settings, strict=True)
        )


def png(image: np.ndarray, settings: Mapping[str, Any]) -> bytes:
    """Encode an image [h, w, 3] uint8 as PNG with its settings in text chunks.

    The chunk `concept_eraser` has them as JSON, the chunk `Description` has the prompt.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    metadata = PngInfo()
    metadata.add_itxt("concept_eraser", json.dumps(dict(settings), sort_keys=True))
    metadata.add_itxt("Description", str(settings.get("prompt", "")))
    metadata.add_text("Software", "concept_eraser demo")
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "png", pnginfo=metadata)
    return buffer.getvalue()


def uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def judge_images(
    images: Any,
    judge: str,
    concepts: Sequence[tuple[str, str]] = (),
    *,
    base: str,
    sensitive: bool = False,
) -> list[Judgement]:
    """Judge each image.

    "auto" is the bundled judge for images of the bundled model at its size, and NudeNet for others.

    Args:
        images: The images [n, h, w, 3] uint8.
        judge: One of JUDGES.
        concepts: The attribute and value of each erased concept.
        base: The original model of what generated the images.
        sensitive: Whether every image is sensitive, whatever the judge says.

    Returns:
        The judgement of each image.
    """
    if judge == "auto":
        is_own = _is_bundled(base) and tuple(images.shape[1:3]) == (64, 64)
        judge = "bundled judge" if is_own else "NudeNet"
    judgements = _judged(images, judge, concepts)
    return [replace(one, sensitive=one.sensitive or sensitive) for one in judgements]


def _is_bundled(base: str) -> bool:
    """Whether a model is the bundled one, one of its controls, or a run that began with it."""
    try:
        return base_model.is_bundled(base)
    except UserError:
        return False


def _judged(images: Any, judge: str, concepts: Sequence[tuple[str, str]]) -> list[Judgement]:
    if judge == "bundled judge":
        return _tiny(images, concepts)
    return (
        [nudity_judgement(detections) for detections in _detector().detect_all(images)]
        if judge == "NudeNet"
        else [Judgement() for _ in images]
    )


def _tiny(images: Any, concepts: Sequence[tuple[str, str]]) -> list[Judgement]:
    labels = _judge().classify(images)
    rows = [{name: str(labels[name][i]) for name in labels} for i in range(len(images))]
    return [
        Judgement(
            _words(row), shows=any(row.get(a) == v for a, v in concepts) if concepts else None
        )
        for row in rows
    ]


def _words(row: Mapping[str, str]) -> str:
    if row["shape"] == "none":
        return "no recognisable object"
    return f"{row['style']} {row['color']} {row['shape']}, {row['background']}"


def nudity_judgement(detections: Sequence[Any]) -> Judgement:
    """Describe NudeNet's detections. An image is sensitive if UnlearnDiffAtk counts it as nude."""
    from concept_eraser.evaluation.nudity import PRESETS

    text = ", ".join(
        f"{d.label.lower().replace('_', ' ')} {d.score:.0%}"
        for d in sorted(detections, key=lambda d: -d.score)[:4]
    )
    return Judgement(
        text or "no NudeNet detections",
        bool(PRESETS["uda"].counted_detections(detections)),
        None,
        [(d.label.lower().replace("_", " "), d.score, d.box) for d in detections],
    )


@lru_cache(maxsize=1)
def _judge() -> Any:
    from concept_eraser.evaluation.judges.tiny import TinyJudge

    return TinyJudge()


@lru_cache(maxsize=1)
def _detector() -> Any:
    from concept_eraser.evaluation.nudity import Detector

    return Detector()


def comparison(columns: Sequence[ImageColumn], rows: Sequence[str]) -> str:
    """Return the images of Compare as HTML.

    There is a slider over the first pair, and a grid with a row per seed and a column per model.
    """
    if not columns:
        return ""
    head = "".join(
        f'<div role="columnheader" class="ce-head">{escape(c.title)}</div>' for c in columns
    )
    body = ""
    for i, row in enumerate(rows):
        cells = "".join(_cell(columns, k, i) for k in range(len(columns)))
        body += (
            '<div role="row" class="ce-row"><div role="rowheader" '
            f'class="ce-seed">{escape(row)}</div>{cells}</div>'
        )
    boxes = any(judgement.boxes for column in columns for judgement in column.judgements)
    toggle = (
        '<label class="ce-toggle"><input type="checkbox" class="ce-boxes"> Show boxes</label>'
        if boxes
        else ""
    )
    total_size = sum(len(file) for column in columns for file in column.files)
    save = (
        (
            '<a class="ce-button" download="images.zip" '
            f'href="{uri(_zip(columns), "application/zip")}">Save all with their settings</a>'
        )
        if total_size < ZIP_LIMIT
        else ""
    )
    return (
        '<div class="ce-both" '
        f'style="--n:{len(columns)}">{_slider(columns) if len(columns) > 1 else ""}<div '
        f'class="ce-images">{toggle}<div role="table" aria-label="images by model and '
        f'seed" class="ce-grid" style="--n:{len(columns)}"><div role="row" class="ce-row '
        'ce-heads"><div role="columnheader" '
        f'class="ce-seed">seed</div>{head}</div>{body}</div>{save}</div></div>'
    )


def _cell(columns: Sequence[ImageColumn], k: int, i: int) -> str:
    """Return one image with its caption and its file. An erased one has a button for the slider."""
    column, judgement = columns[k], columns[k].judgements[i]
    mark = {
        True: '<span class="ce-shows">concept detected</span> ',
        False: '<span class="ce-gone">not detected</span> ',
        None: "",
    }[judgement.shows]
    partner = _before_of(columns, k)
    pick = (
        (
            '<button type="button" class="ce-link" '
            f'onclick="cePick(this,{partner},{k},{i})">slider</button>'
        )
        if partner is not None and not _is_pair_sensitive(columns, partner, k=k, i=i)
        else ""
    )
    alt = f"{column.title}, seed {column.settings[i].get('seed')}: {judgement.text or 'not judged'}"
    name = f"{column.title}-{column.settings[i].get('seed')}".replace(" ", "-").replace("/", "-")
    save = (
        f'<a class="ce-link" download="{escape(name)}.png" href="{uri(column.files[i])}" '
        f'aria-label="save {escape(alt)}">save</a>'
    )
    return (
        '<figure role="cell" '
        f'class="ce-cell">{image_cell(column.files[i], alt, judgement=judgement, k=k, i=i)}'
        f"<figcaption>{mark}{escape(judgement.text)}"
        f'<span class="ce-actions">{pick}{save}</span></figcaption></figure>'
    )


def image_cell(file: bytes, alt: str, judgement: Judgement, k: int = 0, i: int = 0) -> str:
    """Return an image with its boxes.

    A sensitive image is blurred until it is clicked, or its checkbox is ticked by keyboard.
    """
    width, height = _size(file)
    boxes = "".join(
        (
            '<span class="ce-box" '
            f'style="left:{100 * x / width:.1f}%;top:{100 * y / height:.1f}%;'
            f'width:{100 * w / width:.1f}%;height:{100 * h / height:.1f}%">'
            f"{escape(label)} {score:.0%}</span>"
        )
        for label, score, (x, y, w, h) in judgement.boxes
    )
    image = (
        f'<img src="{uri(file)}" data-k="{k}" data-i="{i}" alt="{escape(alt)}" '
        f'class="{"ce-pixels" if width < ENLARGED_WIDTH else ""}">'
    )
    if not judgement.sensitive:
        return f'<span class="ce-frame">{image}{boxes}</span>'
    return (
        '<label class="ce-frame ce-veiled"><input type="checkbox" aria-label="show a '
        f'sensitive image">{image}{boxes}<span class="ce-veil">sensitive: click to '
        "show</span></label>"
    )


def _slider(columns: Sequence[ImageColumn]) -> str:
    """Return the slider that overlays an image before and after. Arrow keys move its line.

    Sensitive pairs are left out.
    """
    pairs = [
        (before, k, i)
        for k, c in enumerate(columns)
        if (before := _before_of(columns, k)) is not None
        for i in range(len(c.judgements))
        if not _is_pair_sensitive(columns, before, k=k, i=i)
    ]
    if not pairs:
        return ""
    before, k, i = pairs[0]
    first, second = columns[before], columns[k]
    small = "ce-pixels" if _size(first.files[i])[0] < ENLARGED_WIDTH else ""
    return (
        '<div class="ce-slider" style="--at:50%"><div class="ce-stack"><img '
        f'class="{small} ce-under" src="{uri(first.files[i])}" alt="before: '
        f'{escape(first.judgements[i].text)}">'
        f'<img class="{small} ce-over" src="{uri(second.files[i])}" alt="after: '
        f'{escape(second.judgements[i].text)}"><span class="ce-line-v"></span></div>'
        f'<div class="ce-ends"><span>{escape(first.title)}</span><span '
        f'class="ce-right">{escape(second.title)}</span></div>'
        '<input type="range" min="0" max="100" value="50" aria-label="visible share of the '
        'image before" '
        "oninput=\"this.parentNode.style.setProperty('--at',this.value+'%')\"></div>"
    )


def _before_of(columns: Sequence[ImageColumn], k: int) -> int | None:
    """Return the position of an erased model's original, or None for an original."""
    if columns[k].before:
        return None
    return next((j for j in range(k - 1, -1, -1) if columns[j].before), None)


def _is_pair_sensitive(columns: Sequence[ImageColumn], before: int, k: int, i: int) -> bool:
    """Whether one of two images is sensitive. The slider would show it without its blur."""
    return columns[before].judgements[i].sensitive or columns[k].judgements[i].sensitive


def _zip(columns: Sequence[ImageColumn]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for k, column in enumerate(columns):
            plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in column.title)
            for settings, content in zip(column.settings, column.files, strict=True):
                file.writestr(f"{k}-{plain}/{settings.get('seed')}.png", content)
    return buffer.getvalue()


def _size(file: bytes) -> tuple[int, int]:
    """Read width and height from the header of a PNG."""
    return int.from_bytes(file[16:20], "big"), int.from_bytes(file[20:24], "big")
