"""Descriptions of plug-ins as data, for the command `show` and for the reference pages of docs/."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from dataclasses import MISSING, dataclass
from typing import Any

from concept_eraser import registry

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n?|\n)*)", re.M)
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", re.M)


@dataclass(frozen=True)
class OptionDescription:
    """One option of a plug-in.

    Attributes:
        name: The name of the option.
        type_name: The type as text.
        value: The default, or the value that the name of a setting fixes. `dataclasses.MISSING` if
            the option is required.
        origin: Where the default comes from, such as "the paper". Empty if nothing is stated.
        text: The explanation from the class's docstring. Empty if there is none.
    """

    name: str
    type_name: str
    value: Any
    origin: str
    text: str

    @property
    def is_required(self) -> bool:
        return self.value is MISSING


@dataclass(frozen=True)
class PluginDescription:
    """Everything that `show` prints about a plug-in.

    Attributes:
        kind: A key of `registry.KINDS`.
        name: The name that was looked up: of a plug-in, or of a setting.
        plugin: The name of the plug-in itself.
        fixed: The options that the name of a setting fixes.
        title: The title, else the name.
        source: The paper or another reference. Empty if nothing is stated.
        options: The options, in order.
        documentation: The docstring of the class.
        settings: Other names of the plug-in with fixed options.
        facts: Further lines, as pairs of a label and a text.
        module: The name of the module.
        module_documentation: The docstring of the module.
    """

    kind: str
    name: str
    plugin: str
    fixed: dict[str, Any]
    title: str
    source: str
    options: tuple[OptionDescription, ...]
    documentation: str
    settings: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    module: str
    module_documentation: str

    @property
    def introduction(self) -> str:
        """The docstring of the class without the section that explains the options."""
        return _SECTION.sub("", f"{self.documentation}\n").strip()


def describe(kind: str, name: str) -> PluginDescription:
    """Describe a plug-in. Its module is imported.

    Args:
        kind: A key of `registry.KINDS`.
        name: The name of the plug-in, or of a setting. A built-in loss has no class, see
            `registry.formulas`.

    Raises:
        UserError: There is no such plug-in.
    """
    cls: Any = registry.load(kind, name)
    plugin, fixed = registry.resolve(kind, name, {})
    documentation = inspect.getdoc(cls) or ""
    if documentation.startswith(f"{cls.__name__}("):  # what dataclass writes where there is none
        documentation = ""
    texts = option_texts(documentation)
    origins = getattr(cls, "defaults", {})
    options = tuple(
        OptionDescription(
            name=option,
            type_name=_type_name(hint),
            value=fixed.get(option, default),
            origin="the name" if option in fixed else origins.get(option, ""),
            text=texts.get(option, ""),
        )
        for option, (hint, default) in registry.options(cls).items()
    )
    settings = (
        alias
        for alias, (owner, _) in registry.named(kind).items()
        if owner == plugin and alias != name
    )
    return PluginDescription(
        kind=kind,
        name=name,
        plugin=plugin,
        fixed=fixed,
        title=getattr(cls, "title", "") or name,
        source=getattr(cls, "source", ""),
        options=options,
        documentation=documentation,
        settings=tuple(settings),
        facts=tuple(_facts(kind, name, cls)),
        module=cls.__module__,
        module_documentation=inspect.getdoc(sys.modules[cls.__module__]) or "",
    )


def _type_name(hint: Any) -> str:
    """Write the type of an option: `list of float` for a tuple, values for a Literal."""
    if typing.get_origin(hint) is tuple:
        return f"list of {typing.get_args(hint)[0].__name__}"
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _facts(kind: str, name: str, cls: Any) -> list[tuple[str, str]]:
    if kind == "method":
        laws = sorted(registry.build(kind, name, {}).laws())
        return [("theorems tested", ", ".join(laws) or "none")]
    if kind == "attack":
        return [("family", cls.family), ("needs of the victim", cls.access)]
    if kind == "loss":
        return [("targets", ", ".join(cls.targets))]
    return []


def option_texts(documentation: str) -> dict[str, str]:
    """Read the explanations of options from the section `Args` or `Attributes` of a docstring."""
    texts: dict[str, str] = {}
    for section in _SECTION.findall(f"{documentation}\n"):
        for names, text in _ENTRY.findall(section):
            texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return texts


def settings_text(fixed: dict[str, Any]) -> str:
    """Write the options that a name fixes on one line."""
    return ", ".join(f"{key}: {value}" for key, value in fixed.items()) or "its defaults"
