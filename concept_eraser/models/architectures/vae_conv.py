"""UNO's VAE of CelebA (arXiv 2506.04712, section 4), 8,742,659 parameters at its defaults.

Encoder and decoder have five convolutions each. It has 64x64 images, channels 32 to 512, kernels of
4 with stride 2, batch norm, LeakyReLU, latent 512 and Gaussian likelihood. The paper states the
layers and the count of parameters. The decoder ends with a transposed convolution of 32 channels
and a 3x3 convolution, which give exactly this count.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn


class ConvVAE(nn.Module):
    """encode: [n, 3, 64, 64] in [-1, 1] -> mean, log variance [n, latent].

    decode: the reverse, by tanh.
    """

    likelihood: ClassVar[str] = "gaussian"

    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(5)]
        self.latent_shape, self.inner = (latent,), (sizes[-1], 2, 2)
        down = [self._step(nn.Conv2d, a, b) for a, b in zip([3, *sizes[:-1]], sizes, strict=True)]
        self.body = nn.Sequential(*down, nn.Flatten())
        flat = sizes[-1] * 4
        self.mean, self.log_variance = nn.Linear(flat, latent), nn.Linear(flat, latent)
        self.grow = nn.Linear(latent, flat)
        back = [*sizes[::-1], width]
        up = [self._step(nn.ConvTranspose2d, a, b) for a, b in pairwise(back)]
        self.decoder = nn.Sequential(*up, nn.Conv2d(width, 3, 3, padding=1), nn.Tanh())

    @staticmethod
    def _step(kind: type[nn.Module], inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            kind(inputs, outputs, 4, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.LeakyReLU()
        )

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.mean(h), self.log_variance(h)

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(self.grow(z).unflatten(1, self.inner))


@dataclass(frozen=True)
class ConvVaeArchitecture:
    """Options of the VAE.

    Args:
        width: The channels of the first layer.
        latent: The size of the code.
    """

    width: int = 32
    latent: int = 512

    def build(self) -> nn.Module:
        return ConvVAE(self.width, self.latent)


PLUGIN = ConvVaeArchitecture
