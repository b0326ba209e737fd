"""Train the UNet on the frozen text tower and the whitened latents."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from concept_eraser.tiny import painter
from concept_eraser.tiny.stages.base import SCALING, WIDTH, Stage
from concept_eraser.tiny.stages.clip import text_tower
from concept_eraser.tiny.trainer import Trainer, as_tensor, decay_groups

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


def _latents(stage: Stage, n: int) -> tuple[list[painter.PaintedScene], Tensor]:
    """Return the latents of `n` drawings (means of the posterior, scaled), painted once."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(stage.folder / "vae").eval()
    rng = stage.rng("unet-data")
    scenes, parts = [], []
    for start in range(0, n, 256):
        some, images = painter.paint_batch(256, rng, held_out=False)
        scenes += some
        with torch.no_grad():
            parts.append(vae.encode(as_tensor(images)).latent_dist.mean * SCALING)
        if start % 4096 == 0:
            stage.say(f"unet: painting and encoding {start}/{n}")
    return scenes, torch.cat(parts)


def train_unet(stage: Stage) -> dict:
    from diffusers import DDIMScheduler, UNet2DConditionModel
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(stage.folder / "tokenizer")
    text_encoder = text_tower(stage.folder)
    scenes, latents = _latents(stage, 24576 if stage.shrink >= 1 else 512)
    scheduler = DDIMScheduler(**SCHEDULE)
    alphas = scheduler.alphas_cumprod
    # min-SNR-5 for epsilon prediction (arXiv 2303.09556)
    snr_weight = (5 * (1 - alphas) / alphas).clamp(max=1)
    torch.manual_seed(stage.seed)
    unet = UNet2DConditionModel(**UNET_CONFIG)
    optimizer = torch.optim.AdamW(decay_groups(unet, 1e-2), lr=1e-3, betas=(0.9, 0.99))
    trainer = Trainer(
        stage="unet",
        module=unet,
        optimizer=optimizer,
        steps=stage.steps(6000),
        seed=stage.seed,
        folder=stage.folder,
        flat=0.55,
        ema_decay=0.998,
    )

    def loss(step: int, rng: np.random.Generator) -> Tensor:
        rows = rng.integers(0, len(scenes), 32)
        captions = [
            "" if rng.random() < 0.1 else painter.caption(scenes[i], rng).text for i in rows
        ]
        ids = tokenizer(
            captions, padding="max_length", max_length=77, return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            states = text_encoder(ids)[0]
        clean = latents[torch.from_numpy(rows)]
        noise = torch.from_numpy(rng.standard_normal(clean.shape, dtype=np.float32))
        t = torch.from_numpy(rng.integers(0, 1000, len(rows)))
        noisy = scheduler.add_noise(clean, noise, t)
        with torch.autocast("cpu", torch.bfloat16):
            prediction = unet(noisy, t, states).sample
        errors = (prediction.float() - noise).square().mean((1, 2, 3))
        return (snr_weight[t] * errors).mean()

    seconds = trainer.run(loss, stage.say)
    unet.save_pretrained(stage.folder / "unet")
    return {"seconds": seconds, "steps": trainer.steps}
