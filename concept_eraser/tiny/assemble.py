"""Assemble the trained parts into a diffusers folder in half precision, with scores and a JSON."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from concept_eraser.models.families.sd import StableDiffusion
from concept_eraser.tiny import painter
from concept_eraser.tiny.judge import CLASSES, JudgeNet, load_judge
from concept_eraser.tiny.stages.base import save_half
from concept_eraser.tiny.stages.clip import text_tower
from concept_eraser.tiny.stages.unet import SCHEDULE
from concept_eraser.utils import provenance, resources

PROMPTS_A_NOUN = 48  # images for each shape's own name and for each synonym


def assemble(
    work: Path, output: Path | None, *, seed: int, threads: int, say: Callable[[str], None]
) -> dict:
    """Write the bundled weights, and score the written weights rather than the trained ones."""
    weights = output or resources.tiny_weights()
    _write_pipeline(work, weights / "tiny-sd")
    _write_clip(work, weights / "clip")
    shutil.copytree(work / "judge", weights / "judge", dirs_exist_ok=True)
    say("scoring the assembled pipeline")
    parts = {
        name: json.loads((work / f"{name}.json").read_text())
        for name in ("vae", "judge", "clip", "unet")
    }
    model = StableDiffusion.from_folder(str(weights / "tiny-sd"), source="tiny-sd")
    size = sum(p.stat().st_size for p in weights.rglob("*") if p.is_file())
    report = {
        "command": f"python -m concept_eraser.tiny.build --seed {seed} --threads {threads}",
        "seed": seed,
        "training_seconds": round(sum(part["seconds"] for part in parts.values())),
        "megabytes": round(size / 2**20, 2),
        "parts": parts,
        "pipeline": score_pipeline(model, load_judge(weights / "judge"), say=say),
        "environment": provenance.describe(),
    }
    (weights / "tiny.json").write_text(json.dumps(report, indent=1) + "\n")
    say(json.dumps(report["pipeline"]))
    return report


def _write_pipeline(work: Path, folder: Path) -> None:
    from diffusers import (
        AutoencoderKL,
        DDIMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTokenizer

    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(work / "vae"),
        text_encoder=text_tower(work),
        tokenizer=CLIPTokenizer.from_pretrained(work / "tokenizer"),
        unet=UNet2DConditionModel.from_pretrained(work / "unet"),
        scheduler=DDIMScheduler(**SCHEDULE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    shutil.rmtree(folder, ignore_errors=True)
    for part in (pipeline.vae, pipeline.text_encoder, pipeline.unet):
        part.half()
    pipeline.save_pretrained(folder, safe_serialization=True)


def _write_clip(work: Path, folder: Path) -> None:
    """Write the CLIP without its text tower, which the pipeline's text_encoder/ already holds."""
    tensors = load_file(work / "clip" / "model.safetensors")
    save_half(
        {k: v for k, v in tensors.items() if not k.startswith("text_model.")},
        folder / "model.safetensors",
    )
    shutil.copy(work / "clip" / "config.json", folder / "config.json")


def held_out_prompts(
    rng: np.random.Generator, n: int = PROMPTS_A_NOUN
) -> list[tuple[str, painter.PaintedScene, str]]:
    """Return (noun, scene, caption) for every shape's name and every synonym.

    Training never uses these combinations.
    """
    rows = []
    for shape in painter.SHAPES:
        for noun in (shape, *painter.SYNONYMS[shape]):
            for _ in range(n):
                while True:
                    scene = painter.random_scene(rng, held_out=True)
                    if scene.shape == shape:
                        break
                words = f"{painter.STYLE_WORDS[scene.style][0]} {scene.color} {noun}"
                rows.append(
                    (
                        noun,
                        scene,
                        (
                            f"{painter.article(words)} "
                            f"{painter.BACKGROUND_PHRASES[scene.background][0]}"
                        ),
                    )
                )
    return rows


@torch.no_grad()
def score_pipeline(
    model: StableDiffusion,
    judge: JudgeNet,
    *,
    say: Callable[[str], None],
    steps: int = 25,
    guidance: float = 5.0,
) -> dict:
    """Return the share of generated images that show the prompt's shape, by noun.

    Also returns the time to sample 16 images.
    """
    rows = held_out_prompts(np.random.default_rng(2024))
    hits: dict[str, list[bool]] = defaultdict(list)
    attributes: dict[str, list[bool]] = defaultdict(list)
    none = 0
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        seeds = [provenance.derive_seed("score", start + i) % 2**31 for i in range(len(part))]
        images = model.sample(
            [text for _, _, text in part],
            seeds=seeds,
            steps=steps,
            guidance=guidance,
            autocast=torch.bfloat16,
        )
        predictions = {
            k: v.argmax(1).tolist()
            for k, v in judge(images.permute(0, 3, 1, 2).float() / 127.5 - 1).items()
        }
        none += predictions["shape"].count(len(painter.SHAPES))
        for i, (noun, scene, _) in enumerate(part):
            right = {
                k: predictions[k][i] == label
                for k, label in zip(CLASSES, scene.labels(), strict=True)
            }
            hits[f"{scene.shape}/{noun}"].append(right["shape"])
            for name, value in right.items():
                attributes[name].append(value)
        say(f"scoring: {start + len(part)}/{len(rows)} images")
    began = time.monotonic()
    model.sample(["a red star"] * 16, seeds=list(range(16)), steps=25, guidance=guidance)
    direct = {s: float(np.mean(hits[f"{s}/{s}"])) for s in painter.SHAPES}
    synonyms = {k: float(np.mean(v)) for k, v in hits.items() if k.split("/")[0] != k.split("/")[1]}
    return {
        "steps": steps,
        "guidance": guidance,
        "n": len(rows),
        "n_per_noun": PROMPTS_A_NOUN,
        "shape_by_own_name": float(np.mean(list(direct.values()))),
        "accuracy": {k: float(np.mean(v)) for k, v in attributes.items()},
        "no_object_rate": none / len(rows),
        "by_shape": direct,
        "by_synonym": synonyms,
        "seconds_for_16_images_fp32": round(time.monotonic() - began, 2),
    }
