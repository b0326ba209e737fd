"""Weighted, NGDiff and surgery against hand-built sums and TorchJD."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from concept_eraser import registry
from concept_eraser.methods import surgery, weighted
from concept_eraser.methods.checks import closure, flat, pair
from concept_eraser.methods.ngdiff import NGDiff
from concept_eraser.methods.surgery import Surgery
from concept_eraser.methods.weighted import Weighted

ROOT = Path(__file__).parents[2]
OWN_FILES = [
    f"/{path.relative_to(ROOT).as_posix()}"
    for folder in ("concept_eraser", "studies", "tests", "tools")
    for path in (ROOT / folder).rglob("*.py")
]


def missing(text: str) -> list[str]:
    """Return what a module's docstring lacks: the paper, the place in it or in a file of the
    authors' code, the differences. The name of a file of this repository is no such place.
    """
    of_paper = (
        r"\b(?:Eqs?\.|Equations?|[Ss]ections?|[Aa]ppendix|Algorithms?|Theorems?|Lemmas?)"
        r"\s\(?[A-Z\d]"
    )
    files = re.findall(r"[\w./-]*\w\.(?:py|ipynb)\b", text)
    present = {
        "paper": re.search(r"arXiv \d{4}\.\d{5}", text),
        "place": re.search(of_paper, text)
        or [file for file in files if not any(own.endswith(f"/{file}") for own in OWN_FILES)],
        "differences": re.search(r"[Dd]eliberate\s+differences?\b", text),
    }
    return [name for name, place in present.items() if not place]


@pytest.mark.parametrize("name", registry.builtin("method"))
def test_each_method_names_the_published_definition_and_its_differences(name: str) -> None:
    """The file of a method opens with a paper and the place of the definition, and has a part on
    deliberate differences.
    """
    module = importlib.import_module(f"concept_eraser.methods.{name}")
    assert missing(module.__doc__ or "") == []


def test_what_a_methods_docstring_lacks_is_noticed() -> None:
    assert missing("A method.") == ["paper", "place", "differences"]
    assert missing("By A (2021, arXiv 2101.00001).\n\nDeliberate differences: none.") == ["place"]
    assert missing("Eq. 3 of arXiv 2101.00001. Deliberate differences: none.") == []
    theirs = "src/theirs.py of A (2021, arXiv 2101.00001). Deliberate differences: none."
    assert missing(theirs) == []
    for own in ("methods/forum.py", "forum.py", "tests/methods/test_uno.py"):
        assert missing(theirs.replace("src/theirs.py", own)) == ["place"], own


def test_weighted_is_the_weighted_sum() -> None:
    retain, forget = pair(-0.3, 2.0, 5.0)
    direction = Weighted(retain=0.5, forget=3.0).direction(closure(retain, forget))
    torch.testing.assert_close(flat(direction.vec), 0.5 * flat(retain) + 3 * flat(forget))
    assert direction.weights.tolist() == [0.5, 3.0]


@pytest.mark.parametrize(
    ("options", "requests"), [({"forget": 0.0}, ["retain"]), ({"retain": 0.0}, ["forget"])]
)
def test_a_weight_of_zero_costs_no_backward_pass(options: dict, requests: list[str]) -> None:
    pair_closure = closure(*pair(0.1, 1.0, 1.0))
    direction = Weighted(**options).direction(pair_closure)
    assert pair_closure.requests == requests
    assert torch.isnan(direction.gram).any()


@pytest.mark.parametrize("options", [{"forget": -1.0}, {"forget": 0.0, "retain": 0.0}])
def test_weights_are_checked(options: dict) -> None:
    with pytest.raises(ValueError, match="weights"):
        Weighted(**options)


def test_ngdiff_is_the_sum_of_unit_vectors() -> None:
    retain, forget = pair(0.4, 7.0, 1e-5)
    step = flat(NGDiff().direction(closure(retain, forget)).vec)
    torch.testing.assert_close(step, flat(retain) / 7 + flat(forget) / 1e-5)


@pytest.mark.parametrize("cosine", [-0.8, -0.1, 0.0, 0.5])
def test_pcgrad_against_torchjd(cosine: float) -> None:
    from torchjd.aggregation import PCGrad

    retain, forget = pair(cosine, 2.0, 0.5)
    direction = Surgery(rule="pcgrad").direction(closure(retain, forget))
    expected = PCGrad()(torch.stack([flat(retain), flat(forget)]))
    torch.testing.assert_close(flat(direction.vec), expected)
    if cosine:  # at a right angle rounding decides the sign, and the sum is the same either way
        assert direction.notes["projected"] == int(cosine < 0)


def test_descent_surgery_does_not_notice_the_sign_of_the_forget_loss() -> None:
    """The paper's g_f is the gradient of the training loss, ours of its negative: S is the same
    either way.
    """
    retain, forget = pair(0.7, 1.0, 3.0)
    one = flat(Surgery("descent").direction(closure(retain, forget)).vec)
    other = flat(Surgery("descent").direction(closure(retain, tuple(-p for p in forget))).vec)
    torch.testing.assert_close(one, other)


def test_ascent_surgery_is_the_papers_step_up() -> None:
    """theta += eta (g_f - proj g_f) with the paper's g_f equals theta -= eta * ours."""
    retain, training = pair(0.7, 1.0, 3.0)  # the gradient of the training loss on forget data
    r, t = flat(retain), flat(training)
    up = t - (r @ t) / (r @ r) * r
    step = flat(Surgery("ascent").direction(closure(retain, tuple(-p for p in training))).vec)
    torch.testing.assert_close(-step, up)


def test_surgery_refuses_three_objectives() -> None:
    with pytest.raises(ValueError, match="two objectives"):
        Surgery().weights(torch.eye(3, dtype=torch.float64))


def test_a_d_computes_one_gradient_a_step_in_turn() -> None:
    method = Weighted(alternate=True)
    for step, objective in enumerate(("forget", "retain", "forget")):
        pair_closure = closure(*pair(0.1, 1.0, 2.0))
        pair_closure.step = step
        direction = method.direction(pair_closure)
        assert pair_closure.requests == [objective]
        torch.testing.assert_close(flat(direction.vec), flat(pair_closure.gradients[objective]))


@pytest.mark.parametrize(
    ("options", "uses_all"),
    [
        ({}, True),
        ({"retain": 0.5, "forget": 0.25}, True),
        ({"retain": 0.0}, False),
        ({"forget": 0.0}, False),
        ({"alternate": True}, False),
    ],
)
def test_a_sum_uses_both_gradients_if_both_weigh(options: dict, uses_all: bool) -> None:
    assert Weighted(**options).uses_all(("retain", "forget")) is uses_all
    assert Weighted(**options).uses_all(("forget", "retain")) is uses_all


def test_a_sum_without_retain_uses_the_forget_gradient_alone() -> None:
    assert Weighted(retain=0.0).uses_all(("forget",)) is True
    assert Weighted(forget=0.0).uses_all(("forget",)) is False


def test_a_s_takes_turns_between_ascent_and_surgery() -> None:
    method = Surgery(**surgery.NAMED["a-s"])
    for step in range(3):
        pair_closure = closure(*pair(0.1, 1.0, 2.0))
        pair_closure.step = step
        direction = flat(method.direction(pair_closure).vec)
        if step % 2 == 0:
            assert pair_closure.requests == ["forget"]
            expected = flat(pair_closure.gradients["forget"])
        else:
            expected = flat(Surgery("descent").direction(closure(*pair(0.1, 1.0, 2.0))).vec)
        torch.testing.assert_close(direction, expected)
    assert not method.laws()
    assert method.uses_all(("retain", "forget")) is False
    assert Surgery().uses_all(("retain", "forget")) is True


def test_alternating_with_a_weight_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="alternate"):
        Weighted(alternate=True, forget=0.0)


def gram_with(dead: int, value: float) -> torch.Tensor:
    gram = torch.tensor([[4.0, 1.0], [1.0, 9.0]], dtype=torch.float64)
    gram[dead, :] = gram[:, dead] = value
    return gram


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("dead", [0, 1])
def test_an_objective_without_a_gradient_is_left_out_and_counted(dead: int, value: float) -> None:
    gram, alive = gram_with(dead, value), 1 - dead
    weights, notes = NGDiff().solve(gram)
    assert weights[dead] == 0
    assert float(weights[alive]) == pytest.approx([1 / 2, 1 / 3][alive])
    assert notes == {"degenerate": 1}
    # one gradient is 0: S is the retain step, SA the forget step, PCGrad the step of the other one
    for rule, expected in (("descent", [1.0, 0.0]), ("ascent", [0.0, 1.0]), ("pcgrad", [1.0, 1.0])):
        weights, notes = Surgery(rule=rule).solve(gram)
        assert weights.tolist() == [0.0 if i == dead else expected[i] for i in range(2)]
        assert notes == {"degenerate": 1}


def test_ngdiff_with_both_gradients() -> None:
    weights, notes = NGDiff().solve(torch.tensor([[0.25, 1.0], [1.0, 100.0]], dtype=torch.float64))
    assert weights.tolist() == [2.0, 0.1]
    assert notes == {"degenerate": 0}


def test_surgery_by_hand() -> None:
    """g_r = (2, 0), g_f = (-1, 1): S removes 1/2 (-2) g_f, SA removes -2/4 g_r, PCGrad sums
    both.
    """
    gram = torch.tensor([[4.0, -2.0], [-2.0, 2.0]], dtype=torch.float64)
    expected = {"descent": [1.0, 1.0], "ascent": [0.5, 1.0], "pcgrad": [1.5, 2.0]}
    notes = {
        "descent": {"degenerate": 0},
        "ascent": {"degenerate": 0},
        "pcgrad": {"degenerate": 0, "projected": 1},
    }
    for rule, weights in expected.items():
        solution, rule_notes = Surgery(rule=rule).solve(gram)
        assert solution.tolist() == weights
        assert rule_notes == notes[rule]
    solution, rule_notes = Surgery(rule="pcgrad").solve(gram.abs())
    assert solution.tolist() == [1.0, 1.0]
    assert rule_notes == {"degenerate": 0, "projected": 0}


def test_the_laws_and_objectives_of_surgery() -> None:
    assert Surgery(rule="pcgrad").laws() == {"stationarity"}
    for rule in ("descent", "ascent"):
        assert Surgery(rule=rule).laws() == {"stationarity", "orthogonality"}
    Surgery().check_objectives(("retain", "forget"))
    for objectives in (("retain",), ("retain", "forget", "forget.2")):
        with pytest.raises(
            ValueError, match=f"two objectives retain and forget; found {', '.join(objectives)}"
        ):
            Surgery().check_objectives(objectives)


def test_the_gram_matrix_of_what_was_computed_and_nan_elsewhere() -> None:
    pair_closure = closure(*pair(0.5, 2.0, 3.0))
    direction = Weighted(retain=0.0).direction(pair_closure)
    assert torch.isnan(direction.gram).tolist() == [[True, True], [True, False]]
    assert float(direction.gram[1, 1]) == pytest.approx(9)
    both = Weighted().direction(pair_closure)
    torch.testing.assert_close(
        both.gram, torch.tensor([[4.0, 3.0], [3.0, 9.0]], dtype=torch.float64)
    )


def test_alternating_weighs_and_logs_the_one_whose_turn_it_is() -> None:
    for step, weights in ((0, [0.0, 5.0]), (1, [2.0, 0.0]), (2, [0.0, 5.0]), (3, [2.0, 0.0])):
        pair_closure = closure(*pair(0.1, 1.0, 2.0))
        pair_closure.step = step
        direction = Weighted(retain=2.0, forget=5.0, alternate=True).direction(pair_closure)
        assert direction.weights.tolist() == weights
        own = "retain" if step % 2 else "forget"
        torch.testing.assert_close(
            flat(direction.vec), max(weights) * flat(pair_closure.gradients[own])
        )


def test_who_is_weighed_how() -> None:
    retain, forget = pair(0.1, 1.0, 2.0)
    pair_closure = closure(retain, forget)
    pair_closure.gradients["forget.2"] = retain
    assert Weighted(retain=2.0, forget=5.0).direction(pair_closure).weights.tolist() == [
        2.0,
        5.0,
        5.0,
    ]


def test_a_weight_of_retain_needs_a_retain_set() -> None:
    Weighted(retain=0.0).check_objectives(("forget",))
    Weighted(retain=0.5).check_objectives(("forget", "retain"))
    with pytest.raises(ValueError, match="needs a retain set"):
        Weighted(retain=0.5).check_objectives(("forget",))


@pytest.mark.parametrize(
    ("options", "fine"),
    [
        ({"retain": 0.0}, True),
        ({"forget": 0.0}, True),
        ({"retain": 0.0, "forget": 0.0}, False),
        ({"retain": 0.0, "alternate": True}, False),
        ({"retain": 0.5, "forget": 0.5, "alternate": True}, True),
        ({"forget": -0.5}, False),
        ({"retain": -0.5}, False),
    ],
)
def test_which_weights_make_a_method(options: dict, fine: bool) -> None:
    if fine:
        Weighted(**options)
        return
    with pytest.raises(ValueError, match="weight"):
        Weighted(**options)


def test_the_settings_with_names_do_what_their_names_say() -> None:
    """The objectives whose gradients the first two steps compute: forget alone, retain alone, both,
    or in turn.
    """
    expected = {
        "finetune": [["retain"], ["retain"]],
        "ga": [["forget"], ["forget"]],
        "a": [["forget"], ["forget"]],
        "gdiff": [["retain", "forget"], ["retain", "forget"]],
        "a-d": [["forget"], ["retain"]],
    }
    assert set(weighted.NAMED) == set(expected)
    for name, requests in expected.items():
        for step, objectives in enumerate(requests):
            pair_closure = closure(*pair(0.1, 1.0, 2.0))
            pair_closure.step = step
            Weighted(**weighted.NAMED[name]).direction(pair_closure)
            assert pair_closure.requests == objectives, name
