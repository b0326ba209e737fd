"""The sections of a recipe: what each objective forgets or retains, the method, the weights, the
training. See recipe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    Tag,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from concept_eraser import registry
from concept_eraser.data import templates
from concept_eraser.registry import Plugin
from concept_eraser.utils import resources
from concept_eraser.utils.errors import quote, unknown_message
from concept_eraser.utils.limits import (
    BATCH,
    CLASSES,
    CONCEPTS,
    FACTOR,
    GUIDANCE,
    IMAGES,
    LEARNING_RATE,
    MODEL_OPTION,
    PORTION,
    POSITION,
    RANK,
    SAMPLER_STEPS,
    SEED,
    TEXT,
    TRAINING_STEPS,
)
from concept_eraser.utils.plugin_fields import LossField

# Names of the losses, repeated here because importing them imports torch; a test compares them.
LOSS_NAMES = {
    "denoiser": ("anchor", "ascent", "data", "distill", "esd", "npo", "relabel", "resteer"),
    "text_encoder": ("anchor", "ascent", "data", "distill", "esd", "npo", "relabel"),
    "clip": ("anchor", "ascent", "boundary", "data", "distill", "diverge", "npo", "relabel"),
    "vae": ("anchor", "ascent", "data", "distill"),
    "classifier": (
        "anchor",
        "ascent",
        "boundary",
        "data",
        "distill",
        "diverge",
        "expand",
        "npo",
        "relabel",
    ),
}
# targets whose objectives are prompts; those of the others are labelled data
PROMPTED = ("denoiser", "text_encoder")
ANCHORED = ("anchor", "relabel")
# losses that without a prompt ask for what the teacher says without one
WITH_EMPTY = ("anchor", "distill", "esd")
WITH_TARGET = ("data", "ascent", "npo", "relabel")
_LOSSES = sorted({name for names in LOSS_NAMES.values() for name in names})
_TRAITS = {"needs_anchor": ANCHORED, "holds_empty": WITH_EMPTY, "needs_images": WITH_TARGET}
OBJECTIVES = ("retain", "forget", "replace", "histogram", "attack")
# how pydantic calls the two forms of `forget` in its errors; no key of a recipe
ONE, MANY = "<one>", "<many>"


class Strict(BaseModel):
    """No unknown keys, and no number that is infinite or none."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, allow_inf_nan=False, str_max_length=TEXT
    )


def is_built_in(loss: str) -> bool:
    """Whether a loss is one of this package's that an objective may have."""
    return loss in _LOSSES


def requires(loss: str | Plugin, trait: str) -> bool:
    """Whether a loss has one of the traits `needs_anchor`, `needs_images` and `holds_empty`
    (losses/base.py).

    Those of a built-in loss are the denoiser's. Nothing is known of an object that a file records.
    """
    plugin = registry.read("loss", loss)
    if is_built_in(plugin.name):
        return plugin.name in _TRAITS[trait]
    return not plugin.recorded and bool(getattr(plugin.build(), trait))


def fits(loss: str | Plugin, target: str) -> bool:
    """Whether a loss is one of a target's. An object that a file records is taken to be one."""
    plugin = registry.read("loss", loss)
    if is_built_in(plugin.name):
        return plugin.name in LOSS_NAMES[target]
    return plugin.recorded or target in plugin.build().targets


class ElasticSpec(Strict):
    """weight / 2 x sum F_i (theta_i - theta*_i)^2, F the mean squared gradient of single examples'
    training loss.
    """

    weight: float = Field(gt=0, le=FACTOR, description="factor of the penalty (lambda)")
    n: int = Field(200, ge=1, le=IMAGES, description="how many examples F is the mean of")


class ObjectiveSpec(Strict):
    """One objective: which prompts (or which labelled data), which loss, and where the images come
    from.
    """

    prompts: str | list[str] | None = Field(
        None, description="a prompt set by name or path, or a list of prompts"
    )
    data: str | None = Field(
        None,
        description=(
            "labelled data: a set of data/datasets/ by name, a folder with one subfolder a "
            "class, an .npz with x and y; or rest: what the forget objective leaves of its data"
        ),
    )
    options: dict[str, Any] = Field({}, description="options of a named data set")
    classes: list[str | Annotated[int, Field(ge=0, le=CLASSES)]] | None = Field(
        None,
        max_length=CLASSES,
        description="labelled data: all examples of these classes, by name or number",
    )
    share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="labelled data: a random share of the examples, drawn with generation.seed",
    )
    indices: list[Annotated[int, Field(ge=0, le=POSITION)]] | str | None = Field(
        None,
        description="labelled data: these examples, by position: a list, or a file with one a line",
    )
    l1: float = Field(
        0.0,
        ge=0,
        le=FACTOR,
        description=(
            "target classifier or clip: adds l1 x sum |weights| to the loss (l1-sparse: 1e-5 "
            "to 1e-3)"
        ),
    )
    distill: float = Field(
        0.0,
        ge=0,
        le=FACTOR,
        description=(
            "target classifier or clip: adds distill x KL(teacher || model) to the loss "
            "(alpha of SCRUB: 0.001 to 0.5)"
        ),
    )
    beta: float = Field(
        0.1,
        gt=0,
        le=FACTOR,
        description=(
            "of the loss npo: how soon it saturates; near 0 it is ascent (0.1: the paper; of "
            "a denoiser, in units of 1 / loss: 10 to 1000)"
        ),
    )
    kl: float = Field(
        1.0,
        ge=0,
        le=FACTOR,
        description="target vae: weight of the KL term (1: the evidence bound)",
    )
    loss: LossField = Field(
        "data",
        description=(
            "data, ascent, anchor, esd, distill, relabel, npo or resteer; or an installed "
            "package's, by name or as {name: NAME, OPTION: VALUE}"
        ),
    )
    anchor: str | dict[str, str] | None = Field(
        None,
        description=(
            "what to show instead: a text that may use the prompt's fields, e.g. 'a {color} "
            "square', or the fields to replace in it, e.g. {shape: square}"
        ),
    )
    teacher: Literal["frozen", "current"] = Field(
        "frozen",
        description=(
            "whose prediction is the target: the model before training (ours) or the current "
            "one (MUNBa's public code)"
        ),
    )
    eta: float = Field(
        1.0, ge=0, le=FACTOR, description="negative guidance of the loss 'esd' (1.0: the paper)"
    )
    neutral: Literal["null", "anchor"] | None = Field(
        None,
        description=(
            "what the loss 'esd' pushes away to: null, the empty prompt (default: ESD), or "
            "the anchor (SPM)"
        ),
    )
    tokens: Literal["concept", "concept_and_end"] | None = Field(
        None,
        description=(
            "what the loss 'resteer' looks away from: the tokens that the anchor does not "
            "have (without one: all words), alone or with the end tokens (default: "
            "Forget-Me-Not's own setting)"
        ),
    )
    elastic: ElasticSpec | None = Field(
        None,
        description=(
            "target denoiser: adds a pull of the weights back to where they were, stronger "
            "where these examples depend on them (Selective Amnesia)"
        ),
    )
    scale: float = Field(1.0, gt=0, le=FACTOR, description="factor of this objective's loss")
    images: str = Field(
        "generate",
        description=(
            "generate (by the model itself), free (no images: latents sampled on the fly), "
            "or a folder of images with captions"
        ),
    )
    noised: Literal["own", "anchor"] | None = Field(
        None,
        description=(
            "whose images are noised to x_t: those of the prompt or of its anchor (default: "
            "the loss's; relabel: anchor, all others: own)"
        ),
    )
    empty_prompts: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "how often an example is asked without its prompt and anchor, so that what "
            "guidance subtracts stays what it was (0.25: the default of `erase`; losses "
            "anchor, distill and esd)"
        ),
    )
    n: int = Field(
        400,
        ge=1,
        le=IMAGES,
        description="how many images to generate (MUNBa: about 400 per objective)",
    )
    timesteps: tuple[int, int] = Field(
        (0, 1000), description="range of diffusion time steps this loss is asked at"
    )

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str | Plugin) -> str | Plugin:
        plugin = registry.read("loss", value)
        if is_built_in(plugin.name) and plugin.options:
            raise ValueError(
                f"the loss {plugin.name!r} has no options of its own; its settings stand "
                "beside it, e.g. eta"
            )
        if plugin.value is not None or plugin.recorded or is_built_in(plugin.name):
            return value
        if plugin.name in registry.builtin("loss"):  # histogram, which has a section of its own
            raise ValueError(unknown_message("loss", plugin.name, _LOSSES))
        if wrong := registry.problems("loss", plugin.name, plugin.options):
            raise ValueError("; ".join(wrong))
        return value

    @field_validator("anchor", mode="before")
    @classmethod
    def _class_by_number(cls, value: Any) -> Any:
        number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= CLASSES
        return str(value) if number else value

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
    def _check_order(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] < value[1] <= 1000:
            raise ValueError(
                f"expected [low, high] with 0 <= low < high <= 1000, found {list(value)}"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ObjectiveSpec:
        if (self.prompts is None) == (self.data is None):
            raise ValueError(
                "give either prompts (for a text-to-image model) or data (labelled examples)"
                + (
                    ", not both"
                    if self.prompts
                    else "; an objective that the recipe lacks needs it beside its other settings"
                )
            )
        if self.data == "rest" and (self.classes or self.share or self.indices or self.options):
            raise ValueError(
                "data: rest is all that the forget objective leaves; it takes no classes, "
                "share, indices or options"
            )
        if self.data is not None:
            return self
        if isinstance(self.anchor, str):
            templates.fields(self.anchor)
        for word in self.anchor.values() if isinstance(self.anchor, dict) else ():
            if wrong := templates.text_problem(word):
                raise ValueError(f"anchor: the text {quote(word)} {wrong}")
        if (
            self.classes is not None
            or self.share is not None
            or self.indices is not None
            or self.options
        ):
            raise ValueError(
                "classes, share, indices and options belong to labelled data; give "
                "`data`, not prompts"
            )
        if requires(self.loss, "needs_anchor") and not self.anchor:
            raise ValueError(
                f"the loss {self.loss!r} needs an anchor: what to show instead, e.g. "
                "anchor: 'a person' or anchor: {shape: circle}"
            )
        for key in ("noised", "neutral"):
            if getattr(self, key) == "anchor" and not self.anchor:
                raise ValueError(f"{key}: anchor needs an anchor")
        for key, loss in (("neutral", "esd"), ("tokens", "resteer")):
            if getattr(self, key) is not None and self.loss != loss:
                raise ValueError(
                    f"{key} is a setting of the loss {loss!r}, found loss {self.loss!r}"
                )
        if self.empty_prompts and not requires(self.loss, "holds_empty"):
            raise ValueError(
                "empty_prompts needs a loss that keeps what the model says without a "
                f"prompt ({', '.join(WITH_EMPTY)}), found {self.loss!r}"
            )
        if self.empty_prompts and (self.images == "free" or self.teacher == "current"):
            finding = (
                "images: free, where x_t is sampled without the prompt too"
                if self.images == "free"
                else "teacher: current, which follows the model"
            )
            raise ValueError(
                "empty_prompts holds what the model said without a prompt at images "
                f"of this objective, so it does not go with {finding}"
            )
        if self.elastic is not None and self.images == "free":
            raise ValueError(
                "elastic asks how the training loss on images depends on the weights, so "
                "images: free is not possible"
            )
        if self.images == "free" and requires(self.loss, "needs_images"):
            raise ValueError(
                f"the loss {self.loss!r} needs images, so images: free is not possible; "
                "use anchor, esd, distill or resteer"
            )
        return self


def concept_objective(number: int) -> str:
    """The objective of the concept with this number, counted from 0: forget, forget.2, forget.3,
    ...
    """
    return f"forget.{number + 1}" if number else "forget"


def role(objective: str) -> str:
    """What an objective is: that of `forget.3` is forget."""
    return objective.partition(".")[0]


# one objective, or a list of them; told apart by hand, so that an error speaks of the form that was
# meant
Forget = Annotated[
    Annotated[ObjectiveSpec, Tag(ONE)]
    | Annotated[list[ObjectiveSpec], Tag(MANY), Field(max_length=CONCEPTS)],
    Discriminator(lambda value: MANY if isinstance(value, list) else ONE),
]


class AttackSpec(Strict):
    """An adversary inside the training: an offset of the forgotten prompts' embedding that wants
    the concept back; where the text encoder is trained, of their tokens' embeddings."""

    decay: float = Field(
        1e-4,
        ge=0,
        le=FACTOR,
        description=(
            "c in the attack's loss, the training loss on the forgotten images + c/2 ||offset||^2"
        ),
    )
    n: int = Field(
        400,
        ge=1,
        le=IMAGES,
        description="how many images of the forgotten prompts to generate for it",
    )


class HistogramSpec(Strict):
    """A judge inside the training: the share of samples in which it sees the concept, as a loss
    (UNO's hat versions).
    """

    concept: dict[str, str] = Field(description="attribute: value, e.g. {shape: star}")
    judge: str = Field(
        "tiny", description="a judge by name; for a VAE the folder of a saved classifier"
    )
    alpha: float = Field(
        1e-8, gt=0, lt=0.5, description="share of samples that may show the concept (UNO: 1e-8)"
    )
    timesteps: tuple[int, int] = Field(
        (0, 500),
        description="range of diffusion time steps; one-step samples from pure noise show nothing",
    )

    @field_validator("concept")
    @classmethod
    def _one(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) != 1:
            raise ValueError(
                f"expected one attribute and its value, e.g. {{shape: star}}, found {quote(value)}"
            )
        return value


class WatchSpec(Strict):
    """Look at the concept's share while training: after how many steps and seconds is it gone?"""

    suite: str = Field(
        description="the evaluation suite whose concept, judge, sampler and prompts are used"
    )
    group: str = "direct"
    every: int = Field(10, ge=1, le=TRAINING_STEPS, description="steps between two looks")
    n: int = Field(50, ge=2, le=IMAGES, description="images a look")
    below: float = Field(
        0.02,
        gt=0,
        lt=1,
        description="gone means a share below this (UNO: 0.02); the looks then end",
    )

    @field_validator("suite")
    @classmethod
    def _known_suite(cls, value: str) -> str:
        resources.find("eval", value)
        return value


class MethodSpec(BaseModel):
    """A method by name with its options, or an object that was passed in Python.

    In Python an object is dumped as a `registry.Plugin`, so that a recipe can be dumped, changed
    and validated again.
    """

    model_config = ConfigDict(extra="allow")
    name: str = "munba"
    _plugin: Plugin | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _from_object(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> MethodSpec:
        if isinstance(value, Mapping | BaseModel):
            return cast("MethodSpec", handler(value))
        plugin = registry.read("method", value)
        spec = cls(name=plugin.name, **plugin.options)
        if plugin.value is not None:
            spec._plugin = plugin
        return spec

    @model_serializer(mode="wrap")
    def _as_object(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        return handler(self) if self._plugin is None or info.mode == "json" else self._plugin

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def is_object(self) -> bool:
        """Whether this holds an object, which no other process can load by its name."""
        return self._plugin is not None

    @property
    def plugin(self) -> type[Any] | None:
        """The class of the method; None where a file records an object of another process."""
        if self._plugin is not None:
            return type(self._plugin.value)
        return None if registry.in_memory(self.name) else registry.load("method", self.name)

    @property
    def edits(self) -> bool:
        """Whether the method changes a model in one go, without steps."""
        return hasattr(self.plugin, "edit")

    def build(self) -> Any:
        """The method, a `Method` or an `Edit`.

        Raises:
            UserError: A file records an object of another process.
        """
        return (self._plugin or Plugin("method", self.name, self.options)).build()


class LoraSpec(Strict):
    """Low-rank factors in place of the weights: W + alpha / rank x up down."""

    rank: int = Field(4, ge=1, le=RANK, description="of the change to each layer")
    alpha: float = Field(
        4,
        gt=0,
        le=FACTOR,
        description="the change is scaled by alpha / rank; default: the rank, so by 1",
    )
    conv: bool = Field(False, description="convolutions too, not only linear layers")

    @model_validator(mode="before")
    @classmethod
    def _alpha_is_the_rank(cls, value: Any) -> Any:
        """`lora: 8` stands for a rank; spelled out, so that the default may change and a run folder
        does not.
        """
        settings = value if isinstance(value, dict) else {"rank": value}
        return (
            {"alpha": settings["rank"], **settings}
            if isinstance(settings.get("rank"), int | float)
            else settings
        )


class TrainableSpec(Strict):
    """Which weights may move."""

    select: str = Field(
        "all", description="see `concept-eraser list selections`, or re:<regular expression>"
    )
    batchnorm: Literal["frozen", "train"] = Field(
        "frozen",
        description=(
            "classifier, vae: keep the running statistics (ours), or use and update the batch's"
        ),
    )

    lora: LoraSpec | None = Field(
        None,
        description=(
            "denoiser, text_encoder: train low-rank factors of the selected linear layers "
            "instead of their weights"
        ),
    )
    saliency: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "only this share of the selected weights moves: those with the largest "
            "|gradient| of the forget loss (SalUn: 0.5)"
        ),
    )
    negate: float | None = Field(
        None,
        gt=0,
        le=PORTION,
        description=(
            "after training on the concept, turn round what it did: W becomes W - this x "
            "(trained W - W) (task arithmetic)"
        ),
    )
    reinitialise: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "before training, this share of the selected weights is drawn anew: those with "
            "the largest |gradient x weight| of the forget loss (Scissorhands: 0.1 or 0.9)"
        ),
    )

    @field_validator("lora", mode="before")
    @classmethod
    def _on_or_off(cls, value: Any) -> Any:
        """`lora: none` and `false` are none, `true` one with the usual settings."""
        return None if value is False or value == "none" else {} if value is True else value

    @field_validator("select")
    @classmethod
    def _known_selection(cls, value: str) -> str:
        from concept_eraser.recipes.selections import problem

        wrong = problem(value)
        if wrong:
            raise ValueError(wrong)
        return value


class TrainingSpec(Strict):
    """How long, how fast, how exact."""

    steps: int = Field(200, ge=1, le=TRAINING_STEPS)
    batch_size: int = Field(
        16, ge=1, le=BATCH, description="examples of each objective in a micro-batch"
    )
    micro_batches: int = Field(
        1, ge=1, le=BATCH, description="micro-batches accumulated before the gradients are combined"
    )
    lr: float = Field(1e-4, gt=0, le=LEARNING_RATE)
    warmup: int = Field(0, ge=0, le=TRAINING_STEPS, description="steps of linear warm-up")
    decay: Literal["none", "linear"] = Field(
        "none", description="linear: the learning rate falls to 0 at the last step"
    )
    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "adamw8bit"] = Field(
        "adam",
        description=(
            "adafactor: its second moments are kept as rows and columns, and lr is relative "
            "to the weights' size; adamw8bit: moments in 8 bits, by bitsandbytes (pip "
            "install 'concept-eraser[memory]')"
        ),
    )
    weight_decay: float = Field(0.0, ge=0, le=LEARNING_RATE)
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16: autocast; weights stay in fp32"
    )
    checkpointing: bool = Field(
        False,
        description=(
            "target denoiser, text_encoder: keep the denoiser's activations between blocks "
            "only and compute the rest again: less memory, more time, the same gradients"
        ),
    )
    offload: bool = Field(
        False,
        description=(
            "text encoders, denoiser and VAE are on the device by turns while the examples "
            "are made, then what the training needs; all others on the CPU"
        ),
    )
    frozen: Literal["fp32", "bf16"] = Field(
        "fp32",
        description=(
            "bf16: weights of denoiser and text encoders that are not trained are held in "
            "bf16 while it trains; the erased model has them as they were"
        ),
    )
    seed: int = Field(0, ge=0, le=SEED)
    save_every: int = Field(
        50, ge=1, le=TRAINING_STEPS, description="steps between states that --resume can go on from"
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto", description="auto: a GPU if there is one"
    )
    shard: Literal["none", "optimizer", "weights"] = Field(
        "none",
        description=(
            "several processes: optimizer splits the optimizer's state among them; weights "
            "also the denoiser's weights, which a LoRA leaves as they are (docs/scale.md)"
        ),
    )
    tracker: list[Literal["tensorboard", "wandb"]] = Field(
        [],
        description=(
            "none, or where each step's numbers go beside log.jsonl: tensorboard, wandb, or "
            "a list of both"
        ),
    )

    @field_validator("tracker", mode="before")
    @classmethod
    def _one_tracker(cls, value: Any) -> Any:
        return [] if value in (None, "none") else [value] if isinstance(value, str) else value


ASIDE = ("shard", "tracker")  # of TrainingSpec: they change no number of the result
# of TrainingSpec: where and in what precision, not what is trained
MEMORY = ("checkpointing", "offload", "frozen")


class GenerationSpec(Strict):
    """How training images are generated from the prompts."""

    steps: int = Field(25, ge=1, le=SAMPLER_STEPS)
    guidance: float = Field(5.0, ge=0, le=GUIDANCE)
    batch_size: int = Field(32, ge=1, le=BATCH)
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = Field(0, ge=0, le=SEED)


class RecipeFields(Strict):
    """The keys of a recipe, and the names of its objectives."""

    model: str = Field(
        "tiny-sd",
        description=(
            "tiny-sd, a diffusers folder, a run folder or a hub id; for a classifier or a "
            "VAE the folder of a saved one"
        ),
    )
    model_options: dict[str, Annotated[float, Field(ge=0, le=MODEL_OPTION)]] = Field(
        {},
        description=(
            "options of the model's family: size of the images (sdxl, sd3, flux), guidance "
            "told in training (flux)"
        ),
    )
    target: Literal["denoiser", "text_encoder", "clip", "vae", "classifier"] = Field(
        "denoiser", description="which part is trained"
    )
    templates: list[str] = Field(
        ["a photo of a {}"],
        description="target clip: prompts of the classes, {} stands for the name",
    )
    forget: Forget = Field(
        description="what is to be forgotten: one objective, or a list of them, one a concept"
    )
    concepts: Literal["together", "rotate"] = Field(
        "together",
        description="several concepts: each an objective of its own, or one concept a step in turn",
    )
    retain: ObjectiveSpec | None = None
    replace: ObjectiveSpec | None = Field(
        None,
        description=(
            "what the forgotten prompts should show instead, as an objective of its own (UNO "
            "with its anchor term)"
        ),
    )
    attack: AttackSpec | None = Field(
        None, description="the lower-level problem of forum and adversarial"
    )
    histogram: HistogramSpec | None = Field(None, description="for uno-hat, uno-s-hat, s-hat and h")
    watch: WatchSpec | None = Field(None, description="look at the concept's share while training")
    method: MethodSpec = MethodSpec()
    finish: MethodSpec | None = Field(
        None,
        description=(
            "after the training, a closed form on the same prompts and anchors: uce, rece or "
            "mace-cfr; a LoRA is merged before it, and whole weights are written"
        ),
    )
    trainable: TrainableSpec = TrainableSpec()
    training: TrainingSpec = TrainingSpec()
    generation: GenerationSpec = GenerationSpec()

    @property
    def forgotten(self) -> list[ObjectiveSpec]:
        """The concepts to forget, mostly one."""
        return as_list(self.forget)

    @property
    def objective_specs(self) -> dict[str, ObjectiveSpec]:
        """The objectives with prompts or data, by name: retain, forget, forget.2, ..., replace."""
        sections = {name: getattr(self, name, None) for name in self.cast}
        sections |= {concept_objective(i): concept for i, concept in enumerate(self.forgotten)}
        return {name: spec for name, spec in sections.items() if isinstance(spec, ObjectiveSpec)}

    @property
    def cast(self) -> tuple[str, ...]:
        """All objectives in the order the methods expect, also the concepts that wait for their
        turn.
        """
        return self.acting(len(self.forgotten))

    @property
    def objectives(self) -> tuple[str, ...]:
        """The objectives of one step, in the order the methods expect: of concepts in turn there is
        one, `forget`.
        """
        return self.cast if self.concepts == "together" else self.acting(1)

    def acting(self, concepts: int) -> tuple[str, ...]:
        """The objectives in the order the methods expect, with so many concepts among them."""
        present = [name for name in OBJECTIVES if getattr(self, name) is not None]
        return tuple(
            one
            for name in present
            for one in (map(concept_objective, range(concepts)) if name == "forget" else [name])
        )

    @property
    def idle(self) -> set[str]:
        """Settings of an objective that say nothing about this target."""
        of_prompts = {
            "eta",
            "images",
            "noised",
            "n",
            "timesteps",
            "neutral",
            "tokens",
            "elastic",
            "empty_prompts",
        }
        numbers = {"vae": {"l1", "distill"}, "classifier": {"kl"}, "clip": {"kl"}}.get(
            self.target, {"kl", "l1", "distill"}
        )
        numbers |= set() if "npo" in LOSS_NAMES[self.target] else {"beta"}
        if self.target == "text_encoder":
            numbers |= {"neutral", "tokens", "elastic", "empty_prompts"}
        return {"options", *numbers} if self.target in PROMPTED else of_prompts | numbers


def as_list(forget: Any) -> list[ObjectiveSpec]:
    """The objectives of the key `forget`: of one, of a list, of None."""
    return forget if isinstance(forget, list) else [forget] if forget is not None else []
