"""An image classifier from a folder of transformers: styles, objects, or what it was trained on.

UnlearnDiffAtk (arXiv 2310.11868) judges styles with a ViT of 129 artists, and counts an image if
the artist is among the first or the first three answers. The authors link that classifier in the
README of their repository, OPTML-Group/Diffusion-MU-Attack. Their judge of objects is the
transformers folder of microsoft/resnet-50, which this judge reads too.

The folder holds config.json with the names of the classes (id2label), preprocessor_config.json and
the weights. `names` translates the classifier's names into those of the prompt sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from concept_eraser.evaluation.features.base import device
from concept_eraser.evaluation.judges.base import (
    CONFIG,
    NetworkJudge,
    locate,
    over_batches,
    read_transformers,
    require_model_folder,
    resize_and_crop,
    weights_hash,
)
from concept_eraser.storage.readers import read_json
from concept_eraser.utils import limits, provenance
from concept_eraser.utils.errors import UserError, first_line, names_text, quote, unknown

PROCESSOR = "preprocessor_config.json"
_FILTERS = {2: "bilinear", 3: "bicubic"}  # by Pillow's number, which `resample` states
_SCALE = 1 / 255  # of bytes
_LARGE = 384  # pixels, from which on ConvNext's processor does not crop


@dataclass(frozen=True)
class ImageClassifierJudge(NetworkJudge):
    """Judge one attribute by a classifier of transformers.

    Args:
        folder: The folder of the classifier, a path or a name.
        attribute: The name of the attribute, as the prompt sets call it.
        names: The classifier's name of a class -> the name in the prompt sets. Other classes keep
            the classifier's name.
        top: An image also counts as the class of `names` that is among this many first answers.
            Above 1 all `names` are translated into one name, that of the concept.
        allow_pickle: Also read weights that are a pickle.
    """

    folder: str
    attribute: str = "style"
    names: dict[str, str] = field(default_factory=dict)
    top: int = 1
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.names, dict) or not all(
            isinstance(one, str) for pair in self.names.items() for one in pair
        ):
            raise UserError(
                f"names: expected a mapping of the classifier's names, found {quote(self.names)}"
            )
        if self.top < 1:
            raise UserError(f"top: expected a whole number from 1, found {self.top}")
        if self.top > 1 and not self.names:
            raise UserError(
                f"top: {self.top} needs `names`, the classes that count among the first answers"
            )
        if self.top > 1 and len(values := sorted(set(self.names.values()))) > 1:
            raise UserError(
                f"top: {self.top} needs `names` with the name of the concept alone, found "
                f"{names_text(values)}; the first of them would hide the concept behind it"
            )

    @cached_property
    def _folder(self) -> Path:
        folder = locate(
            self.folder,
            need="the folder of the image classifier",
            source="the classifier from its authors (for artists: UnlearnDiffAtk's README, "
            "OPTML-Group/Diffusion-MU-Attack)",
        )
        require_model_folder(folder, allow_pickle=self.allow_pickle)
        return folder

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        """The classifier's own names of its classes, in the order of its outputs."""
        labels = read_json(self._folder / CONFIG).get("id2label")
        if not isinstance(labels, dict) or not all(
            str(i) in labels and isinstance(labels[str(i)], str) for i in range(len(labels))
        ):
            raise UserError(
                f"{self._folder / CONFIG} has no names of its classes (id2label); give the folder "
                "of an image classifier"
            )
        own = tuple(labels[str(i)] for i in range(len(labels)))
        for name in self.names:
            if name not in own:
                raise unknown(f"class of {self._folder.name} in `names`", name, own)
        return own

    @cached_property
    def _values(self) -> tuple[str, ...]:
        """The name of each output in the prompt sets."""
        return tuple(self.names.get(label, label) for label in self._labels)

    @property
    def classes(self) -> Mapping[str, Sequence[str]]:  # type: ignore[override]
        return {self.attribute: tuple(dict.fromkeys(self._values))}

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        # the same weights judge otherwise with other names or images prepared otherwise
        names = sorted(self.names.items())
        rest = provenance.fingerprint([self._labels, self._preset, names, self.top])
        return f"classifier-{weights_hash(self._folder)}-{rest[:8]}"

    @cached_property
    def _net(self) -> Any:
        from transformers import AutoModelForImageClassification

        network: Any = read_transformers(
            self._folder, AutoModelForImageClassification, allow_pickle=self.allow_pickle
        )
        if network.config.num_labels != len(self._labels):
            raise UserError(
                f"{self._folder}: the network has {network.config.num_labels} outputs, but names "
                f"for {len(self._labels)} classes; copy the folder again"
            )
        return network

    @cached_property
    def _preset(self) -> dict[str, Any]:
        """How images are prepared, from preprocessor_config.json."""
        return preparation(self._folder)

    def _logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self._net.to(images.device)(
            pixel_values=resize_and_crop(images, **self._preset)
        ).logits
        return logits

    def probability(self, images: Tensor, attribute: str, value: str) -> Tensor:
        if value not in self.classes.get(attribute, ()):
            raise UserError(
                f"the judge image_classifier cannot detect {attribute} {value!r}; it knows "
                f"{self.attribute}: {names_text(self._values)}"
            )
        columns = [i for i, name in enumerate(self._values) if name == value]
        return self._logits(images.add(1).div(2)).float().softmax(1)[:, columns].sum(1)

    def classify(self, images: Tensor) -> dict[str, np.ndarray]:
        logits = over_batches(images, lambda part: self._logits(part.to(device())))
        order = logits.argsort(1, descending=True)[:, : self.top].tolist()
        named = {i for i, label in enumerate(self._labels) if label in self.names}
        best = [next((i for i in row if i in named), row[0]) for row in order]
        return {self.attribute: np.array(self._values)[best]}

    def features(self, images: Tensor) -> np.ndarray:
        """The classifier's outputs before the softmax."""
        return over_batches(images, lambda part: self._logits(part.to(device()))).numpy()


def preparation(folder: Path) -> dict[str, Any]:
    """Read how images are resized and normalised from a folder's preprocessor_config.json.

    transformers reads the file, because the class of the processor decides what it leaves out: the
    filter, and whether `size: 224` is a square or the shorter side.

    Returns the arguments of `resize_and_crop`.

    Raises:
        UserError: The file is missing or damaged, or prepares images in another way.
    """
    path = folder / PROCESSOR
    if not path.is_file():
        raise UserError(f"{folder} has no {PROCESSOR}, which says how images are resized")
    content = read_json(path)
    try:
        name, settings = _processor(folder)
        if name.startswith("PoolFormer") or settings.get("do_resize") is not True:
            raise ValueError
        size, crop = settings["size"], settings.get("crop_size")
        edge = size.get("shortest_edge")
        resize: Any = (_side(size["height"]), _side(size["width"])) if edge is None else _side(edge)
        side = None
        if crop and settings.get("do_center_crop"):
            side = _side(crop["height"])
            if crop["width"] != side:
                raise ValueError
        if name.startswith("ConvNext"):  # transformers: convnext/image_processing_convnext.py
            if resize < _LARGE:
                ratio = limits.number(settings["crop_pct"], 0.1, 1)
                resize, side = int(resize / ratio), resize
            else:
                resize = (resize, resize)
        is_normalised = bool(settings.get("do_normalize"))
        mean, std = (
            [limits.number(one, low, 10) for one in settings[key]] if is_normalised else [none] * 3
            for key, low, none in (("image_mean", -10, 0.0), ("image_std", 1e-3, 1.0))
        )
        is_scaled = settings.get("do_rescale") is True
        if len(mean) != 3 or len(std) != 3 or not is_scaled or settings["rescale_factor"] != _SCALE:
            raise ValueError
        filter_name = _FILTERS[int(settings["resample"])]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} does not say how images are prepared, or in a way that this judge lacks: "
            "expected image_processor_type, size, image_mean, image_std and a bilinear or bicubic "
            f"filter, found {quote(content)}; give the folder of another classifier"
        ) from None
    return {"resize": resize, "crop": side, "mean": mean, "std": std, "filter": filter_name}


def _processor(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a folder's image processor, with their defaults.

    Raises ValueError where transformers cannot read it.
    """
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        return type(processor).__name__, dict(processor.to_dict())
    except Exception as error:  # transformers raises errors of many types
        raise ValueError(first_line(error)) from None


def _side(value: Any) -> int:
    """A side of an image in pixels. Raises ValueError for another value."""
    return limits.whole(value, 8, limits.SIDE)


PLUGIN = ImageClassifierJudge
