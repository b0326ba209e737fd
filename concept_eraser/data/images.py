"""A folder of images with captions: `name.png` beside `name.txt`, or a `metadata.jsonl` as in `datasets`' imagefolder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from concept_eraser.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def read_folder(folder: Path, size: tuple[int, int], *, caption: str | None = None) -> tuple[Tensor, list[str]]:
    """All images of a folder, resized and centre-cropped to (height, width): [n, h, w, 3] uint8, and their captions.

    caption: for images that have none of their own. Raises UserError for an empty folder, a damaged image or a
    missing caption.
    """
    if not folder.is_dir():
        raise UserError(f"no such folder of images: {folder}")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not paths:
        raise UserError(f"{folder} holds no images ({', '.join(SUFFIXES)})")
    known = _metadata(folder)
    images, captions = [], []
    for path in paths:
        beside = path.with_suffix(".txt")
        own = known.get(path.relative_to(folder).as_posix()) or (
            beside.read_text().strip() if beside.exists() else caption
        )
        if not own:
            raise UserError(
                f"{path} has no caption; write one to {beside.name}, to metadata.jsonl, or give one caption for all"
            )
        images.append(read(path, size))
        captions.append(own)
    return torch.from_numpy(np.stack(images)), captions


def _metadata(folder: Path) -> dict[str, str]:
    path = folder / "metadata.jsonl"
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {row["file_name"]: row.get("text") or row.get("caption") or "" for row in rows}


def read(path: Path, size: tuple[int, int]) -> np.ndarray:
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(f"{path} is no readable image ({error})") from None
    height, width = size
    scale = max(width / image.width, height / image.height)
    image = image.resize((max(width, round(image.width * scale)), max(height, round(image.height * scale))), Image.Resampling.LANCZOS)  # fmt: skip
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return np.asarray(image.crop((left, top, left + width, top + height)))
