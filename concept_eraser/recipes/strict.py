"""The base of all sections of a recipe."""

from __future__ import annotations

from pydantic import (
    BaseModel,
    ConfigDict,
)

from concept_eraser.utils.limits import (
    TEXT,
)


class Strict(BaseModel):
    """A section without unknown keys and without numbers that are not finite."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, allow_inf_nan=False, str_max_length=TEXT
    )
