"""How attacks without text sample: from any latents, step by step, forwards and backwards.

One step of the sampler predicts the clean latents and the noise, and mixes them at the next level:

    x_t = signal(t) x_0 + sigma(t) noise

For diffusion this is DDIM without noise (Song et al., arXiv 2010.02502; `generalized_steps` with
eta = 0 in `functions/denoising.py` of ermongroup/ddim). For flow matching it is Euler's method. The
steps and the guidance are the suite's, unless the attack has options for them. On a pipeline with
diffusers' DDIM and the spacing "leading" the images are those of the pipeline, which a test
compares. With other spacings a step of that DDIM ends beside the next time step, and here at it. On
other pipelines the sampler differs from the pipeline's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from concept_eraser.data import images as image_files
from concept_eraser.evaluation.attacks.base import Scene
from concept_eraser.evaluation.features.base import file_hash
from concept_eraser.models.base import Condition, Model
from concept_eraser.models.generation_stages import to_bytes
from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.provenance import derive_seed, fingerprint

Text = Literal["prompt", "empty"]
DECODED_AT_ONCE = 64


@dataclass(frozen=True)
class Trajectory:
    """The sampler of one attack.

    Attributes:
        scene: The attacked batch. Evaluations of the denoiser are counted there.
        steps: The number of steps, 0 for the suite's.
        guidance: Classifier-free guidance, None for the suite's. 1 is the prompt alone, 0 the empty
            prompt alone. A suite's 0 is the prompt alone, as in the pipelines, and counts as 1.
        model: The model that samples, the victim by default.
    """

    scene: Scene
    steps: int = 0
    guidance: float | None = None
    model: Model = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name, value in (
            ("steps", self.steps or self.scene.sampling.steps),
            (
                "guidance",
                (self.scene.sampling.guidance or 1.0) if self.guidance is None else self.guidance,
            ),
            ("model", self.model or self.scene.victim),
        ):
            object.__setattr__(self, name, value)

    @cached_property
    def times(self) -> list[int]:
        """The time steps, and the level of the end: [steps + 1]."""
        return self.model.time_grid(self.steps)

    def start_of(self, strength: float) -> int:
        """Return the first step for a strength in (0, 1], as diffusers' image-to-image counts it.

        Raises UserError if no step is left.
        """
        count = min(int(self.steps * strength), self.steps)
        if count < 1:
            raise UserError(
                f"strength {strength:g} of {self.steps} steps leaves no step; give at least "
                f"{1 / self.steps:.3g}, or more steps"
            )
        return self.steps - count

    def time(self, x: Tensor, step: int) -> Tensor:
        """Return the time step of each image, [n]. The clean end has the smallest one."""
        return torch.full((len(x),), max(self.times[step], 0), device=x.device)

    def mix(self, clean: Tensor, noise: Tensor, step: int) -> Tensor:
        """Return the latents at the level of a step from clean latents and noise."""
        if self.times[step] < 0:
            return clean
        return self.model.corrupt(clean, noise, self.time(clean, step))

    def level(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return signal and sigma of a step, each in the shape of x."""
        one, zero = torch.ones_like(x), torch.zeros_like(x)
        return self.mix(one, zero, step), self.mix(zero, one, step)

    def predict(
        self, x: Tensor, step: int, condition: Condition, null: Condition | None = None
    ) -> Tensor:
        """Return the denoiser's prediction with guidance.

        null: The condition of the unconditional prediction, one row for each image; the model's own
        by default.
        """
        t, guidance = self.time(x, step), float(self.guidance or 0)
        if guidance in (0, 1):
            self.scene.spend("denoiser calls", len(x))
            if guidance == 0:
                condition = null if null is not None else self.model.null().repeat(len(x))
            return self.model.denoise(x, t, condition)
        if null is None:
            null = self.model.null().repeat(len(x))
        self.scene.spend("denoiser calls", self.model.branches(guidance) * len(x))
        return self.model.guide(
            x,
            t[:1],
            condition=condition,
            null=null,
            guidance=guidance,
            weights=None,
        )

    def split(self, x: Tensor, step: int, prediction: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clean latents and the noise of a prediction at a step.

        At a clean end the clean latents are x itself.
        """
        t = self.time(x, step)
        clean = self.model.clean(x, t, prediction)
        nothing, one = torch.zeros_like(x), torch.ones_like(x)
        noise = (x - self.model.corrupt(clean, nothing, t)) / self.model.corrupt(nothing, one, t)
        return (x if self.times[step] < 0 else clean), noise

    def advance(
        self, x: Tensor, step: int, condition: Condition, null: Condition | None = None
    ) -> Tensor:
        """Return the latents one step nearer to the image."""
        return self.mix(*self.split(x, step, self.predict(x, step, condition, null)), step=step + 1)

    @torch.no_grad()
    def run(
        self,
        x: Tensor,
        condition: Condition,
        *,
        start: int = 0,
        stop: int | None = None,
        null: Condition | None = None,
        after: Callable[[Tensor, int], Tensor] | None = None,
    ) -> Tensor:
        """Sample from latents x at a step.

        Args:
            x: The latents at step `start`, [n, c, h, w]; unit noise at step 0.
            condition: The condition of each image, n rows.
            start: The step to begin with.
            stop: The step to end with, by default the last level.
            null: See `predict`.
            after: Changes the latents at the level of each reached step.
        """
        if null is None:
            null = self.model.null().repeat(len(x))
        for step in range(start, self.steps if stop is None else stop):
            x = self.advance(x, step, condition, null)
            if after is not None:
                x = after(x, step + 1)
        return x

    @torch.no_grad()
    def invert(self, latents: Tensor, condition: Condition) -> list[Tensor]:
        """Follow the sampler's equation backwards, from clean latents to noise.

        Each step uses the prediction at the less noisy level, as `ddim_inversion` in `src/nti.py`
        of matanr/Memories_of_Forgotten_Concepts does.

        Returns:
            The latents at the level of each step, [steps + 1] of them, noise first.
        """
        path = [latents]
        for step in range(self.steps, 0, -1):
            x = path[0]
            clean, noise = self.split(x, step, self.predict(x, step, condition))
            path.insert(0, self.mix(clean, noise, step - 1))
        return path

    @torch.no_grad()
    def images(self, latents: Tensor) -> Tensor:
        """Decode latents to images [n, h, w, 3] uint8 on the CPU."""
        parts = [self.model.decode(part) for part in latents.split(DECODED_AT_ONCE)]
        return torch.cat([to_bytes((part * 0.5 + 0.5).clamp(0, 1)) for part in parts])


def noise_for(scene: Scene, rows: Tensor, names: Sequence[str | int] = ()) -> Tensor:
    """Return unit noise of the latents' shape for some prompts, [m, c, h, w].

    It depends on the prompt's own seed and on the names, not on the batch. Without names it is the
    noise from which the pipeline samples.
    """
    shape = scene.victim.latent_shape()
    noise = [
        torch.randn(
            shape,
            generator=torch.Generator().manual_seed(
                derive_seed(scene.seeds[row], *names) if names else scene.seeds[row]
            ),
        )
        for row in rows.tolist()
    ]
    return torch.stack(noise).to(scene.targets)


def sampler_for(scene: Scene, steps: int, text: Text) -> Trajectory:
    """Return the victim's sampler for prompts with the suite's guidance, or for empty prompts."""
    return Trajectory(scene, steps, guidance=0 if text == "empty" else None)


def condition_for(scene: Scene, rows: Tensor, text: Text) -> Condition:
    """Return the victim's condition of some prompts, or of empty prompts in their place."""
    texts = ["" if text == "empty" else scene.prompts[row] for row in rows.tolist()]
    return scene.victim.encode(texts)


def concept_latents(scene: Scene, folder: str) -> Tensor:
    """Return latents of an image of the concept for each prompt, [n, c, h, w].

    They are the original model's images of the same prompts, or those of a folder in turn.

    Raises:
        UserError: The folder has no readable image.
    """
    if not folder:
        return scene.targets
    images = [
        torch.tensor(image_files.read(path, image_size(scene)))
        for path in image_files.image_files(Path(folder), deep=True)
    ]
    latents = encode_images(scene, torch.stack(images))
    return latents[torch.arange(len(scene.prompts)) % len(latents)]


@torch.no_grad()
def image_size(scene: Scene) -> tuple[int, int]:
    """Return height and width of the model's images."""
    height, width = scene.original.decode(scene.targets[:1]).shape[-2:]
    return height, width


def encode_images(scene: Scene, images: Tensor) -> Tensor:
    """Return the original model's latents of images [n, h, w, 3] uint8."""
    pixels = images.permute(0, 3, 1, 2).float().div(127.5).sub(1)
    parts = [scene.original.encode_images(part) for part in pixels.split(DECODED_AT_ONCE)]
    return torch.cat(parts).to(scene.targets)


def folder_hash(folder: str) -> dict[str, str]:
    """Return the hash of a folder's images, by its path, for `Attack.lists`; empty without one."""
    if not folder:
        return {}
    files = image_files.image_files(Path(folder), deep=True)
    return {folder: fingerprint([file_hash(path) for path in files])}


def require_shares(name: str, values: Sequence[float], *, low: float = 0.0) -> None:
    """Raise ValueError unless there are some values, each above `low` and at most 1."""
    wrong = [value for value in values if not low < value <= 1]
    if wrong or not values:
        raise ValueError(f"{name} must be above {low:g} and at most 1, found {list(values)}")


def require_steps(steps: int) -> None:
    """Raise ValueError unless the number of steps is 0 (the suite's) or possible."""
    if not 0 <= steps <= limits.SAMPLER_STEPS:
        raise ValueError(
            f"steps must be from 1 to {limits.SAMPLER_STEPS}, or 0 for the suite's, found {steps}"
        )


def require_guidance(guidance: float) -> None:
    """Raise ValueError unless a guidance is 0 (the suite's) or has an unconditional prediction."""
    if guidance and not 1 < guidance <= limits.GUIDANCE:
        raise ValueError(
            f"guidance must be above 1 and at most {limits.GUIDANCE:g}, since there is no "
            f"unconditional prediction otherwise, or 0 for the suite's, found {guidance}"
        )


def require_guidances(values: Sequence[float]) -> None:
    """Raise ValueError for a guidance that is no number from 0 to the largest possible one."""
    if not all(0 <= value <= limits.GUIDANCE for value in values):
        raise ValueError(f"guidances must be from 0 to {limits.GUIDANCE:g}, found {list(values)}")
