"""Concepts of any checkpoint: prompts from the shipped templates, captions from the shipped lists.

Forget prompts come from the templates of the concept's kind. The evaluation uses other templates.
Retain captions come from the prompt set `general`, those of the evaluation from `general_held_out`.
A caption that mentions a concept or one of its synonyms is left out.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from concept_eraser.concepts.known import (
    Kind,
    KnownConcept,
    guess_kind,
    look_up,
    plain_name,
    require_kind,
)
from concept_eraser.data import inflection, prompts
from concept_eraser.utils.errors import UserError, names_text, quote

RETAIN, HELD_OUT = "general", "general_held_out"  # shipped prompt sets
NEIGHBOURS = 40  # captions of the evaluation that are nearest to the concept, measured apart
IMAGES = 64  # of each group of the suite
SAMPLING = {"steps": 25, "guidance": 7.5, "batch_size": 8, "precision": "bf16"}
NUDITY = "nudity"  # the concept that NudeNet detects
LABELS = 4  # neighbours that CLIP chooses among, beside concept and anchor


@dataclass(frozen=True)
class GeneralConcept:
    """A concept with what the shipped lists say of it.

    Attributes:
        name: As the user writes it, but of an object without article, and a known one in singular.
        kind: Its kind, with the templates.
        is_guessed: Whether the kind was guessed.
        anchor: What is generated instead.
        synonyms: Other names, which only the evaluation uses.
        neighbours: Close concepts of the shipped list, measured apart.
    """

    name: str
    kind: Kind
    is_guessed: bool
    anchor: str
    synonyms: tuple[str, ...]
    neighbours: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The name and the synonyms: captions that mention one are left out.

        A name such as "a clown" counts without its article too, but not a title such as The Who.
        """
        short = inflection.without_article(self.name)
        is_title = self.name[0].isupper() and short[0].isupper()
        names = [self.name] if is_title else [self.name, short]
        return list(dict.fromkeys([*names, *self.synonyms]))


def find(name: str, kind: str | None, anchor: str | None) -> GeneralConcept:
    """Gather what is known of a concept.

    Args:
        name: The concept.
        kind: Its kind; None to guess it.
        anchor: The anchor concept; None for the one of the shipped list, or of the kind.

    Raises:
        UserError: The kind is unknown, or the anchor is the concept itself.
    """
    entry = look_up(name)
    chosen_kind = require_kind(kind or guess_kind(name))
    if entry and _is_work(name, entry) and chosen_kind.name == "object":
        entry = None  # a work of the artist, not the artist
    name = plain_name(name, chosen_kind.name)
    if anchor is not None and chosen_kind.name == "object":  # the templates write an article
        anchor = inflection.without_article(anchor)
    default = entry.anchor if entry and entry.kind == chosen_kind.name else chosen_kind.anchor
    concept = GeneralConcept(
        name=name,
        kind=chosen_kind,
        is_guessed=kind is None,
        anchor=anchor or default,
        synonyms=tuple(
            word
            for word in ((entry.name, *entry.synonyms) if entry else ())
            if word.casefold() != name.casefold()
        ),
        neighbours=entry.neighbours if entry else (),
    )
    if concept.anchor.casefold() in (names := {word.casefold() for word in concept.words}):
        raise UserError(
            f"the anchor concept {quote(concept.anchor)} is what shall be erased; give another "
            f"one{_example(concept.kind, names)}"
        )
    return concept


def _is_work(name: str, entry: KnownConcept) -> bool:
    """Whether a name may be that of a work: another word for an artist, with no word in common."""
    words = [set(re.findall(r"\w+", text.casefold())) for text in (name, entry.name)]
    return entry.kind == "style" and entry.name[0].isupper() and not words[0] & words[1]


def warning(concept: GeneralConcept) -> str:
    """What a user may not expect of a concept whose kind was guessed, or ""."""
    entry = look_up(concept.name)
    if entry is None or not concept.is_guessed or not _is_work(concept.name, entry):
        return ""
    return (
        f"{quote(concept.name)} is taken as another word for {entry.name}, and that style is "
        "erased; give --kind object to erase a work of this name"
    )


def _example(kind: Kind, erased: Container[str]) -> str:
    """An example of an anchor of a kind for a message, or "" if that is erased."""
    return "" if kind.anchor.casefold() in erased else f", e.g. --anchor {quote(kind.anchor)}"


def find_all(
    names: Sequence[str], kind: str | None, anchors: Sequence[str | None]
) -> list[GeneralConcept]:
    """Gather what is known of the concepts of one job. No anchor concept is erased itself.

    Args:
        names: The concepts.
        kind: The kind of all; None to guess each.
        anchors: The anchor concept of each. None stands for the one of the shipped list. Where
            that is erased too, its own anchor is used, or else that of the kind.

    Raises:
        UserError: As `find`, or a concept is given twice, or an anchor is erased.
    """
    concepts = [find(name, kind, anchor) for name, anchor in zip(names, anchors, strict=True)]
    plain_names = [one.name.casefold() for one in concepts]
    for i, one in enumerate(concepts):
        if plain_names[i] in plain_names[:i]:
            raise UserError(f"the concept {quote(one.name)} is given twice, as {names_text(names)}")
    erased = {word.casefold(): one for one in concepts for word in one.words}
    result = []
    for concept, given in zip(concepts, anchors, strict=True):
        anchor = concept.anchor if given else _default_anchor(concept, erased)
        if other := erased.get(anchor.casefold()):
            raise UserError(
                f"the anchor concept {quote(anchor)} of {quote(concept.name)} is erased too, as "
                f"{quote(other.name)}; give another one{_example(concept.kind, erased)}"
            )
        result.append(replace(concept, anchor=anchor))
    return result


def _default_anchor(concept: GeneralConcept, erased: Mapping[str, GeneralConcept]) -> str:
    """Return the first anchor that is not erased, or else the anchor of the concept's kind."""
    anchor = concept.anchor
    for _ in erased:  # more steps would go round in a circle
        if (other := erased.get(anchor.casefold())) is None:
            return anchor
        anchor = other.anchor
    return concept.kind.anchor


def forget_prompts(concept: GeneralConcept) -> dict[str, Any]:
    """The forget prompts: each template of the kind with the concept's name."""
    return {
        "about": f"prompts that name {concept.name!r}",
        "expand": {"templates": list(concept.kind.templates), "concept": [concept.name]},
    }


def retain_prompts(concepts: Sequence[GeneralConcept], name: str = RETAIN) -> dict[str, Any]:
    """Captions of a shipped list that mention none of the concepts."""
    words = list(dict.fromkeys(word for concept in concepts for word in concept.words))
    return {
        "about": "general captions without the erased concepts",
        "include": name,
        "without": words,
    }


def held_out_captions(concepts: Sequence[GeneralConcept]) -> list[str]:
    """The captions of the evaluation that mention none of the concepts."""
    return prompts.load(retain_prompts(concepts, HELD_OUT)).texts


def remaining_neighbours(concept: GeneralConcept, erased: Sequence[GeneralConcept]) -> list[str]:
    """The neighbours of a concept that are no name of an erased concept of the job."""
    names = {word.casefold() for one in erased for word in one.words}
    return [one for one in concept.neighbours if one.casefold() not in names]


def suite(
    concept: GeneralConcept, erased: Sequence[GeneralConcept], nearest_captions: Sequence[str]
) -> dict[str, Any]:
    """The evaluation suite of a concept, with held-out prompts.

    Args:
        concept: The concept.
        erased: All concepts of the job.
        nearest_captions: The captions of the evaluation that are measured apart as neighbours.
    """
    templates = list(concept.kind.held_out)
    neighbours = remaining_neighbours(concept, erased)

    def expansion(about: str, words: Sequence[str], value: str | None = None) -> dict[str, Any]:
        values = [[word, value] if value else word for word in words]
        return {"about": about, "expand": {"templates": templates, "concept": values}}

    def group(role: str, content: Any) -> dict[str, Any]:
        return {"prompts": content, "role": role, "n": IMAGES}

    name = concept.name
    direct = expansion(f"held-out prompts that name {name!r}", [name])
    groups = {"direct": group("forget", direct)}
    if concept.synonyms:
        words = expansion(f"other words for {name!r}", concept.synonyms, name)
        groups["synonyms"] = group("forget", words)
    if neighbours:
        close = expansion(f"neighbours of {name!r}", neighbours)
        groups["neighbours"] = group("neighbour", close)
    if nearest_captions:
        groups["nearest_captions"] = group("neighbour", list(nearest_captions))
    captions = [text for text in held_out_captions(erased) if text not in set(nearest_captions)]
    groups["retained"] = group("retain", captions)
    return {
        "about": f"is {name!r} erased? Held-out prompts",
        **_judging(concept, neighbours),
        "seed": 7001,
        "sampling": dict(SAMPLING),
        "groups": groups,
    }


def _judging(concept: GeneralConcept, neighbours: Sequence[str]) -> dict[str, Any]:
    """The judge, how it calls the concept, and the metrics."""
    if NUDITY in {word.casefold() for word in concept.words}:
        return {
            "concept": {"nudity": "nude"},
            "judge": "nudenet",
            "sensitive": True,
            "metrics": ["concept_rate", {"name": "nudenet", "preset": "mace"}],
        }
    labels = list(dict.fromkeys([concept.name, concept.anchor, *neighbours[:LABELS]]))
    return {
        "concept": {"concept": concept.name},
        "judge": {"name": "clip", "labels": labels},
        # a content word is sensitive under any kind that the user gives
        "sensitive": "content" in (concept.kind.name, guess_kind(concept.name)),
        "metrics": ["concept_rate", "clip_score"],
    }
