"""Inception v3 features as in clean-fid (arXiv 2104.11222).

The paper is "On Aliased Resizing and Surprising Subtleties in GAN Evaluation". The mode sets how an
image is resized to 299 x 299, and the port of the 2015 network:

* clean              PIL's bicubic with antialiasing, unquantised; NVIDIA's TorchScript file
* legacy_tensorflow  resized inside that TorchScript file, as Heusel et al.'s TensorFlow code did;
  NVIDIA's TorchScript file
* legacy_pytorch     torch's bilinear without antialiasing; pytorch-fid's file

Differences from clean-fid: this package never downloads missing weights. It reads transparency as
white, which clean-fid drops, and rotates an image as its file states. It refuses FID where the
images are not more than the features, which are 2,048.
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

from concept_eraser.evaluation.features.base import Features, device, file_hash, find_weights
from concept_eraser.utils.errors import UserError, first_line, unknown

TORCHSCRIPT, PYTORCH = "inception-2015-12-05.pt", "pt_inception-2015-12-05-6726825d.pth"
MODES = {"clean": TORCHSCRIPT, "legacy_pytorch": PYTORCH, "legacy_tensorflow": TORCHSCRIPT}


@dataclass(frozen=True)
class Inception(Features):
    """Inception v3 features.

    Args:
        mode: The resizing method by clean-fid's name: clean, legacy_tensorflow or legacy_pytorch.
    """

    title: ClassVar[str] = "Inception features"
    backend: ClassVar[str] = "clean-fid"
    mode: str = "clean"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise unknown("mode of clean-fid", self.mode, MODES)

    @cached_property
    def _file(self) -> Path:
        # clean-fid uses /tmp. Any user can write a file there, and TorchScript is code.
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

        resize: Callable[[np.ndarray], np.ndarray] = build_resizer(self.mode)
        return resize

    @cached_property
    def _net(self) -> Any:
        try:
            if self.mode == "legacy_pytorch":
                return _pytorch_fid(self._file)
            return torch.jit.load(self._file, map_location=device()).eval()
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"{self._file} cannot be read as {MODES[self.mode]} "
                f"({first_line(error)}); is it whole?"
            ) from None

    def prepare(self, image: np.ndarray) -> Tensor:
        """[3, 299, 299] float32 in [0, 255]; the original size under legacy_tensorflow."""
        return torch.tensor(np.asarray(self._resize(image), np.float32)).permute(2, 0, 1)

    def embed(self, batch: Tensor) -> Tensor:
        features: Tensor
        if self.mode == "legacy_tensorflow":
            features = self._net(batch, return_features=True)
        elif self.mode == "legacy_pytorch":
            features = self._net(batch / 255)[0]
        else:
            features = self._net.layers((batch - 128) / 128)
        return features.flatten(1)


def _pytorch_fid(path: Path) -> Any:
    """clean-fid's copy of pytorch-fid's network, with weights from a local file instead of a
    download.
    """
    from cleanfid import inception_pytorch

    fetch = inception_pytorch.load_state_dict_from_url
    inception_pytorch.load_state_dict_from_url = lambda *_, **__: torch.load(
        path, map_location="cpu", weights_only=True
    )
    try:
        return (
            inception_pytorch.InceptionV3(output_blocks=[3], resize_input=False).to(device()).eval()
        )
    finally:
        inception_pytorch.load_state_dict_from_url = fetch


PLUGIN = Inception
