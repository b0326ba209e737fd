"""Checks of command-line options beyond their bounds."""

from __future__ import annotations

import math
from typing import Optional

import typer


def finite(value: Optional[float]) -> Optional[float]:
    """Return a finite value unchanged, else raise BadParameter. The bounds of click accept nan."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, found {value}")
    return value
