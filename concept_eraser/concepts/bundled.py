"""Concepts of the bundled model: its shapes, colours and styles, with prompts of its own world.

The bundled model was trained on the captions of a small painted world. It knows no other words, so
prompts about its concepts are built from these captions. Held-out templates and background phrases
are used by the evaluation only.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from concept_eraser.concepts.known import KindName
from concept_eraser.data import inflection
from concept_eraser.tiny import painter
from concept_eraser.utils.errors import UserError, names_text, quote

VALUES: Mapping[str, Sequence[str]] = {
    "shape": painter.SHAPES,
    "color": painter.COLORS,
    "style": painter.STYLES,
}
KIND_OF: Mapping[str, KindName] = {"shape": "object", "color": "style", "style": "style"}
# Anchor concepts: the first one of the attribute that is not erased itself.
ANCHORS: Mapping[str, Sequence[str]] = {
    "shape": ("circle", "square", "triangle", "cross"),
    "color": ("green", "red", "yellow"),
    "style": ("flat", "outlined", "striped"),
}
TEMPLATES = (
    "a(n) {style} {color} {shape} {background}",
    "a picture of a(n) {color} {shape} {background}",
    "a drawing of a(n) {style} {color} {shape}",
    "a(n) {color} {shape}",
)
HELD_OUT = (
    "an image of a(n) {style} {color} {shape} {background}",
    "an icon of a(n) {style} {color} {shape}",
    "a photo of a(n) {color} {shape} {background}",
    "a(n) {color} {shape} {background}",
)
IMAGES = 96  # of each group of the suite
SAMPLING = {"steps": 8, "guidance": 5.0, "batch_size": 64, "precision": "bf16"}
METRICS = ("concept_rate", "accuracy", "fid", "clip_score")


@dataclass(frozen=True)
class BundledConcept:
    """A concept of the painted world: an attribute and its value, e.g. shape and star."""

    attribute: str
    value: str


def find(text: str) -> BundledConcept:
    """Return the concept of a word. A synonym gives the value that it is a synonym of.

    A leading article and the plural do not count.

    Raises:
        UserError: The bundled model does not know the word.
    """
    word = " ".join(text.split()).casefold()
    concepts = [BundledConcept(key, one) for key, values in VALUES.items() for one in values]
    for spelling in inflection.spellings(word):
        for concept in concepts:
            if spelling in (concept.value, *synonyms(concept)):
                return concept
    vocabulary = "; ".join(f"{key}: {', '.join(values)}" for key, values in VALUES.items())
    known = [value for values in VALUES.values() for value in values]
    close = difflib.get_close_matches(word[:200], known, n=1, cutoff=0.7)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    raise UserError(
        f"the text encoder of tiny-sd, the bundled model, does not know {quote(text)}, so the "
        f"model does not generate it.{guess} It knows {vocabulary}. Give another model with --model"
    )


def synonyms(concept: BundledConcept) -> list[str]:
    """Other words for a value in the captions of the bundled world."""
    words: dict[str, Mapping[str, Sequence[str]]] = {
        "shape": painter.SYNONYMS,
        "color": painter.COLOR_SYNONYMS,
        "style": painter.STYLE_WORDS,
    }
    return [word for word in words[concept.attribute][concept.value] if word != concept.value]


def anchor_of(concept: BundledConcept, erased: Sequence[BundledConcept], anchor: str | None) -> str:
    """Return the anchor concept: `anchor`, or the default of the attribute.

    Raises:
        UserError: `anchor` is no value of the attribute, or is erased itself, or all are erased.
    """
    erased_values = {one.value for one in erased if one.attribute == concept.attribute}
    choices = [value for value in VALUES[concept.attribute] if value not in erased_values]
    if not choices:
        raise UserError(
            f"every {concept.attribute} of the bundled model is erased, and none is left as an "
            f"anchor; leave at least one {concept.attribute}"
        )
    if anchor is None:
        return next(value for value in (*ANCHORS[concept.attribute], *choices) if value in choices)
    if anchor not in choices:
        raise UserError(
            f"the anchor concept {quote(anchor)} of {concept.value!r} is no other "
            f"{concept.attribute} of the bundled model; choose from {names_text(choices)}"
        )
    return anchor


def prompt_set(
    about: str,
    attribute: str,
    values: Sequence[str | tuple[str, str]],
    *,
    held_out: bool = False,
    without: Sequence[BundledConcept] = (),
) -> dict[str, Any]:
    """Prompts that state some values of an attribute, as the content of a prompt set.

    Args:
        about: What the set is.
        attribute: The attribute that every prompt states.
        values: Its values; (word, value) where another word is written.
        held_out: Use the templates and background phrases of the evaluation.
        without: Concepts that no prompt states.
    """
    fields: dict[str, list[Any]] = {
        name: [value for value in all_values if BundledConcept(name, value) not in without]
        for name, all_values in VALUES.items()
    }
    fields["background"] = [
        [phrases[1 if held_out else 0], value]
        for value, phrases in painter.BACKGROUND_PHRASES.items()
    ]
    fields[attribute] = [one if isinstance(one, str) else list(one) for one in values]
    templates = [
        _stating(attribute, template) for template in (HELD_OUT if held_out else TEMPLATES)
    ]
    return {"about": about, "expand": {"templates": templates, **fields}}


def _stating(attribute: str, template: str) -> str:
    """The template; in one without a style, the style takes the place of the colour."""
    if f"{{{attribute}}}" in template:
        return template
    return template.replace("{color}", f"{{{attribute}}}")


def suite(
    concept: BundledConcept, erased: Sequence[BundledConcept], neighbours: Sequence[str]
) -> dict[str, Any]:
    """The evaluation suite of a concept, with held-out prompts.

    Args:
        concept: The concept.
        erased: All concepts of the job. No prompt of the other groups states one of them.
        neighbours: The values of the attribute that are measured apart.
    """
    attribute, value = concept.attribute, concept.value
    others = [one for one in erased if one != concept]
    retain_values = [
        one for one in VALUES[attribute] if BundledConcept(attribute, one) not in erased
    ]
    rest = [one for one in retain_values if one not in neighbours]

    def group(role: str, about: str, values: Sequence[Any], n: int = IMAGES) -> dict[str, Any]:
        without = others if role == "forget" else erased
        content = prompt_set(about, attribute, values, held_out=True, without=without)
        return {"prompts": content, "role": role, "n": n}

    groups = {"direct": group("forget", f"held-out prompts that name {value!r}", [value])}
    if words := synonyms(concept):
        pairs = [(word, value) for word in words]
        groups["synonyms"] = group("forget", f"other words for {value!r}", pairs)
    if neighbours:
        groups["neighbours"] = group("neighbour", f"neighbours of {value!r}", list(neighbours))
    if rest:
        groups["retained"] = group("retain", f"held-out prompts without {value!r}", rest)
    return {
        "about": f"is {value!r} erased from the bundled model? Held-out prompts",
        "concept": {attribute: value},
        "judge": "tiny",
        "seed": 7001,
        "sampling": dict(SAMPLING),
        "groups": groups,
        "metrics": list(METRICS),
    }
