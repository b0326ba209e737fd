"""The presets of the page: bundled concepts, recipes from the form, and prompts for a run."""

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
from concept_eraser.evaluation import suite as suites
from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.runs import suite_matching
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
MAX_PROMPTS = 24  # largest number of prompts of a kind
# label in the form -> bundled recipe, of which the form changes prompts, steps and sizes
METHODS = {
    "MUNBa: Nash bargaining": "tiny_star_munba",
    "MUNBa on a LoRA (the default of erase)": "tiny_star_munba_lora",
    "MUNBa on all weights, then UCE": "tiny_star_munba_uce",
    "Plain sum of the two losses": "tiny_star_sum",
    "PCGrad": "tiny_star_pcgrad",
    "UNO, with an anchor": "tiny_star_uno_anchor",
    "NGDiff (no anchor)": "tiny_star_ngdiff",
    "ESD-x (no anchor, no retain set)": "tiny_star_esd",
    "Text encoder only, MUNBa": "tiny_star_text_encoder",
}
_NEIGHBOURS = {
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
    """List the concepts of the bundled data set that can be erased, e.g. "shape: star"."""
    return [f"{attribute}: {value}" for attribute, values in WORLD.items() for value in values]


def other_values(concept: str) -> list[str]:
    """List the anchor concepts for a concept of the bundled data set, the nearest first."""
    attribute, _, value = concept.partition(": ")
    near = [v for v in _NEIGHBOURS.get(value, ()) if v != value]
    return [*near, *(v for v in WORLD.get(attribute, ()) if v != value and v not in near)]


def prompt_set(attribute: str, values: Sequence[str]) -> str:
    """Return the YAML of a prompt set in which an attribute has only these values."""
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
    """Return the content of a bundled recipe with other prompts and settings.

    Fewer images and a faster sampler than in the studies shorten a run from an hour to minutes. The
    results in eval/results are those of the studies.
    """
    recipe = read_yaml(resources.find("pipelines", METHODS[method]))
    recipe["model"] = model
    has_prompts = recipe["target"] == "denoiser"
    objectives = {"forget": forget, "retain": retain, "replace": forget}
    for name in objectives.keys() & recipe.keys():
        recipe[name] |= {"prompts": objectives[name]} | ({"n": images} if has_prompts else {})
        if "anchor" in recipe[name]:
            if not anchor:
                raise UserError(
                    f"the method {method!r} needs an anchor concept, which is generated instead"
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
    """Return the attribute and value of the bundled data set that all forgotten prompts share.

    An attribute of the recipe's anchor is preferred. Returns None if there is no such value.
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
    """Do the work of `concept_of` with a cache, because the page calls it every second.

    A prompt set is read again only after a change of its file.
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
    """Return the modification time of a prompt set's file, or 0 without a file."""
    try:
        return resources.find("prompts", source).stat().st_mtime if isinstance(source, str) else 0.0
    except (UserError, OSError, ValueError):
        return 0.0


def forgotten_text(recipe: Recipe) -> str:
    """Describe the forget set of a run if `concept_of` finds no concept."""
    several = len(recipe.forgotten)
    return (
        f"{several} concepts"
        if several > 1
        else "its own prompts"
        if recipe.forgotten[0].prompts
        else str(recipe.forgotten[0].data)
    )


def suite_of(recipe: Recipe, folder: Path | None = None) -> dict[str, Any] | str:
    """Return the suite for a run.

    It is the suite in the run folder, else the one with the name of the forget set, else a new one
    from the run's own prompts.

    Args:
        recipe: the recipe of the run.
        folder: the run folder; None for a recipe without one.

    Raises:
        UserError: the run erased several concepts, no available judge can detect the concept, or
            the suite in the folder has a file of prompts.
    """
    if len(recipe.forgotten) > 1:
        raise UserError(
            f"this run erased {len(recipe.forgotten)} concepts, and this page measures "
            "and attacks one; use `concept-eraser evaluate --suite`, one suite per concept"
        )
    if folder is not None and (own_suite := suite_matching.own_suite(folder)) is not None:
        return own_suite
    name = recipe.forgotten[0].prompts
    if isinstance(name, str) and name in resources.names("eval"):
        return name
    concept = concept_of(recipe)
    if concept is None or recipe.retain is None:
        raise UserError(
            "no available judge detects the concept of this run, so this page cannot measure "
            "or attack it; write a suite and use `concept-eraser evaluate --suite`"
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


def is_suite_sensitive(suite: Mapping[str, Any] | str) -> bool:
    """Whether the images of a suite are blurred: it is sensitive, about nudity, or unreadable."""
    try:
        return suites.load(suite).has_sensitive_images
    except UserError:
        return True


def is_run_sensitive(recipe: Recipe | None, folder: Path) -> bool:
    """Whether the images of a run are blurred.

    They are blurred if a suite in its folder is sensitive, or one with the name of a forget set.

    Args:
        recipe: The recipe of the run; None for a result of another eraser.
        folder: The run folder.

    Returns:
        Whether a suite of the run is sensitive. False without a suite.
    """
    if recipe is None:
        return False
    prompt_sets = [objective.prompts for objective in recipe.forgotten]
    bundled_suites = resources.names("eval")
    names = [name for name in prompt_sets if isinstance(name, str) and name in bundled_suites]
    return any(map(is_suite_sensitive, [*suite_matching.own_suites(folder), *names]))


def offers(recipe: Recipe) -> dict[str, list[str]]:
    """Return prompts that test a run, by kind, in a fixed shuffled order.

    A kind without prompts is left out.
    """
    forget = [objective.prompts for objective in recipe.forgotten]
    retain = recipe.retain.prompts if recipe.retain else None
    times = [_modification_time(prompts) for prompts in (*forget, retain)]
    return dict(_offers(json.dumps([forget, retain, concept_of(recipe), times])))


@lru_cache(maxsize=64)
def _offers(key: str) -> dict[str, list[str]]:
    concepts, retain, concept, _ = json.loads(key)  # a changed file has another time
    prompts_by_kind: dict[str, list[str]] = {
        "forget": [],
        "synonym": [],
        "neighbour": [],
        "retain": _sample_texts(retain) if retain else [],
    }
    share = -(-MAX_PROMPTS // len(concepts))  # prompts of each concept
    for forget in concepts:
        prompts_by_kind["forget"] += _sample_texts(forget)[:share]
        for kind, ending in (("synonym", "synonyms"), ("neighbour", "neighbours")):
            if isinstance(forget, str) and f"{forget}_{ending}" in resources.names("prompts"):
                prompts_by_kind[kind] += _sample_texts(f"{forget}_{ending}")[:share]
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
            for near in _NEIGHBOURS.get(value, ())
            for p in prompts_by_kind["forget"][:8]
        ]
    return {kind: texts for kind, texts in prompts_by_kind.items() if texts}


def _replace_word(prompt: str, value: str, word: str) -> str:
    """Replace a word of a prompt, and correct the articles."""
    return re.sub(
        r"\ban? (?=(\w))",
        lambda m: "an " if m[1].lower() in "aeiou" else "a ",
        prompt.replace(value, word),
    )


def _sample_texts(source: Any) -> list[str]:
    prompt_list = _load(source)
    return prompt_list.take(min(MAX_PROMPTS, len(prompt_list)), 1).texts if prompt_list else []


def _load(source: Any) -> sets.PromptSet | None:
    """Load the prompts that a recipe names.

    Returns None if they cannot be read for any reason. The recipe may come from a stranger.
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
    """Read the recipe of a run folder.

    Returns None if there is no recipe, if this version cannot read it, or if it is too large.
    """
    path = folder / "recipe.yaml"
    try:
        content = read_yaml(path, safety.RECIPE)
        return recipes.load(content, of_run_folder=True) if isinstance(content, dict) else None
    except UserError:
        return None
    except Exception as error:  # the file may come from a stranger; still show the other runs
        print_unforeseen(error)
        return None


def print_unforeseen(error: BaseException) -> None:
    """Print the traceback of an unexpected error to the terminal of the server."""
    traceback.print_exception(error, file=sys.stderr)
