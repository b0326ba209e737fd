"""The base of all sections of a recipe."""

from __future__ import annotations

from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationInfo,
    field_validator,
)

from concept_eraser.utils import resources
from concept_eraser.utils.limits import (
    TEXT,
    require_no_switch,
)

# the context of a validation in which the user's own files may be missing
OF_RUN_FOLDER = {"files": "may be missing"}


class Strict(BaseModel):
    """A section without unknown keys, and without numbers that are not finite or are switches."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, allow_inf_nan=False, str_max_length=TEXT
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        require_no_switch(cls.model_fields[str(info.field_name)].annotation, value)
        return value


def require_data_file(kind: str, name: str, info: ValidationInfo) -> None:
    """Check the name of a shipped data file, or the path of a user's own file.

    In the context `OF_RUN_FOLDER` the user's own file may be missing. Nothing but a plain path is
    accepted there: an address such as hf://owner/set/file.csv is no path.

    Raises:
        UserError: There is no such file.
    """
    is_plain = name.isprintable() and "://" not in name
    if info.context != OF_RUN_FOLDER or not is_plain or not resources.is_path(kind, name):
        resources.find(kind, name)
