"""Folders of images: with captions for training, or any images for evaluation.

Captions are in `name.txt` beside `name.png`, or in a `metadata.jsonl` as in `datasets`'
imagefolder.

A folder may come from a stranger. Only the formats below are decoded (Pillow has others that start
programs). An image is refused if its header states too many pixels. An image may be a link to a
file elsewhere, since people choose training images by links, and only its pixels are read. A
caption must not be such a link, since its text is written into the run's folder.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from concept_eraser.data.templates import text_problem
from concept_eraser.storage.readers import parse_json, read_text, require_regular
from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError, first_line, quote
from concept_eraser.utils.progress import Progress, silent

FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "BMP",
    "GIF",
    "TIFF",
)  # names in Pillow; its reader of JPEG also reads MPO, which some phones write
CAPTION_BYTES = 100_000
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def read_folder(
    folder: Path, size: tuple[int, int], *, caption: str | None = None
) -> tuple[Tensor, list[str]]:
    """Read all images of a folder, resized and centre-cropped to (height, width).

    caption: for images without their own caption. Returns images [n, h, w, 3] uint8 and their
    captions. Raises UserError for an empty folder, a damaged image or a missing caption.
    """
    if not folder.is_dir():
        raise UserError(f"no such folder of images: {folder}; check the path")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.is_dir())
    if not paths:
        raise UserError(f"{folder} holds no images ({', '.join(SUFFIXES)})")
    caption_by_path = _metadata(folder)
    images, captions = [], []
    for path in paths:
        beside = path.with_suffix(".txt")
        own = caption_by_path.get(path.relative_to(folder).as_posix()) or (
            _caption(_own_text(folder, beside, CAPTION_BYTES), str(beside))
            if beside.exists()
            else caption
        )
        if not own:
            raise UserError(
                f"{path} has no caption; write one to {beside.name}, to metadata.jsonl, "
                "or give one caption for all"
            )
        images.append(read(path, size))
        captions.append(own)
    return torch.from_numpy(np.stack(images)), captions


def _metadata(folder: Path) -> dict[str, str]:
    """Return captions by the path of their image in the folder.

    Raises UserError with the number of a line that is no caption.
    """
    path = folder / "metadata.jsonl"
    if not path.exists():
        return {}
    captions = {}
    for number, line in enumerate(_own_text(folder, path).split("\n"), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        row = parse_json(line, place)
        name, text = row.get("file_name"), row.get("text") or row.get("caption") or ""
        if not isinstance(name, str) or not isinstance(text, str):
            raise UserError(
                f'{place}: expected {{"file_name": NAME, "text": CAPTION}}, found {quote(row)}'
            )
        captions[name] = _caption(text, place)
    return captions


def _own_text(folder: Path, path: Path, limit: int = 2**30) -> str:
    """Read a text file of the folder. Raises UserError for a link that leads out of the folder."""
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links that form a circle
        inside = True  # the reader raises the error
    if not inside:
        raise UserError(
            f"{path} is a link that leads out of {folder}; copy the file into the folder"
        )
    return read_text(path, limit)


def _caption(text: str, place: str) -> str:
    if wrong := text_problem(text.strip()):
        raise UserError(f"{place}: the caption {wrong}")
    return text.strip()


def read(path: Path, size: tuple[int, int]) -> np.ndarray:
    """Read an image file, resized and centre-cropped to (height, width): [h, w, 3] uint8.

    The pixels are those of `read_image`: rotated as the file states, transparency on white.
    Raises UserError for a file that is no image, is damaged, too small, too large, or too narrow to
    be cropped.
    """
    image = _decode(path, "no readable image", _upright)
    height, width = size
    scale = max(width / image.width, height / image.height)
    large = (max(width, round(image.width * scale)), max(height, round(image.height * scale)))
    if large[0] * large[1] > limits.PIXELS:
        raise UserError(
            f"{path} has {image.width} x {image.height} pixels, too narrow for {width} x "
            f"{height}; crop it first"
        )
    image = image.resize(large, Image.Resampling.LANCZOS)
    x, y = (image.width - width) // 2, (image.height - height) // 2
    return np.asarray(image.crop((x, y, x + width, y + height)))


def _decode(path: Path, problem: str, decode: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Return the result of `decode` for an open image file.

    Raises UserError if the file cannot be read, or has no or too many pixels.
    """
    require_regular(path)
    try:
        with warnings.catch_warnings():
            # Pillow's warnings of large images and unusual files; unusable files are errors
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as file:
                if file.width * file.height > limits.PIXELS:
                    raise Image.DecompressionBombError(
                        "its header states more pixels than are read"
                    )
                image = decode(file)
    except (
        Exception,
        MemoryError,
    ) as error:  # Pillow raises about twenty types of errors for damaged files
        raise UserError(
            f"{path} is {problem} ({first_line(error)}); convert it to PNG, or remove it"
        ) from None
    if min(image.size) < 2:
        raise UserError(
            f"{path} has {image.width} x {image.height} pixels; at least 2 x 2 are needed"
        )
    return image


def read_image(path: Path) -> np.ndarray:
    """Read an image file as [h, w, 3] RGB, transparency on white.

    Raises UserError for a file that is no image, or is too small.
    """
    return np.asarray(_decode(path, "no image that can be read", _upright))


def _upright(source: Image.Image) -> Image.Image:
    """Convert to RGB, rotated as the file states (as OpenCV reads it), transparency on white.

    Of 16 bits the upper eight are taken. Raises ValueError for 32 bits.
    """
    image = ImageOps.exif_transpose(source)
    if image.mode.startswith("I;16") or (image.mode, source.format) == ("I", "PNG"):
        # Pillow would clip these values to 255; OpenCV takes the upper byte too
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits, of which no range is known")
    plain = (
        image.convert("RGBA") if image.mode in ("RGBA", "LA", "PA", "P") else image.convert("RGB")
    )
    if plain.mode == "RGBA":
        white = Image.new("RGBA", plain.size, "white")
        plain = Image.alpha_composite(white, plain).convert("RGB")
    return plain


def png(image: Tensor) -> bytes:
    """Encode an image [h, w, 3] uint8 as PNG."""
    buffer = io.BytesIO()
    Image.fromarray(image.cpu().numpy()).save(buffer, "png")
    return buffer.getvalue()


def image_files(folder: Path, *, deep: bool = False) -> list[Path]:
    """Return the image files of a folder, sorted. deep: also those of its subfolders.

    Raises UserError if there is none, or no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"no images in {folder}: there is no such folder; check the path")
    inside = folder.rglob("*") if deep else folder.iterdir()
    if not (files := sorted(p for p in inside if p.suffix.lower() in IMAGES and not p.is_dir())):
        raise UserError(f"no images in {folder}; expected files ending in {', '.join(IMAGES)}")
    return files


def read_images(
    folder: Path, left_out: list[str], *, deep: bool = False, progress: Progress = silent
) -> Iterator[tuple[str, np.ndarray]]:
    """Read name and pixels [h, w, 3] uint8 of each image of a folder, from any source.

    Files that cannot be read are described in `left_out` and skipped. Raises UserError if none can
    be read.
    """
    files = image_files(folder, deep=deep)
    for i, path in enumerate(files, 1):
        try:
            array = read_image(path)
        except UserError as error:
            left_out.append(str(error))
        else:
            yield path.relative_to(folder).as_posix(), array
        progress(f"looking at {folder}", i, len(files))
    if len(left_out) == len(files):
        raise UserError(f"none of the {len(files)} images in {folder} can be read: {left_out[0]}")
