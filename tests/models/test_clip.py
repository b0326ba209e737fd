"""CLIP models as classifiers, compared with the libraries' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from concept_eraser.models.families.clip import Clip
from concept_eraser.tiny.families import clip_tokenizer

NAMES, TEMPLATES = ["a star", "a blue house"], ["a photo of {}"]
TEXTS = [TEMPLATES[0].replace("{}", name) for name in NAMES]


@pytest.fixture
def pixels() -> np.ndarray:
    """Coloured squares with hard edges, [64, 64, 3]."""
    squares = np.random.default_rng(0).integers(0, 2, (8, 8, 3), dtype=np.uint8) * 255
    return squares.repeat(8, 0).repeat(8, 1)


def as_tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.tensor(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1


@pytest.mark.parametrize("size", [32, 64])
def test_the_logits_are_those_of_transformers(size: int, pixels: np.ndarray) -> None:
    torch.manual_seed(0)
    tokenizer = clip_tokenizer()
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    words = {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in ids}}
    config = CLIPConfig(
        text_config={**shape, **words},
        vision_config={**shape, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    model: Any = CLIPModel(config).eval()
    process = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    image = pixels[:size, :size]
    tokens = tokenizer(TEXTS, padding="max_length", max_length=77, return_tensors="pt")
    inputs: list[torch.Tensor] = []
    model.vision_model.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append((*args, *kwargs.values())[0]), with_kwargs=True
    )
    with torch.no_grad():
        expected = model(**process(Image.fromarray(image), return_tensors="pt"), **tokens)
        own = Clip.from_object(model, tokenizer).zero_shot(NAMES, TEMPLATES)(as_tensor(image))
    near = 1e-4 if size == 32 else 0.05  # Pillow rounds and clips after each of two passes
    torch.testing.assert_close(inputs[1], inputs[0], atol=near, rtol=0)
    torch.testing.assert_close(own, expected.logits_per_image, atol=near, rtol=near)


def test_the_logits_are_those_of_open_clip(pixels: np.ndarray) -> None:
    torch.manual_seed(0)
    vision = open_clip.CLIPVisionCfg(
        layers=2, width=32, head_width=16, patch_size=16, image_size=32
    )
    text = open_clip.CLIPTextCfg(context_length=77, vocab_size=49408, width=32, heads=2, layers=2)
    model = open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text).eval()
    process: Any = open_clip.image_transform(32, is_train=False)
    image = pixels[:32, :32]
    with torch.no_grad():
        features = model.encode_image(process(Image.fromarray(image))[None], normalize=True)
        words = model.encode_text(open_clip.tokenize(TEXTS), normalize=True)
        own = Clip.from_object(model).zero_shot(NAMES, TEMPLATES)(as_tensor(image))
        expected = model.logit_scale.exp() * features @ words.T
    torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
