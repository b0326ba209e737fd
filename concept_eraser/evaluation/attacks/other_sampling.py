"""Other sampling: the same prompt and seed with another guidance, sampler or number of steps.

An erasure is measured under one setting of the sampler, and whoever has the weights may choose
another one. A method that changes the unconditional prediction, and a negative prompt, act through
guidance alone: guidance 1 leaves them out, because only the prompt's prediction counts then.
Guidance 0 is the empty prompt alone, so that it needs no text.

The attack is ours. No published definition is followed.

Lu et al., "When Are Concepts Erased From Diffusion Models?", NeurIPS 2025, arXiv 2505.17013, change
the noise of the sampler (eta and the variance). Their scheduler is a changed one; here the samplers
are those of diffusers, which differ in noise and order.

One setting is changed at a time; the others are the suite's. With `combine`, every combination is
tried. The images are the pipeline's. The control is `seed_search` with as many images.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import ClassVar

from concept_eraser.evaluation.attacks.base import Access, Attack, Family, Round, Scene
from concept_eraser.evaluation.attacks.trajectory import require_guidances
from concept_eraser.utils import limits


@dataclass(frozen=True)
class OtherSampling(Attack):
    """Sample the same prompt and seed with other settings.

    Args:
        guidances: Values of the guidance; 1 is the prompt alone, 0 the empty prompt alone. Both are
            left out for a model with a safeguard, which acts through guidance.
        steps: Numbers of steps.
        samplers: Names of diffusers' schedulers. Those that do not fit the model are left out.
        combine: Try all combinations, not one change at a time.
    """

    title: ClassVar[str] = "Other sampling settings"
    source: ClassVar[str] = "ours; arXiv 2505.17013 changes the noise"
    family: ClassVar[Family] = "adaptive"
    access: ClassVar[Access] = "sampling"
    needs_words: ClassVar[bool] = False

    guidances: tuple[float, ...] = (1.0, 2.0, 10.0, 0.0)
    steps: tuple[int, ...] = (4, 20, 50)
    samplers: tuple[str, ...] = (
        "EulerAncestralDiscreteScheduler",
        "DDPMScheduler",
        "DPMSolverMultistepScheduler",
        "FlowMatchHeunDiscreteScheduler",
    )
    combine: bool = False

    def __post_init__(self) -> None:
        require_guidances(self.guidances)
        if not all(1 <= value <= limits.SAMPLER_STEPS for value in self.steps):
            raise ValueError(
                f"steps must be from 1 to {limits.SAMPLER_STEPS}, found {list(self.steps)}"
            )
        if not (self.guidances or self.steps or self.samplers):
            raise ValueError("give at least one guidance, number of steps or sampler")

    def settings(self, scene: Scene) -> Iterator[tuple[float, int, str]]:
        """Yield guidance, steps and sampler ("" for the pipeline's) of each round."""
        fitting = [name for name in self.samplers if name in scene.victim.samplers()]
        # a safeguard needs guidance above 1
        guarded = getattr(scene.victim, "guard", None) is not None
        guidances = [value for value in self.guidances if value > 1 or not guarded]
        # a suite's guidance 0 is the prompt alone, as in the pipelines
        own = (scene.sampling.guidance or 1.0, scene.sampling.steps, "")
        if self.combine:
            yield from itertools.product(
                guidances or own[:1], self.steps or own[1:2], fitting or own[2:]
            )
            return
        yield from ((value, *own[1:]) for value in guidances)
        yield from ((own[0], value, "") for value in self.steps)
        yield from ((*own[:2], name) for name in fitting)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        for guidance, steps, sampler in self.settings(scene):
            live = scene.live
            texts = ["" if guidance == 0 else scene.prompts[i] for i in live.tolist()]
            with scene.victim.sampler(sampler):
                images = scene.victim.sample(
                    texts,
                    seeds=[scene.seeds[i] for i in live.tolist()],
                    steps=steps,
                    guidance=guidance or 1.0,
                    autocast=scene.sampling.autocast,
                )
            yield Round(live, images=images)


PLUGIN = OtherSampling
