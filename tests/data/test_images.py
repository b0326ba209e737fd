"""Image files and captions from any source: damaged files, large files and wrong file types."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from concept_eraser.data import images, labelled
from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError


def paint(path: Path, width: int = 20, height: int = 10, mode: str = "RGB") -> Path:
    """Write a valid image with a known pattern and return its path."""
    pixels = (np.arange(height * width * 3).reshape(height, width, 3) % 251).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def with_header(path: Path, width: int, height: int) -> Path:
    """Write another size into the header of a PNG and return its path."""
    content = path.read_bytes()
    header = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
    path.write_bytes(content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:])
    return path


def read_both(path: Path) -> None:
    """Check that the reader of training images and the reader of any images refuse a file."""
    with pytest.raises(UserError) as first:
        images.read(path, (16, 16))
    with pytest.raises(UserError) as second:
        images.read_image(path)
    for error_info in (first, second):
        assert str(path) in str(error_info.value)
        assert len(str(error_info.value)) < 600


def test_bombs_are_refused_by_their_header(tmp_path: Path) -> None:
    for place, size in enumerate([(2**30, 2**30), (limits.PIXELS, 2), (20_000, 20_000)]):
        read_both(with_header(paint(tmp_path / f"{place}.png"), *size))


def test_a_large_image_below_the_bound_gives_no_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Pillow warns from half of the size that it refuses.

    A folder of such images must not fill the terminal.
    """
    path = tmp_path / "large.png"
    Image.new("1", (12_000, 8_000)).save(path)
    assert images.read(path, (8, 8)).shape == (8, 8, 3)
    assert not [warning for warning in recwarn if "Decompression" in str(warning.category)]


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "bmp", "gif", "tif"])
def test_truncated_and_damaged_files(kind: str, tmp_path: Path) -> None:
    path = paint(tmp_path / f"a.{kind}", 64, 64)
    content = path.read_bytes()
    assert images.read(path, (16, 16)).shape == (16, 16, 3)
    path.write_bytes(content[: len(content) // 2])
    if kind != "gif":  # Pillow shows the rest of a truncated GIF in black
        read_both(path)
    for wrong in (b"", b"\0" * 100, content[:8], b"\xff" * 100):
        path.write_bytes(wrong)
        read_both(path)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "RGB"])
def test_every_mode_becomes_rgb(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    if mode == "I;16":
        Image.fromarray(np.arange(200, dtype=np.uint16).reshape(10, 20)).save(path)
    else:
        paint(path, mode=mode)
    assert images.read(path, (8, 8)).shape == (8, 8, 3)
    assert images.read_image(path).shape == (10, 20, 3)


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_the_upper_byte_of_16_bits_is_the_pixel(name: str, tmp_path: Path) -> None:
    grey = np.linspace(0, 65535, 200).astype(np.uint16).reshape(10, 20)
    Image.fromarray(grey).save(tmp_path / name)
    pixels = images.read_image(tmp_path / name)
    np.testing.assert_array_equal(pixels, np.stack([grey >> 8] * 3, -1))


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_pixels_of_32_bits_are_refused(kind: type, tmp_path: Path) -> None:
    Image.fromarray(np.ones((10, 20), kind)).save(tmp_path / "a.tif")
    with pytest.raises(UserError, match="its pixels have 32 bits, of which no range is known"):
        images.read_image(tmp_path / "a.tif")


def test_a_link_to_nothing_is_named_as_left_out(tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "none.png")
    (tmp_path / "c.png").mkdir()
    left_out: list[str] = []
    assert [name for name, _ in images.read_images(tmp_path, left_out)] == ["a.png"]
    assert len(left_out) == 1
    assert "b.png" in left_out[0]


def test_training_and_evaluation_see_the_same_pixels(tmp_path: Path) -> None:
    """An image is rotated as its file states, and transparency is white, for both readers."""
    folder = tmp_path / "class"
    folder.mkdir()
    rotation = Image.Exif()
    rotation[0x0112] = 6
    paint(tmp_path / "a.png", 32, 16)
    Image.open(tmp_path / "a.png").save(folder / "a.jpg", exif=rotation)
    Image.new("RGBA", (16, 32), (0, 255, 0, 0)).save(folder / "b.png")
    expected = [images.read_image(path) for path in sorted(folder.iterdir())]
    assert (expected[1] == 255).all()
    pixels, _ = images.read_folder(folder, (32, 16), caption="a star")
    np.testing.assert_array_equal(pixels.numpy(), np.stack(expected))
    data = labelled.from_folder(tmp_path, 16)
    squares = np.stack([image[8:24] for image in expected])
    assert data.labels.tolist() == [0, 0]
    np.testing.assert_allclose(
        data.fetch([0, 1]).permute(0, 2, 3, 1).add(1).mul(127.5), squares, atol=1e-3
    )


def test_mpo_files_named_jpg_are_read(tmp_path: Path) -> None:
    """Some phones write MPO, a JPEG with a second image in it.

    The process must not have opened an MPO file before.
    """
    import subprocess
    import sys

    first = Image.open(paint(tmp_path / "a.png"))
    first.save(tmp_path / "b.jpg", "MPO", save_all=True, append_images=[first])
    assert Image.open(tmp_path / "b.jpg").format == "MPO"
    code = (
        "import sys, pathlib; from concept_eraser.data import images; "
        "print([images.read(pathlib.Path(p), (8, 8)).shape for p in sys.argv[1:]])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.png", tmp_path / "b.jpg"],
        capture_output=True,
        text=True,
    )
    assert process.stdout.strip() == "[(8, 8, 3), (8, 8, 3)]", process.stderr


def test_postscript_is_no_image(tmp_path: Path) -> None:
    """Pillow passes EPS to Ghostscript, whatever the file's name is."""
    path = tmp_path / "a.png"
    path.write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    )
    assert Image.open(path).format == "EPS"  # Pillow would open it
    read_both(path)


def test_images_too_small_or_too_narrow(tmp_path: Path) -> None:
    read_both(paint(tmp_path / "one.png", 1, 1))
    read_both(paint(tmp_path / "line.png", 1, 50))
    with pytest.raises(UserError, match="too narrow"):
        images.read(paint(tmp_path / "narrow.png", 2, 60_000), (512, 512))
    assert images.read(paint(tmp_path / "small.png", 2, 3), (8, 8)).shape == (8, 8, 3)


def test_pipes_and_folders_are_no_images(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    read_both(tmp_path / "pipe.png")
    read_both(tmp_path / "folder.png")
    read_both(tmp_path / "none.png")


def folder_with(tmp_path: Path, name: str, content: bytes) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    paint(folder / "a.png")
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("metadata.jsonl", b"[1]\n", "line 1.* expected a mapping"),
        (
            "metadata.jsonl",
            b'{"file_name": "a.png", "text": "a"}\n{"text": "a"}\n',
            "line 2: expected",
        ),
        ("metadata.jsonl", b'{"file_name": 3, "text": "a"}\n', "line 1: expected"),
        ("metadata.jsonl", b'{"file_name": "a.png", "text": ["a"]}\n', "line 1: expected"),
        ("metadata.jsonl", b"{\n", "line 1.* no JSON"),
        ("metadata.jsonl", b"\xff\xfe\n", "no text in UTF-8"),
        (
            "metadata.jsonl",
            b'{"file_name": "a.png", "text": "' + b"x" * 11_000 + b'"}\n',
            "11,000 characters",
        ),
        ("metadata.jsonl", b'{"file_name": "a.png", "text": "a\\u0000"}\n', "null byte"),
        ("a.txt", b"\xff\xfea", "no text in UTF-8"),
        ("a.txt", b"x" * 11_000, "11,000 characters"),
        ("a.txt", b"x" * 200_000, "at most 100.0 kB"),
        ("a.txt", b" \n", "has no caption"),
    ],
)
def test_wrong_captions_are_named(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as error_info:
        images.read_folder(folder_with(tmp_path, name, content), (8, 8))
    assert len(str(error_info.value)) < 800


def test_links_lead_to_images_and_not_to_captions(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret")
    paint(tmp_path / "elsewhere.png")
    folder = folder_with(tmp_path, "a.txt", b"a house")
    (folder / "b.png").symlink_to(tmp_path / "elsewhere.png")
    (folder / "b.txt").write_text("a moon")
    assert images.read_folder(folder, (8, 8))[1] == ["a house", "a moon"]
    (folder / "b.txt").unlink()
    (folder / "b.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="a link that leads out of"):
        images.read_folder(folder, (8, 8))
    (folder / "b.txt").unlink()
    (folder / "metadata.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="a link that leads out of"):
        images.read_folder(folder, (8, 8), caption="a")
