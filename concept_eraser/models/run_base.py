"""The original of a run that wrote no whole pipeline, and the erased model made from the two.

Such a run has a LoRA or changed tensors, and `base.json` beside them:

    {"model": "./sd15", "parts": {"denoiser": "<SHA-256>", "text_encoder": "...", "vae": "..."}}

The digests are of the weights in fp32, so the same weights in other files are the same original.
They do not depend on the names of the tensors, which the libraries change between versions.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.models import lora_files, residual_gate
from concept_eraser.models.base import Loaded, Model
from concept_eraser.storage.manifest import require_intact
from concept_eraser.storage.readers import read_json, read_tensor_header, read_tensors
from concept_eraser.utils.errors import UserError, names_text, quote

FILE = "base.json"
WEIGHTS = "weights.safetensors"
THREADS = 8  # at most, for the sums of a checkpoint
_PARTS = {"unet": "denoiser", "transformer": "denoiser"}  # the names of parts in a file's header


@dataclass(frozen=True)
class RunBase:
    """The original of a run.

    Attributes:
        model: Its name, as the recipe has it.
        parts: The SHA-256 of the weights of each part.
    """

    model: str
    parts: Mapping[str, str]

    @classmethod
    def of(cls, model: Loaded, name: str) -> RunBase:
        """Return the record of a loaded model, before it is changed."""
        return cls(name, {part: weights_digest(module) for part, module in model.parts.items()})

    def content(self) -> dict[str, Any]:
        """Return the content of the file."""
        return asdict(self)

    def differences(self, model: Loaded) -> list[str]:
        """Return the parts in which a model differs from the original."""
        own = RunBase.of(model, "").parts
        return sorted(part for part in {*own, *self.parts} if own.get(part) != self.parts.get(part))


def weights_digest(module: nn.Module) -> str:
    """Return the SHA-256 of all floating-point tensors of a module, without their names.

    Several threads compute it, since it takes seconds for a real checkpoint.
    """
    tensors = [value for value in module.state_dict().values() if value.is_floating_point()]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        digests = set(pool.map(_tensor_digest, tensors))
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def _tensor_digest(value: Tensor) -> str:
    """Return the SHA-256 of a tensor's shape and its values in fp32."""
    digest = hashlib.sha256(f"{tuple(value.shape)};".encode())
    flat = value.detach().float().cpu().contiguous().flatten()
    digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read(folder: Path) -> RunBase | None:
    """Read the record of a run folder. Returns None if there is none.

    Raises UserError if it is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    require_intact(path)
    content = read_json(path)
    model, parts = content.get("model"), content.get("parts")
    if (
        not isinstance(model, str)
        or not isinstance(parts, dict)
        or not all(isinstance(one, str) for one in parts.values())
    ):
        raise UserError(f"{path} is damaged: it names no original model; copy the run again")
    return RunBase(model, parts)


def is_rebuilt(folder: Path) -> bool:
    """Whether a folder is a run that is loaded from its original and its own change."""
    return (
        (folder / FILE).is_file()
        and not (folder / "pipeline").is_dir()
        and ((folder / WEIGHTS).is_file() or (folder / lora_files.FOLDER).is_dir())
    )


def is_lora_alone(folder: Path) -> bool:
    """Whether a folder is a run that is loaded from its original and its LoRA."""
    return is_rebuilt(folder) and not (folder / WEIGHTS).is_file()


def apply(folder: Path, model: Model, *, is_shared: bool = False) -> None:
    """Change the original of a run, in place, into the erased model.

    is_shared: another model has the same tensors. Those that change are copied first.

    Raises UserError if the run's tensors are damaged or do not fit the model.
    """
    if (folder / WEIGHTS).is_file():
        apply_changed_tensors(folder, model, is_shared=is_shared)
        return
    file = folder / lora_files.FOLDER / lora_files.FILE
    require_intact(file)
    header, _ = read_tensor_header(file)
    with torch.no_grad():
        for factors in lora_files.read(model, read_tensors(file), header, str(file)):
            part = model.parts[factors.part]
            if is_shared:
                _own_tensors(part, [f"{layer}.weight" for layer in factors.layers])
            for layer in factors.layers:
                weight: Any = part.get_parameter(f"{layer}.weight")
                weight += factors.change(layer).to(weight)


def _own_tensors(part: nn.Module, names: Sequence[str]) -> None:
    """Replace some tensors of a module by copies, under each of their names."""
    copies: dict[int, Tensor] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        owner = part.get_submodule(path)
        table: Any = owner._parameters if attribute in owner._parameters else owner._buffers
        tensor = table[attribute]
        if id(tensor) not in copies:
            copies[id(tensor)] = type(tensor)(tensor.detach().clone())
            copies[id(tensor)].requires_grad_(tensor.requires_grad)
    for module in part.modules():  # a tied tensor has several places
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if id(tensor) in copies:
                    table[key] = copies[id(tensor)]


def apply_changed_tensors(folder: Path, model: Model, *, is_shared: bool = False) -> None:
    """Give a model the changed tensors of a run, in place, with all bits of the training.

    is_shared: as in `apply`.

    Raises UserError if they do not fit the model.
    """
    file = folder / WEIGHTS
    require_intact(file)
    name = read_tensor_header(file)[0].get("part", "unet")
    part = _PARTS.get(name, name)
    tensors = read_tensors(file)
    if part == "denoiser":
        residual_gate.attach_stored(model.parts[part], tensors, str(file))
    state = model.parts[part].state_dict() if part in model.parts else {}
    misfits = [
        name
        for name, value in tensors.items()
        if name not in state or state[name].shape != value.shape
    ]
    if misfits or not state:
        raise UserError(
            f"{file} does not fit {model.source}: {quote(part)} has no such tensor "
            f"{names_text(misfits[:1])}; was the run made from another model?"
        )
    if is_shared:
        _own_tensors(model.parts[part], list(tensors))
        state = model.parts[part].state_dict()
    with torch.no_grad():
        for name, value in tensors.items():
            state[name].copy_(value)


def other_base(folder: Path, base: RunBase, model: Loaded, parts: list[str]) -> UserError:
    """Return the error for a model that is not the original of a run."""
    lora = folder / lora_files.FOLDER
    advice = f", or put the LoRA itself on another model: {lora}" if lora.is_dir() else ""
    return UserError(
        f"{folder} holds only its change of {quote(base.model)}, and {model.source} has other "
        f"weights in {names_text(parts)} than the model that it was trained on; give that "
        f"model with --before{advice}"
    )
