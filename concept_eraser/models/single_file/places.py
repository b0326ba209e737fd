"""The place of tensors in a single file: one name there, for one or several tensors of a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

How = Literal["same", "rows", "swap", "transpose", "conv"]


@dataclass(frozen=True)
class Place:
    """The place of one or several tensors of a part in a single file.

    Attributes:
        part: The part ("denoiser").
        name: The name in the file.
        sources: The names in the part.
        how: How the file stores them. same: unchanged. rows: several, one below the other (a fused
            projection to q, k, v). swap: the halves of the rows exchanged (shift and scale).
            transpose: a matrix transposed. conv: a linear layer [o, i] as a 1x1 convolution [o, i,
            1, 1].
    """

    part: str
    name: str
    sources: tuple[str, ...]
    how: How = "same"

    def join(self, own: Mapping[str, Tensor]) -> Tensor:
        """Return the file's tensor for those of the part."""
        tensors = [own[name] for name in self.sources]
        return torch.cat(tensors) if self.how == "rows" else _rearrange(tensors[0], self.how)

    def split(self, value: Tensor, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part's tensors for the file's. `own` has their shapes.

        Raises ValueError for another shape.
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
