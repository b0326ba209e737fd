"""Inception v3 features as clean-fid takes them: "On Aliased Resizing and Surprising Subtleties in GAN Evaluation" (arXiv 2104.11222).

The mode decides how a picture becomes 299 x 299 and which port of the network of 2015 looks at it:

* clean              PIL's bicubic with antialiasing, unquantised; NVIDIA's TorchScript file
* legacy_tensorflow  resized inside that TorchScript file, as Heusel et al.'s TensorFlow code did; NVIDIA's TorchScript file
* legacy_pytorch     torch's bilinear without antialiasing; pytorch-fid's file

Difference from clean-fid: it downloads what is missing, this package never does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from concept_eraser.errors import UserError, first_line, unknown
from concept_eraser.evaluation.features.base import Features, device, file_hash, find_weights

TORCHSCRIPT, PYTORCH = "inception-2015-12-05.pt", "pt_inception-2015-12-05-6726825d.pth"
MODES = {"clean": TORCHSCRIPT, "legacy_pytorch": PYTORCH, "legacy_tensorflow": TORCHSCRIPT}


@dataclass(frozen=True)
class Inception(Features):
    """mode: clean-fid's name of how a picture is resized."""

    title: ClassVar[str] = "Inception features"
    backend: ClassVar[str] = "clean-fid"
    mode: str = "clean"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown("mode of clean-fid", self.mode, MODES)

    @cached_property
    def _file(self) -> Path:
        # not /tmp, where clean-fid puts them: a file there may be anybody's, and TorchScript is code
        return find_weights(
            MODES[self.mode],
            Path(torch.hub.get_dir()) / "checkpoints",
            instead="use `features: judge`, which needs none",
        )

    @cached_property
    def fingerprint(self) -> str:
        return file_hash(self._file)

    @property
    def protocol(self) -> dict[str, Any]:
        return {"model": MODES[self.mode], "resize": self.mode, "input_size": "299x299"}

    @cached_property
    def _resize(self) -> Callable[[np.ndarray], np.ndarray]:
        from cleanfid.resize import build_resizer

        return build_resizer(self.mode)

    @cached_property
    def _net(self) -> Any:
        try:
            if self.mode == "legacy_pytorch":
                return _pytorch_fid(self._file)
            return torch.jit.load(self._file, map_location=device()).eval()
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{self._file} cannot be read as {MODES[self.mode]} ({first_line(error)}); is it whole?") from None  # fmt: skip

    def prepare(self, picture: np.ndarray) -> Tensor:
        """[3, 299, 299] float32 in [0, 255]; under legacy_tensorflow the size the picture has."""
        return torch.tensor(np.asarray(self._resize(picture), np.float32)).permute(2, 0, 1)

    def embed(self, batch: Tensor) -> Tensor:
        if self.mode == "legacy_tensorflow":
            return self._net(batch, return_features=True).flatten(1)
        if self.mode == "legacy_pytorch":
            return self._net(batch / 255)[0].flatten(1)
        return self._net.layers((batch - 128) / 128).flatten(1)


def _pytorch_fid(path: Path) -> Any:
    """clean-fid's copy of pytorch-fid's network, with weights from a file that it would have fetched."""
    from cleanfid import inception_pytorch

    fetch = inception_pytorch.load_state_dict_from_url
    inception_pytorch.load_state_dict_from_url = lambda *_, **__: torch.load(path, map_location="cpu", weights_only=True)  # fmt: skip
    try:
        return inception_pytorch.InceptionV3(output_blocks=[3], resize_input=False).to(device()).eval()
    finally:
        inception_pytorch.load_state_dict_from_url = fetch


PLUGIN = Inception
