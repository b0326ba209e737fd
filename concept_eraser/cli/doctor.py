"""concept-eraser doctor"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from concept_eraser.utils.errors import UserError

GB = 2**30
# packages of each extra, as modules; pyproject.toml has the extras
EXTRAS = {
    "curvature": ("curvlinops",),
    "labelled": ("sklearn",),
    "memory": ("bitsandbytes",),
    "statistics": ("statsmodels",),
    "torchjd": ("torchjd",),
    "trackers": ("tensorboard", "wandb"),
}
PURPOSES = {
    "curvature": "the method natural_gradient",
    "labelled": "membership attacks, the data set digits",
    "memory": "training.optimizer=adamw8bit",
    "statistics": "the agreement of two judges, corrected tables of comparisons",
    "torchjd": "the method torchjd",
    "trackers": "training.tracker",
}
PACKAGES = ("torch", "torchvision", "diffusers", "transformers", "accelerate", "peft", "gradio")
DEFAULT = "LoRA, rank 64, all layers"  # what `erase CONCEPT` trains, in the memory estimates
# feature, file of its weights, purpose
WEIGHTS = (
    ("clip", "ViT-B-32.pt (CLIP, openai)", "the judge clip and clip_score with a model"),
    ("inception", "inception-2015-12-05.pt", "FID as it is published"),
)
NEEDED_DISK = 5  # GB: a Stable Diffusion checkpoint with its run


def doctor(
    folder: Annotated[
        Path, typer.Option("--output", "-o", help="where runs will be written")
    ] = Path("runs"),
) -> None:
    """Check this machine: versions, device, memory, disk, extras and weights.

    Print what can be trained here, what is missing, and how to get it. Nothing is downloaded.

    [bold]Example[/bold]

      concept-eraser doctor
    """
    lines = [*_versions(), *_device(), *_disk(folder), *_trainable(), *_extras(), *_weights()]
    for line in lines:
        typer.echo(line)


def _versions() -> list[str]:
    import platform

    from concept_eraser.utils import provenance

    packages = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    return [
        f"concept-eraser {provenance.version()}, Python {platform.python_version()}",
        f"packages: {packages}",
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _device() -> list[str]:
    import torch

    from concept_eraser.models.base import emulates_bf16

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return [f"device:   {name}, {free / GB:.1f} of {total / GB:.1f} GB free"]
    if torch.backends.mps.is_available():
        return ["device:   Apple GPU (mps)"]
    bf16 = "emulates bf16" if emulates_bf16(torch.device("cpu")) else "has bf16"
    threads = torch.get_num_threads()
    return [f"device:   CPU ({os.cpu_count()} cores, {threads} threads, {bf16}); no GPU"]


def _disk(folder: Path) -> list[str]:
    from concept_eraser.utils import resources

    lines = []
    if (memory := _free_memory()) is not None:
        lines.append(f"memory:   {memory:.1f} GB free")
    for name, place in (("runs", folder), ("cache", resources.cache())):
        free = shutil.disk_usage(_existing(place)).free / GB
        note = f"; less than the {NEEDED_DISK} GB of a large run" if free < NEEDED_DISK else ""
        lines.append(f"disk:     {free:.1f} GB free for {name} ({place}){note}")
    return lines


def _free_memory() -> float | None:
    """Free memory in GB; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
    return int(sizes["MemAvailable"]) * 1024 / GB if "MemAvailable" in sizes else None


def _existing(place: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    place = place.absolute()
    while not place.is_dir():
        place = place.parent
    return place


def _trainable() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return [
            "training: the bundled model, classifiers and VAEs in minutes on this CPU",
            "          a Stable Diffusion checkpoint needs a GPU; with --memory 8gb, one of 8 GB",
        ]
    card = torch.cuda.mem_get_info()[1] / GB
    lines = ["training: the default LoRA, by estimates"]
    for model, need in _estimates(card).items():
        preset, size = need
        fits = "fits" if size <= card else "does not fit"
        lines.append(f"          {model}: {size:.1f} GB with --memory {preset}, {fits}")
    return lines


def _estimates(card: float) -> dict[str, tuple[str, float]]:
    """Of each model the preset for a card of this size in GB, and the estimated need in GB."""
    from concept_eraser.storage.readers import read_json
    from concept_eraser.utils import resources

    rows: list[dict[str, Any]] = read_json(resources.folder("benchmarks") / "estimates.json")[
        "rows"
    ]
    needs: dict[str, tuple[str, float]] = {}
    for row in sorted(rows, key=lambda row: int(row["memory"].removesuffix("gb"))):
        if row["trained"] != DEFAULT:
            continue
        size = max(row["training_gb"], row["examples_gb"])
        is_for_card = int(row["memory"].removesuffix("gb")) <= card + 1
        if row["model"] not in needs or is_for_card:
            needs[row["model"]] = (row["memory"], size)
    return needs


def _extras() -> list[str]:
    lines = []
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            lines.append(
                f"extra:    {extra} is missing, for {PURPOSES[extra]}: "
                f'pip install "concept-eraser[{extra}]"'
            )
    return lines or ["extras:   all are installed"]


def _weights() -> list[str]:
    """Which weights of judges and features are on this machine."""
    from concept_eraser import registry
    from concept_eraser.evaluation.features.base import places

    lines = []
    for feature, file, purpose in WEIGHTS:
        try:
            registry.build("feature", feature, {}).fingerprint  # noqa: B018 - reads the file
        except UserError:
            lines.append(
                f"weights:  {file} is missing, for {purpose}: put it into {places()[0]}; "
                "nothing is downloaded"
            )
        else:
            lines.append(f"weights:  {file} is at hand, for {purpose}")
    return lines
