"""Soft prompts on both branches of guidance: offsets of the prompt's and of the empty embedding.

A sampler with guidance g follows eps_u + g (eps_c - eps_u), where eps_c is the prediction for the
prompt and eps_u the one for the empty prompt. An erasure may change eps_u too. Then an offset of
the prompt's embedding alone leaves a defence in place. This attack learns an offset of both
embeddings for each prompt. Both minimise the loss of soft_prompt.py, each on its own prediction:

    min over delta_c, delta_u of || eps(x_t, e_c + delta_c) - noise ||^2
                               + || eps(x_t, e_u + delta_u) - noise ||^2

If both predictions lead to images of the concept, so does their combination near guidance 1. At a
larger guidance it follows their difference as well. The attack is ours. Null-text inversion
(null_text_inversion.py) also changes the empty prompt's embedding, one for each step.

The images are sampled by the deterministic sampler of trajectory.py, since a pipeline reads no
embedding of the empty prompt for each image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from concept_eraser.evaluation.attacks.base import Access, Family, Round, Scene
from concept_eraser.evaluation.attacks.soft_prompt import SoftPrompt
from concept_eraser.evaluation.attacks.trajectory import Trajectory, noise_for, require_guidance
from concept_eraser.models.base import Condition


@dataclass(frozen=True)
class SoftPromptBoth(SoftPrompt):
    """Learn an offset of each prompt's embedding and one of the empty prompt's embedding.

    Args:
        steps: The number of steps of Adam.
        every: Each prompt gets an image after this number of steps.
        lr: The learning rate.
        radius: The largest length of an offset, as a share of its embedding's; 0 for no bound.
        guidance: The guidance of the generation, 0 for the suite's.
    """

    title: ClassVar[str] = "Soft prompts on both branches"
    family: ClassVar[Family] = "adaptive"
    access: ClassVar[Access] = "white box"
    samples_itself: ClassVar[bool] = True

    guidance: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_guidance(self.guidance)

    def bases(self, scene: Scene) -> list[Tensor]:
        empty = scene.victim.null().repeat(len(scene.prompts)).tensors["states"]
        return [*super().bases(scene), empty]

    def offer(self, scene: Scene, live: Tensor, conditions: list[Condition], loss: float) -> Round:
        prompt, empty = conditions
        sampler = Trajectory(scene, guidance=self.guidance or None)
        x = sampler.run(noise_for(scene, live), prompt, null=empty)
        return Round(live, images=sampler.images(x), loss=loss)


PLUGIN = SoftPromptBoth
