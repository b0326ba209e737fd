"""Long jobs, one at a time, each in a process of its own; the others wait in a queue that says
their position.

A process and not a thread, because then: Cancel is Ctrl-C, which the training already turns into a
state to resume from; a crash or a full memory ends the job and not the page; its memory comes back
whole; and the page answers meanwhile. The jobs belong to the server: a page that is reloaded finds
them again. If the server is killed, the worker's next report fails, which it takes as Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from concept_eraser.demo.safety import WAITING
from concept_eraser.utils.errors import UserError

State = Literal["waiting", "running", "done", "failed", "cancelled"]
PATIENCE = 90  # seconds between Ctrl-C and the end of a process that does not listen
# The page draws while a job trains. Threads that spin while they wait for each other then cost more
# than they give: on two cores an image took seven times as long. Must be set before torch is
# imported.
QUIET_THREADS = {"OMP_WAIT_POLICY": "passive"}
KEPT = 200  # finished jobs that are still told of


@dataclass
class DemoJob:
    """One long job. spec: what the worker is told; what, done, total, note: how far it is, in its
    own words.
    """

    number: int
    kind: Literal["erase", "attack", "measure"]
    title: str
    spec: dict[str, Any]
    folder: Path
    state: State = "waiting"
    what: str = "starting"
    done: int = 0
    total: int = 0
    note: str = ""
    error: str = ""
    asked: float = field(default_factory=time.time)
    began: float = 0.0
    ended: float = 0.0
    cancelling: bool = False
    process: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def active(self) -> bool:
        return self.state in ("waiting", "running")

    @property
    def seconds(self) -> float:
        """Of work so far, or of waiting."""
        if not self.began:
            return time.time() - self.asked
        return (self.ended or time.time()) - self.began


class Jobs:
    """The queue. `after` is called with every job that has ended."""

    def __init__(self, after: Callable[[DemoJob], None] = lambda job: None) -> None:
        self._jobs: list[DemoJob] = []
        self._change = threading.Condition()
        self._after, self._closed = after, False
        self._thread = threading.Thread(target=self._serve, name="jobs", daemon=True)
        self._thread.start()

    def add(self, kind: Any, title: str, spec: dict[str, Any], folder: Path) -> DemoJob:
        """Put a job at the end. Raises UserError where the queue is full or the folder is in work
        already.
        """
        with self._change:
            queue = [job for job in self._jobs if job.state == "waiting"]
            if self._closed or len(queue) >= WAITING:
                raise UserError(
                    f"{len(queue)} jobs are waiting already, and no more are taken; "
                    "cancel one, or come back later"
                )
            if any(job.active and job.folder == folder and job.kind == kind for job in self._jobs):
                raise UserError(
                    f"{folder.name} is in work already; its progress stands at the top of the page"
                )
            job = DemoJob(
                (self._jobs[-1].number if self._jobs else 0) + 1, kind, title, spec, folder
            )
            old_jobs = [j for j in self._jobs if not j.active][:-KEPT]
            self._jobs = [j for j in self._jobs if j not in old_jobs] + [job]
            self._change.notify_all()
        return job

    def all(self) -> list[DemoJob]:
        with self._change:
            return list(self._jobs)

    def get(self, number: Any) -> DemoJob:
        """A job by its number. Raises UserError where there is none."""
        for job in self.all():
            if str(job.number) == str(number):
                return job
        raise UserError(
            f"there is no job {str(number)[:20]}; it may be of an earlier start of the server"
        )

    def position(self, job: DemoJob) -> int:
        """How many jobs come before it."""
        return sum(other.active and other.number < job.number for other in self.all())

    def cancel(self, number: Any) -> DemoJob:
        """Take a waiting job out, or tell a running one to stop where it can be resumed."""
        job = self.get(number)
        with self._change:
            if job.state == "waiting":
                job.state, job.ended = "cancelled", time.time()
            elif job.state == "running":
                job.cancelling = True
                if job.process is not None:
                    _interrupt(job.process)
        if job.state == "cancelled":
            self._after(job)
        return job

    def close(self) -> None:
        """Stop everything so that it can be resumed; returns when no process is left."""
        with self._change:
            self._closed = True
            for job in self._jobs:
                if job.state == "waiting":
                    job.state, job.ended = "cancelled", time.time()
            active_jobs = [job for job in self._jobs if job.state == "running"]
            self._change.notify_all()
        for job in active_jobs:
            self.cancel(job.number)
        self._thread.join(PATIENCE + 10)

    def _serve(self) -> None:
        while True:
            with self._change:
                while not self._closed and not any(job.state == "waiting" for job in self._jobs):
                    self._change.wait()
                if self._closed:
                    return
                job = next(job for job in self._jobs if job.state == "waiting")
                job.state, job.began = "running", time.time()
            try:
                self._run(job)
            except Exception as error:  # the queue goes on, whatever becomes of one job
                job.state, job.error = (
                    "failed",
                    f"the job could not be run ({type(error).__name__}: {str(error)[:200]})",
                )
            job.ended, job.process = time.time(), None
            self._after(job)

    def _run(self, job: DemoJob) -> None:
        """One process from start to end; its lines are its progress."""
        environment = {
            **QUIET_THREADS,
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        # -P: files of the folder in which the server was started, maybe a stranger's, are no
        # modules
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH"), _package_place()])
        )
        command = [sys.executable, "-P", "-m", "concept_eraser.demo.worker"]
        with tempfile.TemporaryFile("w+") as errors:
            # a session of its own, so that Ctrl-C in the terminal reaches it through the server
            # only, and once
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(job.spec))
            process.stdin.close()
            with self._change:
                job.process = process
                if job.cancelling:
                    _interrupt(process)
            for line in process.stdout:
                _hear(job, line)
            code = process.wait()
            errors.seek(0)
            last = [line for line in errors.read().splitlines() if line.strip()][-1:] or [
                f"exit code {code}"
            ]
        if code == 0 and not job.error:
            job.state = "done"
        elif job.cancelling:
            job.state, job.error = "cancelled", ""
        else:
            job.state, job.error = "failed", job.error or f"the job ended early: {last[0][:300]}"


def _package_place() -> str:
    """The folder that the package is imported from; "" where Python finds it there by itself."""
    place = str(Path(__file__).parents[2])
    return "" if place in site.getsitepackages() else place


def _interrupt(process: subprocess.Popen) -> None:
    """Ctrl-C, and an end by force for what does not listen."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        late = threading.Timer(PATIENCE, lambda: process.kill() if process.poll() is None else None)
        late.daemon = True
        late.start()


def _hear(job: DemoJob, line: str) -> None:
    """One line of a worker: where it stands, or what went wrong."""
    try:
        message = json.loads(line)
    except json.JSONDecodeError:  # a library that prints
        return
    if isinstance(message, dict):
        for key in ("what", "done", "total", "note", "error"):
            if key in message:
                setattr(job, key, message[key])
