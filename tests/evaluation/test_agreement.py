"""The agreement of two judges, and a second judge in a suite, its outcomes and its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import concept_eraser
from concept_eraser import UserError, registry
from concept_eraser.evaluation import agreement
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import runner
from concept_eraser.evaluation.base import Evidence, Group
from concept_eraser.evaluation.judges.tiny import TinyJudge
from concept_eraser.evaluation.judges.tiny2 import SecondTinyJudge
from concept_eraser.evaluation.metrics.concept_rate import ConceptRate
from studies import selection

SUITE = {
    "concept": {"shape": "star"},
    "seed": 3,
    "sampling": {"steps": 4, "batch_size": 32, "precision": "bf16"},
    "groups": {
        "direct": {"prompts": "tiny_star", "role": "forget", "n": 12},
        "retained": {"prompts": "tiny_rest", "role": "retain", "n": 16},
    },
    "metrics": ["concept_rate"],
}


@dataclass(frozen=True)
class Doubter(TinyJudge):
    """The judge tiny, except that it never sees a star and knows no style."""

    classes = {key: value for key, value in TinyJudge.classes.items() if key != "style"}  # noqa: RUF012
    fingerprint = "doubter"

    def classify(self, images: torch.Tensor) -> dict[str, np.ndarray]:
        labels = super().classify(images)
        return {**labels, "shape": np.where(labels["shape"] == "star", "none", labels["shape"])}


def labels(*names: str) -> np.ndarray:
    return np.array(names)


@pytest.mark.parametrize("seed", range(3))
def test_kappa_equals_scikit_learns(seed: int) -> None:
    from sklearn.metrics import cohen_kappa_score

    rng = np.random.default_rng(seed)
    first = rng.choice(["star", "moon", "none"], 60, p=[0.6, 0.3, 0.1])
    second = np.where(rng.random(60) < 0.7, first, rng.choice(["star", "fish"], 60))
    kappa = agreement.cohens_kappa(first, second)
    assert kappa.value == pytest.approx(cohen_kappa_score(first, second))
    assert kappa.low < kappa.value < kappa.high <= 1
    assert kappa.n == 60


def test_kappa_at_its_ends() -> None:
    same = agreement.cohens_kappa(labels("a", "b", "a"), labels("a", "b", "a"))
    assert same.value == 1
    assert np.isnan([same.low, same.high]).all()  # no interval, and not an interval of width zero
    # as many agreements as chance gives
    chance = agreement.cohens_kappa(labels("a", "a", "b", "b"), labels("a", "b", "a", "b"))
    assert chance.value == pytest.approx(0)
    assert np.isnan(agreement.cohens_kappa(labels("a", "a"), labels("a", "a")).value)
    assert agreement.cohens_kappa(labels("a", "a"), labels("a", "b")).value == pytest.approx(0)
    for some in ((labels("a"), labels("a")), (labels("a", "b"), labels("a"))):
        with pytest.raises(UserError, match="at least 2"):
            agreement.cohens_kappa(*some)


@pytest.fixture(scope="module")
def measured(shared_tiny: Any, tmp_path_factory: Any) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("second")
    evaluation = concept_eraser.evaluate(
        shared_tiny, SUITE, before=shared_tiny, second_judge=Doubter(), output=folder
    )
    return evaluation, folder


def test_a_second_judge_is_reported_beside_the_first(measured) -> None:
    evaluation, folder = measured
    content = json.loads((folder / "evaluation.json").read_text())
    second = content["second_judge"]
    stars = evaluation.groups["direct"].labels["after"]["shape"] == "star"
    assert stars.sum() >= 6
    rows = {(r["attribute"], r["group"], r["stage"]): r for r in second["agreement"]}
    assert {attribute for attribute, _, _ in rows} == {"shape", "color", "background"}
    shape = rows["shape", "direct", "after"]
    assert shape["agreed"]["value"] == pytest.approx(1 - stars.mean())
    assert rows["shape", "all", "after"]["agreed"]["n"] == 28
    assert rows["color", "all", "before"]["agreed"]["value"] == 1
    assert rows["color", "all", "before"]["kappa"]["value"] == pytest.approx(1)
    assert second["concept_rate"]["direct"]["after"]["value"] == 0
    assert evaluation.find("concept_rate", "direct").after.value == stars.mean()  # of the first
    different = [row for row in evaluation.second_opinion.differences if row.stage == "after"]
    assert all(row.labels == {"shape": ("star", "none")} for row in different)
    positions = [row.position for row in different if row.group == "direct"]
    assert positions == np.flatnonzero(stars).tolist()


def test_outcomes_have_the_columns_of_the_second_judge(measured) -> None:
    evaluation, folder = measured
    frame = pandas.read_csv(folder / "evaluation.csv.xz", keep_default_na=False)
    assert set(frame.second_judge) == {"doubter"}
    stars = frame.predicted_shape == "star"
    assert (frame.second_predicted_shape[stars] == "none").all()
    assert (frame.second_predicted_shape[~stars] == frame.predicted_shape[~stars]).all()
    assert frame.second_shows_concept.sum() == 0
    assert "second_predicted_style" not in frame
    row = next(
        r
        for r in evaluation.second_opinion.agreements
        if (r.attribute, r.group, r.stage) == ("shape", "retained", "before")
    )
    some = frame[(frame.group == "retained") & (frame.stage == "before")]
    assert (some.predicted_shape == some.second_predicted_shape).mean() == row.agreed.value


def test_an_attack_is_decided_by_the_first_judge_and_labelled_by_both(
    shared_tiny, tmp_path: Path
) -> None:
    """The second judge changes no attempt. A folder of an attack without it is not continued."""
    suite = suites.load(SUITE)
    options: dict[str, Any] = {"n": 6, "batch": 3, "seed": 1, "hide": "shape"}
    campaigns = [
        runner.run(
            runner.Protocol(
                suite.using(second_judge=judge), "random_tokens", {"tries": 2}, **options
            ),
            shared_tiny,
            shared_tiny,
            folder=tmp_path / name,
        )
        for name, judge in (("one", None), ("two", Doubter()))
    ]
    assert campaigns[0].attempts == campaigns[1].attempts
    assert campaigns[0].as_dict()["protocol_hash"] == campaigns[1].as_dict()["protocol_hash"]
    one, two = ([r for r in c.outcomes if r["stage"] == "attack"] for c in campaigns)
    assert {row["shows_concept"] for row in two} == {True, False}
    for row, other in zip(one, two, strict=True):
        assert other["second_judge"] == "doubter"
        assert other["second_shows_concept"] is False
        seen = "none" if row["predicted_shape"] == "star" else row["predicted_shape"]
        assert other["second_predicted_shape"] == seen
        assert row == {key: v for key, v in other.items() if not key.startswith("second_")}
    again = runner.Protocol(
        suite.using(second_judge=Doubter()), "random_tokens", {"tries": 2}, **options
    )
    continued = runner.run(again, shared_tiny, shared_tiny, folder=tmp_path / "two")
    assert continued.outcomes == campaigns[1].outcomes
    with pytest.raises(UserError, match="holds another attack"):
        runner.run(again, shared_tiny, shared_tiny, folder=tmp_path / "one")
    same = runner.Protocol(suite.using(second_judge="tiny"), "random_tokens", **options)
    with pytest.raises(UserError, match="the second judge is the first one"):
        runner.run(same, shared_tiny, shared_tiny)


def test_the_report_shows_images_for_which_the_judges_differ(measured, tmp_path: Path) -> None:
    evaluation, _ = measured
    text = concept_eraser.report(evaluation, tmp_path / "report.html").read_text()
    different = len(evaluation.second_opinion.differences)
    assert f"differ in at least one attribute for {different} of 56 images" in text
    assert text.count("shape: star / none</figcaption>") == min(different, 24)
    assert "Concept rate by the second judge" in text


def test_a_second_judge_is_no_part_of_the_protocol(measured) -> None:
    """No number depends on it, so results with and without it can be compared."""
    evaluation, folder = measured
    content = json.loads((folder / "evaluation.json").read_text())
    assert "second_judge" not in content["protocol"]
    alone = suites.PromptEvaluation(suites.load(SUITE), {}, [], {}, {}, evaluation.judge, {})
    assert alone.as_dict()["protocol_hash"] == content["protocol_hash"]
    assert "second_judge" not in alone.as_dict()
    named = suites.load({**SUITE, "second_judge": "tiny2", "sensitive": True})
    changed = named.using(metrics=["accuracy"]).with_at_most(5)
    assert (changed.second_judge, changed.sensitive) == ("tiny2", True)
    with pytest.raises(UserError, match="did you mean 'tiny'"):
        suites.load({**SUITE, "second_judge": "tinny"}).build_second_judge()


def test_a_second_judge_must_be_another_and_know_the_concept(shared_tiny) -> None:
    with pytest.raises(UserError, match="is the first one"):
        concept_eraser.evaluate(shared_tiny, SUITE, before=shared_tiny, second_judge=TinyJudge())
    style = {**SUITE, "concept": {"style": "dotted"}}
    with pytest.raises(UserError, match="second judge cannot detect style 'dotted'"):
        concept_eraser.evaluate(shared_tiny, style, before=shared_tiny, second_judge=Doubter())


def test_no_setting_is_selected_by_a_judge_that_only_reports() -> None:
    assert registry.load("judge", "tiny2").only_reports
    assert not registry.load("judge", "tiny").only_reports
    selection.require_selecting_judge(suites.load(SUITE))
    with pytest.raises(SystemExit, match="only reports"):
        selection.require_selecting_judge(suites.load({**SUITE, "judge": "tiny2"}))
    with pytest.raises(SystemExit, match="second judge is for reported images"):
        selection.require_selecting_judge(suites.load({**SUITE, "second_judge": "tiny2"}))
    with pytest.raises(UserError, match="only reports"):
        SecondTinyJudge().probability(torch.zeros(1, 3, 64, 64), "shape", "star")


def test_selection_itself_refuses_the_judge(tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(json.dumps({**SUITE, "judge": "tiny2"}))
    study = {"select": {"image_seed": 1, "n": 4, "seeds": [0]}, "suite": str(suite), "grids": {}}
    with pytest.raises(SystemExit, match="only reports"):
        selection.select(study, "entry", entry={}, work=tmp_path, judge="")


def test_one_no_object_rate_per_group_where_every_head_has_none() -> None:
    """The shape decides: a judge with "none" in each head would give four numbers of one name."""

    @dataclass(frozen=True)
    class Judge(TinyJudge):
        classes = SecondTinyJudge.classes

    names: dict[str, Sequence[str]] = {
        "shape": ["none", "star"],
        "color": ["none", "none"],
        "style": ["none", "flat"],
        "background": ["sky", "sky"],
    }
    read = {key: np.array(value) for key, value in names.items()}
    group = Group("direct", "forget", [], {}, {"before": read, "after": read})
    results = ConceptRate().measure(Evidence({"direct": group}, ("color", "red"), Judge(), 0))
    assert [r.metric for r in results] == ["concept_rate", "no_object_rate"]
    assert results[1].after.value == 0.5
