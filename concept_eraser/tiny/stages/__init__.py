"""The parts of the bundled world, each trained from scratch.

judge, vae, clip and unet are the parts of the full build. judge2 and clip2 are a second judge and a
second CLIP, which are trained apart and used for reports only.

A stage is a function `(Stage) -> dict of scores` that writes its weights into `Stage.folder`.
`build` runs the stages. Only the unet needs others, the vae and the clip.
"""

from __future__ import annotations

from collections.abc import Callable

from concept_eraser.tiny.stages.base import Stage
from concept_eraser.tiny.stages.clip import train_clip
from concept_eraser.tiny.stages.clip2 import train_clip2
from concept_eraser.tiny.stages.judge import train_judge
from concept_eraser.tiny.stages.judge2 import train_judge2
from concept_eraser.tiny.stages.unet import train_unet
from concept_eraser.tiny.stages.vae import train_vae

__all__ = ["STAGES", "Stage"]

STAGES: dict[str, Callable[[Stage], dict]] = {
    "judge": train_judge,
    "vae": train_vae,
    "clip": train_clip,
    "unet": train_unet,
    "judge2": train_judge2,
    "clip2": train_clip2,
}
