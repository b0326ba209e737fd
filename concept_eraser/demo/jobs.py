"""The queue of long jobs. One job runs at a time, each in its own process.

A process has these advantages over a thread. Cancel sends Ctrl-C, which the training already
handles by saving a state to resume from. A crash or a lack of memory ends the job and not the page.
All memory of the job is released. The page answers during the job.

The jobs belong to the server, so a page that is reloaded shows them again. If the server is killed,
the worker's next report fails, and the worker stops as on Ctrl-C.
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
from typing import IO, Any, Literal

from concept_eraser.demo.presets import print_unforeseen
from concept_eraser.demo.safety import WAITING
from concept_eraser.utils.errors import UserError

State = Literal["waiting", "running", "done", "failed", "cancelled"]
PATIENCE = 90  # seconds after Ctrl-C until a process that still runs is killed
# The page generates images while a job trains. Threads that wait actively then slow both down: on
# two cores an image took seven times as long. Must be set before torch is imported.
QUIET_THREADS = {"OMP_WAIT_POLICY": "passive"}
MAX_FINISHED_JOBS = 200  # finished jobs that stay in the list


@dataclass
class DemoJob:
    """One long job.

    Attributes:
        number: The number on the page.
        kind: The kind of work.
        title: The title on the page.
        spec: The input of the worker.
        folder: The folder that the job writes.
        state: The state in the queue.
        what, count, total, note: The progress, as the worker reports it.
        error: The error message of a failed job.
        cancelling: Whether the job was asked to stop.
        process: The process of a running job.
    """

    number: int
    kind: Literal["erase", "attack", "measure"]
    title: str
    spec: dict[str, Any]
    folder: Path
    state: State = "waiting"
    what: str = "starting"
    count: int = 0
    total: int = 0
    note: str = ""
    error: str = ""
    created: float = field(default_factory=time.time)
    start_time: float = 0.0
    end_time: float = 0.0
    cancelling: bool = False
    process: subprocess.Popen | None = field(default=None, repr=False)

    @property
    def active(self) -> bool:
        return self.state in ("waiting", "running")

    @property
    def seconds(self) -> float:
        """The seconds of work so far, or of waiting."""
        return (self.end_time or time.time()) - (self.start_time or self.created)


class Jobs:
    """The queue. `after` is called with every job after its end."""

    def __init__(self, after: Callable[[DemoJob], None] = lambda job: None) -> None:
        self._jobs: list[DemoJob] = []
        self._change = threading.Condition()
        self._after, self._closed = after, False
        self._thread = threading.Thread(target=self._serve, name="jobs", daemon=True)
        self._thread.start()

    def add(self, kind: Any, title: str, spec: dict[str, Any], folder: Path) -> DemoJob:
        """Append a job. Raises UserError if the queue is full or a job already uses the folder."""
        with self._change:
            queue = [job for job in self._jobs if job.state == "waiting"]
            if self._closed or len(queue) >= WAITING:
                raise UserError(
                    f"{len(queue)} jobs are waiting already, and the queue is full; "
                    "cancel one, or try again later"
                )
            if any(job.active and job.folder == folder and job.kind == kind for job in self._jobs):
                raise UserError(
                    f"a job for {folder.name} exists already; its progress is at the top of the "
                    "page"
                )
            job = DemoJob(
                number=(self._jobs[-1].number if self._jobs else 0) + 1,
                kind=kind,
                title=title,
                spec=spec,
                folder=folder,
            )
            old_jobs = [j for j in self._jobs if not j.active][:-MAX_FINISHED_JOBS]
            self._jobs = [j for j in self._jobs if j not in old_jobs] + [job]
            self._change.notify_all()
        return job

    def all(self) -> list[DemoJob]:
        with self._change:
            return list(self._jobs)

    def get(self, number: Any) -> DemoJob:
        """Return a job by its number. Raises UserError if there is none."""
        for job in self.all():
            if str(job.number) == str(number):
                return job
        raise UserError(
            f"there is no job {str(number)[:20]}; it may be from an earlier start of the server"
        )

    def position(self, job: DemoJob) -> int:
        """Count the jobs before this one."""
        return sum(other.active and other.number < job.number for other in self.all())

    def cancel(self, number: Any) -> DemoJob:
        """Remove a waiting job, or tell a running one to save its state and stop."""
        job = self.get(number)
        with self._change:
            was_waiting = job.state == "waiting"
            if was_waiting:
                job.state, job.end_time = "cancelled", time.time()
            elif job.state == "running":
                job.cancelling = True
                if job.process is not None:
                    _interrupt(job.process)
        if was_waiting:  # once, because a new job may have a folder of the same name by now
            self._call_after(job)
        return job

    def close(self) -> None:
        """Stop the running job so that it can be resumed, and remove the waiting ones.

        Returns when no process is left.
        """
        with self._change:
            self._closed = True
            active_jobs = [job for job in self._jobs if job.active]
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
                job.state, job.start_time = "running", time.time()
            try:
                self._run(job)
            except Exception as error:  # the queue continues after the failure of one job
                job.state, job.error = (
                    "failed",
                    f"the job could not be run ({type(error).__name__}: {str(error)[:200]})",
                )
            job.end_time, job.process = time.time(), None
            self._call_after(job)

    def _call_after(self, job: DemoJob) -> None:
        """Call `after`. Its error, e.g. of a folder without permission, does not end the queue."""
        try:
            self._after(job)
        except Exception as error:
            print_unforeseen(error)

    def _run(self, job: DemoJob) -> None:
        """Run the process of a job, and read its progress line by line."""
        with tempfile.TemporaryFile("w+") as errors:
            process = _start_worker(errors)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(job.spec))
            process.stdin.close()
            with self._change:
                job.process = process
                if job.cancelling:
                    _interrupt(process)
            for line in process.stdout:
                _apply_message(job, line)
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


def _start_worker(errors: IO[str]) -> subprocess.Popen[str]:
    """Start the process of a job. It reads its task from a pipe and reports into another one."""
    environment = {
        **QUIET_THREADS,
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    # -P: do not import modules from the working folder, which may hold files of a stranger
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.environ.get("PYTHONPATH"), _package_place()])
    )
    command = [sys.executable, "-P", "-m", "concept_eraser.demo.worker"]
    # its own session, so that Ctrl-C in the terminal reaches it only once, from the server
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
        start_new_session=True,
    )


def _package_place() -> str:
    """Return the folder of the package for PYTHONPATH, or "" if Python searches it anyway."""
    place = str(Path(__file__).parents[2])
    return "" if place in site.getsitepackages() else place


def _interrupt(process: subprocess.Popen) -> None:
    """Send Ctrl-C to a process, and kill it if it does not end within PATIENCE."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        late = threading.Timer(PATIENCE, lambda: process.kill() if process.poll() is None else None)
        late.daemon = True
        late.start()


def _apply_message(job: DemoJob, line: str) -> None:
    """Read one line of a worker, which has its progress or its error."""
    try:
        message = json.loads(line)
    except json.JSONDecodeError:  # output of a library
        return
    if isinstance(message, dict):
        for key in ("what", "count", "total", "note", "error"):
            if key in message:
                setattr(job, key, message[key])
