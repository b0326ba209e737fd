"""Images made by the model itself, in a cache keyed by everything that determines them.

The key has the weights, the prompts, the seeds and the sampler's settings. So a second run starts
at once, and two runs with the same "before" images share them. The cache never returns images of
other weights. Images are stored in chunks as they are made, and an interrupted generation continues
where it stopped.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from concept_eraser.data.prompts import Prompt
from concept_eraser.models.base import Model, emulates_bf16
from concept_eraser.storage import cache as chunks
from concept_eraser.storage.cache import CacheFull
from concept_eraser.utils import distributed, resources
from concept_eraser.utils.progress import Progress, silent
from concept_eraser.utils.provenance import derive_seed, fingerprint

_LOG = logging.getLogger(__name__)
_TOLD: list[str] = []  # warnings of a full cache, each once per process


@dataclass(frozen=True)
class Sampling:
    """How images are sampled.

    Attributes:
        steps: Denoising steps.
        guidance: Classifier-free guidance.
        batch_size: Images at once.
        precision: Precision of the autocast, fp32 or bf16.
    """

    steps: int = 25
    guidance: float = 5.0
    batch_size: int = 32
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1:
            raise ValueError(
                f"steps and batch_size must be at least 1, found {self.steps} and {self.batch_size}"
            )
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be fp32 or bf16, found {self.precision!r}")

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision == "bf16" else None


def model_fingerprint(model: Model) -> str:
    """Return a hash of every weight of the pipeline, in name order.

    Float values are hashed as they are in memory.
    """
    digest = hashlib.sha256()
    for part in sorted(model.parts):
        for name, value in sorted(model.parts[part].state_dict().items()):
            digest.update(f"{part}.{name}{tuple(value.shape)}{value.dtype}".encode())
            digest.update(
                value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            )
    return digest.hexdigest()[:24]


def seeds_for(prompts: Sequence[str | Prompt], base: int) -> list[int]:
    """Return one seed for each image.

    It is the prompt's own if it has one (I2P), else it is derived from the base seed and the
    image's position. Images before and after use the same seeds.
    """
    own = own_seeds(prompts)
    return [
        derive_seed("picture", base, i) % 2**31 if seed is None else seed
        for i, seed in enumerate(own)
    ]


def own_seeds(prompts: Sequence[str | Prompt]) -> list[int | None]:
    """Return the seed that each prompt states.

    If a text occurs again with a seed that it had, the seed is increased until it is another one.
    So no image is made twice. The seeds of the first prompts do not depend on later ones.
    """
    counts: Counter[tuple[str, int]] = Counter()
    used: set[tuple[str, int]] = set()
    seeds: list[int | None] = []
    for prompt in prompts:
        if isinstance(prompt, str) or prompt.seed is None:
            seeds.append(None)
            continue
        key = (prompt.text, prompt.seed)
        while (prompt.text, prompt.seed + counts[key]) in used:
            counts[key] += 1
        seed = prompt.seed + counts[key]
        used.add((prompt.text, seed))
        seeds.append(seed)
    return seeds


@dataclass(frozen=True)
class ImageRequest:
    """Images requested of a model, and their folder of the cache.

    The folder holds them in chunks of `sampling.batch_size`.
    """

    folder: Path
    texts: Sequence[str]
    seeds: Sequence[int]
    scales: Sequence[float]  # the guidance of each image
    sampling: Sampling

    @property
    def starts(self) -> range:
        """The positions of the first image of each chunk."""
        return range(0, len(self.texts), self.sampling.batch_size)

    def path(self, start: int) -> Path:
        """Return the path of a chunk's images."""
        return self.folder / f"{start:06d}.safetensors"

    def calls(self, start: int) -> list[tuple[float, list[int]]]:
        """Return the calls of the sampler for a chunk: guidance, and positions of the images."""
        chunk = range(start, min(start + self.sampling.batch_size, len(self.texts)))
        scales = dict.fromkeys(self.scales[i] for i in chunk)
        return [(scale, [i for i in chunk if self.scales[i] == scale]) for scale in scales]


def request_images(
    model: Model,
    prompts: Sequence[str | Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    *,
    cache: Path | None = None,
    weights: str | None = None,
) -> ImageRequest:
    """Request images of a model. Nothing is sampled yet.

    A prompt that states its own guidance is sampled with that.

    Args:
        model: The model.
        prompts: The n prompts.
        seeds: The seed of each image.
        sampling: The settings of the sampler.
        cache: The folder of the cache; None for `resources.cache()`.
        weights: `model_fingerprint(model)`, if the caller has it. It reads every weight.
    """
    texts = [prompt.text if isinstance(prompt, Prompt) else prompt for prompt in prompts]
    scales = [
        sampling.guidance if isinstance(p, str) or p.guidance is None else p.guidance
        for p in prompts
    ]
    content = {
        "weights": weights or model_fingerprint(model),
        "prompts": texts,
        "seeds": list(seeds),
        "sampling": asdict(sampling),
        "drawing": model.drawing(),
    }
    if any(scale != sampling.guidance for scale in scales):
        content["guidance"] = scales
    if sampling.precision == "bf16" and emulates_bf16(model.device):
        content["computed in"] = "fp32"
    folder = (resources.cache() if cache is None else cache) / "images" / fingerprint(content)
    return ImageRequest(folder, texts, seeds=list(seeds), scales=scales, sampling=sampling)


def generate(
    model: Model,
    prompts: Sequence[str | Prompt],
    seeds: Sequence[int],
    sampling: Sampling,
    *,
    cache: Path | None = None,
    weights: str | None = None,
    what: str = "generating",
    progress: Progress = silent,
) -> Tensor:
    """Return images [n, h, w, 3] uint8 of the prompts, from the cache if they are there.

    See `request_images` and `load_or_generate`.
    """
    return load_or_generate(
        model,
        request_images(model, prompts, seeds, sampling, cache=cache, weights=weights),
        what=what,
        progress=progress,
    )


def load_or_generate(
    model: Model, request: ImageRequest, *, what: str = "generating", progress: Progress = silent
) -> Tensor:
    """Return the requested images [n, h, w, 3] uint8, from the cache if they are there.

    Under `accelerate launch` each process makes its share of the chunks, none twice, and reads
    those of the others. All processes must see the folder of the cache.
    """
    progress(what, 0, len(request.texts))
    images_by_start: dict[int, Tensor] = {}

    def chunk(start: int) -> Tensor:
        if start not in images_by_start:
            path = request.path(start)
            images = read(path)
            if images is None:
                images = sample_chunk(model, request, start)
                keep(partial(write, path, images))
            images_by_start[start] = images
            progress(what, sum(map(len, images_by_start.values())), len(request.texts))
        return images_by_start[start]

    for start in distributed.mine(request.starts):
        chunk(start)
    distributed.wait()
    return torch.cat([chunk(start) for start in request.starts])


def sample_chunk(model: Model, request: ImageRequest, start: int) -> Tensor:
    """Sample one chunk of images [b, h, w, 3] uint8, without the cache.

    Images of one guidance are sampled together.
    """
    images: dict[int, Tensor] = {}
    for scale, rows in request.calls(start):
        new_images = model.sample(
            [request.texts[i] for i in rows],
            seeds=[request.seeds[i] for i in rows],
            steps=request.sampling.steps,
            guidance=scale,
            autocast=request.sampling.autocast,
        )
        images |= dict(zip(rows, new_images, strict=True))
    return torch.stack([images[i] for i in sorted(images)])


def keep(write_it: Callable[[], None]) -> None:
    """Write to the cache.

    If it is full, a single process continues, and the next run makes the images again.

    Raises CacheFull under `accelerate launch`, since the other processes need the files.
    """
    try:
        write_it()
    except CacheFull as error:
        if not distributed.alone():
            raise
        if not _TOLD:
            _LOG.warning("results are not stored for the next run: %s", error)
            _TOLD.append(str(error))


def read(path: Path, name: str = "images") -> Tensor | None:
    """Read a chunk of the cache.

    Returns None if it is missing or damaged; then it is made again.
    """
    return (chunks.read_chunk(path) or {}).get(name)


def write(path: Path, images: Tensor, name: str = "images") -> None:
    """Write a chunk into the cache, whole or not at all. Raises CacheFull if that fails."""
    chunks.write_chunk(path, {name: images})
