"""Fixtures of the tests of storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from concept_eraser.storage import output_folder


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A marked, empty folder."""
    folder = tmp_path / "ours"
    output_folder.claim(folder, "run", alone=True)
    return folder
