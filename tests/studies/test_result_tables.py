"""The table of a study: its content, how new results enter it, and that an interrupted study
continues.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

from studies import result_tables
from studies.result_tables import Results
from tests.conftest import ROOT

STUDY = "tiny_star"


def test_a_table_is_read_in_one_call() -> None:
    frame = pandas.read_json(ROOT / "eval" / "results" / f"{STUDY}.jsonl.xz", lines=True)
    assert list(frame["key"]) == list(Results(STUDY)) == sorted(frame["key"])
    assert list(frame["seed"]) == [run["seed"] for run in Results(STUDY).values()]


def test_a_new_result_replaces_the_row_of_its_key_and_reaches_the_table(no_results: Path) -> None:
    results = Results("study")
    assert len(results) == 0
    assert results.get("a") is None
    results["b_seed0"] = {"value": 1.5, "text": "grün\u2028", "nested": {"z": 1, "a": [None, True]}}
    results["a_seed0"] = {"value": 0}
    results.folder("attacks")["a_seed0"] = {"rate": 0.25}
    contents = dict(results)
    assert list(results) == ["a_seed0", "b_seed0"], "without the keys of folders"
    result_tables.pack("study")
    assert result_tables.new_keys("study") == []
    assert dict(results) == contents
    assert list(results["b_seed0"]["nested"]) == ["z", "a"]
    assert dict(Results("study/attacks")) == {"a_seed0": {"rate": 0.25}}
    results["a_seed0"] = {"value": 2}
    assert results["a_seed0"] == {"value": 2}
    assert result_tables.table("study")["a_seed0"] == {"value": 0}, (
        "the table is not written meanwhile"
    )
    result_tables.pack("study")
    assert result_tables.table("study")["a_seed0"] == {"value": 2}


def test_a_removed_result_leaves_the_table(
    no_results: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    results = Results("study")
    for key in ("a", "b"):
        results[key] = {"value": key}
    result_tables.pack("study")
    monkeypatch.setattr(sys, "argv", ["result_tables", "study", "--remove", "a"])
    result_tables.main()
    assert list(results) == ["b"]
    with pytest.raises(KeyError):
        del results["a"]
    with pytest.raises(SystemExit):
        result_tables.main()
    assert "study has no result 'a'" in capsys.readouterr().err
    result_tables.pack("study")
    assert list(result_tables.table("study")) == list(results) == ["b"]


def test_equal_results_give_equal_bytes(no_results: Path) -> None:
    tables = []
    for name, keys in (("one", "abc"), ("two", "cab")):
        for key in keys:
            Results(name)[key] = {"value": key}
        result_tables.pack(name)
        tables.append(result_tables.table_path(name).read_bytes())
    assert tables[0] == tables[1]
    result_tables.pack("two")  # nothing is new
    Results("two")["a"] = {"value": "a"}
    result_tables.pack("two")
    assert result_tables.table_path("two").read_bytes() == tables[0]


def test_a_result_that_is_replaced_while_the_table_is_written_is_kept(
    no_results: Path, monkeypatch: Any
) -> None:
    results, write = Results("study"), result_tables.writers.write_bytes
    results["a"] = {"value": 1}

    def write_slowly(path: Path, content: bytes, **options: Any) -> None:
        results["a"] = {"value": 2}
        results["b"] = {"value": 3}
        write(path, content, **options)

    monkeypatch.setattr(result_tables.writers, "write_bytes", write_slowly)
    result_tables.pack("study")
    assert dict(results) == {"a": {"value": 2}, "b": {"value": 3}}


STUDY_IN_A_PROCESS = """
import os, signal, sys
from pathlib import Path
from studies import result_tables, runs, study

folder, kill_at = Path(sys.argv[1]), sys.argv[2]
result_tables.TABLES, result_tables.NEW_RESULTS = folder / "tables", folder / "new_results"
study.choose_grid = lambda *arguments, **named_arguments: []

def run_one(entry, point, seed, suite, n, folder, watch):
    if str(seed) == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    print(seed, flush=True)
    recipe = runs.recipe_of(entry, point, seed, watch).resolved()
    suite = suite.with_at_most(n)
    protocol = runs.json.loads(runs.dumps(suite.model_dump(mode="json")))
    hashes = {name: runs.suites.group_prompts(suite, name).hash for name in suite.groups}
    evaluation = {"judge": judge, "protocol": protocol, "prompt_hashes": hashes}
    return {"recipe": recipe, "point": point, "seed": seed, "evaluation": evaluation}, None

study.run_one = run_one
content = {"suite": "tiny_star", "n": 4, "entries": {"munba": {"recipe": "tiny_star_munba"}}}
judge = runs.suites.load("tiny_star").build_judge().fingerprint
entry, results = content["entries"]["munba"], result_tables.Results("quick")
study.run_entry(content, "munba", entry, folder, results, [0, 1, 2])
"""


def test_a_study_that_was_killed_continues_where_it_was(no_results: Path) -> None:
    """Results in the table and results that wait for it count as finished."""

    def run_seeds(kill_at: str) -> tuple[list[str], int]:
        call = [sys.executable, "-c", STUDY_IN_A_PROCESS, str(no_results), kill_at]
        process = subprocess.run(
            call,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert process.returncode in (0, -signal.SIGKILL), process.stderr
        return process.stdout.split(), process.returncode

    assert run_seeds("1") == (["0"], -signal.SIGKILL)
    assert run_seeds("2") == (["1"], -signal.SIGKILL)
    result_tables.pack("quick")
    assert run_seeds("-") == (["2"], 0)
    assert run_seeds("-") == ([], 0)
    assert list(Results("quick")) == ["munba_seed0", "munba_seed1", "munba_seed2"]
    waiting = json.loads(result_tables.new_path("quick", "munba_seed2").read_text())
    assert waiting["seed"] == 2
