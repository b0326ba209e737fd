"""Edits that fit a gate beside the keys and values of cross-attention (see `GateEdit`).

The gate becomes a module of the denoiser, and its tensors are the trained ones. So a run holds the
gate alone, and everything that calls the denoiser has it: images, evaluations and the gradients of
attacks. Only Stable Diffusion 1, 2 and XL have such a gate: in PixArt and Sana the denoiser does
not attend to the padding of a prompt, and the gate would read it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from concept_eraser.erasers.base import Eraser, Part
from concept_eraser.methods.base import GatedLayer, GateEdit, GateRequest
from concept_eraser.models import residual_gate
from concept_eraser.models.base import Model
from concept_eraser.models.captioned import Captioned
from concept_eraser.models.residual_gate import ResidualAttentionGate
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.targets import cross_attention_edit
from concept_eraser.targets.context import Context, require_pipeline
from concept_eraser.utils.errors import UserError


class GatePart(Part):
    """A denoiser of which only its new gate is trained."""

    def restore(self) -> None:
        """Remove the gate."""
        residual_gate.detach(self.module)


def apply(method: GateEdit, context: Context) -> tuple[Eraser, Mapping[str, float], float]:
    """Give the denoiser of a recipe a gate, in place, and fit it.

    Returns:
        The eraser, the edit's results, and the seconds it took.

    Raises:
        UserError: The recipe has settings that an edit ignores, the model has no layers for a gate
            or has one already, or the fit fails. The denoiser then has no new gate.
    """
    cross_attention_edit.refuse_ignored(context.recipe)
    model, recipe = require_pipeline(context), context.recipe
    names = gated_layers(model, recipe.trainable.select)
    began = time.monotonic()
    pairs, preserved_texts = cross_attention_edit.paired_prompts(recipe)
    forget, anchor = (_states(model, texts) for texts in zip(*pairs, strict=True))
    preserved = _states(model, preserved_texts)
    denoiser = model.denoiser
    outputs = {name: len(denoiser.get_parameter(f"{name}.weight")) for name in names}
    gate = ResidualAttentionGate(
        forget.shape[-1], outputs, gate_rank=method.gate_rank, rank=method.rank
    )
    gate.initialise(torch.Generator().manual_seed(recipe.training.seed))
    residual_gate.attach(denoiser, gate, names)
    trained = [f"{residual_gate.NAME}.{name}" for name, _ in gate.named_parameters()]
    part = GatePart(denoiser, trained, list(recipe.objectives))
    request = GateRequest(
        gate=gate,
        layers=[_layer(denoiser, name) for name in names],
        forget=forget,
        anchor=anchor,
        retain=preserved[1:],
        empty=preserved[0],
        seed=recipe.training.seed,
        report=lambda step, steps, remark: context.progress("gate", step, steps, remark),
    )
    try:
        notes = method.edit(request)
    except ValueError as error:
        part.restore()
        raise UserError(str(error)) from error
    except BaseException:
        part.restore()
        raise
    return part, notes, time.monotonic() - began


def gated_layers(model: Model, selection: str) -> list[str]:
    """Return the names of the selected layers of keys and values.

    Raises:
        UserError: The model has no such layers, or the selection covers other weights too.
    """
    if isinstance(model, Captioned):
        raise UserError(
            f"{model.source} ({model.family}) does not attend to the padding of a prompt, which a "
            "gate would read; this method works on Stable Diffusion 1, 2 and XL"
        )
    weights = cross_attention_edit.layers(model, selection)
    return [name.removesuffix(".weight") for name in weights]


def count(recipe: Recipe, parameters: Mapping[str, nn.Parameter], names: Sequence[str]) -> int:
    """Return how many numbers the gate of a recipe has.

    Args:
        recipe: The recipe, with such a method.
        parameters: The denoiser's parameters by name.
        names: The weights of the layers of keys and values, each [outputs, width].
    """
    method = recipe.method.build()
    shapes = [parameters[name].shape for name in names]
    width = shapes[0][1] if shapes else 0
    return width * (method.gate_rank + 1) + method.rank * sum(map(sum, shapes))


def _states(model: Model, texts: Sequence[str]) -> Tensor:
    """Return the states of texts [texts, tokens, width]."""
    batch = cross_attention_edit.BATCH
    parts = [
        model.encode(texts[start : start + batch]).tensors["states"]
        for start in range(0, len(texts), batch)
    ]
    return torch.cat(parts)


def _layer(denoiser: nn.Module, name: str) -> GatedLayer:
    """Return the matrices of the attention that a layer of keys or values belongs to."""
    attention, _, projection = name.rpartition(".")
    query, key, value, output = (
        denoiser.get_parameter(f"{attention}.{part}.weight").detach()
        for part in ("to_q", "to_k", "to_v", "to_out.0")
    )
    return GatedLayer(
        name,
        "key" if projection == "to_k" else "value",
        query=query,
        key=key,
        value=value,
        output=output,
    )
