"""The command line in real processes: exit codes and messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from functools import partial
from pathlib import Path

import pytest
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from concept_eraser import UserError
from concept_eraser.cli import main as command
from concept_eraser.cli import quickstart
from tests.conftest import ROOT, short

VERBS = ("quickstart", "erase", "generate", "evaluate", "report", "list", "show", "check", "copy")


def test_help_is_quick(cold_cli) -> None:
    best = float("inf")
    for _ in range(3):  # the first call may compile bytecode
        start = time.monotonic()
        result = cold_cli("--help")
        best = min(best, time.monotonic() - start)
    assert result.returncode == 0
    assert all(verb in result.stdout for verb in VERBS)
    assert best < 0.5


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_worked_example(cli, verb: str) -> None:
    result = cli(verb, "--help")
    assert result.returncode == 0
    assert f"concept-eraser {verb}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["erase", "tiny_star_munbaa"], "did you mean 'tiny_star_munba'"),
        (["erase", "tiny_star_munba", "training.lrr=1"], "did you mean 'lr'"),
        (["erase", "tiny_star_munba", "tiny_star_ga"], "one recipe at a time"),
        (["erase"], "nothing to erase"),
        (
            [
                "erase",
                "--forget",
                "tiny_star",
                "--anchor",
                "a {colour} square",
                "--retain",
                "tiny_rest",
                "--dry-run",
            ],
            "needs the field 'colour'",
        ),
        (["erase", "tiny_star_munba", "--model", "tiny-s", "-o", "x"], "did you mean 'tiny-sd'"),
        (["generate", "tiny-sd"], "nothing to generate"),
        (["evaluate", "tiny-sd", "--suite", "tiny_sta"], "did you mean 'tiny_star'"),
        (["report", "nowhere"], "was not evaluated yet"),
        (["list", "method"], "did you mean 'methods'"),
        (["show", "munbaa"], "did you mean 'munba'"),
        (["copy", "nothing", "x.yaml"], "unknown recipe"),
        (["check", "missing.yaml"], "no such recipe file"),
        (["evaluate", "tiny-sd", "-o", "x.json"], "output is a folder, found x.json"),
        (["erase", "AC/DC"], "takes a concept without it"),
        (["erase", "AC/DC", "--kind", "style"], "takes a concept without it"),
        (["erase", "tiny_star_munba", "--images", "2"], "--images goes with concepts"),
    ],
)
def test_bad_input_is_one_message_and_code_two(
    cli, arguments: list[str], message: str, tmp_path: Path
) -> None:
    result = cli(*arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("*.safetensors")), "nothing half-written"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["evaluate", "tiny-sd", "--output", ""], "--output"),
        (["report", ""], "an argument"),
        (["erase", ""], "an argument"),
        (["attack", "tiny-sd", "--set", ""], "--set"),
    ],
)
def test_an_empty_text_is_not_the_working_folder(
    arguments: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command.app, arguments)
    assert isinstance(result.exception, UserError), result.output
    assert str(result.exception).startswith(f"{name} is an empty text, perhaps of a variable")
    empty_prompt = CliRunner().invoke(command.app, ["generate", "nowhere", "-p", ""])
    assert "unknown model 'nowhere'" in str(empty_prompt.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["attack", "tiny-sd", "-a", "seed_search", "--cascade", "default"],
            "give either --attack or --cascade",
        ),
        (
            ["erase", "star", "--forget", "tiny_star"],
            "give concepts (star) or --forget with a prompt set, not both",
        ),
        (
            ["erase", "--base", "tiny-sd", "--forget", "tiny_star"],
            "--base belongs to --model FILE.safetensors",
        ),
        (["copy", "tiny_star_munba", "a.json"], "end its name in .yaml"),
        (["attack", "tiny-sd", "--each-family"], "each_family goes with a cascade"),
        (["erase", "star", "--two-steps"], "--two-steps and --no-two-steps go with --dry-run"),
        (["erase", "--forget", "tiny_star", "--anchor", "shape="], "'shape=' has no value"),
        (["erase", "star", "--anchor", "shape="], "'shape=' has no value"),
        (["demo", "--auth", "me"], "--auth is user:password, and neither part may be empty"),
        (["demo", "--auth", "me:"], "--auth is user:password, and neither part may be empty"),
        (["demo", "--auth", ":secret"], "--auth is user:password, and neither part may be empty"),
    ],
)
def test_words_without_their_other_half_and_words_that_exclude_each_other_are_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command.app, arguments)
    assert isinstance(result.exception, UserError), result.output
    assert message in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_says_that_no_partial_file_is_left(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "concept_eraser.cli.main",
        "generate",
        "tiny-sd",
        "-p",
        "a red star",
        "-n",
        "3000",
    ]
    default = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=default
    )
    assert process.stderr is not None
    while "generating" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(60) == 130
    assert "nothing half-written is left" in rest
    assert "Traceback" not in rest


@pytest.mark.parametrize(
    "extra", [["--steps", "5000"], ["--seed", "99999999999999999999"], ["--guidance", "-1"]]
)
def test_absurd_numbers_are_refused(cli, extra: list[str]) -> None:
    result = cli("generate", "tiny-sd", "-p", "a star", *extra)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_a_partial_checkpoint_is_loaded_on_its_base(cli, tiny, tmp_path: Path) -> None:
    tensors = {"conv_in.bias": tiny.denoiser.conv_in.bias.detach() + 1}
    save_file(tensors, tmp_path / "part.safetensors")
    result = cli("generate", "part.safetensors", "-p", "a star", "-n", "1", "--steps", "1")
    assert result.returncode == 2
    for output, before in (
        ("there", ["part.safetensors", "--before", "tiny-sd"]),
        ("plain", ["tiny-sd"]),
    ):
        assert (
            cli(
                "generate", *before, "-p", "a star", "-n", "1", "--steps", "1", "-o", output
            ).returncode
            == 0
        )
    assert (tmp_path / "there" / "00000.png").read_bytes() != (
        tmp_path / "plain" / "00000.png"
    ).read_bytes()


def test_the_demo_warns_before_it_opens_to_the_network(cli, tmp_path: Path) -> None:
    """The address belongs to a documentation network, so that nothing is opened."""
    result = cli("demo", "--host", "192.0.2.1", "--runs", str(tmp_path), "--no-browser")
    assert result.returncode == 2
    assert "everybody in the network" in result.stderr


def test_the_commands_of_a_first_session(cli, tmp_path: Path) -> None:
    """list, show, copy, check, dry run, erase, evaluate, report and generate, one after another."""
    assert "arXiv 2411.15537" in cli("show", "munba").stdout
    assert cli("copy", "tiny_star_munba", "mine.yaml").returncode == 0
    assert "end its name in .yaml" in cli("copy", "tiny_star", "mine.txt").stderr
    assert cli("copy", "tiny_star_munba", "mine.yaml").returncode == 2, "does not overwrite"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(short()))
    assert ": valid" in cli("check", "mine.yaml").stdout
    dry = cli("erase", "mine.yaml", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "anchor: 'a flat red circle on a white background'" in dry.stdout
    assert "disk (an estimate): " in dry.stdout
    assert "did you mean" not in dry.stdout
    words = ["erase", "mine.yaml", "forget.anchor.shape=circel", "--dry-run", "--no-two-steps"]
    typo = cli(*words)
    assert (
        "the anchor's shape 'circel' is in none of the prompts; did you mean 'circle'?"
        in typo.stdout
    )
    assert not (tmp_path / "runs").exists()
    erasure = cli("erase", "mine.yaml", "training.steps=2")
    assert erasure.returncode == 0, erasure.stderr
    assert "2/2" in erasure.stderr, "progress is shown"
    folder = next((tmp_path / "runs").iterdir())
    assert (
        f"(or load it: DiffusionPipeline.from_pretrained('runs/{folder.name}/pipeline', "
        "torch_dtype=torch.float32))" in erasure.stdout
    )
    low = cli("erase", "mine.yaml", "training.steps=1", "trainable.lora=2", "-o", "runs/low")
    assert "(the LoRA: runs/low/lora; the pipeline: concept-eraser export runs/low" in low.stdout
    words = ["erase", "mine.yaml", "training.steps=1", "trainable.lora=2", "-o", "runs/both"]
    assert "; the LoRA alone: runs/both/lora)" in cli(*words, "--save", "pipeline").stdout
    assert (tmp_path / "runs" / "low" / "lora").is_dir()
    suite = {
        "concept": {"shape": "star"},
        "sampling": {"steps": 2},
        "groups": {
            "direct": {"prompts": "tiny_star", "role": "forget", "n": 4},
            "retained": {"prompts": "tiny_rest", "role": "retain", "n": 4},
        },
    }
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    measurement = cli("evaluate", str(folder), "--suite", "suite.yaml")
    assert measurement.returncode == 0, measurement.stderr
    assert "concept_rate" in measurement.stdout
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert "more images than feature dimensions" in evaluation["refused"]["fid"]
    assert (folder / "report.html").stat().st_size > 10_000
    assert cli("report", str(folder), "-o", "again.html").returncode == 0
    generation = cli(
        "generate", str(folder), "-p", "a red star", "-n", "2", "--steps", "2", "-o", "images"
    )
    assert generation.returncode == 0, generation.stderr
    assert len(list((tmp_path / "images").glob("*.png"))) == 2
    assert len((tmp_path / "images" / "metadata.jsonl").read_text().splitlines()) == 2


def test_quickstart_erases_measures_and_reports(cold_cli, cli, tmp_path: Path) -> None:
    """A new user's first command: verdict, report and a low concept rate.

    It has fewer images, and trains a smaller LoRA.
    """
    few = ["forget.n=16", "retain.n=16", "generation.steps=6", "forget.noised=anchor"]
    few += ["trainable.select=cross_attention", "trainable.lora.rank=16"]
    few += ["training.steps=20", "training.batch_size=4", "training.lr=5e-3"]
    short = ["quickstart", *few, "-n", "8", "-q"]
    result = cold_cli(*short)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "runs" / "quickstart"
    assert f"report:   {folder / 'report.html'}" in result.stdout
    for name in (
        "report.html",
        "before_after.png",
        "conflict.png",
        "evaluation.json",
        "lora/pytorch_lora_weights.safetensors",
        "base.json",
    ):
        assert (folder / name).is_file(), name
    facts = json.loads((folder / "quickstart.json").read_text())
    results = {(r["metric"], r["group"]): r for r in facts["evaluation"]["results"]}
    assert results["concept_rate", "direct"]["before"]["value"] > 0.8
    assert results["concept_rate", "direct"]["after"]["value"] < 0.2
    assert results["accuracy_shape", "retained"]["after"]["value"] > 0.8
    again = cli(*short)
    assert again.returncode == 0, "a second call is answered from the finished run and the cache"
    assert "erasing" in result.stdout
    assert "erased before" in again.stdout


def test_the_seconds_of_an_erasure_say_whether_it_was_begun_before() -> None:
    whole, rest = {"erasing": 60.0, "training": 40.0}, {"erasing": 15.0, "training": 40.0}
    assert quickstart._erasing_text(whole, False) == "erasing 60 s (of which training 40 s)"
    assert quickstart._erasing_text(rest, False).startswith("erasing 15 s after an interruption")
    assert quickstart._erasing_text(rest, True) == "erased before (training 40 s)"


def test_a_models_path_is_read_literally(cli, tmp_path: Path) -> None:
    """YAML would read a comment or a mapping in these paths. A recipe's name may have an equals
    sign.
    """
    few = [
        "--forget",
        "tiny_star",
        "--anchor",
        "shape=circle",
        "--retain",
        "tiny_rest",
        "--dry-run",
    ]
    for name in ("sd #2", "model: mine"):
        result = cli("erase", "--model", str(tmp_path / name), *few)
        assert result.returncode == 2
        assert name in result.stderr
    (tmp_path / "lr=1.yaml").write_text((ROOT / "pipelines" / "tiny_star_munba.yaml").read_text())
    assert (
        "unknown"
        not in cli("erase", "lr=1.yaml", "training.stepss=1").stderr.split("training.stepss")[0]
    )


def test_flags_make_a_recipe(cli) -> None:
    result = cli(
        "erase",
        "--forget",
        "tiny_star",
        "--anchor",
        "shape=circle",
        "--retain",
        "tiny_rest",
        "--select",
        "cross_attention",
        "--lr",
        "1e-5",
        "--dry-run",
        "--no-two-steps",
    )
    assert result.returncode == 0, result.stderr
    recipe = yaml.safe_load(
        result.stdout.split("\nforget: ")[0].split("\nretain: 1")[0].split("\nforget: 200")[0]
    )
    assert recipe["forget"]["anchor"] == {"shape": "circle"}
    assert recipe["forget"]["loss"] == "anchor"
    assert recipe["trainable"] == {"select": "cross_attention"}
    assert recipe["training"]["lr"] == 1e-5


def test_characters_above_the_basic_plane_stay_as_they_are(cli, tmp_path: Path) -> None:
    (tmp_path / "😀.txt").write_text("a red star\n")
    process = cli(
        *("erase", "--forget", "😀.txt", "--anchor", "a 😀 face", "--retain", "tiny_rest"),
        *("--dry-run", "--no-two-steps"),
    )
    assert process.returncode == 0, process.stderr
    assert "prompts: 😀.txt" in process.stdout
    assert "anchor: a 😀 face" in process.stdout


def test_version(cli) -> None:
    assert cli("--version").stdout.startswith("concept-eraser 0.")


@pytest.mark.parametrize("delay", [0.1, 0.3, 0.8, 1.5])
def test_ctrl_c_during_start_up_is_one_line(delay: float, tmp_path: Path) -> None:
    """The signal arrives while Python, typer or torch is imported.

    Their modules handle an interruption in different ways.
    """
    default = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    command = [
        sys.executable,
        "-m",
        "concept_eraser",
        "generate",
        "tiny-sd",
        "-p",
        "a star",
        "-n",
        "500",
        "-o",
        "out",
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=default,
    )
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert output == "stopped; nothing half-written is left\n"


def test_ctrl_c_inside_generated_code_ends_with_130(tmp_path: Path) -> None:
    """The signal arrives in code that a library generates, such as a named tuple or a data class.

    With `python -m`, CPython would end by the signal instead of with the exit code.
    """
    code = """
import signal, sys
from concept_eraser.cli import application, main
def app():
    signal.getsignal(signal.SIGINT).working = True
    exec("signal.raise_signal(signal.SIGINT)", {"signal": signal})
application.app = app
main.main()
"""
    (tmp_path / "started.py").write_text(code)
    default = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.run(
        [sys.executable, "-m", "started"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=default,
    )
    assert (process.returncode, process.stderr) == (130, "stopped; nothing half-written is left\n")


def test_an_error_that_a_library_raises_on_ctrl_c_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    from concept_eraser.cli import application
    from concept_eraser.cli.main import main

    def app() -> None:
        stop = signal.getsignal(signal.SIGINT)
        stop.working = True  # type: ignore[union-attr]
        try:
            exec("signal.raise_signal(signal.SIGINT)", {"signal": signal})
        except KeyboardInterrupt:
            raise RuntimeError("failed to import") from None

    monkeypatch.setattr(application, "app", app)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as exit_info:
            main()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (exit_info.value.code, capfd.readouterr().err) == (
        130,
        "stopped; nothing half-written is left\n",
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(28, "No space left on device", "/a/b"),
            "error: cannot use /a/b: no space left on device; check the path and its permissions",
        ),
        (
            OSError(40, "Too many levels of symbolic links", "loop"),
            (
                "error: cannot use loop: too many levels of symbolic links; its links form "
                "a circle; give the file itself"
            ),
        ),
        (
            ConnectionResetError(104, "Connection reset by peer"),
            (
                "error: cannot use a file or the network: connection reset by peer; check "
                "the path and its permissions"
            ),
        ),
        (
            UnicodeEncodeError("utf-8", "x", 0, 1, "surrogates not allowed"),
            "error: a name or a text is no valid UTF-8",
        ),
        (
            RecursionError("maximum recursion depth exceeded"),
            "error: a file or value is nested too deep; write it flatter",
        ),
        (MemoryError(), "error: not enough memory for this; ask for less at once"),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
                "allocate 99 bytes"
            ),
            "error: not enough memory for this",
        ),
        (
            OverflowError("cannot convert float infinity to integer"),
            (
                "error: a number is too large (OverflowError: cannot convert float infinity "
                "to integer); give a smaller one"
            ),
        ),
    ],
)
def test_errors_of_the_system_are_one_sentence(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    from concept_eraser.cli import application
    from concept_eraser.cli.main import main

    def app() -> None:
        raise error

    monkeypatch.setattr(application, "app", app)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as exit_info:
            main()
    finally:
        signal.signal(signal.SIGINT, handler)
    output = capfd.readouterr().err
    assert exit_info.value.code == 2
    assert output.startswith(message)
    assert output.count("\n") == 1


def test_a_mistake_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler for all errors would hide the defects that the campaigns search for."""
    from concept_eraser.cli import application
    from concept_eraser.cli.main import main

    def app() -> None:
        raise KeyError("x")

    monkeypatch.setattr(application, "app", app)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyError):
            main()
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """For example `concept-eraser list | head -1`."""
    command = [sys.executable, "-m", "concept_eraser", "show", "munba"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 0


def test_a_message_does_not_move_the_cursor(cli) -> None:
    result = cli("check", "\x1b[2J.yaml")
    assert result.returncode == 2
    assert "\x1b" not in result.stderr
    assert "\\x1b[2J.yaml" in result.stderr


def test_a_name_of_a_prompt_set_and_a_suite(cli, tmp_path: Path) -> None:
    """`--kind` chooses; without it the command says that there is another file."""
    result = cli("copy", "tiny_star", "prompts.yaml")
    assert "(prompts; --kind suites takes the other file of this name)" in result.stdout
    assert cli("copy", "tiny_star", "suite.yaml", "--kind", "suites").stdout.endswith(
        "suite.yaml\n"
    )
    for name, folder in (("prompts.yaml", "prompts"), ("suite.yaml", "eval")):
        text = (ROOT / folder / "tiny_star.yaml").read_text()
        assert (tmp_path / name).read_text() == text
    assert cli("show", "tiny_star", "--kind", "suites").stdout == text
    for kind, message in (("x", "unknown kind 'x'"), ("recipes", "unknown recipe 'tiny_star'")):
        result = cli("copy", "tiny_star", "other.yaml", "--kind", kind)
        assert result.returncode == 2
        assert message in result.stderr


def test_ctrl_c_after_the_command_does_not_change_its_exit_code() -> None:
    """The signal comes while the interpreter ends: hooks run in reverse order."""
    code = (
        "import atexit, os, signal, sys\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['concept-eraser', 'list', 'presets']\n"
        "from concept_eraser.cli.main import main\n"
        "main()\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""


def test_waiting_threads_are_set_before_the_libraries_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of the user stays."""
    values = []
    application = types.ModuleType("concept_eraser.cli.application")
    setattr(application, "app", lambda: values.append(os.environ["GOMP_SPINCOUNT"]))  # noqa: B010
    monkeypatch.setitem(sys.modules, application.__name__, application)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    for value in (None, "7"):
        if value is None:
            monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        else:
            monkeypatch.setenv("GOMP_SPINCOUNT", value)
        command.main()
    assert values == ["1000", "7"]
