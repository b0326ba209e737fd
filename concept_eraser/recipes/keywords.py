"""The types of the keywords of `erase`, `evaluate` and `attack`, for editors and type checkers.

The classes of the modules *_fields.py validate these mappings and describe each key. A test
compares the keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Required, TypeAlias, TypedDict

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from concept_eraser.data.labelled import Labelled
    from concept_eraser.evaluation.attacks.base import Attack
    from concept_eraser.evaluation.base import Judge, Metric
    from concept_eraser.evaluation.suite import Suite
    from concept_eraser.losses import Loss
    from concept_eraser.methods.base import Edit, Method

LabelledData: TypeAlias = (
    "Labelled | Dataset[Any] | tuple[NDArray[Any] | Tensor, NDArray[Any] | Tensor | Sequence[int]]"
)
# a plug-in by name, as a mapping of `name` and its options, or as an object
MethodSource: TypeAlias = "str | Mapping[str, Any] | Method | Edit"
LossSource: TypeAlias = "str | Mapping[str, Any] | Loss"
JudgeSource: TypeAlias = "str | Mapping[str, Any] | Judge"
MetricSource: TypeAlias = "str | Mapping[str, Any] | Metric"
AttackSource: TypeAlias = "str | Attack"  # `attack` has its options beside it
CascadeEntry: TypeAlias = "str | Mapping[str, Any] | Attack"
SuiteSource: TypeAlias = "str | Path | Mapping[str, Any] | Suite"

Target = Literal["denoiser", "text_encoder", "clip", "vae", "classifier"]
MemoryPreset = Literal["8gb", "12gb", "16gb", "24gb", "32gb", "48gb"]
SavedWeights = Literal["lora", "changed", "pipeline"]
LabelledSet = Literal["forget", "retain", "replace", "test"]


class ElasticSettings(TypedDict, total=False):
    """The penalty that pulls weights back to where they were."""

    weight: Required[float]
    n: int


class TrajectorySettings(TypedDict, total=False):
    """The trajectories of the loss `balance`."""

    steps: int
    guidance: float
    early: int
    late: int
    log_beta: float
    log_z: float


class ObjectiveSettings(TypedDict, total=False):
    """One objective: its prompts or labelled data, and its loss."""

    prompts: str | list[str] | Mapping[str, Any]
    data: str | LabelledData
    options: Mapping[str, Any]
    classes: Sequence[str | int]
    share: float
    indices: Sequence[int] | str
    l1: float
    distill: float
    beta: float
    kl: float
    loss: LossSource
    anchor: str | int | Mapping[str, str]
    teacher: Literal["frozen", "current"]
    eta: float
    neutral: Literal["null", "anchor"]
    mixture: Mapping[str, float]
    tokens: Literal["concept", "concept_and_end"]
    trajectory: TrajectorySettings
    elastic: ElasticSettings
    scale: float
    images: str
    noised: Literal["own", "anchor"]
    empty_prompts: float
    n: int
    timesteps: tuple[int, int] | list[int]


class AttackSettings(TypedDict, total=False):
    """The adversary of forum, adversarial, race, stereo, bome, moml and moco."""

    decay: float
    n: int
    warmup: int
    loss: Literal["noise", "prediction"]
    forget: Literal["both", "attacked"]
    tokens: int
    both_branches: bool


class HistogramSettings(TypedDict, total=False):
    """The judge inside the training of UNO's hat versions."""

    concept: Required[Mapping[str, str]]
    judge: JudgeSource | nn.Module
    alpha: float
    timesteps: tuple[int, int] | list[int]


class WatchSettings(TypedDict, total=False):
    """How the concept rate is measured during the training."""

    suite: Required[str]
    group: str
    every: int
    n: int
    below: float


class RewindingSettings(TypedDict, total=False):
    """Unseen examples, by whose error a round of the training is chosen."""

    data: Required[str | LabelledData]
    options: Mapping[str, Any]
    split: Literal["train", "test"]
    indices: Sequence[int] | str
    every: int


class LoraSettings(TypedDict, total=False):
    """The adapter that is trained in place of the weights."""

    rank: int
    alpha: float
    conv: bool


class TrainableSettings(TypedDict, total=False):
    """The trainable parameters."""

    select: str
    batchnorm: Literal["frozen", "train"]
    lora: int | bool | Literal["none"] | LoraSettings
    saliency: float
    project: float
    negate: float
    reinitialise: float
    start_token: Literal["frozen"] | None


class TrainingSettings(TypedDict, total=False):
    """The length, the optimizer and the precision of the training."""

    steps: int
    batch_size: int
    micro_batches: int
    lr: float
    warmup: int
    decay: Literal["none", "linear", "cosine", "step"]
    cycles: int
    milestones: list[int]
    decay_factor: float
    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "adamw8bit"]
    weight_decay: float
    momentum: float
    nesterov: bool
    betas: tuple[float, float] | list[float]
    clip: float | None
    clip_each: bool
    ema: float | None
    precision: Literal["fp32", "bf16"]
    one_pass: Literal["auto", "on", "off"]
    checkpointing: bool
    offload: bool
    frozen: Literal["fp32", "bf16"]
    seed: int
    save_every: int
    device: Literal["auto", "cpu", "cuda", "mps"]
    shard: Literal["none", "optimizer", "weights"]
    tracker: (
        Literal["none", "tensorboard", "wandb"] | Sequence[Literal["tensorboard", "wandb"]] | None
    )


class GenerationSettings(TypedDict, total=False):
    """The sampler that generates the training images."""

    steps: int
    guidance: float
    batch_size: int
    precision: Literal["fp32", "bf16"]
    seed: int


Objective: TypeAlias = str | list[str] | ObjectiveSettings
Objectives: TypeAlias = Objective | Sequence[Objective]  # one entry for each concept to forget
