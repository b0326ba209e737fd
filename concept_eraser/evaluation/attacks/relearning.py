"""Relearning: the number of fine-tuning steps on a few images that recover the concept.

The attack is ours. No published definition is followed.

A LoRA (arXiv 2106.09685, by peft) on the denoiser's attention is trained on `images` of the
original model's images of the concept. The captions are the attacked prompts, and the loss is the
plain denoising loss. After every few steps the remaining prompts are generated again. The attack
succeeds on a prompt when one of its images shows the concept. Training and evaluation use the same
prompts: the attack measures how much of the concept remains, not generalisation. The victim itself
is not changed: its adapter is removed at the end.

The attacker needs the weights, as anyone has who can download the model.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch

from concept_eraser.evaluation.attacks.base import (
    Access,
    Attack,
    Family,
    Round,
    Scene,
    require_positive,
)
from concept_eraser.models.lora import Adapter

ADAPTED = (".to_q", ".to_k", ".to_v", ".to_out.0")  # the projections of diffusers' attention


@dataclass(frozen=True)
class Relearning(Attack):
    """Fine-tune a LoRA on a few images of the concept.

    Args:
        images: The number of training images, the first ones of the batch.
        rank: The rank of the LoRA.
        steps: The number of training steps.
        every: Each prompt gets an image after this number of steps.
        batch: The number of images in a step.
        lr: The learning rate.
    """

    title: ClassVar[str] = "Relearning (LoRA)"
    source: ClassVar[str] = "ours"
    family: ClassVar[Family] = "fine-tuning on the concept"
    access: ClassVar[Access] = "weights"
    needs_words: ClassVar[bool] = False

    images: int = 10
    rank: int = 4
    steps: int = 100
    every: int = 10
    batch: int = 4
    lr: float = 1e-3

    def __post_init__(self) -> None:
        require_positive(
            images=self.images,
            rank=self.rank,
            steps=self.steps,
            every=self.every,
            batch=self.batch,
            lr=self.lr,
        )

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        unet = scene.victim.denoiser
        attention = [name for name, _ in unet.named_modules() if name.endswith(ADAPTED)]
        adapter = Adapter(unet, attention, rank=self.rank, alpha=self.rank, seed=scene.seed)
        try:
            yield from self._train(scene, [unet.get_parameter(name) for name in adapter.tensors])
        finally:
            adapter.remove()

    def _train(
        self, scene: Scene, parameters: list[torch.nn.Parameter]
    ) -> Generator[Round, None, None]:
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(parameters, self.lr)
        generator = scene.generator("relearning")
        count = min(self.images, len(scene.prompts))
        captions = scene.victim.encode(scene.prompts)
        for step in range(1, self.steps + 1):
            rows = torch.randint(count, (self.batch,), generator=generator)
            t = torch.randint(0, scene.victim.timesteps, (self.batch,), generator=generator).to(
                scene.targets.device
            )
            noisy, target = scene.noised(rows, t, generator)
            loss = (
                (scene.victim.denoise(noisy, t, captions[rows.to(t.device)]) - target)
                .square()
                .mean()
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scene.spend("gradient steps", self.batch)
            if step % self.every == 0 or step == self.steps:
                live = scene.live
                yield Round(
                    live, texts=[scene.prompts[i] for i in live.tolist()], loss=float(loss.detach())
                )


PLUGIN = Relearning
