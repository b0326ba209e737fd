"""State that all tabs share: the runs, the queue, and error messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from concept_eraser.demo.jobs import DemoJob, Jobs
from concept_eraser.demo.presets import print_unforeseen
from concept_eraser.demo.state import Library
from concept_eraser.storage import output_folder
from concept_eraser.storage.manifest import MARK
from concept_eraser.utils.errors import Interrupted, UserError


@dataclass
class Desk:
    """The state that all tabs share.

    Attributes:
        library: The runs, their models and their images.
        jobs: The queue of long jobs.
    """

    library: Library
    jobs: Jobs = field(init=False)

    def __post_init__(self) -> None:
        self.jobs = Jobs(self._clean_up)

    @property
    def runs(self) -> Path:
        return self.library.runs

    def _clean_up(self, job: DemoJob) -> None:
        """Show a run again that was dropped and is now erased again.

        Remove the folder of a job that never started its work.
        """
        if job.kind == "erase":
            self.library.dropped.discard(job.folder.name)
        has_begun = job.state in ("done", "running") or not job.folder.is_dir()
        if not has_begun and {p.name for p in job.folder.iterdir()} <= {
            "forget.yaml",
            "retain.yaml",
            MARK,
        }:
            output_folder.discard(job.folder)


def error_text(error: BaseException) -> str:
    """Return the message of an error for the page.

    The traceback of an unexpected error goes to the terminal, not to the browser.
    """
    if isinstance(error, UserError | Interrupted):
        return str(error)
    print_unforeseen(error)
    return (
        f"Unexpected error ({type(error).__name__}); the terminal of the server shows the "
        "traceback. Nothing was lost; try again."
    )


def alert(text: str) -> str:
    """Return an error as HTML. Screen readers speak it at once."""
    return f'<p class="ce-error" role="alert">{escape(text)}</p>' if text else ""


def notice(text: str) -> str:
    return f'<p class="ce-notice" role="status">{escape(text)}</p>' if text else ""


def quiet(text: str) -> str:
    return f'<p class="ce-quiet" role="status">{escape(text)}</p>'


def minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60} min {whole % 60} s"


def job_list(desk: Desk) -> str:
    """Return the list of the running and the waiting jobs, for the top of every tab."""
    active = [job for job in desk.jobs.all() if job.active]
    if not active:
        return ""
    lines = []
    for place, job in enumerate(active):
        if job.state == "waiting":
            lines.append(
                f'<li class="ce-waiting"><b>#{job.number} {escape(job.title)}</b> waits '
                f"at position {place} of the queue, {minutes(job.seconds)}</li>"
            )
            continue
        share = job.count / job.total if job.total else 0
        progress = f"{job.what} {job.count}/{job.total}" if job.total else job.what
        stopping = "stopping after this step; " if job.cancelling else ""
        bar = (
            f'<progress max="1" value="{share:.3f}" aria-label="{escape(job.title)}"></progress>'
            if job.total
            else f'<progress aria-label="{escape(job.title)}"></progress>'
        )
        lines.append(
            f'<li class="ce-running"><b>#{job.number} {escape(job.title)}</b><span '
            f'class="ce-far">{stopping}{escape(progress)} '
            f"{escape(job.note)}</span>{bar}<span>{minutes(job.seconds)}</span></li>"
        )
    return f'<ul class="ce-strip" aria-label="jobs">{"".join(lines)}</ul>'


def cancellable_jobs(jobs: Any) -> list[tuple[str, str]]:
    """List the jobs that can be cancelled, for a menu."""
    return [(f"#{job.number} {job.title}", str(job.number)) for job in jobs if job.active]
