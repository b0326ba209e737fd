"""Recipes: pydantic models <-> YAML. Every mistake is reported at once, each with its path.

A recipe is one flat file that names a point in the product of menus: which model, which part of it, what forget and
retain mean, how the two gradients become one step, which weights may move.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from concept_eraser import registry, resources
from concept_eraser.environment import fingerprint
from concept_eraser.errors import UserError, unknown_message
from concept_eraser.sections import (
    LOSS_NAMES,
    PLAYERS,
    PROMPTED,
    Attack,
    Generation,
    Histogram,
    MethodSpec,
    Side,
    Strict,
    Trainable,
    Training,
    Watch,
)

CLIMBING = ("a", "ga", "a-d", "gdiff", "sa")  # names that promise ascent; the rules behind them take any loss


class Recipe(Strict):
    """One erasing job."""

    model: str = Field("tiny-sd", description="tiny-sd, a diffusers folder, a run folder or a hub id; for a classifier or a VAE the folder of a saved one")  # fmt: skip
    model_options: dict[str, float] = Field({}, description="options of the model's family: size of the pictures (sdxl, sd3, flux), guidance told in training (flux)")  # fmt: skip
    target: Literal["denoiser", "text_encoder", "clip", "vae", "classifier"] = Field("denoiser", description="which part is trained")  # fmt: skip
    templates: list[str] = Field(["a photo of a {}"], description="target clip: prompts of the classes, {} stands for the name")  # fmt: skip
    forget: Side
    retain: Side | None = None
    replace: Side | None = Field(None, description="what the forgotten prompts should show instead, as a player of its own (UNO with its anchor term)")  # fmt: skip
    attack: Attack | None = Field(None, description="the lower-level problem of forum and adversarial")
    histogram: Histogram | None = Field(None, description="for uno-hat, uno-s-hat, s-hat and h")
    watch: Watch | None = Field(None, description="look at the concept's share while training")
    method: MethodSpec = MethodSpec()
    trainable: Trainable = Trainable()
    training: Training = Training()
    generation: Generation = Generation()

    @field_validator("forget", "retain", "replace", "method", "trainable", mode="before")
    @classmethod
    def _shorthand(cls, value: Any, info: Any) -> Any:
        """`method: munba`, `forget: tiny_star`, `trainable: all` stand for mappings with one entry."""
        key = {"method": "name", "trainable": "select"}.get(info.field_name, "prompts")
        if key == "prompts" and value == "rest":
            return {"data": "rest"}
        if isinstance(value, str) or (key == "prompts" and isinstance(value, list)):
            return {key: value}
        return value

    @field_validator("method")
    @classmethod
    def _known_method(cls, value: MethodSpec, info: Any) -> MethodSpec:
        wrong = registry.problems("method", value.name, value.options)
        if wrong:
            raise ValueError("; ".join(wrong))
        forget = info.data.get("forget")
        if value.name in CLIMBING and forget is not None and forget.loss == "data":
            raise ValueError(f"the method {value.name!r} climbs the forget loss, so as it stands it would train on what is to be forgotten; set forget.loss: ascent")  # fmt: skip
        name, options = registry.resolve("method", value.name, value.options)
        return MethodSpec(name=name, **options)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        method = registry.build("method", self.method.name, self.method.options)
        if self.retain is None and self.method.name != "weighted":
            raise ValueError(f"the method {self.method.name!r} needs a retain set; to forget without one use method: {{name: weighted, retain: 0}}")  # fmt: skip
        if method.targets is not None and self.target not in method.targets:
            raise ValueError(f"the method {self.method.name!r} works on {', '.join(method.targets)} only, since it needs a likelihood of labels; found target {self.target!r}")  # fmt: skip
        method.check_players(self.players)
        self._check_sides()
        if self.attack is not None and not method.needs_attack:
            raise ValueError(f"the method {self.method.name!r} has no lower-level problem to give `attack` to; use forum or adversarial")  # fmt: skip
        self._check_lora()
        if method.needs_fp32 and self.training.precision != "fp32":
            raise ValueError(f"the method {self.method.name!r} takes differences of gradients, which drown in the rounding of bf16; set training.precision: fp32")  # fmt: skip
        return self

    def _check_lora(self) -> None:
        """Raise ValueError where low-rank factors are asked of what has none."""
        if self.trainable.lora is None:
            return
        if self.target not in PROMPTED:
            raise ValueError(f"trainable.lora: only the targets {' and '.join(PROMPTED)} train a LoRA, found target {self.target!r}")  # fmt: skip
        if self.trainable.reinitialise is not None:
            raise ValueError("trainable: reinitialise draws weights anew, which a LoRA leaves alone; give one of the two")  # fmt: skip

    def _check_sides(self) -> None:
        """Raise ValueError where a side does not fit the target."""
        allowed = LOSS_NAMES[self.target]
        for name in ("forget", "retain", "replace"):
            side: Side | None = getattr(self, name)
            if side is None:
                continue
            prompted = self.target in PROMPTED
            if prompted != (side.prompts is not None):
                raise ValueError(f"{name}: the target {self.target!r} needs {'prompts' if prompted else 'data, labelled examples'}")  # fmt: skip
            if side.loss not in allowed:
                raise ValueError(f"{name}.loss: {unknown_message(f'loss of target {self.target!r}', side.loss, allowed)}")  # fmt: skip
            self._check_settings(name, side)
            if self.target in ("clip", "classifier") and side.loss == "anchor" and not isinstance(side.anchor, str):
                raise ValueError(f"{name}: the loss 'anchor' needs an anchor: the class to say instead, by name or number")  # fmt: skip
        if self.forget.data == "rest":
            raise ValueError("forget: data: rest is for the retain side; say what is to be forgotten")
        if self.attack is not None and self.target != "denoiser":
            raise ValueError(f"attack: the target {self.target!r} has no prompt embedding to attack; use the target 'denoiser'")  # fmt: skip
        if self.histogram is not None and self.target not in ("denoiser", "vae"):
            raise ValueError(f"histogram: the target {self.target!r} draws no samples that a judge could look at; use denoiser or vae")  # fmt: skip
        if self.watch is not None and self.target not in PROMPTED:
            raise ValueError(f"watch: the suites of prompts do not apply to the target {self.target!r}")

    @property
    def players(self) -> tuple[str, ...]:
        """The sides in the order the methods expect."""
        return tuple(name for name in PLAYERS if getattr(self, name) is not None)

    def resolved(self) -> dict[str, Any]:
        """Everything spelled out, defaults and method options included, ready for YAML."""
        content = self.model_dump(mode="json", exclude_none=True, exclude=self._irrelevant())
        known = registry.options(registry.load("method", self.method.name))
        content["method"] = {"name": self.method.name, **{k: default for k, (_, default) in known.items()}, **self.method.options}  # fmt: skip
        return content

    def _check_settings(self, name: str, side: Side) -> None:
        """Raise ValueError where a side is given a setting that says nothing about the target."""
        idle = self._irrelevant()[name] & side.model_fields_set
        if self.target == "vae" and side.anchor is not None:
            idle = {*idle, "anchor"}
        changed = [key for key in sorted(idle) if getattr(side, key) != Side.model_fields[key].get_default(call_default_factory=True)]  # fmt: skip
        if changed:
            raise ValueError(f"{name}: {', '.join(changed)} says nothing about the target {self.target!r}")

    def _irrelevant(self) -> dict[str, Any]:
        """Settings that say nothing about this target, so that they are not spelled out."""
        of_prompts = {"eta", "images", "noised", "n", "timesteps"}
        numbers = {"vae": {"l1"}, "classifier": {"kl"}, "clip": {"kl"}}.get(self.target, {"kl", "l1"})
        per_side = {"options", *numbers} if self.target in PROMPTED else of_prompts | numbers
        left_out: dict[str, Any] = dict.fromkeys(("forget", "retain", "replace"), per_side)
        if self.target != "clip":
            left_out["templates"] = True
        if not self.model_options:
            left_out["model_options"] = True
        if self.target in PROMPTED:
            left_out["trainable"] = {"batchnorm"}
        else:
            left_out["generation"] = {"steps", "guidance", "batch_size", "precision"}
        return left_out

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.resolved())


def load(source: str | Path | dict[str, Any], overrides: typing.Sequence[str] = ()) -> Recipe:
    """A recipe from a name, a path or a mapping, with `key.path=value` overrides. Raises UserError with every mistake."""
    if isinstance(source, dict):
        content, where = dict(source), "the recipe"
    else:
        path = resources.find("pipelines", str(source))
        where = str(path)
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, dict):
            raise UserError(f"{path}: expected a mapping, found a {type(content).__name__}")
    for override in overrides:
        _override(content, override)
    return validate(content, where)


def validate(content: dict[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        many = f"{len(lines)} mistakes in {where}" if len(lines) > 1 else f"a mistake in {where}"
        raise UserError(f"{many}:" + "".join(f"\n  {line}" for line in lines)) from None


def _override(content: dict[str, Any], text: str) -> None:
    """Apply one `training.lr=1e-4` to a mapping, in place."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"cannot read the override {text!r}; write key.path=value, e.g. training.lr=1e-4")
    *parents, last = key.strip().split(".")
    place = content
    for name in parents:
        inner = place.get(name)
        if inner is None:
            inner = {}
        elif inner == "rest":
            inner = {"data": "rest"}
        elif isinstance(inner, str):  # the shorthand `method: munba`
            inner = {{"method": "name", "trainable": "select"}.get(name, "prompts"): inner}
        if not isinstance(inner, dict):
            raise UserError(f"cannot set {key}: {name} is {inner!r}, not a mapping")
        place[name] = place = dict(inner)
    place[last] = yaml.safe_load(value) if value else None


def _explain(item: Any) -> str:
    """One line for one of pydantic's errors: path, what is wrong, what was found."""
    path = ".".join(str(part) for part in item["loc"] if part not in ("str", "list[str]", "dict[str,str]"))
    if item["type"] == "extra_forbidden":
        return f"{path}: {unknown_message('key', str(item['loc'][-1]), _fields(item['loc'][:-1]))}"
    if item["type"] == "missing":
        return f"{path}: required, not given"
    message = item["msg"].removeprefix("Value error, ")
    shown = (
        ""
        if isinstance(item["input"], dict | BaseModel) or item["type"] == "value_error"
        else f", found {item['input']!r}"
    )
    plain = message if message[:2].isupper() else message[0].lower() + message[1:]  # FORUM stays FORUM
    return f"{path + ': ' if path else ''}{plain}{shown}"


def _fields(location: tuple) -> list[str]:
    """The keys allowed at a path of the recipe."""
    model: Any = Recipe
    for name in location:
        annotation = model.model_fields[name].annotation
        model = next((a for a in (annotation, *typing.get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)), Recipe)  # fmt: skip
    return list(model.model_fields)


def dump(recipe: Recipe, command: str) -> str:
    """The resolved recipe as YAML, opening with the command that runs it."""
    return f"# {command}\n" + yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True)
