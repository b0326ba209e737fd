"""Examples with labels: what classifiers, VAEs and CLIP models are trained on and asked to forget.

A set is read through one function, so that a folder of images or a torch Dataset need not fit into memory twice.
Which of its examples a side means is said by class, by a random share, or by a list of indices (a deletion request).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concept_eraser.errors import UserError, unknown


@dataclass(frozen=True)
class Labelled:
    """labels: [n] integers into `names`; fetch: positions -> inputs [k, ...] in fp32."""

    labels: Tensor
    names: tuple[str, ...]
    fetch: Callable[[Sequence[int]], Tensor]
    about: str = "the data"

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, rows: Sequence[int]) -> Tensor:
        """The inputs at some positions. Raises UserError, with the position's neighbourhood, where reading fails."""
        try:
            return self.fetch(rows)
        except UserError:
            raise
        except Exception as error:
            shown = ", ".join(str(int(i)) for i in list(rows)[:5]) + (", ..." if len(rows) > 5 else "")
            raise UserError(f"{self.about}: reading examples {shown} failed: {type(error).__name__}: {error}") from error  # fmt: skip

    def class_index(self, name: str | int) -> int:
        """The number of a class given by name or number. Raises UserError where there is no such class."""
        if isinstance(name, int) or (str(name).isdigit() and str(name) not in self.names):
            number = int(name)
            if 0 <= number < len(self.names):
                return number
            raise UserError(f"{self.about} has classes 0 to {len(self.names) - 1}, found {number}")
        if name not in self.names:
            raise unknown(f"class of {self.about}", str(name), self.names)
        return self.names.index(name)


def from_arrays(x: Any, y: Any, names: Sequence[str] | None = None, about: str = "the arrays") -> Labelled:
    """Arrays or tensors: x [n, ...], y [n] integers from 0."""
    inputs, labels = torch.as_tensor(np.asarray(x)).float(), torch.as_tensor(np.asarray(y)).long()
    if labels.ndim != 1 or len(labels) != len(inputs):
        raise UserError(f"{about}: expected labels of shape [{len(inputs)}], one an example, found {list(labels.shape)}")  # fmt: skip
    if len(labels) == 0 or int(labels.min()) < 0:
        raise UserError(f"{about}: labels must be integers from 0, and there must be some; found {labels.tolist()[:5]}")
    known = tuple(names) if names is not None else tuple(str(i) for i in range(int(labels.max()) + 1))
    return Labelled(labels, known, lambda rows: inputs[torch.as_tensor(rows)], about)


def from_dataset(dataset: Any, about: str = "the dataset") -> Labelled:
    """A map-style torch Dataset of (input, label). Its labels come from `targets` or `labels` if it has them."""
    known = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if known is None:
        known = []
        for i in range(len(dataset)):
            try:
                known.append(int(dataset[i][1]))
            except Exception as error:
                raise UserError(f"{about}: reading example {i} failed: {type(error).__name__}: {error}") from error
    labels = torch.as_tensor(np.asarray(known)).long()
    names = tuple(map(str, getattr(dataset, "classes", range(int(labels.max()) + 1 if len(labels) else 0))))

    def fetch(rows: Sequence[int]) -> Tensor:
        return torch.stack([torch.as_tensor(np.asarray(dataset[int(i)][0])).float() for i in rows])

    return Labelled(labels, names, fetch, about)


def from_folder(folder: Path, size: int = 64) -> Labelled:
    """One subfolder a class, as torchvision's ImageFolder: images resized and centre-cropped, in [-1, 1]."""
    from concept_eraser.data.images import SUFFIXES, read

    names = sorted(p.name for p in folder.iterdir() if p.is_dir())
    paths = [(p, k) for k, name in enumerate(names) for p in sorted((folder / name).iterdir()) if p.suffix.lower() in SUFFIXES]  # fmt: skip
    if not paths:
        raise UserError(f"{folder} holds no images in subfolders, one subfolder a class ({', '.join(SUFFIXES)})")

    def fetch(rows: Sequence[int]) -> Tensor:
        pictures = np.stack([read(paths[int(i)][0], (size, size)) for i in rows])
        return torch.from_numpy(pictures).permute(0, 3, 1, 2).float().div(127.5).sub(1)

    return Labelled(torch.tensor([k for _, k in paths]), tuple(names), fetch, str(folder))


def open_data(source: Any, split: str = "train") -> Labelled:
    """A set in memory (Labelled, torch Dataset, or a pair of arrays) or on disk (.npz with x and y, folder of images)."""
    if isinstance(source, Labelled):
        return source
    if isinstance(source, tuple | list) and len(source) == 2 and hasattr(source[0], "shape"):
        return from_arrays(*source)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, str):
        return from_dataset(source, f"the {type(source).__name__}")
    path = Path(str(source))
    if path.suffix == ".npz" and path.is_file():
        with np.load(path) as content:  # no pickles: np.load refuses them by default
            if not {"x", "y"} <= set(content.files):
                raise UserError(f"{path}: expected arrays named x and y, found {', '.join(content.files) or 'none'}")
            return from_arrays(content["x"], content["y"], about=str(path))
    if path.is_dir():
        return from_folder(path / split if (path / split).is_dir() else path)
    raise UserError(f"no such data: {source!r}; give a named set, a folder with one subfolder a class, or an .npz with x and y")  # fmt: skip


def choose(data: Labelled, *, classes: Sequence[str | int] | None = None, share: float | None = None, indices: Sequence[int] | None = None, seed: int = 0) -> Tensor:  # fmt: skip
    """The positions that a request means, sorted: all of some classes, a seeded random share, or a list; else all.

    Raises UserError for a class that does not occur, an index beyond the end, or nothing at all.
    """
    rows = torch.arange(len(data))
    if classes is not None:
        wanted = [data.class_index(name) for name in classes]
        for name, number in zip(classes, wanted, strict=True):
            if not bool((data.labels == number).any()):
                raise UserError(f"no example of {data.about} has the class {name!r}, so there is nothing to forget of it")  # fmt: skip
        rows = rows[torch.isin(data.labels, torch.tensor(wanted))]
    if indices is not None:
        listed = torch.tensor(sorted(set(map(int, indices))), dtype=torch.long)
        beyond = [i for i in listed.tolist() if not 0 <= i < len(data)]
        if beyond:
            raise UserError(f"{data.about} has examples 0 to {len(data) - 1}; not among them: {', '.join(map(str, beyond[:5]))}")  # fmt: skip
        rows = rows[torch.isin(rows, listed)]
    if share is not None:
        generator = torch.Generator().manual_seed(seed)
        kept = torch.randperm(len(rows), generator=generator)[: max(1, round(share * len(rows)))]
        rows = rows[kept.sort().values]
    if len(rows) == 0:
        raise UserError(f"the request names no example of {data.about}")
    return rows


def rest_of(data: Labelled, forgotten: Tensor) -> Tensor:
    """The positions that are not forgotten. Raises UserError where nothing is left."""
    rows = torch.arange(len(data))
    left = rows[~torch.isin(rows, forgotten)]
    if len(left) == 0:
        raise UserError(f"everything in {data.about} is to be forgotten, so nothing is left to retain")
    return left


def require_apart(forget: Tensor, retain: Tensor, about: str) -> None:
    """Raise UserError where an example is on both sides."""
    both = forget[torch.isin(forget, retain)]
    if len(both):
        raise UserError(f"{len(both)} examples of {about} are both to be forgotten and to be retained, e.g. {int(both[0])}; give `data: rest` to retain what is left")  # fmt: skip
