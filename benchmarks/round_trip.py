"""Measure what the images of a training cost beside their sampling.

    python -m benchmarks.round_trip --state "one of two cores, the other one busy"

A training with prompts samples latents, decodes them to images, stores these in the cache, reads
them and encodes them again. The latents could be trained on as they are sampled. This command
measures the CPU seconds of sampling, decoding and encoding, and the distance of the encoded image's
latent from the sampled one, relative to the length of the sampled one:

    ||encode(decode(z)) - z|| / ||z||

The images are those of the bundled model's default erasure (12 steps, guidance 5, bf16 where the
processor has it). It takes a minute on one core, writes round_trip.json and renders the sentence in
README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import positive
from concept_eraser.data import batches
from concept_eraser.models import generation_stages
from concept_eraser.models.loading import load
from concept_eraser.storage.writers import write_text
from concept_eraser.utils import provenance
from studies.rendering.common import fill_blocks, machine_note, table

HERE = Path(__file__).parent
FILE, PAGE = HERE / "round_trip.json", HERE / "README.md"
PROMPTS = ("a red star", "a blue circle", "a green house, striped", "a yellow fish")
STEPS, GUIDANCE = 12, 5.0
STAGES = ("sampling", "decoding", "encoding")


def measure(images: int, repetitions: int) -> dict[str, Any]:
    """Return the CPU seconds of each stage for a batch, and the relative distances."""
    model = load("tiny-sd")
    texts = [PROMPTS[i % len(PROMPTS)] for i in range(images)]
    autocast = torch.bfloat16
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    distances: list[float] = []
    for repetition in range(repetitions + 1):
        embedding = generation_stages.read(model, texts, guidance=GUIDANCE, autocast=autocast)
        marks = [time.process_time()]
        seeds = [repetition * images + i for i in range(images)]
        sampled = generation_stages.draw(
            model,
            texts,
            embedding,
            seeds=seeds,
            steps=STEPS,
            guidance=GUIDANCE,
            autocast=autocast,
        )
        marks.append(time.process_time())
        shown = generation_stages.show(model, sampled, autocast=autocast)
        marks.append(time.process_time())
        encoded = batches.encode_pixels(model, shown)
        marks.append(time.process_time())
        if repetition == 0:  # allocates memory and chooses kernels
            continue
        for stage, first, last in zip(STAGES, marks[:-1], marks[1:], strict=True):
            seconds[stage].append(last - first)
        config = model.pipeline.vae.config  # the decoder reads latents without this scale
        sampled = (sampled.float() - (config.shift_factor or 0.0)) * config.scaling_factor
        sampled, encoded = sampled.flatten(1), encoded.float().flatten(1)
        distances += ((encoded - sampled).norm(dim=1) / sampled.norm(dim=1)).tolist()
    return {
        "images": images,
        "n": repetitions,
        "commit": provenance.commit(),
        "cpu_seconds": {name: round(statistics.median(some), 4) for name, some in seconds.items()},
        "distance": [
            round(x, 4) for x in (statistics.median(distances), min(distances), max(distances))
        ],
    }


def block(content: dict[str, Any]) -> str:
    """Return the table of README.md."""
    row = content["row"]
    rows = [
        ["Images", *(f"{stage}, CPU s" for stage in STAGES), "Relative distance", "n"],
        [
            str(row["images"]),
            *(f"{row['cpu_seconds'][stage]:.2f}" for stage in STAGES),
            "{:.3f} [{:.3f}, {:.3f}]".format(*row["distance"]),
            str(row["n"]),
        ],
    ]
    return f"{table(rows)}\n\ntiny-sd, {machine_note(content)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=positive, default=64)
    parser.add_argument("--repetitions", type=positive, default=5)
    parser.add_argument("--state", default="not stated", help="what else runs on the machine")
    parser.add_argument("--output", type=Path, default=FILE)
    args = parser.parse_args()
    row = measure(args.images, args.repetitions)
    print(row)
    content = {"environment": provenance.describe(), "state": args.state, "row": row}
    write_text(args.output, json.dumps(content, indent=1) + "\n", overwrite=True)
    if args.output == FILE:
        PAGE.write_text(fill_blocks(PAGE.read_text(), {"round-trip": lambda: block(content)}))


if __name__ == "__main__":
    main()
