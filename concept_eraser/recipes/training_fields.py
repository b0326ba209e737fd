"""What a recipe says of training, of the images that it generates, and of watching it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    field_validator,
)

from concept_eraser.recipes.strict import Strict
from concept_eraser.utils import resources
from concept_eraser.utils.limits import (
    BATCH,
    GUIDANCE,
    IMAGES,
    LEARNING_RATE,
    SAMPLER_STEPS,
    SEED,
    TRAINING_STEPS,
)


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
