"""What the judges share whose networks come from files: lookup, safe reading, batches.

Nothing is downloaded. A file or folder is looked for under its path first, then by its name in
$CONCEPT_ERASER_WEIGHTS and in the folder `weights` of the cache.

Weights are safetensors. A pickle is read as plain tensors (torch.load with weights_only), and only
in two cases: with `allow_pickle`, or if its SHA-256 begins with the digits in its name, which is
torchvision's convention for published files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation.base import Judge
from concept_eraser.evaluation.features.base import device, file_hash, places
from concept_eraser.models.folder_check import check_part
from concept_eraser.storage.readers import read_tensors, require_regular
from concept_eraser.utils.errors import UserError, first_line

BATCH = 32  # images per forward pass
CONFIG = "config.json"
_PUBLISHED = re.compile(r".+-([0-9a-f]{8})\.pth")


class NetworkJudge(Judge):
    """A judge that reads no captions and has no real images of the prompts."""

    reads_captions = False

    def clip_scores(self, images: Tensor, captions: Sequence[str]) -> np.ndarray:
        raise UserError(
            f"the judge {_name(self)} reads no captions; leave clip_score out of the suite's "
            "metrics, or give it a `model`"
        )

    def reference_features(self, rows: Sequence[Prompt], seed: int) -> np.ndarray:
        raise UserError(
            f"the judge {_name(self)} has no real images of the prompts; give fid "
            "`reference: before` or the path of a folder of real images"
        )


def _name(judge: Judge) -> str:
    return type(judge).__module__.rpartition(".")[2]


def locate(name: str, need: str, source: str) -> Path:
    """Return the path of a file or folder.

    Args:
        name: Its path, or its name in one of `places`.
        need: What it is, as the subject of the error.
        source: Where it can be had, as the end of a sentence.

    Raises:
        UserError: It is in none of these places.
    """
    candidates = [Path(name).expanduser(), *(place / name for place in places())]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise UserError(
        f"{need} is missing: {name} is neither a path nor a name in {places()[0]}, and nothing is "
        f"downloaded. Get {source}, and put it into that folder, give its path, or name its folder "
        "by $CONCEPT_ERASER_WEIGHTS"
    )


def read_state(path: Path, *, allow_pickle: bool = False) -> dict[str, Tensor]:
    """Read the tensors of a file of weights by name, on the CPU.

    Raises:
        UserError: It is a pickle that is not allowed, is damaged, or holds more than tensors.
    """
    require_regular(path)
    if path.suffix == ".safetensors":
        return read_tensors(path)
    if not (allow_pickle or is_published(path)):
        raise UserError(
            f"{path} is a pickle, which can execute code when loaded, and not the published file "
            "of its name; convert it to safetensors, copy the published file again, or give the "
            "judge `allow_pickle: true` if you trust its author"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many types
        # torch's own message describes ways around the refusal
        raise UserError(
            f"{path} cannot be read as plain tensors ({type(error).__name__}): it is damaged, or "
            "holds more than tensors; copy it again, or ask its author for a .safetensors file"
        ) from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{path} is no state dict: expected tensors by name")
    return dict(content)


def is_published(path: Path) -> bool:
    """Whether the SHA-256 of a file begins with the eight digits at the end of its name."""
    match = _PUBLISHED.fullmatch(path.name)
    return match is not None and file_hash(path).startswith(match[1])


def put_weights(network: nn.Module, state: dict[str, Tensor], path: Path) -> nn.Module:
    """Load a state dict into a network and make it ready for inference.

    Raises:
        UserError: The tensors do not fit the network.
    """
    try:
        mismatch = network.load_state_dict(state, strict=False)
    except RuntimeError as error:  # sizes
        lines = str(error).splitlines()
        raise UserError(
            f"{path}: the weights do not fit the network {type(network).__name__} "
            f"({lines[-1].strip()[:150]}); give the network's name that belongs to them"
        ) from None
    if wrong := [*mismatch.missing_keys, *mismatch.unexpected_keys]:
        raise UserError(
            f"{path}: the weights do not fit the network {type(network).__name__}, e.g. "
            f"{wrong[0][:100]}; give the network's name that belongs to them"
        )
    return network.to(device()).eval().requires_grad_(False)


def read_transformers(folder: Path, auto_class: Any, *, allow_pickle: bool = False) -> nn.Module:
    """Load a network from a folder that transformers wrote.

    Args:
        folder: The folder, with config.json and the weights.
        auto_class: The class of transformers that loads it, e.g. AutoModelForImageClassification.
        allow_pickle: Read a pickle where there are no safetensors.

    Raises:
        UserError: The folder is incomplete or damaged, is refused, or has weights that do not fit.
    """
    require_model_folder(folder, allow_pickle=allow_pickle)
    try:
        network, report = auto_class.from_pretrained(
            str(folder),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=None if allow_pickle else True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises errors of many types
        raise UserError(
            f"{folder} cannot be read as a model of transformers ({first_line(error)}); copy it "
            "again"
        ) from None
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"{folder}: its weights lack {missing[0]}, so a part of the network would be random; "
            "copy it again, or give another folder"
        )
    module: nn.Module = network
    return module.float().to(device()).eval().requires_grad_(False)


def require_model_folder(folder: Path, *, allow_pickle: bool) -> None:
    """Raise UserError for a folder without config.json, with code, or with a pickle only."""
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder} is no model of transformers: it has no {CONFIG}; give the folder that "
            "save_pretrained wrote"
        )
    check_part(folder)
    if not (allow_pickle or list(folder.glob("*.safetensors"))):
        raise UserError(
            f"{folder} has no weights in safetensors (*.safetensors); convert them, or give the "
            "judge `allow_pickle: true` if you trust their author"
        )


def weights_hash(folder: Path) -> str:
    """Return the hash of the weights in a folder of transformers."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return "-".join(file_hash(path) for path in files[:1]) if len(files) == 1 else _joint(files)


def _joint(files: Sequence[Path]) -> str:
    from concept_eraser.utils.provenance import fingerprint

    return fingerprint([file_hash(path) for path in files])


def batches(images: Tensor) -> Iterator[Tensor]:
    """Yield parts of images [n, h, w, 3] uint8 as [b, 3, h, w] float32 in [0, 1]."""
    for part in images.split(BATCH):
        yield part.permute(0, 3, 1, 2).float().div(255).to(device())


@torch.no_grad()
def over_batches(images: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of images [b, 3, h, w] in [0, 1] to images [n, h, w, 3] uint8.

    The results [n, ...] are on the CPU.
    """
    return torch.cat([compute(part).float().cpu() for part in batches(images)])


def resize_and_crop(
    images: Tensor,
    *,
    resize: int | tuple[int, int],
    crop: int | None,
    mean: Sequence[float],
    std: Sequence[float],
    filter: Literal["bilinear", "bicubic"] = "bilinear",
) -> Tensor:
    """Resize, crop and normalise images [b, 3, h, w] in [0, 1], differentiably.

    Args:
        images: The images.
        resize: The shorter side in pixels, or (height, width).
        crop: The side of the central square in pixels; None for the whole image.
        mean: The mean of each channel.
        std: The standard deviation of each channel.
        filter: The interpolation, with antialiasing.
    """
    from torchvision.transforms.v2 import InterpolationMode, functional

    size = [resize] if isinstance(resize, int) else list(resize)
    images = functional.resize(images, size, InterpolationMode(filter), antialias=True)
    if filter == "bicubic":
        images = images.clamp(0, 1)  # the filter overshoots, and bytes cannot
    if crop is not None:
        images = functional.center_crop(images, [crop, crop])
    normalised: Tensor = functional.normalize(images, list(mean), list(std))
    return normalised
