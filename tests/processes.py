"""The command in processes of its own that start without importing the libraries again.

A cold process spends most of its time importing torch, diffusers and transformers. Here a server
process of each test worker imports them once and forks for every command (`forkserver` of
multiprocessing). A forked command has its own process id, folder, standard streams and exit code.
Tests of start-up, of environment variables and of other programs start cold processes instead.
"""

from __future__ import annotations

import atexit
import gc
import io
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

# seconds: several times the duration of the longest process on two busy cores, so that only a
# process that hangs exceeds it
HANG = 1200
LIBRARIES = [
    "torch",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    "peft",
    "accelerate",
    "scipy.stats",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "concept_eraser.api",
    "concept_eraser.cli.application",
    "nudenet",
    "open_clip",
    "rich.markdown",
    "rich.progress",
    "rich._emoji_codes",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "transformers.models.t5.modeling_t5",
    "concept_eraser.cli.concept_result",
    "concept_eraser.cli.progress_bars",
    "concept_eraser.models.families.sd",
    "concept_eraser.evaluation.judges.tiny",
    "concept_eraser.evaluation.metrics.accuracy",
    "concept_eraser.evaluation.metrics.clip_score",
    "concept_eraser.evaluation.metrics.concept_rate",
    "tests.shared_drawing",
    "tests.shared_tokenizers",
    "tests.warm_up",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch_command(*options: str) -> list[str]:
    """The beginning of a command that starts two processes by accelerate, on a free port.

    Port 0, which lets accelerate choose one, hangs with accelerate 1.0.
    """
    words = [
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    port_words = ["--main_process_port", str(free_port())]
    return [sys.executable, "-m", "accelerate.commands.launch", *options, *words, *port_words]


def skip_flush(descriptor: int) -> None:
    """Stand in for os.fsync in the tests.

    Only a power failure loses what a process has written, and no test has one. Tests of the order
    of flushes record the calls.
    """


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(LIBRARIES)


class Command:
    """A running command: `concept-eraser` with arguments, in a folder.

    environment: variables beside those of this process. The libraries are imported already, so
    that a variable which one of them reads at its import has no effect.
    script: a Python file that is run instead of the command, with the arguments.
    """

    def __init__(
        self,
        *arguments: str,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        script: Path | None = None,
    ) -> None:
        self.arguments = list(arguments)
        self._streams = tempfile.TemporaryDirectory()
        self._stdout, self._stderr = (
            Path(self._streams.name, name) for name in ("stdout", "stderr")
        )
        for file in (self._stdout, self._stderr):
            file.touch()
        self._process = _context.Process(
            target=_run,
            args=(
                self.arguments,
                str(folder),
                str(self._stdout),
                str(self._stderr),
                {**os.environ, **(environment or {})},
                None if script is None else str(script),
            ),
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal that ended the command; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = HANG) -> int:
        """Wait, and return the exit code.

        After the timeout it kills the command and raises subprocess.TimeoutExpired.
        """
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.arguments, timeout, self.stdout, self.stderr)
        return self.returncode

    @property
    def stdout(self) -> str:
        """The output so far."""
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_until(self, condition: Callable[[], bool], timeout: float = HANG) -> None:
        """Wait for a condition while the command runs.

        Raises AssertionError where it ends first.
        """
        until = time.monotonic() + timeout
        while not condition():
            assert self.returncode is None, (self.returncode, self.stdout, self.stderr)
            assert time.monotonic() < until, f"{self.arguments}: nothing within {timeout} s"
            time.sleep(0.002)


def run_command(
    *arguments: str, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = Command(*arguments, folder=folder, environment=environment)
    return subprocess.CompletedProcess(
        command.arguments, command.wait(), command.stdout, command.stderr
    )


class Ranks:
    """Two commands under way that work together, as `accelerate launch` starts them.

    They have the variables of its two workers. There is no launcher, which would end one of them
    when the other one fails: tests of that start `launch_command`.
    """

    def __init__(self, *arguments: str, folder: Path, script: Path | None = None, **variables: str):
        common = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        self.commands = [
            Command(
                *arguments,
                folder=folder,
                script=script,
                environment={**common, "RANK": rank, "LOCAL_RANK": rank},
            )
            for rank in ("0", "1")
        ]

    def kill(self) -> None:
        for command in self.commands:
            command.kill()
        for command in self.commands:
            command.wait()

    def wait(self, timeout: float = HANG) -> str:
        """Wait for both, and return what they wrote to the standard output.

        Raises AssertionError, and ends the other one, if one of them fails.
        """
        until = time.monotonic() + timeout
        while any(command.returncode is None for command in self.commands):
            has_failed = any(command.returncode not in (None, 0) for command in self.commands)
            if has_failed or time.monotonic() > until:
                self.kill()
            time.sleep(0.02)
        for command in self.commands:
            assert command.returncode == 0, command.stderr[-3000:]
        return "".join(command.stdout for command in self.commands)


def server_address() -> str:
    """The address of the server that forks, for a process that it has forked."""
    multiprocessing.forkserver.ensure_running()
    return multiprocessing.forkserver._forkserver._forkserver_address


def use_server(address: str) -> None:
    """Let the server of the tests fork the processes of this forked process too."""
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address = address
    server.ensure_running = lambda: None


class DemoWorker:
    """The process of a job of the demo, forked instead of started.

    It has what the queue uses of subprocess.Popen, and stands in for `demo.jobs._start_worker`.

    errors: the file of the standard error.
    """

    def __init__(self, errors: IO[str]) -> None:
        task, writer = _context.Pipe(duplex=False)
        reader, reports = _context.Pipe(duplex=False)
        error_copy = Connection(os.dup(errors.fileno()))
        self._process = _context.Process(
            target=_run_worker, args=(os.getcwd(), dict(os.environ), task, reports, error_copy)
        )
        self._process.start()
        self.stdin = os.fdopen(os.dup(writer.fileno()), "w")
        self.stdout = os.fdopen(os.dup(reader.fileno()))
        for connection in (task, writer, reader, reports, error_copy):
            connection.close()
        self._lock = threading.Lock()  # the exit code can be read once

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        self.stdout.close()
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_worker(
    folder: str,
    environment: dict[str, str],
    task: Connection,
    reports: Connection,
    errors: Connection,
) -> None:
    """Do in the forked process what `python -m concept_eraser.demo.worker` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.fsync = skip_flush
    gc.freeze()
    os.environ.update({**environment, "HF_HUB_OFFLINE": "1"})
    tempfile.tempdir = None
    os.chdir(folder)
    for number, connection in ((0, task), (1, reports), (2, errors)):
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    sys.path[0:0] = [folder]  # less strict than the real worker: code in the folder can be imported
    sys.argv = ["worker"]
    from tests import shared_tokenizers

    shared_tokenizers.share(is_shared=False)
    runpy.run_module("concept_eraser.demo.worker", run_name="__main__")


def run_cold_command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command in a new interpreter, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "concept_eraser.cli.main", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=HANG,
    )


def _run(
    arguments: list[str],
    folder: str,
    stdout: str,
    stderr: str,
    environment: dict[str, str],
    script: str | None,
) -> None:
    """Do in the forked process what `python -m concept_eraser.cli.main` or a script does."""
    os.fsync = skip_flush
    gc.freeze()  # the libraries' objects are no garbage, and collections can skip them
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may differ
    os.chdir(folder)
    for number, file in ((1, stdout), (2, stderr)):
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # as Python opens them where they are files
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace")
    sys.stderr.reconfigure(write_through=True)
    sys.argv = [script or "concept-eraser", *arguments]
    sys.path[0:0] = [folder]  # `python -m` puts the working directory first
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from concept_eraser.cli.main import main
    from tests import shared_tokenizers

    shared_tokenizers.share(is_shared="demo" not in arguments[:1])

    try:
        if script is None:
            main()
        else:
            runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
