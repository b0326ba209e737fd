"""Small versions of the campaigns in tests/campaigns: a few random command lines, some thousand
inputs, three kills.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from concept_eraser.utils.errors import UserError
from tests.campaigns import faults, fuzz, targets_runs, world
from tests.campaigns.targets_runs import RunTarget
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The campaigns' world, with runs that were trained and measured."""
    return world.build(tmp_path_factory.mktemp("campaigns")).root


def test_random_command_lines(place: Path, tmp_path: Path) -> None:
    """In a process of its own, whose libraries are imported once."""
    results = tmp_path / "commands.json"
    command = [
        sys.executable,
        "-m",
        "tests.campaigns.commands",
        "--n",
        "30",
        "--first",
        "5000",
        "--real-every",
        "29",
        "--folder",
        str(place),
        "--results",
        str(results),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    content = json.loads(results.read_text())
    assert content["defects"] == [], done.stdout[-3000:]
    assert content["command_lines"] == 30
    assert content["as_real_processes"] >= 1
    assert {"0", "2"} <= content["exit_codes"].keys(), "some are right, some are wrong"


def test_a_defect_would_be_noticed(place: Path) -> None:
    """A verb that raises, one that changes a user's file, one that writes outside, one that runs a
    program, one that hangs.
    """
    code = """
import os, subprocess, sys, time
from pathlib import Path
from concept_eraser.cli import info
from tests.campaigns import commands, world
def hurt(what: str):
    if what == "raise": {}["x"]
    if what == "lose": Path("notes.txt").write_text("lost")
    if what == "outside": Path("../outside/new").touch()
    if what == "program": subprocess.run(["true"])
    if what == "hang": time.sleep(60)
w = world.build(Path(sys.argv[1]))
server = commands.Server(w)
commands.LIMIT = 2.0
import concept_eraser.cli.application as application
next(c for c in application.app.registered_commands if c.name == "list").callback = hurt
print([server.run(0, ["list", what]).defects for what in ("raise", "lose", "outside", "program", "hang", "none")])
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", code, str(place)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = (
        ast.literal_eval(done.stdout.strip().splitlines()[-1])
        if done.returncode == 0
        else done.stderr[-2000:]
    )
    assert "a traceback" in found[0]
    assert found[1] == ["the user's file notes.txt changed"]
    assert any("outside/new" in one for one in found[2])
    assert any(one.startswith("program: ['true']") for one in found[3])
    assert found[4] == ["more than 2 s"]
    assert found[5] == []


def test_fuzzed_inputs(tmp_path: Path) -> None:
    results = tmp_path / "fuzz.json"
    command = [
        sys.executable,
        "-m",
        "tests.campaigns.fuzz",
        "--n",
        "2000",
        "--seed",
        "7",
        "--only",
        ",".join(targets_runs.TARGETS),
        "--results",
        str(results),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    content = json.loads(results.read_text())
    assert [one for target in content["targets"].values() for one in target["defects"]] == [], (
        done.stdout[-3000:]
    )
    assert content["inputs"] >= 2000
    assert content["targets"].keys() == targets_runs.TARGETS.keys()


def _raise(example: int, folder: Path) -> None:
    if example == 3:
        raise KeyError("not an answer")


def _long(example: int, folder: Path) -> None:
    def read() -> None:
        raise UserError("x" * (4001 if example == 3 else 4000))

    targets_runs.answers(read)


def _write(example: int, folder: Path) -> None:
    if example == 3:
        (folder.parent.parent / "outside").write_text("x")
    (folder / "inside").write_text("x")


def _end(example: int, folder: Path) -> None:
    if example == 3:
        os.kill(os.getpid(), signal.SIGSEGV)


def _hang(example: int, folder: Path) -> None:
    while example == 3:
        pass


@pytest.mark.parametrize("run", [_raise, _long, _write, _end, _hang])
def test_a_defect_in_a_reader_would_be_noticed(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One input of ten is a defect; the others go on."""
    monkeypatch.setattr(fuzz, "LIMIT", 0.5)
    found = fuzz.fuzz(RunTarget(lambda seed: seed, run), 10, 0, tmp_path / "work")
    assert found["inputs"] == 10
    assert [one["at"] for one in found["defects"]] == [3]
    assert found["defects"][0]["times"] == 1


def test_what_nothing_changed_is_read(tmp_path: Path) -> None:
    """The corpus itself raises nothing: a campaign over files that are all refused at once would
    show nothing.
    """
    run = targets_runs._run_folder(tmp_path, "done.json", json.dumps(targets_runs.DONE).encode())
    for call in (*targets_runs._readers_of_numbers(run), *targets_runs._readers_for_page(run)):
        call()


def test_kills(place: Path) -> None:
    """One of each signal, over three verbs."""
    bench = faults.Bench(world.World(place))
    cases = faults.kills(bench, 3, 1, ["copy", "merge", "card"])
    assert [case.problems for case in cases] == [[], [], []], cases
    assert {case.fault for case in cases} == set(faults.SIGNALS)


def test_a_file_that_is_lost_would_be_noticed(place: Path) -> None:
    bench = faults.Bench(world.World(place))

    def lose(process: subprocess.Popen[str]) -> None:
        (bench.world.scratch / "notes.txt").unlink()

    case = bench.case("copy", "loss", lose)
    assert any("notes.txt is gone" in problem for problem in case.problems)
