"""The commit that results record."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from concept_eraser.utils import provenance


def git(*arguments: str, folder: Path) -> str:
    settings = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    command = ["git", *settings, *arguments]
    process = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return process.stdout.strip()


def test_the_commit_is_that_of_this_package_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of a repository whose virtual environment has the package."""
    checkout, worktree, link = (tmp_path / name for name in ("checkout", "worktree", "link"))
    file = Path("concept_eraser") / "utils" / "provenance.py"
    installed = checkout / "venv" / "site-packages" / file
    for path in (checkout / file, installed):
        path.parent.mkdir(parents=True)
        path.touch()
    git("init", "-q", folder=checkout)
    git("add", str(file), folder=checkout)
    git("commit", "-q", "-m", "one", folder=checkout)
    git("worktree", "add", "-q", str(worktree), folder=checkout)
    link.symlink_to(worktree)
    commit = git("rev-parse", "HEAD", folder=checkout)

    def recorded(path: Path) -> str | None:
        monkeypatch.setattr(provenance, "__file__", str(path))
        return provenance.commit()

    assert recorded(installed) is None
    for place in (checkout, worktree, link):
        assert recorded(place / file) == commit
    (checkout / file).write_text("changed")
    assert recorded(checkout / file) == f"{commit}+changes"
    (tmp_path / file).parent.mkdir(parents=True)
    assert recorded(tmp_path / file) is None
