"""Examples with labels, for classifiers, VAEs and CLIP models.

One function reads the inputs, so that a folder of images or a torch Dataset need not fit into
memory twice. An objective selects its examples by class, by a random share, or by a list of indices
(a deletion request).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from torch import Tensor

from concept_eraser.storage.readers import require_regular, size_text
from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError, first_line, names_text, quote, unknown

ARRAY_BYTES = 16 * 2**30  # bytes of one array in an .npz
RATIO = 200  # an array's size divided by its size in the file; a zip bomb has 1,000


@dataclass(frozen=True)
class Labelled:
    """Labelled examples.

    Attributes:
        labels: [n] integers, positions in `names`.
        names: The names of the classes.
        fetch: Returns inputs [k, ...] in fp32 for positions.
        about: A description, for errors.
    """

    labels: Tensor
    names: tuple[str, ...]
    fetch: Callable[[Sequence[int]], Tensor]
    about: str = "the data"

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, rows: Sequence[int]) -> Tensor:
        """Return the inputs at some positions.

        Raises UserError with these positions if reading fails.
        """
        try:
            return self.fetch(rows)
        except UserError:
            raise
        except Exception as error:
            examples = ", ".join(str(int(i)) for i in list(rows)[:5]) + (
                ", ..." if len(rows) > 5 else ""
            )
            raise UserError(
                f"{self.about}: reading examples {examples} failed: {first_line(error)}"
            ) from error

    def class_index(self, name: str | int) -> int:
        """Return the number of a class, given by name or by number.

        A name takes precedence. Raises UserError for an unknown class.
        """
        if str(name) in self.names:
            return self.names.index(str(name))
        if str(name).isdecimal() and str(name).isascii():
            number = int(str(name)[:20])
            if 0 <= number < len(self.names):
                return number
            raise UserError(f"{self.about} has classes 0 to {len(self.names) - 1}, found {number}")
        raise unknown(f"class of {self.about}", str(name), self.names)

    def with_classes(self, names: tuple[str, ...]) -> Labelled:
        """Return the same examples with labels that are positions in `names`.

        Raises UserError if a class has no place there.
        """
        if self.names == names:
            return self
        present = [self.names[int(i)] for i in self.labels.unique()]
        unmatched_names = [name for name in present if name not in names]
        if unmatched_names:
            raise UserError(
                f"{self.about} has a class {quote(unmatched_names[0])} that the other data do "
                f"not have: {names_text(names, 8)}"
            )
        place = torch.tensor([names.index(name) if name in names else -1 for name in self.names])
        return Labelled(place[self.labels], names, self.fetch, self.about)


def from_arrays(
    x: Any, y: Any, names: Sequence[str] | None = None, about: str = "the arrays"
) -> Labelled:
    """Make labelled data of arrays or tensors: x [n, ...], y [n] integers from 0."""
    try:
        inputs = _tensor(x).float()
    except (TypeError, ValueError) as error:
        raise UserError(f"{about}: the inputs are no numbers ({str(error)[:100]})") from error
    labels = check_labels(y, len(inputs), names, about)
    class_names = (
        tuple(map(str, names))
        if names is not None
        else tuple(str(i) for i in range(int(labels.max()) + 1))
    )
    return Labelled(labels, class_names, lambda rows: inputs[torch.as_tensor(rows)], about)


def _tensor(values: Any) -> Tensor:
    return (
        values.detach().cpu() if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    )


def check_labels(labels: Any, n: int, names: Sequence[Any] | None, about: str) -> Tensor:
    """Return labels as integers [n] from 0 into the names. Raises UserError for other labels."""
    try:
        values = _tensor(labels)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{about}: labels must be integers from 0 ({str(error)[:100]}); give the "
            "names of the classes apart"
        ) from error
    if values.ndim != 1 or len(values) != n:
        raise UserError(
            f"{about}: expected labels of shape [{n}], one for each example, found "
            f"{list(values.shape)}"
        )
    integers = values.long()
    if n == 0 or bool((integers.double() != values.double()).any()) or int(integers.min()) < 0:
        raise UserError(
            f"{about}: labels must be integers from 0, and there must be some; found "
            f"{values[:5].tolist()}"
        )
    if int(integers.max()) >= limits.CLASSES:
        raise UserError(
            f"{about}: a label is {int(integers.max()):,}; at most {limits.CLASSES:,} "
            "classes are numbered from 0. Number the classes that occur"
        )
    if names is not None and int(integers.max()) >= len(names):
        raise UserError(
            f"{about}: a label is {int(integers.max())}, but there are {len(names)} "
            "classes, numbered from 0"
        )
    return integers


def from_dataset(dataset: Any, about: str = "the dataset") -> Labelled:
    """Make labelled data of a map-style torch Dataset of (input, label).

    The labels come from its `targets` or `labels` if it has them.
    """
    targets = getattr(dataset, "targets", getattr(dataset, "labels", None))
    if targets is None:
        targets = []
        for i in range(len(dataset)):
            try:
                targets.append(int(dataset[i][1]))
            except Exception as error:
                raise UserError(
                    f"{about}: reading example {i} failed: {type(error).__name__}: {error}"
                ) from error
    class_names = getattr(dataset, "classes", None)
    labels = check_labels(targets, len(dataset), class_names, about)
    names = tuple(
        map(str, class_names if class_names is not None else range(int(labels.max()) + 1))
    )

    def fetch(rows: Sequence[int]) -> Tensor:
        return torch.stack([_tensor(dataset[int(i)][0]).float() for i in rows])

    return Labelled(labels, names, fetch, about)


def from_folder(folder: Path, size: int = 64) -> Labelled:
    """Read a folder with one subfolder for each class, like torchvision's ImageFolder.

    Images are resized and centre-cropped, in [-1, 1].
    """
    from concept_eraser.data.images import SUFFIXES, read

    names = sorted(p.name for p in folder.iterdir() if p.is_dir())
    paths = [
        (p, k)
        for k, name in enumerate(names)
        for p in sorted((folder / name).iterdir())
        if p.suffix.lower() in SUFFIXES
    ]
    if not paths:
        raise UserError(
            f"{folder} holds no images in subfolders, one subfolder for each class "
            f"({', '.join(SUFFIXES)})"
        )

    def fetch(rows: Sequence[int]) -> Tensor:
        images = np.stack([read(paths[int(i)][0], (size, size)) for i in rows])
        return torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1)

    return Labelled(torch.tensor([k for _, k in paths]), tuple(names), fetch, str(folder))


def open_data(source: Any, split: str = "train", size: int = 64) -> Labelled:
    """Open a set in memory (Labelled, torch Dataset, or a pair of arrays) or on disk.

    On disk it is an .npz with x and y, or a folder of images, resized to `size` pixels.
    """
    if isinstance(source, Labelled):
        return source
    if isinstance(source, tuple | list) and len(source) == 2 and hasattr(source[0], "shape"):
        return from_arrays(*source)
    if (
        hasattr(source, "__getitem__")
        and hasattr(source, "__len__")
        and not isinstance(source, str)
    ):
        return from_dataset(source, f"the {type(source).__name__}")
    path = Path(str(source))
    if path.suffix == ".npz" and os.path.isfile(path):
        return _of_npz(path)
    if os.path.isdir(path):
        return from_folder(path / split if os.path.isdir(path / split) else path, size)
    raise UserError(
        f"no such data: {quote(source)}; give a named set, a folder with one subfolder a "
        "class, or an .npz with x and y"
    )


def _of_npz(path: Path) -> Labelled:
    """Read the arrays x and y of an .npz. Raises UserError if they are invalid or damaged.

    Their stated size is checked before any data are read: an archive of some kilobytes may state
    terabytes.
    """
    require_regular(path)
    try:
        with ZipFile(path) as archive:
            names = archive.namelist()
            if not {"x.npy", "y.npy"} <= set(names):
                raise UserError(
                    f"{path}: expected arrays named x and y, found {names_text(names) or 'none'}"
                )
            x, y = (_array(archive, f"{name}.npy", path) for name in ("x", "y"))
    except UserError:
        raise
    except (Exception, MemoryError) as error:
        # zipfile, zlib and numpy raise about twenty types of errors for damaged files
        raise UserError(
            f"{path} is damaged or holds no plain arrays ({first_line(error)}); write it "
            "again by numpy.savez"
        ) from error
    if x.ndim < 2:
        raise UserError(f"{path}: expected x of shape [examples, ...], found {list(x.shape)}")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise UserError(
            f"{path}: x holds numbers that are infinite or none (nan); replace them or "
            "leave these examples out"
        )
    return from_arrays(x, y, about=str(path))


def _array(archive: ZipFile, name: str, path: Path) -> np.ndarray:
    """Read an array of numbers from an .npz.

    Raises UserError if its header states more data than there are.
    """
    entry = archive.getinfo(name)
    if entry.file_size > ARRAY_BYTES or entry.file_size > 2**26 + RATIO * entry.compress_size:
        raise UserError(
            f"{path}: {name} states {size_text(entry.file_size)} in "
            f"{size_text(entry.compress_size)} of the file, which no data have; write it "
            "by numpy.savez"
        )
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        reader = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = reader(file)
        if dtype.hasobject or dtype.kind not in "biuf":
            raise UserError(
                f"{path}: {name} holds {quote(str(dtype), 60)}; expected plain numbers "
                "(Python objects are never read)"
            )
        if math.prod(shape) * dtype.itemsize != entry.file_size - file.tell():
            raise UserError(
                f"{path}: {name} says its shape is {quote(list(shape))}, and holds "
                f"{size_text(entry.file_size)}; it is damaged, write it again by "
                "numpy.savez"
            )
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def choose(
    data: Labelled,
    *,
    classes: Sequence[str | int] | None = None,
    share: float | None = None,
    indices: Sequence[int] | None = None,
    seed: int = 0,
) -> Tensor:
    """Return the sorted positions of a selection.

    It is all examples of some classes, a seeded random share, or a list; else all. Raises UserError
    for a class that does not occur, an index beyond the end, or an empty selection.
    """
    rows = torch.arange(len(data))
    if classes is not None:
        class_numbers = [data.class_index(name) for name in classes]
        for name, number in zip(classes, class_numbers, strict=True):
            if not bool((data.labels == number).any()):
                raise UserError(
                    f"no example of {data.about} has the class {quote(name)}, so there "
                    "is nothing to forget of it"
                )
        rows = rows[torch.isin(data.labels, torch.tensor(class_numbers))]
    if indices is not None:
        positions = sorted(set(map(int, indices)))
        beyond = [i for i in positions if not 0 <= i < len(data)]
        if beyond:
            raise UserError(
                f"{data.about} has examples 0 to {len(data) - 1}; not among them: "
                f"{names_text(beyond, 5)}"
            )
        rows = rows[torch.isin(rows, torch.tensor(positions, dtype=torch.long))]
    if share is not None:
        generator = torch.Generator().manual_seed(seed)
        sample = torch.randperm(len(rows), generator=generator)[: max(1, round(share * len(rows)))]
        rows = rows[sample.sort().values]
    if len(rows) == 0:
        raise UserError(f"the request names no example of {data.about}")
    return rows


def rest_of(data: Labelled, forget_rows: Tensor) -> Tensor:
    """Return the positions that are not in the forget set. Raises UserError if none remain."""
    rows = torch.arange(len(data))
    remaining = rows[~torch.isin(rows, forget_rows)]
    if len(remaining) == 0:
        raise UserError(
            f"everything in {data.about} is to be forgotten, so the retain set is empty"
        )
    return remaining


def require_apart(forget: Tensor, retain: Tensor, about: str) -> None:
    """Raise UserError if an example is in the forget set and in the retain set."""
    shared = forget[torch.isin(forget, retain)]
    if len(shared):
        raise UserError(
            f"{len(shared)} examples of {about} are both to be forgotten and to be "
            f"retained, e.g. {int(shared[0])}; give `data: rest` to retain all others"
        )


def same_examples(one: Labelled, other: Labelled, probes: int = 16) -> bool:
    """Whether two sets hold the same examples in the same order, even under different names.

    Compares the labels' classes, and the values of some examples spread over the set.
    """
    if one is other:
        return True
    if len(one) != len(other) or [one.names[int(i)] for i in one.labels] != [
        other.names[int(i)] for i in other.labels
    ]:
        return False
    rows = torch.linspace(0, len(one) - 1, min(probes, len(one))).long().unique().tolist()
    a, b = one.inputs(rows).flatten(1), other.inputs(rows).flatten(1)
    return a.shape == b.shape and bool(torch.equal(a, b))
