"""The 64 features of torchmetrics' `FrechetInceptionDistance(feature=64)`, by which SalUn's and MUNBa's scripts report FID.

They are the mean activations of Inception's first pooling: low-level, so the numbers are small (about 1) and say little of
content. They are comparable with no other FID and go by a name of their own, `fid_torchmetrics64`.
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

from concept_eraser.errors import UserError, first_line
from concept_eraser.evaluation.features.base import Features, device, file_hash, find_weights

FILE = "weights-inception-2015-12-05-6726825d.pth"


@dataclass(frozen=True)
class Torchmetrics64(Features):
    """No options: the variant is what its name says."""

    title: ClassVar[str] = "Inception's first 64 features (torchmetrics)"
    backend: ClassVar[str] = "torchmetrics"

    @cached_property
    def _file(self) -> Path:
        theirs = Path(torch.hub.get_dir()) / "checkpoints"
        return find_weights(FILE, theirs, instead="use `features: judge`, which needs none")

    @cached_property
    def fingerprint(self) -> str:
        return file_hash(self._file)

    @property
    def protocol(self) -> dict[str, Any]:
        aliased = not getattr(self._net, "use_antialias", False)  # torchmetrics changed its default on the way
        return {"model": f"{FILE}, feature 64", "resize": f"torchmetrics, bilinear{'' if aliased else ', antialiased'}", "input_size": "299x299"}  # fmt: skip

    @cached_property
    def _net(self) -> Any:
        if missing := [name for name in ("torchmetrics", "torch_fidelity") if not find_spec(name)]:
            raise UserError(f"features: torchmetrics64 needs the package {' and '.join(missing).replace('_', '-')}; `pip install torchmetrics torch-fidelity`, or use `features: judge`, which needs none")  # fmt: skip
        from torchmetrics.image.fid import NoTrainInceptionV3

        try:
            return NoTrainInceptionV3("inception-v3-compat", ["64"], str(self._file)).to(device())
        except (RuntimeError, KeyError, OSError) as error:
            raise UserError(f"{self._file} cannot be read as {FILE} ({first_line(error)}); is it whole?") from None

    def prepare(self, picture: np.ndarray) -> Tensor:
        """[3, h, w] uint8: the network resizes inside."""
        return torch.tensor(picture).permute(2, 0, 1)

    def embed(self, batch: Tensor) -> Tensor:
        return self._net(batch)


PLUGIN = Torchmetrics64
