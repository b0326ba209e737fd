"""The shipped lists: kinds of concepts with their templates, and known concepts with their anchors.

`kinds.yaml` holds the templates of each kind. `known.yaml` holds known concepts: kind, anchor
concept, synonyms and neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from concept_eraser.data import inflection
from concept_eraser.storage.readers import read_yaml
from concept_eraser.utils.errors import unknown

KindName = Literal["object", "style", "person", "character", "content"]
KINDS: tuple[KindName, ...] = get_args(KindName)
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Kind:
    """What prompts about one kind of concept look like.

    Attributes:
        name: One of KINDS.
        templates: Prompts for the training, with the field {concept}.
        held_out: Other prompts, which only the evaluation uses.
        anchor: The anchor concept where the shipped list has none.
        words: Words in a concept that hint at this kind.
    """

    name: KindName
    templates: tuple[str, ...]
    held_out: tuple[str, ...]
    anchor: str
    words: frozenset[str]


@dataclass(frozen=True)
class KnownConcept:
    """A concept of the shipped list."""

    name: str
    kind: KindName
    anchor: str
    synonyms: tuple[str, ...] = ()
    neighbours: tuple[str, ...] = ()


@cache
def kinds() -> Mapping[str, Kind]:
    """The kinds by name."""
    content = read_yaml(_FOLDER / "kinds.yaml")
    return {
        name: Kind(
            name=name,
            templates=tuple(content[name]["templates"]),
            held_out=tuple(content[name]["held_out"]),
            anchor=content[name]["anchor"],
            words=frozenset(content[name]["words"]),
        )
        for name in KINDS
    }


@cache
def known_concepts() -> Mapping[str, KnownConcept]:
    """The known concepts by their names in lower case. A synonym leads to its concept."""
    concepts = [
        KnownConcept(
            name=entry["name"],
            kind=entry["kind"],
            anchor=entry["anchor"],
            synonyms=tuple(entry.get("synonyms", ())),
            neighbours=tuple(entry.get("neighbours", ())),
        )
        for entry in read_yaml(_FOLDER / "known.yaml")["concepts"]
    ]
    by_synonym = {word.casefold(): one for one in concepts for word in one.synonyms}
    return by_synonym | {one.name.casefold(): one for one in concepts}


def look_up(concept: str) -> KnownConcept | None:
    """The known concept of this name or synonym, or None.

    A leading article and the plural do not count, unless the list has the name with them.

    Example:
        >>> look_up("the dogs").name
        'dog'
    """
    return known_concepts().get(_listed(concept).casefold())


def _listed(concept: str) -> str:
    """Return the first spelling of a name that the shipped list has, or else the name itself."""
    name = " ".join(concept.split())
    spellings = inflection.spellings(name)
    return next((one for one in spellings if one.casefold() in known_concepts()), name)


def plain_name(concept: str, kind: KindName) -> str:
    """Return the name as the templates of a kind need it.

    Those of objects write an article before a singular. Those of other kinds need the name as it
    is, e.g. The Beatles.

    Example:
        >>> plain_name("the churches", "object")
        'church'
    """
    return inflection.without_article(_listed(concept)) if kind == "object" else concept


def guess_kind(concept: str) -> KindName:
    """Guess the kind of a concept from the shipped list, from hints in its words, or from capitals.

    Hints of content come first, because its images are blurred in reports. A name of two or more
    capitalised words is taken for a person, anything else for an object.

    Example:
        >>> guess_kind("a watercolor painting")
        'style'
    """
    if entry := look_up(concept):
        return entry.kind
    words = concept.split()
    hints = set(re.findall(r"\w+", concept.casefold()))  # without punctuation
    for kind in sorted(kinds().values(), key=lambda kind: kind.name != "content"):
        if kind.words & hints:
            return kind.name
    return "person" if len(words) > 1 and all(word[0].isupper() for word in words) else "object"


def require_kind(name: str) -> Kind:
    """The kind of this name. Raises UserError for an unknown one."""
    if name not in kinds():
        raise unknown("kind", name, KINDS)
    return kinds()[name]
