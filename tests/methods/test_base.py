"""What all methods share: usable gradients, edits that fail without a change, state, objectives,
and the figures of projection edits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from concept_eraser.methods.base import (
    Direction,
    GatedLayer,
    GateEdit,
    GateRequest,
    LayerChange,
    Method,
    ProjectionRequest,
    all_or_nothing,
    usable,
)
from concept_eraser.methods.checks import closure, flat, pair
from concept_eraser.methods.erasediff import EraseDiff
from concept_eraser.methods.influence import Influence
from concept_eraser.methods.munba import Munba
from concept_eraser.methods.uce import UnifiedConceptEditing
from tests.methods.test_uce import problem

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("gram", "expected"),
    [
        ([[1.0, 0.5], [0.5, 2.0]], [True, True]),
        ([[0.0, 0.0], [0.0, 2.0]], [False, True]),
        # a gradient with a nan spoils its row, not the other objective
        ([[NAN, NAN], [NAN, 2.0]], [False, True]),
        ([[INF, INF], [INF, 2.0]], [False, True]),
        ([[-1.0, 0.0], [0.0, 1e-300]], [False, True]),
    ],
)
def test_usable_gradients(gram: list, expected: list) -> None:
    assert usable(torch.tensor(gram, dtype=torch.float64)).tolist() == expected


def test_an_edit_is_whole_or_not_at_all() -> None:
    params = (torch.ones(2, requires_grad=True), torch.full((3,), 2.0, requires_grad=True))

    def move(value: float) -> None:
        with torch.no_grad():
            params[1][1] = value

    with all_or_nothing(params, "try less") as before:
        assert [p.tolist() for p in before] == [[1, 1], [2, 2, 2]]
        move(5.0)
    assert params[1].tolist() == [2, 5, 2]
    with (
        pytest.raises(ValueError, match=r"not finite.* nothing was changed; try less"),
        all_or_nothing(params, "try less"),
    ):
        move(NAN)
    assert params[1].tolist() == [2, 5, 2]

    def interrupt() -> None:
        with all_or_nothing(params, ""):
            move(7.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert params[1].tolist() == [2, 5, 2]


def test_a_method_without_state_takes_none() -> None:
    method = EraseDiff()
    assert method.state_dict() == {}
    method.load_state_dict({})
    with pytest.raises(ValueError, match=r"EraseDiff keeps no state, but was given \['a', 'b'\]"):
        method.load_state_dict({"b": torch.ones(1), "a": torch.ones(1)})


def test_loaded_state_replaces_what_was_kept() -> None:
    method = Munba(every=2)
    method.direction(closure(*pair(0.1, 1.0, 2.0)))
    assert set(method.state_dict()) == {"weights"}
    method.load_state_dict({"other": torch.ones(1)})
    assert set(method.state_dict()) == {"other"}
    method.state_dict().clear()  # a copy
    assert set(method.state_dict()) == {"other"}


def test_a_method_combines_any_objectives_by_default() -> None:
    @dataclass(frozen=True)
    class Any(Method):
        def direction(self, closure) -> Direction:
            return Direction(())

    assert Any().check_objectives(("retain", "forget", "forget.2")) is None
    assert Any().laws() == frozenset()
    assert not Any().needs_fp32
    assert not Any().needs_attack


@pytest.mark.parametrize(
    "objectives", [("forget",), ("retain",), (), ("forget", "retain", "forget.2")]
)
def test_an_edit_of_labels_takes_two_objectives(objectives: tuple[str, ...]) -> None:
    Influence().check_objectives(("retain", "forget"))
    assert Influence().needs_retain
    with pytest.raises(ValueError, match="needs the objectives forget and retain and no other"):
        Influence().check_objectives(objectives)


def test_an_edit_of_projections_takes_concepts_and_an_optional_retain_set() -> None:
    method = UnifiedConceptEditing()
    assert (method.needs_fp32, method.needs_attack, method.needs_retain) == (True, False, False)
    for objectives in (
        ("forget",),
        ("forget", "retain"),
        ("forget", "forget.2", "retain"),
        ("forget.2",),
    ):
        method.check_objectives(objectives)
    for objectives in ((), ("retain",), ("forget", "attack"), ("forget", "retain", "replace")):
        with pytest.raises(
            ValueError,
            match="needs the objective forget, may have retain, and has no use for others",
        ):
            method.check_objectives(objectives)


def test_the_figures_of_a_projection_edit_are_those_of_the_layers() -> None:
    """Measured on what the layers read, layer by layer, without G."""
    request = problem()
    new = {name: w.clone() for name, w in request.layers.items()}
    figures = UnifiedConceptEditing().edit(replace(request, layers=new))

    def length(reading) -> float:
        return math.sqrt(sum(float(reading(name).square().sum()) for name in new))

    old = request.layers
    c, a, p = (torch.cat(list(rows)) for rows in (request.forget, request.anchor, request.retain))
    assert figures["moved"] == pytest.approx(
        length(lambda n: new[n] - old[n]) / length(lambda n: old[n])
    )
    distance = length(lambda n: (c @ new[n].T) - a @ old[n].T) / length(
        lambda n: (c - a) @ old[n].T
    )
    assert figures["left"] == pytest.approx(distance)
    assert figures["drift"] == pytest.approx(
        length(lambda n: p @ (new[n] - old[n]).T) / length(lambda n: p @ old[n].T)
    )


@pytest.mark.parametrize("retained", [True, False])
def test_a_change_for_each_layer_has_the_figures_of_one_for_all(retained: bool) -> None:
    """Here all layers have the same change. Concepts that are their anchors give exactly 0."""
    request = problem() if retained else replace(problem(), retain=[])

    class ForEachLayer(UnifiedConceptEditing):
        def change(self, request: ProjectionRequest) -> LayerChange:
            change, details = super().change(request)
            return dict.fromkeys(request.layers, change), details

    new, expected = ({name: w.clone() for name, w in request.layers.items()} for _ in range(2))
    figures = ForEachLayer().edit(replace(request, layers=new))
    single = UnifiedConceptEditing().edit(replace(request, layers=expected))
    assert figures == pytest.approx(single, rel=1e-9, abs=1e-12)
    assert (single["drift"] > 0) == retained
    assert all(torch.equal(new[name], expected[name]) for name in new)
    assert ForEachLayer().edit(replace(request, anchor=request.forget))["left"] == 0


def test_the_figures_do_not_depend_on_units() -> None:
    request = problem()
    tiny = replace(request, layers={name: 1e-6 * w for name, w in request.layers.items()})
    one, other = (
        UnifiedConceptEditing().edit(replace(r, layers={n: w.clone() for n, w in r.layers.items()}))
        for r in (request, tiny)
    )
    assert one == pytest.approx(other, rel=1e-6)


def test_figures_where_there_is_nothing_to_compare() -> None:
    """Without retain prompts the drift is 0. For concepts that are their anchors `left` is 0. For
    layers of zeros `moved` is 0.
    """
    request = replace(problem(), retain=[])
    assert UnifiedConceptEditing().edit(request)["drift"] == 0
    same = problem()
    assert UnifiedConceptEditing().edit(replace(same, anchor=same.forget))["left"] == 0
    zeros = replace(problem(), layers={"a": torch.zeros(4, 6, dtype=torch.float64)})
    assert UnifiedConceptEditing().edit(zeros) == {"moved": 0, "left": 0, "drift": 0}
    empty = ProjectionRequest({}, [], [])
    assert float(empty.gram()) == 0


def sum_of(weights: list[float], squares: list[float]) -> Direction:
    gram = torch.diag(torch.tensor(squares, dtype=torch.float64))
    gradients = [(torch.ones(2),) for _ in weights]
    return Direction.weighted_sum(torch.tensor(weights, dtype=torch.float64), gradients, gram)


@pytest.mark.parametrize(
    ("weights", "squares", "bound"),
    [
        ([2.0, -3.0], [4.0, 0.25], 2 * 2 + 3),  # a weight is no larger than the bound either
        ([1.0], [0.0], 1),
        ([0.0, 1.0], [NAN, 9.0], 3),  # what takes no part has no say
        ([1.0, 1.0], [9.0, -0.5], NAN),
        ([1.0, 1.0], [9.0, NAN], NAN),
        ([0.5], [INF], INF),
    ],
)
def test_no_entry_of_a_weighted_sum_exceeds_its_bound(
    weights: list[float], squares: list[float], bound: float
) -> None:
    """It is nan where a length is unknown, so that the entries are read."""
    direction = sum_of(weights, squares)
    assert direction.bound == pytest.approx(bound, nan_ok=True)
    assert (direction.hold, direction.hold_trained) == (False, False)


def test_what_a_method_is_unless_it_says_otherwise() -> None:
    class Plain(Method):
        def direction(self, closure: object) -> Direction:
            raise NotImplementedError

    assert Method.has_rounds is False
    assert Plain().uses_all(("retain", "forget")) is False
    assert Plain().ends_round(3) is False
    assert Munba().uses_all(("retain", "forget")) is True
    assert (Direction(()).hold, Direction(()).hold_trained) == (False, False)
    assert GateEdit.adds_gate is True


def test_a_gated_layer_has_the_matrix_of_its_kind() -> None:
    key, value = torch.zeros(1, 1), torch.ones(1, 1)
    for kind, weight in (("key", key), ("value", value)):
        layer = GatedLayer("a", kind, query=key, key=key, value=value, output=key)
        assert layer.weight is weight
    assert GateRequest(None, [], key, key, key, key).seed == 0


def test_the_step_of_a_gram_method_carries_its_gram_matrix_and_weights() -> None:
    retain, forget = pair(0.3, 2.0, 5.0)
    direction = Munba().direction(closure(retain, forget))
    torch.testing.assert_close(
        direction.gram, torch.tensor([[4.0, 3.0], [3.0, 25.0]], dtype=torch.float64)
    )
    expected = direction.weights[0] * flat(retain) + direction.weights[1] * flat(forget)
    torch.testing.assert_close(flat(direction.vec), expected)
    torch.testing.assert_close(Munba().weights(direction.gram), direction.weights)
    assert direction.notes == {"degenerate": 0, "clamped": 0}
