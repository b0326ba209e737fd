"""The leaderboard of all methods: ranks and who beats whom, its plots, and that no method is left
out without a reason.
"""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import concept_eraser
from concept_eraser import registry
from concept_eraser.evaluation import suite as suites
from concept_eraser.recipes import recipe
from studies import leaderboard, result_tables, runs, selection, study
from studies.rendering import equal_seconds, figures, leaderboard_plot, leaderboard_rows, ranks
from studies.rendering import leaderboard as pages
from studies.rendering.ranks import Standing
from studies.result_tables import Results
from tests.conftest import ROOT, short, with_values

BOARD = yaml.safe_load((ROOT / "studies" / "configs" / "tiny_leaderboard.yaml").read_text())


def standing(name: str, share: int, attacks: int, lost: int, n: int = 300) -> Standing:
    return Standing(name, {"share": (share, n), "attacks": (attacks, n), "lost": (lost, n)})


def test_ranks_of_what_is_far_apart_are_sure() -> None:
    some = [
        standing("worst", 200, 250, 100),
        standing("best", 0, 5, 0),
        standing("middle", 80, 120, 30),
    ]
    rates = ranks.draw_rates(some)
    for column in ("share", "attacks", "lost", "loss"):
        assert ranks.ranks(rates[column]) == [(3, 3, 3), (1, 1, 1), (2, 2, 2)]
    assert ranks.beaten_by(some, rates) == {
        "worst": ["best", "middle"],
        "best": [],
        "middle": ["best"],
    }


def test_equals_share_a_rank_and_do_not_beat_each_other() -> None:
    some = [standing("a", 3, 30, 5), standing("b", 3, 30, 5)]
    rates = ranks.draw_rates(some)
    assert [value[1:] for value in ranks.ranks(rates["loss"])] == [(1, 2), (1, 2)]
    assert ranks.beaten_by(some, rates) == {"a": [], "b": []}


def test_better_in_one_and_worse_in_another_beats_nobody() -> None:
    some = [standing("robust", 0, 0, 90), standing("gentle", 0, 90, 0)]
    assert ranks.beaten_by(some, ranks.draw_rates(some)) == {"robust": [], "gentle": []}


def test_what_is_said_of_two_does_not_change_because_a_third_joins_them() -> None:
    two = [standing("a", 3, 30, 5), standing("b", 3, 45, 2)]
    alone, beside = ranks.draw_rates(two), ranks.draw_rates([standing("c", 9, 9, 9), *two])
    for column in ("share", "attacks", "lost", "loss"):
        assert (alone[column] == beside[column][1:]).all()
    assert len({tuple(row[:3]) for row in alone["share"]}) == 2, (
        "equal counts are drawn each by itself"
    )


def test_the_loss_is_the_larger_of_share_and_attacks_and_what_is_lost() -> None:
    (rates,) = [ranks.draw_rates([standing("a", 90, 30, 60, n=30000)])["loss"]]
    assert rates.mean() == pytest.approx(90 / 30000 + 60 / 30000, rel=0.1)


def test_tasks_weigh_the_same_whatever_their_numbers_of_images() -> None:
    few, many = [standing("a", 0, 0, 50, n=100)], [standing("a", 10000, 0, 0, n=10000)]
    rates = ranks.together([few, many])
    assert rates["share"].mean() == pytest.approx(0.5, abs=0.01)
    assert rates["lost"].mean() == pytest.approx(0.25, abs=0.02)
    (head, row) = ranks.rows(few, {"share": "share", "attacks": "attacks", "lost": "lost"}, rates)
    assert head[1:4] == ["share %", "attacks %", "lost %"]
    assert row[1].startswith("50.")


def test_means_over_tasks_are_of_each_method_whatever_its_place() -> None:
    """The order of the methods is the first task's; each rate must be its own method's."""
    one, two = (
        [standing("a", 0, 0, 0), standing("b", 300, 0, 0)],
        [standing("a", 300, 0, 0), standing("b", 300, 300, 0)],
    )
    rates = ranks.together([one, two])
    assert rates["share"].mean(axis=1) == pytest.approx([0.5, 1.0], abs=0.02)
    assert rates["attacks"].mean(axis=1) == pytest.approx([0.0, 0.5], abs=0.02)


def test_only_methods_of_every_task_stand_together(monkeypatch: pytest.MonkeyPatch) -> None:
    both, one = standing("both", 0, 9, 3), standing("one", 0, 0, 0)
    known = {
        "star": {"one": one, "both": both, "other": standing("other", 50, 90, 9)},
        "blue": {"both": both, "other": both, "late": one},
    }
    monkeypatch.setattr(pages, "standings_of", lambda study, task: known[task])
    monkeypatch.setattr(
        pages,
        "leaderboard_of",
        lambda study: {
            "tasks": ["star", "blue"],
            "methods": dict.fromkeys(("one", "both", "other", "late")),
        },
    )
    tasks, rows, said = pages.over_tasks("a leaderboard")
    assert tasks == ["star", "blue"]
    assert [row[0] for row in rows] == ["method", "both", "other"]
    assert rows[1][-1] == "-"
    assert rows[2][-1] == "both"
    assert len(said) == 1, "no claims"
    known["blue"].pop("other")
    assert pages.over_tasks("a leaderboard")[1] == []
    assert pages.together_block("a leaderboard") == "Not measured yet."


def test_attempts_are_of_the_seeds_that_every_attack_was_made_on() -> None:
    def made(seed: int, *hits: bool) -> dict:
        return {"training_seed": seed, "attempts": [{"success": hit} for hit in hits]}

    attacks = {"soft": [made(0, True), made(1, True)], "tokens": [made(0, False)]}
    assert [a["success"] for a in leaderboard_rows.attempts_of(attacks, ["soft", "tokens"])] == [
        True,
        False,
    ]
    assert leaderboard_rows.attempts_of(attacks, ["soft", "seeds"]) == []
    assert (
        leaderboard_rows.attempts_of({**attacks, "tokens": [made(2, False)]}, ["soft", "tokens"])
        == []
    )


def test_a_plot_knows_what_it_was_drawn_from(tmp_path: Path) -> None:
    some = [standing("a", 3, 30, 5), standing("b", 0, 60, 1)]
    path, figure = tmp_path / "plot.svg", leaderboard_plot.of({"star": some})
    assert not figures.is_current(path, figure)
    figures.write(path, figure)
    assert figures.is_current(path, figure)
    assert not figures.is_current(
        path, leaderboard_plot.of({"star": [some[0], standing("b", 1, 60, 1)]})
    )
    assert not figures.is_current(path, leaderboard_plot.of({"blue": some}))
    first = path.read_bytes()
    figures.write(path, figure)
    assert path.read_bytes() == first


@pytest.mark.parametrize("length", [6, 40, 65, 160])
def test_the_names_of_a_plot_lie_inside_it_and_leave_its_panels_room(length: int) -> None:
    """However long they are."""
    some = [standing(f"{number} " + "names " * (length // 6), 3, 30, 5) for number in range(24)]
    for tasks in ({"star": some}, {"star": some, "blue": some[:3]}):
        figure = leaderboard_plot.figure_of(tasks)
        for row in figure.subfigs:
            names = row.legends[0].get_window_extent()
            assert figure.bbox.x0 <= names.x0
            assert names.x1 <= figure.bbox.x1
            assert names.y0 >= row.bbox.y0
            assert len(row.axes) == 2
            assert all(axis.get_window_extent().y0 > names.y1 for axis in row.axes)
            assert all(axis.get_window_extent().height > 250 for axis in row.axes)


def test_every_method_has_a_row_or_a_reason() -> None:
    entries = leaderboard.expand(BOARD)["entries"].values()
    asked = [
        recipe.load(
            e["recipe"], [f"{k}={v}" for k, v in e["set"].items() if k.startswith("method")]
        ).method
        for e in entries
        if "recipe" in e
    ]
    rows = {method.name for method in asked}
    named = {
        alias
        for alias, (plugin, given) in registry.named("method").items()
        for m in asked
        if (m.name, given) == (plugin, {k: m.options.get(k) for k in given})
    }
    known = {*registry.names("method"), *registry.named("method")}
    assert known - rows - named == set(BOARD["elsewhere"]), (
        "a method is neither on the leaderboard nor explained, or both"
    )
    assert all(reason.strip() for reason in BOARD["elsewhere"].values())


@pytest.mark.parametrize(
    "name", ["tiny_leaderboard", "tiny_ablation", "tiny_default", "tiny_edges"]
)
def test_every_run_of_a_leaderboard_is_a_recipe(name: str) -> None:
    """A mistake in one is told here, and not after its grid was trained."""
    found = leaderboard.expand(
        yaml.safe_load((ROOT / "studies" / "configs" / f"{name}.yaml").read_text())
    )
    for entry in found["entries"].values():
        for point in found["grids"].get(entry.get("grid"), [{}]) if "recipe" in entry else ():
            assert runs.recipe_of(entry, point, 0, study.watch_of(found, entry)).forgotten


def test_what_the_default_is_chosen_by_is_in_no_row_of_the_leaderboard() -> None:
    """Neither training seeds nor noise nor attacked prompts of the candidates."""
    candidates = yaml.safe_load((ROOT / "studies" / "configs" / "tiny_default.yaml").read_text())
    found, reported = leaderboard.expand(candidates), suites.load("tiny_star")
    for entry in found["entries"].values():
        assert (
            leaderboard.attacked_suite(found, entry).seed
            == candidates["image_seed"]
            != reported.seed
        )
    assert not {*candidates["seeds"]} & {*BOARD["seeds"]}
    assert candidates["attack"]["seed"] != BOARD["attack"]["seed"]
    rows = leaderboard.expand(BOARD)
    assert leaderboard.attacked_suite(rows, rows["entries"]["star_munba"]) == "tiny_star"


def test_grids_are_of_one_size_and_a_leaderboard_without_is_refused() -> None:
    unlike = {**BOARD, "grids": {**BOARD["grids"], "closed": BOARD["grids"]["closed"][:1]}}
    with pytest.raises(SystemExit, match="one size"):
        leaderboard.expand(unlike)


def test_a_safeguard_is_a_victim_without_training() -> None:
    entry = leaderboard.expand(BOARD)["entries"]["blue_sld"]
    assert entry["guard"] == ["sld-weak:blue", "sld-medium:blue", "sld-strong:blue", "sld-max:blue"]
    model, how = leaderboard.victim({"point": {"guard": "sld-max:blue"}}, Path("nowhere"))
    assert (model, how["guard"]) == ("tiny-sd", "sld-max:blue")


def test_a_safeguard_is_measured_at_the_setting_that_the_first_task_chose(tmp_path: Path) -> None:
    study = leaderboard.expand(BOARD)
    with pytest.raises(SystemExit, match="star_sld_seed0"):
        leaderboard.guard_of(study, "blue_sld", "judge", tmp_path, {})
    chosen = {
        "grid": [{"point": {"guard": "sld-weak:star"}, "score": 0.5}],
        "point": {"guard": "sld-weak:star"},
    }
    results = {"star_sld_seed0": chosen}
    assert leaderboard.guard_of(study, "blue_sld", "judge", tmp_path, results) == (
        chosen["grid"],
        "sld-weak:blue",
    )


def test_as_many_steps_as_the_budget_of_seconds_holds() -> None:
    assert leaderboard.same_time(100, 40.0, 80.0) == 200
    assert leaderboard.same_time(100, 240.0, 80.0) == 33
    assert leaderboard.same_time(100, 84.0, 80.0) is None
    assert leaderboard.same_time(100, 1e6, 80.0) == 1


@pytest.mark.parametrize("target", ["denoiser", "text_encoder"])
def test_a_finished_run_is_made_again_from_its_changed_tensors(target: str, tmp_path: Path) -> None:
    """Whatever part was trained: a victim that is silently the original would be attacked in its
    place.
    """
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


def test_a_point_is_scored_by_what_is_retained_and_what_is_left() -> None:
    def run(share: float, kept: float) -> dict:
        rows = [("concept_rate", "direct", share), ("accuracy_shape", "retained", kept)]
        asked = {"protocol": {"concept": {"shape": "star"}}}
        return {
            "evaluation": {
                **asked,
                "results": [{"metric": m, "group": g, "after": {"value": v}} for m, g, v in rows],
            }
        }

    seen = [run(0.1, 0.9), run(0.3, 0.7)]
    plain = selection.row({"lr": 1}, seen, [None, None], None)
    assert plain == {
        "point": {"lr": 1},
        "score": pytest.approx(((0.9 - 0.1) + (0.7 - 0.3)) / 2),
        "share": [0.1, 0.3],
    }
    found = selection.row({"lr": 1}, seen, [0.5, 0.2], "abc")
    assert found["score"] == pytest.approx(plain["score"] - 0.35)
    assert found["by"] == "abc"


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

    def known(content: list[dict], judge: str = "j", asked: dict = study) -> list[dict]:
        results["m_seed1"] = {"evaluation": {"judge": "j"}, "grid": content}
        return selection.known_results(asked, dict(sorted(results.items())), "m", judge)

    assert known(grid(by, 1.0, 2.0))
    assert not known(grid(None, 1.0, 2.0)), "before there was an attack"
    assert not known(grid("another", 1.0, 2.0)), "by another attack"
    assert not known(grid(by, 1.0, 3.0)), "other points"
    assert not known(grid(by, 1.0, 2.0), judge="another")
    assert known(grid(by, 1.0, 2.0), asked={}), "another study that takes the setting over"
    results["m_seed0"] = {"evaluation": {"judge": "j"}, "grid": grid(None, 1.0, 2.0)}
    assert known(grid(by, 1.0, 2.0)), "one seed's result knows it"
    other = {**study, "select": {**study["select"], "image_seed": 8}}
    assert selection.scorer(other, "j") != by


def test_a_grid_is_of_the_recipe_that_is_asked_now() -> None:
    """A default that is changed is tuned anew; who looked at the run meanwhile does not matter."""
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
    asked = []

    class Found:
        def as_dict(self) -> dict:
            return {"rates": {"asr": {"value": 0.25}}}

    monkeypatch.setattr(
        selection.api,
        "attack",
        lambda model, name, suite, **how: asked.append(suite.seed) or Found(),
    )
    study = leaderboard.expand(BOARD)
    entry = study["entries"]["star_munba"]
    assert selection.attack_success(study, entry, "j", tmp_path / "a", ("tiny-sd", {})) == 0.25
    assert selection.attack_success(study, entry, "j", tmp_path / "a", ("tiny-sd", {})) == 0.25
    assert asked == [BOARD["select"]["image_seed"]]
    assert asked[0] != runs.suite_of(study, entry, None).seed
    selection.attack_success(study, entry, "another judge", tmp_path / "a", ("tiny-sd", {}))
    assert len(asked) == 2


def test_a_result_of_a_setting_that_is_no_longer_reported_is_not_taken_for_it() -> None:
    report = {"recipe": {"training": {"lr": 1e-4}}, "point": {"training.lr": 1e-4}}
    assert not leaderboard.is_of(None, report)
    assert leaderboard.is_of(report, report)
    assert not leaderboard.is_of(report, {**report, "recipe": {"training": {"lr": 4e-4}}})
    assert not leaderboard.is_of(report, {**report, "point": {"guard": "sld-max:star"}})


def test_the_memory_of_three_steps_is_told_above_what_was_there(tmp_path: Path) -> None:
    """All weights with their gradients and moments take more than a twentieth of them does; a mask
    that is made of all gradients before the first step, and frees them, does not make the steps
    small."""
    sizes = {}
    for name, settings in {
        "cross_attention": {},
        "all": {},
        "masked": {"select": "all", "saliency": 0.5},
    }.items():
        asked, told = tmp_path / f"{name}.json", tmp_path / f"{name}_told.json"
        chosen = [
            f"trainable.{key}={value}" for key, value in ({"select": name} | settings).items()
        ]
        asked.write_text(json.dumps(recipe.load("tiny_star_munba", chosen).resolved()))
        subprocess.run(
            [sys.executable, "-m", "studies.memory_footprint", str(asked), str(told)],
            check=True,
            cwd=ROOT,
        )
        sizes[name] = json.loads(told.read_text())
    assert sizes["cross_attention"]["before_mb"] > 100
    # gradients of two objectives and two moments, of the 3.7 million more, in MB
    moved = 4 * 3.7e6 * 4 / 2**20
    assert sizes["all"]["steps_mb"] - sizes["cross_attention"]["steps_mb"] > 0.5 * moved
    assert sizes["masked"]["steps_mb"] > 0.8 * sizes["all"]["steps_mb"]


COMMITTED = result_tables.table("tiny_leaderboard")


@pytest.fixture
def leaderboard_of_two(no_results: Path) -> Results:
    """Results that hold MUNBa and ESD on the star, as they are committed."""
    results = Results("tiny_leaderboard")
    for key, content in COMMITTED.items():
        if key.startswith(("star_munba_seed", "star_esd_seed")):
            results[key] = content
    return results


def changed(result: dict, **values: object) -> dict:
    """A result with other values at some places."""
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
    leaderboard_of_two[key] = changed(
        leaderboard_of_two[key], recipe__training__lr=9e-9, point={"training.lr": 9e-9}
    )
    assert [run["seed"] for run in leaderboard_rows.reports("tiny_leaderboard")["star_munba"]] == [
        0
    ]


def test_a_model_of_equal_seconds_is_trained_where_it_is_another(
    leaderboard_of_two: Results, tmp_path: Path
) -> None:
    """Not again where it is there, not for another seed, and not where the steps of the row took
    those seconds anyway.
    """
    made = functools.partial(
        leaderboard.equal_time,
        BOARD,
        leaderboard.expand(BOARD),
        work=tmp_path,
        results=leaderboard_of_two,
    )
    there = leaderboard_of_two.folder("time")
    there["star_esd_seed0"] = before = COMMITTED["time/star_esd_seed0"]
    folder = made("star_esd", 0)
    assert folder is not None
    assert folder.parent == tmp_path / "star_esd"
    assert there["star_esd_seed0"] == before
    assert made("star_esd", 1) is None
    there["star_munba_seed0"] = before
    assert made("star_munba", 0) is None
    assert list(there) == ["star_esd_seed0"]


def test_equal_seconds_are_told_of_the_reported_setting_only(leaderboard_of_two: Results) -> None:
    assert equal_seconds.timed_table("tiny_leaderboard", "star") == ""
    report, there = leaderboard_of_two["star_esd_seed0"], leaderboard_of_two.folder("time")
    point = {**report["point"], "training.steps": 162}
    again = changed(report, recipe__training__steps=162, run__steps=162, point=point)
    del again["recipe"]["watch"]  # it is not looked at while it trains
    there["star_esd_seed0"] = again
    page = equal_seconds.timed_table("tiny_leaderboard", "star")
    assert "| ESD-x | 162 |" in page
    assert "| MUNBa | 100 |" in page
    assert "yet:" not in page
    for one in BOARD["time"]["attacks"]:
        key = f"star_esd_{one}_seed0"
        found = {"recipe": again["recipe"], "point": point, "attempts": [{"success": True}] * 9}
        there.folder("attacks")[key] = COMMITTED[f"attacks/{key}"] | found
    page = equal_seconds.timed_table("tiny_leaderboard", "star")
    assert "100 [93, 100]" in page, "of the model of as many seconds, and not of the row's"
    assert page.index("| ESD-x |") < page.index("| MUNBa |"), (
        "what is not under all attacks yet comes last"
    )
    slow = changed(
        leaderboard_of_two["star_munba_seed0"],
        entry="star_slow",
        label="SLOW",
        run__cpu_seconds=500.0,
    )
    leaderboard_of_two["star_slow_seed0"] = slow
    assert equal_seconds.timed_table("tiny_leaderboard", "star").endswith(
        "Not run with as many seconds yet: SLOW."
    )
    del leaderboard_of_two["star_slow_seed0"]
    again["recipe"]["training"]["lr"] = 9e-9
    there["star_esd_seed0"] = again
    assert equal_seconds.timed_table("tiny_leaderboard", "star") == ""


def test_a_setting_is_not_taken_over_from_a_recipe_that_has_changed(no_results: Path) -> None:
    """`like: study/entry` reads the other study as it is asked now."""
    entry = {"like": "tiny_leaderboard/star_munba_uce"}
    by, points = selection.scorer(BOARD, "j"), [p["training.lr"] for p in BOARD["grids"]["whole"]]
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
            with pytest.raises(SystemExit, match="as it is now"):
                selection.choose_grid({}, "star_sum", entry, no_results, {}, "j")
