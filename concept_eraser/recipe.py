"""Recipes: pydantic models <-> YAML. Every mistake is reported at once, each with its path.

A recipe is one flat file that names a point in the product of menus: which model, which part of it, what forget and
retain mean, how the two gradients become one step, which weights may move.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from concept_eraser import registry, resources
from concept_eraser.environment import fingerprint
from concept_eraser.errors import UserError, unknown_message

# Names of the losses, repeated here because importing them imports torch; a test compares them.
LOSS_NAMES = {
    "denoiser": ("anchor", "ascent", "data", "distill", "esd", "relabel"),
    "text_encoder": ("anchor", "ascent", "data", "distill", "relabel"),
    "clip": ("anchor", "ascent", "boundary", "data", "distill", "relabel"),
    "vae": ("anchor", "ascent", "data", "distill"),
    "classifier": ("anchor", "ascent", "boundary", "data", "distill", "relabel"),
}
PROMPTED = ("denoiser", "text_encoder")  # targets whose sides are prompts; those of the others are labelled data
ANCHORED = ("anchor", "relabel")
WITH_TARGET = ("data", "ascent", "relabel")
PLAYERS = ("retain", "forget", "replace", "histogram", "attack")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class Side(_Strict):
    """One player: which prompts (or which labelled data), which loss, and where the images come from."""

    prompts: str | list[str] | None = Field(None, description="a prompt set by name or path, or a list of prompts")
    data: str | None = Field(None, description="labelled data: a set of datasets/ by name, a folder with one subfolder a class, an .npz with x and y; or rest: what the forget side leaves of its data")  # fmt: skip
    options: dict[str, Any] = Field({}, description="options of a named data set")
    classes: list[str | int] | None = Field(None, description="labelled data: all examples of these classes, by name or number")  # fmt: skip
    share: float | None = Field(None, gt=0, le=1, description="labelled data: a random share of the examples, drawn with generation.seed")  # fmt: skip
    indices: list[int] | str | None = Field(None, description="labelled data: these examples, by position: a list, or a file with one a line")  # fmt: skip
    l1: float = Field(0.0, ge=0, description="target classifier or clip: adds l1 x sum |weights| to the loss (l1-sparse: 1e-5 to 1e-3)")  # fmt: skip
    kl: float = Field(1.0, ge=0, description="target vae: weight of the KL term (1: the evidence bound)")
    loss: str = Field("data", description="data, ascent, anchor, esd, distill or relabel")
    anchor: str | dict[str, str] | None = Field(None, description="what to show instead: a text that may use the prompt's fields, e.g. 'a {color} square', or the fields to replace in it, e.g. {shape: square}")  # fmt: skip
    teacher: Literal["frozen", "current"] = Field("frozen", description="whose prediction is the target: the model before training (ours) or the current one (MUNBa's public code)")  # fmt: skip
    eta: float = Field(1.0, ge=0, description="negative guidance of the loss 'esd' (1.0: the paper)")
    scale: float = Field(1.0, gt=0, description="factor of this side's loss")
    images: str = Field("generate", description="generate (by the model itself), free (no images: latents sampled on the fly), or a folder of images with captions")  # fmt: skip
    noised: Literal["own", "anchor"] | None = Field(None, description="whose images are noised to x_t: those of the prompt or of its anchor (default: the loss's; relabel: anchor, all others: own)")  # fmt: skip
    n: int = Field(400, ge=1, description="how many images to generate (MUNBa: about 400 a side)")
    timesteps: tuple[int, int] = Field((0, 1000), description="range of diffusion time steps this loss is asked at")

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        allowed = {name for names in LOSS_NAMES.values() for name in names}
        if value not in allowed:
            raise ValueError(unknown_message("loss", value, allowed))
        return value

    @field_validator("anchor", mode="before")
    @classmethod
    def _class_by_number(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("prompts")
    @classmethod
    def _known_prompts(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, str):
            resources.find("prompts", value)
        elif value is not None and not value:
            raise ValueError("the list of prompts is empty; give it at least one prompt")
        return value

    @field_validator("timesteps")
    @classmethod
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] < value[1] <= 1000:
            raise ValueError(f"expected [low, high] with 0 <= low < high <= 1000, found {list(value)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Side:
        if (self.prompts is None) == (self.data is None):
            raise ValueError("give either prompts (for a text-to-image model) or data (labelled examples)" + (", not both" if self.prompts else ""))  # fmt: skip
        if self.data == "rest" and (self.classes or self.share or self.indices or self.options):
            raise ValueError(
                "data: rest is all that the forget side leaves; it takes no classes, share, indices or options"
            )
        if self.data is not None:
            return self
        if self.classes is not None or self.share is not None or self.indices is not None or self.options:
            raise ValueError("classes, share, indices and options belong to labelled data; give `data`, not prompts")
        if self.loss in ANCHORED and not self.anchor:
            raise ValueError(
                f"the loss {self.loss!r} needs an anchor: what to show instead, e.g. anchor: 'a person' or anchor: {{shape: circle}}"
            )
        if self.noised == "anchor" and not self.anchor:
            raise ValueError("noised: anchor needs an anchor")
        if self.images == "free" and self.loss in WITH_TARGET:
            raise ValueError(f"the loss {self.loss!r} needs images, so images: free is not possible; use anchor, esd or distill")  # fmt: skip
        return self


class Attack(_Strict):
    """An adversary inside the training: an offset of the forgotten prompts' embedding that wants the concept back."""

    decay: float = Field(1e-4, ge=0, description="c in the attack's loss, the training loss on the forgotten images + c/2 ||offset||^2")  # fmt: skip
    n: int = Field(400, ge=1, description="how many images of the forgotten prompts to generate for it")


class Histogram(_Strict):
    """A judge inside the training: the share of samples in which it sees the concept, as a loss (UNO's hat versions)."""

    concept: dict[str, str] = Field(description="attribute: value, e.g. {shape: star}")
    judge: str = Field("tiny", description="a judge by name; for a VAE the folder of a saved classifier")
    alpha: float = Field(1e-8, gt=0, lt=0.5, description="share of samples that may show the concept (UNO: 1e-8)")
    timesteps: tuple[int, int] = Field((0, 500), description="range of diffusion time steps; one-step samples from pure noise show nothing")  # fmt: skip

    @field_validator("concept")
    @classmethod
    def _one(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) != 1:
            raise ValueError(f"expected one attribute and its value, e.g. {{shape: star}}, found {value}")
        return value


class Watch(_Strict):
    """Look at the concept's share while training: after how many steps and seconds is it gone?"""

    suite: str = Field(description="the evaluation suite whose concept, judge, sampler and prompts are used")
    group: str = "direct"
    every: int = Field(10, ge=1, description="steps between two looks")
    n: int = Field(50, ge=2, description="pictures a look")
    below: float = Field(0.02, gt=0, lt=1, description="gone means a share below this (UNO: 0.02); the looks then end")

    @field_validator("suite")
    @classmethod
    def _known_suite(cls, value: str) -> str:
        resources.find("eval", value)
        return value


class MethodSpec(BaseModel):
    """A method of methods/ by name, with its options."""

    model_config = ConfigDict(extra="allow")
    name: str = "munba"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Trainable(_Strict):
    """Which weights may move."""

    select: str = Field("all", description="see `concept-eraser list selections`, or re:<regular expression>")
    batchnorm: Literal["frozen", "train"] = Field("frozen", description="classifier, vae: keep the running statistics (ours), or use and update the batch's")  # fmt: skip

    saliency: float | None = Field(None, gt=0, lt=1, description="only this share of the selected weights moves: those with the largest |gradient| of the forget loss (SalUn: 0.5)")  # fmt: skip

    @field_validator("select")
    @classmethod
    def _known_selection(cls, value: str) -> str:
        from concept_eraser.training.parameters import problem

        wrong = problem(value)
        if wrong:
            raise ValueError(wrong)
        return value


class Training(_Strict):
    """How long, how fast, how exact."""

    steps: int = Field(200, ge=1)
    batch_size: int = Field(16, ge=1, description="examples of each side in a micro-batch")
    micro_batches: int = Field(1, ge=1, description="micro-batches accumulated before the gradients are combined")
    lr: float = Field(1e-4, gt=0)
    warmup: int = Field(0, ge=0, description="steps of linear warm-up")
    decay: Literal["none", "linear"] = Field(
        "none", description="linear: the learning rate falls to 0 at the last step"
    )
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    weight_decay: float = Field(0.0, ge=0)
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast; weights stay in fp32")
    seed: int = Field(0, ge=0)
    save_every: int = Field(50, ge=1, description="steps between states that --resume can go on from")
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="auto: a GPU if there is one")


class Generation(_Strict):
    """How training images are generated from the prompts."""

    steps: int = Field(25, ge=1)
    guidance: float = Field(5.0, ge=0)
    batch_size: int = Field(32, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = Field(0, ge=0)


class Recipe(_Strict):
    """One erasing job."""

    model: str = Field("tiny-sd", description="tiny-sd, a diffusers folder, a run folder or a hub id; for a classifier or a VAE the folder of a saved one")  # fmt: skip
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
    def _known_method(cls, value: MethodSpec) -> MethodSpec:
        wrong = registry.problems("method", value.name, value.options)
        if wrong:
            raise ValueError("; ".join(wrong))
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
        if method.needs_fp32 and self.training.precision != "fp32":
            raise ValueError(f"the method {self.method.name!r} takes differences of gradients, which drown in the rounding of bf16; set training.precision: fp32")  # fmt: skip
        return self

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
