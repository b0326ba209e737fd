"""The choices of the page: bundled concepts, recipes from a form, and prompts that show a run."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from concept_eraser.data import prompts as sets
from concept_eraser.demo import safety
from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.storage.readers import read_yaml, require_regular
from concept_eraser.tiny import painter
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError

WORLD: Mapping[str, Sequence[str]] = {
    "shape": painter.SHAPES,
    "color": painter.COLORS,
    "style": painter.STYLES,
}
KINDS = ("forget", "synonym", "neighbour", "retain")
MOST = 24  # prompts of a kind that are offered
# what the form calls it -> the shipped recipe that is taken, but for prompts, steps and sizes
METHODS = {
    "MUNBa: Nash bargaining": "tiny_star_munba",
    "MUNBa on a LoRA (what erase does without a recipe)": "tiny_star_munba_lora",
    "MUNBa on all weights, then UCE": "tiny_star_munba_uce",
    "Plain sum of the two losses": "tiny_star_sum",
    "PCGrad": "tiny_star_pcgrad",
    "UNO, with an anchor": "tiny_star_uno_anchor",
    "NGDiff (no anchor)": "tiny_star_ngdiff",
    "ESD-x (no anchor, nothing retained)": "tiny_star_esd",
    "Text encoder only, MUNBa": "tiny_star_text_encoder",
}
_NEAR = {
    "star": ("cross", "tree"),
    "circle": ("moon", "heart"),
    "square": ("house", "cross"),
    "triangle": ("tree", "house"),
    "heart": ("moon", "circle"),
    "cross": ("star", "tree"),
    "moon": ("circle", "heart"),
    "house": ("square", "triangle"),
    "tree": ("triangle", "star"),
    "fish": ("moon", "heart"),
    "red": ("orange", "pink"),
    "orange": ("red", "yellow"),
    "yellow": ("orange", "green"),
    "green": ("blue", "yellow"),
    "blue": ("purple", "green"),
    "purple": ("blue", "pink"),
    "pink": ("red", "purple"),
    "brown": ("red", "orange"),
}
_TEMPLATES = [
    "a(n) {style} {color} {shape} {background}",
    "a picture of a(n) {color} {shape} {background}",
    "a drawing of a(n) {style} {color} {shape}",
    "a(n) {color} {shape}",
]
_STYLED = [
    "a(n) {style} {color} {shape} {background}",
    "a picture of a(n) {style} {shape} {background}",
    "a drawing of a(n) {style} {color} {shape}",
    "a(n) {style} {shape}",
]


def concepts() -> list[str]:
    """Everything of the bundled world that can be erased, e.g. "shape: star"."""
    return [f"{attribute}: {value}" for attribute, values in WORLD.items() for value in values]


def other_values(concept: str) -> list[str]:
    """What can be shown instead of a concept of the bundled world, the nearest first."""
    attribute, _, value = concept.partition(": ")
    near = [v for v in _NEAR.get(value, ()) if v != value]
    return [*near, *(v for v in WORLD.get(attribute, ()) if v != value and v not in near)]


def prompt_set(attribute: str, values: Sequence[str]) -> str:
    """YAML of a prompt set of the bundled world in which an attribute has only these values."""
    backgrounds = [[painter.BACKGROUND_PHRASES[b][0], b] for b in painter.BACKGROUNDS]
    fields = {k: list(values if k == attribute else v) for k, v in WORLD.items()} | {
        "background": backgrounds
    }
    expand = {"templates": _STYLED if attribute == "style" else _TEMPLATES, **fields}
    return yaml.safe_dump(
        {"about": f"made by the demo: {attribute} in {', '.join(values)}", "expand": expand},
        sort_keys=False,
    )


def content(
    method: str,
    *,
    model: str,
    forget: Any,
    retain: Any,
    anchor: Any,
    steps: int,
    images: int,
    seed: int,
    lr: float | None,
) -> dict[str, Any]:
    """A recipe's content: a shipped one with other prompts and settings. Smaller images' sets and
    a faster sampler than the studies' make a run of minutes out of one of an hour; what was
    measured is in eval/results."""
    recipe = read_yaml(resources.find("pipelines", METHODS[method]))
    recipe["model"] = model
    has_prompts = recipe["target"] == "denoiser"
    objectives = {"forget": forget, "retain": retain, "replace": forget}
    for name in objectives.keys() & recipe.keys():
        recipe[name] |= {"prompts": objectives[name]} | ({"n": images} if has_prompts else {})
        if "anchor" in recipe[name]:
            if not anchor:
                raise UserError(
                    f"the method {method!r} needs an anchor: what to show instead of the concept"
                )
            recipe[name]["anchor"] = anchor
    recipe["training"] |= {"steps": steps, "seed": seed} | ({"lr": lr} if lr else {})
    if has_prompts:
        recipe["generation"] = recipe.get("generation", {}) | {
            "steps": 8 if model == "tiny-sd" else 25,
            "batch_size": 16,
        }
    return recipe


def concept_of(recipe: Recipe) -> tuple[str, str] | None:
    """Attribute and value of the bundled world that all forgotten prompts have in common and the
    retained ones do not.
    """
    forget = recipe.forgotten[0]
    if forget.prompts is None or len(recipe.forgotten) > 1:
        return None
    anchor_attributes = tuple(forget.anchor) if isinstance(forget.anchor, dict) else ()
    return _concept(
        json.dumps(forget.prompts), _modification_time(forget.prompts), anchor_attributes
    )


@lru_cache(maxsize=1024)
def _concept(
    prompts: str, modification_time: float, anchor_attributes: tuple[str, ...]
) -> tuple[str, str] | None:
    """The same from what decides it; the page asks every second, and a prompt set is read once for
    each change.
    """
    prompt_list = _load(json.loads(prompts))
    if prompt_list is None:
        return None
    for attribute in sorted(WORLD, key=lambda name: name not in anchor_attributes):
        values = {row.fields.get(attribute) for row in prompt_list.prompts}
        if len(values) == 1 and (value := values.pop()) in WORLD[attribute]:
            return attribute, str(value)
    return None


def _modification_time(source: Any) -> float:
    """When the file of a prompt set was changed; 0 where it has none."""
    try:
        return resources.find("prompts", source).stat().st_mtime if isinstance(source, str) else 0.0
    except (UserError, OSError, ValueError):
        return 0.0


def forgotten_text(recipe: Recipe) -> str:
    """What a run forgot, where `concept_of` has no word for it."""
    several = len(recipe.forgotten)
    return (
        f"{several} concepts"
        if several > 1
        else "its own prompts"
        if recipe.forgotten[0].prompts
        else str(recipe.forgotten[0].data)
    )


def suite_of(recipe: Recipe) -> dict[str, Any] | str:
    """The suite that measures a run: the one named like its prompt set, else one made from its own
    prompts.

    Raises UserError where nobody here could judge whether the concept shows.
    """
    if len(recipe.forgotten) > 1:
        raise UserError(
            f"this run forgot {len(recipe.forgotten)} concepts, and this page measures "
            "and attacks one; use `concept-eraser evaluate --suite`, one suite a concept"
        )
    name = recipe.forgotten[0].prompts
    if isinstance(name, str) and name in resources.names("eval"):
        return name
    concept = concept_of(recipe)
    if concept is None or recipe.retain is None:
        raise UserError(
            "no judge at hand sees what this run forgot, so it cannot be measured or "
            "attacked from this page; write a suite and use `concept-eraser evaluate "
            "--suite`"
        )
    groups: dict[str, Any] = {
        "direct": {"prompts": name, "role": "forget"},
        "retained": {"prompts": recipe.retain.prompts, "role": "retain"},
    }
    prompts_by_kind = offers(recipe)
    groups |= {
        f"{kind}s": {"prompts": prompts_by_kind[kind], "role": role}
        for kind, role in (("synonym", "forget"), ("neighbour", "neighbour"))
        if prompts_by_kind.get(kind)
    }
    sampling = {"steps": 8, "guidance": 5.0, "batch_size": 32, "precision": "bf16"}
    return {
        "concept": dict([concept]),
        "judge": "tiny",
        "seed": 7001,
        "sampling": sampling,
        "groups": groups,
        "metrics": ["concept_rate", "accuracy"],
    }


def offers(recipe: Recipe) -> dict[str, list[str]]:
    """Prompts that show what a run did, by kind, in a fixed shuffled order; a kind without any is
    left out.
    """
    return dict(
        _offers(
            json.dumps(
                [
                    [objective.prompts for objective in recipe.forgotten],
                    recipe.retain.prompts if recipe.retain else None,
                    concept_of(recipe),
                ]
            )
        )
    )


@lru_cache(maxsize=64)
def _offers(key: str) -> dict[str, list[str]]:
    concepts, retain, concept = json.loads(key)
    prompts_by_kind: dict[str, list[str]] = {
        "forget": [],
        "synonym": [],
        "neighbour": [],
        "retain": _some(retain) if retain else [],
    }
    share = -(-MOST // len(concepts))  # of several concepts some each
    for forget in concepts:
        prompts_by_kind["forget"] += _some(forget)[:share]
        for kind, ending in (("synonym", "synonyms"), ("neighbour", "neighbours")):
            if isinstance(forget, str) and f"{forget}_{ending}" in resources.names("prompts"):
                prompts_by_kind[kind] += _some(f"{forget}_{ending}")[:share]
    if concept:
        value = concept[1]
        words = {
            **painter.SYNONYMS,
            **painter.COLOR_SYNONYMS,
            **{k: v[1:] for k, v in painter.STYLE_WORDS.items()},
        }.get(value, ())
        prompts_by_kind["synonym"] = prompts_by_kind["synonym"] or [
            _replace_word(p, value, word) for word in words for p in prompts_by_kind["forget"][:8]
        ]
        prompts_by_kind["neighbour"] = prompts_by_kind["neighbour"] or [
            _replace_word(p, value, near)
            for near in _NEAR.get(value, ())
            for p in prompts_by_kind["forget"][:8]
        ]
    return {kind: texts for kind, texts in prompts_by_kind.items() if texts}


def _replace_word(prompt: str, value: str, word: str) -> str:
    """The prompt with another word, and the article that goes with it."""
    return re.sub(
        r"\ban? (?=(\w))",
        lambda m: "an " if m[1].lower() in "aeiou" else "a ",
        prompt.replace(value, word),
    )


def _some(source: Any) -> list[str]:
    prompt_list = _load(source)
    return prompt_list.take(min(MOST, len(prompt_list)), 1).texts if prompt_list else []


def _load(source: Any) -> sets.PromptSet | None:
    """The prompts that a recipe names; None where they cannot be read, whatever the reason: it may
    be a stranger's.
    """
    try:
        if isinstance(source, str) and not source.startswith(sets.tables.HUB):
            require_regular(resources.find("prompts", source))
        return sets.load(source)
    except UserError:
        return None
    except Exception as error:
        print_unforeseen(error)
        return None


def read_recipe(folder: Path) -> Recipe | None:
    """The recipe of a run folder; None where it has none that this version reads, or one of an
    unusual size.
    """
    path = folder / "recipe.yaml"
    try:
        content = read_yaml(path, safety.RECIPE)
        return recipes.load(content) if isinstance(content, dict) else None
    except UserError:
        return None
    except Exception as error:  # a stranger's file; the other runs are shown all the same
        print_unforeseen(error)
        return None


def print_unforeseen(error: BaseException) -> None:
    """The traceback of an error that nobody foresaw, into the terminal of the server."""
    traceback.print_exception(error, file=sys.stderr)
