"""LPIPS: how much a picture that should be kept has changed (Zhang et al., arXiv 1801.03924), version 0.1.

Between the pictures before and after of the same prompt and seed. Computed by torchmetrics, or by the authors' package
`lpips`; both bring the linear layers, and take the network's ImageNet weights from torch's cache. Nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from concept_eraser.errors import UserError, first_line, unknown
from concept_eraser.evaluation.base import Evidence, Metric, Result
from concept_eraser.evaluation.features.base import device, file_hash
from concept_eraser.evaluation.statistics import mean_interval

FILES = {"alex": "alexnet-owt-7be5be79.pth", "vgg": "vgg16-397923af.pth", "squeeze": "squeezenet1_1-b8a52dc0.pth"}


@dataclass(frozen=True)
class Lpips(Metric):
    """Mean over the pairs of a neighbour or retain group; 0: the same pictures. net: alex (the paper's for reports), vgg, squeeze."""

    title: ClassVar[str] = "LPIPS"
    net: str = "alex"

    def __post_init__(self) -> None:
        if self.net not in FILES:
            raise unknown("net of LPIPS", self.net, FILES)

    @property
    def _backend(self) -> str:
        return next((name for name in ("torchmetrics", "lpips") if find_spec(name)), "")

    @cached_property
    def _file(self) -> Path:
        path = Path(torch.hub.get_dir()) / "checkpoints" / FILES[self.net]
        if not path.is_file():
            raise UserError(f"LPIPS needs the ImageNet weights {path.name}, and nothing is downloaded: put the file into {path.parent}, or leave lpips out of the suite's metrics")  # fmt: skip
        return path

    @cached_property
    def _net(self) -> Any:
        file = self._file
        try:
            if self._backend == "torchmetrics":
                from torchmetrics.image.lpip import LearnedPerceptualImagePatchSimilarity

                return LearnedPerceptualImagePatchSimilarity(self.net).net.to(device())  # type: ignore[arg-type]
            import lpips

            return lpips.LPIPS(net=self.net, verbose=False).eval().to(device())
        except ImportError:
            raise UserError("LPIPS is computed by the package torchmetrics or lpips; `pip install torchmetrics`, or leave lpips out of the suite's metrics") from None  # fmt: skip
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(f"{file} cannot be read as {file.name} ({first_line(error)}); is it whole?") from None

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        results = []
        for group in evidence.groups.values():
            if group.role != "forget":
                changed = mean_interval(self._pairs(group.pictures["before"], group.pictures["after"]))
                results.append(Result("lpips", group.name, changed, "lower", settings=self._described(group.pictures["after"])))  # fmt: skip
        return results

    def _described(self, pictures: Tensor) -> dict[str, Any]:
        size = "x".join(map(str, pictures.shape[1:3]))
        return {"backend": self._backend, "model": self.net, "weights": file_hash(self._file), "resize": "none", "input_size": size}  # fmt: skip

    @torch.no_grad()
    def _pairs(self, before: Tensor, after: Tensor) -> np.ndarray:
        """[n, h, w, 3] uint8 twice -> [n]. Raises UserError for pictures too small for the network."""
        found = []
        for one, other in zip(before.split(16), after.split(16), strict=True):
            scaled = [part.permute(0, 3, 1, 2).float().div(127.5).sub(1).to(device()) for part in (one, other)]
            try:
                found.append(self._net(*scaled).flatten().cpu())
            except RuntimeError as error:
                raise UserError(f"LPIPS cannot look at pictures of {tuple(before.shape[1:3])} pixels ({first_line(error)})") from None  # fmt: skip
        return torch.cat(found).numpy()


PLUGIN = Lpips
