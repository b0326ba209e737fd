"""The evaluations and attacks of a run by concept, and the concepts without measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from concept_eraser.evaluation import result_schema
from concept_eraser.models.safeguards import safeguard_in
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.reporting import run_results
from concept_eraser.storage.readers import read_json
from concept_eraser.utils.migration import migrate_results
from concept_eraser.utils.path_redaction import clean, shorten


@dataclass(frozen=True)
class Measurements:
    """The measurements of a run. Their texts have no paths of this machine.

    Attributes:
        recipe: The recipe of the run.
        evaluations: The evaluations of the run's weights, its own evaluation.json first.
        attacks: The attacks on these weights, by label.
        unlike: The names of evaluations and attacks of other weights, or under a safeguard.
    """

    recipe: Recipe
    evaluations: list[dict[str, Any]]
    attacks: dict[str, dict[str, Any]]
    unlike: list[str] = field(default_factory=list)

    @property
    def several(self) -> bool:
        """Whether there are several concepts, so that each must be named."""
        results = (*self.evaluations, *self.attacks.values())
        names = {concept_text(concept) for content in results if (concept := concept_of(content))}
        return len(self.recipe.forgotten) > 1 or len(names) > 1

    @property
    def attacks_proper(self) -> list[dict[str, Any]]:
        """The attacks without the controls, which show what the budget finds without an attack."""
        return list(run_results.attacks_and_controls(self.attacks)[0].values())

    @property
    def concepts(self) -> list[str]:
        """The concepts that the recipe forgets.

        Each has its name from a measurement, else that of its prompts or data.
        """
        return [self._name(objective) for objective in self.recipe.forgotten]

    def missing(self, results: Sequence[Mapping[str, Any]]) -> list[str]:
        """List the forgotten concepts that none of these evaluations or attacks is about."""
        alone = len(self.recipe.forgotten) == 1
        return [
            self._name(objective)
            for objective in self.recipe.forgotten
            if not any(_about(objective, content, alone) for content in results)
        ]

    def with_gap(self, gap: Mapping[str, Any]) -> Measurements:
        """Return the measurements with this gap to retraining in the run's own evaluation."""
        own, *others = self.evaluations
        return replace(self, evaluations=[clean({**own, "control": gap}), *others])

    def _name(self, objective: Any) -> str:
        alone = len(self.recipe.forgotten) == 1
        for content in (*self.evaluations, *self.attacks.values()):
            concept = concept_of(content)
            if concept and _about(objective, content, alone):
                return concept_text(concept)
        return source(objective)


def read(folder: Path, recipe: Recipe) -> Measurements:
    """Read the evaluations and attacks of a run. Raises UserError for a damaged file."""
    own_evaluation = _evaluation(folder / "evaluation.json")
    other_evaluations = {
        path.parent.name: _evaluation(path)
        for path in sorted(folder.glob(f"{run_results.EVALUATIONS}/*/evaluation.json"))
    }
    evaluations = [e for e in (own_evaluation, *other_evaluations.values()) if e]
    victim = _weights(evaluations[0]) if evaluations else None
    unlike = [name for name, e in other_evaluations.items() if _weights(e) != victim]
    if victim is not None:
        attacks, others = run_results.attacks_of(folder, victim, [])
        unlike += others
    else:
        attacks = {}
        for path, attack in run_results.read_attacks(folder / "attacks"):
            if safeguard_in(run_results.victim_of(attack)):
                unlike.append(run_results.attack_name(path, attack))
            else:
                attacks[path.name] = attack
    return Measurements(
        recipe, [clean(e) for e in evaluations if _weights(e) == victim], clean(attacks), unlike
    )


def content(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run, or {} if it is missing. Raises UserError if it is not JSON."""
    record: dict[str, Any] = migrate_results(read_json(path)) if path.is_file() else {}
    return record


def _evaluation(path: Path) -> dict[str, Any]:
    """Read an evaluation.json, of prompts or of labelled data, or {} if it is missing.

    Raises UserError if it is damaged.
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
    """Name the prompts or data of an objective, without paths of this machine.

    Prompts that a recipe spells out have the name `about`, if they have one. Of labelled data the
    selection is named too.
    """
    data_source = getattr(objective, "prompts", None) or getattr(objective, "data", None)
    if isinstance(data_source, list | tuple):
        return f"{len(data_source)} prompts"
    if isinstance(data_source, Mapping):
        return shorten(str(data_source.get("about") or "prompts of its own"))
    return shorten(str(data_source)) + _selection(objective)


def _selection(objective: Any) -> str:
    """Name which of its labelled data an objective has; "" for all of them."""
    classes, share, indices = (
        getattr(objective, key, None) for key in ("classes", "share", "indices")
    )
    parts = [shorten(", ".join(map(str, classes)))] if classes else []
    parts += [f"{100 * share:g} %"] if share else []
    if indices:
        parts += ["listed examples" if isinstance(indices, str) else f"{len(indices)} examples"]
    return f" ({', '.join(parts)})" if parts else ""


def concept_of(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the attribute and value of an evaluation's or attack's concept, or {}."""
    return run_results.concept_of(results)


def concept_text(concept: Mapping[str, str]) -> str:
    return ", ".join(f"{value} ({key})" for key, value in concept.items())


def _weights(evaluation: Mapping[str, Any]) -> str | None:
    """Return the evaluated model, see `run_results.sampled_model`. None for labelled data."""
    after = evaluation.get("models", {}).get("after")
    return None if after is None else run_results.sampled_model(after)


def _about(objective: Any, results: Mapping[str, Any], alone: bool) -> bool:
    """Whether an evaluation or attack is about the concept of a forget objective.

    They are compared by their prompts, by the values that the prompts vary, else by the name of the
    concept. If the objective is `alone` in the recipe, the name of the attribute (nudity) is
    sufficient.
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
    ((attribute, value),) = concept_of(results).items() or (("", ""),)
    if not value:
        return False
    if choices := _choices(prompts, attribute):
        return choices == {value}
    text = " ".join(prompts) if isinstance(prompts, list | tuple) else source(objective)
    return _names(text, value) or (alone and _names(text, attribute))


def _names(text: str, name: str) -> bool:
    """Whether a text has the words of a name one after another, in any case."""
    words, wanted = (" ".join(re.findall(r"[^\W_]+", one.casefold())) for one in (text, name))
    return f" {wanted} " in f" {words} "


def _choices(prompts: Any, attribute: str) -> set[str]:
    """Return the values of an attribute in the products that a prompt set spells out.

    The set is empty where the prompts have no such attribute.
    """
    rules = prompts.get("expand") if isinstance(prompts, Mapping) else None
    products = rules if isinstance(rules, list | tuple) else [rules]
    fields = [product for product in products if isinstance(product, Mapping)]
    # a choice is a word, or a word and the value that it stands for
    return {
        str(one[-1] if isinstance(one, list | tuple) else one)
        for field in fields
        for one in field.get(attribute, ())
    }
