"""The sections of a recipe: what each side forgets or retains, the method, the weights, the training. See recipe.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from concept_eraser import resources
from concept_eraser.data import templates
from concept_eraser.errors import shown, unknown_message
from concept_eraser.limits import (
    BATCH,
    CLASSES,
    CONCEPTS,
    FACTOR,
    GUIDANCE,
    IMAGES,
    LEARNING_RATE,
    PORTION,
    POSITION,
    RANK,
    SAMPLER_STEPS,
    SEED,
    TEXT,
    TRAINING_STEPS,
)

# Names of the losses, repeated here because importing them imports torch; a test compares them.
LOSS_NAMES = {
    "denoiser": ("anchor", "ascent", "data", "distill", "esd", "npo", "relabel", "resteer"),
    "text_encoder": ("anchor", "ascent", "data", "distill", "esd", "npo", "relabel"),
    "clip": ("anchor", "ascent", "boundary", "data", "distill", "diverge", "npo", "relabel"),
    "vae": ("anchor", "ascent", "data", "distill"),
    "classifier": ("anchor", "ascent", "boundary", "data", "distill", "diverge", "expand", "npo", "relabel"),
}
PROMPTED = ("denoiser", "text_encoder")  # targets whose sides are prompts; those of the others are labelled data
ANCHORED = ("anchor", "relabel")
WITH_EMPTY = ("anchor", "distill", "esd")  # losses that without a prompt ask for what the teacher says without one
WITH_TARGET = ("data", "ascent", "npo", "relabel")
PLAYERS = ("retain", "forget", "replace", "histogram", "attack")
ONE, MANY = "<one>", "<many>"  # how pydantic calls the two forms of `forget` in its errors; no key of a recipe


class Strict(BaseModel):
    """No unknown keys, and no number that is infinite or none."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False, str_max_length=TEXT)


class Elastic(Strict):
    """weight / 2 x sum F_i (theta_i - theta*_i)^2, F the mean squared gradient of single examples' training loss."""

    weight: float = Field(gt=0, le=FACTOR, description="factor of the penalty (lambda)")
    n: int = Field(200, ge=1, le=IMAGES, description="how many examples F is the mean of")


class Side(Strict):
    """One player: which prompts (or which labelled data), which loss, and where the images come from."""

    prompts: str | list[str] | None = Field(None, description="a prompt set by name or path, or a list of prompts")
    data: str | None = Field(None, description="labelled data: a set of datasets/ by name, a folder with one subfolder a class, an .npz with x and y; or rest: what the forget side leaves of its data")  # fmt: skip
    options: dict[str, Any] = Field({}, description="options of a named data set")
    classes: list[str | Annotated[int, Field(ge=0, le=CLASSES)]] | None = Field(
        None, max_length=CLASSES, description="labelled data: all examples of these classes, by name or number"
    )
    share: float | None = Field(None, gt=0, le=1, description="labelled data: a random share of the examples, drawn with generation.seed")  # fmt: skip
    indices: list[Annotated[int, Field(ge=0, le=POSITION)]] | str | None = Field(
        None, description="labelled data: these examples, by position: a list, or a file with one a line"
    )
    l1: float = Field(
        0.0,
        ge=0,
        le=FACTOR,
        description="target classifier or clip: adds l1 x sum |weights| to the loss (l1-sparse: 1e-5 to 1e-3)",
    )
    distill: float = Field(
        0.0,
        ge=0,
        le=FACTOR,
        description="target classifier or clip: adds distill x KL(teacher || model) to the loss (alpha of SCRUB: 0.001 to 0.5)",
    )
    beta: float = Field(
        0.1,
        gt=0,
        le=FACTOR,
        description="of the loss npo: how soon it saturates; near 0 it is ascent (0.1: the paper; of a denoiser, in units of 1 / loss: 10 to 1000)",
    )
    kl: float = Field(1.0, ge=0, le=FACTOR, description="target vae: weight of the KL term (1: the evidence bound)")
    loss: str = Field("data", description="data, ascent, anchor, esd, distill, relabel, npo or resteer")
    anchor: str | dict[str, str] | None = Field(None, description="what to show instead: a text that may use the prompt's fields, e.g. 'a {color} square', or the fields to replace in it, e.g. {shape: square}")  # fmt: skip
    teacher: Literal["frozen", "current"] = Field("frozen", description="whose prediction is the target: the model before training (ours) or the current one (MUNBa's public code)")  # fmt: skip
    eta: float = Field(1.0, ge=0, le=FACTOR, description="negative guidance of the loss 'esd' (1.0: the paper)")
    neutral: Literal["null", "anchor"] | None = Field(None, description="what the loss 'esd' pushes away to: null, the empty prompt (default: ESD), or the anchor (SPM)")  # fmt: skip
    tokens: Literal["concept", "concept_and_end"] | None = Field(None, description="what the loss 'resteer' looks away from: the tokens that the anchor does not have (without one: all words), alone or with the end tokens (default: Forget-Me-Not's own setting)")  # fmt: skip
    elastic: Elastic | None = Field(None, description="target denoiser: adds a pull of the weights back to where they were, stronger where these examples depend on them (Selective Amnesia)")  # fmt: skip
    scale: float = Field(1.0, gt=0, le=FACTOR, description="factor of this side's loss")
    images: str = Field("generate", description="generate (by the model itself), free (no images: latents sampled on the fly), or a folder of images with captions")  # fmt: skip
    noised: Literal["own", "anchor"] | None = Field(None, description="whose images are noised to x_t: those of the prompt or of its anchor (default: the loss's; relabel: anchor, all others: own)")  # fmt: skip
    empty_prompts: float = Field(0.0, ge=0, lt=1, description="how often an example is asked without its prompt and anchor, so that what guidance subtracts stays what it was (0.25: the default of `erase`; losses anchor, distill and esd)")  # fmt: skip
    n: int = Field(400, ge=1, le=IMAGES, description="how many images to generate (MUNBa: about 400 a side)")
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
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] < value[1] <= 1000:
            raise ValueError(f"expected [low, high] with 0 <= low < high <= 1000, found {list(value)}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Side:
        if (self.prompts is None) == (self.data is None):
            raise ValueError("give either prompts (for a text-to-image model) or data (labelled examples)" + (", not both" if self.prompts else "; a side that the recipe does not have needs it beside its other settings"))  # fmt: skip
        if self.data == "rest" and (self.classes or self.share or self.indices or self.options):
            raise ValueError(
                "data: rest is all that the forget side leaves; it takes no classes, share, indices or options"
            )
        if self.data is not None:
            return self
        if isinstance(self.anchor, str):
            templates.fields(self.anchor)
        for word in self.anchor.values() if isinstance(self.anchor, dict) else ():
            if wrong := templates.text_problem(word):
                raise ValueError(f"anchor: the text {shown(word)} {wrong}")
        if self.classes is not None or self.share is not None or self.indices is not None or self.options:
            raise ValueError("classes, share, indices and options belong to labelled data; give `data`, not prompts")
        if self.loss in ANCHORED and not self.anchor:
            raise ValueError(
                f"the loss {self.loss!r} needs an anchor: what to show instead, e.g. anchor: 'a person' or anchor: {{shape: circle}}"
            )
        for key in ("noised", "neutral"):
            if getattr(self, key) == "anchor" and not self.anchor:
                raise ValueError(f"{key}: anchor needs an anchor")
        for key, loss in (("neutral", "esd"), ("tokens", "resteer")):
            if getattr(self, key) is not None and self.loss != loss:
                raise ValueError(f"{key} is a setting of the loss {loss!r}, found loss {self.loss!r}")
        if self.empty_prompts and self.loss not in WITH_EMPTY:
            raise ValueError(f"empty_prompts needs a loss that keeps what the model says without a prompt ({', '.join(WITH_EMPTY)}), found {self.loss!r}")  # fmt: skip
        if self.empty_prompts and (self.images == "free" or self.teacher == "current"):
            found = "images: free, where x_t is sampled without the prompt too" if self.images == "free" else "teacher: current, which follows the model"  # fmt: skip
            raise ValueError(f"empty_prompts holds what the model said without a prompt at pictures of this side, so it does not go with {found}")  # fmt: skip
        if self.elastic is not None and self.images == "free":
            raise ValueError("elastic asks how the training loss on images depends on the weights, so images: free is not possible")  # fmt: skip
        if self.images == "free" and self.loss in WITH_TARGET:
            raise ValueError(f"the loss {self.loss!r} needs images, so images: free is not possible; use anchor, esd, distill or resteer")  # fmt: skip
        return self


def concept_player(number: int) -> str:
    """The player of the concept with this number, counted from 0: forget, forget.2, forget.3, ..."""
    return f"forget.{number + 1}" if number else "forget"


def role(player: str) -> str:
    """What a player is: that of `forget.3` is forget."""
    return player.partition(".")[0]


# one side, or a list of them; told apart by hand, so that an error speaks of the form that was meant
Forget = Annotated[
    Annotated[Side, Tag(ONE)] | Annotated[list[Side], Tag(MANY), Field(max_length=CONCEPTS)],
    Discriminator(lambda value: MANY if isinstance(value, list) else ONE),
]


class Attack(Strict):
    """An adversary inside the training: an offset of the forgotten prompts' embedding that wants the concept back; where the
    text encoder is trained, of their tokens' embeddings."""

    decay: float = Field(
        1e-4,
        ge=0,
        le=FACTOR,
        description="c in the attack's loss, the training loss on the forgotten images + c/2 ||offset||^2",
    )
    n: int = Field(400, ge=1, le=IMAGES, description="how many images of the forgotten prompts to generate for it")


class Histogram(Strict):
    """A judge inside the training: the share of samples in which it sees the concept, as a loss (UNO's hat versions)."""

    concept: dict[str, str] = Field(description="attribute: value, e.g. {shape: star}")
    judge: str = Field("tiny", description="a judge by name; for a VAE the folder of a saved classifier")
    alpha: float = Field(1e-8, gt=0, lt=0.5, description="share of samples that may show the concept (UNO: 1e-8)")
    timesteps: tuple[int, int] = Field((0, 500), description="range of diffusion time steps; one-step samples from pure noise show nothing")  # fmt: skip

    @field_validator("concept")
    @classmethod
    def _one(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) != 1:
            raise ValueError(f"expected one attribute and its value, e.g. {{shape: star}}, found {shown(value)}")
        return value


class Watch(Strict):
    """Look at the concept's share while training: after how many steps and seconds is it gone?"""

    suite: str = Field(description="the evaluation suite whose concept, judge, sampler and prompts are used")
    group: str = "direct"
    every: int = Field(10, ge=1, le=TRAINING_STEPS, description="steps between two looks")
    n: int = Field(50, ge=2, le=IMAGES, description="pictures a look")
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


class Lora(Strict):
    """Low-rank factors in place of the weights: W + alpha / rank x up down."""

    rank: int = Field(4, ge=1, le=RANK, description="of the change to each layer")
    alpha: float = Field(
        4, gt=0, le=FACTOR, description="the change is scaled by alpha / rank; default: the rank, so by 1"
    )
    conv: bool = Field(False, description="convolutions too, not only linear layers")

    @model_validator(mode="before")
    @classmethod
    def _alpha_is_the_rank(cls, value: Any) -> Any:
        """`lora: 8` stands for a rank; spelled out, so that the default may change and a run folder does not."""
        given = value if isinstance(value, dict) else {"rank": value}
        return {"alpha": given["rank"], **given} if isinstance(given.get("rank"), int | float) else given


class Trainable(Strict):
    """Which weights may move."""

    select: str = Field("all", description="see `concept-eraser list selections`, or re:<regular expression>")
    batchnorm: Literal["frozen", "train"] = Field("frozen", description="classifier, vae: keep the running statistics (ours), or use and update the batch's")  # fmt: skip

    lora: Lora | None = Field(None, description="denoiser, text_encoder: train low-rank factors of the selected linear layers instead of their weights")  # fmt: skip
    saliency: float | None = Field(None, gt=0, lt=1, description="only this share of the selected weights moves: those with the largest |gradient| of the forget loss (SalUn: 0.5)")  # fmt: skip
    negate: float | None = Field(
        None,
        gt=0,
        le=PORTION,
        description="after training on the concept, turn round what it did: W becomes W - this x (trained W - W) (task arithmetic)",
    )
    reinitialise: float | None = Field(None, gt=0, lt=1, description="before training, this share of the selected weights is drawn anew: those with the largest |gradient x weight| of the forget loss (Scissorhands: 0.1 or 0.9)")  # fmt: skip

    @field_validator("lora", mode="before")
    @classmethod
    def _on_or_off(cls, value: Any) -> Any:
        """`lora: none` and `false` are none, `true` one with the usual settings."""
        return None if value is False or value == "none" else {} if value is True else value

    @field_validator("select")
    @classmethod
    def _known_selection(cls, value: str) -> str:
        from concept_eraser.training.parameters import problem

        wrong = problem(value)
        if wrong:
            raise ValueError(wrong)
        return value


class Training(Strict):
    """How long, how fast, how exact."""

    steps: int = Field(200, ge=1, le=TRAINING_STEPS)
    batch_size: int = Field(16, ge=1, le=BATCH, description="examples of each side in a micro-batch")
    micro_batches: int = Field(
        1, ge=1, le=BATCH, description="micro-batches accumulated before the gradients are combined"
    )
    lr: float = Field(1e-4, gt=0, le=LEARNING_RATE)
    warmup: int = Field(0, ge=0, le=TRAINING_STEPS, description="steps of linear warm-up")
    decay: Literal["none", "linear"] = Field(
        "none", description="linear: the learning rate falls to 0 at the last step"
    )
    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "adamw8bit"] = Field("adam", description="adafactor: its second moments are kept as rows and columns, and lr is relative to the weights' size; adamw8bit: moments in 8 bits, by bitsandbytes (pip install 'concept-eraser[memory]')")  # fmt: skip
    weight_decay: float = Field(0.0, ge=0, le=LEARNING_RATE)
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast; weights stay in fp32")
    checkpointing: bool = Field(False, description="target denoiser, text_encoder: keep the denoiser's activations between blocks only and compute the rest again: less memory, more time, the same gradients")  # fmt: skip
    offload: bool = Field(False, description="text encoders, denoiser and VAE are on the device by turns while the examples are made, then what the training needs; all others on the CPU")  # fmt: skip
    frozen: Literal["fp32", "bf16"] = Field("fp32", description="bf16: weights of denoiser and text encoders that are not trained are held in bf16 while it trains; the erased model has them as they were")  # fmt: skip
    seed: int = Field(0, ge=0, le=SEED)
    save_every: int = Field(
        50, ge=1, le=TRAINING_STEPS, description="steps between states that --resume can go on from"
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="auto: a GPU if there is one")
    shard: Literal["none", "optimizer", "weights"] = Field("none", description="several processes: optimizer splits the optimizer's state among them; weights also the denoiser's weights, which a LoRA leaves as they are (docs/scale.md)")  # fmt: skip
    tracker: list[Literal["tensorboard", "wandb"]] = Field([], description="none, or where each step's numbers go beside log.jsonl: tensorboard, wandb, or a list of both")  # fmt: skip

    @field_validator("tracker", mode="before")
    @classmethod
    def _one_tracker(cls, value: Any) -> Any:
        return [] if value in (None, "none") else [value] if isinstance(value, str) else value


ASIDE = ("shard", "tracker")  # of Training: they change no number of the result
MEMORY = ("checkpointing", "offload", "frozen")  # of Training: where and in what precision, not what is trained


class Generation(Strict):
    """How training images are generated from the prompts."""

    steps: int = Field(25, ge=1, le=SAMPLER_STEPS)
    guidance: float = Field(5.0, ge=0, le=GUIDANCE)
    batch_size: int = Field(32, ge=1, le=BATCH)
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = Field(0, ge=0, le=SEED)
