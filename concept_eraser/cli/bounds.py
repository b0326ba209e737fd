"""Checks of command-line options beyond their bounds."""

from __future__ import annotations

import math
from typing import Optional

import typer

from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError


def finite(value: Optional[float]) -> Optional[float]:
    """Return a finite value unchanged, else raise BadParameter. The bounds of click accept nan."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, found {value}")
    return value


def weights_of(text: Optional[str], option: str) -> Optional[list[float]]:
    """Read the numbers of an option such as `--weights 1,0.5`; None if it is not given.

    Raises UserError if one is no finite number within limits.PORTION.
    """
    if not text:
        return None
    try:
        return [limits.number(one, -limits.PORTION, limits.PORTION) for one in text.split(",")]
    except ValueError as error:
        raise UserError(
            f"cannot read {option}: {error}; write numbers with commas between them, e.g. 1,0.5"
        ) from None
