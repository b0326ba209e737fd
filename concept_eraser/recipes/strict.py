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
    """No unknown keys, and no number that is infinite or none."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, allow_inf_nan=False, str_max_length=TEXT
    )
