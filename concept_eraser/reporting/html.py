"""Functions for all HTML pages: images as data URIs, blurred if sensitive, and the page's file."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from concept_eraser.evaluation import suite as suites
from concept_eraser.storage.writers import write_text
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.provenance import version

CELLS = 8  # number of colours of a blurred image in each direction
LONGEST = 256  # pixels of a thumbnail's longer side
_MARK = 'name="generator" content="concept_eraser'
_BLUR_NOTE = (
    f"images are blurred in the file itself ({CELLS} x {CELLS} colours each); "
    "--show-sensitive shows them"
)


def is_sensitive(content: Mapping[str, Any]) -> bool:
    """Whether the images of an evaluation or an attack are blurred, by its JSON.

    They are blurred if its attribute, judge or a metric is about nudity, or its suite is sensitive.
    """
    protocol = content["protocol"]
    suite = protocol.get("suite", protocol)  # an attack's protocol holds the suite
    return suites.shows_nudity(suite) or bool(content.get("sensitive"))


def blur_note(sensitive: bool, show_sensitive: bool) -> str:
    """Return the note about blurred images, or "" if there are none."""
    return _BLUR_NOTE if sensitive and not show_sensitive else ""


def blur_image(image: Image.Image) -> Image.Image:
    """Blur an image: the mean colours of CELLS x CELLS fields, interpolated, at the same size."""
    small = image.resize((CELLS, CELLS), Image.Resampling.BOX)
    return small.resize(image.size, Image.Resampling.BICUBIC)


def all_blurred(images: Tensor) -> Tensor:
    """Blur images [n, h, w, 3] uint8."""
    small = [blur_image(Image.fromarray(pixels)) for pixels in images.numpy()]
    return torch.stack([torch.from_numpy(np.array(image)) for image in small])


def embed(content: bytes, kind: str = "png") -> str:
    """Encode an image file as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image_tag(pixels: Tensor, *, blur: bool, longest: int | None = None) -> str:
    """Encode an image [h, w, 3] uint8 as a data URI: PNG, or JPEG if larger than `longest`."""
    image = Image.fromarray(pixels.numpy())
    kind = "png" if longest is None or max(image.size) <= longest else "jpeg"
    if longest is not None:
        image.thumbnail((longest, longest))  # does nothing to a smaller one
    buffer = io.BytesIO()
    (blur_image(image) if blur else image).save(buffer, format=kind, quality=90)
    return embed(buffer.getvalue(), kind)


@dataclass(frozen=True)
class Figure:
    """An image of a page.

    Attributes:
        uri: the image as a data URI.
        alt: the text alternative.
        wide: whether it has several panels.
    """

    uri: str
    alt: str
    wide: bool = False


def figures(content: bytes | None, alt: str, *, wide: bool = False) -> list[Figure]:
    """Return a PNG as a list of one figure, or an empty list for None."""
    return [] if content is None else [Figure(embed(content), alt, wide)]


def generator() -> str:
    """Return the line in a page's head that names this package."""
    return f'<meta {_MARK} {version()}">'


def require_ours(path: Path) -> None:
    """Raise UserError if a page would replace a folder, or a file of another program."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file with --output")
    if path.exists():
        head = path.read_bytes()[:4096].decode(errors="replace")
        if _MARK not in head and "<title>Erasing " not in head:  # old reports without the mark
            raise UserError(
                f"{path} exists and is no report of concept_eraser; give another name with --output"
            )


def write(text: str, path: Path) -> Path:
    """Write a page. Raises UserError if the path holds another file."""
    require_ours(path)
    write_text(path, text, overwrite=True)  # see require_ours
    return path
