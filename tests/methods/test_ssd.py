"""Selective synaptic dampening: torch.func as an outside reference, the selected weights, and when
no weight can be selected.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser import api, registry
from concept_eraser.methods.base import EditRequest
from concept_eraser.methods.ssd import SelectiveDampening, factors
from concept_eraser.methods.vectors import Vec
from concept_eraser.models.loading import load_part
from concept_eraser.utils.errors import UserError

N, N_FORGET = 40, 6


def request(
    forget: int = N_FORGET, micro: int = 3, n: int = N
) -> tuple[EditRequest, Tensor, Tensor]:
    """A small net that is partly fitted; batches come three examples at a time."""
    torch.manual_seed(0)  # the forget set, the first examples, has the largest losses
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(n, 5, dtype=torch.float64)
    y = (x @ torch.randn(5, 3, dtype=torch.float64)).argmax(1)
    for _ in range(20):
        for p, g in zip(
            model.parameters(),
            torch.autograd.grad(F.cross_entropy(model(x), y), tuple(model.parameters())),
            strict=True,
        ):
            p.data -= 0.5 * g
    order = F.cross_entropy(model(x), y, reduction="none").argsort(descending=True)
    x, y = x[order], y[order]

    def batches(rows):
        return [
            (x[list(rows[i : i + micro])], y[list(rows[i : i + micro])])
            for i in range(0, len(rows), micro)
        ]

    edit_request = EditRequest(
        model,
        tuple(range(forget)),
        tuple(range(forget, n)),
        0.0,
        batches,
        lambda rows: F.cross_entropy(model(x[list(rows)]), y[list(rows)]),
        tuple(model.parameters()),
    )
    return edit_request, x, y


def fisher(model: nn.Module, x: Tensor, y: Tensor) -> Vec:
    """mean of the squared per-example gradients, all at once by vmap."""
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(p: dict, one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, p, (one[None],)), label[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
    return tuple(each[k].square().mean(0) for k in params)


def test_importance_is_the_diagonal_of_the_empirical_fisher_matrix() -> None:
    edit_request, x, y = request()
    importance = SelectiveDampening().importance(edit_request, [1, 5, 30, 31])
    rows = [1, 5, 30, 31]
    for a, b in zip(importance, fisher(edit_request.model, x[rows], y[rows]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("micro", [2, 64])
def test_a_batch_is_the_square_of_its_mean_gradient_however_it_is_loaded(micro: int) -> None:
    edit_request, x, y = request(micro=micro)
    importance = SelectiveDampening(batch=4).importance(
        edit_request, list(range(10))
    )  # batches of 4, 4 and 2
    parts = [
        (
            torch.autograd.grad(
                F.cross_entropy(edit_request.model(x[few]), y[few]), edit_request.params
            ),
            len(few),
        )
        for few in torch.arange(10).split(4)
    ]
    for i, value in enumerate(importance):
        torch.testing.assert_close(value, sum(n / 10 * g[i].square() for g, n in parts))


@pytest.mark.parametrize("lamb", [0.5, 1.0])
def test_the_edit_is_the_papers_two_equations(lamb: float) -> None:
    edit_request, x, y = request()
    before = [p.detach().clone() for p in edit_request.params]
    everything, forget = (
        fisher(edit_request.model, x, y),
        fisher(edit_request.model, x[:N_FORGET], y[:N_FORGET]),
    )
    figures = SelectiveDampening(alpha=3.0, lamb=lamb).edit(edit_request)
    count = 0
    for p, old, d, f in zip(edit_request.params, before, everything, forget, strict=True):
        selection = f > 3.0 * d
        expected = torch.where(selection, old * (lamb * d / f).clamp(max=1), old)
        torch.testing.assert_close(p.detach(), expected)
        assert torch.equal(p.detach()[~selection], old[~selection]), (
            "only the selected weights move"
        )
        count += int(selection.sum())
    size = sum(p.numel() for p in edit_request.params)
    assert 0.05 * size < count < 0.95 * size  # otherwise the test proves nothing
    assert figures["selected"] == pytest.approx(count / size)
    assert 0 < figures["factor"] < lamb / 3.0


def test_the_factor_is_bounded_and_independent_of_the_losss_scale() -> None:
    g = torch.Generator().manual_seed(0)
    everything, forget = (torch.rand(1000, generator=g, dtype=torch.float64) ** 4 for _ in range(2))
    everything[:10] = forget[10:20] = 0.0
    everything[5] = forget[5] = 0.0
    for alpha, lamb in ((0.5, 1.0), (3.0, 1.0), (2.0, 0.1)):
        values = factors(everything, forget, alpha, lamb)
        selection = forget > alpha * everything
        assert bool((values[~selection] == 1).all())
        assert float(values.min()) >= 0
        assert float(values[selection].max()) <= min(1.0, lamb / alpha)
        assert not selection[10:20].any()
        # 3 x the loss
        torch.testing.assert_close(factors(9.0 * everything, 9.0 * forget, alpha, lamb), values)
    # alpha -> infinity: nothing
    assert bool((factors(everything[10:], forget[10:], 1e30, 1.0) == 1).all())


def test_a_share_of_the_examples_bounds_what_can_be_selected() -> None:
    """F_D >= |D_f|/|D| F_Df, so that alpha >= |D|/|D_f| selects nothing: an error, not an edit."""
    edit_request, x, y = request()
    everything, forget = (
        fisher(edit_request.model, x, y),
        fisher(edit_request.model, x[:N_FORGET], y[:N_FORGET]),
    )
    assert all(
        bool((d >= N_FORGET / N * f * (1 - 1e-12)).all())
        for d, f in zip(everything, forget, strict=True)
    )
    before = [p.detach().clone() for p in edit_request.params]
    with pytest.raises(
        ValueError, match=r"alpha 10 selects no weight: with 6 of 40 .* more than 6.67 times"
    ):
        SelectiveDampening().edit(edit_request)
    assert SelectiveDampening(alpha=1e9, batch=8).edit(edit_request) == {
        "selected": 0.0,
        "factor": 1.0,
    }
    assert all(torch.equal(a, b) for a, b in zip(before, edit_request.params, strict=True))


def test_squared_batches_select_more_than_the_bound() -> None:
    """Gradients of one class add up: with the code's batches the paper's alpha of 10 selects
    weights for one of ten classes.
    """
    edit_request, _, y = request(n=400, forget=0)
    order = (y != 0).int().argsort(stable=True)
    n_forget = int((y == 0).sum())
    edit_request = EditRequest(
        edit_request.model,
        tuple(order[:n_forget].tolist()),
        tuple(order[n_forget:].tolist()),
        0.0,
        edit_request.batches,
        edit_request.loss,
        edit_request.params,
    )
    alpha = 1.01 * 400 / n_forget
    assert SelectiveDampening(alpha=alpha, batch=32).edit(edit_request)["selected"] > 0.02


def test_a_class_goes_from_a_classifier_without_training(tmp_path: Path) -> None:
    digits = registry.build("dataset", "digits", {}).load("train")
    torch.manual_seed(0)
    net = registry_mlp()
    x = digits.inputs(range(len(digits)))
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x), digits.labels).backward()
        optimizer.step()

    def accuracy(where: Tensor) -> float:
        with torch.no_grad():
            return float((net(x[where]).argmax(1) == digits.labels[where]).float().mean())

    three = digits.labels == 3
    before = accuracy(three), accuracy(~three)
    settings = {
        "target": "classifier",
        "forget": {"data": "digits", "classes": [3]},
        "retain": "rest",
        "training": {"device": "cpu"},
    }
    run = api.erase(
        model=net, method={"name": "ssd", "alpha": 5.0}, output=tmp_path / "a", **settings
    )
    after = accuracy(three), accuracy(~three)
    assert before[0] > 0.95
    assert after[0] < 0.1, after
    assert after[1] > before[1] - 0.05, after
    assert 0 < json.loads((run.folder / "done.json").read_text())["edit"]["selected"] < 0.5
    with pytest.raises(UserError, match=r"does not use retain.distill"):
        api.erase(
            model=net,
            method="ssd",
            output=tmp_path / "b",
            **{**settings, "retain": {"data": "rest", "distill": 0.5}},
        )


@pytest.mark.parametrize(
    "method", [{"name": "ssd", "alpha": 1.5, "lamb": 0.1}, {"name": "influence", "samples": 4}]
)
def test_a_clip_model_is_edited_too(method: dict, tmp_path: Path) -> None:
    """Only selected weights of one tower change, and the run's model has the changes."""
    settings = {
        "forget": {"data": "painted", "options": {"n": 40}, "classes": ["star"]},
        "retain": "rest",
    }
    run = api.erase(
        model="tiny-sd",
        target="clip",
        trainable="text_attention",
        templates=["a picture of a {}"],
        method=method,
        training={"device": "cpu"},
        output=tmp_path,
        **settings,
    )
    before, after = (
        load_part("tiny-sd", "clip").parts["clip"].state_dict(),
        run.model.parts["clip"].state_dict(),
    )
    names = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert names
    assert all("text_model" in name and "self_attn" in name for name in names)


def registry_mlp() -> nn.Module:
    from concept_eraser.models.module import build

    return build("mlp", "classifier", inputs=64, hidden=64, norm=False).module.requires_grad_(True)


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"lamb": -1.0}, {"batch": 0}])
def test_options_are_checked(options: dict) -> None:
    with pytest.raises(ValueError, match="must be > 0 and batch >= 1"):
        SelectiveDampening(**options)


def test_factors_by_hand() -> None:
    """F_D = 1 everywhere, alpha = 2: selected above 2, factor min(1, lambda F_D / F_f)."""
    ones, forget = torch.ones(4), torch.tensor([1.0, 2.0, 4.0, 10.0])
    assert factors(ones, forget, 2.0, 1.0).tolist() == pytest.approx([1.0, 1.0, 0.25, 0.1])
    assert factors(ones, forget, 2.0, 5.0).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.5])
    assert factors(0 * ones, torch.tensor([0.0, 1.0, 0.0, 3.0]), 2.0, 1.0).tolist() == [
        1.0,
        0.0,
        1.0,
        0.0,
    ]


def test_the_mean_factor_of_the_selected_is_reported() -> None:
    edit_request, x, y = request()
    everything, forget = (
        fisher(edit_request.model, x, y),
        fisher(edit_request.model, x[:N_FORGET], y[:N_FORGET]),
    )
    figures = SelectiveDampening(alpha=3.0, lamb=0.5).edit(edit_request)
    ratios = torch.cat(
        [(0.5 * d / f)[f > 3.0 * d] for d, f in zip(everything, forget, strict=True)]
    )
    assert figures["factor"] == pytest.approx(float(ratios.clamp(max=1).mean()))


def test_the_bound_of_alpha_at_the_bound() -> None:
    """With 10 of 40 examples to forget no importance can be four times as large: 4 is an error, and
    3.999 is not.
    """
    edit_request, _, _ = request(forget=10)
    with pytest.raises(ValueError, match=r"alpha 4 selects no weight: with 10 of 40"):
        SelectiveDampening(alpha=4.0).edit(edit_request)
    assert 0 <= SelectiveDampening(alpha=3.999).edit(edit_request)["selected"] < 1
    assert SelectiveDampening(alpha=4.0, batch=2).edit(edit_request)["selected"] < 1
    nobody, _, _ = request(forget=0)
    assert SelectiveDampening(alpha=1e6).edit(nobody) == {"selected": 0.0, "factor": 1.0}


def test_batches_of_all_examples_have_the_order_of_the_seed() -> None:
    """Importance for all examples, in batches of four of torch's own permutation; the forget set
    comes first.
    """
    whole, _, _ = request()
    for seed in (0, 3):
        edit_request, _, _ = request()
        before = [p.detach().clone() for p in edit_request.params]
        SelectiveDampening(alpha=1.2, batch=4, seed=seed).edit(edit_request)
        order = torch.randperm(N, generator=torch.Generator().manual_seed(seed)).tolist()
        method = SelectiveDampening(batch=4)
        everything = method.importance(whole, order)
        forget = method.importance(whole, range(N_FORGET))
        for p, old, d, f in zip(edit_request.params, before, everything, forget, strict=True):
            torch.testing.assert_close(p.detach(), old * factors(d, f, 1.2, 1.0))


def test_a_parameter_without_a_gradient_has_no_importance() -> None:
    edit_request, _, _ = request()
    spare = torch.ones(2, dtype=torch.float64, requires_grad=True)
    wider = EditRequest(
        edit_request.model,
        edit_request.forget,
        edit_request.retain,
        0.0,
        edit_request.batches,
        edit_request.loss,
        (*edit_request.params, spare),
    )
    assert SelectiveDampening().importance(wider, [0, 1])[-1].tolist() == [0, 0]


def test_one_example_of_forty_may_matter_forty_times_as_much() -> None:
    edit_request, _, _ = request(forget=1)
    assert 0 <= SelectiveDampening(alpha=39.9).edit(edit_request)["selected"] < 1
    with pytest.raises(ValueError, match="with 1 of 40"):
        SelectiveDampening(alpha=40.0).edit(edit_request)


def test_a_weight_without_importance_is_not_selected() -> None:
    shares = []
    for spare in (0, 50):
        edit_request, _, _ = request()
        more = torch.ones(spare, dtype=torch.float64, requires_grad=True)
        wider = EditRequest(
            edit_request.model,
            edit_request.forget,
            edit_request.retain,
            0.0,
            edit_request.batches,
            edit_request.loss,
            (*edit_request.params, more),
        )
        size = sum(p.numel() for p in wider.params)
        shares.append(SelectiveDampening(alpha=3.0).edit(wider)["selected"] * size)
    assert shares[0] == pytest.approx(shares[1])
    assert shares[0] > 0
