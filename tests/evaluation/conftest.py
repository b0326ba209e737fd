"""Fixtures of the evaluation's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small open_clip model with random weights."""
    import open_clip

    config: dict[str, Any] = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
        "text_cfg": {
            "context_length": 77,
            "vocab_size": 49408,
            "width": 64,
            "heads": 1,
            "layers": 1,
        },
    }
    folder = tmp_path_factory.mktemp("clip")
    content = {"model_cfg": config, "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    torch.manual_seed(0)
    weights = open_clip.CLIP(**config).state_dict()
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "open_clip_model.safetensors")
    return folder
