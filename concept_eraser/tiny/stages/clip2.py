"""Train the second CLIP by InfoNCE with attribute heads, which are discarded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from concept_eraser.tiny import painter
from concept_eraser.tiny.clip2 import UNKNOWN, SecondClipNet, caption_words, load_clip2, tokenize
from concept_eraser.tiny.stages.base import Stage, save_half
from concept_eraser.tiny.stages.clip import contrastive_loss, score_clip
from concept_eraser.tiny.trainer import Trainer, as_tensor, decay_groups
from concept_eraser.utils import resources

SEED = 2000  # added to the seed of the build, so that the first CLIP has another seed
STEPS = 2400
BATCH = 128
ARCHITECTURE = {"width": 96, "channels": 32, "depth": 2, "heads": 4}
LEARNING_RATE = 1e-3
UNKNOWN_SHARE = 0.03  # of the tokens of a caption that are hidden, to train the row of UNKNOWN


class Trainee(nn.Module):
    """The second CLIP with attribute heads on both towers, which help training only."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self.clip = SecondClipNet(tokens, **ARCHITECTURE)
        sizes = [
            len(values)
            for values in (painter.SHAPES, painter.COLORS, painter.STYLES, painter.BACKGROUNDS)
        ]
        self.image_heads = nn.ModuleList(nn.Linear(ARCHITECTURE["width"], n) for n in sizes)
        self.text_heads = nn.ModuleList(nn.Linear(ARCHITECTURE["width"], n) for n in sizes)


def train_clip2(stage: Stage) -> dict:
    """Train the second CLIP and write it to `clip2/` in the folder of the build.

    It reads the tokenizer of the bundled pipeline.
    """
    from transformers import CLIPTokenizer

    stage = replace(stage, seed=stage.seed + SEED)
    tokenizer: Any = CLIPTokenizer.from_pretrained(
        resources.tiny_weights() / "tiny-sd" / "tokenizer"
    )
    tokens = sorted({token for words in caption_words() for token in tokenizer(words).input_ids})
    torch.manual_seed(stage.seed)
    trainee = Trainee(tokens)
    clip = trainee.clip
    optimizer = torch.optim.AdamW(decay_groups(trainee, 0.05), lr=LEARNING_RATE, betas=(0.9, 0.98))
    trainer = Trainer(
        stage="clip2",
        module=trainee,
        optimizer=optimizer,
        steps=stage.steps(STEPS),
        seed=stage.seed,
        folder=stage.folder,
        ema_decay=0.995,
        save_every=stage.save_every,
    )

    def loss(step: int, rng: np.random.Generator) -> Tensor:
        scenes, images = painter.paint_batch(BATCH, rng, held_out=False)
        captions = [painter.caption(scene, rng) for scene in scenes]
        ids, mask = tokenize(tokenizer, [caption.text for caption in captions])
        rows = clip.rows_of(ids)
        rows[torch.from_numpy(rng.random(rows.shape) < UNKNOWN_SHARE)] = UNKNOWN
        with torch.autocast("cpu", torch.bfloat16):
            image, text = clip.embed_images(as_tensor(images)), clip.embed_rows(rows, mask)
        return contrastive_loss(
            image,
            text,
            scale=clip.logit_scale,
            heads=(trainee.image_heads, trainee.text_heads),
            attributes=(
                torch.tensor([scene.labels() for scene in scenes]),
                torch.tensor([caption.stated_attributes for caption in captions]),
            ),
        )

    seconds = trainer.run(loss, stage.say)
    clip.eval()
    save_half(clip.state_dict(), stage.folder / "clip2" / "model.safetensors")
    (stage.folder / "clip2" / "config.json").write_text(json.dumps(ARCHITECTURE, indent=1) + "\n")
    stored = load_clip2(stage.folder / "clip2")  # in half precision: score what is used
    scores = score_clip(
        stored.embed_images,
        lambda texts: stored.embed_ids(*tokenize(tokenizer, texts)),
        stage.rng("clip2-test"),
        stage.images(1000),
    )
    return {
        "seconds": seconds,
        "seed": stage.seed,
        "steps": trainer.steps,
        "batch": BATCH,
        "learning_rate": LEARNING_RATE,
        **ARCHITECTURE,
        "tokens": len(tokens),
        "parameters": sum(p.numel() for p in clip.parameters()),
        **scores,
    }
