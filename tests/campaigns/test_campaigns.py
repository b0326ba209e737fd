"""Short versions of the campaigns: some command lines, a thousand inputs and three kills."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from concept_eraser.utils.errors import UserError
from tests.campaigns import faults, fuzz, targets_runs, world
from tests.campaigns.targets_runs import RunTarget
from tests.conftest import ROOT
from tests.processes import Command

CAMPAIGNS = Path(__file__).parent


def make_runs(folder: Path, variables: dict[str, str]) -> None:
    """Make the world's runs in a forked process."""
    script = folder.parent / "make_runs.py"
    script.write_text("from tests.campaigns.world import make_runs\nmake_runs()\n")
    process = Command(folder=folder, environment=variables, script=script)
    assert process.wait() == 0, process.stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The campaigns' world, with trained and evaluated runs."""
    return world.build(tmp_path_factory.mktemp("campaigns"), make_runs=make_runs).root


def test_random_command_lines(place: Path, tmp_path: Path) -> None:
    """The campaign runs in a separate process that has the libraries already."""
    results = tmp_path / "commands.json"
    options = ["--n", "20", "--first", "5000", "--real-every", "19"]
    process = Command(
        *options,
        "--folder",
        str(place),
        "--results",
        str(results),
        folder=ROOT,
        script=CAMPAIGNS / "commands.py",
        environment={"PYTHONPATH": str(ROOT)},
    )
    process.wait(600)
    content = json.loads(results.read_text())
    assert content["defects"] == [], process.stdout[-3000:]
    assert content["command_lines"] == 20
    assert content["as_real_processes"] >= 1
    assert {"0", "2"} <= content["exit_codes"].keys(), "some are right, some are wrong"


def test_a_defect_would_be_noticed(place: Path, tmp_path: Path) -> None:
    """The verb raises, changes a user's file, writes outside, runs a program, or hangs."""
    code = """
import os, subprocess, sys, time
from pathlib import Path
from concept_eraser.cli import info
from tests.campaigns import commands, world
def misbehave(what: str):
    if what == "raise": {}["x"]
    if what == "lose": Path("notes.txt").write_text("lost")
    if what == "outside": Path("../outside/new").touch()
    if what == "program": subprocess.run(["true"])
    if what == "hang": time.sleep(60)
w = world.build(Path(sys.argv[1]))
server = commands.Server(w)
commands.LIMIT = 2.0
import concept_eraser.cli.application as application
next(c for c in application.app.registered_commands if c.name == "list").callback = misbehave
actions = ("raise", "lose", "outside", "program", "hang", "none")
print([server.run(0, ["list", action]).defects for action in actions])
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    process = Command(str(place), folder=ROOT, script=script)
    defects = (
        ast.literal_eval(process.stdout.strip().splitlines()[-1])
        if process.wait(300) == 0
        else process.stderr[-2000:]
    )
    assert "a traceback" in defects[0]
    assert defects[1] == ["the user's file notes.txt changed"]
    assert any("outside/new" in one for one in defects[2])
    assert any(one.startswith("program: ['true']") for one in defects[3])
    assert defects[4] == ["more than 2 s"]
    assert defects[5] == []


def test_fuzzed_inputs(tmp_path: Path) -> None:
    results = tmp_path / "fuzz.json"
    process = Command(
        *("--n", "1000", "--seed", "7", "--only", ",".join(targets_runs.TARGETS)),
        "--results",
        str(results),
        folder=ROOT,
        script=CAMPAIGNS / "fuzz.py",
    )
    process.wait(600)
    content = json.loads(results.read_text())
    assert [one for target in content["targets"].values() for one in target["defects"]] == [], (
        process.stdout[-3000:]
    )
    assert content["inputs"] >= 1000
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
    """One input of ten is a defect; the campaign continues with the others."""
    monkeypatch.setattr(fuzz, "LIMIT", 0.5)
    result = fuzz.fuzz(RunTarget(lambda seed: seed, run), 10, 0, tmp_path / "work")
    assert result["inputs"] == 10
    assert [one["at"] for one in result["defects"]] == [3]
    assert result["defects"][0]["times"] == 1


def test_the_unchanged_corpus_is_read(tmp_path: Path) -> None:
    """The corpus itself raises no error.

    A campaign over files that are all refused at once would prove nothing.
    """
    run = targets_runs._run_folder(
        tmp_path, "done.json", json.dumps(targets_runs.DONE_FILE).encode()
    )
    for call in (*targets_runs._readers_of_numbers(run), *targets_runs._readers_for_page(run)):
        call()


@pytest.mark.slow
def test_kills(place: Path) -> None:
    """One kill with each signal; `make faults` has fifty."""
    bench = faults.Bench(world.World(place))
    cases = faults.kills(bench, 3, 1, ["merge"])
    assert [case.problems for case in cases] == [[], [], []], cases
    assert {case.fault for case in cases} == set(faults.SIGNALS)


def test_a_lost_file_would_be_noticed(place: Path) -> None:
    bench = faults.Bench(world.World(place))

    def lose(process: subprocess.Popen[str]) -> None:
        (bench.world.scratch / "notes.txt").unlink()

    case = bench.case("copy", "loss", lose)
    assert any("notes.txt is gone" in problem for problem in case.problems)
