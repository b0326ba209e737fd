"""The 64 features of torchmetrics' `FrechetInceptionDistance(feature=64)`.

SalUn's script names them. They are the mean activations of Inception's first pooling. They are
low-level, so the distances are small and depend little on content. They are comparable with no
other FID and have a separate name, `fid_torchmetrics64`.

Difference from SalUn's script (OPTML-Group/Unlearn-Saliency, SD/eval-scripts/compute-fid.py, lines
10-11, and dataset.py, lines 23-30): it scales images to [-1, 1] and then converts these numbers to
bytes. So black becomes 255, white 1, and every other value 0. Here the network sees the images
themselves. A number of that script is not comparable with one of this package. MUNBa's code has
this script too (SD/eval_scripts/compute-fid.py, lines 9-18). Its reference is the first 1,000
training images of Imagenette outside of the class (dataset.py, lines 91-113).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from concept_eraser.evaluation.features.base import Features, device, file_hash, find_weights
from concept_eraser.utils.errors import UserError, first_line

FILE = "weights-inception-2015-12-05-6726825d.pth"


@dataclass(frozen=True)
class Torchmetrics64(Features):
    """The features have no options."""

    title: ClassVar[str] = "Inception's first 64 features (torchmetrics)"
    backend: ClassVar[str] = "torchmetrics"

    @cached_property
    def _file(self) -> Path:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        return find_weights(FILE, folder, instead="use `features: judge`, which needs none")

    @cached_property
    def fingerprint(self) -> str:
        return file_hash(self._file)

    @property
    def protocol(self) -> dict[str, Any]:
        # the default of torchmetrics depends on its version
        is_aliased = not getattr(self._net, "use_antialias", False)
        return {
            "model": f"{FILE}, feature 64",
            "resize": f"torchmetrics, bilinear{'' if is_aliased else ', antialiased'}",
            "input_size": "299x299",
        }

    @cached_property
    def _net(self) -> Any:
        if missing_packages := [
            name for name in ("torchmetrics", "torch_fidelity") if not find_spec(name)
        ]:
            raise UserError(
                "features: torchmetrics64 needs the package "
                f"{' and '.join(missing_packages).replace('_', '-')}; `pip install torchmetrics "
                "torch-fidelity`, or use `features: judge`, which needs none"
            )
        from torchmetrics.image.fid import NoTrainInceptionV3

        try:
            return NoTrainInceptionV3("inception-v3-compat", ["64"], str(self._file)).to(device())
        except (RuntimeError, KeyError, OSError) as error:
            raise UserError(
                f"{self._file} cannot be read as {FILE} ({first_line(error)}); is it whole?"
            ) from None

    def prepare(self, image: np.ndarray) -> Tensor:
        """[3, h, w] uint8: the network itself resizes."""
        return torch.tensor(image).permute(2, 0, 1)

    def embed(self, batch: Tensor) -> Tensor:
        features: Tensor = self._net(batch)
        return features


PLUGIN = Torchmetrics64
