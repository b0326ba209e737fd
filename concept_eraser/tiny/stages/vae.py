"""Train the autoencoder, and whiten its latents."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.tiny import painter
from concept_eraser.tiny.stages.base import SCALING, Stage
from concept_eraser.tiny.trainer import Trainer, as_tensor

VAE_CONFIG = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [16, 32, 32],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 8,
    "sample_size": painter.SIZE,
    "scaling_factor": SCALING,
}


def train_vae(stage: Stage) -> dict:
    from diffusers import AutoencoderKL

    torch.manual_seed(stage.seed)
    vae = AutoencoderKL(**VAE_CONFIG)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3, weight_decay=0.0)
    trainer = Trainer(
        stage="vae",
        module=vae,
        optimizer=optimizer,
        steps=stage.steps(3600),
        seed=stage.seed,
        folder=stage.folder,
        ema_decay=0.99,
    )

    def loss(step: int, rng: np.random.Generator) -> Tensor:
        x = as_tensor(painter.paint_batch(16, rng, held_out=False)[1])
        posterior = vae.encode(x).latent_dist
        reconstruction = vae.decode(posterior.sample()).sample
        return (
            F.mse_loss(reconstruction, x)
            + 1e-4 * posterior.kl().mean() / posterior.mean[0].numel() * 4
        )

    seconds = trainer.run(loss, stage.say)
    vae.eval()
    _whiten(vae, stage.rng("vae-whiten"))
    vae.save_pretrained(stage.folder / "vae")
    with torch.no_grad():
        x = as_tensor(painter.paint_batch(512, stage.rng("vae-test"), held_out=True)[1])
        latents = vae.encode(x).latent_dist.mean
        mse = F.mse_loss(vae.decode(latents).sample.clamp(-1, 1), x).item()
    return {
        "seconds": seconds,
        "psnr": float(10 * np.log10(4 / mse)),
        "latent_std": float((latents * SCALING).std()),
    }


@torch.no_grad()
def _whiten(vae: Any, rng: np.random.Generator) -> None:
    """Rescale the latents to mean 0 and deviation 1/0.18215 in each channel.

    The scale is merged into quant_conv and post_quant_conv.
    """
    x = as_tensor(painter.paint_batch(1024, rng, held_out=False)[1])
    latents = torch.cat([vae.encode(part).latent_dist.mean for part in x.split(64)])
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3)) * SCALING
    quant, post = vae.quant_conv, vae.post_quant_conv
    quant.weight[:4] /= std.view(-1, 1, 1, 1)
    quant.bias[:4] = (quant.bias[:4] - mean) / std
    quant.bias[4:] -= 2 * std.log()  # the second half is the log-variance
    post.bias += (post.weight[:, :, 0, 0] * mean).sum(1)
    post.weight *= std.view(1, -1, 1, 1)
