"""Images made by the model itself, kept in a cache keyed by everything that determines them.

The key covers the weights, the prompts, the seeds and the sampler's settings, so a second run starts at once, two
runs that ask for the same "before" pictures share them, and a changed weight can never be answered from the cache.
Pictures are stored in chunks as they are made; an interrupted generation goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from concept_eraser import resources
from concept_eraser.environment import derive_seed, fingerprint
from concept_eraser.models.base import Model
from concept_eraser.progress import Progress, silent


@dataclass(frozen=True)
class Sampling:
    """How pictures are sampled: denoising steps, classifier-free guidance, pictures at once, autocast precision."""

    steps: int = 25
    guidance: float = 5.0
    batch_size: int = 32
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(f"steps and batch_size must be at least 1, found {self.steps} and {self.batch_size}")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be fp32 or bf16, found {self.precision!r}")

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision == "bf16" else None


def model_fingerprint(model: Model) -> str:
    """A hash of every weight of the pipeline, in name order (float values as they are in memory)."""
    digest = hashlib.sha256()
    for part in sorted(model.parts):
        for name, value in sorted(model.parts[part].state_dict().items()):
            digest.update(f"{part}.{name}{tuple(value.shape)}{value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:24]


def seeds_for(prompts: Sequence[str], base: int) -> list[int]:
    """One seed a picture, from the base seed and its position: before and after use the same."""
    return [derive_seed("picture", base, i) % 2**31 for i in range(len(prompts))]


def generate(model: Model, prompts: Sequence[str], seeds: Sequence[int], sampling: Sampling, *, cache: Path | None = None, what: str = "generating", progress: Progress = silent) -> Tensor:  # fmt: skip
    """[n, h, w, 3] uint8 pictures of the prompts, from the cache where they are known.

    cache: folder of the cache; None for `resources.cache()`.
    """
    content = {"weights": model_fingerprint(model), "prompts": list(prompts), "seeds": list(seeds), "sampling": asdict(sampling)}  # fmt: skip
    folder = (resources.cache() if cache is None else cache) / "pictures" / fingerprint(content)
    chunks = []
    progress(what, 0, len(prompts))
    for start in range(0, len(prompts), sampling.batch_size):
        part = slice(start, start + sampling.batch_size)
        path = folder / f"{start:06d}.safetensors"
        pictures = _read(path)
        if pictures is None:
            pictures = model.sample(prompts[part], seeds=seeds[part], steps=sampling.steps, guidance=sampling.guidance, autocast=sampling.autocast)  # fmt: skip
            _write(path, pictures)
        chunks.append(pictures)
        progress(what, min(len(prompts), start + sampling.batch_size), len(prompts))
    return torch.cat(chunks)


def _read(path: Path) -> Tensor | None:
    if not path.exists():
        return None
    try:
        return load_file(path)["pictures"]
    except (SafetensorError, OSError, KeyError):  # a damaged chunk is made again
        return None


def _write(path: Path, pictures: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        save_file({"pictures": pictures.contiguous()}, partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
