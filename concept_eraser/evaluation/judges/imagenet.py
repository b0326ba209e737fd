"""ImageNet classifier: which of the 1,000 classes an image shows, by torchvision's ResNets.

Source: arXiv 1512.03385. MUNBa, SalUn and ESD count with ResNet-50. The judgement is the most
probable of all 1,000 classes. The names are torchvision's, and Imagenette's ten classes have the
names that the prompt sets use. The attribute is `class`.

The file is torchvision's own, e.g. resnet50-11ad3fa6.pth. Its address is the download folder of
PyTorch, https://download.pytorch.org/models/. Images are resized and cropped as torchvision states
for these weights. An image smaller than that is enlarged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from concept_eraser.evaluation.features.base import device, file_hash
from concept_eraser.evaluation.judges.base import (
    NetworkJudge,
    locate,
    over_batches,
    put_weights,
    read_state,
    resize_and_crop,
)
from concept_eraser.utils.errors import UserError

ATTRIBUTE = "class"
_FIRST_ONLY = ("resnet18", "resnet34")  # torchvision has one version of their weights


@dataclass(frozen=True)
class ImageNetJudge(NetworkJudge):
    """Judge the attribute `class` by the 1,000 classes of ImageNet.

    Args:
        architecture: torchvision's name of the network.
        version: torchvision's name of the weights. It fixes how images are resized. The authors'
            scripts use version 2 of ResNet-50.
        weights: The file of weights, a path or a name; None for torchvision's name of it.
        allow_pickle: Also read a pickle that is not torchvision's published file.
    """

    architecture: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet50"
    version: Literal["IMAGENET1K_V1", "IMAGENET1K_V2"] = "IMAGENET1K_V2"
    weights: str | None = None
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        if self.architecture in _FIRST_ONLY and self.version == "IMAGENET1K_V2":
            raise UserError(
                f"torchvision has no version IMAGENET1K_V2 of {self.architecture}; give "
                "`version: IMAGENET1K_V1`"
            )

    @cached_property
    def _published(self) -> Any:
        """torchvision's facts about the weights: url, transforms and names of the classes."""
        from torchvision.models import get_model_weights

        return get_model_weights(self.architecture)[self.version]

    @property
    def classes(self) -> Mapping[str, Sequence[str]]:  # type: ignore[override]
        return {ATTRIBUTE: tuple(self._published.meta["categories"])}

    @cached_property
    def _file(self) -> Path:
        url = self._published.url
        return locate(
            self.weights or Path(url).name,
            need=f"the file of ImageNet weights of {self.architecture}",
            source=f"torchvision's file {Path(url).name} from {url}",
        )

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        return f"imagenet-{self.architecture}-{self.version}-{file_hash(self._file)}"

    @cached_property
    def _net(self) -> Any:
        from torchvision.models import get_model

        network = get_model(self.architecture, weights=None)
        state = read_state(self._file, allow_pickle=self.allow_pickle)
        return put_weights(network, state, self._file)

    def _prepare(self, images: Tensor) -> Tensor:
        preset = self._published.transforms()
        return resize_and_crop(
            images,
            resize=preset.resize_size[0],
            crop=preset.crop_size[0],
            mean=preset.mean,
            std=preset.std,
        )

    def probability(self, images: Tensor, attribute: str, value: str) -> Tensor:
        names = self.classes.get(attribute, ())
        if value not in names:
            raise UserError(
                f"the judge imagenet cannot detect {attribute} {value!r}; it knows `class` with "
                "ImageNet's 1,000 names"
            )
        logits: Tensor = self._net.to(images.device)(self._prepare(images.add(1).div(2)))
        return logits.float().softmax(1)[:, names.index(value)]

    def classify(self, images: Tensor) -> dict[str, np.ndarray]:
        network = self._net.to(device())
        logits = over_batches(images, lambda part: network(self._prepare(part)))
        return {ATTRIBUTE: np.array(self.classes[ATTRIBUTE])[logits.argmax(1).numpy()]}

    def features(self, images: Tensor) -> np.ndarray:
        """The pooled features before the last layer."""
        network = self._net.to(device())
        body = nn.Sequential(*list(network.children())[:-1], nn.Flatten())
        return over_batches(images, lambda part: body(self._prepare(part))).numpy()


PLUGIN = ImageNetJudge
