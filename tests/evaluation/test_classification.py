"""Membership inference and the table of a classifier, on outputs with known answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.metrics import roc_auc_score
from sklearn.svm import SVC
from torch import nn

from concept_eraser.data.labelled import from_arrays
from concept_eraser.evaluation.labelled.classification import (
    Outputs,
    Table,
    auc,
    intervals,
    likelihood_ratio,
    measure,
    membership,
    precision_and_recall,
    predict,
    shadow_attack,
)
from concept_eraser.utils.errors import UserError


def outputs(confidence: np.ndarray) -> Outputs:
    """A two-class model's outputs with a given probability of the true label 0."""
    return Outputs(np.stack([confidence, 1 - confidence], 1), np.zeros(len(confidence), dtype=int))


def random_outputs(low: float, high: float, n: int, seed: int) -> Outputs:
    return outputs(np.random.default_rng(seed).uniform(low, high, n))


@pytest.mark.parametrize("attack", ["svc", "logistic"])
@pytest.mark.parametrize("signal", ["confidence", "loss", "entropy"])
def test_membership_inference_detects_members_of_an_overfitted_model(
    signal: str, attack: str
) -> None:
    members, others = random_outputs(0.97, 1.0, 300, 0), random_outputs(0.5, 0.9, 200, 1)
    mia, accuracy = membership(members, others, random_outputs(0.97, 1.0, 100, 2), signal, attack)
    assert accuracy > 0.95
    assert mia < 0.05  # still members
    # forgotten
    assert membership(members, others, random_outputs(0.5, 0.9, 100, 3), signal, attack)[0] > 0.95


def test_members_are_taken_for_the_more_confident() -> None:
    """A fit that says the opposite, as one without a trace does by chance, turns nothing round."""
    members, others = random_outputs(0.5, 0.8, 300, 0), random_outputs(0.55, 0.85, 300, 1)
    confident, unsure = random_outputs(0.95, 1.0, 50, 2), random_outputs(0.35, 0.4, 50, 3)
    assert membership(members, others, confident)[0] == 0
    assert membership(members, others, unsure)[0] == 1
    accuracy = membership(members, others, unsure)[1]
    assert accuracy < 0.5  # as the fit's slope is not used


def test_membership_inference_is_at_chance_without_overfitting() -> None:
    _, accuracy = membership(
        random_outputs(0, 1, 2000, 0), random_outputs(0, 1, 2000, 1), random_outputs(0, 1, 100, 2)
    )
    assert 0.45 < accuracy < 0.55
    assert abs(auc(random_outputs(0, 1, 2000, 0), random_outputs(0, 1, 2000, 1)) - 0.5) < 0.03


def test_auc_is_scikit_learns_with_ties() -> None:
    a, b = outputs(np.array([0.9, 0.5, 0.5, 0.2])), outputs(np.array([0.5, 0.1, 0.3]))
    expected = roc_auc_score(
        [1] * 4 + [0] * 3, np.concatenate([a.signal("loss"), b.signal("loss")])
    )
    assert auc(a, b) == pytest.approx(expected)


def test_the_likelihood_ratio_separates_members_from_others() -> None:
    rng = np.random.default_rng(0)
    hard = rng.uniform(0.3, 0.9, 50)  # the confidence of each example without training on it

    def world(gain: float) -> Outputs:
        logits = np.log(hard / (1 - hard)) + gain + 0.1 * rng.standard_normal(50)
        return outputs(1 / (1 + np.exp(-logits)))

    inside, outside = [world(1.0) for _ in range(4)], [world(0.0) for _ in range(4)]
    assert (likelihood_ratio(world(1.0), inside, outside) > 0).mean() > 0.95
    assert (likelihood_ratio(world(0.0), inside, outside) > 0).mean() < 0.05
    with pytest.raises(UserError, match="at least two shadow models"):
        likelihood_ratio(world(0.0), inside[:1], outside)


def three_classes(sharpness: float, n: int, seed: int, classes: int = 3) -> Outputs:
    """Outputs whose true class is as probable as `sharpness` says."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    logits = rng.standard_normal((n, 3)) + sharpness * np.eye(3)[labels]
    powers = np.exp(logits)
    return Outputs(powers / powers.sum(1, keepdims=True), labels)


@pytest.mark.parametrize("attack", ["mlp", "logistic"])
def test_the_shadow_attack_separates_members_from_others(attack: str) -> None:
    members = [three_classes(6.0, 200, seed) for seed in range(2)]
    others = [three_classes(1.0, 150, 10 + seed) for seed in range(2)]
    inside, outside = three_classes(6.0, 300, 20), three_classes(1.0, 300, 21)
    scores = [shadow_attack(members, others, some, attack=attack) for some in (inside, outside)]
    precision, recall = precision_and_recall(*scores)
    assert precision > 0.85
    assert recall > 0.9
    blind = shadow_attack(members, [three_classes(6.0, 150, 30)] * 2, inside, attack=attack)
    assert 0.3 < (blind > 0.5).mean() < 0.7


def test_the_shadow_attack_has_one_classifier_for_each_class() -> None:
    """Members of class 0 are sharp and those of class 1 are flat: one rule for both would fail."""
    sharp, flat = [0.99, 0.01], [0.6, 0.4]

    def group(first: list[float], second: list[float]) -> Outputs:
        rows = np.array([first] * 40 + [second[::-1]] * 40)
        return Outputs(rows, np.repeat([0, 1], 40))

    members, others = group(sharp, flat), group(flat, sharp)
    scores = shadow_attack([members], [others], members, attack="logistic")
    assert (scores > 0.5).all()
    assert (shadow_attack([members], [others], others, attack="logistic") < 0.5).all()


def test_a_class_without_shadow_members_gets_the_attack_of_all() -> None:
    members, others = [three_classes(6.0, 300, 0, 2)], [three_classes(1.0, 300, 1, 2)]
    targets = Outputs(np.eye(3)[[2, 2]], np.array([2, 2]))
    scores = shadow_attack(members, others, targets, attack="logistic")
    assert scores.shape == (2,)
    with pytest.raises(UserError, match="at least one shadow model"):
        shadow_attack([], [], targets)
    with pytest.raises(UserError, match="found 2 and 1"):
        shadow_attack(members * 2, others, targets)
    nobody = Outputs(np.empty((0, 3)), np.empty(0, dtype=int))
    with pytest.raises(UserError, match="no members, or no others"):
        shadow_attack([nobody], others, targets)


def test_precision_and_recall_by_hand() -> None:
    """Two of four members and one of five others are above the threshold: 0.5 / (0.5 + 0.2)."""
    members, others = np.array([0.9, 0.6, 0.5, 0.1]), np.array([0.7, 0.4, 0.3, 0.2, 0.0])
    precision, recall = precision_and_recall(members, others)
    assert precision == pytest.approx(0.5 / 0.7)
    assert recall == 0.5
    assert np.isnan(precision_and_recall(members, others, threshold=1.0)[0])


def test_the_row_of_a_known_classifier() -> None:
    """A linear model that predicts class 0 for every example."""
    linear = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    data = from_arrays(np.ones((10, 2)), [0] * 6 + [1] * 4)
    row = measure(linear, data, torch.arange(6, 10), torch.arange(6), data)
    assert (row.forget, row.retain, row.test) == (0.0, 100.0, 60.0)
    assert row.gap(Table(0.0, 100.0, 50.0, row.mia, 0.5, 50.0)) == pytest.approx(2.5)
    assert intervals(linear, {"retain": (data, torch.arange(6))})["retain"]["value"] == 1.0
    with pytest.raises(UserError, match="no examples"):
        predict(linear, data, torch.arange(0))


def test_the_likelihood_ratio_by_hand() -> None:
    """The logit 1 of the target under N(2, 2), trained on it, and N(0, 4), not trained on it."""

    def world(*logits: float) -> Outputs:
        return outputs(1 / (1 + np.exp(-np.array(logits))))

    ratio = likelihood_ratio(world(1.0), [world(1.0), world(3.0)], [world(s) for s in (-2, 0, 2)])
    expected = norm(2, np.sqrt(2)).logpdf(1) - norm(0, 2).logpdf(1)
    assert ratio == pytest.approx(expected, rel=1e-9)


def test_the_support_vector_machine_is_the_authors() -> None:
    """SVC_MIA.py, lines 59-68, on overlapping signals, where C and gamma change the result."""
    members, others = random_outputs(0.5, 1.0, 30, 0), random_outputs(0.3, 0.9, 30, 1)
    targets = random_outputs(0.2, 1.0, 400, 2)
    x = np.concatenate([members.confidence, others.confidence])[:, None]
    authors = SVC(C=3, gamma="auto", kernel="rbf").fit(x, np.repeat([1, 0], 30))
    expected = 1 - authors.predict(targets.confidence[:, None]).mean()
    share, accuracy = membership(members, others, targets, attack="svc")
    assert share == pytest.approx(expected)
    assert accuracy == pytest.approx(authors.score(x, np.repeat([1, 0], 30)))
    assert share != pytest.approx(
        1
        - SVC(C=1, gamma="auto")
        .fit(x, np.repeat([1, 0], 30))
        .predict(targets.confidence[:, None])
        .mean()
    )


def test_the_attack_of_a_row_learns_from_retained_and_test_examples() -> None:
    """The forgotten examples are as unsure as the test examples of their class."""
    linear = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(2))
    sure, unsure = np.array([[5.0, 0.0]] * 6), np.array([[0.0, 0.1]] * 4)
    data = from_arrays(np.concatenate([sure, unsure]), [0] * 6 + [1] * 4)
    test = from_arrays(np.concatenate([0.01 * sure, unsure]), [0] * 6 + [1] * 4)
    row = measure(linear, data, torch.arange(6, 10), torch.arange(6), test)
    assert (row.mia, row.attack, row.auc) == (100.0, 100.0, 0.5)


def test_gaps_of_both_signs_add_up() -> None:
    row, reference = Table(10, 90, 80, 60, 0.5, 50), Table(0, 100, 90, 50, 0.9, 90)
    assert row.gap(reference) == reference.gap(row) == 10


def test_a_run_is_measured_before_and_after(tmp_path, cli) -> None:
    """From the command line and from Python.

    The accuracy on the forgotten class falls, and that on the other classes does not.
    """
    import json

    from concept_eraser import api, registry
    from concept_eraser.models.module import build
    from concept_eraser.training.fit import Plan, fit

    digits = registry.build("dataset", "digits", {}).load("train")
    torch.manual_seed(0)
    model = build("mlp", "classifier", inputs=64, norm=False)

    def loss(rows):
        return nn.functional.cross_entropy(
            model.module(digits.inputs(rows)), digits.labels[list(rows)]
        )

    fit(model.module, loss, torch.arange(len(digits)), Plan(epochs=10))
    model.save(tmp_path / "net")
    run = tmp_path / "run"
    dry = cli(
        "erase", "digits_three_munba", f"model={tmp_path / 'net'}", "-o", str(run), "--dry-run"
    ).stdout
    assert "forget: 146 of 1437 examples of digits" in dry
    assert "trains 15,010 of 15,010 weights" in dry
    cli("erase", "digits_three_munba", f"model={tmp_path / 'net'}", "-o", str(run), "-q")
    text = cli("evaluate", str(run)).stdout
    assert "MIA AUC" in text
    forms = {
        f"{attack} on {signal}"
        for attack in ("logistic", "svc")
        for signal in ("confidence", "loss", "entropy")
    }
    assert all(form in text for form in forms)
    results = json.loads((run / "evaluation.json").read_text())["results"]
    group = "test, forgotten classes"
    assert results["before"]["accuracy"][group]["value"] > 0.9
    assert results["after"]["accuracy"][group]["value"] < 0.3
    assert (
        results["after"]["accuracy"]["test"]["value"]
        > results["before"]["accuracy"]["test"]["value"] - 0.05
    )
    assert api.evaluate(run).measurements["after"] == results["after"]
    result = cli("evaluate", str(run), "--suite", "tiny_star")
    assert result.returncode == 2
    assert "leave out --suite" in result.stderr
