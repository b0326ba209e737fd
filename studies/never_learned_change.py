"""The change of predictions by never learning one concept, as a forget loss for another concept.

    python -m studies.never_learned_change heart --anchor shape=circle

The repository has pairs of a model that learned everything and one that never learned a concept.
Their predictions on noised images of this concept differ. This difference is the target of a
perfect erasure. For another concept it is not known, and it must be carried over.

With e the full model's prediction at x_t, n that of the model that never learned the concept, c a
prompt of the concept, a its anchor and d = e(a) - e(c), two numbers describe the difference at a
time step:

    conditional    <n(c) - e(c), d> / <d, d>
    unconditional  <n("") - e(""), d> / <d, d>

They say how far a model goes towards the anchor if it never learned the concept. 1 is the anchor's
prediction. They have no unit and no direction of their own, so they apply to another concept with
its own d. The loss is

    (1 - empty) ||eps(x_t, c) - (e(c) + conditional(t) d)||^2
    + empty ||eps(x_t, "") - (e("") + unconditional(t) d)||^2.

The loss `anchor` with `empty_prompts` is the case conditional = 1 and unconditional = 0.

Other readings of "the difference" were not chosen:
* The prediction of the model without hearts for "heart" as the target for "star". This model knows
  the star. On noised stars it draws stars, so the target keeps what attacks without text recover.
* The difference of the two models' weights. They were trained apart, and their weights do not
  correspond.
* The difference itself, added to e. It points away from the heart, and not from the star.

The numbers are those of concepts of the same attribute. A colour and a style have others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from concept_eraser import api
from concept_eraser.data import batches, prompts
from concept_eraser.losses import Loss, LossSettings
from concept_eraser.losses.denoiser import DenoiserDraw, Predictor
from concept_eraser.models.base import Model

RANGES = 10  # equal ranges of the time steps, each with its numbers
TIMESTEPS = 1000  # of the bundled model


@dataclass(frozen=True)
class NeverLearnedChange(Loss):
    """The squared distance from the change that never learning a concept makes.

    Args:
        conditional: How far the prompt's prediction goes to the anchor's, for each of some equal
            ranges of the time steps, from 0 to 1000.
        unconditional: The same for the prediction without a prompt.
        empty: The weight of the unconditional prediction, 0 to 1.
    """

    title = "The change by never learning another concept"
    needs_anchor = True
    needs_images = True

    conditional: tuple[float, ...] = (1.0,)
    unconditional: tuple[float, ...] = (0.0,)
    empty: float = 0.25

    def compute(self, model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
        own, anchor, free = (
            model.predict(draw, condition, teacher=settings.teacher).float()
            for condition in (draw.condition, draw.anchor, draw.null)
        )
        direction = anchor - own
        errors = [
            model.predict(draw).float() - own - at_times(self.conditional, draw.t) * direction,
            model.predict(draw, draw.null).float()
            - free
            - at_times(self.unconditional, draw.t) * direction,
        ]
        conditional, unconditional = (error.square().mean() for error in errors)
        return (1 - self.empty) * conditional + self.empty * unconditional


def at_times(values: Sequence[float], t: Tensor) -> Tensor:
    """Return the value of the range that each time step lies in: [batch, 1, 1, 1] for t [batch]."""
    ranges = (t.long() * len(values) // TIMESTEPS).clamp(max=len(values) - 1)
    return torch.tensor(values, device=t.device)[ranges].view(-1, 1, 1, 1)


def along(change: Tensor, direction: Tensor) -> float:
    """Return the projection of a change on a direction, relative to its length."""
    return float((change * direction).sum() / direction.square().sum())


@torch.no_grad()
def measure(
    original: Model,
    never_learned: Model,
    texts: Sequence[str],
    anchors: Sequence[str],
    *,
    seed: int,
) -> dict[str, list[float]]:
    """Return `conditional` and `unconditional` in the middle of each range of time steps.

    Args:
        original: The model that learned everything. It also makes the images.
        never_learned: The model that never learned the concept, with the same text encoder.
        texts: Prompts of the concept.
        anchors: The anchor prompt of each.
        seed: The seed of the first image, and of the noise.
    """
    images = original.sample(
        list(texts), seeds=[seed + i for i in range(len(texts))], steps=12, guidance=5.0
    )
    latents = batches.encode_pixels(original, torch.as_tensor(images))
    concept, anchor, empty = (
        original.encode(list(some)) for some in (texts, anchors, [""] * len(texts))
    )
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed))
    values: dict[str, list[float]] = {"conditional": [], "unconditional": []}
    for number in range(RANGES):
        t = torch.full((len(texts),), (2 * number + 1) * TIMESTEPS // (2 * RANGES))
        x = original.corrupt(latents, noise, t)
        own = original.denoise(x, t, concept)
        direction = original.denoise(x, t, anchor) - own
        free = original.denoise(x, t, empty)
        for name, before, condition in (
            ("conditional", own, concept),
            ("unconditional", free, empty),
        ):
            change = never_learned.denoise(x, t, condition) - before
            values[name].append(round(along(change, direction), 2))
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("concept", help="of which the repository has a model without it")
    parser.add_argument("--anchor", required=True, help="attribute=value")
    parser.add_argument("--n", type=int, default=48, help="number of images")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    attribute, _, value = args.anchor.partition("=")
    rows = prompts.load(f"protocol2_{args.concept}").take(args.n, args.seed).prompts
    original, never_learned = (
        cast(Model, api.load(name)) for name in ("tiny-sd", f"tiny-sd-without-{args.concept}")
    )
    anchors = [row.anchor_prompt({attribute: value}) for row in rows]
    texts = [row.text for row in rows]
    values = measure(original, never_learned, texts, anchors, seed=args.seed)
    for name, some in values.items():
        print(f"{name}: {some}")


if __name__ == "__main__":
    main()
