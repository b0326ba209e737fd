"""Fixtures of the tests of storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from concept_eraser.storage import output_folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """An empty folder with the mark of a run."""
    folder = tmp_path / "ours"
    output_folder.claim(folder, "run", alone=True)
    return folder
