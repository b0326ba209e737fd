"""The evaluation detects bad models.

The original model shows the concept, a noise model has a low retain accuracy, and garbage is
labelled none.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from markupsafe import escape

import concept_eraser
from concept_eraser import UserError
from concept_eraser.data import generate
from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.base import Evidence, Group, Result
from concept_eraser.evaluation.judges.tiny import TinyJudge
from concept_eraser.evaluation.statistics import wilson
from concept_eraser.reporting import single_run
from concept_eraser.tiny import garbage, painter
from concept_eraser.utils import resources
from tests.reporting.test_several_runs import Page

SUITE = {
    "concept": {"shape": "star"},
    "seed": 3,
    "sampling": {"steps": 12, "batch_size": 32, "precision": "bf16"},
    "groups": {
        "direct": {"prompts": "tiny_star", "role": "forget", "n": 32},
        "neighbours": {"prompts": "tiny_star_neighbours", "role": "neighbour", "n": 16},
        "retained": {"prompts": "tiny_rest", "role": "retain", "n": 24},
    },
    "metrics": ["concept_rate", "accuracy", "clip_score"],
}


@pytest.fixture(scope="module")
def baseline(shared_tiny) -> suites.PromptEvaluation:
    return suites.evaluate(shared_tiny, shared_tiny, suites.load(SUITE))


def test_the_original_model_is_not_erased(baseline) -> None:
    result = baseline.find("concept_rate", "direct")
    assert result.after.value > 0.85  # the recorded rate is 0.96
    assert result.difference.value == 0
    assert "was not erased" in single_run.verdict(baseline)
    assert baseline.find("accuracy_shape", "retained").after.value > 0.9
    assert baseline.find("accuracy_color", "retained").after.value > 0.9
    assert baseline.find("concept_rate", "retained").after.value < 0.1


def test_a_noise_model_has_a_low_retain_accuracy(shared_tiny, baseline) -> None:
    """A model that generates noise has a low concept rate.

    The report must state the loss of retain accuracy.
    """
    from concept_eraser.models.loading import load

    noise_model = load("tiny-sd")
    with torch.no_grad():
        for parameter in noise_model.denoiser.parameters():
            parameter.normal_(0, 0.05)
    evaluation = suites.evaluate(shared_tiny, noise_model, suites.load(SUITE))
    assert evaluation.find("concept_rate", "direct").after.value < 0.2
    assert evaluation.find("no_object_rate", "direct").after.value > 0.5
    assert evaluation.find("accuracy_shape", "retained").difference.high < -0.5
    assert evaluation.find("clip_score", "retained").difference.high < 0
    assert "no recognisable object" in single_run.verdict(evaluation)


def test_results_travel_with_their_protocol(baseline, tmp_path: Path) -> None:
    baseline.save(tmp_path / "evaluation.json")
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content["protocol"]["sampling"]["steps"] == 12
    assert set(content["prompt_hashes"]) == set(SUITE["groups"])
    assert content["environment"]["versions"]["diffusers"]
    for row in content["results"]:
        assert row["after"]["n"] >= 2
        assert row["after"]["low"] <= row["after"]["value"] <= row["after"]["high"]
    other = suites.load({**SUITE, "seed": 4})
    assert (
        suites.PromptEvaluation(other, {}, [], {}, {}, baseline.judge, {}).as_dict()[
            "protocol_hash"
        ]
        != content["protocol_hash"]
    )


def test_the_report_is_one_self_contained_file(baseline, tmp_path: Path) -> None:
    path = concept_eraser.report(baseline, tmp_path / "report.html")
    text = path.read_text()
    assert text.count('src="data:image/png;base64,') >= 2 * 3 * 12
    assert "http://" not in text
    assert "https://" not in text
    assert 'name="viewport"' in text
    assert "@media print" in text
    assert str(escape(single_run.verdict(baseline))) in text
    assert single_run.verdict(baseline) in Page(text).words
    assert text.count("alt=") == text.count("<img")


def test_the_report_escapes_what_it_shows(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    rate = Result("concept_rate", "direct", wilson(1, 9), "lower", wilson(8, 9))
    evaluation = suites.PromptEvaluation(
        suite=suites.load({**SUITE, "concept": {"shape": evil}}),
        models={"before": evil, "after": evil},
        results=[rate],
        groups={},
        environment={"command": evil},
        judge="judge",
        refused={"fid": evil},
    )
    text = concept_eraser.report(evaluation, tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 6
    assert evil in Page(text).words


def test_the_judge_separates_painted_scenes_from_garbage() -> None:
    judge, rng = TinyJudge(), np.random.default_rng(11)
    scenes, images = painter.paint_batch(400, rng)
    labels = judge.classify(torch.from_numpy(images))
    for i, attribute in enumerate(("shape", "color", "style", "background")):
        names = np.array([vars(scene)[attribute] for scene in scenes])
        assert (labels[attribute] == names).mean() >= 0.995 - 0.005, i
    _, rubbish = garbage.garbage_batch(300, rng)
    assert (judge.classify(torch.from_numpy(rubbish))["shape"] == "none").mean() > 0.93
    noise = torch.from_numpy(rng.integers(0, 256, (50, 64, 64, 3), dtype=np.uint8))
    assert (judge.classify(noise)["shape"] == "none").mean() > 0.9


def test_the_bundled_suites_state_the_images_of_each_model() -> None:
    counted = 0
    for name in resources.names("eval"):
        suite, text = suites.load(name), resources.find("eval", name).read_text()
        if not re.search(r"[\d,]+ images", suite.about):
            continue
        counted += 1
        n = sum(group.n for group in suite.groups.values())
        assert re.findall(r"([\d,]+) images of each model", text) == [f"{n:,}"], name
    assert counted > 20


def test_the_judge_refuses_other_sizes() -> None:
    with pytest.raises(UserError, match="64x64"):
        TinyJudge().classify(torch.zeros(1, 32, 32, 3, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"concept": {"shape": "octagon"}}, "cannot detect shape 'octagon'"),
        ({"concept": {}}, "names one attribute"),
        ({"judge": "tinny"}, "did you mean 'tiny'"),
        ({"metrics": ["accuraccy"]}, "did you mean 'accuracy'"),
        ({"groupz": {}}, "groupz"),
        ({"seed": True}, "seed: expected a number, found true"),
        (
            {"groups": {"direct": {"prompts": "tiny_star", "role": "forget", "n": 1}}},
            "greater than or equal to 2",
        ),
        (
            {"groups": {"direct": {"prompts": "tiny_starr", "role": "forget"}}},
            "did you mean 'tiny_star'",
        ),
    ],
)
def test_bad_suites(change: dict, message: str, shared_tiny) -> None:
    with pytest.raises(UserError, match=message):
        suites.evaluate(shared_tiny, shared_tiny, suites.load({**SUITE, **change}))


def test_images_come_from_the_cache_only_for_the_same_weights(
    tiny, tmp_path: Path, monkeypatch
) -> None:
    calls = []
    original = type(tiny).sample
    monkeypatch.setattr(
        type(tiny),
        "sample",
        lambda self, *a, **k: calls.append(len(a[0])) or original(self, *a, **k),
    )
    texts, seeds, how = ["a red star"] * 3, [1, 2, 3], generate.Sampling(2, batch_size=2)
    first = generate.generate(tiny, texts, seeds, how, cache=tmp_path)
    assert calls == [2, 1]
    assert torch.equal(generate.generate(tiny, texts, seeds, how, cache=tmp_path), first)
    assert calls == [2, 1], "answered from the cache"
    next(tmp_path.rglob("000002.safetensors")).write_bytes(b"torn")
    assert torch.equal(generate.generate(tiny, texts, seeds, how, cache=tmp_path), first)
    assert calls == [2, 1, 1], "a damaged chunk is made again"
    with torch.no_grad():
        tiny.denoiser.conv_out.bias.add_(1e-3)
    generate.generate(tiny, texts, seeds, how, cache=tmp_path)
    assert calls == [2, 1, 1, 2, 1], "other weights, other images"


@pytest.mark.parametrize(
    ("hits", "n", "message"),
    [
        (0, 500, "'star' is erased: its concept rate is 0.0%"),
        (0, 24, "seems erased: its concept rate is 0.0% .* up to 14% cannot be ruled out"),
        (60, 500, "only partly erased"),
        (400, 500, "was not erased"),
    ],
)
def test_verdicts(hits: int, n: int, message: str) -> None:
    rate = Result("concept_rate", "direct", wilson(hits, n), "lower", wilson(n - 1, n))
    evaluation = suites.PromptEvaluation(suites.load(SUITE), {}, [rate], {}, {}, "judge", {})
    assert re.search(message, single_run.verdict(evaluation))


def test_a_verdict_compares_the_rates_of_one_group() -> None:
    rates = [
        Result("concept_rate", group, wilson(after, 100), "lower", wilson(before, 100))
        for group, before, after in (("direct", 98, 2), ("synonyms", 60, 40))
    ]
    groups = {
        g: {"prompts": ["a star"], "role": "forget", "n": 100} for g in ("direct", "synonyms")
    }
    suite = suites.load({"concept": {"shape": "star"}, "groups": groups})
    evaluation = suites.PromptEvaluation(suite, {}, rates, {}, {}, "judge", {})
    expected = "was not erased: its concept rate is 40.0% in 'synonyms' (60% before)"
    assert expected in single_run.verdict(evaluation)


def test_unlearn_canvas_by_hand() -> None:
    """Four prompts for stars, one of which still shows a star, and three prompts for houses.

    One house is a tree and one has another colour.
    """
    from concept_eraser.evaluation.metrics.unlearn_canvas import UnlearnCanvas

    def group(
        name: str,
        role: str,
        prompt_fields: list[dict[str, str]],
        shapes: list[str],
        colors: list[str],
    ) -> Group:
        after = {"shape": np.array(shapes), "color": np.array(colors)}
        before = {
            key: np.array([fields.get(key, "red") for fields in prompt_fields]) for key in after
        }
        return Group(
            name,
            role,
            [Prompt("", fields) for fields in prompt_fields],
            {},
            {"before": before, "after": after},
        )  # type: ignore[arg-type]

    class Two(TinyJudge):
        classes = {"shape": ("star", "house", "tree", "none"), "color": ("red", "blue")}  # noqa: RUF012

    stars = group(
        "direct",
        "forget",
        [{"shape": "star"}] * 4,
        ["star", "none", "circle", "circle"],
        ["red"] * 4,
    )
    houses = group(
        "rest",
        "retain",
        [{"shape": "house", "color": "blue"}] * 3,
        ["house", "tree", "house"],
        ["blue", "blue", "red"],
    )
    results = {
        r.metric: r
        for r in UnlearnCanvas().measure(
            Evidence({"direct": stars, "rest": houses}, ("shape", "star"), Two(), 0)
        )
    }
    assert (results["ua"].before.value, results["ua"].after.value) == (0, 0.75)
    assert (results["ira"].before.value, results["ira"].after.value) == (1, pytest.approx(2 / 3))
    assert (results["cra"].before.value, results["cra"].after.value) == (1, pytest.approx(2 / 3))
    assert results["cra"].difference.value == pytest.approx(-1 / 3)
    # values that the judge has no class for count as little as they do in `accuracy`
    unknown = [{"shape": "lighthouse", "color": "pink"}] * 3
    fields = [*[{"shape": "house", "color": "blue"}] * 3, *unknown]
    labels = (["house", "tree", "house", *["tree"] * 3], ["blue", "blue", "red", *["red"] * 3])
    mixed = Evidence(
        {"rest": group("rest", "retain", fields, *labels)}, ("shape", "star"), Two(), 0
    )
    again = {r.metric: r for r in UnlearnCanvas().measure(mixed)}
    assert again["ira"].after == results["ira"].after
    assert again["cra"].after == results["cra"].after

    # an image counts by the attributes that its prompt states and the judge has a class for
    class Three(Two):
        classes = {**Two.classes, "style": ("flat", "dotted")}  # noqa: RUF012

    styled = group(
        "rest",
        "retain",
        [{"shape": "house", "color": "blue", "style": "flat"}, {"shape": "house", "style": "flat"}],
        ["house", "house"],
        ["red", ""],
    )
    styles = {"before": np.array(["flat"] * 2), "after": np.array(["flat", "flat"])}
    for when, values in styles.items():
        styled.labels[when]["style"] = values  # type: ignore[index]
    for cross, expected in (("", [0.5, 1.0]), ("style", [1.0, 1.0]), ("color", None)):
        crossed = {
            r.metric: r
            for r in UnlearnCanvas(cross=cross).measure(
                Evidence({"rest": styled}, ("shape", "star"), Three(), 0)
            )
        }
        if expected is None:  # one prompt alone states a colour
            assert "cra" not in crossed
        else:
            assert crossed["cra"].per_image["after"].tolist() == expected
    with pytest.raises(UserError, match="colour"):
        UnlearnCanvas(cross="colour").measure(Evidence({}, ("shape", "star"), Two(), 0))


@pytest.mark.parametrize(("name", "other"), [("star", "style"), ("dotted", "shape")])
def test_the_suites_of_unlearn_canvas_have_every_combination_four_times(
    name: str, other: str
) -> None:
    """The target's prompts state it, no other prompt does. CRA counts the other domain only."""
    suite = suites.load(f"tiny_canvas_{name}")
    ((attribute, value),) = suite.concept.items()
    target, others = (suites.group_prompts(suite, group).prompts for group in ("target", "others"))
    assert {row.fields[attribute] for row in target} == {value}
    assert value not in {row.fields[attribute] for row in others}
    combinations = Counter(row.text for row in (*target, *others))
    assert len(combinations) == 10 * 8 * 4
    assert set(combinations.values()) == {4}
    metric = suites.metric(suite.metrics[-1])
    rows = [Prompt("", {"shape": "moon", "color": "red", "style": "flat"})] * 2
    labels = {"shape": ["moon", "fish"], "color": ["blue", "blue"], "style": ["flat", "flat"]}
    arrays = {key: np.array(column) for key, column in labels.items()}
    group = Group("others", "retain", rows, {}, {"before": arrays, "after": arrays})
    judge = suite.build_judge()
    results = metric.measure(Evidence({"others": group}, (attribute, value), judge, 0))
    values = {row.metric: row.after.value for row in results}
    assert values == ({"ira": 0.5, "cra": 1.0} if other == "style" else {"ira": 1.0, "cra": 0.5})


def test_another_sampler_or_size_is_another_image_in_the_cache(tmp_path: Path) -> None:
    """Two checkpoints with the same weights and different schedulers must not share images."""
    from diffusers import EulerDiscreteScheduler

    from concept_eraser.models.loading import load

    model, other = load("tiny-sd"), load("tiny-sd")
    other.pipeline.scheduler = EulerDiscreteScheduler.from_config(
        other.pipeline.scheduler.config, beta_end=0.02
    )
    sampling = generate.Sampling(steps=3)
    assert generate.model_fingerprint(model) == generate.model_fingerprint(other)
    first, second = (
        generate.generate(m, ["a red star"], [1], sampling, cache=tmp_path) for m in (model, other)
    )
    assert not torch.equal(first, second)
    assert torch.equal(second, other.sample(["a red star"], seeds=[1], steps=3, guidance=5.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": {}}, "groups"),
        (
            {"metrics": ["fid", {"name": "fid", "reference": "before"}]},
            "two of its metrics give numbers of one name",
        ),
        ({"metrics": [{"preset": "mace"}]}, "a mapping with `name`"),
        ({"metrics": [{"name": "nudenet", "preset": "mase"}]}, "did you mean 'mace'"),
    ],
)
def test_suites_that_cannot_be_measured(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        suites.load({**SUITE, **changes})
    suites.load({**SUITE, "metrics": [{"name": "nudenet", "preset": p} for p in ("mace", "uda")]})


@pytest.mark.parametrize("n", [1, 0, -3])
def test_a_group_has_at_least_two_images(n: int) -> None:
    with pytest.raises(UserError, match=f"n: expected at least 2 images of each group, found {n}"):
        suites.load(SUITE).with_at_most(n)


def test_a_suite_that_is_no_yaml(tmp_path: Path) -> None:
    for content in (b"a: [", b"\xff\xfe\x00"):
        (tmp_path / "bad.yaml").write_bytes(content)
        with pytest.raises(UserError, match=r"is no (valid YAML|text in UTF-8)"):
            suites.load(tmp_path / "bad.yaml")
