"""CPE: its loss against loops by hand, its bounds, its learning rate, its draws and its pool."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import get_cosine_with_hard_restarts_schedule_with_warmup

from concept_eraser.methods import cpe
from concept_eraser.methods.base import GatedLayer, GateRequest
from concept_eraser.methods.cpe import ConceptPinpointEraser
from concept_eraser.models.residual_gate import ResidualAttentionGate

TOKENS, WIDTH, INNER, IMAGE = 5, 6, 4, 3
SHORT: dict[str, Any] = {
    "gate_rank": 3,
    "rank": 2,
    "stages": 2,
    "steps": 30,
    "lr": 1e-2,
    "first_lr": 1.0,
    "adversary_steps": 20,
    "adversaries": 2,
    "mixtures": 3,
}


def request(concepts: int = 3, **changes: Any) -> GateRequest:
    """Keys and values of two attentions, and random states. A prompt's last token says which."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layers = []
    for attention in "ab":
        matrices = {
            "query": draw(INNER, IMAGE),
            "key": draw(INNER, WIDTH),
            "value": draw(INNER, WIDTH),
            "output": draw(IMAGE, INNER),
        }
        layers += [
            GatedLayer(f"{attention}.to_k", "key", **matrices),
            GatedLayer(f"{attention}.to_v", "value", **matrices),
        ]
    gate = ResidualAttentionGate(
        WIDTH, {layer.name: INNER for layer in layers}, gate_rank=3, rank=2
    )
    gate.initialise(generator)
    fields: dict[str, Any] = {
        "gate": gate,
        "layers": layers,
        "forget": draw(concepts, TOKENS, WIDTH),
        "anchor": draw(concepts, TOKENS, WIDTH),
        "retain": draw(7, TOKENS, WIDTH),
        "empty": draw(TOKENS, WIDTH),
    }
    return GateRequest(**{**fields, **changes})


def trained(made: GateRequest) -> GateRequest:
    """Give each tensor of the gate values that are not small."""
    generator = torch.Generator().manual_seed(5)
    gate: Any = made.gate
    for parameter in gate.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return made


def by_hand(made: GateRequest, layer: GatedLayer, states: Tensor) -> np.ndarray:
    """Return W e_i + (1 / rank) up(down(g_i)) of one prompt by loops over the tokens."""
    gate: Any = made.gate
    tensors = {name: value.detach().double().numpy() for name, value in gate.named_parameters()}
    name = layer.name.replace(".", "_")
    e, weight = states.double().numpy(), layer.weight.double().numpy()
    down, up = tensors[f"down.{name}"], tensors[f"up.{name}"]
    rows = []
    for i in range(len(e)):
        query = e[i] @ tensors["query"]
        scores = np.exp([query @ (e[j] @ tensors["query"]) for j in range(len(e))])
        mixed = sum(score / scores.sum() * e[j] for j, score in enumerate(scores))
        g = mixed / (1 + np.exp(-(tensors["scale"] @ mixed)))
        rows.append(weight @ e[i] + up @ (down @ g) / len(down))
    return np.array(rows)


def bound_by_hand(layer: GatedLayer) -> float:
    def largest(matrix: Tensor) -> float:
        return float(np.linalg.svd(matrix.double().numpy())[1][0])

    if layer.name.endswith("to_v"):
        return largest(layer.output)
    return largest(layer.output @ layer.value) * largest(layer.query) / TOKENS


@pytest.mark.parametrize("adversaries", [1, 2])
def test_the_loss_is_that_of_the_definition(adversaries: int) -> None:
    options = ConceptPinpointEraser(guidance=0.7, retain_scale=30.0, adversary_scale=2.0)
    made = trained(request())
    fit = cpe._Fit(options, made, torch.Generator())
    generator = torch.Generator().manual_seed(3)
    offsets = torch.randn(adversaries, TOKENS, WIDTH, generator=generator)
    c, a, retain = made.forget[0], made.anchor[0], made.retain[:3]
    loss = fit.gate_loss(torch.cat([c[None], c + offsets]), concept=c, anchor=a, retain=retain)
    parts = []
    for layer in made.layers:
        weight = layer.weight.double().numpy()
        old_c, old_a = c.double().numpy() @ weight.T, a.double().numpy() @ weight.T
        goal = old_a + 0.7 * (old_a - old_c)
        forget = ((by_hand(made, layer, c) - goal) ** 2).mean()
        found = np.mean([(by_hand(made, layer, c + d) - goal) ** 2 for d in offsets])
        kept = np.mean(
            [(by_hand(made, layer, r) - r.double().numpy() @ weight.T) ** 2 for r in retain]
        )
        parts.append(bound_by_hand(layer) * (forget + 2.0 * found + 30.0 * kept))
    assert loss.item() == pytest.approx(np.mean(parts), rel=1e-5)
    without = fit.gate_loss(c[None], concept=c, anchor=a, retain=retain)
    assert without.item() < loss.item()


def test_the_loss_of_the_adversaries_is_that_of_the_definition() -> None:
    made = trained(request())
    fit = cpe._Fit(ConceptPinpointEraser(), made, torch.Generator())
    offsets = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    c, parts = made.forget[0], []
    for layer in made.layers:
        old = c.double().numpy() @ layer.weight.double().numpy().T
        errors = [(by_hand(made, layer, c + d) - old) ** 2 for d in offsets]
        parts.append(bound_by_hand(layer) * np.mean(errors))
    assert fit.adversary_loss(offsets, c).item() == pytest.approx(np.mean(parts), rel=1e-5)


@pytest.mark.parametrize(("warmup", "cycles"), [(0, 1), (5, 1), (5, 2), (5, 3)])
def test_the_learning_rate_is_that_of_transformers(warmup: int, cycles: int) -> None:
    steps = 40
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_cosine_with_hard_restarts_schedule_with_warmup(
        optimizer, warmup, steps, num_cycles=cycles
    )
    for step in range(steps + 2):
        expected = schedule.get_last_lr()[0]
        assert cpe.rate(step, steps, warmup=warmup, cycles=cycles) == pytest.approx(expected)
        optimizer.step()
        schedule.step()


def test_a_mixture_lies_between_two_retained_prompts_and_has_noise() -> None:
    retain = torch.arange(5.0)[:, None, None] * torch.ones(5, TOKENS, WIDTH)
    states = cpe.mixtures(retain, 200, noise=0.0, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(states, states[:, :1, :1].expand_as(states))
    values = states[:, 0, 0]
    assert float(values.min()) >= 0
    assert float(values.max()) <= 4
    assert len(values.unique()) > 150
    same = retain[1:2]
    noisy = cpe.mixtures(same, 4000, noise=0.01, generator=torch.Generator().manual_seed(0))
    # u n_1 + (1 - u) n_2 has the mean variance 2/3
    expected = 0.01 * float(same.norm()) * math.sqrt(2 / 3)
    assert float((noisy - same).std()) == pytest.approx(expected, rel=0.02)


def fit_short(made: GateRequest, **options: Any) -> Any:
    return ConceptPinpointEraser(**{**SHORT, **options}).edit(made)


def test_a_fit_turns_the_concept_into_its_anchor_and_leaves_the_retained_prompts() -> None:
    """The concept's states point elsewhere than the retained ones, as a text encoder's do."""
    made = request(1)
    forget = made.forget.clone()
    forget[..., 0] += 4.0
    retain, empty = made.retain.clone(), made.empty.clone()
    retain[..., 0] -= 4.0
    empty[..., 0] -= 4.0
    made = replace(made, forget=forget, anchor=forget * 0.5, retain=retain, empty=empty)
    before = [layer.weight.clone() for layer in made.layers]
    outcome = fit_short(made, steps=400, guidance=0.0, retain_scale=10.0, adversary_scale=0.0)
    assert outcome["left"] < 0.5
    assert outcome["drift"] < 0.1
    for layer, weight in zip(made.layers, before, strict=True):
        assert torch.equal(layer.weight, weight)
    gate: Any = made.gate
    assert not any(parameter.requires_grad for parameter in gate.parameters())


def test_the_figures_are_those_of_the_definition(monkeypatch) -> None:
    made = trained(request())
    monkeypatch.setattr(cpe._Fit, "train_gate", lambda *args: None)
    monkeypatch.setattr(cpe._Fit, "train_adversaries", lambda *args: torch.zeros(2, TOKENS, WIDTH))
    outcome = fit_short(made, stages=4)
    sums = np.zeros(4)
    for layer in made.layers:
        weight, bound = layer.weight.double().numpy(), bound_by_hand(layer)
        for c, a in zip(made.forget, made.anchor, strict=True):
            goal, old = a.double().numpy() @ weight.T, c.double().numpy() @ weight.T
            sums[0] += bound * ((by_hand(made, layer, c) - goal) ** 2).sum()
            sums[1] += bound * ((old - goal) ** 2).sum()
        for r in made.retain:
            old = r.double().numpy() @ weight.T
            sums[2] += bound * ((by_hand(made, layer, r) - old) ** 2).sum()
            sums[3] += bound * (old**2).sum()
    assert outcome["left"] == pytest.approx(math.sqrt(sums[0] / sums[1]), rel=1e-5)
    assert outcome["drift"] == pytest.approx(math.sqrt(sums[2] / sums[3]), rel=1e-5)
    assert outcome["adversaries"] == 6  # two for each stage but the last


@pytest.mark.parametrize(("pool", "sizes"), [("newest", [0, 2, 2]), ("all", [0, 2, 4])])
def test_the_stages_read_their_pool(pool: Any, sizes: list[int], monkeypatch) -> None:
    """Stage 0 has no offsets. Its steps, learning rate and cycles are others."""
    seen: list[int] = []
    calls: list[tuple[int, float, int]] = []
    train, minimise = cpe._Fit.train_gate, cpe._Fit._minimise

    def train_gate(self: Any, parameters: Any, offsets: Any, stage: int) -> None:
        seen.append(sum(map(len, offsets)))
        train(self, parameters, offsets, stage)

    def record(self: Any, variables: Any, loss: Any, **options: Any) -> None:
        calls.append((options["steps"], options["lr"], options["cycles"]))
        minimise(self, variables, loss, **{**options, "steps": 2})

    monkeypatch.setattr(cpe._Fit, "train_gate", train_gate)
    monkeypatch.setattr(cpe._Fit, "_minimise", record)
    fit_short(request(), stages=3, pool=pool, first_steps=4, first_lr=10.0, lr=1e-4)
    assert seen == sizes
    gate, adversary = (30, 1e-4, 1), (20, 0.01, 1)
    assert calls == [(120, pytest.approx(1e-3), 2), adversary, gate, adversary, gate]


def test_adversaries_begin_uniform_within_their_bound() -> None:
    """In the only step the learning rate is still 0."""
    options = ConceptPinpointEraser(**{**SHORT, "adversaries": 300, "adversary_steps": 1})
    offsets = cpe._Fit(options, request(), torch.Generator().manual_seed(4)).train_adversaries(0)
    assert offsets.shape == (300, TOKENS, WIDTH)
    relative = offsets * WIDTH**2 * math.sqrt(TOKENS * WIDTH)
    assert -1 <= relative.min() < -0.99 < 0.99 < relative.max() <= 1
    assert abs(float(relative.mean())) < 0.03
    assert float(relative.square().mean()) == pytest.approx(1 / 3, rel=0.05)


def test_the_loss_reads_the_prompt_and_each_offset_of_the_pool(monkeypatch) -> None:
    options, made = ConceptPinpointEraser(**{**SHORT, "steps": 1}), request()
    read, found, retained = [], [], []
    loss, search = cpe._Fit.gate_loss, cpe._Fit.train_adversaries

    def recorded(fit: Any, concepts: Tensor, **states: Tensor) -> Tensor:
        read.append(concepts - states["concept"])
        retained.append(len(states["retain"]))
        return loss(fit, concepts, **states)

    def searched(fit: Any, stage: int) -> Tensor:
        found.append(search(fit, stage))
        return found[-1]

    monkeypatch.setattr(cpe._Fit, "gate_loss", recorded)
    monkeypatch.setattr(cpe._Fit, "train_adversaries", searched)
    options.edit(made)
    assert set(retained) == {1 + options.mixtures}  # the empty prompt
    *first, last = read
    assert len(first) == options.first_steps
    assert all(torch.equal(one, torch.zeros(1, TOKENS, WIDTH)) for one in first)
    torch.testing.assert_close(last[1:], found[0], rtol=1e-4, atol=1e-6)
    assert torch.equal(last[:1], first[0])


def test_the_steps_are_those_of_adamw_with_the_schedule() -> None:
    options = ConceptPinpointEraser(**SHORT)
    fit = cpe._Fit(options, request(), torch.Generator())
    ours, theirs = (torch.tensor([3.0, -2.0], requires_grad=True) for _ in range(2))
    fit._minimise([ours], lambda: ours.square().sum(), steps=12, lr=0.3, cycles=2, remark="a stage")
    optimizer = torch.optim.AdamW([theirs], lr=0.3, weight_decay=0.01)
    schedule = get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 5, 12, 2)
    for _ in range(12):
        optimizer.zero_grad()
        theirs.square().sum().backward()
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(ours, theirs)
    assert ours.grad is None


def test_without_a_prompt_of_the_concept_nothing_changes() -> None:
    made = request(concepts=0)
    before = {name: value.clone() for name, value in made.gate.named_parameters()}
    result = ConceptPinpointEraser(**SHORT).edit(made)
    assert result == {"left": 0.0, "drift": 0.0, "adversaries": 0.0}
    assert all(torch.equal(before[name], value) for name, value in made.gate.named_parameters())


def test_adversaries_move_towards_states_that_the_gate_lets_pass() -> None:
    """With a gate that changes the concept, offsets exist that undo the change in part."""
    made = request()
    fit_short(made, stages=1, retain_scale=0.0)
    fit = cpe._Fit(
        ConceptPinpointEraser(**{**SHORT, "adversary_steps": 200}),
        made,
        torch.Generator().manual_seed(0),
    )
    offsets = fit.train_adversaries(0)
    losses = [
        sum(float(fit.adversary_loss(states, c)) for c in made.forget)
        for states in (torch.zeros_like(offsets), offsets)
    ]
    assert losses[1] < 0.8 * losses[0]


def test_a_seed_gives_one_gate_and_another_seed_another() -> None:
    gates = []
    for seed in (0, 0, 1):
        made = request(seed=seed)
        fit_short(made)
        gate: Any = made.gate
        gates.append(torch.cat([value.flatten() for value in gate.state_dict().values()]))
    assert torch.equal(gates[0], gates[1])
    assert not torch.equal(gates[0], gates[2])


def test_each_step_is_reported() -> None:
    steps: list[tuple[int, int, str]] = []
    fit_short(request(report=lambda *args: steps.append(args)), steps=2, adversary_steps=3)
    assert steps[:2] == [(1, 8, "stage 1, gate"), (2, 8, "stage 1, gate")]
    assert steps[8:] == [
        *((k, 3, "stage 1, adversaries") for k in (1, 2, 3)),
        *((k, 2, "stage 2, gate") for k in (1, 2)),
    ]


def test_numbers_that_are_not_finite_change_nothing() -> None:
    made = request(forget=torch.full((1, TOKENS, WIDTH), math.inf))
    gate: Any = made.gate
    before = {name: value.clone() for name, value in gate.state_dict().items()}
    with pytest.raises(ValueError, match=r"not finite, so nothing was changed; use a smaller lr"):
        fit_short(replace(made, anchor=made.anchor[:1]))
    assert all(torch.equal(value, before[name]) for name, value in gate.state_dict().items())
    assert not any(parameter.requires_grad for parameter in gate.parameters())
