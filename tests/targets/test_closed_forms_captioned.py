"""Closed-form edits of PixArt and Sana, whose keys and values read projected states."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import concept_eraser
from concept_eraser import registry
from concept_eraser.models.loading import load
from concept_eraser.recipes import recipe as recipes
from concept_eraser.targets import cross_attention_edit
from tests import families

# their texts differ in letters at the same places only, so that token i is paired with token i
STAR, MOON, HOUSE = "a red star", "a red moon", "a blue house"


@pytest.fixture(scope="module", params=["pixart", "sana"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("captioned") / request.param
    model = load(families.build(request.param, folder))
    model.configure(families.options(request.param))
    return model


def recipe(model: Any, **changes: Any) -> Any:
    content = {
        "model": model.source,
        "forget": {"prompts": [STAR], "anchor": MOON},
        "retain": {"prompts": [HOUSE]},
        "method": "uce",
        "trainable": "cross_attention_kv",
    }
    return recipes.load({**content, **changes})


def attended(model: Any, condition: Any) -> Tensor:
    """What the first layer's keys get in the denoiser's own pass: [tokens of the prompt, width]."""
    inputs: list[Tensor] = []
    layer = model.denoiser.get_submodule("transformer_blocks.0.attn2.to_k")
    hook = layer.register_forward_hook(lambda _, arguments, __: inputs.append(arguments[0]))
    with torch.no_grad():
        model.denoise(torch.randn(1, *model.latent_shape()), torch.tensor([500]), condition)
    hook.remove()
    return inputs[0][0][condition.tensors["mask"][0].bool()]


def test_the_formula_by_hand(model: Any) -> None:
    """W' = (e sum W a c^T + p sum W r r^T + l W) (e sum c c^T + p sum r r^T + l I)^-1."""
    erase, preserve, lamb = 2.0, 0.5, 0.3
    states = {text: attended(model, model.encode([text])) for text in (STAR, MOON, HOUSE)}
    assert len(states[STAR]) == len(states[MOON]) < len(states[HOUSE]), "letters, no padding"
    empty = attended(model, model.null())
    assert len(empty) == 1
    c, a = states[STAR].double().numpy(), states[MOON].double().numpy()
    r = torch.cat([states[HOUSE], empty]).double().numpy()
    names = cross_attention_edit.layers(model, cross_attention_edit.SELECTION)
    assert len(names) == 4
    weights = {name: model.denoiser.get_parameter(name) for name in names}
    before = {name: weight.detach().double().numpy().copy() for name, weight in weights.items()}
    method = registry.build(
        "method", "uce", {"erase_scale": erase, "preserve_scale": preserve, "lamb": lamb}
    )
    originals = {name: weight.detach().clone() for name, weight in weights.items()}
    try:
        cross_attention_edit.edit(method, model, recipe(model), weights)
        for name, w in before.items():
            left = erase * w @ a.T @ c + preserve * w @ r.T @ r + lamb * w
            right = erase * c.T @ c + preserve * r.T @ r + lamb * np.eye(w.shape[1])
            expected = left @ np.linalg.inv(right)
            assert np.abs(expected - w).max() > 1e-3, "the edit shows"
            np.testing.assert_allclose(weights[name].detach().numpy(), expected, atol=1e-5)
        edited = model.denoiser.get_submodule("transformer_blocks.0.attn2.to_k")
        moved = edited(states[STAR]) - edited(states[MOON])
        key = "transformer_blocks.0.attn2.to_k.weight"
        apart = (states[STAR] - states[MOON]) @ originals[key].T
        assert moved.norm() < apart.norm(), "biases cancel"
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(originals[name])


@pytest.mark.parametrize("how", ["all", "context", "from_last", "last"])
@pytest.mark.parametrize("anchor", ["", "a red moon on a hill"])
def test_pairs_stay_inside_of_the_prompts(model: Any, how: Any, anchor: str) -> None:
    job = recipe(model, forget={"prompts": [STAR], "anchor": anchor})
    request = cross_attention_edit.projection_request(model, job, how, {})
    own = {text: attended(model, model.encode([text])) for text in (STAR, "a red moon on a hill")}
    own[""] = attended(model, model.null())
    assert len(request.forget[0]) == len(request.anchor[0]) > 0
    for rows, text in ((request.forget[0], STAR), (request.anchor[0], anchor)):
        distance = torch.cdist(rows.double(), own[text].double()).amin(1)
        assert float(distance.max()) < 1e-4, "each row is a token of its prompt"
    assert request.empty is not None
    torch.testing.assert_close(request.empty, own[""], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", ["uce", "rece", "speed", "oce"])
def test_a_run(method: str, model: Any, tmp_path: Path) -> None:
    if model.family == "sana" and method != "uce":
        pytest.skip("the methods read the same states")
    model = copy.deepcopy(model)  # an edit changes the model in memory
    before = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
    run = concept_eraser.erase(
        model=model,
        forget={"prompts": [STAR], "anchor": MOON},
        retain={"prompts": [HOUSE]},
        method=method,
        trainable="cross_attention_kv",
        output=tmp_path / method,
    )
    tensors = load_file(run.folder / "weights.safetensors")
    assert set(tensors) == set(cross_attention_edit.layers(model, cross_attention_edit.SELECTION))
    for name, value in tensors.items():
        assert torch.isfinite(value).all(), name
        assert float((value - before[name]).abs().max()) > 1e-4, name
