"""Folders of images: with captions to train on, or whoever's pictures to be looked at.

Captions: `name.png` beside `name.txt`, or a `metadata.jsonl` as in `datasets`' imagefolder.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from concept_eraser.errors import UserError
from concept_eraser.progress import Progress, silent

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
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


def read_picture(path: Path) -> np.ndarray:
    """A picture file as [h, w, 3] RGB, transparency on white. Raises UserError for what is no picture, or is too small."""
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)  # as OpenCV reads it
            shown = image.convert("RGBA") if image.mode in ("RGBA", "LA", "PA", "P") else image.convert("RGB")
            if shown.mode == "RGBA":
                white = Image.new("RGBA", shown.size, "white")
                shown = Image.alpha_composite(white, shown).convert("RGB")
            array = np.asarray(shown)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} is no picture that can be read ({type(error).__name__})") from None
    if min(array.shape[:2]) < 2:
        raise UserError(f"{path} has {array.shape[1]} x {array.shape[0]} pixels; at least 2 x 2 are needed")
    return array


def png(picture: Tensor) -> bytes:
    """An image [h, w, 3] uint8 as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(picture.cpu().numpy()).save(buffer, "png")
    return buffer.getvalue()


def picture_files(folder: Path, *, deep: bool = False) -> list[Path]:
    """The picture files of a folder, sorted; deep: of the folders in it too. Raises UserError where there is none."""
    inside = (folder.rglob("*") if deep else folder.iterdir()) if folder.is_dir() else ()
    if not (files := sorted(p for p in inside if p.suffix.lower() in PICTURES and p.is_file())):
        raise UserError(f"no pictures in {folder}; expected files ending in {', '.join(PICTURES)}")
    return files


def read_pictures(folder: Path, left_out: list[str], *, deep: bool = False, progress: Progress = silent) -> Iterator[tuple[str, np.ndarray]]:  # fmt: skip
    """Name and pixels [h, w, 3] uint8 of each picture of a folder, whoever made them.

    What cannot be read is described in `left_out` and passed over. Raises UserError where nothing can be read.
    """
    files = picture_files(folder, deep=deep)
    for i, path in enumerate(files, 1):
        try:
            array = read_picture(path)
        except UserError as error:
            left_out.append(str(error))
        else:
            yield path.relative_to(folder).as_posix(), array
        progress(f"looking at {folder}", i, len(files))
    if len(left_out) == len(files):
        raise UserError(f"none of the {len(files)} pictures in {folder} can be read: {left_out[0]}")
