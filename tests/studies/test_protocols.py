"""A stored result counts as finished only under the protocol and with the recipe of today."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from concept_eraser.evaluation import suite as suites
from studies import runs, several_concepts, study
from studies.result_tables import Results

ENTRY = {"recipe": "tiny_star_munba"}
SELECT = {"seeds": [9], "image_seed": 9, "n": 4}
STUDY = {"suite": "tiny_star", "n": 8, "select": SELECT, "entries": {"munba": ENTRY}}


def evaluation_of(suite: suites.Suite, n: int | None) -> dict[str, Any]:
    """The part of a stored evaluation that says how it was measured."""
    suite = suite.with_at_most(n)
    content = json.loads(suites.dumps(suite.model_dump(mode="json")))
    return {
        "judge": suite.build_judge().fingerprint,
        "protocol": content,
        "prompt_hashes": {name: suites.group_prompts(suite, name).hash for name in suite.groups},
        "results": [],
    }


def test_an_evaluation_has_the_protocol_of_its_suite_only() -> None:
    suite = suites.load("tiny_star")
    stored = evaluation_of(suite, 8)
    assert runs.has_protocol(stored, suite, 8)
    assert runs.has_protocol(stored, suite.model_copy(update={"about": "other words"}), 8)
    assert not runs.has_protocol(stored, suite, 9)
    assert not runs.has_protocol(stored, suite.model_copy(update={"seed": 1}), 8)
    assert not runs.has_protocol(stored, suite.using(metrics=["concept_rate"]), 8)
    assert not runs.has_protocol({"judge": stored["judge"]}, suite, 8)
    other_prompts = {**stored, "prompt_hashes": dict.fromkeys(stored["prompt_hashes"], "0")}
    assert not runs.has_protocol(other_prompts, suite, 8)


@pytest.mark.parametrize(
    "changes", [{}, {"n": 9}, {"image_seed": 1}, {"images": {"direct": 4}}], ids=str
)
def test_a_study_measures_again_under_another_protocol(
    changes: dict[str, Any], no_results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def run_one(entry: Any, *, point: Any, seed: int, suite: Any, n: int, **_: Any) -> Any:
        measured.append(seed)
        recipe = runs.recipe_of(entry, point, seed).resolved()
        content = {"recipe": recipe, "point": point, "seed": seed}
        return {**content, "evaluation": evaluation_of(suite, n)}, None

    monkeypatch.setattr(study, "run_one", run_one)
    for one in (STUDY, STUDY, {**STUDY, **changes}):
        study.run_entry(one, "munba", ENTRY, no_results, Results("quick"), [0])
    assert measured == ([0, 0] if changes else [0])


def test_a_run_is_evaluated_again_under_another_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice of a setting reads the result of its work folder."""
    suite = suites.load("tiny_star")
    (tmp_path / "result_8.json").write_text(json.dumps({"evaluation": evaluation_of(suite, 8)}))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("evaluated again")

    monkeypatch.setattr(runs.api, "erase", refuse)
    assert runs.run_one(ENTRY, {}, 0, suite, 8, tmp_path)[1] is None
    with pytest.raises(AssertionError, match="evaluated again"):
        runs.run_one(ENTRY, {}, 0, suite.model_copy(update={"seed": 1}), 8, tmp_path)


def several(work: Path, results: Any, **changes: Any) -> several_concepts.Bench:
    content = {
        "recipe": "tiny_five_munba",
        "suites": ["tiny_five_star"],
        "images": {"n": 4},
        "select": {"seeds": [0], "n": 4, "image_seed": 1},
        "entries": {"merged": {"label": "merged", "weight": 0.5}},
        **changes,
    }
    return several_concepts.Bench(content, work, results)


def test_several_concepts_are_measured_again_with_another_recipe_or_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both a result of the study and the one in the work folder."""
    suite_name = "tiny_five_star"
    measured: list[int] = []

    def measure(self: several_concepts.Bench, models: Any, base: str, **_: Any) -> dict[str, Any]:
        measured.append(1)
        content = evaluation_of(self.suite(suite_name), None)
        rows = (("accuracy_shape", "retained"), ("concept_rate", "direct"))
        content["results"] = [
            {"metric": metric, "group": group, "after": {"value": 1.0}} for metric, group in rows
        ]
        return {"evaluations": {suite_name: content}}

    monkeypatch.setattr(several_concepts.Bench, "measure", measure)
    monkeypatch.setattr(several_concepts.Bench, "models", lambda *_: [])
    entries = [
        {"label": "merged", "weight": 0.5},
        {"label": "merged", "weight": 0.6},
        {"label": "merged", "weight": 0.6, "set": {"training.steps": 7}},
    ]
    results: dict[str, Any] = {}
    for expected, entry in enumerate(entries, 1):
        for _ in range(2):
            several(tmp_path, results, entries={"merged": entry}).run("merged", [0])
            several(tmp_path, {}, entries={"merged": entry}).run("merged", [0])
            assert len(measured) == expected
    changes = {"entries": {"merged": entries[-1]}, "images": {"n": 5}}
    several(tmp_path, results, **changes).run("merged", [0])
    assert len(measured) == len(entries) + 1


@pytest.mark.parametrize("command", [study, several_concepts], ids=lambda one: one.__name__)
def test_an_unknown_entry_is_an_error(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "quick.yaml"
    path.write_text(yaml.safe_dump(STUDY))
    monkeypatch.setattr(sys, "argv", ["study", str(path), "--entries", "munb"])
    with pytest.raises(SystemExit):
        command.main()
    assert "--entries: the study has no 'munb'; it has munba" in capsys.readouterr().err
