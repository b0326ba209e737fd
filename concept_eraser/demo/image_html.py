"""Images as HTML with the judge's detections, blurred where sensitive, saved with their settings.

All user text is escaped here.
"""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from typing import Any

import numpy as np

SHOWN = 224  # pixels to which small images are enlarged on the page
ZIPPED = 6 * 2**20  # bytes up to which all images are offered in one file
JUDGES = ("auto", "bundled judge", "NudeNet", "none")


@dataclass(frozen=True)
class Seen:
    """What a judge says of an image. boxes: label, score, (left, top, width, height) in pixels."""

    text: str = ""
    sensitive: bool = False
    shows: bool | None = None  # the concept that was to be forgotten, where the judge knows it
    boxes: Sequence[tuple[str, float, tuple[int, int, int, int]]] = ()


@dataclass(frozen=True)
class ImageColumn:
    """One model's images [n, h, w, 3] uint8; settings: of each, for its file."""

    title: str
    images: Any
    judgements: Sequence[Seen]
    settings: Sequence[Mapping[str, Any]]
    before: bool = False
    files: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.files.extend(
            png(p, s) for p, s in zip(np.asarray(self.images), self.settings, strict=True)
        )


def png(image_cell: np.ndarray, settings: Mapping[str, Any]) -> bytes:
    """[h, w, 3] uint8 as PNG whose text chunks say how it was made: `concept_eraser` (JSON) and
    `Description` (the prompt).
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    metadata = PngInfo()
    metadata.add_itxt("concept_eraser", json.dumps(dict(settings), sort_keys=True))
    metadata.add_itxt("Description", str(settings.get("prompt", "")))
    metadata.add_text("Software", "concept_eraser demo")
    buffer = io.BytesIO()
    Image.fromarray(image_cell).save(buffer, "png", pnginfo=metadata)
    return buffer.getvalue()


def uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def look(images: Any, judge: str, concepts: Sequence[tuple[str, str]] = ()) -> list[Seen]:
    """What the judge sees in each image. auto: the bundled judge for the bundled world's
    images, NudeNet for others.
    """
    if judge == "auto":
        judge = "bundled judge" if tuple(images.shape[1:3]) == (64, 64) else "NudeNet"
    if judge == "bundled judge":
        return _tiny(images, concepts)
    return (
        [nude(detections) for detections in _detector().look_all(images)]
        if judge == "NudeNet"
        else [Seen() for _ in images]
    )


def _tiny(images: Any, concepts: Sequence[tuple[str, str]]) -> list[Seen]:
    labels = _judge().look(images)
    rows = [{name: str(labels[name][i]) for name in labels} for i in range(len(images))]
    return [
        Seen(_words(row), shows=any(row.get(a) == v for a, v in concepts) if concepts else None)
        for row in rows
    ]


def _words(row: Mapping[str, str]) -> str:
    if row["shape"] == "none":
        return "no clear shape"
    return f"{row['style']} {row['color']} {row['shape']}, {row['background']}"


def nude(detections: Sequence[Any]) -> Seen:
    """NudeNet's detections in words; sensitive is what UnlearnDiffAtk counts as nude."""
    from concept_eraser.evaluation.nudity import PRESETS

    text = ", ".join(
        f"{d.label.lower().replace('_', ' ')} {d.score:.0%}"
        for d in sorted(detections, key=lambda d: -d.score)[:4]
    )
    return Seen(
        text or "NudeNet sees nothing",
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
    """The page of Compare: a slider over the first pair, and a grid with one row a seed and one
    column a model.
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
    whole = sum(len(file) for column in columns for file in column.files)
    save = (
        (
            '<a class="ce-button" download="images.zip" '
            f'href="{uri(_zip(columns), "application/zip")}">Save all with their settings</a>'
        )
        if whole < ZIPPED
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
    """One image with its caption, its file, and for an erased one the button that puts it into
    the slider.
    """
    column, judgement = columns[k], columns[k].judgements[i]
    mark = {
        True: '<span class="ce-shows">shows it</span> ',
        False: '<span class="ce-gone">gone</span> ',
        None: "",
    }[judgement.shows]
    partner = next((j for j in range(k - 1, -1, -1) if columns[j].before), None)
    pick = (
        (
            '<button type="button" class="ce-link" '
            f'onclick="cePick(this,{partner},{k},{i})">slider</button>'
        )
        if partner is not None and not column.before
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
        f'class="ce-cell">{image_cell(column.files[i], alt, judgement, k, i)}'
        f"<figcaption>{mark}{escape(judgement.text)}"
        f'<span class="ce-actions">{pick}{save}</span></figcaption></figure>'
    )


def image_cell(file: bytes, alt: str, judgement: Seen, k: int = 0, i: int = 0) -> str:
    """An image with its boxes; a sensitive one is blurred until it is clicked (or its box is
    ticked by keyboard).
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
        f'class="{"ce-pixels" if width < SHOWN else ""}">'
    )
    if not judgement.sensitive:
        return f'<span class="ce-frame">{image}{boxes}</span>'
    return (
        '<label class="ce-frame ce-veiled"><input type="checkbox" aria-label="show a '
        f'sensitive image">{image}{boxes}<span class="ce-veil">sensitive: click to '
        "show</span></label>"
    )


def _slider(columns: Sequence[ImageColumn]) -> str:
    """Before and after, one over the other; arrow keys move the line. Sensitive pairs stay out of
    it.
    """
    pairs = [
        (k, i)
        for k, c in enumerate(columns)
        if not c.before
        for i in range(len(c.judgements))
        if not c.judgements[i].sensitive and not columns[0].judgements[i].sensitive
    ]
    if not pairs or not columns[0].before:
        return ""
    k, i = pairs[0]
    first, second = columns[0], columns[k]
    small = "ce-pixels" if _size(first.files[i])[0] < SHOWN else ""
    return (
        '<div class="ce-slider" style="--at:50%"><div class="ce-stack"><img '
        f'class="{small} ce-under" src="{uri(first.files[i])}" alt="before: '
        f'{escape(first.judgements[i].text)}">'
        f'<img class="{small} ce-over" src="{uri(second.files[i])}" alt="after: '
        f'{escape(second.judgements[i].text)}"><span class="ce-line-v"></span></div>'
        f'<div class="ce-ends"><span>{escape(first.title)}</span><span '
        f'class="ce-right">{escape(second.title)}</span></div>'
        '<input type="range" min="0" max="100" value="50" aria-label="how much of the '
        'image before is shown" '
        "oninput=\"this.parentNode.style.setProperty('--at',this.value+'%')\"></div>"
    )


def _zip(columns: Sequence[ImageColumn]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for k, column in enumerate(columns):
            plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in column.title)
            for settings, content in zip(column.settings, column.files, strict=True):
                file.writestr(f"{k}-{plain}/{settings.get('seed')}.png", content)
    return buffer.getvalue()


def _size(file: bytes) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    return int.from_bytes(file[16:20], "big"), int.from_bytes(file[20:24], "big")
