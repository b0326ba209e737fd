"""Train the second judge, and fit the temperature of each of its heads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.tiny import garbage, half_erased, painter
from concept_eraser.tiny.judge2 import CLASSES, SecondJudgeNet, load_judge2
from concept_eraser.tiny.stages.base import Stage, save_half
from concept_eraser.tiny.trainer import Trainer, as_tensor, decay_groups

SEED = 1000  # added to the seed of the build, so that the first judge has another seed
STEPS = 2600
BATCH = 96
ARCHITECTURE = {"width": 128, "depth": 4, "heads": 4}
LEARNING_RATE = 1e-3


def draw_batch(n: int, rng: np.random.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a quarter each of drawings, damaged drawings, garbage and half-erased drawings.

    Drawings are never of held-out combinations. Labels of -100 are not scored.

    Args:
        n: images, a multiple of 4.
        rng: the generator.

    Returns:
        Images [n, 3, 64, 64] in [-1, 1], and the labels [n] of each attribute.
    """
    quarter = n // 4
    scenes, clean = painter.paint_batch(quarter, rng, held_out=False)
    images, labels = list(clean), [scene.labels() for scene in scenes]
    for _ in range(quarter):
        scene = painter.random_scene(rng, held_out=False)
        images.append(garbage.damage(scene, rng))
        labels.append(scene.labels())
    for i in range(quarter):
        kind = garbage.KINDS[i % len(garbage.KINDS)]
        scene, image = garbage.garbage(kind, rng)
        images.append(image)
        labels.append(half_erased.garbage_labels(kind, scene))
    kinds = tuple(half_erased.KINDS)
    for i in range(quarter):
        image, labels_left = half_erased.half_erased(kinds[i % len(kinds)], rng, held_out=False)
        images.append(image)
        labels.append(labels_left)
    table = torch.tensor(labels)
    return as_tensor(np.stack(images)), {name: table[:, i] for i, name in enumerate(CLASSES)}


def train_judge2(stage: Stage) -> dict:
    """Train the second judge and write it to `judge2/` in the folder of the build."""
    stage = replace(stage, seed=stage.seed + SEED)
    torch.manual_seed(stage.seed)
    judge: Any = SecondJudgeNet(**ARCHITECTURE).train()
    optimizer = torch.optim.AdamW(decay_groups(judge, 0.05), lr=LEARNING_RATE, betas=(0.9, 0.98))
    trainer = Trainer(
        stage="judge2",
        module=judge,
        optimizer=optimizer,
        steps=stage.steps(STEPS),
        seed=stage.seed,
        folder=stage.folder,
        ema_decay=0.995,
        save_every=stage.save_every,
    )

    def loss(step: int, rng: np.random.Generator) -> Tensor:
        images, labels = draw_batch(BATCH, rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits = judge(images)
        return sum(
            (F.cross_entropy(logits[k].float(), labels[k]) for k in CLASSES), torch.zeros(())
        )

    seconds = trainer.run(loss, stage.say)
    judge.eval()
    _fit_temperatures(judge, stage.rng("judge2-calibration"), stage.images(3000))
    save_half(judge.state_dict(), stage.folder / "judge2" / "model.safetensors")
    (stage.folder / "judge2" / "config.json").write_text(
        json.dumps({**ARCHITECTURE, "classes": CLASSES}, indent=1) + "\n"
    )
    stored = load_judge2(stage.folder / "judge2")  # in half precision: score what is used
    return {
        "seconds": seconds,
        "seed": stage.seed,
        "steps": trainer.steps,
        "batch": BATCH,
        "learning_rate": LEARNING_RATE,
        **ARCHITECTURE,
        "parameters": sum(p.numel() for p in stored.parameters()),
        "temperatures": stored.temperatures.tolist(),
        **score_judge2(stored, stage.rng("judge2-test"), stage.images(4000)),
    }


@torch.no_grad()
def _logits(judge: SecondJudgeNet, images: Tensor) -> dict[str, Tensor]:
    parts = [judge(part) for part in images.split(250)]
    return {name: torch.cat([part[name] for part in parts]) for name in CLASSES}


def _fit_temperatures(judge: SecondJudgeNet, rng: np.random.Generator, n: int) -> None:
    """Set the temperature of each head by the likelihood of new images."""
    images, labels = draw_batch(n, rng)
    logits = _logits(judge, images)
    grid = torch.logspace(-1, 1, 81)
    for i, name in enumerate(CLASSES):
        nll = torch.stack([F.cross_entropy(logits[name] / t, labels[name]) for t in grid])
        judge.temperatures[i] = grid[nll.argmin()]


def score_judge2(judge: SecondJudgeNet, rng: np.random.Generator, n: int = 4000) -> dict:
    """Return the scores of the judge on new images.

    Args:
        judge: the network.
        rng: the generator of the images.
        n: drawings of held-out combinations, a multiple of 40. Each kind of garbage has n / 10
            images.

    Returns:
        `accuracy_ATTRIBUTE` on drawings and `damaged_ATTRIBUTE` on damaged drawings, both of
        combinations that were never trained on; `none_KIND_ATTRIBUTE`, the share of images called
        "none" among those whose label is "none"; `kept_KIND_ATTRIBUTE`, the accuracy where the
        label is a value; and `calibration_error_ATTRIBUTE` on the mixture of the training.
    """
    scenes, images = painter.paint_batch(n, rng, held_out=True)
    labels = torch.tensor([scene.labels() for scene in scenes])
    scores: dict = {"n_painted": n, "n_garbage_kind": n // 10}
    scores |= _accuracies("accuracy", _logits(judge, as_tensor(images)), labels)
    scenes = [painter.random_scene(rng, held_out=True) for _ in range(n // 4)]
    images = np.stack([garbage.damage(scene, rng) for scene in scenes])
    labels = torch.tensor([scene.labels() for scene in scenes])
    scores |= _accuracies("damaged", _logits(judge, as_tensor(images)), labels)
    for kind in (*garbage.KINDS, *half_erased.KINDS):
        rows = [_none_sample(kind, rng) for _ in range(n // 10)]
        logits = _logits(judge, as_tensor(np.stack([image for image, _ in rows])))
        labels = torch.tensor([labels for _, labels in rows])
        none = torch.tensor(half_erased.NONE)
        scores |= _accuracies(f"none_{kind}", logits, labels.where(labels == none, -100))
        if kind in half_erased.KINDS:
            scores |= _accuracies(f"kept_{kind}", logits, labels.where(labels != none, -100))
    x, mixed = draw_batch(n, rng)
    logits = _logits(judge, x)
    for name in CLASSES:
        scored = mixed[name] >= 0
        scores[f"calibration_error_{name}"] = _calibration_error(
            logits[name][scored], mixed[name][scored]
        )
    return scores


def _none_sample(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, half_erased.Labels]:
    if kind in half_erased.KINDS:
        return half_erased.half_erased(kind, rng, held_out=True)
    scene, image = garbage.garbage(kind, rng)
    return image, half_erased.garbage_labels(kind, scene)


def _accuracies(prefix: str, logits: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
    """Return the accuracy of each attribute over its scored labels, [n, 4]."""
    scores = {}
    for i, name in enumerate(CLASSES):
        scored = labels[:, i] >= 0
        if scored.any():
            right = logits[name].argmax(1)[scored] == labels[scored, i]
            scores[f"{prefix}_{name}"] = right.float().mean().item()
    return scores


def _calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error over bins of equal width."""
    confidence, predictions = logits.softmax(1).max(1)
    right = (predictions == labels).float()
    places = (confidence * bins).long().clamp(max=bins - 1)
    gaps = [
        (confidence[places == b].mean() - right[places == b].mean()).abs()
        * (places == b).float().mean()
        for b in range(bins)
        if (places == b).any()
    ]
    return float(torch.stack(gaps).sum())
