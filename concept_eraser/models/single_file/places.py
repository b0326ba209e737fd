"""Where a tensor of ours stands in a single file: under one name there, made of one or of several
of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

How = Literal["same", "rows", "swap", "transpose", "conv"]


@dataclass(frozen=True)
class Place:
    """part: ours ("denoiser"); name: in the file; sources: names in the part; how the file keeps
    them:

    same: as it is; rows: several, one below the other (a fused projection to q, k, v); swap: the
    halves of the rows exchanged (shift and scale); transpose: a matrix transposed; conv: a linear
    layer [o, i] as a 1x1 convolution [o, i, 1, 1].
    """

    part: str
    name: str
    sources: tuple[str, ...]
    how: How = "same"

    def join(self, own: Mapping[str, Tensor]) -> Tensor:
        """The file's tensor of those of the part."""
        tensors = [own[name] for name in self.sources]
        return torch.cat(tensors) if self.how == "rows" else _rearrange(tensors[0], self.how)

    def split(self, value: Tensor, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part's tensors of the file's; `own` tells their shapes. Raises ValueError where the
        shape is another.
        """
        if self.how == "rows":
            tensors: Sequence[Tensor] = value.split([len(own[name]) for name in self.sources])
        else:
            flat = self.how == "conv" and value.dim() == own[self.sources[0]].dim()
            tensors = [value if flat else _rearrange(value, self.how)]
        for name, tensor in zip(self.sources, tensors, strict=True):
            if tensor.shape != own[name].shape:
                raise ValueError(
                    f"{self.name} is {list(value.shape)}, {list(self.join(own).shape)} is needed"
                )
        return dict(zip(self.sources, tensors, strict=True))


def _rearrange(value: Tensor, how: How) -> Tensor:
    if how == "swap":
        return torch.cat(value.chunk(2)[::-1])
    if how == "transpose":
        return value.T
    if how == "conv":
        return value[:, :, None, None] if value.dim() == 2 else value[:, :, 0, 0]
    return value
