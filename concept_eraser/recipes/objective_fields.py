"""The sections of the objectives: prompts or labelled data, losses, adversary, histogram."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from concept_eraser import registry
from concept_eraser.data import templates
from concept_eraser.recipes.strict import Strict, require_data_file
from concept_eraser.registry import Plugin
from concept_eraser.utils.errors import quote, unknown_message
from concept_eraser.utils.limits import (
    BATCH,
    CLASSES,
    CONCEPTS,
    FACTOR,
    GUIDANCE,
    IMAGES,
    POSITION,
    SAMPLER_STEPS,
    TRAINING_STEPS,
)
from concept_eraser.utils.plugin_fields import LossField

# Names of the losses, repeated here because importing them imports torch; a test compares them.
LOSS_NAMES = {
    "denoiser": (
        "anchor",
        "ascent",
        "balance",
        "data",
        "distill",
        "esd",
        "npo",
        "relabel",
        "resteer",
        "slider",
        "stereo",
    ),
    "text_encoder": (
        "anchor",
        "ascent",
        "data",
        "distill",
        "distill_prediction",
        "esd",
        "npo",
        "relabel",
    ),
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


ANCHORED = ("anchor", "relabel", "stereo", "balance")


# losses whose target for the empty prompt is the teacher's unconditional prediction
WITH_EMPTY = ("anchor", "distill", "esd")


WITH_TARGET = ("data", "ascent", "npo", "relabel")


_LOSSES = sorted({name for names in LOSS_NAMES.values() for name in names})


_TRAITS = {"needs_anchor": ANCHORED, "holds_empty": WITH_EMPTY, "needs_images": WITH_TARGET}


OBJECTIVES = ("retain", "forget", "replace", "relearn", "histogram", "attack")


# pydantic's names of the two forms of `forget` in its errors; no keys of a recipe
ONE, MANY = "<one>", "<many>"


def is_built_in(loss: str) -> bool:
    """Whether a loss is one of this package that an objective may have."""
    return loss in _LOSSES


def requires(loss: str | Plugin, trait: str) -> bool:
    """Whether a loss has a trait: `needs_anchor`, `needs_images` or `holds_empty` (losses/base.py).

    The traits of a built-in loss are those of the denoiser's. An object that a file records has
    none.
    """
    plugin = registry.read("loss", loss)
    if is_built_in(plugin.name):
        return plugin.name in _TRAITS[trait]
    return not plugin.is_record and bool(getattr(plugin.build(), trait))


def fits(loss: str | Plugin, target: str) -> bool:
    """Whether a loss fits a target. An object that a file records is assumed to fit."""
    plugin = registry.read("loss", loss)
    if is_built_in(plugin.name):
        return plugin.name in LOSS_NAMES[target]
    return plugin.is_record or target in plugin.build().targets


class ElasticSpec(Strict):
    """The penalty weight / 2 x sum F_i (theta_i - theta*_i)^2.

    F is the mean squared gradient of single examples' training loss.
    """

    weight: float = Field(gt=0, le=FACTOR, description="factor of the penalty (lambda)")
    n: int = Field(200, ge=1, le=IMAGES, description="number of examples in the mean F")


class TrajectorySpec(Strict):
    """The trajectories of the loss `balance`. The defaults are those of EraseFlow's code."""

    steps: int = Field(50, ge=2, le=SAMPLER_STEPS, description="time steps of the sampler")
    guidance: float = Field(
        5.0,
        ge=0,
        le=GUIDANCE,
        description="guidance of the sampler, and of the prediction in training",
    )
    early: int = Field(
        10,
        ge=0,
        le=SAMPLER_STEPS,
        description="how many of the steps before the last ones count, drawn for each trajectory",
    )
    late: int = Field(
        10, ge=0, le=SAMPLER_STEPS, description="how many of the last steps count, all of them"
    )
    log_beta: float = Field(
        2.5, ge=-FACTOR, le=FACTOR, description="logarithm of beta, the reward of a trajectory"
    )
    log_z: float = Field(
        -0.1953, ge=-FACTOR, le=FACTOR, description="first value of log Z, which is trained"
    )

    @model_validator(mode="after")
    def _counts(self) -> TrajectorySpec:
        if not 1 <= self.early + self.late <= self.steps:
            raise ValueError(
                "early + late, the steps that count, must lie between 1 and steps, found "
                f"{self.early} + {self.late} of {self.steps}"
            )
        return self


class ObjectiveSpec(Strict):
    """One objective: its prompts or its labelled data, its loss, and the source of its images."""

    prompts: str | list[str] | dict[str, Any] | None = Field(
        None,
        description=(
            "a prompt set by name or path, a list of prompts, or a mapping with the keys of a "
            "prompt file (include, prompts, expand, without)"
        ),
    )
    data: str | None = Field(
        None,
        description=(
            "labelled data: a set of data/datasets/ by name, a folder with one subfolder per "
            "class, an .npz with x and y; or rest: all data that are not in the forget set"
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
        description="labelled data: these examples, by position: a list, or a file of one per line",
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
            "data, ascent, anchor, esd, distill, distill_prediction, relabel, npo, resteer, "
            "slider, stereo or balance; or an installed package's, by name or as {name: NAME, "
            "OPTION: VALUE}"
        ),
    )
    anchor: str | dict[str, str] | None = Field(
        None,
        description=(
            "anchor concept: a text that may use the prompt's fields, e.g. 'a {color} "
            "square', or the fields to replace in the prompt, e.g. {shape: square}"
        ),
    )
    teacher: Literal["frozen", "current"] = Field(
        "frozen",
        description=(
            "the model whose prediction is the target: frozen, the one before training (default), "
            "or current (MUNBa's public code)"
        ),
    )
    eta: float = Field(
        1.0,
        ge=0,
        le=FACTOR,
        description=(
            "negative guidance of the loss 'esd' (1.0: the paper), and guidance of 'stereo' (2.0)"
        ),
    )
    neutral: Literal["null", "anchor"] | None = Field(
        None,
        description=(
            "the prediction from which the loss 'esd' extrapolates: null, for the empty prompt "
            "(default: ESD), or anchor (SPM)"
        ),
    )
    mixture: dict[str, Annotated[float, Field(ge=-FACTOR, le=FACTOR)]] | None = Field(
        None,
        max_length=CONCEPTS,
        description=(
            "the target of the loss 'slider': prompts with the factors of their predictions, whose "
            "sum is 1, e.g. {person: 1, an old person: 4, a young person: -4}; they may use the "
            "prompt's fields, as an anchor"
        ),
    )
    tokens: Literal["concept", "concept_and_end"] | None = Field(
        None,
        description=(
            "the tokens whose attention the loss 'resteer' reduces: those that the anchor does "
            "not have (without an anchor: all words), alone or with the end tokens (default: "
            "Forget-Me-Not's own setting)"
        ),
    )
    trajectory: TrajectorySpec | None = Field(
        None,
        description="settings of the loss 'balance' (default: those of EraseFlow's code)",
    )
    elastic: ElasticSpec | None = Field(
        None,
        description=(
            "target denoiser: adds a penalty on changes of the weights, larger for weights "
            "that these examples depend on (Selective Amnesia)"
        ),
    )
    scale: float = Field(1.0, gt=0, le=FACTOR, description="factor of this objective's loss")
    images: str = Field(
        "generate",
        description=(
            "generate (by the model itself), free (no images: latents sampled in training), "
            "or a folder of images with captions"
        ),
    )
    noised: Literal["own", "anchor"] | None = Field(
        None,
        description=(
            "which images are noised to x_t: own, those of the prompt, or anchor, those of its "
            "anchor (default: anchor for the loss relabel, own for all others)"
        ),
    )
    empty_prompts: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "share of examples with the empty prompt in place of prompt and anchor, which "
            "preserves the unconditional prediction (0.25: the default of `erase`; losses "
            "anchor, distill and esd)"
        ),
    )
    n: int = Field(
        400,
        ge=1,
        le=IMAGES,
        description="number of images to generate (MUNBa: about 400 per objective)",
    )
    timesteps: tuple[int, int] = Field(
        (0, 1000), description="range of diffusion time steps of this loss"
    )

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str | Plugin) -> str | Plugin:
        plugin = registry.read("loss", value)
        if is_built_in(plugin.name) and plugin.options:
            raise ValueError(
                f"the loss {plugin.name!r} has no options of its own; its settings are keys "
                "of the objective, e.g. eta"
            )
        if plugin.value is not None or plugin.is_record or is_built_in(plugin.name):
            return value
        if plugin.name in registry.builtin("loss"):  # histogram, which is a section of the recipe
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
    def _known_prompts(
        cls, value: str | list[str] | dict[str, Any] | None, info: ValidationInfo
    ) -> str | list[str] | dict[str, Any] | None:
        if isinstance(value, str):
            require_data_file("prompts", value, info)
        elif value is not None and not value:
            raise ValueError("the list of prompts is empty; give it at least one prompt")
        return value

    @field_validator("timesteps")
    @classmethod
    def _check_order(cls, value: tuple[int, int]) -> tuple[int, int]:
        return _ascending(value)

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
                "data: rest stands for all data that are not in the forget set; it has no "
                "classes, share, indices or options"
            )
        self._require_loss("beta", "npo")
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
                f"the loss {self.loss!r} needs an anchor concept, e.g. "
                "anchor: 'a person' or anchor: {shape: circle}"
            )
        for key in ("noised", "neutral"):
            if getattr(self, key) == "anchor" and not self.anchor:
                raise ValueError(f"{key}: anchor needs an anchor")
        if self.loss == "slider" and not self.mixture:
            raise ValueError(
                "the loss 'slider' needs a mixture, the prompts and factors of its target, e.g. "
                "mixture: {person: 1, an old person: 4, a young person: -4}"
            )
        if self.mixture:
            _check_mixture(self.mixture)
        for key, loss in (
            ("neutral", "esd"),
            ("tokens", "resteer"),
            ("mixture", "slider"),
            ("trajectory", "balance"),
        ):
            if getattr(self, key) is not None and self.loss != loss:
                raise ValueError(
                    f"{key} is a setting of the loss {loss!r}, found loss {self.loss!r}"
                )
        self._require_loss("eta", "esd", "stereo")
        if self.noised == "anchor" and self.images != "generate":
            raise ValueError(
                "noised: anchor noises generated images of the anchor, so it needs images: "
                f"generate, found images: {self.images}"
            )
        if self.empty_prompts and not requires(self.loss, "holds_empty"):
            raise ValueError(
                "empty_prompts needs a loss that preserves the unconditional prediction "
                f"({', '.join(WITH_EMPTY)}), found {self.loss!r}"
            )
        if self.empty_prompts and (self.images == "free" or self.teacher == "current"):
            finding = (
                "images: free, where x_t is also sampled by the unconditional prediction"
                if self.images == "free"
                else "teacher: current, which follows the model"
            )
            raise ValueError(
                "empty_prompts preserves the unconditional prediction at images of this "
                f"objective, so it cannot be used with {finding}"
            )
        if self.loss == "balance" and (
            self.images != "free" or self.timesteps != (0, 1000) or self.noised is not None
        ):
            raise ValueError(
                "the loss 'balance' samples its own latents, at the time steps of a sampler; "
                "set images: free, and leave timesteps and noised out"
            )
        if self.elastic is not None and self.images == "free":
            raise ValueError(
                "elastic measures how the training loss on images depends on the weights, so "
                "images: free is not possible"
            )
        if self.images == "free" and requires(self.loss, "needs_images"):
            raise ValueError(
                f"the loss {self.loss!r} needs images, so images: free is not possible; "
                "use anchor, esd, distill, resteer or slider"
            )
        return self

    def _require_loss(self, key: str, *losses: str) -> None:
        """Raise ValueError if a setting is given to a built-in loss that does not read it."""
        is_set = getattr(self, key) != type(self).model_fields[key].default
        if is_set and is_built_in(str(self.loss)) and self.loss not in losses:
            raise ValueError(
                f"{key} is a setting of the loss {' or '.join(map(repr, losses))}, found loss "
                f"{self.loss!r}"
            )


def _ascending(timesteps: tuple[int, int]) -> tuple[int, int]:
    """Return a range of time steps. Raises ValueError if it is none."""
    low, high = timesteps
    if not 0 <= low < high <= 1000:
        raise ValueError(
            f"expected [low, high] with 0 <= low < high <= 1000, found {list(timesteps)}"
        )
    return timesteps


def _check_mixture(mixture: Mapping[str, float]) -> None:
    """Raise ValueError for an invalid prompt, and for factors whose sum is not 1."""
    for text in mixture:
        templates.fields(text)
    total = math.fsum(mixture.values())
    if abs(total - 1) > 1e-6 * max(1.0, *map(abs, mixture.values())):
        raise ValueError(
            f"mixture: the sum of the factors must be 1, as of one prediction, found {total:g}"
        )


def concept_objective(number: int) -> str:
    """Return the objective of a concept by its number from 0: forget, forget.2, forget.3, ..."""
    return f"forget.{number + 1}" if number else "forget"


def role(objective: str) -> str:
    """Return the role of an objective: that of `forget.3` is forget."""
    return objective.partition(".")[0]


# one objective, or a list of them; the discriminator makes errors refer to the form that was given
Forget = Annotated[
    Annotated[ObjectiveSpec, Tag(ONE)]
    | Annotated[list[ObjectiveSpec], Tag(MANY), Field(max_length=CONCEPTS)],
    Discriminator(lambda value: MANY if isinstance(value, list) else ONE),
]


class AttackSpec(Strict):
    """An adversary inside the training: an offset of the forgotten prompts' embedding.

    It regenerates the concept. If the text encoder is trained, it is an offset of the embeddings of
    the tokens, or the embeddings of tokens before the prompt.
    """

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
        description="number of images of the forgotten prompts to generate for it",
    )
    warmup: int = Field(
        0,
        ge=0,
        le=TRAINING_STEPS,
        description="number of training steps at the start without an attack (AdvUnlearn: 200)",
    )
    loss: Literal["noise", "prediction"] = Field(
        "noise",
        description=(
            "what the attack reproduces: noise, the noise of the images, or prediction, the "
            "original model's prediction for the prompt (AdvUnlearn)"
        ),
    )
    forget: Literal["both", "attacked"] = Field(
        "both",
        description=(
            "the forget loss under attack: both, the sum of its values without and with the "
            "attack, or attacked, that with it alone (AdvUnlearn)"
        ),
    )
    tokens: int = Field(
        0,
        ge=0,
        le=BATCH,
        description=(
            "target text_encoder: 0 for an offset of all tokens, or the number of tokens before "
            "the prompt whose embeddings are learned, each step from random tokens (AdvUnlearn: 1)"
        ),
    )
    both_branches: bool = Field(
        False,
        description=(
            "target denoiser: attack both branches of guidance, with a second offset for the empty "
            "prompt; the forget loss then also preserves the unconditional prediction under it"
        ),
    )


class HistogramSpec(Strict):
    """A judge inside the training, whose concept rate is a loss (UNO's hat versions)."""

    concept: dict[str, str] = Field(description="attribute: value, e.g. {shape: star}")
    judge: str = Field(
        "tiny", description="a judge by name; for a VAE the folder of a saved classifier"
    )
    alpha: float = Field(
        1e-8, gt=0, lt=0.5, description="share of samples that may show the concept (UNO: 1e-8)"
    )
    timesteps: tuple[int, int] = Field(
        (0, 500),
        description="range of diffusion time steps; one-step samples from pure noise are empty",
    )

    @field_validator("concept")
    @classmethod
    def _one(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) != 1:
            raise ValueError(
                f"expected one attribute and its value, e.g. {{shape: star}}, found {quote(value)}"
            )
        return value

    @field_validator("timesteps")
    @classmethod
    def _check_order(cls, value: tuple[int, int]) -> tuple[int, int]:
        return _ascending(value)


def as_list(forget: Any) -> list[ObjectiveSpec]:
    """Return the objectives of the key `forget`, which holds one, a list, or None."""
    return forget if isinstance(forget, list) else [forget] if forget is not None else []
