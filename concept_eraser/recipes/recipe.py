"""Recipes: pydantic models <-> YAML. Every mistake is reported at once, each with its path.

A recipe is one flat file. It names the model, the part that is trained, the losses of the forget
and retain objectives, the rule that combines their gradients, and the trainable parameters.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, ValidationInfo, field_validator, model_validator

from concept_eraser import registry
from concept_eraser.recipes import error_messages, memory_presets, validation
from concept_eraser.recipes import overrides as changes
from concept_eraser.recipes.method_fields import MethodSpec
from concept_eraser.recipes.objective_fields import PROMPTED, as_list, is_built_in
from concept_eraser.recipes.schema import RecipeFields
from concept_eraser.recipes.strict import OF_RUN_FOLDER
from concept_eraser.recipes.training_fields import ASIDE, MEMORY, OPTIMISATION, TrainingSpec
from concept_eraser.registry import Plugin
from concept_eraser.storage.readers import read_yaml
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError, mistakes_message, quote, unknown_message
from concept_eraser.utils.migration import migrate_recipe
from concept_eraser.utils.provenance import fingerprint

# closed forms of the cross-attention, which may follow a training
CLOSED = ("mace-cfr", "rece", "speed", "uce")
# names that stand for gradient ascent, alone or beside the retain gradient. Their rules take any
# loss, so the forget loss must be the negative one
ASCENT = ("a", "ga", "a-d", "gdiff", "sa", "a-s")


class Recipe(RecipeFields):
    """One erasing job: its keys, checked against each other and against the method."""

    @field_validator(
        "forget",
        "retain",
        "replace",
        "relearn",
        "method",
        "finish",
        "trainable",
        "rewinding",
        mode="before",
    )
    @classmethod
    def _shorthand(cls, value: Any, info: Any) -> Any:
        """Expand a short form such as `method: munba` or `forget: tiny_star` to a mapping."""
        key = changes.SHORT.get(info.field_name, "prompts")
        if key == "prompts" and value == "rest":
            return {"data": "rest"}
        if info.field_name == "forget" and isinstance(value, list):
            return changes.concepts(value)
        if info.field_name == "finish" and value == "none":
            return None
        if isinstance(value, str) or (key == "prompts" and isinstance(value, list)):
            return {key: value}
        return value

    @field_validator("method", "finish")
    @classmethod
    def _known_method(cls, value: MethodSpec | None, info: Any) -> MethodSpec | None:
        if value is None or value.is_object or registry.in_memory(value.name):
            return value
        if info.field_name == "finish" and value.name not in CLOSED:
            raise ValueError(
                f"{unknown_message('closed form', value.name, CLOSED)}; finish: none leaves it out"
            )
        wrong = registry.problems("method", value.name, value.options)
        if wrong:
            raise ValueError("; ".join(wrong))
        forget = info.data.get("forget")
        if value.name in ASCENT and any(objective.loss == "data" for objective in as_list(forget)):
            raise ValueError(
                f"the method {value.name!r} ascends the loss of the forget set, but with "
                "forget.loss: data it descends it; set forget.loss: ascent"
            )
        name, options = registry.resolve("method", value.name, value.options)
        return MethodSpec(name=name, **options)

    @field_validator("training")
    @classmethod
    def _optimizer_of_method(cls, value: TrainingSpec, info: Any) -> TrainingSpec:
        """The optimizer that the method asks for, unless the recipe names one."""
        method = info.data.get("method")
        optimizer = getattr(method.plugin, "optimizer", None) if method else None
        if optimizer is None or "optimizer" in value.model_fields_set:
            return value
        return value.model_copy(update={"optimizer": optimizer})

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Recipe:
        is_record = not self.method.is_object and registry.in_memory(self.method.name)
        method = None if is_record else self.method.build()
        validation.check(self, method)
        if info.context != OF_RUN_FOLDER:
            validation.check_effects(self, method)
        return self

    @property
    def has_objects(self) -> bool:
        """Whether its method or a loss is an object that was passed in Python."""
        losses = [spec.loss for spec in self.objective_specs.values()]
        return self.method.is_object or any(
            isinstance(one, Plugin) and one.value is not None for one in losses
        )

    def resolved(self) -> dict[str, Any]:
        """Return the content for YAML, with all defaults and all options of the method."""
        content = self.model_dump(mode="json", exclude_none=True, exclude=self._irrelevant())
        for key in ("method", "finish"):
            if (spec := getattr(self, key)) and spec.plugin:
                method_options = registry.options(spec.plugin)
                content[key] = {
                    "name": spec.name,
                    **{k: default for k, (_, default) in method_options.items()},
                    **spec.options,
                }
        return content

    @property
    def _settings_of_no_objective(self) -> set[str]:
        """Return the settings of a loss or a term that no objective has.

        They are left out, so that new settings do not change the fingerprint of older runs.
        """
        specs = self.objective_specs.values()
        uses = {
            "beta": any(s.loss == "npo" or not is_built_in(str(s.loss)) for s in specs),
            "distill": any(s.distill for s in specs),
            "empty_prompts": any(s.empty_prompts for s in specs),
        }
        return {key for key, is_used in uses.items() if not is_used}

    def _irrelevant(self) -> dict[str, Any]:
        """Return the settings without effect on this job. A resolved recipe leaves them out."""
        left_out: dict[str, Any] = dict.fromkeys(
            ("forget", "retain", "replace", "relearn"),
            self.unused_settings | self._settings_of_no_objective,
        )
        if isinstance(self.forget, list):
            left_out["forget"] = {"__all__": self.unused_settings | self._settings_of_no_objective}
        else:
            left_out["concepts"] = True
        if self.target != "clip":
            left_out["templates"] = True
        if not self.model_options:
            left_out["model_options"] = True
        if self.attack is not None and not self.attack.both_branches:
            left_out["attack"] = {"both_branches"}  # so that older runs keep their fingerprint
        unused_keys = {
            key
            for key in (*MEMORY, *ASIDE, *OPTIMISATION)
            if getattr(self.training, key) == TrainingSpec.model_fields[key].default
        }
        if unused_keys:  # new settings must not change the fingerprint of older runs
            left_out["training"] = unused_keys
        if self.target in PROMPTED:
            left_out["trainable"] = {"batchnorm"}
        else:
            left_out["generation"] = {"steps", "guidance", "batch_size", "precision"}
        return left_out

    @property
    def fingerprint(self) -> str:
        content = self.resolved()
        content.pop("save", None)  # it changes no number of the result
        content["training"] = {k: v for k, v in content["training"].items() if k not in ASIDE}
        return fingerprint(content)


def load(
    source: str | Path | dict[str, Any],
    overrides: typing.Sequence[str] = (),
    *,
    of_run_folder: bool = False,
) -> Recipe:
    """Load a recipe from a name, a path or a mapping, with `key.path=value` overrides.

    `memory` names a preset of recipes/memory_presets.py. It is no key of a recipe, but stands for
    several keys.

    of_run_folder: it is the recipe of a run that was begun, perhaps in another working folder or on
    another machine. So its prompt files and its suite to watch may be missing.

    Raises:
        UserError: The recipe has mistakes. The message lists all of them.
    """
    if isinstance(source, dict):
        content, where = dict(source), "the recipe"
    else:
        path = resources.find("pipelines", str(source))
        words = ", ".join(overrides)
        where = f"{path} with {words}" if 0 < len(overrides) < 4 and len(words) < 200 else str(path)
        content = {} if (content := read_yaml(path)) is None else content
        if not isinstance(content, dict):
            raise UserError(f"{path}: expected a mapping, found a {type(content).__name__}")
        content = migrate_recipe(content)
    for override in overrides:
        changes.apply(content, override)
    return validate(_with_preset(content, overrides), where, of_run_folder=of_run_folder)


def load_run(folder: Path) -> Recipe:
    """Load the recipe of a run folder, whose prompt files may be missing.

    Raises:
        UserError: The recipe has other mistakes. The message lists all of them.
    """
    return load(str(folder / "recipe.yaml"), of_run_folder=True)


def _with_preset(content: dict[str, Any], overrides: typing.Sequence[str]) -> dict[str, Any]:
    """Replace `memory: 8gb` by the settings of the preset.

    Settings of the recipe and of the overrides take precedence.
    """
    name = content.pop("memory", None)
    if name is None:
        return content
    if not isinstance(name, str):
        raise UserError(f"memory: expected the name of a preset, e.g. 24gb, found {quote(name)}")
    try:
        exact = MethodSpec.model_validate(content.get("method", {})).build().needs_fp32
    except (ValidationError, UserError, TypeError, ValueError):
        exact = False  # the check of the recipe reports what is wrong with the method
    try:
        return memory_presets.expand(
            content,
            name,
            needs_fp32=exact,
            deal=[s for s in ("training", "generation") if not _sets_batches(overrides, s)],
        )
    except ValueError as error:
        raise UserError(f"memory: {error}") from None


def _sets_batches(overrides: typing.Sequence[str], section: str) -> bool:
    """Whether an override sets the batch size or the micro-batches of a section."""
    own = (f"{section}.batch_size=", f"{section}.micro_batches=")
    return any(
        o.startswith(own) or (o.startswith(f"{section}=") and "batch" in o) for o in overrides
    )


def validate(content: dict[str, Any], where: str, *, of_run_folder: bool = False) -> Recipe:
    try:
        return Recipe.model_validate(content, context=OF_RUN_FOLDER if of_run_folder else None)
    except ValidationError as error:
        lines = [
            error_messages.explain(Recipe, item)
            for item in error.errors(include_url=False, include_context=False)
        ]
        raise UserError(mistakes_message(lines, where)) from None


def dump(recipe: Recipe, command: str) -> str:
    """Return the resolved recipe as YAML. The first line is the command that runs it."""
    return f"# {command}\n" + yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True)
