"""The study of excess recovery: real attacks at tiny size, and numbers that are known."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from concept_eraser import api
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.seed_statistics import difference_of_seeds
from concept_eraser.evaluation.statistics import wilson
from concept_eraser.models.loading import load
from concept_eraser.recipes import recipe as recipes
from concept_eraser.utils.errors import UserError
from studies import excess_recovery, image_labels, render_results, result_tables, second_judge
from studies.rendering import common, excess_details, excess_goal
from studies.rendering import excess_recovery as rendering
from studies.rendering import excess_statistics as statistics
from studies.rendering import second_judge as rendering_judges
from studies.result_tables import Results
from studies.runs import recipe_of
from tests.conftest import ROOT

CONFIGS = [ROOT / "studies" / "configs" / f"{study}.yaml" for study in rendering.STUDIES]
STUDY = "excess_recovery"


def attempts(values: list[bool]) -> dict[str, Any]:
    rows = [{"prompt": str(i), "seed": i, "success": value} for i, value in enumerate(values)]
    return {"model": "x", "campaign": {"attempts": rows}}


def test_the_excess_of_one_seed_is_the_paired_difference() -> None:
    erased, control = attempts([True, True, True, False]), attempts([True, False, False, False])
    value = statistics.excess([erased], [control])
    assert value.value == 0.5
    assert value.low < 0.5 < value.high
    assert statistics.excess([control], [control]).value == 0
    assert statistics.success_rate([erased, control]).value == 0.5


def test_a_second_control_makes_no_second_prompt() -> None:
    """Two controls that agree have the interval of one. Others shift it by half."""
    erased = attempts([True, True, True, False] * 12)
    alike, other = attempts([True, False, False, False] * 12), attempts([False] * 48)
    one = statistics.excess([erased], [alike])
    assert one == statistics.excess([erased], [alike, alike])
    assert one == statistics.excess([erased, erased], [alike])
    both, far = statistics.excess([erased], [alike, other]), statistics.excess([erased], [other])
    assert (both.value, both.n) == (pytest.approx((0.5 + 0.75) / 2), 48)
    assert (both.low, both.high) == pytest.approx(
        ((one.low + far.low) / 2, (one.high + far.high) / 2)
    )


def test_the_unit_of_a_rate_over_three_models_is_the_model() -> None:
    """Models that scatter give a wider interval than their prompts.

    Equal ones have the interval of one, since their prompts are the same. Two have the mean ends.
    """
    scattered = [attempts([True] * count + [False] * (40 - count)) for count in (4, 20, 36)]
    rate = statistics.success_rate(scattered)
    assert rate.value == pytest.approx(0.5)
    assert (rate.low, rate.high) == (0.0, 1.0)  # clipped
    one, other = wilson(4, 40), wilson(20, 40)
    two = statistics.success_rate(scattered[:2])
    assert (two.value, two.n) == (pytest.approx(0.3), 40)
    ends = ((one.low + other.low) / 2, (one.high + other.high) / 2)
    assert (two.low, two.high) == pytest.approx(ends)
    assert statistics.success_rate([attempts([False] * 40)] * 3) == wilson(0, 40)


def test_the_unit_of_three_seeds_is_the_seed() -> None:
    """Seeds that scatter give a wide interval, however many prompts there are."""
    control = attempts([False] * 200)
    seeds = [attempts([True] * k + [False] * (200 - k)) for k in (20, 100, 180)]
    value = statistics.excess(seeds, [control])
    assert value.value == pytest.approx(0.5)
    assert value.high - value.low > 0.6
    assert value.n == 600


def test_seeds_that_are_all_alike_have_no_interval() -> None:
    value = statistics.excess([attempts([False, False])] * 3, [attempts([False, False])])
    assert rendering.share(value) == "0.0 (all alike)"


def test_attacks_on_other_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different prompts"):
        statistics.excess([attempts([True, False])], [attempts([True])])


def test_the_mean_of_several_controls_is_subtracted() -> None:
    controls = [attempts([True, True]), attempts([False, True])]
    seeds = [attempts([True, True])] * 3
    assert statistics.excess(seeds, controls).value == pytest.approx(np.mean([0.5, 0.0]))


def test_an_attack_is_equivalent_only_if_the_interval_is_within_the_margin() -> None:
    """Few different prompts of many are within 10 points. Eight of 48 more are not, nor are ten."""
    control = [attempts([True] * 3 + [False] * 45)]

    def cell(*counts: int) -> str:
        erased = [attempts([True] * count + [False] * (48 - count)) for count in counts]
        contents = [
            *(
                {**one, "kind": "erased", "model": "a", "label": "A", "seed": n, "attack": "x"}
                for n, one in enumerate(erased)
            ),
            *(
                {**one, "kind": "control", "model": "c", "label": "C", "attack": "x"}
                for one in control
            ),
        ]
        for one in contents:
            one["campaign"]["family"] = "family"
        return rendering.attack_table(contents).splitlines()[-1].split("|")[-2].strip()

    assert cell(4, 3, 3) == "yes"
    assert cell(3, 3, 3) == "all alike"
    assert cell(11, 11, 10) == "no"
    assert cell(0, 4, 13) == "no"  # the mean is near, but the seeds scatter
    assert cell(3, 3) == "-"  # no interval over two seeds


def test_the_worst_case_of_a_family_has_the_attacks_that_all_models_have() -> None:
    """Two attacks that break other prompts add up. A third is left out: one seed lacks it."""

    def one(kind: str, seed: int, attack: str, hits: set[int]) -> dict[str, Any]:
        content = attempts([i in hits for i in range(20)])
        content["campaign"]["family"] = "family"
        about = {"kind": kind, "model": kind, "label": kind.upper(), "attack": attack}
        return {**content, **about, **({} if kind == "control" else {"seed": seed})}

    contents = [one("control", 0, name, {0}) for name in ("first", "second", "third")]
    for seed in range(3):
        contents += [one("erased", seed, "first", {0, 1}), one("erased", seed, "second", {2})]
    contents.append(one("erased", 0, "third", set(range(20))))
    for seed in range(3):
        contents.append(one("erased", seed, "other", {7}))
        contents[-1]["campaign"]["family"] = "second family"
    contents.append(one("control", 0, "other", {0}))
    contents[-1]["campaign"]["family"] = "second family"
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in rendering.family_table(contents).splitlines()[2:]
    ]
    assert [row[1:4] for row in rows] == [["family", "ERASED", "3"], ["all attacks", "ERASED", "3"]]
    for row, rate, excess in zip(rows, ("15.0 [", "20.0 ["), ("10.0 [", "15.0 ["), strict=True):
        assert row[4].startswith(rate)
        assert row[5].startswith("5.0 [")
        assert row[6].startswith(excess)
    assert [row[8] for row in rows] == ["first, second", "first, second, other"]
    grouped = rendering.family_table(contents, {"two": ["first", "other"]}).splitlines()
    (group,) = [line.split("|") for line in grouped if line.startswith("| two |")]
    assert group[4].strip().startswith("15.0 [")  # prompts 0, 1 and 7 of 20
    assert rendering.family_table([one for one in contents if one["attack"] == "first"]) == ""


def test_the_table_of_models_has_the_accuracy_of_every_group_beside_the_concept() -> None:
    """UCE keeps 99.7 % of the retained colours, and 36.5 % of those that no retain prompt names."""
    groups = statistics.by_concept(Results(STUDY))
    head, _, *lines = rendering.model_table(groups["purple"]).splitlines()
    (row,) = (line for line in lines if line.startswith("| UCE"))
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    evaluation = next(one["evaluation"] for one in groups["purple"] if one["model"] == "uce")
    for group, column in {
        "retained": "accuracy of the color: retained %",
        "unseen": "unseen concepts %",
        "neighbours": "neighbours %",
    }.items():
        wanted = common.results({"evaluation": evaluation}, "accuracy_color", group)
        assert wanted is not None
        assert cells[column].startswith(f"{100 * wanted['after']['value']:.1f} [")
    kept = {name for name, group in evaluation["protocol"]["groups"].items() if "n" in group}
    assert kept == {"direct", "synonyms", "retained", "unseen", "neighbours"}
    assert "neighbours" not in rendering.model_table(groups["heart"])  # its suite has none


def test_a_rate_of_images_has_the_training_seed_as_its_unit() -> None:
    """The neighbours of purple, of three trainings: Wilson's interval over images is narrower."""
    groups = statistics.evaluations(statistics.by_concept(Results(STUDY))["purple"])
    runs = groups["munba_lora"]
    rate = statistics.image_rate(runs, "accuracy_color", "neighbours")
    pooled = common.pool(list(runs), "accuracy_color", "neighbours")
    assert rate is not None
    assert pooled is not None
    assert rate.value == pytest.approx(pooled.value)
    assert rate.low < pooled.low - 0.05
    assert rate.high <= 1.0
    single = statistics.image_rate(groups["uce"], "accuracy_color", "neighbours")
    assert single == common.pool(list(groups["uce"]), "accuracy_color", "neighbours")
    # equal trainings have the images of one
    assert statistics.image_rate(groups["uce"] * 3, "accuracy_color", "neighbours") == single


def test_the_p_value_over_seeds_belongs_to_the_interval() -> None:
    """It is below 0.05 exactly where the interval excludes zero, and nan without an interval."""
    for contents in statistics.by_concept(Results(STUDY)).values():
        for attack in ("soft_prompt", "unlearn_diff", "completion", "revival"):
            erased = statistics.campaigns(contents, attack, "munba_lora")
            controls = statistics.campaigns(contents, attack)
            interval = statistics.cluster_bootstrap(
                statistics.differences_by_seed(erased, controls)
            )
            p = statistics.p_of_seeds(interval)
            excluded = interval.low > 0 or interval.high < 0
            assert np.isnan(p) if np.isnan(interval.low) else (p < 0.05) == excluded


def test_the_p_value_over_prompts_is_the_largest_of_all_pairs() -> None:
    control, other = attempts([False] * 10), attempts([True] * 9 + [False])
    erased = attempts([True] * 10)
    assert statistics.p_of_prompts([erased], [control]) == pytest.approx(2 * 0.5**10)
    assert statistics.p_of_prompts([erased, erased], [control, other]) == 1.0


def test_one_correction_holds_for_the_rows_of_all_concepts() -> None:
    """The same row has a larger p-value beside those of another concept. A single training has a
    p-value over prompts only.
    """
    results = dict(Results(STUDY))
    all_rows = rendering.corrected_p(results)
    alone = rendering.corrected_p({k: v for k, v in results.items() if k.startswith("heart")})
    key = ("heart", "soft_prompt", "munba_lora")
    assert len(all_rows) > 2 * len(alone)
    assert all_rows[key][0] > alone[key][0]
    of_seeds, of_prompts = all_rows["heart", "unlearn_diff", "uce"]
    assert np.isnan(of_seeds)
    assert of_prompts < 0.001
    table = rendering.attack_table(statistics.by_concept(results)["heart"], all_rows)
    (row,) = (line for line in table.splitlines() if "| soft prompt | MUNBa on a LoRA" in line)
    assert f"| {all_rows[key][0]:.3f}; < 0.001 | no |" in row


def curve(rounds: list[int | None], *, pre: int = 0, rates: list[float] | None = None) -> Any:
    """An attack of 40 steps in four rounds. `pre` prompts show the concept without it."""
    done = [{"pre": True, "round": None, "success": True}] * pre
    hits = [{"pre": False, "round": one, "success": one is not None} for one in rounds]
    rows = [{"prompt": str(n), "seed": n, **one} for n, one in enumerate([*done, *hits])]
    curves = [{"round": n + 1, "rate": rate, "n": 4} for n, rate in enumerate(rates or ())]
    options = {"steps": 40, "every": 10}
    return {
        "campaign": {
            "attempts": rows,
            "curves": [curves or [{"round": 1}]],
            "protocol": {"options": options},
            "family": "family",
        }
    }


def about(kind: str, attack: str, seed: int = 0) -> dict[str, Any]:
    return {"kind": kind, "model": kind, "label": kind.upper(), "attack": attack, "seed": seed}


def test_the_success_along_the_steps_is_cumulative() -> None:
    contents = [
        {**curve([1, 3, None], pre=1), **about("erased", "soft_prompt")},
        {**curve([None] * 4), **about("control", "soft_prompt")},
        {**curve([], rates=[0.5, 0.25, 0.0, 0.75]), **about("erased", "revival")},
    ]
    rows = excess_details.curve_table(contents).splitlines()[2:]
    assert rows[0].endswith("| soft prompt | ERASED | 1 | 10; 20; 30; 40 | 50; 50; 75; 75 |")
    assert rows[1].endswith("| soft prompt | never learned | 1 | 10; 20; 30; 40 | 0; 0; 0; 0 |")
    assert rows[2].endswith("| revival | ERASED | 1 | 10; 20; 30; 40 | 50; 25; 0; 75 |")
    assert excess_details.curve_table([]) == ""


@pytest.mark.parametrize(
    ("erased", "control", "median", "ratio"),
    [
        ([1, 1, 2], [2, 2, 4], "10", "0.50"),
        ([1, 1, 2], [2, None, None], "10", "less than 0.25"),
        ([3, None, None], [2, 2, None], "> 40", "more than 2.00"),
        ([None] * 3, [None] * 3, "> 40", "-"),
    ],
)
def test_relearning_savings_state_what_the_budget_hides(
    erased: list[int | None], control: list[int | None], median: str, ratio: str
) -> None:
    contents = [
        {**curve(erased), **about("erased", "relearning")},
        {**curve(control), **about("control", "relearning")},
    ]
    row, never = excess_details.savings_table(contents).splitlines()[2:]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    missing = 100 * sum(one is None for one in erased) / 3
    assert cells == ["ERASED", "1", median, f"{missing:.1f}", ratio]
    assert never.endswith("| 1 |")


def test_prompts_that_show_the_concept_without_steps_have_no_savings() -> None:
    contents = [
        {**curve([1, 2, 2]), **about("erased", "relearning")},
        {**curve([1], pre=2), **about("control", "relearning")},
    ]
    assert excess_details.savings_table(contents).splitlines()[2].endswith("| 20 | 0.0 | - |")


def test_the_verdict_needs_a_control_that_can_show_an_excess() -> None:
    def verdict(erased: tuple[int, ...], control: int) -> str:
        seeds = [attempts([True] * hits + [False] * (48 - hits)) for hits in erased]
        controls = [attempts([True] * control + [False] * (48 - control))]
        return excess_goal.verdict(seeds, controls).text

    assert verdict((48, 48, 48), 44) == "saturated"
    assert verdict((30, 32, 31), 2) == "missed"
    assert verdict((3, 2, 3), 3) == "met"
    assert verdict((3, 3, 3), 3) == "met"  # all alike
    assert verdict((2, 3, 2), 30) == "met, fewer"
    assert verdict((2, 9, 16), 2) == "undecided"
    assert verdict((2, 2), 2) == "undecided"  # two training seeds


def test_the_verdicts_are_corrected_for_the_number_of_tests() -> None:
    """Holm's correction multiplies the smallest of three p-values by three."""
    verdict = excess_goal.Verdict
    verdicts = [
        verdict("missed", more=0.015, within=1.0, fewer=1.0),
        verdict("saturated"),
        verdict("met, fewer", more=1.0, within=0.001, fewer=0.02),
        verdict("undecided", more=0.2, within=0.4, fewer=1.0),
    ]
    assert excess_goal.correct(verdicts) == ["missed", "saturated", "met", "undecided"]
    assert excess_goal.correct([*verdicts, verdicts[-1]])[0] == "undecided"  # 4 x 0.015


def test_the_p_value_of_a_bound_belongs_to_the_interval() -> None:
    values = [[0.1, 0.2], [0.3, 0.4], [0.2, 0.1]]
    interval = statistics.cluster_bootstrap(values)
    for bound, p in ((interval.high, 0.025), (interval.value, 0.5), (interval.low, 0.975)):
        assert statistics.p_of_mean(interval, 3, bound) == pytest.approx(p)
    narrow = statistics.cluster_bootstrap(values, confidence=statistics.WITHIN)
    assert statistics.p_of_mean(interval, 3, narrow.high) == pytest.approx(0.05)


def test_the_goal_takes_the_attribute_that_suffers_most() -> None:
    """On the neighbours of purple the shape loses more than the colour."""
    table = excess_goal.goal_table(dict(Results(STUDY)))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    verdicts = {(part, concept, name): cells for part, concept, name, *cells in rows}
    *_, difference, goal, corrected = verdicts["neighbours", "purple", "shape"]
    assert difference.startswith("9.0 [")
    assert (goal, corrected) == ("missed", "undecided")
    assert verdicts["without text", "striped", "completion"][-2:] == ["missed", "undecided"]
    assert verdicts["revival", "heart", "revival"][-2:] == ["met", "met"]  # no prompt differs
    assert verdicts["without text", "striped", "worst case"][-1] == "saturated"
    parts = {part for part, *_ in rows if not part.startswith("not in the goal")}
    assert parts == {*excess_goal.PARTS.values(), *excess_goal.RETAIN.values()}


def test_the_table_of_side_effects_has_every_stated_attribute() -> None:
    contents = statistics.by_concept(Results(STUDY))["purple"]
    lines = excess_details.side_table(contents).splitlines()
    (row,) = (line for line in lines if line.startswith("| neighbours | MUNBa on a LoRA"))
    assert "| 12.0 (3.0) | shape -9.0; color -8.3; style -2.5; background +0.9 |" in row
    (never,) = (line for line in lines if line.startswith("| neighbours | never learned"))
    assert "shape +0.5; color -1.0" in never


def test_settings_are_counted_only_where_the_recipe_has_the_chosen_one() -> None:
    """UCE has the setting of its code. The leaderboard chose another. The configuration states the
    numbers of other studies.
    """
    study = yaml.safe_load((ROOT / "studies" / "configs" / f"{STUDY}.yaml").read_text())
    tried = rendering.settings_tried(dict(Results(STUDY)), study)
    assert (tried["munba_lora"], tried["munba"]) == (43, 10)
    assert (tried["munba_uce"], tried["uce"]) == (4, 0)


def test_raw_success_and_excess_rank_the_erasures_of_a_concept_alike() -> None:
    for contents in statistics.by_concept(Results(STUDY)).values():
        for attack in ("soft_prompt", "completion", "concept_inversion"):
            controls = statistics.campaigns(contents, attack)
            groups = [
                statistics.campaigns(contents, attack, name)
                for name in ("munba_lora", "munba_uce", "uce")
            ]
            raw = [statistics.success_rate(group).value for group in groups]
            beyond = [statistics.excess(group, controls).value for group in groups]
            assert np.allclose(np.subtract(raw, beyond), raw[0] - beyond[0])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_configuration_names_recipes_suites_and_attacks(config: Path) -> None:
    study = yaml.safe_load(config.read_text())
    for name, entry in study["entries"].items():
        points = study["grids"][entry["grid"]] if "grid" in entry else [{}]
        for point in points:
            recipe = recipe_of(excess_recovery.erasure_of(study, name, "heart"), point, 0)
            assert recipe.resolved()["forget"]["prompts"] == "protocol2_heart"
            retain = recipes.load(entry["recipe"]).retain
            assert (recipe.retain is None) == (retain is None)
            if recipe.retain is not None:
                assert recipe.retain.prompts == "protocol2_heart_retain"
    for name in study["concepts"]:
        recipes.load("tiny_star_munba", [f"forget.prompts=protocol2_{name}"])
        assert study["concepts"][name]["suite"] == f"protocol2_{name}_test"
    for attack in study["attacks"].values():
        excess_recovery.protocol_of(study, "protocol2_heart_test", attack)


def test_rules_are_compared_over_seeds_with_one_correction_for_the_table() -> None:
    """One rule is worse in each seed and by each of two attacks, the other is the same."""
    hits = {"sum": (4, 5, 3), "worse": (16, 16, 15), "same": (4, 5, 3)}
    contents = [
        {
            **attempts([True] * count + [False] * (20 - count)),
            "kind": "erased",
            "model": model,
            "label": model.upper(),
            "seed": seed,
            "attack": attack,
        }
        for model, counts in hits.items()
        for seed, count in enumerate(counts)
        for attack in ("soft_prompt", "completion")
    ]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in rendering.comparison_table(contents, "sum").splitlines()
        if line.startswith(("| soft", "| completion"))
    ]
    assert [row[:2] for row in rows] == [
        ["soft prompt", "WORSE"],
        ["soft prompt", "SAME"],
        ["completion", "WORSE"],
        ["completion", "SAME"],
    ]
    assert rows[0][2].startswith("58.3 [")
    interval = difference_of_seeds(
        *([np.repeat([1.0, 0.0], (k, 20 - k)) for k in hits[name]] for name in ("worse", "sum")),
        paired=True,
    )
    assert float(rows[0][3]) == pytest.approx(statistics.p_of_seeds(interval), abs=0.001)
    assert float(rows[0][4]) == pytest.approx(4 * float(rows[0][3]), abs=0.003)  # of four rows
    assert rows[0][5] == "no"
    assert rows[1][2:] == ["0.0 (all alike)", "-", "-", "all alike"]
    assert rendering.comparison_table(contents[:4], "sum") == ""  # two seeds


def test_a_setting_is_chosen_on_another_concept_and_only_once(
    no_results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = yaml.safe_load((ROOT / "studies" / "configs" / "combination_rules.yaml").read_text())
    results, calls = Results("combination_rules"), []

    def select(study: dict, name: str, *, entry: dict, work: Path, judge: str) -> list[dict]:
        calls.append(entry["set"]["forget.prompts"])
        scores = [0.5, 0.7, 0.9, 0.6]
        grid = zip(study["grids"][entry["grid"]], scores, strict=True)
        return [
            {"point": point, "score": score, "share": [0.0], "attacked": [0.1]}
            for point, score in grid
        ]

    monkeypatch.setattr(excess_recovery.selection, "select", select)
    for _ in range(2):
        assert excess_recovery.choose(results, study, "munba", work=no_results) == {
            "training.lr": 2e-3
        }
    assert calls == ["protocol2_star"]
    page = rendering.page("combination_rules")
    assert "| MUNBa | 0.002 | 0 | 10 | 0.900 | yes |" in page
    assert "## heart" not in page

    study["select"]["seeds"] = [*study["select"]["seeds"], 101]
    excess_recovery.choose(results, study, "munba", work=no_results)
    assert len(calls) == 2, "with another selection seed the grid is scored anew"
    study["grids"]["rates"].append({"training.lr": 8e-3})  # another grid is scored anew
    monkeypatch.setattr(
        excess_recovery.selection, "select", lambda *a, **k: [{"point": {}, "score": 0}]
    )
    assert excess_recovery.choose(results, study, "munba", work=no_results) == {}
    assert excess_recovery.choose(results, {"entries": {"uce": {}}}, "uce", work=no_results) == {}


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a record that it never learned the heart."""
    folder = tmp_path_factory.mktemp("controls") / "without_heart"
    load("tiny-sd").save(folder)
    record = {"without": {"shape": ["heart"]}, "seed": 0, "steps": 1, "unet_sha256": "0"}
    (folder / "control.json").write_text(json.dumps(record))
    return folder


def small_study(control: Path) -> dict[str, Any]:
    """Return a study of one erasure of the heart on four direct and two retained prompts."""
    small = {"n": 2, "role": "forget", "prompts": "protocol2_heart"}
    return {
        "concepts": {
            "heart": {
                "suite": {
                    "concept": {"shape": "heart"},
                    "sampling": {"steps": 6, "batch_size": 8, "precision": "bf16"},
                    "groups": {
                        "direct": {**small, "n": 4},
                        "retained": {
                            **small,
                            "role": "retain",
                            "prompts": "protocol2_heart_retain",
                        },
                    },
                },
                "controls": [str(control)],
            }
        },
        "entries": {"uce": {"label": "UCE", "recipe": "tiny_star_uce"}},
        "metrics": [{"name": "clip_score", "model": "tiny2"}],
        "n": 4,
        "batch": 4,
        "seed": 0,
        "attacks": {"completion": {"name": "completion", "options": {"strengths": [0.5]}}},
        "unprotected": {"hide": "shape", "attacks": ["completion", "not chosen"]},
    }


def assert_rates_follow_from_labels(content: Mapping[str, Any]) -> None:
    """Compute the rates of an evaluation again from the labels of its images."""
    protocol = content["evaluation"]["protocol"]
    ((attribute, value),) = protocol["concept"].items()
    results = content["evaluation"]["results"]
    compared = 0
    for result in results:
        group, metric = result["group"], result["metric"]
        if group not in protocol["groups"]:
            continue  # a number of several groups, or of the prompts of one value
        if metric != "concept_rate" and not metric.startswith("accuracy_"):
            continue
        is_rate = metric == "concept_rate"
        name = attribute if is_rate else metric.removeprefix("accuracy_")
        prompts = suites.group_prompts(suites.Suite.model_validate(protocol), group)
        for stage in ("before", "after"):
            labels = image_labels.decode(content["labels"], stage, group=group, attribute=name)
            wanted = [value if is_rate else row.fields.get(name) for row in prompts.prompts]
            pairs = [pair for pair in zip(labels, wanted, strict=True) if pair[1] is not None]
            rate = sum(label == other for label, other in pairs) / len(pairs)
            assert rate == pytest.approx(result[stage]["value"]), (group, metric, stage)
            compared += 1
    assert compared >= 4  # two groups, before and after


def test_the_labels_of_images_survive_their_encoding() -> None:
    columns = {"predicted_shape": ["star", "heart", "none"], "predicted_color": ["red"] * 3}
    rows = [
        {
            "stage": stage,
            "group": "direct",
            "position": position,
            **{name: values[position] for name, values in columns.items()},
        }
        for stage in ("before", "after")
        for position in (2, 0, 1)
    ]
    content = json.loads(json.dumps(image_labels.encode(rows)))
    for stage in ("before", "after"):
        for attribute in ("shape", "color"):
            labels = image_labels.decode(content, stage, group="direct", attribute=attribute)
            assert labels == columns[f"predicted_{attribute}"]
    many = [{**rows[0], "position": i, "predicted_shape": f"label {i}"} for i in range(37)]
    with pytest.raises(ValueError, match="more than 36"):
        image_labels.encode(many)


@pytest.mark.parametrize("study", [config.stem for config in CONFIGS])
def test_the_rates_of_stored_evaluations_follow_from_their_labels(study: str) -> None:
    for content in Results(study).values():
        if "labels" in content:
            assert_rates_follow_from_labels(content)


def test_the_study_attacks_continues_and_renders(
    no_results: Path, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = small_study(control)
    call: dict[str, Any] = {
        "concepts": ["heart"],
        "entries": ["uce"],
        "attacks": ["completion"],
        "seeds": [0],
        "work": no_results / "work",
    }
    results = Results(STUDY)
    excess_recovery.run(study, results, **call)
    assert list(results) == [
        "heart_control_1_completion",
        "heart_uce_seed0",
        "heart_uce_seed0_completion",
    ]
    assert results["heart_uce_seed0"]["evaluation"]["control"]["predictions"]
    assert_rates_follow_from_labels(results["heart_uce_seed0"])
    assert results["heart_uce_seed0"]["training_seconds"] > 0
    hours = excess_details.seconds_table(results)
    for what in ("attacks on controls", "attacks on erased models", "trainings of erasures"):
        assert f"| cpu | {what} | 1 |" in hours
    unprotected = results.folder("unprotected")
    assert list(unprotected) == ["heart_completion"]
    attempts = unprotected["heart_completion"]["campaign"]["attempts"]
    assert all("heart" not in one["prompt"] and "shape" in one["prompt"] for one in attempts)
    before = dict(results)
    monkeypatch.setattr(excess_recovery.runner, "run", None)  # a new attack would be an error
    excess_recovery.run(study, results, **call)
    assert dict(results) == before
    for key, *path, last in (
        ("heart_uce_seed0", "evaluation", "judge"),
        ("heart_uce_seed0", "evaluation", "models", "before"),
        ("heart_uce_seed0_completion", "campaign", "protocol", "judge"),
    ):
        older = copy.deepcopy(before[key])
        place = older
        for name in path:
            place = place[name]
        place[last] = "of other weights"
        results[key] = older
        with monkeypatch.context() as patch:
            for owner, name in ((excess_recovery.api, "evaluate"), (excess_recovery.runner, "run")):
                patch.setattr(owner, name, lambda *_, **__: pytest.fail("measured again"))
            with pytest.raises(pytest.fail.Exception, match="again"):
                excess_recovery.run(study, results, **call)
        results[key] = before[key]
    page = rendering.page(STUDY)
    assert "| cpu | attacks on the model before the erasure | 1 |" in page
    open_prompts = [one for one in attempts if not one["pre"]]
    share = common.share(wilson(sum(one["success"] for one in open_prompts), len(open_prompts)))
    assert f"| completion | {len(open_prompts)} | {share} |" in page
    assert "| without text | completion | UCE | 1 |" in page
    assert "| independent CLIP score x100 (original) |" in page
    assert "## heart" in page
    assert render_results.TABLES  # the page is one of those that the command renders
    assert STUDY in rendering.PAGES


def test_a_second_judge_labels_the_images_of_the_evaluation(
    no_results: Path, control: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counts are the concept rates of the stored evaluation and of one by the second judge
    alone. Nothing else of the study changes.
    """
    study = {**small_study(control), "second_judge": "tiny2"}
    call: dict[str, Any] = {"concepts": ["heart"], "entries": ["uce"], "attacks": [], "seeds": [0]}
    call["work"] = no_results / "work"
    results = Results(STUDY)
    excess_recovery.run(study, results, **call)
    assert list(results) == ["heart_uce_seed0", "heart_uce_seed0_second_judge"]
    one, content = results["heart_uce_seed0"], results["heart_uce_seed0_second_judge"]
    assert "second_judge" not in one["evaluation"]
    case = excess_recovery.load_case(study, "heart")
    erased = no_results / "work" / "heart_uce_seed0"
    by_second = api.evaluate(erased, case.suite, judge="tiny2", before=case.original).as_dict()
    for evaluation, alone in ((one["evaluation"], "first_only"), (by_second, "second_only")):
        for group, metric in (("direct", "concept_rate"), ("retained", "accuracy_shape")):
            row = common.results({"evaluation": evaluation}, metric, group)
            assert row is not None
            for stage in ("before", "after"):
                counts = content["groups"][group][stage]
                counts = counts["concept" if group == "direct" else "stated"]
                assert sum(counts.values()) == row[stage]["n"]
                assert counts["both"] + counts[alone] == round(
                    row[stage]["value"] * row[stage]["n"]
                )
    before = dict(results)
    with monkeypatch.context() as patch:
        patch.setattr(excess_recovery.second_judge, "compare", None)  # a call would be an error
        excess_recovery.run(study, results, **call)
    assert dict(results) == before
    page = rendering.page(STUDY)
    section = rendering_judges.second_judge_section(dict(results))
    assert "| heart | direct | the concept | original | - | 100.0 [" in section
    assert "| heart | retained | the stated shape | UCE | 1 |" in section
    del results["heart_uce_seed0_second_judge"]
    assert page == rendering.page(STUDY).replace("\n\nCommits", f"\n\n{section}\n\nCommits")

    study["concepts"]["heart"]["suite"]["seed"] = 7  # other images are labelled anew
    excess_recovery.run(study, results, **call)
    assert results["heart_uce_seed0_second_judge"]["settings"] != content["settings"]


def test_a_second_judge_labels_the_images_that_decide_an_attack(
    no_results: Path, control: Path
) -> None:
    """The counts are those of the attacked prompts, and the first judge's are the successes. The
    rest of the result is that without a second judge.
    """
    study = small_study(control)
    study["attacks"] = {"noise": {"name": "completion", "options": {"strengths": [0.95]}}}
    case, results = excess_recovery.load_case(study, "heart"), Results(STUDY)
    about = {"concept": "heart", "kind": "control", "model": "control_1", "label": "never learned"}
    about["attack"] = "noise"
    model = load("tiny-sd")
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            parameter.mul_(0.9)
    for key, judge in (("without", {}), ("with", {"second_judge": "tiny2"})):
        excess_recovery.attack(
            results,
            {**study, **judge},
            case,
            key,
            victim=model,
            about=about,
            work=no_results / key,
        )
    one, other = results["with"], results["without"]
    assert one["campaign"]["attempts"] == other["campaign"]["attempts"]
    assert one["campaign"]["protocol_hash"] == other["campaign"]["protocol_hash"]
    assert one["settings"] == other["settings"]
    assert "second_judge" not in other
    attacked = [attempt for attempt in one["campaign"]["attempts"] if not attempt["pre"]]
    counts = one["second_judge"]
    assert sum(counts.values()) == len(attacked) > 0
    assert counts["both"] + counts["first_only"] == sum(a["success"] for a in attacked)


def test_the_images_on_which_the_judges_differ_are_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sheet has those that the first judge alone labels as the concept, by their colour."""
    monkeypatch.setattr(result_tables, "TABLES", tmp_path)
    colors = {"both": 50, "first alone": 100, "second alone": 150, "neither": 200}
    attempts, outcomes, images = [], [], {}
    for number, (name, color) in enumerate(colors.items()):
        attempts.append(SimpleNamespace(prompt=name, seed=number))
        path = images[number] = tmp_path / f"{number}.png"
        Image.new("RGB", (8, 8), (color, color, color)).save(path)
        first, second = name in ("both", "first alone"), name in ("both", "second alone")
        labels = {"shows_concept": first, "second_shows_concept": second}
        outcomes.insert(0, {"prompt": name, "seed": number, "stage": "attack", **labels})
    campaign: Any = SimpleNamespace(attempts=attempts, outcomes=outcomes, images=images)
    sheet = result_tables.figure_path("quick", "key.webp")
    second_judge.draw_differing(campaign, sheet)
    pixels = np.asarray(Image.open(sheet).convert("L")).astype(int)
    assert abs(pixels[8, 8] - 100) <= 5
    assert not any((abs(pixels - colors[name]) <= 5).any() for name in ("both", "second alone"))
    one = {"attack": "soft_prompt", "label": "UCE", "seed": 0, "concept": "heart"}
    (figure,) = rendering_judges.differing_images("quick", {"key": one, "other": one})
    assert "soft prompt on UCE, seed 0" in figure
    assert "(quick.key.webp)" in figure


def test_the_counts_of_attacks_are_added_over_trainings() -> None:
    def attacked(attack: str, counts: dict[str, int]) -> dict[str, Any]:
        content = {"concept": "heart", "kind": "erased", "model": "uce", "label": "UCE"}
        return {**content, "attack": attack, "campaign": {}, "second_judge": counts}

    results = {
        "a": attacked("soft_prompt", pairs(4, 3, 1, 2)),
        "b": attacked("soft_prompt", pairs(2, 1, 1, 6)),
        "c": attacked("completion", pairs(0, 0, 0, 0)),
        "d": {"concept": "heart", "kind": "control", "campaign": {}},
    }
    *_, row = rendering_judges.attacked_table(results).splitlines()
    cells = [cell.strip().split(" [")[0] for cell in row.split("|")[1:-1]]
    assert cells == ["heart", "soft prompt", "UCE", "2", "20", "50.0", "40.0", "4; 2"]
    assert rendering_judges.attacked_table({"d": results["d"]}) == ""


def judged(seed: int, model: str, after: dict[str, Any]) -> dict[str, Any]:
    before = {
        "concept": pairs(19, 0, 1, 0),
        "stated": pairs(19, 0, 1, 0),
        "same_label": 19,
        "n": 20,
    }
    return {
        "kind": "second_judge",
        "concept": "heart",
        "attribute": "shape",
        "model": model,
        "label": model.upper(),
        "seed": seed,
        "judges": {"first": "tiny", "second": "tiny2"},
        "groups": {"direct": {"role": "forget", "before": before, "after": after}},
    }


def pairs(both: int, first_only: int, second_only: int, neither: int) -> dict[str, int]:
    return dict(zip(rendering_judges.COUNTS, (both, first_only, second_only, neither), strict=True))


def test_the_counts_of_two_judges_are_added_over_training_seeds() -> None:
    after = [
        {"concept": pairs(1, 2, 3, 14), "stated": pairs(0, 0, 0, 20), "same_label": 15, "n": 20},
        {"concept": pairs(0, 1, 0, 19), "stated": pairs(0, 0, 0, 20), "same_label": 19, "n": 20},
    ]
    results = {
        "a": judged(0, "munba", after[0]),
        "b": judged(1, "munba", after[1]),
        "c": judged(0, "uce", after[1]),
        "d": {"kind": "selection", "concept": "star"},
    }
    section = rendering_judges.second_judge_section(results)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines()[-3:]]
    assert [row[3:5] for row in rows] == [["original", "-"], ["MUNBA", "2"], ["UCE", "1"]]
    assert [[cell.split(" [")[0] for cell in row[5:]] for row in rows] == [
        ["95.0", "100.0", "95.0", "0; 1"],
        ["10.0", "10.0", "85.0", "3; 3"],
        ["5.0", "0.0", "95.0", "1; 0"],
    ]
    assert rendering_judges.second_judge_section({"d": results["d"]}) == ""
    assert statistics.by_concept(results) == {}


def test_pairs_of_labels_are_counted() -> None:
    first, second = (
        np.array([True, True, False, False, False]),
        np.array([True, False, True] + [False] * 2),
    )
    assert second_judge.count_pairs(first, second) == pairs(1, 1, 1, 2)


def test_a_comparison_needs_a_second_judge_that_is_another_one(control: Path) -> None:
    case = excess_recovery.load_case(small_study(control), "heart")
    with pytest.raises(UserError, match="no second judge"):
        second_judge.compare(case.suite, case.original, case.original)
    with pytest.raises(UserError, match="the second judge is the first one"):
        second_judge.compare(case.suite.using(second_judge="tiny"), case.original, case.original)


def test_a_control_of_another_concept_is_refused(control: Path) -> None:
    study = {
        "concepts": {"star": {"suite": "protocol2_star_test", "controls": [str(control)]}},
    }
    with pytest.raises(UserError, match="was trained on images of shape=star"):
        excess_recovery.load_case(study, "star")
