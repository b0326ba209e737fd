"""Losses against formulas written out by hand on the real UNet; selection of weights; the frozen
teacher.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean

import pytest
import torch
from torch import Tensor

from concept_eraser.data import batches, prompts
from concept_eraser.erasers.denoiser import Denoiser, DenoiserObjective
from concept_eraser.losses import LossSettings
from concept_eraser.losses.denoiser import LOSSES
from concept_eraser.recipes import recipe
from concept_eraser.recipes.selections import select
from concept_eraser.training.closure import of_step
from concept_eraser.training.memory import Peak
from concept_eraser.utils.errors import UserError


def eraser(
    model, loss: str, *, settings: LossSettings = LossSettings(), latents: bool = True, **options
) -> Denoiser:
    rows = prompts.load("tiny_star").take(6).prompts
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(6, *model.latent_shape(), generator=generator) if latents else None
    examples = batches.make_examples(
        model,
        [r.text for r in rows],
        latents=clean,
        anchors=[r.anchor_prompt({"shape": "circle"}) for r in rows],
    )
    names = [name for name, _ in model.denoiser.named_parameters()]
    return Denoiser(
        model,
        {"forget": DenoiserObjective(examples, loss, settings, **options)},
        select(names, "cross_attention"),
    )


def perturb(model) -> None:
    """Move the trained weights, so that model and frozen teacher differ."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))


def mse(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().mean())


def a_quarter(images: Tensor) -> Tensor:
    """A differentiable judge that gives every image a probability of 1/4 to show the concept."""
    return 0.25 + 0 * images.flatten(1).mean(1)


def attention_maps(model, draw) -> list[Tensor]:
    """The maps [batch, heads, places, tokens] of diffusers' explicit attention."""
    from diffusers.models.attention_processor import AttnProcessor

    scores, processors = [], {}
    for name, layer in model.denoiser.named_modules():
        if name.endswith("attn2"):
            processors[layer] = layer.processor
            layer.set_processor(AttnProcessor())
            plain = layer.get_attention_scores
            layer.get_attention_scores = lambda *args, plain=plain: (
                scores.append(plain(*args)) or scores[-1]
            )
    model.denoise(draw.noisy, draw.t, draw.condition)
    for layer, processor in processors.items():
        layer.set_processor(processor)
        del layer.get_attention_scores
    return [maps.unflatten(0, (len(draw.noisy), -1)).detach() for maps in scores]


def test_losses_are_their_formulas(tiny) -> None:
    denoiser = eraser(tiny, "data")
    draw = denoiser.draw("forget", [1, 2, 3])
    positions = torch.zeros(3, draw.condition.tensors["states"].shape[1], dtype=torch.bool)
    positions[0, 2] = positions[1, 3] = positions[1, 4] = positions[2, 1] = True
    mixture = ((1.0, draw.null), (2.5, draw.anchor), (-2.5, draw.condition))
    draw = replace(draw, positions=positions, mixture=mixture)
    before = {
        name: tiny.denoise(draw.noisy, draw.t, c).detach()
        for name, c in (("own", draw.condition), ("anchor", draw.anchor), ("null", draw.null))
    }
    perturb(tiny)
    now = tiny.denoise(draw.noisy, draw.t, draw.condition).detach()
    rise = [
        0.5 * (mse(now[i], draw.target[i]) - mse(before["own"][i], draw.target[i]))
        for i in range(3)
    ]
    attention = [  # of each layer: of each example the mean over its own tokens
        mean(
            mean([float(a[b, :, :, k].square().mean()) for k in positions[b].nonzero().flatten()])
            for b in range(3)
        )
        for a in attention_maps(tiny, draw)
    ]
    expected = {
        "data": mse(now, draw.target),
        "ascent": -mse(now, draw.target),
        "anchor": mse(now, before["anchor"]),
        "distill": mse(now, before["own"]),
        "esd": mse(now, before["null"] - 2.0 * (before["own"] - before["null"])),
        "relabel": mse(now, draw.target),
        "npo": mean([-2 / 0.5 * math.log(1 / (1 + math.exp(-x))) for x in rise]),
        "resteer": mean(attention),
        "slider": mse(now, before["null"] + 2.5 * (before["anchor"] - before["own"])),
        "stereo": mse(
            now, before["null"]
        ),  # without attacks; tests/methods/test_stereo.py has them
        "histogram": 0.75 * math.log(0.75 / 0.9) + 0.25 * math.log(0.25 / 0.1),
    }
    # test_trajectory.py beside this has the loss of whole trajectories
    assert expected.keys() == LOSSES.keys() - {"balance"}
    for name, value in expected.items():
        loss = LOSSES[name].compute(
            denoiser, draw, LossSettings(eta=2.0, shows=a_quarter, alpha=0.1, beta=0.5)
        )
        assert float(loss) == pytest.approx(value, rel=1e-5), name
        assert loss.requires_grad


def test_saluns_and_erasediffs_loss_is_the_authors_line_by_line(tiny) -> None:
    """criteria(model(noisy, t, prompt), model(noisy, t, other prompt).detach()), value and slope.

    The images are those of the concept, and one model gives both predictions.
    """
    for name in ("tiny_star_salun", "tiny_star_erasediff"):
        job = recipe.load(name)
        spec = job.forget
        assert (spec.loss, spec.teacher, spec.noised) == ("anchor", "current", None), name
        assert LOSSES["anchor"].images == "own"
        assert job.retain.loss == "data"
    denoiser = eraser(tiny, "anchor", settings=LossSettings(teacher="current"))
    draw = denoiser.draw("forget", [1, 2, 3])
    perturb(tiny)
    weights = list(denoiser.trainable().values())
    loss = denoiser.loss("forget", draw)
    slopes = torch.autograd.grad(loss, weights)

    clean = denoiser.objective_by_name["forget"].examples.latents
    noise, t = [], []
    for seed in (1, 2, 3):
        generator = torch.Generator().manual_seed(seed)
        row = int(torch.randint(len(clean), (1,), generator=generator))
        noise.append((row, torch.randn(1, *tiny.latent_shape(), generator=generator)))
        t.append(int(torch.randint(0, 1000, (1,), generator=generator)))
    rows = [row for row, _ in noise]
    noisy = tiny.corrupt(clean[rows], torch.cat([n for _, n in noise]), torch.tensor(t))
    texts = [r.text for r in prompts.load("tiny_star").take(6).prompts]
    stars = tiny.encode([texts[row] for row in rows])
    circles = tiny.encode([texts[row].replace("star", "circle") for row in rows])
    forget_out = tiny.denoise(noisy, torch.tensor(t), stars)
    pseudo_out = tiny.denoise(noisy, torch.tensor(t), circles).detach()
    by_hand = torch.nn.MSELoss()(forget_out, pseudo_out)
    torch.testing.assert_close(loss, by_hand, rtol=1e-5, atol=0)
    for slope, other in zip(slopes, torch.autograd.grad(by_hand, weights), strict=True):
        torch.testing.assert_close(slope, other, rtol=1e-4, atol=1e-9)
    # of the model before the training the target is another one
    frozen = LOSSES["anchor"].compute(denoiser, draw, LossSettings(teacher="frozen"))
    assert abs(float(frozen) / float(loss) - 1) > 1e-2


def test_ants_step_is_the_authors_line_by_line(tiny) -> None:
    """train_ant_single.py, lines 175-207, with the times and terms that the recipe names.

    Late and middle times: a prompt goes to ESD's target, away from the concept. Early times: to the
    original's prediction. Examples of the empty prompt go to the original's prediction at any time.
    """
    job = recipe.load("tiny_star_ant")
    plain = eraser(tiny, "esd").objective_by_name["forget"].examples
    objectives = {}
    for name, spec in (("forget", job.forget), ("replace", job.replace)):
        examples = replace(plain, empty=spec.empty_prompts)
        settings = LossSettings(eta=spec.eta)
        objectives[name] = DenoiserObjective(
            examples, spec.loss, settings, timesteps=spec.timesteps
        )
    names = [name for name, _ in tiny.denoiser.named_parameters()]
    denoiser = Denoiser(tiny, objectives, select(names, "cross_attention"))
    draws = {name: [denoiser.draw(name, range(12))] for name in objectives}
    states = {name: some[0].condition.tensors["states"] for name, some in draws.items()}
    null = tiny.null().tensors["states"]
    empty = {name: [torch.equal(row, null[0]) for row in rows] for name, rows in states.items()}
    original = {
        name: [tiny.denoise(some[0].noisy, some[0].t, c).detach() for c in conditions(some[0])]
        for name, some in draws.items()
    }
    perturb(tiny)

    def by_hand() -> Tensor:
        errors = []
        for name, (draw,) in draws.items():
            own, nothing = original[name]
            now = tiny.denoise(draw.noisy, draw.t, draw.condition)
            for i, t in enumerate(draw.t.tolist()):
                is_early = t >= 860
                assert is_early == (name == "replace")
                away = nothing[i] - 1.0 * (own[i] - nothing[i])
                target = own[i] if is_early or empty[name][i] else away
                errors.append((now[i] - target).square().mean())
        return torch.stack(errors[:12]).mean() + torch.stack(errors[12:]).mean()

    assert all(0 < sum(flags) < 12 for flags in empty.values())
    params = tuple(denoiser.trainable().values())
    direction = job.method.build().direction(of_step(denoiser, params, draws))
    for ours, theirs in zip(direction.vec, torch.autograd.grad(by_hand(), params), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-8)


def conditions(draw) -> tuple:
    return draw.condition, draw.null


def test_noxattn_are_the_authors_parameters(tiny) -> None:
    """Not cross-attention, `out.` (norm and convolution) or `time_embed` of CompVis' names."""
    names = [name for name, _ in tiny.denoiser.named_parameters()]
    left_out = set(select(names, "all_but_cross_attention")) - set(select(names, "noxattn"))
    assert {n.split(".")[0] for n in left_out} == {"conv_norm_out", "conv_out", "time_embedding"}
    assert {
        n for n in names if n.startswith(("conv_norm_out.", "conv_out.", "time_embedding."))
    } == (left_out)
    assert not any(".attn2." in n for n in select(names, "noxattn"))
    # the projections of the time embedding in each block are trained: emb_layers in CompVis' names
    assert any(".time_emb_proj." in n for n in select(names, "noxattn"))
    for name in ("esd", "erasediff", "munba", "sa"):
        assert recipe.load(f"sd14_nudity_{name}").trainable.select == "noxattn"


def test_current_teacher_is_the_model_itself(tiny) -> None:
    denoiser = eraser(tiny, "distill", settings=LossSettings(teacher="current"))
    draw = denoiser.draw("forget", [1, 2])
    perturb(tiny)
    assert float(denoiser.loss("forget", draw)) == 0
    assert float(LOSSES["distill"].compute(denoiser, draw, LossSettings(teacher="frozen"))) > 1e-4


def test_the_teacher_gets_no_gradient_and_the_model_does(tiny) -> None:
    denoiser = eraser(tiny, "anchor")
    loss = denoiser.loss("forget", denoiser.draw("forget", [3]))
    grads = torch.autograd.grad(loss, list(denoiser.trainable().values()))
    assert all(torch.isfinite(g).all() for g in grads)
    assert sum(float(g.abs().sum()) for g in grads) > 0


@pytest.mark.parametrize("loss", ["anchor", "distill"])
def test_a_teacher_works_while_no_activations_are_stored(tiny, loss: str) -> None:
    """The pass needs the memory of the training loss, and that of the teacher's prediction."""
    denoiser = eraser(tiny, loss)
    draw = denoiser.draw("forget", [1, 2])
    peaks = []
    for run in (
        lambda: denoiser.training_loss("forget", draw),
        lambda: denoiser.loss("forget", draw),
        lambda: denoiser.losses({"forget": draw})["forget"],
    ):
        with Peak() as counter:
            run()
        peaks.append(counter.peak)
    few = 8 * draw.noisy.nbytes
    assert few < 0.05 * peaks[0]
    assert max(peaks) <= peaks[0] + few


def test_autocast_stores_no_weights_of_a_teacher(tiny) -> None:
    """Copies without gradients would otherwise be used for the model in training."""
    denoiser = eraser(tiny, "anchor", settings=LossSettings(teacher="current"))
    with torch.autocast("cpu", torch.bfloat16):
        with denoiser.weights_of("current"):
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()
        loss = denoiser.loss("forget", denoiser.draw("forget", [3]))
    gradients = torch.autograd.grad(loss, list(denoiser.trainable().values()), allow_unused=True)
    assert all(one is not None and one.any() for one in gradients)


def test_scale_and_timesteps(tiny) -> None:
    denoiser = eraser(tiny, "anchor", scale=100.0, timesteps=(600, 700))
    plain = Denoiser(
        tiny,
        {
            "forget": DenoiserObjective(
                denoiser.objective_by_name["forget"].examples, "anchor", timesteps=(600, 700)
            )
        },
        denoiser.selected_names,
    )
    draw = denoiser.draw("forget", list(range(20)))
    assert 600 <= int(draw.t.min()) <= int(draw.t.max()) < 700
    assert float(denoiser.loss("forget", draw)) == pytest.approx(
        100 * float(plain.loss("forget", draw)), rel=1e-5
    )


def test_an_example_draws_from_its_own_seed(tiny) -> None:
    """The split into micro-batches does not change the noise and the timestep of an example."""
    denoiser = eraser(tiny, "data")
    whole = denoiser.draw("forget", [5, 6, 7, 8])
    parts = [denoiser.draw("forget", [5, 6]), denoiser.draw("forget", [7, 8])]
    torch.testing.assert_close(whole.noisy, torch.cat([p.noisy for p in parts]), rtol=0, atol=0)
    assert whole.t.tolist() == [*parts[0].t.tolist(), *parts[1].t.tolist()]
    assert not torch.equal(whole.noisy[0], whole.noisy[1])


def test_data_free_draws_come_from_the_model(tiny) -> None:
    denoiser = eraser(tiny, "anchor", latents=False)
    draw = denoiser.draw("forget", [1, 2])
    assert draw.target is None
    assert torch.isfinite(draw.noisy).all()
    assert len(set(draw.t.tolist())) == 1
    with pytest.raises(
        UserError,
        match=r"cannot be data-free; data-free losses: anchor, balance, distill, esd, histogram",
    ):
        eraser(tiny, "ascent", latents=False)


def test_selections(tiny) -> None:
    names = [name for name, _ in tiny.denoiser.named_parameters()]
    selections = {
        key: set(select(names, key))
        for key in (
            "all",
            "cross_attention",
            "cross_attention_kv",
            "self_attention",
            "all_but_cross_attention",
        )
    }
    assert selections["all"] == set(names)
    assert (
        selections["cross_attention"] | selections["all_but_cross_attention"] == selections["all"]
    )
    assert not selections["cross_attention"] & selections["all_but_cross_attention"]
    assert selections["cross_attention_kv"] < selections["cross_attention"]
    assert not selections["self_attention"] & selections["cross_attention"]
    assert select(names, r"re:^conv_in") == [n for n in names if n.startswith("conv_in")]
    with pytest.raises(UserError, match="matches none"):
        select(names, "re:nothing_like_this")


def test_only_selected_weights_require_gradients(tiny) -> None:
    denoiser = eraser(tiny, "data")
    assert {n for n, p in tiny.denoiser.named_parameters() if p.requires_grad} == set(
        denoiser.selected_names
    )
