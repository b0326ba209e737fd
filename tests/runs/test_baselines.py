"""The trained baselines of the literature: their losses, elastic weights, negation, and a recipe
each.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import concept_eraser
from concept_eraser import Interrupted, UserError
from concept_eraser.data import batches, prompts
from concept_eraser.erasers import text_encoder
from concept_eraser.erasers.denoiser import Denoiser, DenoiserObjective
from concept_eraser.erasers.elastic import fisher, penalty
from concept_eraser.losses import LossSettings
from concept_eraser.losses.base import preference
from concept_eraser.losses.denoiser import LOSSES
from concept_eraser.models.loading import load
from concept_eraser.recipes import recipe
from concept_eraser.recipes.selections import select
from concept_eraser.targets.adapter import add_adapter
from concept_eraser.tiny import families
from concept_eraser.training.one_pass import OnePass
from tests.conftest import short
from tests.losses.test_losses import eraser, perturb
from tests.small_model import small_sd

RECIPES = ["ca", "erasediff", "fmn", "negation", "npo", "sa", "salun", "spm"]
FEW = [
    "training.steps=2",
    "training.batch_size=2",
    "forget.n=2",
    "generation.steps=1",
    "generation.batch_size=2",
    "training.device=cpu",
]


@pytest.mark.parametrize("name", RECIPES)
def test_its_recipe_trains_two_steps(name: str, tmp_path: Path) -> None:
    job = recipe.load(f"tiny_star_{name}")
    changes = (
        [*FEW, "save=changed"]
        + (["retain.n=2"] if job.retain else [])
        + (["retain.elastic.n=2"] if name == "sa" else [])
    )
    run = concept_eraser.erase(f"tiny_star_{name}", overrides=changes, output=tmp_path)
    rows = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert not any("skipped" in row for row in rows)
    original = load("tiny-sd").denoiser.state_dict()
    weights = load_file(run.folder / "weights.safetensors")
    assert any(not torch.equal(value, original[key]) for key, value in weights.items())


# --- negative preference optimisation -------------------------------------------------------------


def grads(denoiser: Any, loss: str, draw: Any, **settings: Any) -> torch.Tensor:
    value = LOSSES[loss].compute(denoiser, draw, LossSettings(**settings))
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(value, list(denoiser.trainable().values()))]
    )


def test_npo_starts_as_ascent_and_is_ascent_for_small_beta(tiny) -> None:
    denoiser = eraser(tiny, "data")
    draw = denoiser.draw("forget", [1, 2, 3])
    torch.testing.assert_close(
        grads(denoiser, "npo", draw, beta=1e3),
        grads(denoiser, "ascent", draw),
        rtol=1e-4,
        atol=1e-8,
    )
    perturb(tiny)
    torch.testing.assert_close(
        grads(denoiser, "npo", draw, beta=1e-6),
        grads(denoiser, "ascent", draw),
        rtol=1e-4,
        atol=1e-8,
    )
    for _ in range(5):  # up the training loss
        slope = grads(denoiser, "ascent", draw)
        offset = (
            torch.nn.utils.parameters_to_vector(denoiser.trainable().values())
            - 0.5 * slope / slope.norm()
        )
        torch.nn.utils.vector_to_parameters(offset, denoiser.trainable().values())
    strong = grads(denoiser, "npo", draw, beta=1e4)  # these examples are forgotten
    assert float(strong.norm()) < 0.1 * float(grads(denoiser, "ascent", draw).norm())


def test_npo_weighs_each_example_by_its_remaining_likelihood() -> None:
    """The slope is -2 sigmoid(-beta rise), and the value the paper's -(2 / beta) log sigmoid."""
    rise = torch.tensor([-3.0, -0.1, 0.0, 0.2, 50.0], dtype=torch.float64, requires_grad=True)
    for beta in (0.1, 1.0, 20.0):
        value = preference(rise, torch.zeros_like(rise), beta)
        assert float(value) == pytest.approx(
            float((-2 / beta * torch.nn.functional.logsigmoid(beta * rise)).mean())
        )
        (slope,) = torch.autograd.grad(value, rise)
        torch.testing.assert_close(slope, -2 * torch.sigmoid(-beta * rise.detach()) / 5)


def test_npo_of_a_text_encoder(tiny) -> None:
    tokens = tiny.tokenize(["a red star", "a blue star"])
    latents = torch.randn(2, *tiny.latent_shape(), generator=torch.Generator().manual_seed(0))
    objective = text_encoder.TextEncoderObjective(tokens, "npo", latents=latents, beta=2.0)
    names = [name for name, _ in tiny.parts["text_encoder"].named_parameters()]
    encoder = text_encoder.TextEncoder(tiny, {"forget": objective}, names)
    draw = encoder.draw("forget", [3, 4])

    def losses() -> torch.Tensor:
        return (
            (tiny.denoise(draw.noisy, draw.t, tiny.embed(draw.tokens)) - draw.target)
            .square()
            .flatten(1)
            .mean(1)
        )

    before = losses().detach()
    with torch.no_grad():
        for parameter in encoder.trainable().values():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    expected = (-2 / 2.0 * torch.nn.functional.logsigmoid(2.0 * (losses() - before))).mean()
    loss = encoder.loss("forget", draw)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    assert loss.requires_grad
    assert float((losses() - before).abs().min()) > 1e-5


def test_esd_of_a_text_encoder_goes_through_the_denoiser(tiny) -> None:
    """The denoiser's prediction with the trained encoder, against the target from the teacher's
    predictions with the prompt and with the empty prompt.
    """
    tokens = tiny.tokenize(["a red star", "a blue star"])
    latents = torch.randn(2, *tiny.latent_shape(), generator=torch.Generator().manual_seed(0))
    names = [name for name, _ in tiny.parts["text_encoder"].named_parameters()]
    encoder = text_encoder.TextEncoder(
        tiny,
        {"forget": text_encoder.TextEncoderObjective(tokens, "esd", latents=latents, eta=0.7)},
        names,
    )
    draw = encoder.draw("forget", [3, 4])
    empty = tiny.tokenize(["", ""])
    free, conditional = (
        tiny.denoise(draw.noisy, draw.t, tiny.embed(batch)).detach()
        for batch in (empty, draw.tokens)
    )
    with torch.no_grad():
        for parameter in encoder.trainable().values():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    now = tiny.denoise(draw.noisy, draw.t, tiny.embed(draw.tokens))
    loss = encoder.loss("forget", draw)
    torch.testing.assert_close(
        loss, (now - (free - 0.7 * (conditional - free))).square().mean(), rtol=1e-5, atol=1e-7
    )
    assert loss.requires_grad


# --- the start of esd's target --------------------------------------------------------------------


def test_esd_with_neutral_anchor_starts_from_the_anchor(tiny) -> None:
    denoiser = eraser(tiny, "esd")
    draw = denoiser.draw("forget", [1, 2])
    own, other = (
        tiny.denoise(draw.noisy, draw.t, c).detach() for c in (draw.condition, draw.anchor)
    )
    perturb(tiny)
    now = tiny.denoise(draw.noisy, draw.t, draw.condition).detach()
    loss = LOSSES["esd"].compute(denoiser, draw, LossSettings(eta=0.7, neutral="anchor"))
    torch.testing.assert_close(loss.detach(), (now - (other - 0.7 * (own - other))).square().mean())
    assert (
        abs(float(loss) - float(LOSSES["esd"].compute(denoiser, draw, LossSettings(eta=0.7))))
        > 1e-4
    )


# --- concept ablation: the start token ------------------------------------------------------------


def ablating_denoiser(
    model: Any, *, is_start_token_trained: bool, select_names: str = "cross_attention_kv"
) -> Denoiser:
    rows = prompts.load("tiny_star").take(4).prompts
    texts, anchors = [r.text for r in rows], [r.anchor_prompt({"shape": "circle"}) for r in rows]
    latents = torch.randn(4, *model.latent_shape(), generator=torch.Generator().manual_seed(0))
    examples = batches.make_examples(model, texts, latents=latents, anchors=anchors)
    return Denoiser(
        model,
        {
            name: DenoiserObjective(examples, loss)
            for name, loss in (("forget", "anchor"), ("retain", "data"))
        },
        select([name for name, _ in model.denoiser.named_parameters()], select_names),
        is_start_token_trained=is_start_token_trained,
    )


def ablating_gradients(denoiser: Denoiser) -> dict[str, torch.Tensor]:
    loss = denoiser.loss("forget", denoiser.draw("forget", [1, 2]))
    weights = denoiser.trainable()
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def test_a_frozen_start_token_leaves_its_part_out_of_each_gradient(tiny) -> None:
    """The reference is the sum over all tokens but the first of (output's gradient)^T input."""
    denoiser = ablating_denoiser(tiny, is_start_token_trained=True)
    inputs, output_gradients, hooks = {}, {}, []

    def keep(name: str) -> Any:
        def hook(_layer: Any, layer_inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:  # not in the teacher's pass
                inputs[name] = layer_inputs[0].detach()
                output.register_hook(lambda gradient: output_gradients.__setitem__(name, gradient))

        return hook

    for name in denoiser.selected_names:
        layer = tiny.denoiser.get_submodule(name.removesuffix(".weight"))
        hooks.append(layer.register_forward_hook(keep(name)))
    whole = ablating_gradients(denoiser)
    for hook in hooks:
        hook.remove()
    cut = ablating_gradients(ablating_denoiser(tiny, is_start_token_trained=False))
    assert set(cut) == set(inputs) == set(whole)
    for name, gradient in cut.items():
        by_token = torch.einsum("bto,bti->toi", output_gradients[name], inputs[name])
        torch.testing.assert_close(by_token.sum(0), whole[name], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(by_token[1:].sum(0), gradient, rtol=1e-4, atol=1e-7)
    assert any(not torch.allclose(cut[name], whole[name], rtol=0.01) for name in cut)


def test_a_frozen_start_token_changes_no_prediction_and_leaves_no_hook(tiny) -> None:
    plain = ablating_denoiser(tiny, is_start_token_trained=True)
    draw = plain.draw("forget", [1, 2])
    before = plain.predict(draw)
    for end in ("restore", "finish", "absorb"):
        denoiser = ablating_denoiser(tiny, is_start_token_trained=False)
        assert torch.equal(denoiser.predict(draw), before)
        assert any(module._forward_hooks for module in tiny.denoiser.modules())
        getattr(denoiser, end)()
        assert not any(module._forward_hooks for module in tiny.denoiser.modules())


def test_a_frozen_start_token_is_the_same_with_checkpointing_and_in_one_pass(tiny) -> None:
    denoiser = ablating_denoiser(tiny, is_start_token_trained=False)
    expected = ablating_gradients(denoiser)
    tiny.checkpoint(True)
    again = ablating_gradients(denoiser)
    tiny.checkpoint(False)
    draws = {name: denoiser.draw(name, [1, 2]) for name in denoiser.objectives}
    joint = OnePass(denoiser, denoiser.trainable()).gradients(draws, (2, 2))
    denoiser.restore()
    for i, (name, gradient) in enumerate(expected.items()):
        torch.testing.assert_close(again[name], gradient)
        torch.testing.assert_close(joint["forget"][1][i], gradient, rtol=1e-3, atol=1e-6)


def test_a_start_token_is_frozen_in_the_training_of_a_unet_only(tmp_path: Path) -> None:
    frozen = {"trainable": {"select": "cross_attention", "start_token": "frozen"}}
    for changes, why in (
        ({"target": "text_encoder", "trainable": {"start_token": "frozen"}}, "text_encoder"),
        ({**frozen, "method": "uce"}, "'uce', which trains nothing"),
    ):
        with pytest.raises(UserError, match=f"trainable.start_token: frozen.*found .*{why}"):
            recipe.load(short(**changes))
    with pytest.raises(UserError, match="start_token: frozen needs a UNet's cross-attention"):
        concept_eraser.erase(short(model=str(families.build("sd3", tmp_path)), **frozen))


# --- Forget-Me-Not --------------------------------------------------------------------------------


def resteer_denoiser(
    model: Any, *, weight_names: list[str] | None = None, adapter: Any = None, end: bool = False
) -> Denoiser:
    rows = prompts.load("tiny_star").take(4).prompts
    texts, anchors = [r.text for r in rows], [r.anchor_prompt({"shape": "circle"}) for r in rows]
    latents = torch.randn(4, *model.latent_shape(), generator=torch.Generator().manual_seed(0))
    examples = batches.make_examples(model, texts, latents=latents, anchors=anchors)
    examples = replace(examples, positions=model.concept_tokens(texts, anchors, end=end))
    names = weight_names or select(
        [name for name, _ in model.denoiser.named_parameters()], "cross_attention"
    )
    return Denoiser(
        model, {"forget": DenoiserObjective(examples, "resteer")}, names, adapter=adapter
    )


def test_asking_for_attention_changes_no_prediction(tiny) -> None:
    denoiser = resteer_denoiser(tiny)
    draw = denoiser.draw("forget", [1, 2])
    before, predictions = tiny.denoise(draw.noisy, draw.t, draw.condition), []
    hook = tiny.denoiser.register_forward_hook(lambda *call: predictions.append(call[-1].sample))
    maps = denoiser.attention(draw)
    hook.remove()
    assert torch.equal(predictions[0], before)
    assert torch.equal(tiny.denoise(draw.noisy, draw.t, draw.condition), before)
    assert len(maps) == sum(name.endswith("attn2") for name, _ in tiny.denoiser.named_modules())
    for one in maps:
        torch.testing.assert_close(one.sum(-1), torch.ones_like(one.sum(-1)))


def test_attention_of_frozen_weights_in_bf16_needs_no_autocast(tiny) -> None:
    """A mask is measured outside of the training's autocast."""
    denoiser = resteer_denoiser(tiny)
    draw = denoiser.draw("forget", [1, 2])
    weights = {name: part.detach().clone() for name, part in tiny.denoiser.named_parameters()}
    try:
        tiny.denoiser.to(torch.bfloat16)
        tiny.frozen_dtype = torch.bfloat16
        maps = denoiser.attention(draw)
    finally:
        tiny.frozen_dtype = None
        tiny.denoiser.to(torch.float32).load_state_dict(weights, strict=False)
    assert all(torch.isfinite(one).all() for one in maps)


def test_training_lowers_the_attention_on_the_concept(tiny) -> None:
    denoiser = resteer_denoiser(tiny)
    draw, params = denoiser.draw("forget", [1, 2, 3]), list(denoiser.trainable().values())
    first, optimizer = (
        float(denoiser.loss("forget", draw).detach()),
        torch.optim.Adam(params, lr=1e-3),
    )
    for _ in range(15):
        optimizer.zero_grad()
        denoiser.loss("forget", draw).backward()
        optimizer.step()
    assert float(denoiser.loss("forget", draw).detach()) < 0.2 * first


def test_the_gradient_is_the_same_with_checkpointing(tiny) -> None:
    denoiser = resteer_denoiser(tiny)
    draw, params = denoiser.draw("forget", [1, 2]), list(denoiser.trainable().values())
    plain = torch.autograd.grad(denoiser.loss("forget", draw), params, allow_unused=True)
    tiny.checkpoint(True)
    again = torch.autograd.grad(denoiser.loss("forget", draw), params, allow_unused=True)
    tiny.checkpoint(False)
    assert any(float(g.abs().max()) > 0 for g in plain if g is not None)
    for a, b in zip(plain, again, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_steering_does_not_depend_on_how_a_batch_is_split(tiny) -> None:
    """Prompts whose concepts have one, two and three tokens."""
    texts = ["a red star", "a big star", "a big red star", "the big red star"]
    anchors = ["a red circle", "a circle", "a circle", "the circle"]
    examples = batches.make_examples(tiny, texts, latents=None, anchors=anchors)
    positions = tiny.concept_tokens(texts, anchors, end=False)
    assert positions.sum(1).tolist() == [1, 2, 3, 3]
    latents = torch.randn(4, *tiny.latent_shape(), generator=torch.Generator().manual_seed(0))
    examples = replace(examples, latents=latents, positions=positions)
    names = select([name for name, _ in tiny.denoiser.named_parameters()], "cross_attention")
    denoiser = Denoiser(tiny, {"forget": DenoiserObjective(examples, "resteer")}, names)
    weights = [
        parameter
        for name, parameter in denoiser.trainable().items()
        if name.endswith("to_k.weight")
    ]

    def gradient(seeds: list[int]) -> torch.Tensor:
        loss = denoiser.loss("forget", denoiser.draw("forget", seeds))
        parts = torch.autograd.grad(loss, weights, allow_unused=True)
        return torch.cat([part.flatten() for part in parts if part is not None])

    one_by_one = torch.stack([gradient([seed]) for seed in range(8)]).mean(0)
    torch.testing.assert_close(gradient(list(range(8))), one_by_one, rtol=1e-3, atol=1e-6)


def test_a_lora_is_steered_too(tiny) -> None:
    job = recipe.load(short(trainable={"select": "cross_attention", "lora": 2}))
    names = select([name for name, _ in tiny.denoiser.named_parameters()], "cross_attention")
    adapter = add_adapter(job, tiny.denoiser, names)
    denoiser = resteer_denoiser(tiny, weight_names=adapter.tensors, adapter=adapter)
    loss = denoiser.loss("forget", denoiser.draw("forget", [1]))
    gradients = dict(
        zip(
            denoiser.selected_names,
            torch.autograd.grad(loss, list(denoiser.trainable().values()), allow_unused=True),
            strict=True,
        )
    )
    assert all(
        float(g.abs().max()) > 0
        for k, g in gradients.items()
        if "to_k.lora_B" in k and g is not None
    )
    assert any("to_k.lora_B" in key and g is not None for key, g in gradients.items())


def test_which_tokens_are_the_concepts(shared_tiny) -> None:
    words = shared_tiny.words

    def concept_words(text: str, anchor: str | None, *, end: bool = False) -> list[str]:
        ids = shared_tiny.tokenize([text]).tensors["ids"][0]
        mask = shared_tiny.concept_tokens([text], [anchor] if anchor else None, end=end)[0]
        return [words.tokenizer.decode([i]).strip() for i in ids[mask].tolist()]

    assert concept_words("a red star", "a red circle") == ["star"]
    assert concept_words("a big red star", "a circle") == ["big", "red", "star"]
    assert concept_words("a red star", None) == ["a", "red", "star"]
    words_with_end = concept_words("a red star", "a red circle", end=True)
    assert words_with_end[0] == "star"
    assert set(words_with_end[1:]) == {words.tokenizer.decode([words.end]).strip()}
    assert len(words_with_end) == 1 + int(
        (shared_tiny.tokenize(["a red star"]).tensors["ids"] == words.end).sum()
    )
    with pytest.raises(UserError, match="no word that its anchor does not have"):
        concept_words("a red star", "a big red star")


def test_families_that_attend_jointly_have_no_maps(tmp_path: Path) -> None:
    flux = load(str(families.build("flux", tmp_path / "flux")))
    assert flux.attention_layers() == []
    none = batches.Examples(
        None, flux.encode(["a"]), torch.zeros(1, dtype=torch.long), None, None, flux.null()
    )
    names = [name for name, _ in flux.denoiser.named_parameters()][:1]
    with pytest.raises(
        UserError, match="forget: the loss 'resteer' needs a UNet's cross-attention"
    ):
        Denoiser(flux, {"forget": DenoiserObjective(none, "resteer")}, names)


def test_sdxl_is_steered_as_well(tmp_path: Path) -> None:
    model = load(str(families.build("sdxl", tmp_path / "sdxl")))
    denoiser = resteer_denoiser(model, end=True)
    loss = denoiser.loss("forget", denoiser.draw("forget", [1]))
    assert 0 < float(loss.detach()) <= 1
    assert loss.requires_grad


# --- Selective Amnesia ----------------------------------------------------------------------------


def test_fisher_of_a_linear_model_is_known() -> None:
    """For (x w - y)^2 the gradient of an example is 2 x (x w - y)."""
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(7, 3, generator=generator).double(),
        torch.randn(7, generator=generator).double(),
    )
    w = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    (diagonal,) = fisher(
        ((row @ w - target).square() for row, target in zip(x, y, strict=True)), [w]
    )
    torch.testing.assert_close(diagonal, (2 * x * (x @ w - y)[:, None]).square().mean(0).detach())
    (mean,) = torch.autograd.grad((x @ w - y).square().mean(), w)
    # the mean of squared gradients, not the square of their mean
    assert not torch.allclose(diagonal, mean.square())


def test_the_penalty_pulls_each_weight_by_its_fisher() -> None:
    theta, home, weight = (
        torch.tensor(v, dtype=torch.float64) for v in ([1.0, 2.0], [0.0, 3.0], [4.0, 0.5])
    )
    theta.requires_grad_(True)
    value = penalty([theta], [home], [weight])
    assert float(value) == pytest.approx(0.5 * (4 * 1 + 0.5 * 1))
    (slope,) = torch.autograd.grad(value, theta)
    torch.testing.assert_close(slope, weight * (theta.detach() - home))
    # with a forget loss 1/2 sum a (theta - b)^2 the minimum is the mean weighted by a and lambda F
    a, b, lam = torch.tensor([1.0, 3.0]).double(), torch.tensor([5.0, -5.0]).double(), 2.0
    optimizer = torch.optim.SGD([theta], lr=0.1)
    for _ in range(500):
        optimizer.zero_grad()
        (
            0.5 * (a * (theta - b).square()).sum() + lam * penalty([theta], [home], [weight])
        ).backward()
        optimizer.step()
    torch.testing.assert_close(theta.detach(), (a * b + lam * weight * home) / (a + lam * weight))


def test_an_objective_holds_the_weights_its_examples_depend_on(tiny) -> None:
    denoiser = eraser(tiny, "data", elastic=3.0)
    params = list(denoiser.trainable().values())
    denoiser.hold({"forget": [11, 12, 13]})
    each = [
        torch.autograd.grad(
            LOSSES["data"].compute(denoiser, denoiser.draw("forget", [s]), LossSettings()), params
        )
        for s in (11, 12, 13)
    ]
    for i, diagonal in enumerate(denoiser.fisher["forget"]):
        torch.testing.assert_close(diagonal, torch.stack([g[i] for g in each]).square().mean(0))
    draw = denoiser.draw("forget", [1, 2])
    assert float(denoiser.loss("forget", draw)) == float(
        LOSSES["data"].compute(denoiser, draw, LossSettings())
    )  # nothing has moved
    perturb(tiny)
    triples = zip(params, denoiser.originals.values(), denoiser.fisher["forget"], strict=True)
    penalty_value = sum(float((f * (p - o).square()).sum()) for p, o, f in triples) / 2
    plain = float(LOSSES["data"].compute(denoiser, draw, LossSettings()))
    assert penalty_value > 0
    assert float(denoiser.loss("forget", draw)) == pytest.approx(
        plain + 3.0 * penalty_value, rel=1e-5
    )


def amnesia(**changes: Any) -> dict[str, Any]:
    settings = {
        "forget__loss": "relabel",
        "retain__elastic": {"weight": 1e3, "n": 4},
        "method": {"name": "weighted"},
    }
    return short(
        **{**settings, **({} if "training" in changes else {"training__lr": 1e-3}), **changes}
    )


def distance(folder: Path) -> float:
    original = load(small_sd()).denoiser.state_dict()
    return sum(
        float((v - original[k]).square().sum())
        for k, v in load_file(folder / "weights.safetensors").items()
    )


def test_elastic_weights_stay_nearer_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    elastic = concept_eraser.erase(amnesia(), output=tmp_path / "held").folder
    free = concept_eraser.erase(amnesia(retain__elastic=None), output=tmp_path / "free").folder
    stiff = concept_eraser.erase(
        amnesia(retain__elastic={"weight": 1e8, "n": 4}), output=tmp_path / "stiff"
    ).folder
    assert distance(stiff) < distance(elastic) < distance(free)

    def stop(step: int, seconds: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        concept_eraser.erase(amnesia(), output=tmp_path / "cut", on_step=stop)
    again = concept_eraser.erase(amnesia(), output=tmp_path / "cut", resume=True).folder
    one, other = (load_file(folder / "weights.safetensors") for folder in (elastic, again))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_micro_batches_count_the_penalty_once(tmp_path: Path) -> None:
    def train(batch_size: int, micro_batches: int) -> dict[str, torch.Tensor]:
        training = {
            "steps": 3,
            "lr": 1e-3,
            "device": "cpu",
            "batch_size": batch_size,
            "micro_batches": micro_batches,
        }
        job = amnesia(training=training, retain__elastic={"weight": 1e5, "n": 4})
        run = concept_eraser.erase(job, output=tmp_path / str(batch_size))
        return load_file(run.folder / "weights.safetensors")

    whole, parts = train(4, 1), train(1, 4)
    for key, value in whole.items():
        torch.testing.assert_close(value, parts[key], rtol=1e-3, atol=2e-5)


# --- negation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "select", [{"select": "cross_attention"}, {"select": "cross_attention", "lora": 2}]
)
def test_negation_subtracts_what_training_added(select: dict, tmp_path: Path) -> None:
    """W_negated = W* - s (W - W*), for weights and for a LoRA with its saved factors."""
    job = short(
        forget__loss="data",
        retain=None,
        method={"name": "weighted", "retain": 0.0},
        training__lr=1e-2,
        save="changed",
    )
    plain_run = concept_eraser.erase({**job, "trainable": select}, output=tmp_path / "learned")
    negated_run = concept_eraser.erase(
        {**job, "trainable": {**select, "negate": 0.7}}, output=tmp_path / "turned"
    )
    original = load(small_sd()).denoiser.state_dict()
    plus, minus = (
        load_file(run.folder / "weights.safetensors") for run in (plain_run, negated_run)
    )
    for key, value in plus.items():
        torch.testing.assert_close(
            minus[key], original[key] - 0.7 * (value - original[key]), rtol=1e-4, atol=1e-6
        )
    assert max(float((v - original[k]).abs().max()) for k, v in minus.items()) > 1e-3
    if "lora" in select:
        again = concept_eraser.load(
            negated_run.folder / "lora", base=small_sd()
        ).denoiser.state_dict()
        for key in minus:
            torch.testing.assert_close(again[key], minus[key], rtol=1e-4, atol=1e-6)


# --- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"forget__neutral": "anchor"},
            "neutral is a setting of the loss 'esd', found loss 'anchor'",
        ),
        ({"forget__tokens": "concept"}, "tokens is a setting of the loss 'resteer'"),
        (
            {"forget__loss": "esd", "forget__anchor": None, "forget__neutral": "anchor"},
            "neutral: anchor needs an anchor",
        ),
        ({"forget__loss": "npo", "forget__images": "free"}, "'npo' needs images"),
        (
            {"forget__images": "free", "forget__elastic": {"weight": 1.0}},
            "elastic measures how the training loss on images",
        ),
        (
            {"forget__loss": "ascent", "forget__empty_prompts": 0.2},
            r"empty_prompts needs a loss that preserves .*found 'ascent'",
        ),
        (
            {"forget__loss": "data", "forget__empty_prompts": 0.2},
            r"empty_prompts needs a loss that preserves .*found 'data'",
        ),
        ({"forget__empty_prompts": 1.0}, "less than 1"),
        (
            {"forget__empty_prompts": 0.2, "forget__images": "free"},
            "it cannot be used with images: free",
        ),
        (
            {"forget__empty_prompts": 0.2, "forget__teacher": "current"},
            "it cannot be used with teacher: current",
        ),
        (
            {"target": "text_encoder", "forget__empty_prompts": 0.2},
            "does not use empty_prompts",
        ),
        ({"retain__elastic": {"weight": 1.0}, "trainable__lora": 2}, "elastic is a penalty"),
        ({"retain__elastic": {"weight": 0.0}}, "greater than 0"),
        (
            {"target": "text_encoder", "retain__elastic": {"weight": 1.0}},
            "retain: the target 'text_encoder' does not use elastic",
        ),
        (
            {"target": "text_encoder", "forget__loss": "resteer"},
            "unknown loss of target 'text_encoder' 'resteer'",
        ),
        ({"trainable__negate": 1.0}, "found forget.loss: anchor; a retain objective"),
    ],
)
def test_settings_that_do_not_fit_are_errors(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        recipe.load(short(**changes))


def test_empty_prompts_preserve_the_unconditional_prediction(tmp_path: Path) -> None:
    """All weights learn to predict for `blue` what they predicted for `green`. Without empty
    prompts the unconditional prediction changes in the same direction, and guidance, the difference
    to it, loses the erasure. With empty prompts that change is less than half as large.
    """

    def train(share: float) -> tuple[float, float]:
        content = short(
            model="tiny-sd",
            forget={
                "prompts": ["a blue circle", "a blue heart"],
                "loss": "anchor",
                "anchor": "a green circle",
                "n": 16,
                "empty_prompts": share,
            },
            retain__prompts=["a red circle", "a green heart"],
            trainable__select="all",
            training__steps=20,
            training__batch_size=8,
            training__lr=3e-4,
        )
        run = concept_eraser.erase(content, output=tmp_path / str(share))
        shares = []
        original, model = load("tiny-sd"), run.model
        noise = torch.randn(8, *original.latent_shape(), generator=torch.Generator().manual_seed(0))
        conditions = [
            original.encode([text] * 8) for text in ("", "a blue circle", "a green circle")
        ]
        with torch.no_grad():
            # half an image
            x, t = original.partial(
                noise, conditions[1], conditions[0], stop=6, steps=12, guidance=5.0
            )
            (none, blue, green), (none_after, blue_after) = (
                [m.denoise(x, t, c) for c in conditions[:k]] for m, k in ((original, 3), (model, 2))
            )
        way = green - blue
        for difference in (none_after - none, blue_after - blue):
            shares.append(float((difference * way).sum() / way.square().sum()))
        return shares[0], shares[1]

    without, with_prompt = train(0.0)
    with_them, with_prompt_too = train(0.5)
    assert min(with_prompt, with_prompt_too) > 0.4
    assert without > 0.5  # the unconditional prediction follows
    assert with_them < 0.5 * without


def test_older_recipes_have_the_same_fingerprint() -> None:
    """New settings are in a resolved recipe only where it uses them."""
    objective = recipe.load("tiny_star_munba").resolved()
    assert not {"neutral", "tokens", "elastic", "beta", "empty_prompts"} & (
        set(objective["forget"]) | set(objective["retain"])
    )
    assert "negate" not in objective["trainable"]
    assert recipe.load("tiny_star_sa").resolved()["retain"]["elastic"] == {"weight": 1e4, "n": 200}
