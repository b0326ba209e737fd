"""UNO against the joint double backward of cos^2, its settings, and its hat versions."""

from __future__ import annotations

import pytest
import torch

from concept_eraser import registry
from concept_eraser.methods import uno
from concept_eraser.methods.checks import flat
from concept_eraser.methods.surgery import Surgery
from concept_eraser.methods.uno import Uno
from concept_eraser.methods.vectors import Vec, dot, norm
from concept_eraser.training.closure import LossClosure


def world(seed: int = 0, dtype: torch.dtype = torch.float64, **options) -> tuple[LossClosure, dict]:
    """A small network with a retain, a forget, a replace and a histogram loss."""
    g = torch.Generator().manual_seed(seed)
    params = tuple(
        (0.5 * torch.randn(*shape, generator=g, dtype=dtype)).requires_grad_()
        for shape in ((4, 6), (6,), (6, 2))
    )
    data = {
        p: torch.randn(8, 4, generator=g, dtype=dtype)
        for p in ("retain", "forget", "replace", "histogram")
    }
    targets = {p: torch.randn(8, 2, generator=g, dtype=dtype) for p in data}

    def loss(objective: str) -> torch.Tensor:
        return (
            (torch.tanh(data[objective] @ params[0] + params[1]) @ params[2] - targets[objective])
            ** 2
        ).mean()

    losses = dict.fromkeys(data, loss)
    objectives = options.pop("objectives", ("retain", "forget"))
    pieces = {p: [lambda p=p: loss(p)] for p in objectives}
    return LossClosure(params, pieces, terms=dict.fromkeys(objectives, 16), **options), losses


def joint(closure: LossClosure, losses: dict, histogram: float = 0.0) -> Vec:
    """grad of cos^2(g_r, g_f) by one double backward through both graphs."""
    extra = histogram * losses["histogram"]("histogram") if histogram else 0.0
    r = torch.autograd.grad(losses["retain"]("retain") + extra, closure.params, create_graph=True)
    f = torch.autograd.grad(losses["forget"]("forget") + extra, closure.params, create_graph=True)
    a, b = flat(r), flat(f)
    return torch.autograd.grad((a @ b) ** 2 / (a @ a) / (b @ b), closure.params)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("hvp", "size", "tolerance"),
    [("exact", 0.01, 1e-10), ("difference", 0.01, 1e-3), ("difference", 0.001, 1e-5)],
)
def test_two_products_are_the_gradient_of_the_squared_cosine(
    seed: int, hvp: str, size: float, tolerance: float
) -> None:
    closure, losses = world(seed)
    before = [p.detach().clone() for p in closure.params]
    direction = Uno(hvp=hvp, size=size, strength=1.0).direction(closure)
    turn = flat(direction.vec) - flat(closure.grad("retain"))
    expected = flat(joint(closure, losses))
    assert float((turn - expected).norm() / expected.norm()) < tolerance
    assert all(torch.equal(p, q) for p, q in zip(closure.params, before, strict=True)), (
        "parameters are put back"
    )


def test_descending_it_orthogonalises() -> None:
    """The cosine goes to 0 under the turn alone (a law: cos^2 is what is descended)."""
    closure, _ = world(1)
    cosines = []
    for _ in range(60):
        direction = Uno(strength=1.0, hvp="exact").direction(closure)
        gram = direction.gram
        cosines.append(abs(float(gram[0, 1] / (gram[0, 0] * gram[1, 1]).sqrt())))
        turn = [v - g for v, g in zip(direction.vec, closure.grad("retain"), strict=True)]
        with torch.no_grad():
            for p, t in zip(closure.params, turn, strict=True):
                p -= 0.05 * t
    assert cosines[-1] < 0.1 * cosines[0]


def test_auto_strength_is_a_fixed_multiple_of_the_retain_gradient() -> None:
    for ratio in (0.5, 1.0, 3.0):
        closure, _ = world(2)
        direction = Uno(strength="auto", ratio=ratio).direction(closure)
        turn = flat(direction.vec) - flat(closure.grad("retain"))
        assert float(turn.norm()) == pytest.approx(
            ratio * float(norm(closure.grad("retain"))), rel=1e-6
        )


def test_reduction_sum_weighs_the_loss_by_its_terms() -> None:
    """beta = 1e3 with sum is beta = 1e3 / terms with mean, up to the length of the step."""
    closure, _ = world(3)
    sum_step = flat(Uno(strength=1e3, reduction="sum").direction(closure).vec)
    mean_step = flat(Uno(strength=1e3 / 16).direction(closure).vec)
    torch.testing.assert_close(sum_step, 16 * mean_step)


def test_reduction_sum_scales_every_mean_and_leaves_the_divergence_alone() -> None:
    closure, _ = world(3, objectives=("retain", "forget", "replace", "histogram"))
    grads = {p: flat(closure.grad(p)) for p in closure.objectives}
    step = flat(Uno(rule="none", histogram=0.7, reduction="sum").direction(closure).vec)
    torch.testing.assert_close(
        step, 16 * grads["retain"] + 0.7 * grads["histogram"] + 16 * grads["replace"]
    )
    closure, _ = world(3)
    closure.step = 1
    odd = flat(Uno(alternate=True, reduction="sum").direction(closure).vec)
    even_means = flat(Uno(alternate=True).direction(closure).vec)
    torch.testing.assert_close(odd, 16 * even_means)


@pytest.mark.parametrize("hvp", ["exact", "difference"])
def test_the_sign_of_the_forget_loss_does_not_matter(hvp: str) -> None:
    closure, losses = world(9)
    one = flat(Uno(strength=2.0, hvp=hvp).direction(closure).vec)
    closure._pieces["forget"] = [lambda: -losses["forget"]("forget")]
    torch.testing.assert_close(flat(Uno(strength=2.0, hvp=hvp).direction(closure).vec), one)
    closure._pieces["forget"] = [lambda: 5 * losses["forget"]("forget")]
    longer = flat(Uno(strength=2.0, hvp=hvp).direction(closure).vec)
    torch.testing.assert_close(longer, one)


def test_uno_s_takes_turns() -> None:
    closure, _ = world(4)
    plain, alternate = Uno(), registry.build("method", "uno-s", {})
    torch.testing.assert_close(
        flat(alternate.direction(closure).vec), flat(plain.direction(closure).vec)
    )
    closure.step = 1
    odd = alternate.direction(closure).vec
    torch.testing.assert_close(flat(odd), flat(Surgery("descent").direction(closure).vec))
    assert abs(float(dot(odd, closure.grad("forget")))) < 1e-12


def test_the_anchor_term_is_added_and_not_turned() -> None:
    closure, _ = world(5, objectives=("retain", "forget", "replace"))
    without, _ = world(5)
    step = flat(Uno(strength=2.0).direction(closure).vec)
    expected = flat(Uno(strength=2.0).direction(without).vec) + flat(closure.grad("replace"))
    torch.testing.assert_close(step, expected)


@pytest.mark.parametrize("hvp", ["exact", "difference"])
def test_hat_versions_add_the_histogram_to_both_gradients(hvp: str) -> None:
    closure, losses = world(6, objectives=("retain", "forget", "histogram"))
    beta = 0.7
    step = flat(Uno(strength=1.5, histogram=beta, hvp=hvp, size=1e-3).direction(closure).vec)
    hat = flat(closure.grad("retain")) + beta * flat(closure.grad("histogram"))
    expected = hat + 1.5 * flat(joint(closure, losses, beta))
    torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-5)


def test_h_and_s_hat() -> None:
    closure, _ = world(7, objectives=("retain", "forget", "histogram"))
    r, f, h = (flat(closure.grad(p)) for p in ("retain", "forget", "histogram"))
    torch.testing.assert_close(
        flat(registry.build("method", "h", {}).direction(closure).vec), r + h
    )
    rh, fh = r + h, f + h
    surgery = rh - (rh @ fh) / (fh @ fh) * fh
    torch.testing.assert_close(
        flat(registry.build("method", "s-hat", {}).direction(closure).vec), surgery
    )


def test_no_forget_gradient_is_a_retain_step_and_counted() -> None:
    closure, _ = world(8)
    closure._pieces["forget"] = [lambda: 0.0 * closure.params[0].sum()]
    direction = Uno().direction(closure)
    assert direction.notes["degenerate"] == 1
    torch.testing.assert_close(flat(direction.vec), flat(closure.grad("retain")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strength": -1.0}, "strength"),
        ({"ratio": 0.0}, "ratio"),
        ({"size": 0.0}, "size"),
        ({"rule": "none", "alternate": True}, "alternate"),
    ],
)
def test_options_are_checked(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Uno(**options)


def test_the_hat_version_without_a_judge_is_refused() -> None:
    with pytest.raises(ValueError, match="has a judge"):
        registry.build("method", "uno-hat", {}).check_objectives(("retain", "forget"))
    with pytest.raises(ValueError, match="has no use for"):
        Uno().check_objectives(("retain", "forget", "somebody"))


def test_hessian_products_on_linear_losses_are_zero() -> None:
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    closure = LossClosure((w,), {"retain": [lambda: (2 * w).sum()]})
    for how in ("exact", "difference"):
        assert (
            float(norm(closure.hvp("retain", (torch.ones(3, dtype=torch.float64),), how))) < 1e-12
        )


def test_gradients_add_up_where_autograd_hands_out_one_tensor_twice() -> None:
    """(p + q)^2: both gradients are the same tensor; p.sum(): an expanded one."""
    p, q = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    closure = LossClosure(
        (p, q), {"both": [lambda: ((p + q) ** 2).sum()] * 2, "sum": [lambda: p.sum()] * 2}
    )
    assert [g.tolist() for g in closure.grad("both")] == [[8.0, 8.0], [8.0, 8.0]]
    assert closure.grad("sum")[0].tolist() == [2.0, 2.0]


def test_products_add_up_over_micro_batches() -> None:
    w = torch.arange(1.0, 4.0, dtype=torch.float64).requires_grad_()
    v = (torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64),)
    whole = LossClosure((w,), {"retain": [lambda: (w**3).sum()]})
    parts = LossClosure(
        (w,), {"retain": [lambda: 0.25 * (w**3).sum(), lambda: 0.75 * (w**3).sum()]}
    )
    for how in ("exact", "difference"):
        torch.testing.assert_close(whole.hvp("retain", v, how)[0], parts.hvp("retain", v, how)[0])
        torch.testing.assert_close(
            whole.hvp("retain", v, how)[0], 6 * w.detach() * v[0], rtol=1e-6, atol=0
        )


# --- options at their ends ------------------------------------------------------------------------


def test_which_laws_and_objectives_the_settings_have() -> None:
    assert Uno().laws() == {"forget_sign"}
    assert Uno(histogram=1.0).laws() == Uno(rule="none").laws() == frozenset()
    Uno().check_objectives(("retain", "forget"))
    Uno().check_objectives(("replace", "forget", "retain"))
    Uno(histogram=1.0).check_objectives(("retain", "forget", "histogram"))
    with pytest.raises(
        ValueError, match=r"needs forget beside retain: give the recipe these objectives"
    ):
        Uno().check_objectives(("retain",))
    with pytest.raises(ValueError, match=r"has no use for histogram; set histogram > 0"):
        Uno().check_objectives(("retain", "forget", "histogram"))
    with pytest.raises(ValueError, match=r"has no use for other$"):
        Uno().check_objectives(("retain", "forget", "other"))
    closure, _ = world(0, objectives=("retain", "forget", "histogram"))
    with pytest.raises(ValueError, match="has no use for"):
        Uno().direction(closure)


def test_what_is_logged_of_a_step() -> None:
    closure, losses = world(2)
    direction = Uno(hvp="exact", ratio=0.25).direction(closure)
    turn = flat(joint(closure, losses))
    retain = flat(closure.grad("retain"))
    assert direction.notes == pytest.approx(
        {
            "degenerate": 0,
            "beta": 0.25 * float(retain.norm() / turn.norm()),
            "slope_norm": float(turn.norm()),
        }
    )
    rows = torch.stack([retain, flat(closure.grad("forget"))])
    torch.testing.assert_close(direction.gram, rows @ rows.T)
    assert direction.weights is None
    assert Uno(hvp="exact", strength=3).direction(closure).notes["beta"] == 3
    plain = Uno(rule="none").direction(closure)
    assert plain.notes == {"degenerate": 0}
    assert float(plain.gram[1].abs().max()) == 0


def test_surgery_at_every_step_and_in_turn() -> None:
    closure, _ = world(4)
    for step in range(4):
        closure.step = step
        projection = flat(Surgery("descent").direction(closure).vec)
        torch.testing.assert_close(flat(Uno(rule="surgery").direction(closure).vec), projection)
        alternating = flat(Uno(alternate=True).direction(closure).vec)
        expected = projection if step % 2 else flat(Uno().direction(closure).vec)
        torch.testing.assert_close(alternating, expected)


def test_orthogonal_gradients_are_not_turned() -> None:
    """c = 0: grad c^2 is exactly 0, and so is beta."""
    a, b = (torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    closure = LossClosure(
        (a, b), {"retain": [lambda: (a**2).sum()], "forget": [lambda: (b**2).sum()]}
    )
    direction = Uno(hvp="exact").direction(closure)
    assert direction.notes == {"degenerate": 0, "beta": 0.0, "slope_norm": 0.0}
    assert flat(direction.vec).tolist() == [2.0, 0.0]


def test_the_sum_reduction_is_the_joint_gradient_of_summed_losses() -> None:
    """16 terms each: the cosine does not notice, its gradient neither; the retain step is 16 times
    as long.
    """
    closure, losses = world(5)
    direction = Uno(hvp="exact", strength=2.0, reduction="sum").direction(closure)
    expected = 16 * flat(closure.grad("retain")) + 2 * flat(joint(closure, losses))
    torch.testing.assert_close(flat(direction.vec), expected)


def test_the_step_of_the_difference_is_the_option() -> None:
    """Smaller steps come closer to the exact product, by the square of the step."""
    closure, _ = world(6)
    exact = flat(Uno(hvp="exact", strength=1.0).direction(closure).vec)
    errors = [
        float((flat(Uno(strength=1.0, size=size).direction(closure).vec) - exact).norm())
        for size in (0.1, 0.05)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.3)
    torch.testing.assert_close(
        flat(Uno(strength=1.0).direction(closure).vec),
        flat(Uno(strength=1.0, size=0.01).direction(closure).vec),
    )


def test_the_automatic_strength_divides_by_the_length_of_the_turn() -> None:
    step = (torch.tensor([3.0, 4.0]),)
    for length, expected in ((0.5, 20.0), (2.0, 5.0), (0.0, 0.0)):
        assert Uno(ratio=2.0)._beta((torch.tensor([length]),), step) == pytest.approx(expected)


def test_the_settings_with_names_are_the_papers() -> None:
    """UNO-S alternates; a hat needs the judge; S^ projects at every step, H has no c^2 term."""
    methods = {name: Uno(**options) for name, options in uno.NAMED.items()}
    assert {name for name, method in methods.items() if method.alternate} == {"uno-s", "uno-s-hat"}
    assert {name for name, method in methods.items() if method.histogram == 1} == {
        "uno-hat",
        "uno-s-hat",
        "s-hat",
        "h",
    }
    assert methods["uno-s"].histogram == 0
    assert {name: method.rule for name, method in methods.items() if method.rule != "uno"} == {
        "s-hat": "surgery",
        "h": "none",
    }
