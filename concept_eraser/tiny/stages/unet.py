"""Train the UNet on the frozen text tower and the whitened latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from concept_eraser.tiny import painter
from concept_eraser.tiny.exclusion import Exclusion
from concept_eraser.tiny.stages.base import SCALING, WIDTH, Stage
from concept_eraser.tiny.stages.clip import text_tower
from concept_eraser.tiny.trainer import Trainer, as_tensor, decay_groups, step_rng
from concept_eraser.utils.errors import UserError

UNET_CONFIG = {
    "sample_size": painter.SIZE // 4,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [64, 128],
    "layers_per_block": 1,
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 4,
    "norm_num_groups": 16,
}
SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}


STEPS = 6000
IMAGES = 24576  # painted once, before the first step
_PAINTED_AT_ONCE = 256


@dataclass(frozen=True)
class Frozen:
    """The parts of the pipeline that stay as they are while the UNet is trained."""

    tokenizer: Any
    text_encoder: Any
    vae: Any


def number_of_images(stage: Stage) -> int:
    """Return how many images are painted: IMAGES, or fewer in a shortened build."""
    return max(512, round(IMAGES * min(1.0, stage.shrink) / _PAINTED_AT_ONCE) * _PAINTED_AT_ONCE)


def _latents(
    stage: Stage, vae: Any, exclusion: Exclusion, device: torch.device
) -> tuple[list[painter.PaintedScene], Tensor]:
    """Paint the data set and encode it (means of the posterior, scaled).

    Every image of the seed is painted, so that an exclusion does not change the others. The latents
    of an excluded image are set to zero, and no step reads them.

    Returns:
        The scenes and their latents, [images, 4, 16, 16].
    """
    rng = stage.rng("unet-data")
    n = number_of_images(stage)
    scenes, parts = [], []
    for start in range(0, n, _PAINTED_AT_ONCE):
        some, images = painter.paint_batch(_PAINTED_AT_ONCE, rng, held_out=False)
        scenes += some
        with torch.no_grad():
            encoded = vae.encode(as_tensor(images).to(device)).latent_dist.mean * SCALING
        encoded[[exclusion.covers(scene) for scene in some]] = 0.0
        parts.append(encoded)
        if start % 4096 == 0:
            stage.say(f"unet: painting and encoding {start}/{n}")
    return scenes, torch.cat(parts)


class Batches:
    """Draws the rows and captions of each step.

    A batch is drawn as if nothing were excluded. Then each excluded row is replaced by another
    image with its own caption, from a second generator. So for one seed, all other rows of a step
    have the same image, caption, noise and time step with and without an exclusion, and every
    batch has 32 images.

    Raises:
        UserError: the exclusion leaves no image.
    """

    size = 32

    def __init__(
        self, scenes: Sequence[painter.PaintedScene], exclusion: Exclusion, seed: int
    ) -> None:
        self.scenes, self.seed = scenes, seed
        self.shown = np.array([not exclusion.covers(scene) for scene in scenes])
        self.remaining = np.flatnonzero(self.shown)
        if not len(self.remaining):
            raise UserError(f"no image is left without {exclusion}; exclude fewer values")

    def draw(self, step: int, rng: np.random.Generator) -> tuple[np.ndarray, list[str]]:
        """Return the rows [32] of the data set and their captions. One caption in ten is empty."""
        rows = rng.integers(0, len(self.scenes), self.size)
        captions = [self._caption(row, rng) for row in rows]
        other_rng = step_rng(self.seed, "unet-without", step)
        for place in np.flatnonzero(~self.shown[rows]):
            rows[place] = self.remaining[other_rng.integers(len(self.remaining))]
            captions[place] = self._caption(rows[place], other_rng)
        return rows, captions

    def _caption(self, row: int, rng: np.random.Generator) -> str:
        return "" if rng.random() < 0.1 else painter.caption(self.scenes[row], rng).text


class NoisePredictor(nn.Module):
    """The noise prediction of a UNet under autocast in bfloat16, as a tensor."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, noisy: Tensor, t: Tensor, states: Tensor) -> Tensor:
        # a recorded graph has its own copies of the weights in bfloat16, so nothing is cached
        with torch.autocast(noisy.device.type, torch.bfloat16, cache_enabled=not noisy.is_cuda):
            return self.unet(noisy, t, states).sample


def recorded(predict: NoisePredictor, device: torch.device) -> Any:
    """Record the forward and the backward pass of a batch as two CUDA graphs.

    The passes of so small a model have many short kernels, and a GPU waits for their launches.

    Returns:
        A function with the arguments of `predict`, for batches of `Batches.size`.
    """
    size = painter.SIZE // 4
    example = (
        torch.randn(Batches.size, 4, size, size, device=device),
        torch.zeros(Batches.size, dtype=torch.int64, device=device),
        torch.randn(Batches.size, 77, WIDTH, device=device),
    )
    return torch.cuda.make_graphed_callables(predict, example)


def train_unet(stage: Stage) -> dict:
    """Train the UNet of the full build, and write it to `unet/` in the folder of the build."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTokenizer

    frozen = Frozen(
        CLIPTokenizer.from_pretrained(stage.folder / "tokenizer"),
        text_tower(stage.folder),
        AutoencoderKL.from_pretrained(stage.folder / "vae").eval(),
    )
    return fit_unet(stage, frozen, Exclusion())


def fit_unet(stage: Stage, frozen: Frozen, exclusion: Exclusion, device: str = "cpu") -> dict:
    """Train a UNet from scratch and write it to `unet/` in the folder of the stage.

    Args:
        stage: the folder, the seed and the number of steps.
        frozen: tokenizer, text encoder and VAE.
        exclusion: the values of attributes that no training image has.
        device: where it is trained. Images, captions, noise and initial weights are those of the
            CPU.

    Returns:
        The seconds, the steps, and the numbers of images painted and shown.

    Raises:
        UserError: the exclusion leaves no image.
    """
    from diffusers import DDIMScheduler, UNet2DConditionModel

    where = torch.device(device)
    for part in (frozen.text_encoder, frozen.vae):
        part.to(where)
    scenes, latents = _latents(stage, frozen.vae, exclusion, where)
    batches = Batches(scenes, exclusion, stage.seed)
    scheduler = DDIMScheduler(**SCHEDULE)
    alphas = scheduler.alphas_cumprod
    # min-SNR-5 for epsilon prediction (arXiv 2303.09556)
    snr_weight = (5 * (1 - alphas) / alphas).clamp(max=1).to(where)
    torch.manual_seed(stage.seed)
    unet = UNet2DConditionModel(**UNET_CONFIG).to(where)
    predict = NoisePredictor(unet)
    if where.type == "cuda":
        predict = recorded(predict, where)
    optimizer = torch.optim.AdamW(
        decay_groups(unet, 1e-2), lr=1e-3, betas=(0.9, 0.99), fused=where.type == "cuda"
    )
    trainer = Trainer(
        stage="unet",
        module=unet,
        optimizer=optimizer,
        steps=stage.steps(STEPS),
        seed=stage.seed,
        folder=stage.folder,
        flat=0.55,
        ema_decay=0.998,
        save_every=stage.save_every,
    )

    def loss(step: int, rng: np.random.Generator) -> Tensor:
        rows, captions = batches.draw(step, rng)
        ids = frozen.tokenizer(
            captions, padding="max_length", max_length=77, return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            states = frozen.text_encoder(ids.to(where))[0]
        clean = latents[torch.from_numpy(rows)]
        noise = torch.from_numpy(rng.standard_normal(clean.shape, dtype=np.float32)).to(where)
        t = torch.from_numpy(rng.integers(0, 1000, len(rows))).to(where)
        noisy = scheduler.add_noise(clean, noise, t)
        errors = (predict(noisy, t, states).float() - noise).square().mean((1, 2, 3))
        return (snr_weight[t] * errors).mean()

    seconds = trainer.run(loss, stage.say)
    unet.to("cpu").save_pretrained(stage.folder / "unet")
    return {
        "seconds": seconds,
        "steps": trainer.steps,
        "images_painted": len(scenes),
        "images_shown": len(batches.remaining),
    }
