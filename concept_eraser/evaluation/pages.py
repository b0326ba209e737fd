"""What the HTML pages share: templates, pictures as data, and blurring of what nobody should see by accident."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from concept_eraser.environment import version
from concept_eraser.errors import UserError
from concept_eraser.storage.writers import write_text

TEMPLATES = Path(__file__).parent / "templates"
CELLS = 8  # a blurred picture keeps so many colours across and down, nothing else
LONGEST = 256  # pixels of a thumbnail's longer side
_MARK = 'name="generator" content="concept_eraser'
_TOLD = f"pictures are blurred in the file itself ({CELLS} x {CELLS} colours each); --show-sensitive shows them"


def is_sensitive(content: Mapping[str, Any]) -> bool:
    """Whether the pictures of an evaluation (or an attack) are blurred, by its JSON: it is about nudity by its attribute,
    judge or a metric, or its suite says `sensitive: true`."""
    protocol = content["protocol"]
    suite = protocol.get("suite", protocol)  # an attack's protocol holds the suite
    metrics = [m if isinstance(m, str) else m.get("name") for m in suite.get("metrics", ())]
    return bool(content.get("sensitive")) or "nudity" in suite["concept"] or "nudenet" in (suite["judge"], *metrics)


def hiding(sensitive: bool, shown: bool) -> str:
    """What a page says of its blurred pictures; empty where none is."""
    return _TOLD if sensitive and not shown else ""


def blurred(image: Image.Image) -> Image.Image:
    """The mean colours of CELLS x CELLS fields, smoothly joined, at the size of the picture."""
    small = image.resize((CELLS, CELLS), Image.Resampling.BOX)
    return small.resize(image.size, Image.Resampling.BICUBIC)


def all_blurred(pictures: Tensor) -> Tensor:
    """The same of [n, h, w, 3] uint8."""
    return torch.stack([torch.from_numpy(np.array(blurred(Image.fromarray(p)))) for p in pictures.numpy()])


def embed(content: bytes, kind: str = "png") -> str:
    """A picture file as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def picture(pixels: Tensor, *, blur: bool, longest: int | None = None) -> str:
    """A picture [h, w, 3] uint8 as a data URI: PNG, pixel by pixel; or JPEG, where it is larger than `longest`."""
    image = Image.fromarray(pixels.numpy())
    kind = "png" if longest is None or max(image.size) <= longest else "jpeg"
    if longest is not None:
        image.thumbnail((longest, longest))  # does nothing to a smaller one
    buffer = io.BytesIO()
    (blurred(image) if blur else image).save(buffer, format=kind, quality=90)
    return embed(buffer.getvalue(), kind)


def style() -> str:
    return (TEMPLATES / "style.css").read_text(encoding="utf-8")


def render(template: str, **content: Any) -> str:
    """A template of templates/ as text; every value is escaped."""
    import jinja2

    loader = jinja2.FileSystemLoader(TEMPLATES)
    world = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    return world.get_template(template).render(**content)


def generator() -> str:
    """The line in a page's head that says whose it is."""
    return f'<meta {_MARK} {version()}">'


def require_ours(path: Path) -> None:
    """Raise UserError where a page would replace a file that is none of our pages, or a folder."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file with --output")
    if path.exists():
        head = path.read_bytes()[:4096].decode(errors="replace")
        if _MARK not in head and "<title>Erasing " not in head:  # reports of before the mark
            raise UserError(f"{path} exists and is no report of ours; give another name with --output")


def write(text: str, path: Path) -> Path:
    """The page as a file. Raises UserError where the place is taken by something else."""
    require_ours(path)
    write_text(path, text, overwrite=True)  # a page of ours, see require_ours
    return path
