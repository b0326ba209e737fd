"""The sections `training`, `generation`, `watch` and `rewinding` of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
)

from concept_eraser.recipes.strict import Strict, require_data_file
from concept_eraser.utils.limits import (
    BATCH,
    FACTOR,
    GUIDANCE,
    IMAGES,
    LEARNING_RATE,
    MILESTONES,
    POSITION,
    SAMPLER_STEPS,
    SEED,
    TRAINING_STEPS,
)

Beta = Annotated[float, Field(ge=0, lt=1)]
Milestone = Annotated[int, Field(ge=1, le=TRAINING_STEPS)]


class WatchSpec(Strict):
    """Measure the concept rate during the training, until the concept is gone."""

    suite: str = Field(
        description="the evaluation suite whose concept, judge, sampler and prompts are used"
    )
    group: str = Field("direct", description="the suite's group of prompts")
    every: int = Field(10, ge=1, le=TRAINING_STEPS, description="steps between two measurements")
    n: int = Field(50, ge=2, le=IMAGES, description="images per measurement")
    below: float = Field(
        0.02,
        gt=0,
        lt=1,
        description="the concept is gone at a rate below this (UNO: 0.02); measuring then ends",
    )

    @field_validator("suite")
    @classmethod
    def _known_suite(cls, value: str, info: ValidationInfo) -> str:
        require_data_file("eval", value, info)
        return value


class RewindingSpec(Strict):
    """Return to the round whose error on the forget set is that of unseen examples (SCRUB+R)."""

    data: str = Field(
        description=(
            "labelled data that the model was not trained on: a set of data/datasets/ by name, a "
            "folder with one subfolder per class, or an .npz with x and y; the examples of the "
            "forgotten classes are used"
        )
    )
    options: dict[str, Any] = Field({}, description="options of a named data set")
    split: Literal["train", "test"] = Field(
        "test", description="the split of a named set, or the subfolder of a folder"
    )
    indices: list[Annotated[int, Field(ge=0, le=POSITION)]] | str | None = Field(
        None,
        description="these examples of the split, by position: a list, or a file of one per line",
    )
    every: int | None = Field(
        None,
        ge=1,
        le=TRAINING_STEPS,
        description="training steps of a round (default: the rounds of the method, for scrub)",
    )


class TrainingSpec(Strict):
    """Length, optimizer, precision and memory of the training."""

    steps: int = Field(200, ge=1, le=TRAINING_STEPS, description="training steps")
    batch_size: int = Field(
        16, ge=1, le=BATCH, description="examples of each objective in a micro-batch"
    )
    micro_batches: int = Field(
        1, ge=1, le=BATCH, description="micro-batches accumulated before the gradients are combined"
    )
    lr: float = Field(1e-4, gt=0, le=LEARNING_RATE, description="learning rate")
    warmup: int = Field(0, ge=0, le=TRAINING_STEPS, description="steps of linear warm-up")
    decay: Literal["none", "linear", "cosine", "step"] = Field(
        "none",
        description=(
            "linear: the learning rate decreases to 0 at the last step; cosine: it decreases to 0 "
            "along a cosine after the warm-up; step: it is multiplied by decay_factor after each "
            "milestone"
        ),
    )
    cycles: int = Field(
        1, ge=1, le=TRAINING_STEPS, description="decay cosine: the number of decreases from lr to 0"
    )
    milestones: list[Milestone] = Field(
        [],
        max_length=MILESTONES,
        description="decay step: numbers of steps after which the learning rate changes",
    )
    decay_factor: float = Field(
        0.1, gt=0, le=1, description="decay step: the factor of the learning rate"
    )
    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "adamw8bit"] = Field(
        "adam",
        description=(
            "adafactor: its second moments are stored as rows and columns, and lr is relative "
            "to the weights' size; adamw8bit: moments in 8 bits, by bitsandbytes (pip "
            "install 'concept-eraser[memory]')"
        ),
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        le=LEARNING_RATE,
        description=(
            "weight decay of the optimizer: adam and sgd add it times the weights to the "
            "gradient; adamw, adamw8bit and adafactor shrink the weights by lr times it"
        ),
    )
    momentum: float = Field(
        0.0, ge=0, lt=1, description="optimizer sgd: momentum (heavy ball), e.g. 0.9"
    )
    nesterov: bool = Field(False, description="optimizer sgd: Nesterov's form of the momentum")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999),
        description=(
            "optimizers adam, adamw, adamw8bit: decay of the first and of the second moment"
        ),
    )
    clip: float | None = Field(
        None,
        gt=0,
        le=FACTOR,
        description=(
            "the largest norm of the combined gradient that the optimizer gets; a longer one is "
            "scaled down (MUNBa's code: 1)"
        ),
    )
    clip_each: bool = Field(
        False,
        description="apply clip to the gradient of each objective, before they are combined",
    )
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "save the exponential moving average of the trained weights instead of the last ones; "
            "its decay, e.g. 0.999; after n steps it is at most (1 + n) / (10 + n)"
        ),
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="bf16: autocast of the losses, not of data-free sampling; weights stay in fp32",
    )
    one_pass: Literal["auto", "on", "off"] = Field(
        "off",
        description=(
            "target denoiser: on computes the gradients of all objectives in one forward and "
            "backward pass; they are the same within rounding, and all activations are in memory "
            "at once; auto: on where it was measured to be faster (docs/memory.md)"
        ),
    )
    checkpointing: bool = Field(
        False,
        description=(
            "target denoiser, text_encoder: store the denoiser's activations between blocks "
            "only and recompute the others: less memory, more time, the same gradients"
        ),
    )
    offload: bool = Field(
        False,
        description=(
            "text encoders, denoiser and VAE are on the device one after the other while the "
            "examples are made, then only the parts that the training needs"
        ),
    )
    frozen: Literal["fp32", "bf16"] = Field(
        "fp32",
        description=(
            "bf16: weights of denoiser and text encoders that are not trained are in bf16 "
            "during the training; the erased model has their original values"
        ),
    )
    seed: int = Field(
        0, ge=0, le=SEED, description="seed of the examples, the time steps and the noise"
    )
    save_every: int = Field(
        50,
        ge=1,
        le=TRAINING_STEPS,
        description="steps between the states that --resume continues from",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto", description="auto: a GPU if there is one"
    )
    shard: Literal["none", "optimizer", "weights"] = Field(
        "none",
        description=(
            "several processes: optimizer splits the optimizer's state among them; weights "
            "also splits the denoiser's frozen weights under a LoRA (docs/scale.md)"
        ),
    )
    tracker: list[Literal["tensorboard", "wandb"]] = Field(
        [],
        description=(
            "none, or another place for the numbers of log.jsonl: tensorboard, wandb, or a list "
            "of both"
        ),
    )

    @field_validator("one_pass", mode="before")
    @classmethod
    def _words_of_yaml(cls, value: Any) -> Any:
        """Read the booleans that YAML makes of the words on and off."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("tracker", mode="before")
    @classmethod
    def _one_tracker(cls, value: Any) -> Any:
        return [] if value in (None, "none") else [value] if isinstance(value, str) else value


ASIDE = ("shard", "tracker")  # keys of TrainingSpec that change no number of the result


# keys of TrainingSpec that a recipe spells out only if they have another value than the default
OPTIMISATION = (
    "cycles",
    "milestones",
    "decay_factor",
    "momentum",
    "nesterov",
    "betas",
    "clip",
    "clip_each",
    "ema",
    "one_pass",
)

# keys of TrainingSpec for the placement and precision of the model, not for its training
MEMORY = ("checkpointing", "offload", "frozen")


class GenerationSpec(Strict):
    """How training images are generated from the prompts."""

    steps: int = Field(25, ge=1, le=SAMPLER_STEPS, description="steps of the sampler")
    guidance: float = Field(5.0, ge=0, le=GUIDANCE, description="classifier-free guidance scale")
    batch_size: int = Field(32, ge=1, le=BATCH, description="images that are generated at once")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast")
    seed: int = Field(0, ge=0, le=SEED, description="seed of the images")
