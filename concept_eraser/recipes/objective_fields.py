"""What a recipe says of its objectives: prompts or labelled data, loss, adversary, histogram."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from concept_eraser import registry
from concept_eraser.data import templates
from concept_eraser.recipes.strict import Strict
from concept_eraser.registry import Plugin
from concept_eraser.utils import resources
from concept_eraser.utils.errors import quote, unknown_message
from concept_eraser.utils.limits import (
    CLASSES,
    CONCEPTS,
    FACTOR,
    IMAGES,
    POSITION,
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
    return not plugin.is_record and bool(getattr(plugin.build(), trait))


def fits(loss: str | Plugin, target: str) -> bool:
    """Whether a loss is one of a target's. An object that a file records is taken to be one."""
    plugin = registry.read("loss", loss)
    if is_built_in(plugin.name):
        return plugin.name in LOSS_NAMES[target]
    return plugin.is_record or target in plugin.build().targets


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
        if plugin.value is not None or plugin.is_record or is_built_in(plugin.name):
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


def as_list(forget: Any) -> list[ObjectiveSpec]:
    """The objectives of the key `forget`: of one, of a list, of None."""
    return forget if isinstance(forget, list) else [forget] if forget is not None else []
