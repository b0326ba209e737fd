"""Fields of recipes and suites for a plug-in: a name, a mapping, or an object from Python.

The mapping has `name` and options. A name without options stays a `str`. Anything else becomes a
`registry.Plugin`. In Python it is dumped unchanged, so that a recipe can be dumped, changed and
validated again. In JSON and YAML it is the result of `Plugin.describe`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from concept_eraser import registry
from concept_eraser.registry import Plugin
from concept_eraser.utils import limits


def _reader(kind: str) -> Callable[[Any], str | Plugin]:
    def read(value: Any) -> str | Plugin:
        plugin = registry.read(kind, value)
        if len(plugin.name) > limits.TEXT:
            raise ValueError(
                f"the name of a {kind} has at most {limits.TEXT:,} characters, found "
                f"{len(plugin.name):,}"
            )
        return plugin if plugin.options or plugin.value is not None else plugin.name

    return read


def _read_metric(value: Any) -> str | dict[str, Any] | Plugin:
    """Read a metric as a judge or a loss is read. A mapping stays a mapping, as in suites."""
    if isinstance(value, Mapping):
        return dict(value)
    plugin = _reader("metric")(value)
    if isinstance(plugin, Plugin) and plugin.value is None:
        return {"name": plugin.name, **plugin.options}
    return plugin


def _describe(value: Any) -> Any:
    return value.describe() if isinstance(value, Plugin) else value


_JSON = PlainSerializer(_describe, when_used="json")
LossField = Annotated[str | Plugin, PlainValidator(_reader("loss")), _JSON]
JudgeField = Annotated[str | Plugin, PlainValidator(_reader("judge")), _JSON]
MetricField = Annotated[str | dict[str, Any] | Plugin, PlainValidator(_read_metric), _JSON]
