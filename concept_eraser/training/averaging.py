"""The exponential moving average of the trained weights (EMA).

    average <- d average + (1 - d) weights,    d = min(decay, (1 + n) / (10 + n)) after n steps

The bound on d is that of CompVis/latent-diffusion, ldm/modules/ema.py, and of `EMAModel` of
diffusers. Without it a short training would save little but the weights that it started from.

The average starts at the weights before the training. A skipped step does not count. With a LoRA
each of its two matrices is averaged, as in diffusers' scripts; the product of two averages is not
the average of the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

WARMUP = 10  # of the bound on d: (1 + n) / (WARMUP + n)


class Average:
    """The average of some parameters over the steps, one more tensor for each of them.

    Args:
        params: The parameters by name.
        decay: The largest decay d.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], decay: float) -> None:
        self.params, self.decay, self.steps = dict(params), decay, 0
        self.values = {name: value.detach().clone() for name, value in self.params.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights, after a step."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (WARMUP + self.steps))
        for name, parameter in self.params.items():
            self.values[name].lerp_(parameter.detach(), 1 - decay)

    @torch.no_grad()
    def write(self) -> None:
        """Give the parameters their averages."""
        for name, parameter in self.params.items():
            parameter.copy_(self.values[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the parameters their averages inside the context."""
        present = {name: value.detach().clone() for name, value in self.params.items()}
        self.write()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.params.items():
                    parameter.copy_(present[name])

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a run that continues."""
        values: dict[str, Tensor] = {
            name: value.detach().cpu().clone() for name, value in self.values.items()
        }
        return {"steps": self.steps, "values": values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.steps = int(state["steps"])
        for name, value in state["values"].items():
            self.values[name].copy_(value)
