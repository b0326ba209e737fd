"""Train the judge on clean drawings, damaged drawings and garbage, and fit its temperature."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.tiny import garbage, painter
from concept_eraser.tiny.judge import CLASSES, JudgeNet
from concept_eraser.tiny.stages.base import Stage, save_half
from concept_eraser.tiny.trainer import Trainer, as_tensor, decay_groups


def _judge_batch(n: int, rng: np.random.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a third each of clean drawings, damaged drawings and garbage.

    Labels of -100 are not scored.
    """
    clean, x1 = painter.paint_batch(n // 3, rng)
    bent = [painter.random_scene(rng) for _ in range(n // 3)]
    x2 = np.stack([garbage.damage(scene, rng) for scene in bent])
    none, x3 = garbage.garbage_batch(n - 2 * (n // 3), rng)
    labels = np.array([scene.labels() for scene in (*clean, *bent, *none)])
    labels[2 * (n // 3) :, 1:3] = -100  # garbage has no useful colour or style
    return as_tensor(np.concatenate([x1, x2, x3])), {
        name: torch.from_numpy(labels[:, i]) for i, name in enumerate(CLASSES)
    }


def train_judge(stage: Stage) -> dict:
    torch.manual_seed(stage.seed)
    judge: Any = JudgeNet().train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(decay_groups(judge, 1e-2), lr=3e-3)
    trainer = Trainer(
        stage="judge",
        module=judge,
        optimizer=optimizer,
        steps=stage.steps(1800),
        seed=stage.seed,
        folder=stage.folder,
        ema_decay=0.99,
    )

    def loss(step: int, rng: np.random.Generator) -> Tensor:
        images, labels = _judge_batch(96, rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits = judge(images.contiguous(memory_format=torch.channels_last))
        return sum(
            (F.cross_entropy(logits[k].float(), labels[k]) for k in CLASSES), torch.zeros(())
        )

    seconds = trainer.run(loss, stage.say)
    judge.eval()
    with torch.no_grad():
        images, labels = _judge_batch(3000, stage.rng("judge-calibration"))
        logits = torch.cat([judge(part)["shape"] for part in images.split(250)])
        grid = torch.logspace(-1, 1, 81)
        nll = torch.stack([F.cross_entropy(logits / t, labels["shape"]) for t in grid])
        judge.temperature.fill_(float(grid[nll.argmin()]))
    scores = {
        "seconds": seconds,
        "temperature": float(judge.temperature),
        **score_judge(judge, stage.rng("judge-test")),
    }
    save_half(judge.state_dict(), stage.folder / "judge" / "model.safetensors")
    (stage.folder / "judge" / "config.json").write_text(
        json.dumps({"width": 24, "classes": CLASSES}, indent=1) + "\n"
    )
    return scores


@torch.no_grad()
def score_judge(judge: JudgeNet, rng: np.random.Generator, n: int = 4000) -> dict:
    """Return the scores of the judge on new drawings.

    They are the accuracy of each head, the share of each kind of garbage called none, and the
    calibration error.
    """
    scenes, images = painter.paint_batch(n, rng)
    labels = torch.tensor([scene.labels() for scene in scenes])
    logits = [judge(part) for part in as_tensor(images).split(250)]
    scores: dict = {"n_painted": n}
    for i, name in enumerate(CLASSES):
        predictions = torch.cat([part[name] for part in logits]).argmax(1)
        scores[f"accuracy_{name}"] = (predictions == labels[:, i]).float().mean().item()
    none = len(painter.SHAPES)
    for kind in garbage.KINDS:
        x = as_tensor(np.stack([garbage.garbage(kind, rng)[1] for _ in range(n // 10)]))
        scores[f"none_{kind}"] = (judge(x)["shape"].argmax(1) == none).float().mean().item()
    bent = [painter.random_scene(rng) for _ in range(n // 4)]
    x = as_tensor(np.stack([garbage.damage(scene, rng) for scene in bent]))
    predictions = judge(x)["shape"].argmax(1)
    scores["accuracy_damaged"] = (
        (predictions == torch.tensor([s.labels()[0] for s in bent])).float().mean().item()
    )
    x, mixed = _judge_batch(3000, rng)
    probability = torch.cat([judge(part)["shape"].softmax(1) for part in x.split(250)])
    confidence, predictions = probability.max(1)
    right = (predictions == mixed["shape"]).float()
    bins = (confidence * 15).long().clamp(max=14)
    gaps = [
        (confidence[bins == b].mean() - right[bins == b].mean()).abs() * (bins == b).float().mean()
        for b in range(15)
        if (bins == b).any()
    ]
    scores["calibration_error"] = float(torch.stack(gaps).sum())
    return scores
