"""One line for each mistake that pydantic finds in a recipe."""

from __future__ import annotations

import typing
from typing import Any

from pydantic import BaseModel

from concept_eraser.recipes.objective_fields import MANY, ONE
from concept_eraser.utils.errors import quote, unknown_message


def explain(root: type[BaseModel], item: Any) -> str:
    """Return one line for one of pydantic's errors: path, what is wrong, what was found."""
    location = item["loc"]
    if MANY in location:  # pydantic counts from 0, the log and the overrides from 1
        location = tuple(
            part + 1 if i == location.index(MANY) + 1 else part for i, part in enumerate(location)
        )
    path = ".".join(str(part)[:60] for part in location if not _is_form(part))
    if item["type"] == "extra_forbidden":
        return (
            f"{path}: "
            f"{unknown_message('key', str(item['loc'][-1]), _fields(root, item['loc'][:-1]))}"
        )
    if item["type"] == "missing":
        return f"{path}: required, not given"
    message = item["msg"].removeprefix("Value error, ")
    value = item["input"]
    silent = isinstance(value, dict | BaseModel) or item["type"] == "value_error"
    finding = "" if silent else f", found {quote(value)}"
    # a name such as FORUM keeps its capitals
    plain = message if message[:2].isupper() else message[0].lower() + message[1:]
    return f"{path + ': ' if path else ''}{plain}{finding}"


def _is_form(part: Any) -> bool:
    """Whether a part of pydantic's path names a form of a value, and not a key of the recipe."""
    return isinstance(part, str) and (
        part in (ONE, MANY, "str", "int") or part.startswith(("constrained-", "list[", "dict["))
    )


def _fields(root: type[BaseModel], location: tuple) -> list[str]:
    """Return the keys that are allowed at a path of the recipe."""
    model: Any = root
    for name in location:
        if isinstance(name, str) and name not in (ONE, MANY):
            model = _model_in(model.model_fields[name].annotation) or root
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the first model in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for one in typing.get_args(annotation) if (model := _model_in(one))), None)
