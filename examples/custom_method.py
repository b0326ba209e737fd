"""Erase a concept with a method of your own, passed as an object.

    python examples/custom_method.py

The method adds the two gradients. Where they are opposed, it first removes the component along the
retain gradient from the forget gradient. So, to first order, no step increases the retain loss.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass
from typing import ClassVar

import torch

import concept_eraser
from concept_eraser.methods.base import GramMethod
from concept_eraser.methods.checks import check_laws


@dataclass(frozen=True)
class ProtectRetain(GramMethod):
    """The sum of the gradients; an opposed forget gradient is projected first."""

    title: ClassVar[str] = "Protect the retain loss"
    source: ClassVar[str] = "an example"

    strength: float = 1.0  # of the forget gradient

    def solve(self, gram: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        retain_square, product = gram[0, 0], gram[0, 1]  # the order is retain, forget
        is_opposed = bool(product < 0) and bool(retain_square > 0)
        removed = float(product / retain_square) if is_opposed else 0.0
        weights = [1.0 - self.strength * removed, self.strength]
        return torch.tensor(weights, dtype=torch.float64), {"opposed": float(is_opposed)}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--strength", type=float, default=1.0, help="of the forget gradient")
    parser.add_argument("--output", default="runs/custom_method", help="run folder")
    parser.add_argument("--quick", action="store_true", help="two steps: does the script run?")
    arguments = parser.parse_args()

    method = ProtectRetain(strength=arguments.strength)
    print("laws that hold:", ", ".join(check_laws(method)))
    n = 8 if arguments.quick else 200
    run = concept_eraser.erase(
        model="tiny-sd",
        forget={"prompts": "tiny_star", "loss": "anchor", "anchor": {"shape": "circle"}, "n": n},
        retain={"prompts": "tiny_rest", "loss": "distill", "n": n},
        method=method,
        trainable="cross_attention",
        training={"steps": 2 if arguments.quick else 100, "batch_size": 8, "lr": 1e-3},
        generation={"steps": 2 if arguments.quick else 12, "batch_size": 64},
        output=arguments.output,
    )
    evaluation = concept_eraser.evaluate(run.folder, "tiny_star", n=2 if arguments.quick else 96)
    rate = evaluation.find("concept_rate", "direct")
    print(f"concept rate: {rate.before.value:.1%} before, {rate.after.value:.1%} after")


if __name__ == "__main__":
    main()
