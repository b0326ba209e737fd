"""Data sets that torchvision reads: images as tensors in [-1, 1].

If files are missing, the error is one clear line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from concept_eraser.data.labelled import Labelled, from_dataset
from concept_eraser.data.stand_in import NotHere


def to_tensor(size: int | None) -> Any:
    """Return a function from an image to [3, h, w] in [-1, 1].

    If `size` is given, the image is resized and centre-cropped to a square.
    """
    from torchvision import transforms

    resizing = [] if size is None else [transforms.Resize(size), transforms.CenterCrop(size)]
    return transforms.Compose(
        [
            transforms.Lambda(lambda image: image.convert("RGB")),
            *resizing,
            transforms.ToTensor(),
            transforms.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )


def from_torchvision(make: Callable[[], Any], name: str, root: str) -> Labelled:
    """Return a torchvision set as labelled data.

    Raises NotHere if its files are not under `root`.
    """
    try:
        dataset = make()
    except (RuntimeError, FileNotFoundError, OSError) as error:
        raise NotHere(
            f"{name} is not at {Path(root).resolve()} "
            f"({str(error).splitlines()[0][:120]}); give options: {{root: <its "
            "folder>}, or download: true where there is a network"
        ) from error
    return from_dataset(dataset, name)
