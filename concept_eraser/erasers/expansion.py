"""One more class for a classifier during its training: boundary expanding (arXiv 2303.11570).

The module itself does not change. The new output has the same inputs as the last linear layer, and
is discarded after the training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from concept_eraser.utils.errors import UserError


class Expansion:
    """One more output beside the layer of a module that computes its logits.

    Raises UserError if the logits of an example do not come from a linear layer.
    """

    def __init__(self, module: nn.Module, example: Tensor) -> None:
        outputs: list[tuple[nn.Linear, Tensor]] = []
        linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        hooks = [
            layer.register_forward_hook(lambda layer, _, output: outputs.append((layer, output)))
            for layer in linear
        ]
        try:
            with torch.no_grad():
                logits = module(example)
        finally:
            for hook in hooks:
                hook.remove()
        if (
            not outputs
            or outputs[-1][1].shape != logits.shape
            or not torch.equal(outputs[-1][1], logits)
        ):
            raise UserError(
                "the loss 'expand' adds an output to the last layer, which has to be "
                "linear; this model's is not. Use boundary or relabel"
            )
        self.head = outputs[-1][0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # nn.Linear draws from the global generator
            extra = nn.Linear(self.head.in_features, 1)
        self.extra = extra.to(self.head.weight)

    def parameters(self) -> dict[str, nn.Parameter]:
        return {f"expand.{name}": value for name, value in self.extra.named_parameters()}

    def logits(self, ask: Callable[[], Tensor]) -> Tensor:
        """Return the module's logits with the logit of the new class appended: [b, classes + 1]."""
        head_inputs: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0]))
        try:
            logits = ask()
        finally:
            hook.remove()
        return torch.cat([logits, self.extra(head_inputs[-1]).float()], 1)
