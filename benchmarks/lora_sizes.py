"""Count the sizes of LoRAs for published architectures: python -m benchmarks.lora_sizes

It writes the table of docs/how_to/lora.md. Nothing is trained and no weights are needed. It takes
a minute.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from concept_eraser import api
from concept_eraser.concepts.plan import BUNDLED
from concept_eraser.models.lora import layers_of
from concept_eraser.recipes.selections import select
from concept_eraser.tiny import published
from studies.rendering.common import fill_blocks

PAGE = Path(__file__).parent.parent / "docs" / "how_to" / "lora.md"
MODELS = {
    BUNDLED: "bundled model",
    "sd14": "Stable Diffusion 1",
    "sdxl": "SDXL",
    "sd35": "Stable Diffusion 3.5 medium",
    "flux": "Flux.1 dev",
    "pixart": "PixArt-alpha",
    "sana": "Sana 1.6B",
    "klein": "Flux.2 Klein 4B",
    "zimage": "Z-Image",
    "qwenimage": "Qwen-Image",
}
RANKS = (4, 16, 64)
DEFAULT_RANK = 64
FP16 = 2  # bytes of a number


@dataclass(frozen=True)
class Sizes:
    """The layers that a LoRA adapts.

    Attributes:
        layers: The number of layers.
        per_rank: The parameters of the LoRA at rank 1.
        parameters: The parameters of the whole denoiser.
    """

    layers: int
    per_rank: int
    parameters: int

    def megabytes(self, rank: int) -> float:
        return FP16 * rank * self.per_rank / 1e6

    def share(self, rank: int) -> float:
        """Return the parameters of the LoRA over those of the denoiser."""
        return rank * self.per_rank / self.parameters

    def rank_of(self, share: float) -> int:
        """Return the rank whose share is nearest to the given one."""
        return max(1, round(share * self.parameters / self.per_rank))


def count(denoiser: torch.nn.Module, selection: str) -> Sizes:
    """Count what a LoRA on all layers of a selection has, convolutions included."""
    parameters = dict(denoiser.named_parameters())
    layers = layers_of(denoiser, select(parameters, selection), conv=True)
    shapes = [parameters[f"{layer}.weight"].shape for layer in layers]
    per_rank = sum(shape[0] + math.prod(shape[1:]) for shape in shapes)
    return Sizes(len(layers), per_rank, sum(one.numel() for one in parameters.values()))


def _model(name: str) -> Any:
    return api.load(name) if name == BUNDLED else published.hollow(name)


def table(models: Sequence[str] = tuple(MODELS)) -> str:
    """Return the table: one row for each model and selection."""
    sizes = {
        (name, selection): count(_model(name).denoiser, selection)
        for name in models
        for selection in ("all", "blocks")
    }
    share = sizes[BUNDLED, "all"].share(DEFAULT_RANK)
    files = " | ".join(f"rank {rank}, MB" for rank in RANKS)
    lines = [
        f"| model | layers | {files} | share at rank {DEFAULT_RANK}, % | rank with a share "
        f"of {100 * share:.0f} % |",
        "| --- |" + " --- |" * (len(RANKS) + 3),
    ]
    for (name, selection), one in sizes.items():
        megabytes = " | ".join(_number(one.megabytes(rank)) for rank in RANKS)
        lines.append(
            f"| {MODELS[name]} | {selection}, {one.layers} | {megabytes} | "
            f"{100 * one.share(DEFAULT_RANK):.1f} | {one.rank_of(share)} |"
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def render(page: str) -> str:
    return fill_blocks(page, {"lora-sizes": table})


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(render(PAGE.read_text()))


if __name__ == "__main__":
    main()
