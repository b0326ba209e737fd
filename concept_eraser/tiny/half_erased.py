"""Images between a drawing and no drawing, with a "none" label for every attribute.

An erased model may leave a part of a shape, a pale shape, or a shape under noise. The second judge
is trained on such images. An attribute is "none" where little of the drawing is left. Between the
two bounds of a kind, where people would disagree, an attribute is not scored.

Labels are indices into `CLASSES` of `judge2`. -100 is "not scored", the index that
torch.nn.functional.cross_entropy ignores.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageFilter

from concept_eraser.tiny import garbage
from concept_eraser.tiny.painter import (
    BACKGROUNDS,
    COLORS,
    SCALE,
    SHAPES,
    SIZE,
    STYLES,
    PaintedScene,
    _background,
    ink,
    outline,
    place,
    random_scene,
)

IGNORED = -100
NONE = (len(SHAPES), len(COLORS), len(STYLES), len(BACKGROUNDS))
Labels = tuple[int, int, int, int]  # of shape, colour, style and background

# share of the ink that is left: from the first bound on, the attribute keeps its label; up to the
# second, it is "none"
_SHAPE_LEFT, _COLOR_LEFT = (0.85, 0.45), (0.25, 0.02)
# opacity of a faded drawing; a pale orange on black already looks brown
_OPACITY, _OPACITY_COLOR = (0.6, 0.12), (0.9, 0.12)
# share of the drawing in a mixture with noise, which shifts colours and backgrounds towards gray
_SIGNAL, _SIGNAL_COLOR = (0.65, 0.1), (0.85, 0.1)


def _graded(label: int, none: int, amount: float, bounds: tuple[float, float]) -> int:
    """Return the label, "none" or IGNORED, by how much of the drawing is left."""
    keep, lose = bounds
    return label if amount >= keep else none if amount <= lose else IGNORED


def _drawing(scene: PaintedScene, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a drawing and its background alone, each [64, 64, 3] float in [0, 255]."""
    canvas = _background(scene, rng)
    empty = np.asarray(canvas.reduce(SCALE)).astype(np.float32)
    points = place(outline(scene.shape or "star"), rng)
    ink(canvas, points=points, color=scene.color, style=scene.style, rng=rng)
    return np.asarray(canvas.reduce(SCALE)).astype(np.float32), empty


def _blobs(rng: np.random.Generator) -> np.ndarray:
    """Return a mask of soft blobs, or of a half-plane, [64, 64, 1] in [0, 1]."""
    if rng.random() < 0.5:
        yy, xx = np.mgrid[0:SIZE, 0:SIZE] - SIZE / 2
        angle, offset = rng.uniform(0, 2 * np.pi), rng.uniform(-20, 20)
        field = xx * np.cos(angle) + yy * np.sin(angle) - offset
    else:
        side = int(rng.integers(3, 9))
        small = Image.fromarray(rng.uniform(0, 255, (side, side)).astype(np.uint8))
        grown = small.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        field = (np.asarray(grown) - rng.uniform(60, 200)) / 12
    return np.clip(field + 0.5, 0, 1)[:, :, None].astype(np.float32)


def wipe(scene: PaintedScene, rng: np.random.Generator) -> tuple[np.ndarray, Labels]:
    """Replace a part of a drawing by its background."""
    drawing, empty = _drawing(scene, rng)
    mask = _blobs(rng)
    ink_before = np.abs(drawing - empty).sum()
    image = drawing * (1 - mask) + empty * mask
    left = float(np.abs(image - empty).sum() / max(float(ink_before), 1.0))
    shape, color, style, background = scene.labels()
    return image, (
        _graded(shape, NONE[0], left, _SHAPE_LEFT),
        _graded(color, NONE[1], left, _COLOR_LEFT),
        _graded(style, NONE[2], left, (_SHAPE_LEFT[1], _COLOR_LEFT[1])),
        background,
    )


def fade(scene: PaintedScene, rng: np.random.Generator) -> tuple[np.ndarray, Labels]:
    """Blend a drawing with its background."""
    drawing, empty = _drawing(scene, rng)
    opacity = float(rng.choice([rng.uniform(0, 0.12), rng.uniform(0.12, 0.6), rng.uniform(0.6, 1)]))
    shape, color, style, background = scene.labels()
    return opacity * drawing + (1 - opacity) * empty, (
        _graded(shape, NONE[0], opacity, _OPACITY),
        _graded(color, NONE[1], opacity, _OPACITY_COLOR),
        _graded(style, NONE[2], opacity, _OPACITY),
        background,
    )


def dissolve(scene: PaintedScene, rng: np.random.Generator) -> tuple[np.ndarray, Labels]:
    """Mix a drawing with a random field, from fine grain to a few blobs."""
    drawing, _ = _drawing(scene, rng)
    signal = float(rng.choice([rng.uniform(0, 0.1), rng.uniform(0.1, 0.65), rng.uniform(0.65, 1)]))
    image = signal * drawing + (1 - signal) * garbage.noise(rng).astype(np.float32)
    shape, color, style, background = scene.labels()
    return image, (
        _graded(shape, NONE[0], signal, _SIGNAL),
        _graded(color, NONE[1], signal, _SIGNAL_COLOR),
        _graded(style, NONE[2], signal, _SIGNAL),
        _graded(background, NONE[3], signal, _SIGNAL_COLOR),
    )


def bend(scene: PaintedScene, rng: np.random.Generator) -> tuple[np.ndarray, Labels]:
    """Bend the outline until the shape is lost. Colour, style and background stay."""
    canvas = _background(scene, rng)
    points = garbage.warp(
        garbage.resample(outline(scene.shape or "star")), rng.uniform(0.6, 1), rng
    )
    ink(canvas, points=place(points, rng, 0.26), color=scene.color, style=scene.style, rng=rng)
    _, color, style, background = scene.labels()
    return np.asarray(canvas.reduce(SCALE)).astype(np.float32), (NONE[0], color, style, background)


KINDS: dict[str, Callable[[PaintedScene, np.random.Generator], tuple[np.ndarray, Labels]]] = {
    "wiped": wipe,
    "faded": fade,
    "dissolved": dissolve,
    "bent": bend,
}


def half_erased(
    kind: str, rng: np.random.Generator, *, held_out: bool | None = None
) -> tuple[np.ndarray, Labels]:
    """Return one image of a kind of `KINDS`, [64, 64, 3] uint8, and its labels.

    held_out: as `painter.random_scene`.
    """
    image, labels = KINDS[kind](random_scene(rng, held_out=held_out), rng)
    pixels = np.clip(image, 0, 255).astype(np.uint8)
    if rng.random() < 0.2:
        blurred = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 1.0)))
        pixels = np.asarray(blurred)
    return pixels, labels


def garbage_labels(kind: str, scene: PaintedScene) -> Labels:
    """Return the labels of an image of `garbage.garbage`, with "none" where nothing is shown.

    Blurred garbage may have lost its pattern, and strokes have any colour. Such attributes are not
    scored.
    """
    _, color, _, background = scene.labels()
    if kind == "noise":
        return NONE
    if kind == "empty":
        return (*NONE[:3], background)
    if kind == "texture":
        return (*NONE[:3], IGNORED)
    if kind in ("strokes", "fragment"):
        return (NONE[0], IGNORED, IGNORED, background)
    return (NONE[0], color, IGNORED, background)  # blend, polygon, crumpled
