"""Train a style LoRA on the bundled model, to be used beside an erasing one.

    python -m studies.style_lora runs/dotted [--style dotted] [--steps 150]

A style LoRA is what people load for a look: it draws every prompt in one style. Its training is the
usual one, the denoising loss on images of the style with captions that do not name it. The images
are the bundled model's own, for prompts that name the style. `studies.lora` measures how often the
style appears.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from concept_eraser import api
from concept_eraser.concepts.plan import BUNDLED
from concept_eraser.data import generate, prompts
from concept_eraser.data.images import png
from concept_eraser.recipes import recipe as recipes
from concept_eraser.storage.writers import write_text
from concept_eraser.tiny import painter

PLAIN = "a(n) {color} {shape}"
WORDS = {
    "color": list(painter.COLORS),
    "shape": list(painter.SHAPES),
}
SAMPLING = generate.Sampling(steps=12, guidance=5.0, batch_size=64, precision="bf16")


def write_images(folder: Path, style: str, n: int) -> None:
    """Write images of the style, with captions that do not name it."""
    template = PLAIN.replace("a(n)", "a(n) {style}")
    rule = {"expand": {"templates": [template], "style": [style], **WORDS}}
    rows = prompts.load(rule).take(n).prompts
    images = generate.generate(api.load(BUNDLED), rows, generate.seeds_for(rows, 0), SAMPLING)
    folder.mkdir(parents=True)
    captions = []
    for number, (row, image) in enumerate(zip(rows, images, strict=True)):
        name = f"{number:05d}.png"
        (folder / name).write_bytes(png(image))
        captions.append({"file_name": name, "text": prompts.render(PLAIN, row.fields)})
    write_text(
        folder / "metadata.jsonl", "".join(json.dumps(caption) + "\n" for caption in captions)
    )


def recipe(images: Path, rank: int, steps: int, seed: int = 0) -> recipes.Recipe:
    """Return the training: the denoising loss alone. The forget loss has the weight 0."""
    content: dict[str, Any] = {
        "model": BUNDLED,
        "target": "denoiser",
        "forget": {"prompts": "tiny_star", "loss": "anchor", "anchor": {"shape": "circle"}, "n": 1},
        "retain": {"prompts": "tiny_rest", "loss": "data", "images": str(images)},
        "method": {"name": "weighted", "forget": 0.0, "retain": 1.0},
        "trainable": {"select": "all", "lora": {"rank": rank, "conv": True}},
        "training": {
            "steps": steps,
            "batch_size": 16,
            "lr": 2.0e-3,
            "decay": "linear",
            "seed": seed,
        },
        "generation": {"steps": 12, "guidance": 5.0, "batch_size": 64, "precision": "bf16"},
    }
    return recipes.load(content)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--style", default="dotted", help="flat, outlined, striped or dotted")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("-n", type=int, default=240, help="number of images")
    options = parser.parse_args(arguments)
    images = options.output.with_name(options.output.name + "_images")
    write_images(images, options.style, options.n)
    api.erase(recipe(images, options.rank, options.steps), output=options.output)


if __name__ == "__main__":
    main()
