"""Training examples of one objective, and batches of them drawn from a generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from concept_eraser.models.base import Condition, Model
from concept_eraser.utils.devices import send

# prompts at once; 64 in a T5 of 4.7 billion weights take more memory than the weights
READ_AT_ONCE = 16


@dataclass(frozen=True)
class Batch:
    """Some examples: latents [b, c, h, w] and their conditions.

    The latents are None if they are sampled during training.
    """

    latents: Tensor | None
    condition: Condition
    anchor: Condition | None
    null: Condition
    positions: Tensor | None = None
    mixture: tuple[tuple[float, Condition], ...] = ()

    def __len__(self) -> int:
        return len(self.condition)


@dataclass(frozen=True)
class Examples:
    """The examples of one objective. Each distinct prompt is encoded once.

    All tensors are on the CPU (400 prompts encoded by a T5 are gigabytes) and move batch by batch.

    Attributes:
        latents: [n, c, h, w], or None for data-free training.
        condition: The conditions of the distinct prompts.
        rows: [n], each example's position in `condition`.
        anchors: The conditions of the distinct anchor prompts.
        anchor_rows: [n], each example's position in `anchors`.
        positions: [n, tokens] bool, which tokens of each prompt stand for the concept, if a loss
            needs that.
        empty: The share of examples with the empty prompt in place of prompt and anchor.
        mixture: For the loss slider: a factor, the conditions of the distinct prompts that it
            multiplies, and each example's position in them, [n].
    """

    latents: Tensor | None
    condition: Condition
    rows: Tensor
    anchors: Condition | None
    anchor_rows: Tensor | None
    null: Condition
    positions: Tensor | None = None
    empty: float = 0.0
    mixture: tuple[tuple[float, Condition, Tensor], ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, generators: Sequence[torch.Generator], device: torch.device) -> Batch:
        """Draw one example for each generator, with replacement."""
        index = torch.cat(
            [torch.randint(len(self), (1,), generator=generator) for generator in generators]
        )
        blank = (
            send(torch.cat([torch.rand(1, generator=g) for g in generators]) < self.empty, device)
            if self.empty
            else None
        )
        null = self.null.repeat(len(index)).to(device)
        latents = None if self.latents is None else send(self.latents[index], device)
        anchor = None
        if self.anchors is not None and self.anchor_rows is not None:
            anchor = _or_nothing(self.anchors[self.anchor_rows[index]].to(device), null, blank)
        positions = None if self.positions is None else send(self.positions[index], device)
        condition = _or_nothing(self.condition[self.rows[index]].to(device), null, blank)
        mixture = tuple(
            (factor, conditions[rows[index]].to(device))
            for factor, conditions, rows in self.mixture
        )
        return Batch(
            latents, condition, anchor=anchor, null=null, positions=positions, mixture=mixture
        )


def make_examples(
    model: Model,
    prompts: Sequence[str],
    *,
    latents: Tensor | None,
    anchors: Sequence[str] | None = None,
    mixture: Sequence[tuple[float, Sequence[str]]] = (),
) -> Examples:
    """Encode the prompts of some examples; `latents[i]` belongs to `prompts[i]`.

    anchors: The anchor of each example. mixture: For the loss slider, factors and the prompts of
    each example that they multiply.
    """
    condition, rows = _encode_once(model, prompts)
    anchor, anchor_rows = (None, None) if anchors is None else _encode_once(model, anchors)
    return Examples(
        latents,
        condition,
        rows=rows,
        anchors=anchor,
        anchor_rows=anchor_rows,
        null=model.null(),
        mixture=tuple((factor, *_encode_once(model, texts)) for factor, texts in mixture),
    )


def _encode_once(model: Model, texts: Sequence[str]) -> tuple[Condition, Tensor]:
    distinct = list(dict.fromkeys(texts))
    cpu = torch.device("cpu")
    parts = [
        model.encode(distinct[i : i + READ_AT_ONCE]).to(cpu)
        for i in range(0, len(distinct), READ_AT_ONCE)
    ]
    condition = Condition(
        {k: torch.cat([part.tensors[k] for part in parts]) for k in parts[0].tensors}
    )
    place = {text: i for i, text in enumerate(distinct)}
    return condition, torch.tensor([place[text] for text in texts])


def _or_nothing(condition: Condition, null: Condition, blank: Tensor | None) -> Condition:
    """Replace the conditions of a batch by that of the empty prompt where `blank` [b] is true.

    All are on one device, so that the host does not wait for a copy.
    """
    if blank is None:
        return condition
    return Condition(
        {
            key: torch.where(
                blank.view(-1, *[1] * (value.dim() - 1)), null.tensors[key].to(value), value
            )
            for key, value in condition.tensors.items()
        }
    )


def chunk_of(height: int, width: int) -> int:
    """Return how many images a VAE encodes at once.

    They are 32 small ones, 4 of 512 x 512, or one of 1024 x 1024.
    """
    return max(1, min(32, 2**20 // (height * width)))


def encode_pixels(model: Model, images: Tensor) -> Tensor:
    """Encode images [n, h, w, 3] uint8 to latents of the model, in chunks."""
    size = chunk_of(*images.shape[1:3])
    chunks = (part.permute(0, 3, 1, 2).float().div(127.5).sub(1) for part in images.split(size))
    return torch.cat([model.encode_images(part).cpu() for part in chunks])
