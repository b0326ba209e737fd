"""A cascade of attacks: who is attacked, the worst case, families, controls, and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

from concept_eraser import UserError, api, registry
from concept_eraser.cli import attack as command
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import cascade, runner
from concept_eraser.evaluation.attacks.base import FAMILIES
from concept_eraser.evaluation.attacks.cascade import Cascade
from concept_eraser.evaluation.statistics import wilson
from concept_eraser.reporting import run_results

SUITE = {
    "concept": {"shape": "star"},
    "seed": 3,
    "sampling": {"steps": 4, "batch_size": 32, "precision": "bf16"},
    "groups": {"direct": {"prompts": "tiny_star", "role": "forget", "n": 8}},
    "metrics": ["concept_rate"],
}
N = 6


def protocol(name: str, **options: Any) -> runner.Protocol:
    return runner.Protocol(suites.load(SUITE), name, options, n=N, batch=4, hide="shape")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, set[int]]]]:
    """Replace the runs of attacks: each breaks given positions, and the calls are recorded.

    Position 5 shows the concept without an attack.
    """
    record: dict[str, Any] = {"calls": [], "breaks": {}}

    def run(work: runner.Protocol, *models: Any, skip: Any = (), **places: Any) -> Any:
        name = str(work.attack)
        record["calls"].append((name, set(skip), places["folder"]))
        breaks = record["breaks"].get(name, set()) - set(skip)
        attempts = [
            runner.Attempt(
                f"prompt {i}", i, i == 5, i == 5 or i in breaks, 2 if i in breaks else None
            )
            for i in range(N)
        ]
        rows = [{"stage": "clean", "position": i} for i in range(N)]
        rows += [
            {"stage": "attack", "position": i, "attack": name, "broken": i in breaks}
            for i in range(N)
            if i not in skip and i != 5
        ]
        return runner.Campaign(
            protocol={**work.as_dict(), "n": N, "left_out": 0},
            models={"victim": "v (1)", "original": "o (2)"},
            attempts=attempts,
            curves=[],
            cost={"images a prompt": 2.0},
            seconds=1.0,
            environment={},
            outcomes=rows,
        )

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(runner, "require_possible", lambda *parts: None)
    return record


def play(record: Mapping[str, Any], breaks: dict[str, set[int]], **settings: Any) -> Any:
    record["breaks"].update(breaks)
    protocols = [protocol(name) for name in breaks]
    return cascade.run(Cascade(protocols, **settings), None, None)  # type: ignore[arg-type]


def test_only_unbroken_prompts_go_on(scripted) -> None:
    campaign = play(scripted, {"p4d": {0, 1}, "unlearn_diff": {1, 2}, "soft_prompt": {3}})
    skipped = {name: skip for name, skip, _ in scripted["calls"]}
    assert skipped == {"p4d": set(), "unlearn_diff": {0, 1, 5}, "soft_prompt": {0, 1, 2, 5}}
    assert campaign.broken_by == ["p4d", "p4d", "unlearn_diff", "soft_prompt", None, None]
    assert [a.success for a in campaign.attempts] == [True, True, True, True, False, True]
    assert campaign.rates()["asr"]["value"] == 5 / 6
    assert campaign.rates()["attacked"]["value"] == 4 / 5
    assert [(s.attacked, s.broken, s.new) for s in campaign.stages] == [
        (5, 2, 2),
        (3, 1, 1),
        (2, 1, 1),
    ]
    assert [point["fell"] for point in campaign.curves[0]] == [2, 3, 4]
    # 2 images for each of 5, 3 and 2 prompts
    assert campaign.cost == {"images a prompt": 4.0}
    assert campaign.seconds == 3.0


def test_controls_get_every_prompt_and_count_nowhere(scripted) -> None:
    campaign = play(scripted, {"seed_search": {0, 4}, "p4d": {1}, "random_tokens": {1, 2}})
    skipped = {name: skip for name, skip, _ in scripted["calls"]}
    assert skipped == {"seed_search": set(), "p4d": {5}, "random_tokens": {5}}
    assert campaign.broken_by == [None, "p4d", None, None, None, None]
    assert campaign.rates()["attacked"]["value"] == 1 / 5
    control = campaign.families()["control"]
    assert control["attacks"] == ["seed_search", "random_tokens"]
    assert (control["n"], control["broken"]) == (5, 4)
    assert [stage.new for stage in campaign.stages] == [0, 1, 0]


def test_an_attack_that_learns_from_its_batch_gets_every_prompt(scripted) -> None:
    campaign = play(scripted, {"p4d": {0, 1}, "concept_inversion": {0, 3}, "relearning": {1, 4}})
    assert [skip for _, skip, _ in scripted["calls"]] == [set(), {5}, {5}]
    assert campaign.broken_by == ["p4d", "p4d", None, "concept_inversion", "relearning", None]
    assert [(s.attacked, s.broken, s.new) for s in campaign.stages] == [
        (5, 2, 2),
        (5, 2, 1),
        (5, 2, 1),
    ]


def test_each_family_may_begin_with_all_prompts(scripted) -> None:
    breaks = {"p4d": {0, 1}, "unlearn_diff": {2}, "soft_prompt": {0, 3}}
    campaign = play(scripted, breaks, each_family=True)
    assert [skip for _, skip, _ in scripted["calls"]] == [set(), {0, 1, 5}, {5}]
    families = campaign.families()
    assert (families["typed prompts"]["n"], families["typed prompts"]["broken"]) == (5, 3)
    assert (families["embeddings"]["n"], families["embeddings"]["broken"]) == (5, 2)
    assert families["embeddings"]["rate"]["value"] == 0.4
    assert campaign.broken_by == ["p4d", "p4d", "unlearn_diff", "soft_prompt", None, None]


def test_an_attack_without_prompts_does_not_run(scripted) -> None:
    campaign = play(scripted, {"p4d": {0, 1, 2, 3, 4}, "unlearn_diff": {0}})
    assert [name for name, *_ in scripted["calls"]] == ["p4d"]
    assert campaign.stages[1].attacked == 0
    assert "unlearn_diff" in campaign.families()["typed prompts"]["attacks"]


def test_every_shipped_attack_has_a_family() -> None:
    names = registry.names("attack")
    families = {name: registry.load("attack", name).family for name in names}
    assert set(families.values()) <= set(FAMILIES) - {"other"}
    assert families["random_tokens"] == families["seed_search"] == "control"
    Cascade([protocol(name) for name in cascade.DEFAULT])


def test_what_is_no_cascade_is_refused() -> None:
    for names, message in (
        ([], "at least one attack"),
        (["seed_search"], "no control, found seed_search"),
        (["p4d", "p4d"], "found p4d several times"),
    ):
        with pytest.raises(UserError, match=message):
            Cascade([protocol(name) for name in names])
    other = runner.Protocol(suites.load(SUITE), "p4d", n=N, batch=4, seed=1, hide="shape")
    with pytest.raises(UserError, match="same suite, prompts and seeds"):
        Cascade([protocol("soft_prompt"), other])
    with pytest.raises(UserError, match="leave out the single attack"):
        api.attack("tiny-sd", "p4d", SUITE, cascade=["soft_prompt"])
    with pytest.raises(UserError, match="each_family goes with a cascade"):
        api.attack("tiny-sd", "p4d", SUITE, each_family=True)
    with pytest.raises(UserError, match="no_such"):
        api.attack("tiny-sd", suite=SUITE, cascade=["no_such"])


def test_the_options_of_the_command_line() -> None:
    entries = command._entries("p4d, soft_prompt", ["soft_prompt.steps=30", "p4d.tokens=8"])
    assert entries == [{"name": "p4d", "tokens": "8"}, {"name": "soft_prompt", "steps": "30"}]
    assert [entry["name"] for entry in command._entries("default", [])] == list(cascade.DEFAULT)
    for names, settings, message in (
        ("p4d", ["steps=3"], "write ATTACK.steps=value with one of p4d"),
        ("p4d", ["soft_prompt.steps=3"], "write ATTACK.steps=value with one of p4d"),
        ("p4d,p4d", [], "an attack twice"),
    ):
        with pytest.raises(UserError, match=message):
            command._entries(names, settings)


@pytest.fixture(scope="module")
def real(shared_tiny: Any, tmp_path_factory: Any) -> tuple[Any, Path]:
    """A cascade on the unprotected model, with the concept's word hidden."""
    folder = tmp_path_factory.mktemp("cascade")
    # half of the prompts of a batch get a text that states a star
    (folder / "texts.txt").write_text("a red five-pointed star\na green house\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_pair", lambda *sources: (shared_tiny, shared_tiny))
        campaign = api.attack(
            "tiny-sd",
            suite=SUITE,
            cascade=[
                {"name": "random_tokens", "tries": 2},
                {"name": "paraphrase", "prompts": str(folder / "texts.txt"), "tries": 1},
                {"name": "p4d-k", "steps": 20, "every": 20},
            ],
            n=N,
            batch=4,
            hide="shape",
            output=folder,
        )
    return campaign, folder


def test_the_worst_case_follows_from_the_table(real) -> None:
    campaign, folder = real
    frame = pandas.read_csv(folder / "attack.csv.xz")
    clean = frame[(frame.stage == "clean") & (frame.counted == 1)].set_index("position")
    assert clean.index.is_unique
    attacks = frame[(frame.stage == "attack") & (frame.family != "control")]
    by_prompt = attacks.groupby("position").broken.max()
    worst = clean.shows_concept.astype(bool) | by_prompt.reindex(clean.index).eq(1)
    rate = wilson(int(worst.sum()), len(clean))
    assert campaign.rates()["asr"]["value"] == rate.value
    assert campaign.rates()["asr"]["low"] == rate.low
    for stage in campaign.stages:
        rows = frame[(frame.stage == "attack") & (frame.attack == stage.attack)]
        assert (len(rows), int(rows.broken.sum())) == (stage.attacked, stage.broken)
    first = attacks[attacks.broken == 1].sort_values("attack_number").groupby("position").first()
    by_position = dict(zip(clean.index, campaign.broken_by, strict=True))
    assert {k: v for k, v in by_position.items() if v} == first.attack.to_dict()
    assert campaign.stages[2].attacked == campaign.stages[1].attacked - campaign.stages[1].broken
    assert 0 < campaign.stages[1].broken < campaign.stages[1].attacked
    assert campaign.stages[2].broken > 0


def test_the_files_of_a_cascade_are_those_of_an_attack(real) -> None:
    campaign, folder = real
    content = json.loads((folder / "attack.json").read_text())
    ((place, read),) = run_results.read_attacks(folder)
    assert (place, read["protocol"]["attack"]) == (folder, "cascade")
    assert [stage["attack"] for stage in content["stages"]] == [
        "random_tokens",
        "paraphrase",
        "p4d-k",
    ]
    assert [a["attack"] for a in content["attempts"]] == campaign.broken_by
    assert [one["attack"] for one in content["protocol"]["attacks"]] == [
        stage.attack for stage in campaign.stages
    ]
    assert sorted(path.parent.name for path in folder.rglob("attempts.jsonl")) == [
        "01_random_tokens",
        "02_paraphrase",
        "03_p4d-k",
    ]


def test_a_finished_cascade_generates_nothing_again(real, shared_tiny, monkeypatch) -> None:
    campaign, folder = real

    def fail(*arguments: Any, **names: Any) -> torch.Tensor:
        raise AssertionError("an image was generated again")

    protocols = [
        protocol("random_tokens", tries=2),
        protocol("paraphrase", prompts=str(folder / "texts.txt"), tries=1),
        protocol("p4d-k", steps=20, every=20),
    ]
    monkeypatch.setattr(runner.Referee, "draw", fail)
    again = cascade.run(Cascade(protocols), shared_tiny, shared_tiny, folder=folder)
    assert again.attempts == campaign.attempts
    assert again.broken_by == campaign.broken_by
    assert again.outcomes == campaign.outcomes
