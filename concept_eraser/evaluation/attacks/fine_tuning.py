"""Fine-tuning of the victim inside an attack: a LoRA or all weights, undone at the end.

Relearning (on images of the concept) and revival (on unrelated images) share it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from concept_eraser.evaluation.attacks.base import Scene
from concept_eraser.models.base import Condition
from concept_eraser.models.lora import Adapter

ADAPTED = (".to_q", ".to_k", ".to_v", ".to_out.0")  # the projections of diffusers' attention


@contextmanager
def low_rank(denoiser: nn.Module, rank: int, seed: int) -> Iterator[list[nn.Parameter]]:
    """Give the parameters of a new LoRA on the denoiser's attention inside the context."""
    attention = [name for name, _ in denoiser.named_modules() if name.endswith(ADAPTED)]
    adapter = Adapter(denoiser, attention, rank=rank, alpha=rank, seed=seed)
    try:
        yield [denoiser.get_parameter(name) for name in adapter.tensors]
    finally:
        adapter.remove()


@contextmanager
def all_weights(denoiser: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Give all parameters of the denoiser inside the context. Their values are restored."""
    parameters = list(denoiser.parameters())
    values = [parameter.detach().clone() for parameter in parameters]
    needed = [parameter.requires_grad for parameter in parameters]
    try:
        yield parameters
    finally:
        with torch.no_grad():
            for parameter, value, was_needed in zip(parameters, values, needed, strict=True):
                parameter.copy_(value)
                parameter.requires_grad_(was_needed)
                parameter.grad = None


@dataclass(frozen=True)
class FineTuning:
    """Plain training of a denoiser by Adam.

    Attributes:
        latents: The training images, [n, c, h, w].
        captions: Their encoded captions, one row for each image; further rows are not used.
        steps: The number of training steps.
        every: A pause after this number of steps, and after the last one.
        batch: The number of images in a step.
        lr: The learning rate.
    """

    latents: Tensor
    captions: Condition
    steps: int
    every: int
    batch: int
    lr: float

    def train(
        self, scene: Scene, parameters: list[nn.Parameter], name: str
    ) -> Generator[tuple[int, float], None, None]:
        """Train the victim's parameters on the denoising loss.

        name: Of the attack, for its random numbers.

        Yields:
            The step and its loss, at every pause.
        """
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(parameters, self.lr)
        generator = scene.generator(name)
        victim, count = scene.victim, len(self.latents)
        for step in range(1, self.steps + 1):
            rows = torch.randint(count, (self.batch,), generator=generator)
            t = torch.randint(0, victim.timesteps, (self.batch,), generator=generator).to(
                self.latents.device
            )
            rows = rows.to(t.device)
            clean = self.latents[rows]
            noise = torch.randn(clean.shape, generator=generator).to(clean)
            prediction = victim.denoise(victim.corrupt(clean, noise, t), t, self.captions[rows])
            loss = (prediction - victim.target(clean, noise, t)).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scene.spend("gradient steps", self.batch)
            if step % self.every == 0 or step == self.steps:
                yield step, float(loss.detach())
