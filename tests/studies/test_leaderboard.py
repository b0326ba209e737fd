"""The leaderboard of all methods: ranks, significant differences, figures, and a row or a reason
for every method.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from scipy.stats import hmean

import concept_eraser
from concept_eraser import registry
from concept_eraser.evaluation import suite as suites
from concept_eraser.recipes import recipe
from studies import (
    leaderboard,
    leaderboard_entries,
    memory_footprint,
    result_tables,
    runs,
    selection,
    study,
)
from studies.rendering import (
    equal_seconds,
    figures,
    hub,
    leaderboard_plot,
    leaderboard_rows,
    marks,
    ranks,
)
from studies.rendering import leaderboard as pages
from studies.rendering.ranks import Standing
from studies.result_tables import Results
from tests import processes
from tests.conftest import ROOT, short, with_values

LEADERBOARD = yaml.safe_load((ROOT / "studies" / "configs" / "tiny_leaderboard.yaml").read_text())


COLUMNS = ("concept_rate", "attack_success", "retain_error")


def standing(name: str, with_concept: int, attacks: int, errors: int, n: int = 300) -> Standing:
    counts = zip(COLUMNS, (with_concept, attacks, errors), strict=True)
    return Standing(name, {column: (hits, n) for column, hits in counts})


def test_ranks_of_distant_counts_have_no_interval() -> None:
    some = [
        standing("worst", 200, 250, 100),
        standing("best", 0, 5, 0),
        standing("middle", 80, 120, 30),
    ]
    rates = ranks.draw_rates(some)
    for column in (*COLUMNS, ranks.TOTAL_ERROR):
        assert ranks.ranks(rates[column]) == [(3, 3, 3), (1, 1, 1), (2, 2, 2)]
    assert ranks.beaten_by(some, rates) == {
        "worst": ["best", "middle"],
        "best": [],
        "middle": ["best"],
    }


def test_equals_share_a_rank_and_do_not_beat_each_other() -> None:
    some = [standing("a", 3, 30, 5), standing("b", 3, 30, 5)]
    rates = ranks.draw_rates(some)
    assert [value[1:] for value in ranks.ranks(rates[ranks.TOTAL_ERROR])] == [(1, 2), (1, 2)]
    assert ranks.beaten_by(some, rates) == {"a": [], "b": []}


def test_better_in_one_column_and_worse_in_another_beats_no_method() -> None:
    some = [standing("robust", 0, 0, 90), standing("gentle", 0, 90, 0)]
    assert ranks.beaten_by(some, ranks.draw_rates(some)) == {"robust": [], "gentle": []}


def test_a_third_method_does_not_change_the_rates_of_two() -> None:
    two = [standing("a", 3, 30, 5), standing("b", 3, 45, 2)]
    alone, beside = ranks.draw_rates(two), ranks.draw_rates([standing("c", 9, 9, 9), *two])
    for column in (*COLUMNS, ranks.TOTAL_ERROR, ranks.SUMMARY):
        assert (alone[column] == beside[column][1:]).all()
    assert len({tuple(row[:3]) for row in alone["concept_rate"]}) == 2, (
        "equal counts are drawn each by itself"
    )


def test_a_rival_changes_ranks_and_no_summary() -> None:
    """The cell of the page stays the same, whatever the rival; the rank does not."""
    labels = {column: column for column in COLUMNS}
    two = [standing("a", 3, 30, 5), standing("b", 3, 45, 2)]

    def cells(methods: list[Standing]) -> dict[str, tuple[str, str]]:
        head, *rows = ranks.rows(methods, labels)
        places = [head.index(name) for name in ("summary %", "rank by total error")]
        return {row[0]: (row[places[0]], row[places[1]]) for row in rows}

    alone = cells(two)
    for rival in (standing("best", 0, 0, 0), standing("worst", 300, 300, 300)):
        beside = cells([rival, *two])
        assert {name: beside[name][0] for name in alone} == {n: alone[n][0] for n in alone}
    assert cells([standing("best", 0, 0, 0), *two])["a"][1] != alone["a"][1]


def test_the_summary_is_the_harmonic_mean_of_what_is_left() -> None:
    """The value is SciPy's. One share of zero makes it zero, and equal shares are their mean."""
    shares = np.array([[0.9, 0.5, 1.0], [0.8, 0.5, 0.7], [0.3, 0.5, 0.0]])
    with np.errstate(divide="ignore"):
        assert ranks.harmonic_mean(list(shares)) == pytest.approx(hmean(shares, axis=0))
    assert ranks.harmonic_mean(list(shares))[1:] == pytest.approx([0.5, 0.0])
    rates = ranks.draw_rates([standing("a", 30_000, 60_000, 210_000, n=300_000)])
    (value,) = np.median(rates[ranks.SUMMARY], axis=1)
    assert value == pytest.approx(hmean([0.9, 0.8, 0.3]), abs=1e-3)
    by_task = [[standing("a", 0, 0, 0, n=300_000)], [standing("a", 300_000, 0, 0, n=300_000)]]
    (mean,) = np.median(ranks.together(by_task)[ranks.SUMMARY], axis=1)
    assert mean == pytest.approx(0.5, abs=1e-3)


def test_the_total_error_is_the_larger_rate_plus_the_retain_error() -> None:
    (rates,) = [ranks.draw_rates([standing("a", 90, 30, 60, n=30000)])[ranks.TOTAL_ERROR]]
    assert rates.mean() == pytest.approx(90 / 30000 + 60 / 30000, rel=0.1)


def test_tasks_weigh_the_same_whatever_their_numbers_of_images() -> None:
    few, many = [standing("a", 0, 0, 50, n=100)], [standing("a", 10000, 0, 0, n=10000)]
    rates = ranks.together([few, many])
    assert rates["concept_rate"].mean() == pytest.approx(0.5, abs=0.01)
    assert rates["retain_error"].mean() == pytest.approx(0.25, abs=0.02)
    (head, row) = ranks.rows(few, pages.LABELS, rates)
    assert head[1:4] == ["concept rate %", "attack success rate %", "retain error %"]
    assert row[1].startswith("50.")


def test_means_over_tasks_are_of_each_method_whatever_its_place() -> None:
    """The order of the methods is the first task's; each rate must be its own method's."""
    one, two = (
        [standing("a", 0, 0, 0), standing("b", 300, 0, 0)],
        [standing("a", 300, 0, 0), standing("b", 300, 300, 0)],
    )
    rates = ranks.together([one, two])
    assert rates["concept_rate"].mean(axis=1) == pytest.approx([0.5, 1.0], abs=0.02)
    assert rates["attack_success"].mean(axis=1) == pytest.approx([0.0, 0.5], abs=0.02)


def test_only_methods_of_every_task_stand_together(monkeypatch: pytest.MonkeyPatch) -> None:
    both, one = standing("both", 0, 9, 3), standing("one", 0, 0, 0)
    standings = {
        "star": {"one": one, "both": both, "other": standing("other", 50, 90, 9)},
        "blue": {"both": both, "other": both, "late": one},
    }
    monkeypatch.setattr(pages, "standings_of", lambda study, task: standings[task])
    monkeypatch.setattr(
        pages,
        "leaderboard_of",
        lambda study: {
            "tasks": ["star", "blue"],
            "methods": dict.fromkeys(("one", "both", "other", "late")),
        },
    )
    tasks, rows = pages.over_tasks("a leaderboard")
    assert tasks == ["star", "blue"]
    assert [row[0] for row in rows] == ["method", "both", "other"]
    assert rows[1][-1] == "-"
    assert rows[2][-1] == "both"
    standings["blue"].pop("other")
    assert pages.over_tasks("a leaderboard")[1] == []
    assert pages.results_block("a leaderboard") == "Not measured yet."


def test_attempts_are_of_the_seeds_that_every_attack_has() -> None:
    def campaign(seed: int, *hits: bool) -> dict:
        return {"training_seed": seed, "attempts": [{"success": hit} for hit in hits]}

    attacks = {"soft": [campaign(0, True), campaign(1, True)], "tokens": [campaign(0, False)]}
    assert [a["success"] for a in leaderboard_rows.attempts_of(attacks, ["soft", "tokens"])] == [
        True,
        False,
    ]
    assert leaderboard_rows.attempts_of(attacks, ["soft", "seeds"]) == []
    assert (
        leaderboard_rows.attempts_of(
            {**attacks, "tokens": [campaign(2, False)]}, ["soft", "tokens"]
        )
        == []
    )


def campaigns_of(seed: int, *hits: bool) -> dict:
    attempts = [{"prompt": f"p{i}", "seed": i, "success": hit} for i, hit in enumerate(hits)]
    return {"victim": "star_one", "training_seed": seed, "attempts": attempts}


def test_the_excess_is_paired_with_the_prompts_of_the_control() -> None:
    """Two of four attempts succeed beyond the control, on which one succeeds."""
    control = {"soft": [campaigns_of(0, True, False)], "tokens": [campaigns_of(0, False, False)]}
    attacks = {"soft": [campaigns_of(0, True, True)], "tokens": [campaigns_of(0, True, False)]}
    many = [campaigns_of(0, *[i % 3 > 0 for i in range(12)])]
    none = {"soft": [campaigns_of(0, *[False] * 12)]}
    value = leaderboard_rows.excess_recovery({"soft": many}, none, ["soft"])
    assert value is not None
    assert (value.value, value.seeds) == (pytest.approx(8 / 12), 12)  # the prompts
    assert 0 < value.low < 8 / 12 < value.high

    three = {
        name: [{**campaign, "training_seed": seed} for campaign in runs for seed in (0, 1, 2)]
        for name, runs in attacks.items()
    }
    by_seed = leaderboard_rows.excess_recovery(three, control, ["soft", "tokens"])
    assert by_seed is not None
    assert (by_seed.value, by_seed.seeds) == (pytest.approx(0.5), 3)

    assert leaderboard_rows.excess_recovery(attacks, control, ["soft", "seeds"]) is None
    with pytest.raises(ValueError, match="other prompts"):
        leaderboard_rows.excess_recovery({"soft": many}, control, ["soft"])


def panel_of(*standings: Standing, title: str = "star") -> marks.Panel:
    (original,) = marks.of_task([standing(marks.ORIGINAL, 290, 0, 3)])
    return marks.Panel(title, marks.of_task(standings), marks.under_attack(original))


def test_a_figure_has_a_digest_of_its_content(tmp_path: Path) -> None:
    first, second = standing("a", 3, 30, 5), standing("b", 0, 60, 1)
    path, figure = tmp_path / "plot.svg", leaderboard_plot.of(panel_of(first, second))
    assert not figures.is_current(path, figure)
    figures.write(path, figure)
    assert figures.is_current(path, figure)
    for other in (
        panel_of(first, standing("b", 1, 60, 1)),
        panel_of(first, second, title="blue"),
    ):
        assert not figures.is_current(path, leaderboard_plot.of(other))
    assert not figures.is_current(path, leaderboard_plot.of(panel_of(first, second), COLUMNS[:1]))
    text = path.read_bytes()
    figures.write(path, figure)
    assert path.read_bytes() == text


CROWDED = [standing(f"method {number}", number // 3, 60 + number % 2, 5) for number in range(12)]


@pytest.mark.parametrize("name", [*pages.STUDIES, "crowded"])
def test_no_name_of_a_figure_covers_another_name_or_a_mark(name: str) -> None:
    """This holds for the committed figures, and for twelve methods almost at one place."""
    panel = panel_of(*CROWDED) if name == "crowded" else pages.named_panel(name)
    assert panel is not None
    columns = None if name == "crowded" else pages.leaderboard_of(name).get("figure_columns")
    figure = leaderboard_plot.draw(panel, list(columns or panel.columns()))
    for axis, column in zip(figure.axes, columns or panel.columns(), strict=True):
        texts = [text for text in axis.texts if text.get_text()]
        names = {text.get_text().replace("\n", " ") for text in texts}
        assert names == {*(mark.name for mark in panel.marks), marks.ORIGINAL, "ideal"}
        boxes = [text.get_window_extent() for text in texts]
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)
        for mark in (*panel.marks, panel.original):
            point = (mark.rates["retain_error"][0], mark.rates[column][0])
            assert not any(box.contains(*axis.transData.transform(point)) for box in boxes)
        assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_a_figure_names_at_most_a_dozen_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in pages.STUDIES:
        panel = pages.named_panel(name)
        assert panel is not None
        assert 2 <= len(panel.marks) <= 12
    every = dict.fromkeys(LEADERBOARD["methods"])
    monkeypatch.setattr(pages, "leaderboard_of", lambda study: {**LEADERBOARD, "figure": every})
    with pytest.raises(SystemExit, match="at most 12"):
        pages.named_panel("tiny_leaderboard")


def test_the_interactive_figure_has_all_methods_and_no_other_file() -> None:
    """A method is in the panels of the tasks that it was attacked on, and in the means of all."""
    ((path, text),) = pages.hover_pages().items()
    assert path.name == "tiny_leaderboard.hover.html"
    assert text.count("<svg") == 2 * (1 + len(LEADERBOARD["tasks"]))
    measured = [pages.standings("tiny_leaderboard", task) for task in LEADERBOARD["tasks"]]
    for name, method in LEADERBOARD["methods"].items():
        tasks = sum(name in methods for methods in measured)
        panels = tasks + (tasks == len(measured))
        assert text.count(f'data-name="{method["label"]}"') == 2 * panels, method
    assert "untouched model" in text
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(r"(?:src|href)=\"(?!tiny_leaderboard\.md)", text)
    assert not re.search(r"https?:|@import|url\(", text)


def test_the_number_of_methods_has_no_control() -> None:
    """A model that never learned the concept is a row of the tables and no method."""
    methods = [name for name, how in LEADERBOARD["methods"].items() if "control" not in how]
    assert len(methods) < len(LEADERBOARD["methods"])
    _, rows = pages.over_tasks("tiny_leaderboard")
    sentence = f"of the {len(rows) - 1} of {len(methods)} methods that are measured on all"
    assert sentence in pages.together("tiny_leaderboard")


def test_the_table_of_the_readme_has_six_rows_and_no_attack() -> None:
    table, sentence = pages.results_block().split("\n\n")
    head, _, *rows = table.splitlines()
    assert head == "| method | concept rate % | retain error % |"
    assert [row.split(" | ")[0] for row in rows] == [
        "| untouched model",
        "| MUNBa on a LoRA of all layers",
        "| MUNBa",
        "| UNO + anchor term",
        "| plain sum",
        "| UCE",
    ]
    assert all(len(re.findall(r"\d+\.\d \[\d+\.\d, \d+\.\d\]", row)) == 2 for row in rows)
    assert "\n" not in sentence
    assert "600 images of 3 training seeds" in sentence
    assert "200 images (untouched model)" in sentence
    for target in re.findall(r"\]\(([^)]+)\)", sentence):
        assert (ROOT / target).is_file(), target


def test_every_method_has_a_row_or_a_reason() -> None:
    entries = leaderboard_entries.expand(LEADERBOARD)["entries"].values()
    methods = [
        recipe.load(
            e["recipe"], [f"{k}={v}" for k, v in e["set"].items() if k.startswith("method")]
        ).method
        for e in entries
        if "recipe" in e
    ]
    rows = {method.name for method in methods}
    presets = {
        alias
        for alias, (plugin, options) in registry.named("method").items()
        for m in methods
        if (m.name, options) == (plugin, {k: m.options.get(k) for k in options})
    }
    names = {*registry.names("method"), *registry.named("method")}
    names.add("PGU")  # hardening by a setting of the recipe, trainable.project
    assert names - rows - presets == set(LEADERBOARD["elsewhere"]), (
        "a method is neither on the leaderboard nor explained, or both"
    )
    assert all(reason.strip() for reason in LEADERBOARD["elsewhere"].values())


@pytest.mark.parametrize(
    "name", ["tiny_leaderboard", "tiny_ablation", "tiny_default", "tiny_edges"]
)
def test_every_run_of_a_leaderboard_is_a_recipe(name: str) -> None:
    """A mistake in a recipe fails here, and not after the training of its grid. Methods whose row
    waits for the next run are included.
    """
    content = yaml.safe_load((ROOT / "studies" / "configs" / f"{name}.yaml").read_text())
    methods = {**content["methods"], **content.get("waiting", {})}
    plan = leaderboard_entries.expand({**content, "methods": methods})
    for entry in plan["entries"].values():
        for point in plan["grids"].get(entry.get("grid"), [{}]) if "recipe" in entry else ():
            assert runs.recipe_of(entry, point, 0, study.watch_of(plan, entry)).forgotten


def test_what_the_default_is_chosen_by_is_in_no_row_of_the_leaderboard() -> None:
    """The candidates for the default share neither training seeds nor noise nor
    attacked prompts.
    """
    candidates = yaml.safe_load((ROOT / "studies" / "configs" / "tiny_default.yaml").read_text())
    plan, suite = leaderboard_entries.expand(candidates), suites.load("tiny_star")
    for entry in plan["entries"].values():
        assert (
            leaderboard.attacked_suite(plan, entry).seed == candidates["image_seed"] != suite.seed
        )
    assert not {*candidates["seeds"]} & {*LEADERBOARD["seeds"]}
    assert candidates["attack"]["seed"] != LEADERBOARD["attack"]["seed"]
    rows = leaderboard_entries.expand(LEADERBOARD)
    assert leaderboard.attacked_suite(rows, rows["entries"]["star_munba"]) == "tiny_star"


def test_grids_are_of_one_size_and_a_leaderboard_without_is_refused() -> None:
    unlike = {
        **LEADERBOARD,
        "grids": {**LEADERBOARD["grids"], "closed": LEADERBOARD["grids"]["closed"][:1]},
    }
    with pytest.raises(SystemExit, match="one size"):
        leaderboard_entries.expand(unlike)
    given = {**LEADERBOARD["grids"], "given": LEADERBOARD["grids"]["closed"]}
    with pytest.raises(SystemExit, match="'given' of 1"):  # a recipe as it is has no choice
        leaderboard_entries.expand({**LEADERBOARD, "grids": given})


def test_a_safeguard_is_a_victim_without_training() -> None:
    entry = leaderboard_entries.expand(LEADERBOARD)["entries"]["blue_sld"]
    assert entry["guard"] == ["sld-weak:blue", "sld-medium:blue", "sld-strong:blue", "sld-max:blue"]
    report = {"point": {"guard": "sld-max:blue"}, "task": "blue"}
    model, how = leaderboard.victim(report, Path("nowhere"), Path("nowhere"), {})
    assert (model, how["guard"]) == ("tiny-sd", "sld-max:blue")


def test_a_model_that_never_learned_the_concept_has_a_row_where_its_task_names_one() -> None:
    entries = leaderboard_entries.expand(LEADERBOARD)["entries"]
    for task in ("star", "blue", "dotted"):
        assert entries[f"{task}_never"]["model"] == f"tiny-sd-without-{task}"
    without = {
        key: value for key, value in LEADERBOARD["tasks"]["blue"].items() if key != "control"
    }
    changed = {**LEADERBOARD, "tasks": {**LEADERBOARD["tasks"], "blue": without}}
    assert "blue_never" not in leaderboard_entries.expand(changed)["entries"]
    report = {"point": {"model": "tiny-sd-without-star"}}
    model, how = leaderboard.victim(report, Path("nowhere"), Path("nowhere"), {})
    assert (model, how) == ("tiny-sd-without-star", {"before": "tiny-sd"})


def test_a_safeguard_is_measured_at_the_setting_that_the_first_task_chose(tmp_path: Path) -> None:
    study = leaderboard_entries.expand(LEADERBOARD)
    with pytest.raises(SystemExit, match="star_sld_seed0"):
        leaderboard.guard_of(study, "blue_sld", "judge", tmp_path, {})
    result = {
        "grid": [{"point": {"guard": "sld-weak:star"}, "score": 0.5}],
        "point": {"guard": "sld-weak:star"},
    }
    results = {"star_sld_seed0": result}
    assert leaderboard.guard_of(study, "blue_sld", "judge", tmp_path, results) == (
        result["grid"],
        "sld-weak:blue",
    )


def test_a_safeguard_that_reads_words_gets_no_attack_by_embeddings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attacked: dict[str, list[str]] = {}
    monkeypatch.setattr(
        leaderboard,
        "attack",
        lambda *_, name, attack_names, **__: attacked.update({name: attack_names}),
    )
    path = ROOT / "studies" / "configs" / "tiny_leaderboard.yaml"
    words = ["--methods", "safree,sld,spm_gate", "--tasks", "star", "--stage", "attack"]
    monkeypatch.setattr("sys.argv", ["leaderboard", str(path), *words, "--work", str(tmp_path)])
    leaderboard.main()
    assert attacked["star_sld"] == list(LEADERBOARD["attacks"])
    for name in ("star_safree", "star_spm_gate"):
        left_out = set(attacked["star_sld"]) - set(attacked[name])
        assert left_out == {"concept_inversion", "soft_prompt"}


def test_a_gate_needs_the_run_of_its_own_task(tmp_path: Path) -> None:
    entries = leaderboard_entries.expand(LEADERBOARD)["entries"]
    kinds = ("spm-gate", "spm-gate-clip", "spm-gate-tokens")
    assert entries["blue_spm_gate"]["guard"] == [f"{kind}:blue@spm" for kind in kinds]
    with pytest.raises(SystemExit, match=r"no result blue_spm_seed0 .* run --methods spm first"):
        leaderboard.protected("spm-gate:blue@spm", "blue", tmp_path, {})


GATES = {
    "tasks": {"star": LEADERBOARD["tasks"]["star"]},
    "select": {**LEADERBOARD["select"], "n": 2},
    "seeds": [0],
    "n": 4,
    "images": dict.fromkeys(["direct", "synonyms", "neighbours", "retained", "implicit"], 4),
    "attack": {"group": "direct", "n": 3, "seed": 0},
    "attacks": {"seed_search": {"tries": 1}, "soft_prompt": {"steps": 1, "every": 1}},
    "grids": {},
    "methods": {
        "spm": {
            "label": "SPM",
            "recipe": "tiny_star_spm",
            "set": {"training.steps": 1, "training.batch_size": 2, "forget.n": 4, "retain.n": 4},
            "watch": False,
        },
        "spm_gate": {
            **LEADERBOARD["methods"]["spm_gate"],
            "guard": ["spm-gate", "spm-gate-tokens"],
            "select_attack": {"name": "seed_search", "n": 3, "seed": 100, "options": {"tries": 1}},
        },
    },
}


def test_a_gate_is_measured_with_the_lora_of_another_row(
    no_results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is trained again where its folder is gone. No result names a folder of the machine."""
    path, work = no_results / "gates.yaml", no_results / "work"
    path.write_text(yaml.safe_dump(GATES))
    for stage in ("train", "implicit", "attack"):
        words = ["leaderboard", str(path), "--work", str(work), "--stage", stage]
        monkeypatch.setattr("sys.argv", words)
        leaderboard.main()

    results = Results("gates")
    run, gate = results["star_spm_seed0"], results["star_spm_gate_seed0"]
    assert [row["point"]["guard"] for row in gate["grid"]] == [
        "spm-gate:star@spm",
        "spm-gate-tokens:star@spm",
    ]
    guard = max(gate["grid"], key=lambda row: row["score"])["point"]["guard"]
    assert gate["point"] == {"guard": guard}
    assert (gate["recipe"], gate["size_mb"]) == (run["recipe"], run["size_mb"])
    assert gate["run"] == {name: run["run"][name] for name in gate["run"]}
    attack = results.folder("attacks")["star_spm_gate_seed_search_seed0"]
    implicit = results.folder("implicit")["star_spm_gate_seed0"]
    names = (gate["evaluation"]["models"]["after"], attack["models"]["victim"])
    for name in (*names, implicit["evaluation"]["models"]["after"]):
        assert name.startswith(f"tiny-sd under {guard} (")
    assert list(results.folder("attacks")) == [
        "star_spm_gate_seed_search_seed0",
        "star_spm_seed_search_seed0",
        "star_spm_soft_prompt_seed0",
    ]
    for content in (gate, attack, implicit):
        assert str(no_results) not in json.dumps(content)

    before, _ = leaderboard.protected(guard, "star", work, results)
    drawing = before.drawing()
    shutil.rmtree(work / "star_spm")
    again, _ = leaderboard.victim(gate, work / "nowhere", work, results)
    assert again.drawing() == drawing

    study = leaderboard_entries.expand(GATES)
    measure = functools.partial(leaderboard.measure_guarded, name="star_spm_gate", work=work)
    refuse = functools.partial(pytest.fail, "measured again")
    monkeypatch.setattr(leaderboard.api, "evaluate", lambda *_, **__: refuse())
    measure(study, results=results)
    wider = copy.deepcopy(study)
    wider["entries"]["star_spm_gate"]["guard"].append("spm-gate-clip:star@spm")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        measure(wider, results=results)
    results["star_spm_seed0"] = change_result(run, recipe__training__lr=9e-9)
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        measure(study, results=results)


def test_as_many_steps_as_the_budget_of_seconds_holds() -> None:
    assert leaderboard.same_time(100, 40.0, 80.0) == 200
    assert leaderboard.same_time(100, 240.0, 80.0) == 33
    assert leaderboard.same_time(100, 84.0, 80.0) is None
    assert leaderboard.same_time(100, 1e6, 80.0) == 1


def test_steps_without_an_attack_keep_their_share_of_fewer_steps() -> None:
    """Otherwise a run of few steps would have no attack at all."""
    recipe = {"training": {"steps": 100}, "attack": {"warmup": 20}}
    expected = {"training.steps": 11, "attack.warmup": 2}
    assert leaderboard.scaled_schedule(recipe, 11) == expected
    plain = {"training": {"steps": 100}, "attack": None}
    assert leaderboard.scaled_schedule(plain, 11) == {"training.steps": 11}


@pytest.mark.parametrize("target", ["denoiser", "text_encoder"])
def test_a_finished_run_is_loaded_from_its_changed_tensors(target: str, tmp_path: Path) -> None:
    """This holds for each trained part: otherwise the attacks would run on the original model."""
    select = "all" if target == "text_encoder" else "cross_attention"
    run = concept_eraser.erase(
        short(target=target, trainable__select=select, training__steps=1, training__lr=1e-2),
        output=tmp_path / "run",
    )
    again = runs.erased_model(run).parts[target].state_dict()
    assert all(
        torch.equal(again[name], value)
        for name, value in run.model.parts[target].state_dict().items()
    )
    before = concept_eraser.load("tiny-sd").parts[target].state_dict()
    assert any(not torch.equal(again[name], value) for name, value in before.items())


def test_a_finished_run_with_a_gate_is_loaded_with_it(tmp_path: Path) -> None:
    fewer = ["method.stages=1", "method.steps=3", "save=changed"]
    run = concept_eraser.erase("tiny_star_cpe", overrides=fewer, output=tmp_path / "run")
    again = runs.erased_model(run).parts["denoiser"].state_dict()
    expected = run.model.parts["denoiser"].state_dict()
    assert again.keys() == expected.keys()
    assert any(name.startswith("residual_gate.") for name in again)
    assert all(torch.equal(again[name], value) for name, value in expected.items())


@pytest.mark.parametrize("lora", [None, 2])
def test_a_model_has_the_name_of_its_original_in_results(tmp_path: Path, lora: int | None) -> None:
    """Otherwise results name the folder of the run on the machine that made them."""
    trained = {"select": "cross_attention", "lora": lora}
    content = short(
        trainable=trained, training__steps=1, save="changed" if lora is None else "lora"
    )
    run = concept_eraser.erase(content, output=tmp_path / "run")
    assert runs.model_of(run) is run.model
    assert runs.erased_model(run).source == run.model.source == run.recipe.model


def test_a_setting_is_scored_by_retain_accuracy_and_concept_rate() -> None:
    def run(share: float, accuracy: float) -> dict:
        rows = [("concept_rate", "direct", share), ("accuracy_shape", "retained", accuracy)]
        protocol = {"protocol": {"concept": {"shape": "star"}}}
        return {
            "evaluation": {
                **protocol,
                "results": [{"metric": m, "group": g, "after": {"value": v}} for m, g, v in rows],
            }
        }

    evaluations = [run(0.1, 0.9), run(0.3, 0.7)]
    plain = selection.row({"lr": 1}, evaluations, [None, None], None)
    assert plain == {
        "point": {"lr": 1},
        "score": pytest.approx(((0.9 - 0.1) + (0.7 - 0.3)) / 2),
        "share": [0.1, 0.3],
    }
    row = selection.row({"lr": 1}, evaluations, [0.5, 0.2], "abc")
    assert row["score"] == pytest.approx(plain["score"] - 0.35)
    assert row["by"] == "abc"


def grid(by: str | None, *rates: float) -> list[dict]:
    return [
        {
            "point": {"training.lr": r},
            "score": 1.0,
            "share": [0.0],
            **({"by": by, "attacked": [0.5]} if by else {}),
        }
        for r in rates
    ]


def test_a_grid_scored_in_another_way_is_scored_again() -> None:
    study = {
        "select": {"attack": {"name": "soft_prompt", "n": 24}, "image_seed": 7},
        "grids": {"rates": [{"training.lr": 1.0}, {"training.lr": 2.0}]},
        "entries": {"m": {"grid": "rates"}},
    }
    by, results = selection.scorer(study, "j"), {}

    def known_grid(content: list[dict], judge: str = "j", for_study: dict = study) -> list[dict]:
        results["m_seed1"] = {"evaluation": {"judge": "j"}, "grid": content}
        return selection.known_results(for_study, dict(sorted(results.items())), "m", judge)

    assert known_grid(grid(by, 1.0, 2.0))
    assert not known_grid(grid(None, 1.0, 2.0)), "before there was an attack"
    assert not known_grid(grid("another", 1.0, 2.0)), "by another attack"
    assert not known_grid(grid(by, 1.0, 3.0)), "other points"
    assert not known_grid(grid(by, 1.0, 2.0), judge="another")
    assert known_grid(grid(by, 1.0, 2.0), for_study={}), "another study that takes the setting over"
    results["m_seed0"] = {"evaluation": {"judge": "j"}, "grid": grid(None, 1.0, 2.0)}
    assert known_grid(grid(by, 1.0, 2.0)), "one seed's result knows it"
    other = {**study, "select": {**study["select"], "image_seed": 8}}
    assert selection.scorer(other, "j") != by


def test_a_grid_belongs_to_the_current_recipe() -> None:
    """A changed default needs a new grid; a `watch` during the run makes no difference."""
    entry = {"recipe": "tiny_star_munba_uce", "grid": "rates"}
    study = {
        "select": {},
        "grids": {"rates": [{"training.lr": 1e-4}, {"training.lr": 2e-4}]},
        "entries": {"m": entry},
    }
    for changes, there in (
        ([], True),
        (["watch={suite: tiny_star, every: 2, n: 4}"], True),
        (["forget.empty_prompts=0.5"], False),
    ):
        of = recipe.load("tiny_star_munba_uce", ["training.lr=2e-4", "training.seed=1", *changes])
        content = {
            "entry": "m",
            "evaluation": {"judge": "j"},
            "grid": grid(None, 1e-4, 2e-4),
            "recipe": of.resolved(),
            "point": {"training.lr": 2e-4},
            "seed": 1,
        }
        assert bool(selection.known_results(study, {"m_seed1": content}, "m", "j")) == there, (
            changes
        )


def test_the_selection_attacks_other_prompts_and_noise_than_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []

    class Campaign:
        def as_dict(self) -> dict:
            return {"rates": {"asr": {"value": 0.25}}}

    monkeypatch.setattr(
        selection.api,
        "attack",
        lambda model, name, suite, **how: seeds.append(suite.seed) or Campaign(),
    )
    study = leaderboard_entries.expand(LEADERBOARD)
    entry = study["entries"]["star_munba"]
    assert selection.attack_success(study, entry, "j", tmp_path / "a", ("tiny-sd", {})) == 0.25
    assert selection.attack_success(study, entry, "j", tmp_path / "a", ("tiny-sd", {})) == 0.25
    assert seeds == [LEADERBOARD["select"]["image_seed"]]
    assert seeds[0] != runs.suite_of(study, entry, None).seed
    selection.attack_success(study, entry, "another judge", tmp_path / "a", ("tiny-sd", {}))
    assert len(seeds) == 2


def test_a_result_of_a_setting_that_is_no_longer_reported_is_not_taken_for_it() -> None:
    report = {"recipe": {"training": {"lr": 1e-4}}, "point": {"training.lr": 1e-4}}
    assert not leaderboard.is_of(None, report)
    assert leaderboard.is_of(report, report)
    assert not leaderboard.is_of(report, {**report, "recipe": {"training": {"lr": 4e-4}}})
    assert not leaderboard.is_of(report, {**report, "point": {"guard": "sld-max:star"}})


def test_the_memory_of_three_steps_is_measured_above_the_memory_before(tmp_path: Path) -> None:
    """All weights with their gradients and moments need more memory than a twentieth of them. A
    mask needs all gradients before the first step and frees them; the steps stay as large.
    """
    sizes = {}
    for name, settings in {
        "cross_attention": {},
        "all": {},
        "masked": {"select": "all", "saliency": 0.5},
    }.items():
        recipe_file, sizes_file = tmp_path / f"{name}.json", tmp_path / f"{name}_sizes.json"
        overrides = [
            f"trainable.{key}={value}" for key, value in ({"select": name} | settings).items()
        ] + ["training.batch_size=4"]
        content = recipe.load("tiny_star_munba", overrides).resolved()
        recipe_file.write_text(json.dumps(content))
        process = processes.Command(
            str(recipe_file),
            str(sizes_file),
            folder=ROOT,
            script=ROOT / "studies" / "memory_footprint.py",
        )
        assert process.wait() == 0, process.stderr
        sizes[name] = json.loads(sizes_file.read_text())
    assert sizes["cross_attention"]["before_mb"] > 100
    # gradients of two objectives and two moments, of the 3.7 million more, in MB
    expected_mb = 4 * 3.7e6 * 4 / 2**20
    assert sizes["all"]["steps_mb"] - sizes["cross_attention"]["steps_mb"] > 0.5 * expected_mb
    assert sizes["masked"]["steps_mb"] > 0.8 * sizes["all"]["steps_mb"]


def test_the_memory_of_a_method_that_searches_is_measured_in_few_steps() -> None:
    """STEREO's search has two kinds of steps in each round, before its erasure."""
    shortened = memory_footprint.shorten(recipe.load("tiny_star_stereo").resolved())
    short = recipe.validate(shortened, "the recipe")
    rounds = shortened["method"]["rounds"]
    assert short.training.steps == memory_footprint.STEPS + 2 * rounds
    plain = memory_footprint.shorten(recipe.load("tiny_star_munba").resolved())
    assert recipe.validate(plain, "the recipe").training.steps == memory_footprint.STEPS


TABLE = result_tables.table("tiny_leaderboard")


@pytest.fixture
def leaderboard_of_two(no_results: Path) -> Results:
    """The committed results of MUNBa and ESD on the star."""
    results = Results("tiny_leaderboard")
    for key, content in TABLE.items():
        if key.startswith(("star_munba_seed", "star_esd_seed")):
            results[key] = content
    return results


def change_result(result: dict, **values: object) -> dict:
    """A copy of a result with other values."""
    return with_values(copy.deepcopy(result), values)


def test_seeds_of_an_older_setting_are_not_pooled_with_the_new_one(
    leaderboard_of_two: Results,
) -> None:
    assert [run["seed"] for run in leaderboard_rows.reports("tiny_leaderboard")["star_munba"]] == [
        0,
        1,
        2,
    ]
    key = "star_munba_seed0"
    leaderboard_of_two[key] = change_result(
        leaderboard_of_two[key], recipe__training__lr=9e-9, point={"training.lr": 9e-9}
    )
    assert [run["seed"] for run in leaderboard_rows.reports("tiny_leaderboard")["star_munba"]] == [
        0
    ]


def test_a_model_of_equal_seconds_is_trained_if_it_differs(
    leaderboard_of_two: Results, tmp_path: Path
) -> None:
    """It is not trained again, not for another seed, and not if the steps of the row took the same
    seconds.
    """
    train = functools.partial(
        leaderboard.equal_time,
        LEADERBOARD,
        leaderboard_entries.expand(LEADERBOARD),
        work=tmp_path,
        results=leaderboard_of_two,
    )
    there = leaderboard_of_two.folder("time")
    there["star_esd_seed0"] = before = TABLE["time/star_esd_seed0"]
    folder = train("star_esd", 0)
    assert folder is not None
    assert folder.parent == tmp_path / "star_esd"
    assert there["star_esd_seed0"] == before
    assert train("star_esd", 1) is None
    there["star_munba_seed0"] = before
    assert train("star_munba", 0) is None
    assert list(there) == ["star_esd_seed0"]


def test_the_page_has_the_cost_of_a_gates_run_and_the_attack_of_its_selection(
    leaderboard_of_two: Results,
) -> None:
    guard, report = "spm-gate:star@spm", TABLE["star_spm_seed0"]
    leaderboard_of_two["star_spm_gate_seed0"] = {
        **TABLE["star_sld_seed0"],
        "entry": "star_spm_gate",
        "label": LEADERBOARD["methods"]["spm_gate"]["label"],
        "point": {"guard": guard},
        **leaderboard.training_of(guard, "star", TABLE),
    }
    page = pages.page("tiny_leaderboard")
    table = page.partition("\n## star\n")[2].splitlines()
    head, row = (
        [cell.strip() for cell in next(line for line in table if line.startswith(start)).split("|")]
        for start in ("| method |", "| SPM with its gate (at inference) |")
    )
    cells = dict(zip(head, row, strict=True))
    assert cells["setting"] == guard
    assert cells["training s"] == f"{report['run']['cpu_seconds']:.0f}"
    assert (cells["size MB"], cells["steps to < 2 %"]) == (f"{report['size_mb']:.1f}", "-")
    assert "(at inference): `ring_a_bell` takes the place of the soft prompt" in page
    del leaderboard_of_two["star_spm_gate_seed0"]
    assert "takes the place of" not in pages.page("tiny_leaderboard")


def test_equal_seconds_are_reported_for_the_reported_setting_only(
    leaderboard_of_two: Results,
) -> None:
    assert equal_seconds.timed_table("tiny_leaderboard", "star") == ""
    report, there = leaderboard_of_two["star_esd_seed0"], leaderboard_of_two.folder("time")
    point = {**report["point"], "training.steps": 162}
    seconds = leaderboard_of_two["star_munba_seed0"]["run"]["cpu_seconds"]
    again = change_result(
        report,
        recipe__training__steps=162,
        run__steps=162,
        run__cpu_seconds=seconds,
        point=point,
    )
    del again["recipe"]["watch"]  # a run for equal seconds has no watch
    there["star_esd_seed0"] = again
    page = equal_seconds.timed_table("tiny_leaderboard", "star")
    assert "| ESD-x | 162 |" in page
    assert "| MUNBa | 100 |" in page
    assert "yet:" not in page
    for one in LEADERBOARD["time"]["attacks"]:
        key = f"star_esd_{one}_seed0"
        fields = {"recipe": again["recipe"], "point": point, "attempts": [{"success": True}] * 9}
        there.folder("attacks")[key] = TABLE[f"attacks/{key}"] | fields
    page = equal_seconds.timed_table("tiny_leaderboard", "star")
    assert "100 [93, 100]" in page, "of the model of as many seconds, and not of the row's"
    assert page.index("| ESD-x |") < page.index("| MUNBa |"), (
        "what is not under all attacks yet comes last"
    )
    there["star_esd_seed0"] = change_result(again, run__cpu_seconds=8.0)
    page = equal_seconds.timed_table("tiny_leaderboard", "star")
    assert page == "", "a run of other seconds is not one of equal seconds"
    there["star_esd_seed0"] = again
    slow = change_result(
        leaderboard_of_two["star_munba_seed0"],
        entry="star_slow",
        label="SLOW",
        run__cpu_seconds=500.0,
    )
    leaderboard_of_two["star_slow_seed0"] = slow
    assert equal_seconds.timed_table("tiny_leaderboard", "star").endswith(
        "Not run with these seconds yet: SLOW."
    )
    del leaderboard_of_two["star_slow_seed0"]
    for name in ("cpe", "sld"):  # SLD is at inference, so it trains nothing
        leaderboard_of_two[f"star_{name}_seed0"] = TABLE[f"star_{name}_seed0"]
    assert equal_seconds.timed_table("tiny_leaderboard", "star").endswith(
        "|\n\nNot run with these seconds, since they train without steps: CPE (with its gate)."
    )
    again["recipe"]["training"]["lr"] = 9e-9
    there["star_esd_seed0"] = again
    assert equal_seconds.timed_table("tiny_leaderboard", "star") == ""


def test_a_changed_recipe_gives_its_setting_to_no_other_entry(no_results: Path) -> None:
    """`like: study/entry` reads the other study with its current recipe."""
    entry = {"like": "tiny_leaderboard/star_munba_uce"}
    by, points = (
        selection.scorer(LEADERBOARD, "j"),
        [p["training.lr"] for p in LEADERBOARD["grids"]["whole"]],
    )
    for changes, there in (([], True), (["forget.empty_prompts=0.5"], False)):
        of = recipe.load("tiny_star_munba_uce", ["training.lr=2e-4", *changes])
        content = {
            "entry": "star_munba_uce",
            "evaluation": {"judge": "j"},
            "grid": grid(by, *points),
            "recipe": of.resolved(),
            "point": {"training.lr": 2e-4},
            "seed": 0,
        }
        Results("tiny_leaderboard")["star_munba_uce_seed0"] = content
        if there:
            assert selection.choose_grid({}, "star_sum", entry, no_results, {}, "j") == grid(
                by, *points
            )
        else:
            with pytest.raises(SystemExit, match="current recipe"):
                selection.choose_grid({}, "star_sum", entry, no_results, {}, "j")


def test_selective_alignment_pools_the_other_attributes_of_the_forget_groups() -> None:
    def result(metric: str, group: str, value: float, n: int) -> dict[str, Any]:
        return {"metric": metric, "group": group, "after": {"value": value, "n": n}}

    measured = [
        result("accuracy_color", "direct", 0.5, 100),
        result("accuracy_style", "direct", 1.0, 40),
        result("accuracy_color", "synonyms", 0.25, 60),
        result("accuracy_shape", "direct", 0.0, 100),  # the concept's own attribute
        result("accuracy_color", "neighbours", 1.0, 100),
        result("concept_rate", "direct", 0.0, 100),
    ]
    run = {"evaluation": {"protocol": {"concept": {"shape": "star"}}, "results": measured}}
    found = hub.selective_alignment([run, run])
    assert found is not None
    assert (found.n, found.value) == (400, pytest.approx((50 + 40 + 15) / 200))
    run["evaluation"]["results"] = measured[3:]
    assert hub.selective_alignment([run]) is None


def test_hubs_tables_have_the_rows_of_the_leaderboard() -> None:
    page = pages.page("tiny_leaderboard")
    _, _, section = page.partition("## By the axes of HUB")
    tables = section.partition("\n## ")[0].split("### HUB: ")[1:]
    assert [table.split("\n")[0] for table in tables] == ["star", "blue", "dotted"]
    for table in tables:
        lines = [line for line in table.splitlines()[4:] if line.startswith("| ")]
        labels = [line.split(" | ")[0] for line in lines]
        whole = page.partition(f"\n## {table.splitlines()[0]}\n")[2].splitlines()[3:]
        assert labels == [line.split(" | ")[0] for line in whole[: len(labels)]]
