"""Train a control model: a UNet anew, without any image of a concept, or with another seed.

A large model cannot be trained again without a concept; the bundled one can. An attack on such a
model that never learned the concept shows how much of the attack's success is no memory.

Only the UNet is trained. Tokenizer, text encoder and VAE are those of the bundled pipeline, and
they stay frozen. They were trained on images and captions of every concept, so they know the
concept, as the CLIP text encoder of Stable Diffusion does.

The recipe is that of the bundled UNet: steps, learning rates, moving average, batches and losses
(see `stages/unet.py`). For one seed, the other images are drawn as if nothing were excluded:

* The whole data set of the seed is painted, so each remaining image is the same, pixel by pixel.
* Each step draws its rows, captions, noise and time steps as without an exclusion. Only a row with
  an excluded image is replaced, by a remaining image from a second random generator.
* The initial weights depend on the seed only.

One difference to the bundled UNet remains. It was trained with the VAE and the text encoder before
they were rounded to half precision; a control is trained with the rounded ones.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concept_eraser.tiny.exclusion import Exclusion
from concept_eraser.tiny.stages.base import Stage, require_same_settings
from concept_eraser.tiny.stages.unet import STEPS, Batches, Frozen, fit_unet, number_of_images
from concept_eraser.utils import provenance, resources

RECORD = "control.json"
FROZEN_PARTS = ("tokenizer", "text_encoder", "vae", "scheduler")
NOTE = (
    "only the UNet was trained; the text encoder and the VAE are the bundled ones, which were "
    "trained on every concept, so they know the excluded one, as CLIP does in Stable Diffusion"
)


@dataclass(frozen=True)
class Control:
    """One training of the bundled model's UNet.

    Attributes:
        exclusion: the values that no training image has; empty for the full model.
        seed: of the data set, the initial weights and the draws of each step.
        work: the folder of the checkpoint.
        output: the folder of the finished diffusers pipeline.
        shrink: the share of the steps and images, for tests.
        save_every: steps between two checkpoints.
        device: where the UNet is trained: `cpu` or `cuda`.
    """

    exclusion: Exclusion
    seed: int
    work: Path
    output: Path
    shrink: float = 1.0
    save_every: int = 250
    device: str = "cpu"

    def train(self, *, threads: int, say: Callable[[str], None]) -> dict[str, Any]:
        """Train the UNet, or continue, and write the pipeline with its record `control.json`.

        A training that was stopped and continued gives the same weights as one without a stop, if
        the number of threads, the device and the machine are the same.

        Args:
            threads: the number of threads, for the record.
            say: receives lines of progress.

        Returns:
            The record: excluded values, seed, steps, hashes, seconds and environment.

        Raises:
            UserError: the work folder holds a training with other settings, or no image is left.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        settings = self._settings()
        require_same_settings(self.work / "settings.json", settings)
        images = f"images without {self.exclusion}" if self.exclusion else "all images"
        say(f"training the UNet on {images}, seed {self.seed}")
        say(f"note: {NOTE}")
        stage = Stage(self.work, self.seed, say, shrink=self.shrink, save_every=self.save_every)
        if (self.work / "unet.json").exists():
            scores = json.loads((self.work / "unet.json").read_text())
        else:
            fitted = fit_unet(stage, _frozen_parts(), self.exclusion, self.device)
            scores = {**fitted, "threads": threads, "device": self.device}
            (self.work / "unet.json").write_text(json.dumps(scores, indent=1) + "\n")
        self._write_pipeline()
        record = {
            **settings,
            **scores,
            "batch_size": Batches.size,
            "unet_sha256": hash_of(self.output / "unet"),
            "note": NOTE,
            "environment": provenance.describe(),
        }
        (self.output / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        say(f"wrote {self.output}; UNet {record['unet_sha256'][:16]}")
        return record

    def _settings(self) -> dict[str, Any]:
        """Return what decides the weights, apart from the machine."""
        stage = Stage(self.work, self.seed, print, self.shrink)
        pipeline = resources.tiny_weights() / "tiny-sd"
        return {
            "without": self.exclusion.as_dict(),
            "seed": self.seed,
            "steps_planned": stage.steps(STEPS),
            "images_planned": number_of_images(stage),
            "frozen_sha256": {part: hash_of(pipeline / part) for part in FROZEN_PARTS},
        }

    def _write_pipeline(self) -> None:
        """Write a diffusers folder: the frozen parts byte for byte, the UNet in half precision."""
        from diffusers import UNet2DConditionModel

        source = resources.tiny_weights() / "tiny-sd"
        for part in FROZEN_PARTS:
            shutil.copytree(source / part, self.output / part, dirs_exist_ok=True)
        unet = UNet2DConditionModel.from_pretrained(self.work / "unet")
        unet.register_to_config(_name_or_path="")  # the work folder is no part of the result
        unet.half().save_pretrained(self.output / "unet", safe_serialization=True)
        shutil.copy(source / "model_index.json", self.output / "model_index.json")


def _frozen_parts() -> Frozen:
    """Load tokenizer, text encoder and VAE of the bundled pipeline, in single precision."""
    import torch
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, CLIPTokenizer

    source = resources.tiny_weights() / "tiny-sd"
    text_encoder = CLIPTextModel.from_pretrained(source / "text_encoder", dtype=torch.float32)
    vae = AutoencoderKL.from_pretrained(source / "vae", torch_dtype=torch.float32)
    return Frozen(
        CLIPTokenizer.from_pretrained(source / "tokenizer"),
        text_encoder.eval().requires_grad_(False),
        vae.eval().requires_grad_(False),
    )


def hash_of(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of a folder's files, in the order of names."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
