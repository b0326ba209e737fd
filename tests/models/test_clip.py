"""CLIP models as classifiers, compared with the libraries' own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from concept_eraser import api
from concept_eraser.models.families.clip import Clip
from concept_eraser.models.loading import load_part
from concept_eraser.tiny.families import clip_tokenizer
from concept_eraser.utils.errors import UserError

NAMES, TEMPLATES = ["a star", "a blue house"], ["a photo of {}"]
TEXTS = [TEMPLATES[0].replace("{}", name) for name in NAMES]


@pytest.fixture
def pixels() -> np.ndarray:
    """Coloured squares with hard edges, [64, 64, 3]."""
    squares = np.random.default_rng(0).integers(0, 2, (8, 8, 3), dtype=np.uint8) * 255
    return squares.repeat(8, 0).repeat(8, 1)


def as_tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.tensor(pixels).permute(2, 0, 1)[None].float() / 127.5 - 1


def clip_model(**text: Any) -> Any:
    """A small CLIPModel with random weights, for `clip_tokenizer`."""
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
        text_config={**shape, **words, **text},
        vision_config={**shape, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    return CLIPModel(config).eval()


def open_clip_model(vocabulary: int) -> Any:
    torch.manual_seed(0)
    vision = open_clip.CLIPVisionCfg(
        layers=2, width=32, head_width=16, patch_size=16, image_size=32
    )
    text = open_clip.CLIPTextCfg(
        context_length=77, vocab_size=vocabulary, width=32, heads=2, layers=2
    )
    return open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text).eval()


@pytest.mark.parametrize("size", [32, 64])
def test_the_logits_are_those_of_transformers(size: int, pixels: np.ndarray) -> None:
    tokenizer, model = clip_tokenizer(), clip_model()
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
    model = open_clip_model(49408)
    process: Any = open_clip.image_transform(32, is_train=False)
    image = pixels[:32, :32]
    with torch.no_grad():
        features = model.encode_image(process(Image.fromarray(image))[None], normalize=True)
        words = model.encode_text(open_clip.tokenize(TEXTS), normalize=True)
        own = Clip.from_object(model).zero_shot(NAMES, TEMPLATES)(as_tensor(image))
        expected = model.logit_scale.exp() * features @ words.T
    torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """transformers makes a tokenizer without words of it, and all prompts are the same."""
    clip_model().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds no vocabulary"):
        load_part(tmp_path, "clip")


def test_a_processor_has_the_mean_of_the_pixels(tmp_path: Path, pixels: np.ndarray) -> None:
    images = CLIPImageProcessor(
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_mean=[0.5, 0.4, 0.3],
        image_std=[0.5, 0.4, 0.2],
    )
    model, processor = clip_model(), CLIPProcessor(images, clip_tokenizer())
    image = pixels[:32, :32]
    inputs = processor(text=TEXTS, images=Image.fromarray(image), padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model(**inputs).logits_per_image
    clip = load_part((model, processor), "clip")
    own = clip.zero_shot(NAMES, TEMPLATES)(as_tensor(image))
    torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
    clip.save(tmp_path / "saved")
    model.save_pretrained(tmp_path / "theirs")
    processor.save_pretrained(tmp_path / "theirs")
    for name in ("saved", "theirs"):
        again = load_part(tmp_path / name, "clip").zero_shot(NAMES, TEMPLATES)(as_tensor(image))
        torch.testing.assert_close(again, expected, atol=1e-4, rtol=1e-4)


def test_a_model_in_memory_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    clip = load_part((clip_model(), clip_tokenizer()), "clip")
    clip.save(tmp_path)
    assert torch.equal(load_part(tmp_path, "clip").tokenize(TEXTS), clip.tokenize(TEXTS))


def test_prompts_have_the_length_of_the_text_tower(caplog: pytest.LogCaptureFixture) -> None:
    clip = load_part((clip_model(max_position_embeddings=40), clip_tokenizer()), "clip")
    with caplog.at_level(logging.WARNING):
        assert clip.zero_shot(NAMES, TEMPLATES).tokens.shape == (2, 1, 40)
        assert not caplog.records
        clip.zero_shot(["a star " * 20], TEMPLATES)
    assert "1 of 1 prompts are longer than the model's 40 tokens and were cut" in caplog.text


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"pass \(model, open_clip.get_tokenizer\(name\)\)"):
        load_part(open_clip_model(60_000), "clip")
    clip = load_part((clip_model(vocab_size=20), clip_tokenizer()), "clip")
    with pytest.raises(UserError, match="its text tower has 20 tokens"):
        clip.zero_shot(NAMES, TEMPLATES)


@pytest.mark.parametrize("source", [torch.nn.Linear(2, 2), (torch.nn.Linear(2, 2), None)])
def test_another_module_is_refused(source: Any) -> None:
    with pytest.raises(UserError, match="a Linear is no CLIPModel of transformers"):
        load_part(source, "clip")


def test_pixels_of_another_range_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = np.arange(40) % 2
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 16, 16)).astype(np.float32)
    options: dict[str, Any] = {
        "model": (clip_model(), clip_tokenizer()),
        "target": "clip",
        "retain": "rest",
        "templates": TEMPLATES,
        "training": {"steps": 2, "batch_size": 4, "lr": 1e-3, "device": "cpu"},
        "output": tmp_path / "run",
    }
    forget = {"classes": [1], "loss": "relabel"}
    with pytest.raises(UserError, match=r"reads images in \[-1, 1\] here, found pixels from"):
        api.erase(forget={"data": (images, labels), **forget}, **options)
    with caplog.at_level(logging.WARNING):
        api.erase(forget={"data": (images / 127.5 - 1, labels), **forget}, **options)
    assert "are 16 pixels wide and are enlarged to the 32 of the CLIP model" in caplog.text
