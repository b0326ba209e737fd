"""The sample package's own test of its method."""

from __future__ import annotations

from sample_plugins import UnitSum

from concept_eraser.methods.checks import check_laws


def test_laws() -> None:
    assert "equal_contribution" in check_laws(UnitSum())
