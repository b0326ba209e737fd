"""Attacks and evaluations with a control: a model that never learned the concept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from concept_eraser import UserError, api, registry
from concept_eraser.cli import attack as attack_command
from concept_eraser.cli import evaluate as evaluate_command
from concept_eraser.evaluation import result_schema, retraining
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import cascade, controlled, excess, runner
from concept_eraser.evaluation.attacks.base import Attack
from concept_eraser.evaluation.attacks.relearning import Relearning
from concept_eraser.evaluation.attacks.revival import Revival
from concept_eraser.evaluation.never_learned import NeverLearned, read_record
from concept_eraser.evaluation.seed_statistics import cluster_bootstrap
from concept_eraser.evaluation.statistics import mcnemar, paired_difference
from concept_eraser.models.loading import load
from concept_eraser.reporting import control_tables, run_results

SUITE = {
    "concept": {"shape": "star"},
    "seed": 3,
    "sampling": {"steps": 4, "batch_size": 32, "precision": "bf16"},
    "groups": {
        "direct": {"prompts": "tiny_star", "role": "forget", "n": 4},
        "retained": {"prompts": "tiny_rest", "role": "retain", "n": 4},
    },
    "metrics": ["concept_rate", "accuracy", "fid"],
}
N = 4
TEXTS = "a red five-pointed star\na green house\n"


def shaken(scale: float, seed: int) -> Any:
    """The bundled model with noise in the weights of its denoiser."""
    model = load("tiny-sd")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(scale * parameter.std() * noise if parameter.numel() > 1 else 0)
    return model


@pytest.fixture(scope="module")
def control(tmp_path_factory: Any) -> Path:
    """A stand-in for a model that never learned the star: it draws no star."""
    folder: Path = tmp_path_factory.mktemp("controls") / "never"
    model = shaken(1.5, seed=1)
    model.save(folder)
    record = {"without": {"shape": ["star"]}, "seed": 7, "steps": 9, "environment": {}}
    (folder / "control.json").write_text(json.dumps(record))
    return folder


@pytest.fixture(scope="module")
def entries(tmp_path_factory: Any) -> list[dict[str, Any]]:
    """A cascade. The second attack gives some prompts a text that states a star."""
    texts = tmp_path_factory.mktemp("texts") / "texts.txt"
    texts.write_text(TEXTS)
    return [
        {"name": "random_tokens", "tries": 1},
        {"name": "paraphrase", "prompts": str(texts), "tries": 1},
        {"name": "relearning", "steps": 2, "every": 2},
    ]


@pytest.fixture(scope="module")
def attacked(
    shared_tiny: Any, control: Path, entries: Any, tmp_path_factory: Any
) -> tuple[Any, Path]:
    """A cascade on the unprotected model and on the control."""
    folder = tmp_path_factory.mktemp("attack")
    campaign = api.attack(
        shared_tiny,
        suite=SUITE,
        before=shared_tiny,
        cascade=entries,
        n=N,
        batch=4,
        hide="shape",
        control=control,
        output=folder,
    )
    return campaign, folder


def test_the_excess_recovery_follows_from_the_table(attacked) -> None:
    campaign, folder = attacked
    frame = pandas.read_csv(folder / "attack.csv.xz")
    assert set(frame.attacked_model) == {"victim", "control"}
    assert set(frame[frame.stage == "original"].attacked_model) == {"victim"}
    counted = frame[frame.stage == "original"].set_index("position").counted == 1
    broken = {}
    for name, rows in frame.groupby("attacked_model"):
        clean = rows[rows.stage == "clean"].set_index("position").shows_concept == 1
        hits = rows[(rows.stage == "attack") & (rows.family != "control")]
        by_prompt = hits.groupby("position").broken.max().reindex(clean.index).eq(1)
        broken[name] = (clean | by_prompt)[counted].to_numpy()
    (comparison,) = campaign.controls
    result = comparison.excess["asr"]
    assert result["difference"] == asdict(paired_difference(broken["control"], broken["victim"]))
    assert result["p"] == mcnemar(broken["control"], broken["victim"])
    assert result["control"]["value"] == comparison.rates["asr"]["value"]
    assert result["victim"]["value"] == campaign.rates()["asr"]["value"]
    assert result["difference"]["value"] > 0  # else two equal models would do
    weights = frame.groupby("attacked_model").model.nunique()
    assert weights.to_dict() == {"control": 1, "victim": 1}
    assert frame[frame.attacked_model == "control"].model.iloc[0] in comparison.model


def test_families_and_attacks_are_compared_on_common_prompts(attacked) -> None:
    campaign, folder = attacked
    frame = pandas.read_csv(folder / "attack.csv.xz")
    (comparison,) = campaign.controls
    rows = frame[(frame.stage == "attack") & (frame.family == "control")]
    table = rows.pivot(index="position", columns="attacked_model", values="broken").dropna()
    expected = paired_difference(table.control.to_numpy() == 1, table.victim.to_numpy() == 1)
    assert comparison.families["control"]["difference"] == asdict(expected)
    assert comparison.attacks["random_tokens"]["difference"] == asdict(expected)
    assert {"random_tokens", "paraphrase", "relearning"} == set(comparison.attacks)
    typed = comparison.families["typed prompts"]
    assert typed == comparison.attacks["paraphrase"]
    assert typed["difference"]["value"] > 0
    assert {"control", "typed prompts", "fine-tuning on the concept"} == set(comparison.families)
    assert set(comparison.savings) == {"relearning"}
    savings = comparison.savings["relearning"]
    assert savings["budget"] == 2
    assert {row["victim"] for row in savings["prompts"]} <= {2, None}
    counts = ("broken_on_both", "broken_on_victim_only", "broken_on_control_only")
    assert sum(savings[key] for key in (*counts, "broken_on_neither")) == savings["n"]


def test_the_file_has_the_control_and_its_record(attacked, control: Path) -> None:
    _, folder = attacked
    ((place, content),) = run_results.read_attacks(folder)
    assert place == folder  # the control's attack is no attack of its own
    (entry,) = content["control"]["models"]
    assert entry["model"].startswith(str(control))
    assert entry["record"] == {"without": {"shape": ["star"]}, "seed": 7, "steps": 9}
    assert len(entry["attempts"]) == len(content["attempts"])
    assert "excess_over_controls" not in content["control"]
    rows = control_tables.excess_rows(content)
    assert rows[0][1] == "worst case"
    assert {row[0] for row in rows} == {"never"}
    del entry["excess"]["asr"]["difference"]
    with pytest.raises(UserError, match=r"excess\.asr\.difference is missing"):
        result_schema.require(content, result_schema.ATTACK, folder)


def test_a_finished_attack_on_a_control_generates_nothing_again(
    attacked, shared_tiny, control, entries, monkeypatch, tmp_path: Path
) -> None:
    campaign, finished = attacked
    folder = tmp_path / "attack"
    shutil.copytree(finished, folder)

    def fail(*arguments: Any, **names: Any) -> torch.Tensor:
        raise AssertionError("an image was generated again")

    monkeypatch.setattr(runner.Referee, "draw", fail)
    work = cascade.Cascade(
        [
            runner.Protocol(
                suites.load(SUITE),
                entry["name"],
                {key: value for key, value in entry.items() if key != "name"},
                n=N,
                batch=4,
                hide="shape",
            )
            for entry in entries
        ]
    )
    never = NeverLearned(load(control), read_record(control))
    again = controlled.run(work, shared_tiny, shared_tiny, controls=[never], folder=folder)
    assert again.controls == campaign.controls
    assert again.outcomes == campaign.outcomes
    # without a control: the victim's own result, and no further key
    plain = controlled.run(work, shared_tiny, shared_tiny, folder=folder)
    assert plain.attempts == campaign.attempts
    assert plain.as_dict()["protocol_hash"] == campaign.as_dict()["protocol_hash"]
    assert set(campaign.as_dict()) - set(plain.as_dict()) == {"control"}
    assert not any("attacked_model" in row for row in plain.outcomes)


def test_excess_over_controls_takes_the_training_seed_as_the_unit() -> None:
    victim = [True, True, False, True]
    controls = [[False, True, False, True], [False] * 4, [True, False, False, False]]
    result = excess.measure_excess_over_controls(victim, controls)
    differences = [np.array(victim, float) - np.array(one, float) for one in controls]
    assert result == asdict(cluster_bootstrap(differences))
    assert result is not None
    assert (result["value"], result["seeds"]) == (pytest.approx(0.5), 3)
    assert excess.measure_excess_over_controls(victim, controls[:2]) is None
    assert excess.measure_excess([True], [False]) is None


def test_three_controls_have_a_mean_excess(attacked, capsys) -> None:
    campaign, folder = attacked
    several = replace(campaign, controls=campaign.controls * 3)
    content = json.loads(suites.dumps(several.as_dict()))
    result_schema.require(content, result_schema.ATTACK, folder)
    mean = content["control"]["excess_over_controls"]
    excess_of_one = campaign.controls[0].excess["asr"]["difference"]["value"]
    assert (mean["value"], mean["seeds"]) == (pytest.approx(excess_of_one), 3)
    assert control_tables.excess_rows(content)[-1][:2] == ["3 controls", "mean over controls"]
    attack_command._show_controls(several)
    assert f"mean excess over 3 controls: {100 * excess_of_one:+.1f}" in capsys.readouterr().out


def test_savings_are_exact_where_both_models_break_and_bounded_elsewhere() -> None:
    victim = {0: 10, 1: 20, 2: 10, 3: None, 4: None, 5: 30}
    never = {0: 40, 1: 20, 2: None, 3: 50, 4: None, 6: 10}
    savings = excess.measure_savings(victim, never, budget=100)
    rows = {row["position"]: (row["ratio"], row["bound"]) for row in savings["prompts"]}
    assert rows == {
        0: (0.25, None),
        1: (1.0, None),
        2: (0.1, "at most"),
        3: (2.0, "at least"),
        4: (None, None),
    }
    assert (savings["mean"]["value"], savings["mean"]["n"]) == (0.625, 2)
    assert savings["mean"]["low"] == 0, "a ratio of steps is not negative"
    text = excess.describe_savings(savings)
    assert text.startswith("0.62 [")
    assert text.endswith(
        "n = 2; censored after 100 steps: broken 1 on the victim only, 1 on the control only, "
        "1 on neither model"
    )
    nothing = excess.measure_savings({0: None}, {0: None}, budget=5)
    assert nothing["mean"] is None
    assert excess.describe_savings(nothing).startswith("no mean: 0 of 1 prompts")


def test_the_steps_of_a_round_count_the_last_pause() -> None:
    relearning = Relearning(steps=25, every=10)
    assert [relearning.steps_after(i) for i in (1, 2, 3)] == [10, 20, 25]
    assert Revival(steps=60, every=50).steps_after(2) == 60
    assert Revival(steps=60, every=50).finetuning_steps == 60
    with pytest.raises(NotImplementedError):
        runner.Protocol(suites.load(SUITE), "random_tokens").build().steps_after(1)


def test_the_savings_of_an_attack_follow_from_its_rounds(attacked) -> None:
    campaign, _ = attacked
    work = runner.Protocol(suites.load(SUITE), "relearning", {"steps": 25, "every": 10}, n=N)

    def with_rounds(*rounds: int | None) -> Any:
        attempts = [
            runner.Attempt("a star", i, False, number is not None, number)
            for i, number in enumerate(rounds)
        ]
        attempts.append(runner.Attempt("a star", 9, pre=True, success=True))
        return runner.Campaign(
            protocol={},
            models=campaign.models,
            attempts=attempts,
            curves=[],
            cost={},
            seconds=0.0,
            environment={},
        )

    comparison = controlled.compare(work, with_rounds(1, 2, 1), with_rounds(3, 2, None))
    (savings,) = comparison.savings.values()
    assert [(row["victim"], row["control"]) for row in savings["prompts"]] == [
        (10, 25),
        (20, 20),
        (10, None),
    ]
    assert savings["mean"]["value"] == pytest.approx((0.4 + 1) / 2)
    assert comparison.excess["attacked"]["victim"]["value"] == 1.0
    assert comparison.excess["attacked"]["difference"]["n"] == 3
    assert comparison.excess["asr"]["difference"]["n"] == 4
    plain = runner.Protocol(suites.load(SUITE), "random_tokens", n=N)
    assert controlled.compare(plain, with_rounds(1), with_rounds(1)).savings == {}


@pytest.mark.parametrize("name", ["classifier_guidance", "classifier_alone"])
def test_an_attack_that_trains_a_classifier_has_no_savings(name: str) -> None:
    """Its option `training_steps` counts steps of the classifier, not of the victim."""
    work = runner.Protocol(suites.load(SUITE), name, {"training_steps": 2}, n=N)
    attempts = {0: runner.Attempt("a star", 0, False, True, 1)}
    assert controlled._savings(work, attempts, attempts) == {}


def test_no_option_of_an_attack_hides_a_property_of_all_attacks() -> None:
    for name in registry.names("attack"):
        options = {field.name for field in fields(registry.load("attack", name))}
        assert not options & vars(Attack).keys(), name


def test_results_of_different_prompts_are_not_compared(attacked) -> None:
    campaign, _ = attacked
    other = replace(campaign, attempts=campaign.attempts[1:])
    work = runner.Protocol(suites.load(SUITE), "random_tokens")
    with pytest.raises(ValueError, match="different prompts"):
        controlled.compare(work, campaign, other)


def test_a_control_with_other_parts_is_refused(shared_tiny, tmp_path: Path) -> None:
    suite = suites.load(SUITE)
    for part, message in (("text_encoder", "the text encoder;"), ("vae", "the VAE of the latents")):
        model = load("tiny-sd")
        with torch.no_grad():
            next(iter(model.parts[part].parameters())).add_(0.1)
        with pytest.raises(UserError, match=message):
            retraining.require_comparable([NeverLearned(model, {})], shared_tiny, suite)
        with pytest.raises(UserError, match=message):
            api.attack(shared_tiny, suite=SUITE, before=shared_tiny, control=model)
    model = load("tiny-sd")

    def tokenize(prompts: Sequence[str]) -> Any:
        return shared_tiny.tokenize([f"a {text}" for text in prompts])

    model.tokenize = tokenize  # type: ignore[method-assign]
    with pytest.raises(UserError, match="differs from tiny-sd in the tokenizer;"):
        retraining.require_comparable([NeverLearned(model, {})], shared_tiny, suite)
    other = NeverLearned(shared_tiny, {"without": {"shape": ["heart"]}})
    with pytest.raises(UserError, match="was trained on images of shape=star"):
        retraining.require_comparable([other], shared_tiny, suite)
    retraining.require_comparable([NeverLearned(load("tiny-sd"), {})], shared_tiny, suite)
    assert read_record(tmp_path) == {} == read_record(shared_tiny)
    for damaged in ("[]", '{"without": "heart"}', '{"without": {"shape": 3}}'):
        (tmp_path / "control.json").write_text(damaged)
        with pytest.raises(UserError, match="damaged"):
            read_record(tmp_path)


@pytest.fixture(scope="module")
def evaluated(shared_tiny: Any, control: Path, tmp_path_factory: Any) -> tuple[Any, Path, Any]:
    """An evaluation against two controls; the second is in memory."""
    folder = tmp_path_factory.mktemp("evaluation")
    second = shaken(1.5, seed=2)
    evaluation = api.evaluate(
        shaken(0.3, seed=0),
        SUITE,
        before=shared_tiny,
        control=[control, second],
        output=folder,
    )
    return evaluation, folder, second


def test_one_training_is_no_two_controls(shared_tiny: Any, control: Path, tmp_path: Path) -> None:
    shutil.copytree(control, tmp_path / "again")
    with pytest.raises(UserError, match=r"the controls .* and .*again have the same"):
        api.evaluate(
            shaken(0.3, seed=0),
            SUITE,
            before=shared_tiny,
            control=[control, tmp_path / "again"],
        )


def test_distances_of_noise_predictions_are_those_of_the_networks(
    evaluated, shared_tiny, control
) -> None:
    evaluation, folder, second = evaluated
    group = evaluation.groups["direct"]
    first = load(control)
    erased = shaken(0.3, seed=0)
    latents = shared_tiny.encode_images(
        group.images["before"].permute(0, 3, 1, 2).float().div(127.5).sub(1)
    )
    seed = retraining.derive_seed(3, "gap", "direct", 0)
    generator = torch.Generator().manual_seed(seed)
    scheduler = shared_tiny.pipeline.scheduler
    states = shared_tiny.encode([prompt.text for prompt in group.prompts]).tensors["states"]
    parts = []
    for level in retraining.LEVELS:
        t = round(level * 1000)
        noise = torch.randn(latents.shape, generator=generator)
        noisy = scheduler.add_noise(latents, noise, torch.tensor([t]))
        with torch.no_grad():
            a, b, c = (
                model.denoiser(noisy, t, encoder_hidden_states=states).sample
                for model in (erased, first, second)
            )
        parts.append([((x - y) ** 2).mean((1, 2, 3)) for x, y in ((a, b), (a, c), (b, c))])
    to_first, to_second, between = (
        torch.stack(one).mean(0).numpy() for one in zip(*parts, strict=True)
    )
    row = evaluation.control.predictions[0]
    assert (row["group"], row["role"]) == ("direct", "forget")
    distances = (to_first + to_second) / 2
    assert row["erased"]["value"] == pytest.approx(distances.mean(), rel=1e-4)
    assert row["between_controls"]["value"] == pytest.approx(between.mean(), rel=1e-4)
    ratio = np.exp(np.log(distances / between).mean())
    assert row["relative_to_controls"]["value"] == pytest.approx(ratio, rel=1e-4)
    frame = pandas.read_csv(folder / "evaluation.csv.xz")
    rows = frame[(frame.group == "direct") & (frame.stage == "after")]
    assert rows.distance_to_control.to_numpy() == pytest.approx(distances, rel=1e-4)
    assert set(frame.stage) == {"before", "after", "control", "control_2"}


def test_numbers_against_a_control_follow_from_the_table(evaluated) -> None:
    evaluation, folder, _ = evaluated
    frame = pandas.read_csv(folder / "evaluation.csv.xz", keep_default_na=False)
    gap = evaluation.control
    found = {(row["control"], row["metric"], row["group"]): row for row in gap.results}
    for number, stage in enumerate(("control", "control_2")):
        rows = frame[frame.group == "retained"]
        hits = rows.predicted_shape == rows.expected_shape
        before, after = (hits[rows.stage == one].to_numpy() for one in (stage, "after"))
        row = found[number, "accuracy_shape", "retained"]
        assert row["difference"] == asdict(paired_difference(before, after))
        assert row["after"]["value"] == after.mean()
    assert found[0, "accuracy_shape", "retained"]["difference"]["value"] > 0
    kid = [row for row in gap.distances if row["metric"] == "kid_judge"]
    assert [(row["control"], row["group"]) for row in kid] == [(0, "retained"), (1, "retained")]
    assert kid[0]["between_controls"] is not None
    assert kid[0]["original"]["value"] > kid[0]["between_controls"]["value"]
    assert "fid_judge, retained" in gap.refused["fid_judge"]  # too few images, as without a control


def test_the_evaluation_without_a_control_is_the_same(evaluated, shared_tiny) -> None:
    evaluation, folder, _ = evaluated
    plain = api.evaluate(shaken(0.3, seed=0), SUITE, before=shared_tiny)
    content = json.loads((folder / "evaluation.json").read_text())
    result_schema.require(content, result_schema.EVALUATION, folder)
    assert set(content) - set(plain.as_dict()) == {"control"}
    assert content["protocol_hash"] == plain.as_dict()["protocol_hash"]
    assert plain.results == evaluation.results
    assert not any("distance_to_control" in row for row in plain.outcomes)
    assert len(evaluation.outcomes) == 2 * len(plain.outcomes)


def test_an_unchanged_model_is_as_far_as_the_original(evaluated, shared_tiny, control) -> None:
    group = evaluated[0].groups["direct"]
    never = load(control)
    suite = suites.load(SUITE)
    row, _ = retraining._prediction_row(suite, group, [shared_tiny, shared_tiny, never])
    assert row["relative_to_original"]["value"] == 1.0
    assert row["between_controls"] is None is row["relative_to_controls"]
    row, _ = retraining._prediction_row(suite, group, [never, shared_tiny, never])
    assert row["erased"]["value"] == 0.0
    assert np.isnan(row["erased"]["high"])  # equal predictions are no counts of zero
    assert row["relative_to_original"] is None


def test_pages_and_the_command_line_show_the_controls(
    attacked, evaluated, capsys, tmp_path: Path
) -> None:
    evaluation, _, _ = evaluated
    campaign, _ = attacked
    attack_command._show_controls(campaign)
    evaluate_command._show_gap(evaluation.control)
    text = capsys.readouterr().out
    assert "excess recovery" in text
    assert "relearning savings, relearning:" in text
    assert "Distance of noise predictions from the never-learned model" in text
    page = api.report(evaluation, tmp_path / "page.html").read_text()
    assert "Gap to retraining" in page
    ratio = evaluation.control.predictions[0]["relative_to_original"]["value"]
    assert f"{ratio:.2f} [" in page


def test_an_evaluation_without_a_control_says_what_it_replaces(
    evaluated, capsys, tmp_path: Path
) -> None:
    evaluation, _, _ = evaluated
    evaluate_command._tell_lost_controls(tmp_path)
    assert capsys.readouterr().err == ""
    evaluation.save(tmp_path / "evaluation.json")
    evaluate_command._tell_lost_controls(tmp_path)
    note = capsys.readouterr().err
    assert evaluation.control.models[0] in note
    assert "has no --control" in note
