"""Pictures as HTML: side by side with what a judge sees in them, blurred where that is nudity, to be saved with their
settings. Whatever a user wrote is escaped here."""

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

SHOWN = 224  # pixels to which small pictures are enlarged on the page
ZIPPED = 6 * 2**20  # bytes up to which all pictures are offered in one file
JUDGES = ("auto", "bundled judge", "NudeNet", "none")


@dataclass(frozen=True)
class Seen:
    """What a judge says of a picture. boxes: label, score, (left, top, width, height) in pixels."""

    text: str = ""
    sensitive: bool = False
    shows: bool | None = None  # the concept that was to be forgotten, where the judge knows it
    boxes: Sequence[tuple[str, float, tuple[int, int, int, int]]] = ()


@dataclass(frozen=True)
class Column:
    """One model's pictures [n, h, w, 3] uint8; settings: of each, for its file."""

    title: str
    pictures: Any
    seen: Sequence[Seen]
    settings: Sequence[Mapping[str, Any]]
    before: bool = False
    files: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.files.extend(png(p, s) for p, s in zip(np.asarray(self.pictures), self.settings, strict=True))


def png(picture: np.ndarray, settings: Mapping[str, Any]) -> bytes:
    """[h, w, 3] uint8 as PNG whose text chunks say how it was made: `concept_eraser` (JSON) and `Description` (the prompt)."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    told = PngInfo()
    told.add_itxt("concept_eraser", json.dumps(dict(settings), sort_keys=True))
    told.add_itxt("Description", str(settings.get("prompt", "")))
    told.add_text("Software", "concept_eraser demo")
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "png", pnginfo=told)
    return buffer.getvalue()


def uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def look(pictures: Any, judge: str, concepts: Sequence[tuple[str, str]] = ()) -> list[Seen]:
    """What the judge sees in each picture. auto: the bundled judge for the bundled world's pictures, NudeNet for others."""
    if judge == "auto":
        judge = "bundled judge" if tuple(pictures.shape[1:3]) == (64, 64) else "NudeNet"
    if judge == "bundled judge":
        return _tiny(pictures, concepts)
    return [nude(found) for found in _detector().look_all(pictures)] if judge == "NudeNet" else [Seen() for _ in pictures]  # fmt: skip


def _tiny(pictures: Any, concepts: Sequence[tuple[str, str]]) -> list[Seen]:
    found = _judge().look(pictures)
    rows = [{name: str(found[name][i]) for name in found} for i in range(len(pictures))]
    return [Seen(_words(row), shows=any(row.get(a) == v for a, v in concepts) if concepts else None) for row in rows]


def _words(row: Mapping[str, str]) -> str:
    if row["shape"] == "none":
        return "no clear shape"
    return f"{row['style']} {row['color']} {row['shape']}, {row['background']}"


def nude(found: Sequence[Any]) -> Seen:
    """NudeNet's detections in words; sensitive is what UnlearnDiffAtk counts as nude."""
    from concept_eraser.evaluation.nudity import PRESETS

    told = ", ".join(f"{d.label.lower().replace('_', ' ')} {d.score:.0%}" for d in sorted(found, key=lambda d: -d.score)[:4])  # fmt: skip
    return Seen(told or "NudeNet sees nothing", bool(PRESETS["uda"].seen(found)), None, [(d.label.lower().replace("_", " "), d.score, d.box) for d in found])  # fmt: skip


@lru_cache(maxsize=1)
def _judge() -> Any:
    from concept_eraser.evaluation.judges.tiny import TinyJudge

    return TinyJudge()


@lru_cache(maxsize=1)
def _detector() -> Any:
    from concept_eraser.evaluation.nudity import Detector

    return Detector()


def comparison(columns: Sequence[Column], rows: Sequence[str]) -> str:
    """The page of Compare: a slider over the first pair, and a grid with one row a seed and one column a model."""
    if not columns:
        return ""
    head = "".join(f'<div role="columnheader" class="ce-head">{escape(c.title)}</div>' for c in columns)
    body = ""
    for i, row in enumerate(rows):
        cells = "".join(_cell(columns, k, i) for k in range(len(columns)))
        body += f'<div role="row" class="ce-row"><div role="rowheader" class="ce-seed">{escape(row)}</div>{cells}</div>'
    boxes = any(seen.boxes for column in columns for seen in column.seen)
    toggle = '<label class="ce-toggle"><input type="checkbox" class="ce-boxes"> Show boxes</label>' if boxes else ""
    whole = sum(len(file) for column in columns for file in column.files)
    save = f'<a class="ce-button" download="pictures.zip" href="{uri(_zip(columns), "application/zip")}">Save all with their settings</a>' if whole < ZIPPED else ""  # fmt: skip
    return f'<div class="ce-both" style="--n:{len(columns)}">{_slider(columns) if len(columns) > 1 else ""}<div class="ce-pictures">{toggle}<div role="table" aria-label="pictures by model and seed" class="ce-grid" style="--n:{len(columns)}"><div role="row" class="ce-row ce-heads"><div role="columnheader" class="ce-seed">seed</div>{head}</div>{body}</div>{save}</div></div>'  # fmt: skip


def _cell(columns: Sequence[Column], k: int, i: int) -> str:
    """One picture with its caption, its file, and for an erased one the button that puts it into the slider."""
    column, seen = columns[k], columns[k].seen[i]
    mark = {True: '<span class="ce-shows">shows it</span> ', False: '<span class="ce-gone">gone</span> ', None: ""}[seen.shows]  # fmt: skip
    partner = next((j for j in range(k - 1, -1, -1) if columns[j].before), None)
    pick = f'<button type="button" class="ce-link" onclick="cePick(this,{partner},{k},{i})">slider</button>' if partner is not None and not column.before else ""  # fmt: skip
    alt = f"{column.title}, seed {column.settings[i].get('seed')}: {seen.text or 'not judged'}"
    name = f"{column.title}-{column.settings[i].get('seed')}".replace(" ", "-").replace("/", "-")
    save = f'<a class="ce-link" download="{escape(name)}.png" href="{uri(column.files[i])}" aria-label="save {escape(alt)}">save</a>'
    return f'<figure role="cell" class="ce-cell">{picture(column.files[i], alt, seen, k, i)}<figcaption>{mark}{escape(seen.text)}<span class="ce-actions">{pick}{save}</span></figcaption></figure>'  # fmt: skip


def picture(file: bytes, alt: str, seen: Seen, k: int = 0, i: int = 0) -> str:
    """A picture with its boxes; a sensitive one is blurred until it is clicked (or its box is ticked by keyboard)."""
    width, height = _size(file)
    boxes = "".join(
        f'<span class="ce-box" style="left:{100 * x / width:.1f}%;top:{100 * y / height:.1f}%;width:{100 * w / width:.1f}%;height:{100 * h / height:.1f}%">{escape(label)} {score:.0%}</span>'
        for label, score, (x, y, w, h) in seen.boxes
    )
    image = f'<img src="{uri(file)}" data-k="{k}" data-i="{i}" alt="{escape(alt)}" class="{"ce-pixels" if width < SHOWN else ""}">'
    if not seen.sensitive:
        return f'<span class="ce-frame">{image}{boxes}</span>'
    return f'<label class="ce-frame ce-veiled"><input type="checkbox" aria-label="show a sensitive picture">{image}{boxes}<span class="ce-veil">sensitive: click to show</span></label>'  # fmt: skip


def _slider(columns: Sequence[Column]) -> str:
    """Before and after, one over the other; arrow keys move the line. Sensitive pairs stay out of it."""
    pairs = [(k, i) for k, c in enumerate(columns) if not c.before for i in range(len(c.seen)) if not c.seen[i].sensitive and not columns[0].seen[i].sensitive]  # fmt: skip
    if not pairs or not columns[0].before:
        return ""
    k, i = pairs[0]
    left, right = columns[0], columns[k]
    small = "ce-pixels" if _size(left.files[i])[0] < SHOWN else ""
    return (
        f'<div class="ce-slider" style="--at:50%"><div class="ce-stack"><img class="{small} ce-under" src="{uri(left.files[i])}" alt="before: {escape(left.seen[i].text)}">'
        f'<img class="{small} ce-over" src="{uri(right.files[i])}" alt="after: {escape(right.seen[i].text)}"><span class="ce-line-v"></span></div>'
        f'<div class="ce-ends"><span>{escape(left.title)}</span><span class="ce-right">{escape(right.title)}</span></div>'
        '<input type="range" min="0" max="100" value="50" aria-label="how much of the picture before is shown" oninput="this.parentNode.style.setProperty(\'--at\',this.value+\'%\')"></div>'
    )


def _zip(columns: Sequence[Column]) -> bytes:
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
