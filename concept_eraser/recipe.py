"""Recipes: pydantic models <-> YAML. Every mistake is reported at once, each with its path.

A recipe is one flat file that names a point in the product of menus: which model, which part of it, what forget and
retain mean, how the two gradients become one step, which weights may move.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from concept_eraser import changes, consistency, limits, mistakes, registry, resources
from concept_eraser.environment import fingerprint
from concept_eraser.errors import UserError, mistakes_message, shown, unknown_message
from concept_eraser.sections import (
    ASIDE,
    LOSS_NAMES,
    MEMORY,
    PLAYERS,
    PROMPTED,
    Attack,
    Forget,
    Generation,
    Histogram,
    MethodSpec,
    Side,
    Strict,
    Trainable,
    Training,
    Watch,
    concept_player,
)
from concept_eraser.storage.readers import read_yaml
from concept_eraser.training import presets

CLOSED = ("mace-cfr", "rece", "uce")  # closed forms of the cross-attention, which may follow a training
CLIMBING = ("a", "ga", "a-d", "gdiff", "sa")  # names that promise ascent; the rules behind them take any loss


class Recipe(Strict):
    """One erasing job."""

    model: str = Field("tiny-sd", description="tiny-sd, a diffusers folder, a run folder or a hub id; for a classifier or a VAE the folder of a saved one")  # fmt: skip
    model_options: dict[str, Annotated[float, Field(ge=0, le=limits.MODEL_OPTION)]] = Field(
        {},
        description="options of the model's family: size of the pictures (sdxl, sd3, flux), guidance told in training (flux)",
    )
    target: Literal["denoiser", "text_encoder", "clip", "vae", "classifier"] = Field("denoiser", description="which part is trained")  # fmt: skip
    templates: list[str] = Field(["a photo of a {}"], description="target clip: prompts of the classes, {} stands for the name")  # fmt: skip
    forget: Forget = Field(description="what is to be forgotten: one side, or a list of them, one a concept")
    concepts: Literal["players", "rotate"] = Field("players", description="several concepts: each a player of its own, or one concept a step in turn")  # fmt: skip
    retain: Side | None = None
    replace: Side | None = Field(None, description="what the forgotten prompts should show instead, as a player of its own (UNO with its anchor term)")  # fmt: skip
    attack: Attack | None = Field(None, description="the lower-level problem of forum and adversarial")
    histogram: Histogram | None = Field(None, description="for uno-hat, uno-s-hat, s-hat and h")
    watch: Watch | None = Field(None, description="look at the concept's share while training")
    method: MethodSpec = MethodSpec()
    finish: MethodSpec | None = Field(None, description="after the training, a closed form on the same prompts and anchors: uce, rece or mace-cfr; a LoRA is merged before it, and whole weights are written")  # fmt: skip
    trainable: Trainable = Trainable()
    training: Training = Training()
    generation: Generation = Generation()

    @field_validator("forget", "retain", "replace", "method", "finish", "trainable", mode="before")
    @classmethod
    def _shorthand(cls, value: Any, info: Any) -> Any:
        """`method: munba`, `forget: tiny_star`, `trainable: all` stand for mappings with one entry."""
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
        if value is None:
            return None
        if info.field_name == "finish" and value.name not in CLOSED:
            raise ValueError(f"{unknown_message('closed form', value.name, CLOSED)}; finish: none leaves it out")
        wrong = registry.problems("method", value.name, value.options)
        if wrong:
            raise ValueError("; ".join(wrong))
        forget = info.data.get("forget")
        if value.name in CLIMBING and any(side.loss == "data" for side in _listed(forget)):
            raise ValueError(f"the method {value.name!r} climbs the forget loss, so as it stands it would train on what is to be forgotten; set forget.loss: ascent")  # fmt: skip
        name, options = registry.resolve("method", value.name, value.options)
        return MethodSpec(name=name, **options)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        consistency.check(self, registry.build("method", self.method.name, self.method.options))
        return self

    @property
    def forgotten(self) -> list[Side]:
        """The concepts to forget, mostly one."""
        return _listed(self.forget)

    @property
    def sides(self) -> dict[str, Side]:
        """Every side by its player's name: retain, forget, forget.2, ..., replace."""
        found = {name: getattr(self, name, None) for name in self.cast}
        found |= {concept_player(i): side for i, side in enumerate(self.forgotten)}
        return {name: side for name, side in found.items() if isinstance(side, Side)}

    @property
    def cast(self) -> tuple[str, ...]:
        """All players in the order the methods expect, also the concepts that wait for their turn."""
        return self.acting(len(self.forgotten))

    @property
    def players(self) -> tuple[str, ...]:
        """The players of one step, in the order the methods expect: of concepts in turn there is one, `forget`."""
        return self.cast if self.concepts == "players" else self.acting(1)

    def acting(self, concepts: int) -> tuple[str, ...]:
        """The players in the order the methods expect, with so many concepts among them."""
        present = [name for name in PLAYERS if getattr(self, name) is not None]
        return tuple(one for name in present for one in (map(concept_player, range(concepts)) if name == "forget" else [name]))  # fmt: skip

    def resolved(self) -> dict[str, Any]:
        """Everything spelled out, defaults and method options included, ready for YAML."""
        content = self.model_dump(mode="json", exclude_none=True, exclude=self._irrelevant())
        for key in ("method", "finish"):
            if spec := getattr(self, key):
                known = registry.options(registry.load("method", spec.name))
                content[key] = {"name": spec.name, **{k: default for k, (_, default) in known.items()}, **spec.options}
        return content

    @property
    def idle(self) -> set[str]:
        """Settings of a side that say nothing about this target."""
        of_prompts = {"eta", "images", "noised", "n", "timesteps", "neutral", "tokens", "elastic", "empty_prompts"}
        numbers = {"vae": {"l1", "distill"}, "classifier": {"kl"}, "clip": {"kl"}}.get(self.target, {"kl", "l1", "distill"})  # fmt: skip
        numbers |= set() if "npo" in LOSS_NAMES[self.target] else {"beta"}
        if self.target == "text_encoder":
            numbers |= {"neutral", "tokens", "elastic", "empty_prompts"}
        return {"options", *numbers} if self.target in PROMPTED else of_prompts | numbers

    @property
    def _unasked(self) -> set[str]:
        """Settings of a loss or a term that no side has: left out, so that a run keeps the fingerprint it had before them."""
        sides = self.sides.values()
        asked = {"beta": any(s.loss == "npo" for s in sides), "distill": any(s.distill for s in sides), "empty_prompts": any(s.empty_prompts for s in sides)}  # fmt: skip
        return {key for key, wanted in asked.items() if not wanted}

    def _irrelevant(self) -> dict[str, Any]:
        """Settings that say nothing about this job, so that they are not spelled out."""
        left_out: dict[str, Any] = dict.fromkeys(("forget", "retain", "replace"), self.idle | self._unasked)
        if isinstance(self.forget, list):
            left_out["forget"] = {"__all__": self.idle | self._unasked}
        else:
            left_out["concepts"] = True
        if self.target != "clip":
            left_out["templates"] = True
        if not self.model_options:
            left_out["model_options"] = True
        unused = {key for key in (*MEMORY, *ASIDE) if getattr(self.training, key) == Training.model_fields[key].default}
        if unused:  # so that a run keeps the fingerprint it had before there were any
            left_out["training"] = unused
        if self.target in PROMPTED:
            left_out["trainable"] = {"batchnorm"}
        else:
            left_out["generation"] = {"steps", "guidance", "batch_size", "precision"}
        return left_out

    @property
    def fingerprint(self) -> str:
        content = self.resolved()
        content["training"] = {k: v for k, v in content["training"].items() if k not in ASIDE}
        return fingerprint(content)


def _listed(forget: Any) -> list[Side]:
    return forget if isinstance(forget, list) else [forget] if forget is not None else []


def load(source: str | Path | dict[str, Any], overrides: typing.Sequence[str] = ()) -> Recipe:
    """A recipe from a name, a path or a mapping, with `key.path=value` overrides. Raises UserError with every mistake.

    `memory`, a preset of training/presets.py, is no key of a recipe but stands for several of them.
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
    for override in overrides:
        changes.apply(content, override)
    return validate(_with_preset(content, overrides), where)


def _with_preset(content: dict[str, Any], overrides: typing.Sequence[str]) -> dict[str, Any]:
    """`memory: 8gb` spelled out as the settings it stands for; what the recipe or the overrides say themselves wins."""
    name = content.pop("memory", None)
    if name is None:
        return content
    if not isinstance(name, str):
        raise UserError(f"memory: expected the name of a preset, e.g. 24gb, found {shown(name)}")
    try:
        spec = MethodSpec.model_validate({"name": m} if isinstance(m := content.get("method", {}), str) else m)
        exact = registry.build("method", spec.name, spec.options).needs_fp32
    except (ValidationError, UserError, TypeError, ValueError):
        exact = False  # the recipe's own check will say what is wrong with the method
    try:
        return presets.expand(
            content, name, needs_fp32=exact, deal=[s for s in ("training", "generation") if not _deals(overrides, s)]
        )
    except ValueError as error:
        raise UserError(f"memory: {error}") from None


def _deals(overrides: typing.Sequence[str], section: str) -> bool:
    """Whether an override says how much of a section is done at once."""
    own = (f"{section}.batch_size=", f"{section}.micro_batches=")
    return any(o.startswith(own) or (o.startswith(f"{section}=") and "batch" in o) for o in overrides)


def validate(content: dict[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        lines = [mistakes.explain(Recipe, item) for item in error.errors(include_url=False, include_context=False)]
        raise UserError(mistakes_message(lines, where)) from None


def dump(recipe: Recipe, command: str) -> str:
    """The resolved recipe as YAML, opening with the command that runs it."""
    return f"# {command}\n" + yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True)
