"""The outcomes of single images: every number of a summary follows from them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import concept_eraser
from concept_eraser import UserError
from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation import outcomes
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import runner
from concept_eraser.evaluation.base import Group, Judge, Result
from concept_eraser.evaluation.judges.tiny import TinyJudge
from concept_eraser.evaluation.metrics.concept_rate import mean_result, share_result
from concept_eraser.evaluation.statistics import wilson
from concept_eraser.models.loading import load

SAMPLING = {"steps": 4, "batch_size": 32, "precision": "bf16"}
SUITE = {
    "concept": {"shape": "star"},
    "seed": 3,
    "sampling": SAMPLING,
    "groups": {
        "direct": {"prompts": "tiny_star", "role": "forget", "n": 12},
        "retained": {"prompts": "tiny_rest", "role": "retain", "n": 16},
    },
    "metrics": ["concept_rate", "accuracy", "clip_score", "unlearn_canvas", "fid"],
}
ATTRIBUTES = ("shape", "color", "style", "background")


@pytest.fixture(scope="module")
def damaged() -> Any:
    """The bundled model with noise in its weights, so that some images change their labels."""
    model = load("tiny-sd")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.7 * parameter.std() * noise if parameter.numel() > 1 else 0)
    return model


@pytest.fixture(scope="module")
def evaluation(shared_tiny: Any, damaged: Any, tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("evaluation")
    measured = concept_eraser.evaluate(damaged, SUITE, before=shared_tiny, output=folder)
    return measured, folder


@pytest.fixture(scope="module")
def frame(evaluation: Any) -> pandas.DataFrame:
    """The table as a reader gets it, in one call."""
    return pandas.read_csv(evaluation[1] / "evaluation.csv.xz", keep_default_na=False)


def stages(rows: pandas.DataFrame, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Values before and after, in the order of the images."""
    before, after = (values[rows.stage == stage].to_numpy() for stage in ("before", "after"))
    return before, after


def test_every_number_of_an_evaluation_follows_from_its_table(evaluation, frame) -> None:
    measured, folder = evaluation
    content = json.loads((folder / "evaluation.json").read_text())
    assert len(frame) == 2 * (12 + 16)
    checked = set()
    for result in measured.results:
        group, _, value = result.group.partition(":")
        rows = frame[frame.group == group]
        attribute = result.metric.rpartition("_")[2]
        if result.metric == "kid_judge":  # a distance of two sets, see below
            assert result.metric not in frame
            continue
        if result.metric == "clip_score":
            values = stages(rows, rows.clip_score.astype("float32"))
            again = mean_result("clip_score", group, *values, "higher", result.settings)
        elif result.metric == "cra":
            others = [name for name in ATTRIBUTES if name != "shape"]
            stated = np.array([rows[f"expected_{name}"] != "" for name in others])
            right = np.array(
                [rows[f"expected_{name}"] == rows[f"predicted_{name}"] for name in others]
            )
            parts = (right & stated).sum(0)[stated.any(0)] / stated.sum(0)[stated.any(0)]
            some = rows[stated.any(0)]
            values = stages(some, pandas.Series(parts, some.index))
            again = mean_result("cra", group, *values, "higher", bounds=(0, 1))
        else:
            if result.metric == "concept_rate":
                hits = rows.shows_concept == 1
            elif result.metric == "no_object_rate":
                hits = rows.predicted_shape == "none"
            elif result.metric == "ua":
                hits = rows.predicted_shape != "star"
            else:
                attribute = "shape" if result.metric == "ira" else attribute
                rows = rows[rows[f"expected_{attribute}"] != ""]
                rows = rows[rows[f"expected_{attribute}"] == value] if value else rows
                hits = rows[f"predicted_{attribute}"] == rows[f"expected_{attribute}"]
            before, after = stages(rows, hits)
            again = share_result(result.metric, result.group, before, after, result.better)
        assert again.as_dict() == result.as_dict(), (result.metric, result.group)
        checked.add(result.metric)
    assert {"concept_rate", "no_object_rate", "accuracy_shape", "clip_score", "cra"} <= checked
    rate = measured.find("concept_rate", "direct")
    assert rate.after.value < rate.before.value  # else a table of constants would do
    assert "per_image" not in content["results"][0]


def test_texts_with_any_line_break_are_one_cell(tmp_path: Path) -> None:
    texts = ["a\rstar", "a\nstar", "a\r\nstar", 'a "red", star', " a star "]
    outcomes.write(tmp_path / "a.csv.xz", [{"prompt": text, "seed": 1} for text in texts])
    table = pandas.read_csv(tmp_path / "a.csv.xz")
    assert table.prompt.tolist() == texts
    assert table.seed.tolist() == [1] * len(texts)


def test_every_metric_over_images_has_a_column() -> None:
    """A distance of two sets has none, and a name that begins as `ua` or `ira` does not matter."""
    images = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    pair = {"before": images, "after": images}
    labels = {when: {"class": np.array(["cat", "dog"])} for when in pair}
    group = Group("kept", "retain", [Prompt("a"), Prompt("b")], pair, labels)
    values = {"before": np.array([1.0, 2.0]), "after": np.array([3.0, 4.0])}
    one = wilson(1, 2)
    rows = outcomes.rows_of_group(
        group,
        Named(False),
        ("class", "dog"),
        seeds=[1, 2],
        models={"before": "x", "after": "y"},
        results=[
            Result("uality", "kept", one, "higher", per_image=values),
            Result("fid_judge", "kept", one, "lower"),
            Result("ua", "kept", one, "higher", per_image=values),
        ],
    )
    assert [row["uality"] for row in rows] == [1.0, 2.0, 3.0, 4.0]
    assert not {"fid_judge", "ua"} & rows[0].keys()


def test_a_row_has_the_prompt_the_seed_and_what_the_judge_reads(evaluation, frame) -> None:
    measured, _ = evaluation
    group = measured.groups["direct"]
    rows = frame[(frame.group == "direct") & (frame.stage == "after")]
    assert rows.prompt.tolist() == [prompt.text for prompt in group.prompts]
    assert rows.seed.tolist() == suites.group_seeds(
        measured.suite, "direct", suites.group_prompts(measured.suite, "direct").prompts
    )
    assert set(rows.judge) == {measured.judge}
    assert rows.model.iloc[0] in measured.models["after"]
    judge = TinyJudge()
    images = group.images["after"]
    chances = judge.probabilities(images)
    for name in ATTRIBUTES:
        expected = [prompt.fields.get(name, "") for prompt in group.prompts]
        assert rows[f"expected_{name}"].tolist() == expected
        assert rows[f"predicted_{name}"].tolist() == judge.classify(images)[name].tolist()
        assert np.allclose(rows[f"probability_{name}"], chances[name].max(1), atol=1e-4)
    pixels = images.permute(0, 3, 1, 2).float().div(127.5).sub(1)
    star = judge.probability(pixels, "shape", "star")
    assert np.allclose(rows.concept_probability, star, atol=1e-4)


@pytest.fixture(scope="module")
def campaign(shared_tiny: Any) -> runner.Campaign:
    protocol = runner.Protocol(
        suites.load(SUITE), "random_tokens", {"tries": 3}, n=8, batch=3, seed=1, hide="shape"
    )
    return runner.run(protocol, shared_tiny, shared_tiny)


def test_every_rate_of_an_attack_follows_from_its_table(campaign, tmp_path: Path) -> None:
    campaign.save_outcomes(tmp_path / "attack.csv.xz")
    frame = pandas.read_csv(tmp_path / "attack.csv.xz")
    original = frame[frame.stage == "original"]
    assert len(original) == 8
    assert (1 - original.counted).sum() == campaign.protocol["left_out"]
    assert original.counted.tolist() == original.shows_concept.tolist()
    clean = frame[(frame.stage == "clean") & (frame.counted == 1)].set_index("position")
    attacked = frame[frame.stage == "attack"].set_index("position")
    assert set(attacked.family) == {"control"}
    assert set(attacked.attack) == {"random_tokens"}
    broken = clean.shows_concept.astype(bool) | attacked.broken.reindex(clean.index).eq(1)
    rates = campaign.rates()
    assert rates["pre"] == dataclasses.asdict(wilson(int(clean.shows_concept.sum()), len(clean)))
    assert rates["asr"] == dataclasses.asdict(wilson(int(broken.sum()), len(clean)))
    assert rates["attacked"] == dataclasses.asdict(
        wilson(int(attacked.broken.sum()), len(attacked))
    )
    assert round(attacked.rounds.sum() / len(attacked), 1) == campaign.cost["images a prompt"]
    for number, curve in enumerate(campaign.curves):
        steps = attacked[attacked.batch == number]["round"]
        assert [point["fell"] for point in curve] == [
            int((steps <= point["round"]).sum()) for point in curve
        ]
    assert 0 < attacked.broken.sum() < len(attacked)


def test_the_image_that_broke_a_prompt_is_described(campaign) -> None:
    rows = [row for row in campaign.outcomes if row["stage"] == "attack"]
    attempts = {(attempt.prompt, attempt.seed): attempt for attempt in campaign.attempts}
    for row in rows:
        attempt = attempts[row["prompt"], row["seed"]]
        assert row["broken"] == attempt.success == (row["predicted_shape"] == "star")
        assert row["round"] == attempt.round
        assert row["expected_shape"] == "star"
        assert row["rounds"] == (attempt.round or 3)
        assert (row["probability_shape"] == row["concept_probability"]) == row["broken"]
        assert row["probability_shape"] > 0.09  # the largest of eleven


def test_equal_outcomes_have_equal_bytes_and_a_users_file_stays(campaign, tmp_path) -> None:
    for name in ("a.csv.xz", "b.csv.xz"):
        campaign.save_outcomes(tmp_path / name)
    content = (tmp_path / "a.csv.xz").read_bytes()
    assert content == (tmp_path / "b.csv.xz").read_bytes()
    with pytest.raises(UserError, match="was not written by concept_eraser"):
        campaign.save_outcomes(tmp_path / "a.csv.xz")
    outcomes.write(tmp_path / "a.csv.xz", [{"x": True}, {"y": "1,2\n"}], overwrite=True)
    frame = pandas.read_csv(tmp_path / "a.csv.xz")
    assert frame.x.tolist()[0] == 1
    assert frame.y.tolist()[1] == "1,2\n"


class Named(Judge):
    """A judge with names only. `differentiable`: it also has the probability of one class."""

    fingerprint = "named"
    classes = {"class": ("cat", "dog")}  # noqa: RUF012

    def __init__(self, differentiable: bool) -> None:
        self.differentiable = differentiable

    def probability(self, images: torch.Tensor, attribute: str, value: str) -> torch.Tensor:
        if not self.differentiable:
            return super().probability(images, attribute, value)
        assert images.shape[1:] == (3, 2, 2)
        assert (attribute, value) == ("class", "dog")
        return images.amin((1, 2, 3)).add(1).div(2)

    def classify(self, images: torch.Tensor) -> dict[str, np.ndarray]:
        bright = images.float().mean((1, 2, 3)) > 127
        return {"class": np.array(["dog" if one else "cat" for one in bright])}

    def features(self, images: torch.Tensor) -> np.ndarray:
        raise AssertionError

    clip_scores = reference_features = features  # type: ignore[assignment]


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_judge_without_probabilities_has_empty_columns(differentiable: bool) -> None:
    judge, concept = Named(differentiable), ("class", "dog")
    images = torch.stack([torch.full((2, 2, 3), value) for value in (0, 255)]).to(torch.uint8)
    probabilities = outcomes.read_probabilities(judge, concept, images)
    rows = outcomes.label_columns(
        judge,
        concept,
        prompts=[Prompt("a dog", {"class": "dog"}), Prompt("an animal")],
        labels=judge.classify(images),
        probabilities=probabilities,
    )
    assert [row["expected_class"] for row in rows] == ["dog", ""]
    assert [row["predicted_class"] for row in rows] == ["cat", "dog"]
    assert [row["shows_concept"] for row in rows] == [False, True]
    assert not any("probability_class" in row for row in rows)
    chances = [row.get("concept_probability") for row in rows]
    assert chances == ([0.0, 1.0] if differentiable else [None, None])
