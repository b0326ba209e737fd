"""LPIPS: the change of the images of retained prompts (Zhang et al., arXiv 1801.03924).

It is version 0.1, between the images before and after of the same prompt and seed. It is computed
by torchmetrics, or by the authors' package `lpips`. Both have the linear layers, and take the
network's ImageNet weights from torch's cache. Nothing is downloaded.
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

from concept_eraser.evaluation.base import Evidence, Metric, Result
from concept_eraser.evaluation.features.base import device, file_hash
from concept_eraser.evaluation.statistics import mean_interval
from concept_eraser.utils.errors import UserError, first_line, unknown

FILES = {
    "alex": "alexnet-owt-7be5be79.pth",
    "vgg": "vgg16-397923af.pth",
    "squeeze": "squeezenet1_1-b8a52dc0.pth",
}


@dataclass(frozen=True)
class Lpips(Metric):
    """Mean over the pairs of a neighbour or retain group; 0 means equal images.

    Args:
        net: alex (the paper's choice for reports), vgg or squeeze.
    """

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
            raise UserError(
                f"LPIPS needs the ImageNet weights {path.name}, and nothing is "
                f"downloaded: put the file into {path.parent}, or leave lpips out of the "
                "suite's metrics"
            )
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
            raise UserError(
                "LPIPS is computed by the package torchmetrics or lpips; `pip install "
                "torchmetrics`, or leave lpips out of the suite's metrics"
            ) from None
        except (RuntimeError, ValueError, OSError) as error:
            raise UserError(
                f"{file} cannot be read as {file.name} ({first_line(error)}); is it whole?"
            ) from None

    def measure(self, evidence: Evidence) -> Sequence[Result]:
        results = []
        for group in evidence.groups.values():
            if group.role != "forget":
                distances = self._pairs(group.images["before"], group.images["after"])
                results.append(
                    Result(
                        "lpips",
                        group.name,
                        mean_interval(distances),
                        "lower",
                        settings=self._settings(group.images["after"]),
                        per_image={"after": distances},
                    )
                )
        return results

    def _settings(self, images: Tensor) -> dict[str, Any]:
        size = "x".join(map(str, images.shape[1:3]))
        return {
            "backend": self._backend,
            "model": self.net,
            "weights": file_hash(self._file),
            "resize": "none",
            "input_size": size,
        }

    @torch.no_grad()
    def _pairs(self, before: Tensor, after: Tensor) -> np.ndarray:
        """LPIPS of pairs of images, [n, h, w, 3] uint8 twice -> [n].

        Raises:
            UserError: the images are too small for the network.
        """
        distances = []
        for one, other in zip(before.split(16), after.split(16), strict=True):
            pixels = [
                part.permute(0, 3, 1, 2).float().div(127.5).sub(1).to(device())
                for part in (one, other)
            ]
            try:
                distances.append(self._net(*pixels).flatten().cpu())
            except RuntimeError as error:
                raise UserError(
                    f"LPIPS does not support images of {tuple(before.shape[1:3])} pixels "
                    f"({first_line(error)})"
                ) from None
        return torch.cat(distances).numpy()


PLUGIN = Lpips
