"""The evaluations and attacks of a run by concept, and the concepts that nobody measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from concept_eraser.evaluation import result_schema
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.reporting import run_results
from concept_eraser.storage.readers import read_json
from concept_eraser.utils.migration import migrate_results
from concept_eraser.utils.path_redaction import clean, shorten


@dataclass(frozen=True)
class Findings:
    """evaluations: of the weights at hand, the run's own evaluation.json first; attacks: on these
    weights, by what to call them; unlike: the names of evaluations and attacks of other weights. No
    text in them is a path of this machine."""

    recipe: Recipe
    evaluations: list[dict[str, Any]]
    attacks: dict[str, dict[str, Any]]
    unlike: list[str] = field(default_factory=list)

    @property
    def several(self) -> bool:
        """Whether "the concept" would not say which."""
        concepts = [concept_of(one) for one in (*self.evaluations, *self.attacks.values())]
        return len(self.recipe.forgotten) > 1 or len({named(one) for one in concepts if one}) > 1

    @property
    def concepts(self) -> list[str]:
        """Each concept that the recipe forgets, by the name under which it was measured, else by
        its prompts or data.
        """
        return [self._name(objective) for objective in self.recipe.forgotten]

    def missing(self, results: Sequence[Mapping[str, Any]]) -> list[str]:
        """The forgotten concepts that none of these evaluations or attacks is about."""
        alone = len(self.recipe.forgotten) == 1
        return [
            self._name(objective)
            for objective in self.recipe.forgotten
            if not any(_about(objective, one, alone) for one in results)
        ]

    def _name(self, objective: Any) -> str:
        alone = len(self.recipe.forgotten) == 1
        for one in (*self.evaluations, *self.attacks.values()):
            concept = concept_of(one)
            if concept and _about(objective, one, alone):
                return named(concept)
        return source(objective)


def read(folder: Path, recipe: Recipe) -> Findings:
    """Raises UserError for a damaged file."""
    own_evaluation = _evaluation(folder / "evaluation.json")
    other_evaluations = {
        path.parent.name: _evaluation(path)
        for path in sorted(folder.glob(f"{run_results.EVALUATIONS}/*/evaluation.json"))
    }
    every = [one for one in (own_evaluation, *other_evaluations.values()) if one]
    victim = _weights(every[0]) if every else None
    unlike = [name for name, one in other_evaluations.items() if _weights(one) != victim]
    if victim is not None:
        attacks, others = run_results.attacks_of(folder, victim, [])
        unlike += others
    else:
        attacks = {path.name: one for path, one in run_results.read_attacks(folder / "attacks")}
    return Findings(
        recipe, [clean(one) for one in every if _weights(one) == victim], clean(attacks), unlike
    )


def content(path: Path) -> dict[str, Any]:
    """The content of a file that a run may have; nothing where it has not. Raises UserError where
    it is no JSON.
    """
    record: dict[str, Any] = migrate_results(read_json(path)) if path.is_file() else {}
    return record


def _evaluation(path: Path) -> dict[str, Any]:
    """An evaluation.json, of prompts or of labelled data; nothing where there is none. Raises
    UserError where it is damaged.
    """
    values = content(path)
    if values:
        result_schema.require(
            values,
            result_schema.EVALUATION if "protocol" in values else result_schema.LABELLED,
            path,
        )
    return values


def source(objective: Any) -> str:
    """The prompts or data of an objective, without a machine's path."""
    data_source = getattr(objective, "prompts", None) or getattr(objective, "data", None)
    return (
        f"{len(data_source)} prompts"
        if isinstance(data_source, list | tuple)
        else shorten(str(data_source))
    )


def concept_of(results: Mapping[str, Any]) -> dict[str, str]:
    """The attribute and value that an evaluation or attack is about; empty where it does not
    say.
    """
    return run_results.concept_of(results)


def named(concept: Mapping[str, str]) -> str:
    return ", ".join(f"{value} ({key})" for key, value in concept.items())


def _weights(evaluation: Mapping[str, Any]) -> str | None:
    """The fingerprint of the weights that were evaluated; None for a run on labelled data, which
    states none.
    """
    after = evaluation.get("models", {}).get("after")
    return None if after is None else run_results.weights_of(after)


def _about(objective: Any, results: Mapping[str, Any], alone: bool) -> bool:
    """Whether an evaluation or attack is about what an objective forgets: by its prompts, else by
    the name of its concept.

    alone: the objective is the recipe's only one, so that a name of the attribute (nudity) will do.
    """
    protocol = results.get("protocol")
    if protocol is None:  # labelled data: one for the whole run
        return True
    groups = protocol.get("suite", protocol).get("groups", {}).values()
    prompts = getattr(objective, "prompts", None)
    if any(
        g.get("role") == "forget" and g.get("prompts") in (prompts, source(objective))
        for g in groups
    ):
        return True
    text = " ".join(prompts) if isinstance(prompts, list | tuple) else source(objective)
    ((attribute, value),) = concept_of(results).items() or (("", ""),)
    words = text.lower().replace("_", " ").replace(".", " ").split()
    return bool(value) and (value.lower() in words or (alone and attribute.lower() in words))
