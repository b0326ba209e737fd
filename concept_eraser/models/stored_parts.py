"""The precision of a pipeline's parts in their checkpoint, and copies of their files.

A pipeline is trained and measured in fp32, whatever its checkpoint has. When it is written, a part
whose tensors are those of its files becomes a copy of these files, byte for byte. Any other part is
written in the checkpoint's precision, tensor by tensor.

Files are copied and never linked. `save_pretrained` writes into a file that is there already, so a
later call for the run's pipeline would change the linked checkpoint, or the other way round. On a
file system with shared blocks (Btrfs, XFS) a copy takes no space until one of the two changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.models.completeness import names_in_files
from concept_eraser.storage.readers import open_tensors, read_json, read_tensor_types
from concept_eraser.storage.writers import copy_file

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# the files' names by diffusers and by transformers
_STEMS = ("diffusion_pytorch_model", "model")


@dataclass(frozen=True)
class StoredPart:
    """How a part is stored.

    Attributes:
        dtypes: The precision of each tensor in the checkpoint, by the module's own names.
        folder: The folder with the part's files. None for a part that came from elsewhere, such as
            a pipeline in memory.
    """

    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def of_module(cls, module: nn.Module) -> StoredPart:
        """Return the precision that a module has now."""
        return cls({name: value.dtype for name, value in _floating(module)})

    @classmethod
    def of_folder(cls, module: nn.Module, folder: Path) -> StoredPart:
        """Return the precision in the files of a part's folder.

        A folder without safetensors (pickles) has no known precision.
        """
        files = weight_files(folder)
        types = {name: kind for file in files for name, kind in read_tensor_types(file).items()}
        dtypes = {}
        for name, _ in _floating(module):
            own = next((one for one in names_in_files(name) if one in types), None)
            if own is not None and types[own] in _DTYPES:
                dtypes[name] = _DTYPES[types[own]]
        return cls(dtypes, folder if files else None)

    @classmethod
    def of_file(cls, module: nn.Module, file: Path) -> StoredPart:
        """Return the usual precision of a single file for all tensors of a part in it."""
        kinds = Counter(kind for kind in read_tensor_types(file).values() if kind in _DTYPES)
        if not kinds:
            return cls()
        dtype = _DTYPES[kinds.most_common(1)[0][0]]
        return cls({name: dtype for name, _ in _floating(module)})

    @property
    def usual(self) -> torch.dtype:
        """The precision of most tensors. It is fp32 if none is known."""
        kinds = Counter(self.dtypes.values())
        return kinds.most_common(1)[0][0] if kinds else torch.float32

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the precision of a tensor, the usual one for an unknown name."""
        return self.dtypes.get(name, self.usual)

    def is_same(self, module: nn.Module) -> bool:
        """Whether all tensors of a module are those of its files.

        A tensor with several names (tied weights) is in the files under one of them.
        """
        if self.folder is None:
            return False
        return _is_same(module, self.folder)

    def save(self, module: Any, place: Path) -> None:
        """Write a part into a new folder: as copies of its files, or in their precision."""
        if self.is_same(module):
            assert self.folder is not None  # is_same has checked it
            _copy(self.folder, place)
            return
        with self.precision(module):
            module.save_pretrained(place, safe_serialization=True)

    @torch.no_grad()
    def rounding(
        self, tensors: Mapping[str, Tensor], changes: Iterable[tuple[str, Tensor]]
    ) -> float:
        """Return what the checkpoint's precision leaves out of a change, relative to the change.

        It is sqrt(sum ||round(W) - W||^2 / sum ||change||^2), and 0 for a checkpoint in fp32.

        Args:
            tensors: The changed tensors W in fp32, by name.
            changes: Their names, with the differences from the original. Other names do not count.
        """
        lost, total = 0.0, 0.0
        for name, change in changes:
            value = tensors[name].cpu()
            rounded = value.to(self.dtype_of(name)).to(value.dtype)
            lost += float((rounded - value).double().square().sum())
            total += float(change.double().square().sum())
        return math.sqrt(lost / total) if total else 0.0

    @contextmanager
    def precision(self, module: nn.Module) -> Iterator[None]:
        """Give a module the precision of its checkpoint inside the context.

        Afterwards it has its own tensors again, with all of their bits.
        """
        originals: dict[int, tuple[Tensor, Tensor]] = {}
        try:
            with torch.no_grad():
                for name, tensor in _floating(module):
                    if id(tensor) not in originals and tensor.dtype != self.dtype_of(name):
                        originals[id(tensor)] = (tensor, tensor.data)
                        tensor.data = tensor.data.to(self.dtype_of(name))
            yield
        finally:
            for tensor, data in originals.values():
                tensor.data = data


def precision_of_pipeline(folder: Path) -> torch.dtype | None:
    """Return the usual precision of the denoiser in a pipeline's folder.

    It is None if the folder has none, or has no safetensors.
    """
    files = [file for part in ("unet", "transformer") for file in weight_files(folder / part)]
    kinds = Counter(kind for file in files for kind in read_tensor_types(file).values())
    known = [_DTYPES[kind] for kind, _ in kinds.most_common() if kind in _DTYPES]
    return known[0] if known else None


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that the libraries load from a part's folder.

    Files of other variants, such as `model.fp16.safetensors`, are not among them.
    """
    for stem in _STEMS:
        file, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if file.is_file():
            return [file]
        if index.is_file():
            names = set(read_json(index).get("weight_map", {}).values())
            # the index may be a stranger's: a shard is a name, not a path
            plain_names = sorted(name for name in names if Path(str(name)).name == name)
            return [path for name in plain_names if (path := folder / name).is_file()]
    return []


def _floating(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and the stored buffers with floating-point numbers, by all names."""
    state = set(module.state_dict())
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return [(name, one) for name, one in tensors if name in state and one.is_floating_point()]


@torch.no_grad()
def _is_same(module: nn.Module, folder: Path) -> bool:
    names: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        names.setdefault(id(value), (value, []))[1].append(name)
    remaining = set(names)
    for file in weight_files(folder):
        with open_tensors(file) as content:
            there = set(content.keys())
            for key in sorted(remaining):
                value, own_names = names[key]
                stored_name = next(
                    (one for name in own_names for one in names_in_files(name) if one in there),
                    None,
                )
                if stored_name is None:
                    continue  # perhaps in another file
                stored = content.get_tensor(stored_name)
                if stored.shape != value.shape:
                    return False
                if not torch.equal(stored.to(value.dtype), value.detach().cpu()):
                    return False
                remaining.discard(key)
    return not remaining


def _copy(folder: Path, place: Path) -> None:
    """Copy a part's weights and its config.json.

    Nothing else is copied: another file of a stranger's folder may be a link to a secret.
    """
    place.mkdir(parents=True, exist_ok=True)
    files = weight_files(folder)
    in_shards = files[0].name not in {f"{stem}.safetensors" for stem in _STEMS}
    indices = [folder / f"{stem}.safetensors.index.json" for stem in _STEMS if in_shards]
    texts = [folder / "config.json", *indices]
    for path in (*texts, *files):
        if path.is_file():
            copy_file(path, place / path.name)
