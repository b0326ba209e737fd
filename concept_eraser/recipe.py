"""Recipes: pydantic models <-> YAML. Every mistake is reported at once, each with its path.

A recipe is one flat file that names a point in the product of menus: which model, which part of it, what forget and
retain mean, how the two gradients become one step, which weights may move.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from concept_eraser import changes, mistakes, registry, resources
from concept_eraser.environment import fingerprint
from concept_eraser.errors import UserError, unknown_message
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
from concept_eraser.training import presets

CLIMBING = ("a", "ga", "a-d", "gdiff", "sa")  # names that promise ascent; the rules behind them take any loss


class Recipe(Strict):
    """One erasing job."""

    model: str = Field("tiny-sd", description="tiny-sd, a diffusers folder, a run folder or a hub id; for a classifier or a VAE the folder of a saved one")  # fmt: skip
    model_options: dict[str, float] = Field({}, description="options of the model's family: size of the pictures (sdxl, sd3, flux), guidance told in training (flux)")  # fmt: skip
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
    trainable: Trainable = Trainable()
    training: Training = Training()
    generation: Generation = Generation()

    @field_validator("forget", "retain", "replace", "method", "trainable", mode="before")
    @classmethod
    def _shorthand(cls, value: Any, info: Any) -> Any:
        """`method: munba`, `forget: tiny_star`, `trainable: all` stand for mappings with one entry."""
        key = changes.SHORT.get(info.field_name, "prompts")
        if key == "prompts" and value == "rest":
            return {"data": "rest"}
        if info.field_name == "forget" and isinstance(value, list):
            return changes.concepts(value)
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
        if value.name in CLIMBING and any(side.loss == "data" for side in _listed(forget)):
            raise ValueError(f"the method {value.name!r} climbs the forget loss, so as it stands it would train on what is to be forgotten; set forget.loss: ascent")  # fmt: skip
        name, options = registry.resolve("method", value.name, value.options)
        return MethodSpec(name=name, **options)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        method = registry.build("method", self.method.name, self.method.options)
        if self.retain is None and self.method.name != "weighted" and getattr(method, "needs_retain", True):
            raise ValueError(f"the method {self.method.name!r} needs a retain set; to forget without one use method: {{name: weighted, retain: 0}}")  # fmt: skip
        if method.targets is not None and self.target not in method.targets:
            raise ValueError(f"the method {self.method.name!r} works on {', '.join(method.targets)} only, since {method.why}; found target {self.target!r}")  # fmt: skip
        self._check_concepts()
        self._check_players(method)
        self._check_sides()
        if self.attack is not None and not method.needs_attack:
            raise ValueError(f"the method {self.method.name!r} has no lower-level problem to give `attack` to; use forum or adversarial")  # fmt: skip
        self._check_lora()
        self._check_negation()
        self._check_memory(method)
        if method.needs_fp32 and self.training.precision != "fp32":
            raise ValueError(f"the method {self.method.name!r} takes differences of gradients, which drown in the rounding of bf16; set training.precision: fp32")  # fmt: skip
        return self

    def _check_players(self, method: Any) -> None:
        """Raise ValueError where the method cannot combine the players; it may know two, and so one concept a step."""
        try:
            method.check_players(self.players)
        except ValueError as error:
            several = len(self.players) > len(self._cast(1))
            if several and hasattr(method, "direction") and _combines(method, self._cast(1)):
                raise ValueError(f"{error}; or ask one concept a step with concepts: rotate, which suits every method of two players") from None  # fmt: skip
            raise

    def _check_concepts(self) -> None:
        """Raise ValueError where a list of concepts asks for what is defined for one only."""
        several = len(self.forgotten)
        if several == 1:
            if self.concepts == "rotate":
                raise ValueError("concepts: rotate takes several concepts in turn; give forget as a list of them, or leave it out")  # fmt: skip
            return
        if self.target not in PROMPTED:
            raise ValueError(f"forget: a list of concepts is for prompts (target {' or '.join(PROMPTED)}); labelled data take several classes in one side, classes: [...], found target {self.target!r}")  # fmt: skip
        for name in ("replace", "attack", "histogram"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is defined for one concept, found {several} in forget; erase them one at a time and add the results with `concept-eraser merge`")  # fmt: skip
        for place, side in enumerate(self.forgotten):
            twin = next((i for i in range(place) if self.forgotten[i].prompts == side.prompts), None)
            if twin is not None:
                raise ValueError(f"forget: concepts {twin + 1} and {place + 1} have the same prompts; remove one of them")  # fmt: skip
        if self.concepts == "rotate" and self.training.steps < several:
            raise ValueError(f"concepts: rotate asks one concept a step, so {several} concepts need training.steps >= {several}, found {self.training.steps}")  # fmt: skip
        if self.concepts == "rotate" and self.method.options.get("every", 1) != 1:
            raise ValueError("method.every keeps a bargain for some steps, and concepts: rotate asks another concept at each; leave every at 1, or use concepts: players")  # fmt: skip

    def _check_lora(self) -> None:
        """Raise ValueError where low-rank factors are asked of what has none."""
        if self.trainable.lora is None:
            return
        if self.target not in PROMPTED:
            raise ValueError(f"trainable.lora: only the targets {' and '.join(PROMPTED)} train a LoRA, found target {self.target!r}")  # fmt: skip
        if self.trainable.reinitialise is not None:
            raise ValueError("trainable: reinitialise draws weights anew, which a LoRA leaves alone; give one of the two")  # fmt: skip
        if any(side.elastic for side in self.sides.values()):
            raise ValueError("elastic pulls weights back to what they were, and a LoRA's factors start without a meaning of their own; train the weights themselves, or leave elastic out")  # fmt: skip

    def _check_negation(self) -> None:
        """Raise ValueError where there is no vector of one task to turn round."""
        if self.trainable.negate is None:
            return
        wrong = [f"{concept_player(i)}.loss: {side.loss}" for i, side in enumerate(self.forgotten) if side.loss != "data"]  # fmt: skip
        wrong += [f"a {name} side" for name in ("retain", "replace", "attack", "histogram") if getattr(self, name) is not None]  # fmt: skip
        wrong += ["batchnorm: train"] if self.trainable.batchnorm == "train" else []
        wrong += ["watch, which looks while the model still learns the concept"] if self.watch is not None else []
        if wrong:
            raise ValueError(f"trainable.negate turns round what training on the concept alone did (forget.loss: data, method: {{name: weighted, retain: 0}}); found {'; '.join(wrong)}")  # fmt: skip

    def _check_memory(self, method: Any) -> None:
        """Raise ValueError where settings of memory say nothing about the target, or contradict others."""
        asked = [key for key in MEMORY if getattr(self.training, key) != Training.model_fields[key].default]
        if asked and self.target not in PROMPTED:
            raise ValueError(f"training: {', '.join(asked)} says nothing about the target {self.target!r}; only pipelines have parts to move or to hold in bf16 ({', '.join(PROMPTED)})")  # fmt: skip
        if asked and hasattr(method, "edit"):
            raise ValueError(f"training: the method {self.method.name!r} edits in one go and does not hear {', '.join(asked)}; leave it out")  # fmt: skip
        if "frozen" in asked and self.target != "denoiser":
            raise ValueError("training.frozen: bf16 holds the weights of the denoiser that are not trained, so it needs target: denoiser")  # fmt: skip
        if "frozen" in asked and self.training.precision != "bf16":
            raise ValueError("training.frozen: bf16 needs training.precision: bf16, since the frozen weights have no more digits to give")  # fmt: skip
        if "frozen" in asked and self.generation.precision != "bf16":
            raise ValueError("training.frozen: bf16 needs generation.precision: bf16, since the pictures are made by the model as it is held")  # fmt: skip
        if self.watch is not None and ({"offload", "frozen"} & set(asked)):
            raise ValueError(f"watch draws whole pictures between the steps, which training.{asked[-1]} takes the parts or the digits from; leave out one of the two")  # fmt: skip

    def _check_sides(self) -> None:
        """Raise ValueError where a side does not fit the target."""
        allowed = LOSS_NAMES[self.target]
        for name, side in sorted(self.sides.items(), key=lambda item: item[0] == "retain"):  # the forgotten first
            prompted = self.target in PROMPTED
            if prompted != (side.prompts is not None):
                raise ValueError(f"{name}: the target {self.target!r} needs {'prompts' if prompted else 'data, labelled examples'}")  # fmt: skip
            if side.loss not in allowed:
                raise ValueError(f"{name}.loss: {unknown_message(f'loss of target {self.target!r}', side.loss, allowed)}")  # fmt: skip
            self._check_settings(name, side)
            if self.target in ("clip", "classifier") and side.loss == "anchor" and not isinstance(side.anchor, str):
                raise ValueError(f"{name}: the loss 'anchor' needs an anchor: the class to say instead, by name or number")  # fmt: skip
        if self.forgotten[0].data == "rest":
            raise ValueError("forget: data: rest is for the retain side; say what is to be forgotten")
        if self.attack is not None and self.target != "denoiser":
            raise ValueError(f"attack: the target {self.target!r} has no prompt embedding to attack; use the target 'denoiser'")  # fmt: skip
        if self.histogram is not None and self.target not in ("denoiser", "vae"):
            raise ValueError(f"histogram: the target {self.target!r} draws no samples that a judge could look at; use denoiser or vae")  # fmt: skip
        if self.watch is not None and self.target not in PROMPTED:
            raise ValueError(f"watch: the suites of prompts do not apply to the target {self.target!r}")

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
        return self._cast(len(self.forgotten))

    @property
    def players(self) -> tuple[str, ...]:
        """The players of one step, in the order the methods expect: of concepts in turn there is one, `forget`."""
        return self.cast if self.concepts == "players" else self._cast(1)

    def _cast(self, concepts: int) -> tuple[str, ...]:
        present = [name for name in PLAYERS if getattr(self, name) is not None]
        return tuple(one for name in present for one in (map(concept_player, range(concepts)) if name == "forget" else [name]))  # fmt: skip

    def resolved(self) -> dict[str, Any]:
        """Everything spelled out, defaults and method options included, ready for YAML."""
        content = self.model_dump(mode="json", exclude_none=True, exclude=self._irrelevant())
        known = registry.options(registry.load("method", self.method.name))
        content["method"] = {"name": self.method.name, **{k: default for k, (_, default) in known.items()}, **self.method.options}  # fmt: skip
        return content

    def _check_settings(self, name: str, side: Side) -> None:
        """Raise ValueError where a side is given a setting that says nothing about the target."""
        idle = self._idle & side.model_fields_set
        if self.target == "vae" and side.anchor is not None:
            idle = {*idle, "anchor"}
        changed = [key for key in sorted(idle) if getattr(side, key) != Side.model_fields[key].get_default(call_default_factory=True)]  # fmt: skip
        if changed:
            raise ValueError(f"{name}: {', '.join(changed)} says nothing about the target {self.target!r}")

    @property
    def _idle(self) -> set[str]:
        """Settings of a side that say nothing about this target."""
        of_prompts = {"eta", "images", "noised", "n", "timesteps", "neutral", "tokens", "elastic"}
        numbers = {"vae": {"l1", "distill"}, "classifier": {"kl"}, "clip": {"kl"}}.get(self.target, {"kl", "l1", "distill"})  # fmt: skip
        numbers |= set() if "npo" in LOSS_NAMES[self.target] else {"beta"}
        if self.target == "text_encoder":
            numbers |= {"neutral", "tokens", "elastic"}
        return {"options", *numbers} if self.target in PROMPTED else of_prompts | numbers

    @property
    def _unasked(self) -> set[str]:
        """Settings of a loss or a term that no side has: left out, so that a run keeps the fingerprint it had before them."""
        sides = self.sides.values()
        asked = {"beta": any(s.loss == "npo" for s in sides), "distill": any(s.distill for s in sides)}
        return {key for key, wanted in asked.items() if not wanted}

    def _irrelevant(self) -> dict[str, Any]:
        """Settings that say nothing about this job, so that they are not spelled out."""
        left_out: dict[str, Any] = dict.fromkeys(("forget", "retain", "replace"), self._idle | self._unasked)
        if isinstance(self.forget, list):
            left_out["forget"] = {"__all__": self._idle | self._unasked}
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


def _combines(method: Any, players: tuple[str, ...]) -> bool:
    try:
        method.check_players(players)
    except ValueError:
        return False
    return True


def load(source: str | Path | dict[str, Any], overrides: typing.Sequence[str] = ()) -> Recipe:
    """A recipe from a name, a path or a mapping, with `key.path=value` overrides. Raises UserError with every mistake.

    `memory`, a preset of training/presets.py, is no key of a recipe but stands for several of them.
    """
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
        changes.apply(content, override)
    return validate(_with_preset(content, overrides), where)


def _with_preset(content: dict[str, Any], overrides: typing.Sequence[str]) -> dict[str, Any]:
    """`memory: 8gb` spelled out as the settings it stands for; what the recipe or the overrides say themselves wins."""
    name = content.pop("memory", None)
    if name is None:
        return content
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
        lines = [mistakes.explain(Recipe, item) for item in error.errors()]
        many = f"{len(lines)} mistakes in {where}" if len(lines) > 1 else f"a mistake in {where}"
        raise UserError(f"{many}:" + "".join(f"\n  {line}" for line in lines)) from None


def dump(recipe: Recipe, command: str) -> str:
    """The resolved recipe as YAML, opening with the command that runs it."""
    return f"# {command}\n" + yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True)
