"""Models that are one module: a classifier, a VAE, or a CLIP model with class names.

A saved folder holds config.json ({"architecture": a file of models/architectures/, "options": ...})
and model.safetensors. Modules of diffusers and transformers are saved by their own save_pretrained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from concept_eraser import registry
from concept_eraser.models.base import Loaded
from concept_eraser.models.folder_check import check_part
from concept_eraser.storage.readers import read_json, read_tensors
from concept_eraser.utils.errors import UserError, quote

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class Module(Loaded):
    """One module with the name of its part."""

    family = "module"

    def __init__(
        self, module: nn.Module, part: str, source: str, built_from: dict[str, Any] | None = None
    ) -> None:
        self.parts = {part: module}
        self.source = source
        self.built_from = built_from
        module.float().eval().requires_grad_(False)

    @property
    def module(self) -> nn.Module:
        return next(iter(self.parts.values()))

    def to(self, device: torch.device) -> Module:
        self.module.to(device)
        return self

    def save(self, folder: Path) -> None:
        writer = getattr(self.module, "save_pretrained", None)
        if writer is not None:
            writer(folder, safe_serialization=True)
            return
        folder.mkdir(parents=True, exist_ok=True)
        config = self.built_from or {
            "class": f"{type(self.module).__module__}.{type(self.module).__qualname__}"
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        tensors = {
            name: value.detach().cpu().contiguous().clone()
            for name, value in self.module.state_dict().items()
        }
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def build(architecture: str, part: str, **options: Any) -> Module:
    """Build a network of models/architectures/ by name with new weights.

    Example: build("mlp", "classifier", inputs=64).
    """
    module = registry.build("architecture", architecture, options).build()
    return Module(
        module, part, f"a fresh {architecture}", {"architecture": architecture, "options": options}
    )


def open_folder(folder: Path, part: str) -> Module:
    """Load a folder that `Module.save` wrote.

    Raises UserError if it is incomplete or holds a class of another package.
    """
    missing_files = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing_files:
        raise UserError(
            f"{folder} holds no model of concept_eraser: it needs {CONFIG} and {WEIGHTS}, and has "
            f"no {missing_files[0]}; give another folder"
        )
    check_part(folder)
    config, tensors = read_json(folder / CONFIG), read_tensors(folder / WEIGHTS)
    if "architecture" not in config:
        raise UserError(
            f"{folder} holds weights of {config.get('class', 'an unknown class')}, which "
            "only its own code can build; make the module, load_state_dict these "
            "weights, and pass the object"
        )
    architecture, options = config["architecture"], config.get("options", {})
    if not isinstance(architecture, str) or not isinstance(options, dict):
        raise UserError(
            f"{folder / CONFIG} is damaged: expected the name of an architecture and its "
            f"options, found {quote(architecture, 80)} and {quote(options, 80)}; copy "
            "the folder again"
        )
    model = build(architecture, part, **options)
    try:
        mismatch = model.module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # sizes
        raise UserError(
            f"{folder}: the weights do not fit the architecture "
            f"{config['architecture']!r} ({str(error).splitlines()[-1].strip()[:150]})"
        ) from None
    if mismatch.missing_keys or mismatch.unexpected_keys:
        raise UserError(
            f"{folder}: the weights do not fit the architecture "
            f"{config['architecture']!r}, e.g. "
            f"{(mismatch.missing_keys + mismatch.unexpected_keys)[0]}"
        )
    model.source = str(folder)
    return model
