"""The four parts of the bundled model, each trained from scratch: judge, vae, clip, unet.

A stage is a function `(Stage) -> dict of scores` that writes its weights into `Stage.folder`.
`build` runs the stages. Only the unet needs others, the vae and the clip.
"""

from __future__ import annotations

from collections.abc import Callable

from concept_eraser.tiny.stages.base import Stage
from concept_eraser.tiny.stages.clip import train_clip
from concept_eraser.tiny.stages.judge import train_judge
from concept_eraser.tiny.stages.unet import train_unet
from concept_eraser.tiny.stages.vae import train_vae

__all__ = ["STAGES", "Stage"]

STAGES: dict[str, Callable[[Stage], dict]] = {
    "judge": train_judge,
    "vae": train_vae,
    "clip": train_clip,
    "unet": train_unet,
}
