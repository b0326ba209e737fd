"""CPE's residual attention gate: an addition to keys and values that depends on the whole prompt.

Source: Lee, Lim, Lee, Kang & Chun, "Concept Pinpoint Eraser for Text-to-image Diffusion Models via
Residual Attention Gate" (arXiv 2506.22806). The paper's equations were not read here. The
definition is that of the authors' code, src/models/cpe_resag.py of Hyun1A/CPE at commit 4d35d02:
lines 59-107 (the attention), 134-140 (the gate) and 316-340 (the layer), for one concept.

E are the states of a prompt, one row e_i for each token. With the matrix P of one small projection
and the vector s

    A = softmax(E P P^T E^T)            over the second token
    m_i = sum over j of A_ij e_j
    g_i = sigmoid(s . m_i) m_i

One gate serves all layers: A, m and g are the same in each. A layer of keys or values gives

    W e_i + (1 / rank) up(down(g_i))    for the prompt and for the empty prompt alike

`up` starts at zero, so a new gate changes nothing.

Queries and keys of A have the same projection P. The code creates a second one for the keys and
does not read it (line 98). It does not use its dropout and its number of heads, which is 1.

The gate is a module of the denoiser, so its tensors are among the denoiser's: fingerprints count
them, gradients pass through it, and a run stores them as its changed tensors. Anybody with the
weights can leave it out, and no pipeline of diffusers could load it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.utils.errors import UserError

NAME = "residual_gate"  # of the module in the denoiser


class ResidualAttentionGate(nn.Module):
    """The gate and its addition to each layer.

    Attributes:
        query: P [width, gate_rank].
        scale: s [width].
        down: For each layer [rank, width].
        up: For each layer [outputs, rank].
    """

    def __init__(
        self, width: int, outputs: Mapping[str, int], *, gate_rank: int, rank: int
    ) -> None:
        """Create a gate without its first values; see `initialise`.

        Args:
            width: The width of the states.
            outputs: The number of outputs of each layer, by the layer's name in the denoiser.
            gate_rank: The columns of P.
            rank: The rank of an addition.
        """
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width, gate_rank))
        self.scale = nn.Parameter(torch.zeros(width))
        self.down = nn.ParameterDict(
            {_key(name): torch.zeros(rank, width) for name in sorted(outputs)}
        )
        self.up = nn.ParameterDict(
            {_key(name): torch.zeros(outputs[name], rank) for name in sorted(outputs)}
        )

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw P and the down matrices as the code does, uniformly.

        The bound of P is 1 / (width^2 sqrt(width gate_rank)), so that A is nearly uniform at first.
        That of a down matrix is 1 / sqrt(width rank). s and the up matrices are 0.

        Args:
            generator: On the CPU.
        """
        width, gate_rank = self.query.shape
        _draw(self.query, 1 / (width**2 * math.sqrt(width * gate_rank)), generator)
        for matrix in self.down.values():
            _draw(matrix, 1 / math.sqrt(matrix.numel()), generator)

    def gated(self, states: Tensor) -> Tensor:
        """Return g of each token [n, tokens, width] from the states [n, tokens, width]."""
        states = states.to(self.query)
        projected = states @ self.query
        mixed = torch.softmax(projected @ projected.mT, dim=-1) @ states
        return torch.sigmoid(mixed @ self.scale)[..., None] * mixed

    def addition(self, layer: str, gated: Tensor) -> Tensor:
        """Return what a layer's output gets [n, tokens, outputs].

        Args:
            layer: The layer's name in the denoiser.
            gated: The result of `gated`.
        """
        down, up = self.down[_key(layer)], self.up[_key(layer)]
        return gated @ down.T @ up.T / len(down)


@dataclass
class _Addition:
    """The forward hook of a layer. A copy of the denoiser has copies of both."""

    gate: ResidualAttentionGate
    layer: str

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + self.gate.addition(self.layer, self.gate.gated(inputs[0])).to(output)


def attach(denoiser: nn.Module, gate: ResidualAttentionGate, layers: Any) -> None:
    """Give a denoiser a gate, which then adds to the outputs of these layers.

    Args:
        denoiser: The denoiser.
        gate: The gate. It goes to the denoiser's device.
        layers: The names of the layers.

    Raises:
        UserError: The denoiser has a gate already.
    """
    if find(denoiser) is not None:
        raise UserError(
            "the denoiser has a gate already, and a second one is not supported; erase both "
            "concepts from the original model, or give another model"
        )
    gate.to(next(denoiser.parameters()).device).eval().requires_grad_(False)
    denoiser.add_module(NAME, gate)
    for name in layers:
        denoiser.get_submodule(name).register_forward_hook(_Addition(gate, name))


def detach(denoiser: nn.Module) -> None:
    """Remove a denoiser's gate. Without one this does nothing."""
    if find(denoiser) is None:
        return
    delattr(denoiser, NAME)
    for module in denoiser.modules():
        for number, hook in list(module._forward_hooks.items()):
            if isinstance(hook, _Addition):
                del module._forward_hooks[number]


def find(denoiser: nn.Module) -> ResidualAttentionGate | None:
    """Return the gate of a denoiser, or None."""
    gate = getattr(denoiser, NAME, None)
    return gate if isinstance(gate, ResidualAttentionGate) else None


def attach_stored(denoiser: nn.Module, tensors: Mapping[str, Tensor], file: str) -> None:
    """Give a denoiser the gate whose tensors a run holds, with its first values.

    The caller copies the tensors themselves. Without tensors of a gate, and in a denoiser that has
    one, nothing is done.

    Args:
        denoiser: The denoiser.
        tensors: The changed tensors of a run, by their names in the denoiser.
        file: The file that they are from, for errors.

    Raises:
        UserError: The tensors are no gate of this denoiser.
    """
    parts = {
        name.removeprefix(f"{NAME}."): value
        for name, value in tensors.items()
        if name.startswith(f"{NAME}.")
    }
    if not parts or find(denoiser) is not None:
        return
    ups = {name.removeprefix("up."): v for name, v in parts.items() if name.startswith("up.")}
    layers = {
        name: _key(name)
        for name, module in denoiser.named_modules()
        if isinstance(module, nn.Linear) and _key(name) in ups
    }
    query, ranks = parts.get("query"), {value.shape[-1] for value in ups.values()}
    if query is None or query.dim() != 2 or len(ranks) != 1 or len(layers) != len(ups):
        raise UserError(f"{file} is damaged: its gate does not fit the model; copy the run again")
    outputs = {name: len(ups[key]) for name, key in layers.items()}
    gate = ResidualAttentionGate(
        len(query), outputs, gate_rank=query.shape[1], rank=next(iter(ranks))
    )
    attach(denoiser, gate, outputs)


def refuse(model: Any, action: str) -> None:
    """Raise UserError if a model has a gate, which other programs cannot apply.

    Args:
        model: The model.
        action: What cannot be done, as a verb with its object.
    """
    denoiser = model.parts.get("denoiser")
    if denoiser is not None and find(denoiser) is not None:
        raise UserError(
            f"cannot {action}: {model.source} has a gate (the method cpe), whose addition to keys "
            "and values depends on the whole prompt, and no pipeline of diffusers and no LoRA can "
            "hold it; give the run folder itself to load, generate, evaluate and attack"
        )


def _key(layer: str) -> str:
    """Return the name of a layer's matrices; names of parameters have no dots."""
    return layer.replace(".", "_")


def _draw(matrix: Tensor, bound: float, generator: torch.Generator) -> None:
    values = torch.rand(matrix.shape, generator=generator) * 2 * bound - bound
    matrix.copy_(values)
