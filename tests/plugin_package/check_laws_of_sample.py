"""The test of the sample package's method, as its author writes it."""

from __future__ import annotations

from sample_plugins import UnitSum

from concept_eraser.methods.checks import check_laws


def test_laws() -> None:
    assert "equal_contribution" in check_laws(UnitSum())
