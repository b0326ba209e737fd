"""The section `method` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidatorFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from concept_eraser import registry
from concept_eraser.registry import Plugin


class MethodSpec(BaseModel):
    """A method by name with its options, or an object that was passed in Python.

    In Python an object is dumped as a `registry.Plugin`, so that a recipe can be dumped, changed
    and validated again.
    """

    model_config = ConfigDict(extra="allow")
    name: str = Field("munba", description="see `concept-eraser list methods`")
    _plugin: Plugin | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _from_object(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> MethodSpec:
        if isinstance(value, Mapping | BaseModel):
            return cast("MethodSpec", handler(value))
        plugin = registry.read("method", value)
        spec = cls(name=plugin.name, **plugin.options)
        if plugin.value is not None:
            spec._plugin = plugin
        return spec

    @model_serializer(mode="wrap")
    def _as_object(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        return handler(self) if self._plugin is None or info.mode == "json" else self._plugin

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def is_object(self) -> bool:
        """Whether this holds an object, which no other process can load by its name."""
        return self._plugin is not None

    @property
    def plugin(self) -> type[Any] | None:
        """The class of the method; None if a file records an object of another process."""
        if self._plugin is not None:
            return type(self._plugin.value)
        return None if registry.in_memory(self.name) else registry.load("method", self.name)

    @property
    def edits(self) -> bool:
        """Whether the method edits the model without training steps."""
        return hasattr(self.plugin, "edit")

    @property
    def adds_gate(self) -> bool:
        """Whether the method adds a module to the denoiser, and leaves its weights."""
        return bool(getattr(self.plugin, "adds_gate", False))

    def build(self) -> Any:
        """Return the method, a `Method` or an `Edit`.

        Raises:
            UserError: A file records an object of another process.
        """
        return (self._plugin or Plugin("method", self.name, self.options)).build()
