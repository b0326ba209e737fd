"""The PSNR of a VAE is that of all classes, also where the images are sorted by class."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from concept_eraser.data.labelled import Labelled
from concept_eraser.evaluation.labelled import reconstruction
from concept_eraser.utils.errors import UserError


class Offset(nn.Module):
    """A VAE whose code is the image, and whose decoder adds 0.1 to images with a mean above 1."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def encode(self, x: Tensor) -> SimpleNamespace:
        moments = SimpleNamespace(mean=x, logvar=torch.zeros_like(x))
        return SimpleNamespace(latent_dist=moments)

    def decode(self, z: Tensor) -> SimpleNamespace:
        is_high = z.mean(dim=(1, 2, 3), keepdim=True) > 1
        return SimpleNamespace(sample=z + 0.1 * is_high)


def sorted_data() -> Labelled:
    labels = torch.arange(3).repeat_interleave(400)
    images = labels.float().view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    return Labelled(labels, ("a", "b", "c"), lambda rows: images[list(rows)])


def test_sorted_images_are_measured_in_all_classes() -> None:
    values = reconstruction.psnr(Offset(), sorted_data(), torch.arange(1200))
    assert len(values) == 500
    # the images of the third class have 20 dB, as many as a third of the draw
    assert 0.25 < float(np.mean(values < 21)) < 0.42
    again = reconstruction.psnr(Offset(), sorted_data(), torch.arange(1200))
    assert np.array_equal(values, again)
    # the draw keeps the order of the rows
    assert (np.diff((values < 21).astype(int)) >= 0).all()


def test_few_images_are_all_measured_in_their_order() -> None:
    rows = torch.tensor([1100, 3, 500])
    values = reconstruction.psnr(Offset(), sorted_data(), rows)
    assert values[0] < 21 < values[1:].min()


def test_no_images_are_an_error() -> None:
    with pytest.raises(UserError, match=r"no examples of .* to measure on"):
        reconstruction.psnr(Offset(), sorted_data(), torch.arange(0))
