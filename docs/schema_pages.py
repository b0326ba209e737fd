"""The pages of the keys of recipes and suites, written from their pydantic models."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any

from markdown_text import GENERATED, escape
from page_parts import code, entry, first_line, page, table, value
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from concept_eraser import registry


@dataclasses.dataclass(frozen=True)
class Section:
    """A mapping in a recipe or a suite: the model of its keys, and where it stands."""

    model: type[BaseModel]
    places: list[str]


def sections(model: type[BaseModel]) -> list[Section]:
    """List the mappings of a pydantic model, the outermost first."""
    result = [Section(model, [""])]

    def add(parent: str, fields: Iterable[tuple[str, FieldInfo]]) -> None:
        for name, field in fields:
            place = f"{parent}{name}"
            for inner in models_in(field.annotation):
                known = next((one for one in result if one.model is inner), None)
                if known is not None:
                    known.places.append(place)
                    continue
                result.append(Section(inner, [place]))
                add(f"{place}.", inner.model_fields.items())

    add("", model.model_fields.items())
    return result


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the pydantic models in a type, each once."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    inner = [model for one in typing.get_args(annotation) for model in models_in(one)]
    yield from dict.fromkeys(inner)


def describe_type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Write the type of a key in words, with its bounds."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return describe_type(arguments[0], [*arguments[1:], *metadata])
    limits = bounds(metadata)
    if origin is typing.Literal:
        return " or ".join(code(value(one)) for one in arguments)
    if origin in (typing.Union, UnionType):
        inner = [one for one in arguments if one is not type(None)]
        if registry.Plugin in inner:  # its mapping says more than a plain one
            inner = [one for one in inner if typing.get_origin(one) is not dict]
        parts = [describe_type(one, metadata) for one in inner]
        return " or ".join(dict.fromkeys(parts))
    if origin is list:
        return f"list of {plural_type(arguments[0])}{limits}"
    if origin is dict:
        return f"mapping of names to {plural_type(arguments[1])}{limits}"
    if origin is tuple:
        return f"list of {len(arguments)} {plural_type(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    names = {int: "integer", float: "number", bool: "`true` or `false`", str: "text"}
    if annotation in names:
        return names[annotation] + (limits if annotation in (int, float) else "")
    if annotation is registry.Plugin:
        return "mapping of `name` and options"
    return "any value"


def plural_type(annotation: Any) -> str:
    """Write the type of the entries of a list."""
    single = describe_type(annotation)
    if annotation is Any:
        return "any values"
    words = {"integer": "integers", "number": "numbers", "text": "texts", "mapping": "mappings"}
    return re.sub("|".join(words), lambda match: words[match[0]], single)


def bounds(metadata: Iterable[Any]) -> str:
    """Write the bounds of a number or of a length."""
    words = {
        "gt": "above {}",
        "ge": "at least {}",
        "lt": "below {}",
        "le": "at most {}",
        "min_length": "at least {} entries",
        "max_length": "at most {} entries",
    }
    texts = []
    for one in metadata:
        inner = getattr(one, "metadata", [one])  # of a FieldInfo inside Annotated
        for constraint in inner:
            for key, text in words.items():
                if (limit := getattr(constraint, key, None)) is not None:
                    texts.append(text.format(number(limit)))
    return f" ({', '.join(dict.fromkeys(texts))})" if texts else ""


def number(limit: float) -> str:
    return f"{int(limit):,}" if float(limit).is_integer() and limit < 1e15 else f"{limit:g}"


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    content = field.get_default(call_default_factory=True)
    if isinstance(content, BaseModel):
        return ""
    return f"default {code(value(content))}"


def key_entries(section: Section, path: str) -> Iterator[str]:
    """Yield the keys of a section."""
    place = section.places[0]
    for name, field in section.model.model_fields.items():
        full = f"{place}.{name}" if place else name
        kind = describe_type(field.annotation, field.metadata)
        inner = [f"[{code(full)}](#recipe-{full})" for _ in models_in(field.annotation)][:1]
        details = [kind, default_of(field), f"keys: {inner[0]}" if inner else ""]
        text = escape(field.description or "", path)
        yield entry(full, ", ".join(filter(None, details)), sentence(text), f"key-{full}")


def sentence(text: str) -> str:
    """Begin a description with a capital and end it with a full stop."""
    if not text:
        return ""
    if re.match(r"[a-z]+[ ,:;.)]", text):  # not a name such as tiny-sd
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def schema_parts(model: type[BaseModel], path: str, introductions: dict[str, str]) -> list[str]:
    """Write the sections of a schema, one below the other."""
    parts = []
    for section in sections(model):
        place = section.places[0]
        if place:
            title = ", ".join(code(one) for one in section.places)
            targets = "\n".join(f"(recipe-{one})=" for one in section.places)
            parts.append(f"{targets}\n## {title}")
        introduction = introductions.get(place) or first_line(section.model.__doc__)
        parts.append(introductions.get(place) or escape(introduction, path))
        parts.append("\n".join(key_entries(section, path)))
    return parts


def recipe_page() -> str:
    """Write the page of the recipe's keys."""
    from concept_eraser.recipes import memory_presets
    from concept_eraser.recipes.recipe import Recipe

    path = f"{GENERATED}/recipe.md"
    presets = [
        (code(name), escape(memory_presets.describe(name))) for name in memory_presets.PRESETS
    ]
    introductions = {
        "": "A recipe is a YAML file that describes one erasure. `concept-eraser list recipes` "
        "names the recipes of the package, `concept-eraser show NAME` prints one, "
        "`concept-eraser copy NAME FILE` copies one to a file of yours, and `concept-eraser check "
        "FILE` reports all mistakes at once. The keywords of [`erase`](api/erase.md) are these "
        "keys. On the command line, `key.path=value` overrides one key.",
        "method": "A method by name; its options stand beside the name. `method: munba` is short "
        "for `method: {name: munba}`. [Methods](methods/index.md) lists them with their options.",
    }
    parts = schema_parts(Recipe, path, introductions)
    parts[1] += "\n" + entry(
        "memory",
        "text, default `none`",
        "A preset for the memory of a GPU. It sets keys that the recipe leaves out, see [Memory]"
        "(../../memory.md). A recipe in a run folder has these keys in place of the preset.",
        "key-memory",
    )
    return page(
        "# Recipe",
        *parts,
        "(recipe-memory)=\n## `memory`",
        "The presets:",
        table(["name", "what it sets"], presets),
    )


def suite_page() -> str:
    """Write the page of the keys of an evaluation suite."""
    from concept_eraser.evaluation.suite import Suite

    path = f"{GENERATED}/suite.md"
    introductions = {
        "": "A suite is a YAML file that describes one evaluation: prompts, seeds, sampler, judge "
        "and metrics. `concept-eraser list suites` names the suites of the package. "
        "[Evaluation and attacks](../../measuring.md) explains them.",
    }
    parts = schema_parts(Suite, path, introductions)
    text = "\n\n".join(["# Evaluation suite", *parts])
    return page(text.replace("(recipe-", "(suite-").replace("#recipe-", "#suite-"))
