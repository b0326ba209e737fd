"""A perceptron with one hidden layer and batch norm: UNO's classifier of MNIST.

It has 159,410 parameters at its defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


class MLP(nn.Module):
    """[n, inputs] (or any shape that flattens to it) -> logits [n, classes].

    `features` is the hidden layer [n, hidden].
    """

    def __init__(self, inputs: int, hidden: int, classes: int, norm: bool) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(hidden)] if norm else []
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), *middle, nn.ReLU())
        self.head = nn.Linear(hidden, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@dataclass(frozen=True)
class MlpArchitecture:
    """Options of the perceptron.

    Args:
        inputs: The number of inputs.
        hidden: The width of the hidden layer.
        classes: The number of classes.
        norm: Use batch norm.
    """

    inputs: int = 784
    hidden: int = 200
    classes: int = 10
    norm: bool = True

    def build(self) -> nn.Module:
        return MLP(self.inputs, self.hidden, self.classes, self.norm)


PLUGIN = MlpArchitecture
