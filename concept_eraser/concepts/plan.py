"""The plan of an erasing job that is given by the names of concepts.

    plan = make_plan(["Van Gogh"], model="./sd15", kind="style")
    plan.settings      # the recipe's keys: forget, retain, model
    plan.suites        # the evaluation suites, by file name in the run folder

The recipe and the suites hold their prompts, so that both can be read, edited and used again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from concept_eraser.concepts import bundled, general, neighbours
from concept_eraser.data import prompts
from concept_eraser.models.base import Model
from concept_eraser.storage import base_model
from concept_eraser.utils import limits, provenance, resources
from concept_eraser.utils.errors import UserError, names_text, quote

BUNDLED = base_model.BUNDLED
LONGEST = 200  # characters of a concept's name
LONGEST_SLUG = 60  # characters of a name in a file name
MOST = 50  # concepts in one plan
LEAST_IMAGES = 2  # of a group of a suite
WARNING = "warning: "  # the beginning of a line
SUITE, SUITES = "suite.yaml", "suites"  # of one concept, and the folder of those of several


def is_concept(text: str) -> bool:
    """Whether a text names a concept and no recipe.

    Raises:
        UserError: It is no recipe, but nearly the name of one.
    """
    if resources.is_file_name("pipelines", text):
        return False
    if "_" in text or difflib.get_close_matches(text, resources.names("pipelines"), 1, 0.8):
        resources.find("pipelines", text)  # says which recipe may be meant
    return True


@dataclass(frozen=True)
class ConceptPlan:
    """One concept of a plan.

    Attributes:
        name: The concept.
        kind: Its kind.
        is_guessed: Whether the kind was guessed.
        anchor: The anchor concept.
        synonyms: Other names, which only the evaluation uses.
        neighbours: What is measured apart as close to the concept.
        objective: The objective in the recipe: prompts and anchor.
        suite: The content of the evaluation suite.
        warning: What the user may not expect, or "".
    """

    name: str
    kind: str
    is_guessed: bool
    anchor: str
    synonyms: Sequence[str]
    neighbours: Sequence[str]
    objective: Mapping[str, Any]
    suite: Mapping[str, Any]
    warning: str = ""

    def with_images(self, n: int) -> ConceptPlan:
        """The plan with n images in each group of its suite."""
        groups = {name: {**group, "n": n} for name, group in self.suite["groups"].items()}
        return replace(self, suite={**self.suite, "groups": groups})


@dataclass(frozen=True)
class ErasurePlan:
    """Prompts, anchors, retain set and suites of an erasing job.

    Attributes:
        model: The name of the model.
        concepts: The concepts.
        retain: The prompt set to preserve.
    """

    model: str
    concepts: tuple[ConceptPlan, ...]
    retain: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of the recipe that the plan decides."""
        objectives = [dict(concept.objective) for concept in self.concepts]
        forget: Any = objectives[0] if len(objectives) == 1 else objectives
        return {"model": self.model, "forget": forget, "retain": {"prompts": dict(self.retain)}}

    @property
    def suites(self) -> dict[str, Mapping[str, Any]]:
        """The suites by their file names in the run folder."""
        if len(self.concepts) == 1:
            return {SUITE: self.concepts[0].suite}
        names = slugs([concept.name for concept in self.concepts])
        return {
            f"{SUITES}/{name}.yaml": concept.suite
            for name, concept in zip(names, self.concepts, strict=True)
        }

    @property
    def folder_name(self) -> str:
        """The default name of the run folder."""
        return "_".join(slugs([concept.name for concept in self.concepts]))[:80]

    def with_changes(self, objectives: Sequence[Mapping[str, Any]], retain: Any) -> ErasurePlan:
        """The plan with the prompts and anchors of a recipe, where the user may have changed them.

        Args:
            objectives: `prompts` and `anchor` of each concept.
            retain: The prompt set to preserve; None for a recipe without one.
        """
        concepts = [
            replace(concept, anchor=_anchor_text(objective["anchor"]), objective=objective)
            for concept, objective in zip(self.concepts, objectives, strict=True)
        ]
        return replace(self, concepts=tuple(concepts), retain=retain or {})

    def lines(self) -> list[str]:
        """The choices of the plan, for the user: four lines for one concept, and its warning."""
        lines = []
        for concept in self.concepts:
            guess = ", guessed" if concept.is_guessed else ""
            lines.append(
                f"concept:  {concept.name} ({concept.kind}{guess}); "
                f"anchor concept: {concept.anchor}"
            )
            if concept.warning:
                lines.append(f"{WARNING} {concept.warning}")
            forget, direct = (
                prompts.load(concept.objective["prompts"]),
                prompts.load(concept.suite["groups"]["direct"]["prompts"]),
            )
            lines.append(
                f"forget:   {len(forget)} prompts, e.g. {forget.texts[0]!r}; evaluated on "
                f"{len(direct)} others and the synonyms: {_listing(concept.synonyms)}"
            )
        if self.retain:
            retain = prompts.load(self.retain)
            lines.append(f"retain:   {len(retain)} captions, e.g. {retain.texts[0]!r}")
        else:
            lines.append("retain:   no captions")
        close = dict.fromkeys(word for one in self.concepts for word in one.neighbours)
        lines.append(f"measured apart as neighbours: {_listing(list(close))}")
        return lines


def _anchor_text(anchor: str | Mapping[str, str] | None) -> str:
    """An anchor of a recipe as one text: what it writes in place of the concept."""
    return ", ".join(anchor.values()) if isinstance(anchor, Mapping) else anchor or "none"


def _listing(words: Sequence[str], most: int = 5) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more if words else "none"


def slug(name: str) -> str:
    """A name as part of a file name, e.g. van_gogh.

    It ends with a fingerprint of the name if it does not tell it from others: the name is longer
    than a file name may be, or only one letter is left of it, as of C++ and C#.
    """
    text = re.sub(r"\W+", "_", name.casefold()).strip("_")
    is_too_short = len(text) < 2 and text != name.casefold()
    if is_too_short or len(text) > LONGEST_SLUG:
        return _with_fingerprint(text[:LONGEST_SLUG] or "concept", name)
    return text


def slugs(names: Sequence[str]) -> list[str]:
    """The names of several concepts as parts of file names, each different."""
    texts = [slug(name) for name in names]
    return [
        _with_fingerprint(text, name) if texts.count(text) > 1 else text
        for text, name in zip(texts, names, strict=True)
    ]


def _with_fingerprint(text: str, name: str) -> str:
    return f"{text}_{provenance.fingerprint(name.casefold())[:6]}"


def make_plan(
    concepts: Sequence[str],
    *,
    model: str = BUNDLED,
    kind: str | None = None,
    anchors: Sequence[str] = (),
    images: int | None = None,
    text_encoder: Model | None = None,
) -> ErasurePlan:
    """Make the plan for some concepts.

    Args:
        concepts: The names of the concepts.
        model: The name of the model.
        kind: The kind of all concepts; None to guess each.
        anchors: An anchor concept for all, or one for each.
        images: How many images each group of a suite has (default: 96 for the bundled model, else
            64).
        text_encoder: The loaded model. It ranks the neighbours. Without it the plan has those of
            the shipped lists only.

    Returns:
        The plan. Its recipe does not depend on `text_encoder`.

    Raises:
        UserError: A concept or an anchor is empty, too long, given twice or unknown to the bundled
            model; an anchor is erased itself; the kind is unknown; the numbers of concepts and
            anchors differ; `images` is out of bounds.
    """
    names = [_require_name(name) for name in concepts]
    _require_different(names)
    if len(anchors) not in (0, 1, len(names)):
        raise UserError(
            f"found {len(anchors)} anchors for {len(names)} concepts; give one for all, or one "
            "each in the same order"
        )
    chosen_anchors: list[str | None] = [_require_name(anchor) for anchor in anchors]
    if len(chosen_anchors) < 2:
        chosen_anchors = (chosen_anchors or [None]) * len(names)
    make = _bundled_plan if base_model.is_bundled(model) else _general_plan
    plan = make(names, model, kind=kind, anchors=chosen_anchors, text_encoder=text_encoder)
    if images is None:
        return plan
    if not isinstance(images, int) or not LEAST_IMAGES <= images <= limits.IMAGES:
        raise UserError(
            f"images: expected {LEAST_IMAGES} to {limits.IMAGES:,}, found {quote(images)}"
        )
    return replace(plan, concepts=tuple(one.with_images(images) for one in plan.concepts))


def _require_name(name: str) -> str:
    name = " ".join(str(name).split())
    if not name or len(name) > LONGEST or not name.isprintable():
        raise UserError(
            f"expected the name of a concept, a text of 1 to {LONGEST} characters, found "
            f"{quote(name)}"
        )
    return name


def _require_different(names: Sequence[str]) -> None:
    if not 1 <= len(names) <= MOST:
        raise UserError(f"give 1 to {MOST} concepts, found {len(names)}")
    texts = [name.casefold() for name in names]
    if twice := [name for i, name in enumerate(names) if texts[i] in texts[:i]]:
        raise UserError(f"the concept {quote(twice[0])} is given twice")


def _bundled_plan(
    names: Sequence[str],
    model: str,
    kind: str | None,
    anchors: Sequence[str | None],
    text_encoder: Model | None,
) -> ErasurePlan:
    concepts = [bundled.find(name) for name in names]
    if len(set(concepts)) < len(concepts):
        raise UserError(f"two of {names_text(names)} are the same concept of the bundled model")
    if kind is not None:
        for concept in concepts:
            if bundled.KIND_OF[concept.attribute] != kind:
                raise UserError(
                    f"for the bundled model {concept.value!r} is of the kind "
                    f"{bundled.KIND_OF[concept.attribute]}, found {quote(kind)}; leave out --kind"
                )
    plans = []
    for concept, anchor in zip(concepts, anchors, strict=True):
        attribute, value = concept.attribute, concept.value
        chosen_anchor = bundled.anchor_of(concept, concepts, anchor)
        others = [
            one
            for one in bundled.VALUES[attribute]
            if bundled.BundledConcept(attribute, one) not in concepts
        ]
        close = neighbours.nearest(text_encoder, [value], others, 2) if text_encoder else []
        about = f"prompts that name {value!r}"
        plans.append(
            ConceptPlan(
                name=value,
                kind=bundled.KIND_OF[attribute],
                is_guessed=False,
                anchor=chosen_anchor,
                synonyms=bundled.synonyms(concept),
                neighbours=close,
                objective={
                    "prompts": bundled.prompt_set(
                        about,
                        attribute,
                        [value],
                        without=[one for one in concepts if one != concept],
                    ),
                    "anchor": {attribute: chosen_anchor},
                },
                suite=bundled.suite(concept, concepts, close),
            )
        )
    first = concepts[0].attribute
    retain_values = [
        v for v in bundled.VALUES[first] if bundled.BundledConcept(first, v) not in concepts
    ]
    retain = bundled.prompt_set(
        f"prompts without {names_text(concept.value for concept in concepts)}",
        first,
        retain_values,
        without=concepts,
    )
    return ErasurePlan(model, tuple(plans), retain)


def _general_plan(
    names: Sequence[str],
    model: str,
    kind: str | None,
    anchors: Sequence[str | None],
    text_encoder: Model | None,
) -> ErasurePlan:
    concepts = general.find_all(names, kind, anchors)
    captions = general.held_out_captions(concepts)
    plans = []
    for concept in concepts:
        objective = {
            "prompts": general.forget_prompts(concept),
            "anchor": {"concept": concept.anchor},
        }
        close = []
        if text_encoder:
            texts = prompts.load(objective["prompts"]).texts
            close = neighbours.nearest(text_encoder, texts, captions, general.NEIGHBOURS)
        plans.append(
            ConceptPlan(
                name=concept.name,
                kind=concept.kind.name,
                is_guessed=concept.is_guessed,
                anchor=concept.anchor,
                synonyms=concept.synonyms,
                neighbours=[*general.remaining_neighbours(concept, concepts), *close],
                objective=objective,
                suite=general.suite(concept, concepts, close),
                warning=general.warning(concept),
            )
        )
    return ErasurePlan(model, tuple(plans), general.retain_prompts(concepts))
