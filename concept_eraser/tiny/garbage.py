"""Images that show no shape, and slightly damaged images that do, to train a robust judge.

An erased model often answers a forgotten prompt with a smear, a fragment or a blend of two shapes.
A judge that was trained on clean images only would still name the nearest shape. Then an erasure
would have worse numbers than it deserves, or a broken model better ones. So a third of the judge's
training images are garbage labelled "none".
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from concept_eraser.tiny.painter import (
    SCALE,
    SHAPES,
    SIZE,
    PaintedScene,
    _background,
    ink,
    outline,
    place,
    random_scene,
)

KINDS = ("empty", "blend", "polygon", "strokes", "crumpled", "fragment", "noise", "texture")


def resample(points: np.ndarray, n: int = 120) -> np.ndarray:
    """Return `n` points at equal distances along a closed polygon, [n, 2]."""
    outline = np.concatenate([points, points[:1]])
    length = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(outline, axis=0), axis=1))])
    at = np.linspace(0, length[-1], n, endpoint=False)
    return np.stack([np.interp(at, length, outline[:, i]) for i in (0, 1)], 1)


def warp(points: np.ndarray, amplitude: float, rng: np.random.Generator) -> np.ndarray:
    """Displace points by a smooth random field of the given amplitude.

    The shape itself has radius 1.
    """
    shift = np.zeros_like(points)
    for _ in range(4):
        wave = rng.normal(0, 2.2, 2)
        shift += np.sin(points @ wave + rng.uniform(0, 2 * np.pi))[:, None] * rng.normal(0, 1, 2)
    return points + amplitude * shift / 2


def blend(rng: np.random.Generator) -> np.ndarray:
    """Return an outline on the straight path between two shapes."""
    first, second = rng.choice(len(SHAPES), 2, replace=False)
    a, b = resample(outline(SHAPES[first])), resample(outline(SHAPES[second]))
    # start both at their topmost point, so that corresponding points lie near each other
    a, b = np.roll(a, -int(a[:, 1].argmin()), axis=0), np.roll(b, -int(b[:, 1].argmin()), axis=0)
    share = rng.uniform(0.4, 0.6)
    return share * a + (1 - share) * b


def noise(rng: np.random.Generator) -> np.ndarray:
    """Return random fields of any grain, from single pixels to a few blobs.

    A broken denoiser gives such images.
    """
    grain = int(rng.choice([1, 1, 2, 4, 4, 8, 16]))
    side = SIZE // grain
    if rng.random() < 0.5:
        field = rng.normal(rng.uniform(60, 200, 3), rng.uniform(10, 90), (side, side, 3))
    else:
        field = rng.uniform(0, 255, (side, side, 3))
    how = Image.Resampling.BICUBIC if rng.random() < 0.7 else Image.Resampling.NEAREST
    small = Image.fromarray(np.clip(field, 0, 255).astype(np.uint8))
    return np.asarray(small.resize((SIZE, SIZE), how))


def texture(background: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return stripes, checks or dots over the whole image, or a half noisy background."""
    yy, xx = np.mgrid[0:SIZE, 0:SIZE]
    angle, period = rng.uniform(0, np.pi), rng.uniform(3, 24)
    wave = np.sin(
        (xx * np.cos(angle) + yy * np.sin(angle)) * 2 * np.pi / period + rng.uniform(0, 6)
    )
    if rng.random() < 0.5:
        wave = wave * np.sin((yy * np.cos(angle) - xx * np.sin(angle)) * 2 * np.pi / period)
    mask = np.clip(wave * rng.uniform(0.5, 8) + 0.5, 0, 1)[:, :, None]
    over = noise(rng) if rng.random() < 0.5 else np.full((SIZE, SIZE, 3), rng.integers(0, 256, 3))
    return (background * (1 - mask) + over * mask).astype(np.uint8)


def garbage(kind: str, rng: np.random.Generator) -> tuple[PaintedScene, np.ndarray]:
    """Return one image that shows no shape, [64, 64, 3] uint8, and its scene with `shape=None`."""
    base_scene = random_scene(rng)
    scene = PaintedScene(None, base_scene.color, base_scene.style, base_scene.background)
    canvas = _background(scene, rng)
    if kind in ("noise", "texture"):
        return scene, noise(rng) if kind == "noise" else texture(
            np.asarray(canvas.reduce(SCALE)), rng
        )
    if kind == "blend":
        ink(
            canvas,
            points=place(warp(blend(rng), 0.08, rng), rng),
            color=scene.color,
            style=scene.style,
            rng=rng,
        )
    elif kind == "polygon":
        n = int(rng.integers(6, 14))
        angle = np.sort(rng.uniform(0, 2 * np.pi, n))
        radius = rng.uniform(0.25, 1.1, n)
        ink(
            canvas,
            points=place(np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1), rng),
            color=scene.color,
            style=scene.style,
            rng=rng,
        )
    elif kind == "strokes":
        for _ in range(int(rng.integers(1, 5))):
            path = place(np.cumsum(rng.normal(0, 0.35, (int(rng.integers(3, 9)), 2)), axis=0), rng)
            tone = tuple(int(v) for v in rng.integers(0, 256, 3))
            width = int(rng.integers(4, 40))
            ImageDraw.Draw(canvas).line(
                [(float(x), float(y)) for x, y in path], fill=tone, width=width, joint="curve"
            )
    elif kind == "crumpled":
        points = warp(resample(outline(base_scene.shape or "star")), rng.uniform(0.55, 1.0), rng)
        ink(canvas, points=place(points, rng, 0.26), color=scene.color, style=scene.style, rng=rng)
    elif kind == "fragment":
        points = place(resample(outline(base_scene.shape or "star")), rng)
        start, part = int(rng.integers(120)), int(rng.integers(15, 45))
        path = np.roll(points, -start, axis=0)[:part]
        width = int(rng.integers(5, 16))
        ImageDraw.Draw(canvas).line(
            [(float(x), float(y)) for x, y in path],
            fill=tuple(int(v) for v in rng.integers(0, 256, 3)),
            width=width,
        )
    image = canvas.reduce(SCALE)
    if rng.random() < 0.3:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.5, 3.5)))
    return scene, np.asarray(image)


def damage(scene: PaintedScene, rng: np.random.Generator) -> np.ndarray:
    """Return an image of a scene with the faults of a decoder: slightly bent, blurred or noisy.

    Its labels stay valid.
    """
    canvas = _background(scene, rng)
    points = outline(scene.shape) if scene.shape else np.zeros((3, 2))
    if rng.random() < 0.6:
        points = warp(resample(points), rng.uniform(0, 0.09), rng)
    ink(canvas, points=place(points, rng), color=scene.color, style=scene.style, rng=rng)
    image: Image.Image = canvas.reduce(SCALE)
    if rng.random() < 0.4:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 1.0)))
    pixels = np.asarray(image)
    if rng.random() < 0.4:
        noise = rng.normal(0, rng.uniform(1, 12), (SIZE, SIZE, 3))
        pixels = np.clip(pixels + noise, 0, 255).astype(np.uint8)
    return pixels


def garbage_batch(n: int, rng: np.random.Generator) -> tuple[list[PaintedScene], np.ndarray]:
    """Return `n` images of all kinds of garbage in turn, [n, 64, 64, 3] uint8."""
    samples = [garbage(KINDS[i % len(KINDS)], rng) for i in range(n)]
    return [scene for scene, _ in samples], np.stack([image for _, image in samples])
