"""UNO's VAE of MNIST (arXiv 2506.04712, section 4): 784-400-(latent)-400-784.

It has 632,788 parameters with latent 2, batch norm and ReLU in the hidden layers, sigmoid outputs
and Bernoulli likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn


class MLPVAE(nn.Module):
    """encode: [n, inputs] in [0, 1] -> mean, log variance [n, latent].

    decode: [n, latent] -> [n, inputs] in (0, 1).
    """

    likelihood: ClassVar[str] = "bernoulli"

    def __init__(self, inputs: int, hidden: int, latent: int) -> None:
        super().__init__()
        self.latent_shape = (latent,)
        self.body = nn.Sequential(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, inputs)
        )

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x.flatten(1))
        return self.mean(h), self.log_variance(h)

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.decoder(z))


@dataclass(frozen=True)
class MlpVaeArchitecture:
    """Options of the VAE.

    Args:
        inputs: The number of inputs.
        hidden: The width of the hidden layers.
        latent: The size of the code.
    """

    inputs: int = 784
    hidden: int = 400
    latent: int = 2

    def build(self) -> nn.Module:
        return MLPVAE(self.inputs, self.hidden, self.latent)


PLUGIN = MlpVaeArchitecture
