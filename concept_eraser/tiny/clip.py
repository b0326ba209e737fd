"""The small CLIP of the bundled world. Its text tower is the pipeline's text encoder and is stored only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def load_clip(weights: Path, pipeline: Path | None = None) -> Any:
    """The whole `CLIPModel` in fp32: image tower and projections from `weights/clip`, text tower from the pipeline."""
    from safetensors.torch import load_file
    from transformers import CLIPConfig, CLIPModel

    clip = CLIPModel(CLIPConfig.from_pretrained(weights / "clip"))
    tensors = load_file(weights / "clip" / "model.safetensors")
    text = load_file((pipeline or weights / "tiny-sd") / "text_encoder" / "model.safetensors")
    tensors |= {k if k.startswith("text_model.") else f"text_model.{k}": v for k, v in text.items()}
    clip.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()})
    return clip.eval().requires_grad_(False)


@torch.no_grad()
def cosine_scores(clip: Any, tokenizer: Any, pictures: Tensor, captions: list[str]) -> Tensor:
    """Cosine of each picture ([n, 3, 64, 64] in [-1, 1]) with its own caption: [n]."""
    scores = []
    for start in range(0, len(captions), 256):
        ids = tokenizer(captions[start : start + 256], padding=True, return_tensors="pt").input_ids
        text = clip.text_projection(clip.text_model(ids).pooler_output)
        image = clip.visual_projection(clip.vision_model(pictures[start : start + 256]).pooler_output)
        scores.append((F.normalize(image, dim=-1) * F.normalize(text, dim=-1)).sum(1))
    return torch.cat(scores)
