"""Closures on the real pipeline: Hessian products, an adversary on the embedding, more than two
objectives.
"""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import concept_eraser
from concept_eraser import UserError, registry
from concept_eraser.erasers.denoiser import Denoiser
from concept_eraser.methods.base import Direction
from concept_eraser.methods.checks import flat
from concept_eraser.methods.uno import Uno
from concept_eraser.methods.vectors import Vec, dot
from concept_eraser.models.base import Condition
from concept_eraser.recipes import recipe
from concept_eraser.runs.job import Job
from concept_eraser.training import log as logs
from concept_eraser.training.closure import LossClosure, of_step
from concept_eraser.training.engine import Engine
from concept_eraser.utils.progress import silent
from tests.conftest import short


def closure_of(tiny, tmp_path, **changes) -> LossClosure:
    job = Job(recipe.load(short(**changes)), tiny, tmp_path, silent)
    eraser = job.eraser()
    params = (*eraser.trainable().values(), *eraser.adversary().values())
    draws = {objective: [eraser.draw(objective, [1, 2, 3, 4])] for objective in eraser.objectives}
    return of_step(eraser, params, draws, inner=range(len(eraser.trainable()), len(params)))


# the adversary is on the text encoder's output or, if the text encoder is trained, on its input
# tokens
ADVERSARIES = [{}, {"target": "text_encoder", "trainable__select": "all"}]
ON = ["denoiser", "text encoder"]


def relative(actual: Vec, expected: Vec) -> float:
    difference = tuple(a - b for a, b in zip(actual, expected, strict=True))
    return float((dot(difference, difference) / dot(expected, expected)).sqrt())


@pytest.mark.parametrize("select", ["cross_attention", "all"])
def test_two_products_are_the_joint_double_backward_on_the_unet(
    tiny, tmp_path, select: str
) -> None:
    """grad cos^2 on the bundled UNet: by differences through fused attention, by exact products of
    each loss, and by one joint double backward.
    """
    closure = closure_of(tiny, tmp_path, forget__loss="data", trainable__select=select)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        grads = [
            torch.autograd.grad(closure._pieces[p][0](), closure.params, create_graph=True)
            for p in ("retain", "forget")
        ]
        a, b = flat(grads[0]), flat(grads[1])
        expected = torch.autograd.grad((a @ b) ** 2 / (a @ a) / (b @ b), closure.params)
    retain = closure.grad("retain")
    for hvp in ("exact", "difference"):
        vec = Uno(hvp=hvp, strength=1.0, reduction="mean").direction(closure).vec
        turn = tuple(f - r for f, r in zip(vec, retain, strict=True))
        assert relative(turn, expected) < 1e-3, hvp


def test_exact_products_through_an_operator_without_a_second_derivative_are_refused() -> None:
    """The fused attention kernel of the CPU, called directly."""
    w = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    closure = LossClosure((w,), {"retain": [lambda: operator(w, w, w)[0].square().sum()]})
    with pytest.raises(UserError, match="use hvp: difference"):
        closure.hvp("retain", (torch.ones_like(w),), "exact")
    plain = LossClosure(
        (w,),
        {
            "retain": [
                lambda: torch.nn.functional.scaled_dot_product_attention(w, w, w).square().sum()
            ]
        },
    )
    exact = plain.hvp("retain", (torch.ones_like(w),), "exact")
    assert relative(closure.hvp("retain", (torch.ones_like(w),)), exact) < 1e-3


@pytest.mark.parametrize("where", ADVERSARIES, ids=ON)
def test_the_adversary_shifts_the_forgotten_prompts_and_nothing_else(
    tiny, tmp_path, where: dict
) -> None:
    closure = closure_of(tiny, tmp_path, method={"name": "forum"}, attack={"n": 8}, **where)
    assert closure.objectives == ("retain", "forget", "attack")
    delta = closure.params[-1]
    assert closure.inner == (len(closure.params) - 1,)
    quiet = {objective: float(closure._pieces[objective][0]()) for objective in closure.objectives}
    with torch.no_grad():
        delta.normal_(generator=torch.Generator().manual_seed(0))
    loud = {objective: float(closure._pieces[objective][0]()) for objective in closure.objectives}
    assert loud["retain"] == quiet["retain"]
    assert loud["forget"] != quiet["forget"]
    assert loud["attack"] > quiet["attack"], (
        "noise on the embedding makes the star's images less likely"
    )
    assert float(closure.grad("attack", of=closure.inner)[0].norm()) > 0


@pytest.mark.parametrize("where", ADVERSARIES, ids=ON)
@pytest.mark.parametrize("loss", ["esd", "anchor"])
def test_under_attack_the_teacher_gets_the_clean_prompt(
    tiny, tmp_path, loss: str, where: dict
) -> None:
    """The gradient along delta agrees with central differences of the loss, which it would not if
    the target depended on delta.
    """
    closure = closure_of(
        tiny, tmp_path, method={"name": "forum"}, attack={"n": 8}, forget__loss=loss, **where
    )
    delta = closure.params[-1]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        delta.normal_(generator=generator)
    along = torch.randn(delta.shape, generator=generator)
    slope = float((closure.grad("forget", of=closure.inner)[0] * along).sum())
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            delta.add_(sign * 0.01 * along)
            values.append(float(closure._pieces["forget"][0]()))
            delta.sub_(sign * 0.01 * along)
    assert slope == pytest.approx((values[0] - values[1]) / 0.02, rel=0.02)


@pytest.mark.parametrize("where", ADVERSARIES, ids=ON)
def test_the_warm_up_has_no_attack_and_then_the_forget_loss_is_under_it_alone(
    tiny, tmp_path, where: dict
) -> None:
    """AdvUnlearn: warmup steps of the loss alone, then the loss under attack alone."""
    attack = {"n": 8, "warmup": 3, "forget": "attacked", "loss": "prediction", "decay": 0.0}
    job = Job(
        recipe.load(short(method={"name": "adversarial"}, attack=attack, **where)),
        tiny,
        tmp_path,
        silent,
    )
    eraser = job.eraser()
    (delta,) = eraser.adversary().values()
    draws = {name: eraser.draw(name, [1, 2]) for name in ("forget", "attack")}

    def losses(step: int | None) -> dict[str, float]:
        eraser.turn(step)
        return {name: float(eraser.loss(name, draw).detach()) for name, draw in draws.items()}

    clean = losses(0)
    assert clean["attack"] == 0
    eraser.turn(3)
    # at the original weights the model predicts what the original predicts
    assert float(eraser.loss("attack", draws["attack"]).detach()) == pytest.approx(0, abs=1e-9)
    with torch.no_grad():
        delta.normal_(generator=torch.Generator().manual_seed(0))
    for step in (None, 0, 2):
        assert losses(step) == clean, "neither the attack nor the offset counts"
        eraser.turn(step)
        (slope,) = torch.autograd.grad(eraser.loss("attack", draws["attack"]), [delta])
        assert not slope.any(), "so Adam leaves it where it is"
    under = losses(3)
    assert under["forget"] != clean["forget"]
    assert under["attack"] > 0
    eraser.attack = replace(eraser.attack, is_sum=True)
    assert losses(3)["forget"] == pytest.approx(under["forget"] + clean["forget"], rel=1e-5)
    assert losses(2)["forget"] == pytest.approx(2 * clean["forget"], rel=1e-5)


def test_both_branches_have_an_offset_each(tiny, tmp_path) -> None:
    """The losses are those by hand: of the prompts at one offset, and of the empty prompt at the
    other, with the original's predictions for both without an offset.
    """
    attack = {"n": 8, "both_branches": True, "decay": 0.0, "warmup": 3}
    content = short(method={"name": "forum"}, attack=attack, forget__loss="anchor")
    eraser = Job(recipe.load(content), tiny, tmp_path, silent).eraser()
    (delta,) = eraser.adversary().values()
    draws = {name: eraser.draw(name, [1, 2]) for name in ("retain", "forget", "attack")}
    forget = draws["forget"]

    def losses(step: int) -> dict[str, float]:
        eraser.turn(step)
        return {name: float(eraser.loss(name, draw).detach()) for name, draw in draws.items()}

    def error(name: str, states: torch.Tensor, target: torch.Tensor) -> float:
        draw = draws[name]
        with torch.no_grad():
            prediction = tiny.denoise(draw.noisy, draw.t, Condition({"states": states}))
        return float((prediction - target).square().mean())

    assert delta.shape == (2, *forget.condition.tensors["states"].shape[1:])
    with torch.no_grad():
        prompts_target, empty_target = (
            tiny.denoise(forget.noisy, forget.t, one) for one in (forget.anchor, forget.null)
        )
    before = losses(3)
    plain = error("forget", forget.condition.tensors["states"], prompts_target)
    assert before["forget"] == pytest.approx(2 * plain, rel=1e-5), "no offset, no change"
    assert losses(0)["attack"] == 0
    with torch.no_grad():
        delta.normal_(generator=torch.Generator().manual_seed(0))
    assert losses(0)["forget"] == before["forget"], "the warm-up has no offset"
    after = losses(3)
    assert after["retain"] == before["retain"]
    states, null = (one.tensors["states"] for one in (forget.condition, forget.null))
    shifted = [states + delta[0].detach(), null + delta[1].detach()]
    expected = error("forget", shifted[0], prompts_target) + error(
        "forget", shifted[1], empty_target
    )
    assert after["forget"] == pytest.approx(plain + expected, rel=1e-5)
    draw = draws["attack"]
    expected = sum(
        error("attack", one.tensors["states"] + row, draw.target)
        for one, row in zip((draw.condition, draw.null), delta.detach(), strict=True)
    )
    assert after["attack"] == pytest.approx(expected, rel=1e-5)
    (slope,) = torch.autograd.grad(eraser.loss("attack", draw), [delta])
    assert slope.flatten(1).norm(dim=1).gt(0).all(), "each offset is learned"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "text_encoder", "trainable__select": "all"}, "found target 'text_encoder'"),
        ({"attack": {"loss": "prediction"}}, "needs attack.loss: noise"),
        ({"forget__loss": "data"}, "found loss: data"),
        ({"forget__teacher": "current"}, "teacher: current"),
    ],
)
def test_both_branches_need_an_unconditional_prediction_to_preserve(
    changes: dict, message: str
) -> None:
    attack = {"both_branches": True, **changes.pop("attack", {})}
    with pytest.raises(UserError, match=message):
        recipe.load(
            short(**{"forget__loss": "anchor", **changes}, method={"name": "forum"}, attack=attack)
        )


def test_an_attack_on_the_prompts_alone_keeps_its_fingerprint() -> None:
    """Stored runs have no such key."""
    assert "both_branches" not in recipe.load("tiny_star_forum").resolved()["attack"]
    both = recipe.load("tiny_star_forum", ["attack.both_branches=true"])
    assert both.resolved()["attack"]["both_branches"] is True
    assert both.fingerprint != recipe.load("tiny_star_forum").fingerprint


def test_learned_tokens_stand_before_the_prompt(tiny, tmp_path) -> None:
    """Their embeddings are AdvUnlearn's: [start, learned, prompt, end], anew in each step."""
    content = short(
        method={"name": "adversarial"},
        target="text_encoder",
        trainable__select="all",
        forget__loss="esd",
        attack={"n": 8, "tokens": 2, "forget": "attacked", "loss": "prediction"},
    )
    eraser = Job(recipe.load(content), tiny, tmp_path, silent).eraser()
    (delta,) = eraser.adversary().values()
    assert delta.shape == (1, 2, tiny.table.shape[1])
    starts = []
    for step in (5, 6, 5):
        eraser.turn(step)
        starts.append(delta.detach().clone())
    assert torch.equal(starts[0], starts[2]), "so a resumed run has the same"
    assert not torch.equal(starts[0], starts[1])
    usable = tiny.words.usable.nonzero()[:, 0]
    assert all((tiny.table[usable] == row).all(1).any() for row in starts[0][0])

    chosen = [
        int(usable[(tiny.table[usable] == row).all(1).nonzero()[0, 0]]) for row in starts[0][0]
    ]
    texts = ["a red star", "a small star on grey"]
    tokens = tiny.tokenize(texts)
    under_attack = eraser.embed(tokens, is_attacked=True).tensors["states"]
    typed = tiny.words.pack([[*chosen, *tiny.words.ids(text)] for text in texts])
    by_hand = tiny.embed(Condition({"ids": typed})).tensors["states"]
    torch.testing.assert_close(under_attack, by_hand, rtol=1e-5, atol=1e-6)
    plain = eraser.embed(tokens).tensors["states"]
    torch.testing.assert_close(plain, tiny.embed(tokens).tensors["states"], rtol=0, atol=0)
    content["attack"]["tokens"] = 75
    with pytest.raises(UserError, match=r"attack.tokens: 75 do not fit before the prompts"):
        Job(recipe.load(content), tiny, tmp_path, silent).eraser()
    content = short(method={"name": "adversarial"}, attack={"n": 8, "tokens": 1})
    with pytest.raises(UserError, match=r"attack.tokens .* found target 'denoiser'"):
        recipe.load(content)


def test_the_recipe_of_advunlearn_has_the_settings_of_its_code(tiny) -> None:
    """The defaults of train-scripts/AdvUnlearn.py and the options of the README's command."""
    for name, steps in (("sd14_nudity", 1000), ("sd14_vangogh", 1000), ("tiny_star", 100)):
        job = recipe.load(f"{name}_advunlearn")
        method = registry.build("method", job.method.name, job.method.options)
        assert (method.inner_steps, method.inner_optimizer) == (30, "adam")
        assert (method.inner_lr, method.retain, method.forget) == (1e-3, 0.3, 1.0)
        assert job.attack.warmup == steps / 5 == job.training.steps / 5
        assert (job.attack.tokens, job.attack.decay) == (1, 0.0)
        assert (job.attack.loss, job.attack.forget) == ("prediction", "attacked")
        assert (job.target, job.forget.loss, job.forget.eta) == ("text_encoder", "esd", 1.0)
        assert job.retain.loss == "distill_prediction"
        assert job.training.optimizer == "adam"
    short_version = recipe.load("tiny_star_advunlearn_short")
    assert short_version.method.options["inner_steps"] == 3
    assert short_version.attack.warmup == 0


def test_distill_prediction_is_the_difference_of_the_denoisers_predictions(tiny, tmp_path) -> None:
    content = short(
        target="text_encoder", trainable__select="all", retain__loss="distill_prediction"
    )
    eraser = Job(recipe.load(content), tiny, tmp_path, silent).eraser()
    draw = eraser.draw("retain", [1, 2, 3])
    before = tiny.denoise(draw.noisy, draw.t, tiny.embed(draw.tokens)).detach()
    with torch.no_grad():
        for parameter in eraser.trainable().values():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            parameter.add_(0.02 * noise)
    loss = eraser.loss("retain", draw)
    now = tiny.denoise(draw.noisy, draw.t, tiny.embed(draw.tokens))
    by_hand = torch.nn.MSELoss()(now, before)
    torch.testing.assert_close(loss, by_hand, rtol=1e-5, atol=0)
    weights = list(eraser.trainable().values())
    slopes = torch.autograd.grad(loss, weights, materialize_grads=True, allow_unused=True)
    expected = torch.autograd.grad(by_hand, weights, materialize_grads=True, allow_unused=True)
    assert sum(float(part.abs().sum()) for part in expected) > 0
    for slope, other in zip(slopes, expected, strict=True):
        torch.testing.assert_close(slope, other, rtol=1e-4, atol=1e-8)
    content["retain"]["images"] = "free"
    with pytest.raises(UserError, match="for a text encoder the loss 'distill_prediction' needs"):
        recipe.load(content)


def test_a_skipped_step_leaves_the_method_as_it_was(tiny, tmp_path, monkeypatch) -> None:
    """One NaN must not stay in a running average."""
    job_recipe = recipe.load(short(method={"name": "minmax_ngd", "period": 1}, training__steps=3))
    compute = Denoiser.loss
    calls = []

    def poison_loss(self, objective, draw):
        calls.append(objective)
        return compute(self, objective, draw) * (float("nan") if len(calls) == 2 else 1.0)

    monkeypatch.setattr(Denoiser, "loss", poison_loss)
    job = Job(job_recipe, tiny, tmp_path, silent)
    engine = job.train(registry.build("method", "minmax_ngd", {"period": 1}), resume=False)
    assert engine.skipped == 1
    assert all(torch.isfinite(v).all() for v in engine.method.state_dict().values())


@pytest.mark.parametrize("where", ADVERSARIES, ids=ON)
def test_the_loss_of_the_attack_falls_along_its_gradient(tiny, tmp_path, where: dict) -> None:
    """Its loss falls along its own gradient."""
    closure = closure_of(tiny, tmp_path, method={"name": "forum"}, attack={"n": 8}, **where)
    before = float(closure._pieces["attack"][0]())
    for _ in range(5):
        (slope,) = closure.grad("attack", of=closure.inner)
        with torch.no_grad():
            closure.params[-1].sub_(0.3 * slope / slope.norm())
    assert float(closure._pieces["attack"][0]()) < before


@pytest.mark.parametrize("where", ADVERSARIES, ids=ON)
@pytest.mark.parametrize("method", ["forum", "adversarial", "bome", "moml", "moco"])
def test_bilevel_methods_run_and_leave_the_adversary_out_of_the_weights(
    method: str, where: dict, tmp_path
) -> None:
    content = short(
        method={"name": method, "inner_steps": 1}, attack={"n": 8}, training__steps=2, **where
    )
    whole = concept_eraser.erase(content, output=tmp_path / "whole")
    rows = logs.read(whole.folder / "log.jsonl")
    assert rows[0]["losses"].keys() >= {"retain", "forget"}
    weights = load_file(whole.folder / "weights.safetensors")
    assert not [name for name in weights if name.startswith("attack")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": {"name": "forum"}}, "FORUM needs a lower-level problem"),
        ({"attack": {}}, "no lower-level problem for"),
        (
            {
                "attack": {},
                "method": "forum",
                "target": "classifier",
                "forget": {"data": "digits", "classes": [3]},
                "retain": "rest",
            },
            "no prompt embedding to attack",
        ),
        ({"method": {"name": "uno"}, "training__precision": "bf16"}, "bf16 is too coarse"),
        ({"method": {"name": "uno-hat"}}, "has a judge"),
        (
            {
                "method": {"name": "s"},
                "replace": {"prompts": "tiny_star", "loss": "relabel", "anchor": "a circle"},
            },
            "two objectives",
        ),
        ({"method": {"name": "natural_gradient"}}, "works on classifier only"),
        ({"method": {"name": "mini_unlearning"}}, "works on classifier only"),
        (
            {
                "method": "munba-printed",
                "replace": {"prompts": "tiny_star", "loss": "relabel", "anchor": "a circle"},
            },
            "two objectives only",
        ),
        ({"method": {"name": "s", "rule": "ascent"}}, "is 'surgery' with rule"),
    ],
)
def test_methods_refuse_recipes_that_do_not_fit(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        recipe.load(short(**changes))


@pytest.mark.parametrize(
    "method", [{"name": "uno"}, {"name": "munba"}, {"name": "torchjd", "rule": "MGDA"}]
)
def test_a_third_objective_has_an_anchor_of_its_own(method: dict, tmp_path) -> None:
    third = {"prompts": "tiny_star", "loss": "relabel", "anchor": {"shape": "circle"}, "n": 8}
    run = concept_eraser.erase(
        short(method=method, forget__loss="data", replace=third, training__steps=2),
        output=tmp_path / "run",
    )
    rows = logs.read(run.folder / "log.jsonl")
    assert set(rows[0]["losses"]) == {"retain", "forget", "replace"}


BILEVEL = [
    {"name": "forum", "inner_steps": 1, "warm": False},
    {"name": "adversarial", "inner_steps": 1},
    {"name": "moco", "inner_steps": 1},
]


@pytest.fixture(scope="module")
def uninterrupted_weights() -> dict[str, dict[str, torch.Tensor]]:
    """The weights of runs without an interruption, by method."""
    return {}


# of AdvUnlearn, on the text encoder
ENCODER = {"name": "adversarial", "inner_steps": 1, "retain": 0.3}


@pytest.mark.parametrize(
    "method",
    ["uno-s", "a-d", "minmax_ngd", *BILEVEL, ENCODER],
    ids=lambda m: m if isinstance(m, str) else "-".join(map(str, m.values())),
)
@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "inside a step"])
def test_methods_with_a_memory_resume_bit_by_bit(
    method, inside: bool, tmp_path, monkeypatch, uninterrupted_weights
) -> None:
    """After Ctrl-C between two steps or within one, a resumed run ends with the same weights."""
    content = short(method=method, forget__loss="ascent", training__steps=4)
    if isinstance(method, dict):
        content["attack"] = {"n": 8}
    if method is ENCODER:
        content.update(
            target="text_encoder",
            trainable={"select": "all"},
            forget={**content["forget"], "loss": "esd"},
        )
    key = json.dumps(method)
    if key not in uninterrupted_weights:  # both interruptions are compared with the same run
        whole = concept_eraser.erase(content, output=tmp_path / "whole")
        uninterrupted_weights[key] = load_file(whole.folder / "weights.safetensors")

    def stop(what: str, count: int, total: int, note: str = "") -> None:
        if what == "erasing" and count == 3 and not inside:
            raise KeyboardInterrupt

    move, calls = Engine._move, []

    def interrupt(self, step, direction) -> None:
        calls.append(step)
        if inside and step == 2:
            signal.raise_signal(signal.SIGINT)
        move(self, step, direction)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_move", interrupt)
        # a background run inherits an ignored one
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(concept_eraser.utils.errors.Interrupted, match="after 3 of 4"):
            concept_eraser.erase(content, output=tmp_path / "parts", progress=stop)
        signal.signal(signal.SIGINT, before)
    assert calls == [0, 1, 2]
    assert [row["step"] for row in logs.read(tmp_path / "parts" / "log.jsonl")] == [1, 2, 3]
    parts = concept_eraser.erase(content, output=tmp_path / "parts", resume=True)
    a, b = uninterrupted_weights[key], load_file(parts.folder / "weights.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_histogram_loss_falls_with_the_judges_concept_rate(tiny, tmp_path) -> None:
    """UNO^: a judge on decoded one-step samples. Its gradient reaches the weights, and steps along
    it lower the loss.
    """
    closure = closure_of(
        tiny,
        tmp_path,
        method="h",
        forget__loss="data",
        histogram={"concept": {"shape": "star"}},
        trainable__select="all",
    )
    assert closure.objectives == ("retain", "forget", "histogram")
    before = float(closure._pieces["histogram"][0]())
    assert before > 0.5, "the untouched model generates stars, and the judge detects them"
    for _ in range(3):
        slope = closure.grad("histogram")
        with torch.no_grad():
            for parameter, part in zip(closure.params, slope, strict=True):
                parameter.sub_(0.02 * part / dot(slope, slope).sqrt().float())
    assert float(closure._pieces["histogram"][0]()) < before


@pytest.mark.parametrize("method", ["uno-hat", "uno-s-hat", "s-hat", "h"])
def test_every_hat_version_runs(method: str, tmp_path) -> None:
    content = short(
        method=method,
        forget__loss="data",
        histogram={"concept": {"shape": "star"}},
        training__steps=2,
    )
    run = concept_eraser.erase(content, output=tmp_path / "run")
    assert "histogram" in logs.read(run.folder / "log.jsonl")[0]["losses"]


def test_a_concept_that_the_judge_cannot_detect_is_named(tmp_path) -> None:
    content = short(
        method="h",
        forget__loss="data",
        histogram={"concept": {"shape": "dragon"}},
        training__steps=1,
    )
    with pytest.raises(UserError, match="cannot detect shape 'dragon'"):
        concept_eraser.erase(content, output=tmp_path / "run")


@pytest.mark.parametrize("scale", [1.0, 1e39])
def test_a_bound_tells_whether_a_weighted_sum_is_finite(scale: float) -> None:
    """A weight that fp32 cannot hold has no useful bound, so the entries decide."""
    parameter = torch.nn.Parameter(torch.tensor([3.0, -4.0]))
    losses = {
        "retain": [lambda: parameter.sum()],
        "forget": [lambda: (parameter * torch.tensor([1e-20, 0.0])).sum()],
    }
    closure = LossClosure((parameter,), losses)
    gradients = [closure.grad(objective) for objective in closure.objectives]
    gram, weights = closure.gramian(gradients), torch.tensor([2.0, scale], dtype=torch.float64)
    direction = Direction.weighted_sum(weights, gradients, gram)
    assert direction.bound is not None
    assert scale > 1 or direction.bound >= float(direction.vec[0].abs().max())
    assert closure.is_finite(direction) == (scale == 1.0)
    assert closure.losses == {"retain": -1.0, "forget": pytest.approx(3e-20)}


@pytest.mark.parametrize(("weight", "is_finite"), [(1.0, False), (0.0, True)])
def test_a_gradient_that_is_not_finite_counts_if_it_has_a_weight(
    weight: float, is_finite: bool
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    losses = {"retain": [lambda: parameter.sum()], "forget": [lambda: parameter.sqrt().sum()]}
    closure = LossClosure((parameter,), losses)
    gradients = [closure.grad(objective) for objective in closure.objectives]
    gram, weights = closure.gramian(gradients), torch.tensor([1.0, weight], dtype=torch.float64)
    assert closure.is_finite(Direction.weighted_sum(weights, gradients, gram)) == is_finite
