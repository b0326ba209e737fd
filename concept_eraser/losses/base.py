"""What a loss is, the settings that an objective gives it, and terms that several targets share."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from concept_eraser import registry

Teacher = Literal["frozen", "current"]
Images = Literal["own", "anchor"]
# the prompt, its anchor, the empty prompt, those of the mixture of the loss slider
ConditionName = Literal["own", "anchor", "null", "mixture"]


@dataclass(frozen=True)
class TrajectoryTerms:
    """Settings of the loss `balance`. The defaults are those of EraseFlow's code.

    Attributes:
        steps: The time steps of the sampler.
        guidance: The guidance of the sampler, and of the prediction in training.
        early: How many of the steps before the last `late` count, drawn for each trajectory.
        late: How many of the last steps count, all of them.
        log_beta: The logarithm of beta, the reward of every trajectory.
        log_z: The first value of log Z, which is trained.
    """

    steps: int = 50
    guidance: float = 5.0
    early: int = 10
    late: int = 10
    log_beta: float = 2.5
    log_z: float = -0.1953


@dataclass(frozen=True)
class LossSettings:
    """Settings of an objective that losses read. Each loss reads some of them.

    Attributes:
        teacher: Whose prediction is the target: the model before the training, or the current one.
        eta: Negative guidance of `esd`.
        shows: For `histogram`, a judge's probability that images [batch, 3, height, width] show the
            concept.
        alpha: For `histogram`, the share of images that may show the concept.
        neutral: The prediction from which `esd` extrapolates: for the empty prompt or for the
        anchor.
        beta: Of `npo`.
        anchor: Of a classifier, the class to predict instead.
        kl: Of a VAE, the weight of the KL term.
        trajectory: Of the loss `balance`.
        log_z: For `balance`, the present value of log Z, a scalar in training.
        input_range: For `boundary`, the largest minus the smallest value of the data.
    """

    teacher: Teacher = "frozen"
    eta: float = 1.0
    shows: Callable[[Tensor], Tensor] | None = None
    alpha: float = 1e-8
    neutral: Literal["null", "anchor"] = "null"
    beta: float = 0.1
    anchor: int | None = None
    kl: float = 1.0
    trajectory: TrajectoryTerms = TrajectoryTerms()
    log_z: Tensor | None = None
    input_range: float = 1.0


class Loss(ABC):
    """A plug-in: the loss of one objective, to be minimised. A plug-in of another package is a
    frozen dataclass.

    The attributes are overridden in the class's body without an annotation, since an annotated name
    would be an option.

    Attributes:
        title: A line for `concept-eraser show`.
        source: An arXiv id or another reference.
        targets: The targets of a recipe that it can train.
        images: Whose images are noised, those of the prompt or of its anchor.
        needs_anchor: Whether the objective must have an anchor.
        needs_images: Whether it needs noised images, so that `images: free` is not possible.
        holds_empty: Whether it may be computed for the empty prompt (`empty_prompts`).

    Example:
        >>> @dataclass(frozen=True)
        ... class Clipped(Loss):
        ...     '''The squared error, cut off at `delta`.'''
        ...
        ...     needs_images = True
        ...     delta: float = 1.0
        ...
        ...     def compute(self, model, draw, settings):
        ...         difference = model.predict(draw) - draw.target
        ...         return difference.abs().clamp(max=self.delta).square().mean()
    """

    title: str = ""
    source: str = ""
    targets: tuple[str, ...] = ("denoiser",)
    images: Images = "own"
    needs_anchor: bool = False
    needs_images: bool = False
    holds_empty: bool = False

    def teacher_conditions(self, settings: LossSettings) -> tuple[ConditionName, ...]:
        """Return the conditions for which the loss reads its teacher's prediction.

        With `training.one_pass` the teacher predicts for those of all objectives at once. It
        predicts separately for conditions that are missing here.
        """
        return ()

    @abstractmethod
    def compute(self, model: Any, draw: Any, settings: LossSettings) -> Tensor:
        """Return the loss on one micro-batch, a scalar.

        Args:
            model: The model in training with its teacher; see the protocol of the target's module
                (`Predictor` of losses/denoiser.py).
            draw: The micro-batch with everything random already drawn (`DenoiserDraw` of
                losses/denoiser.py).
            settings: Settings of the objective.
        """


@dataclass(frozen=True)
class Formula(Loss):
    """A built-in loss: its function and what it needs.

    teachers: see `Loss.teacher_conditions`.
    """

    function: Callable[[Any, Any, LossSettings], Tensor]
    images: Images = "own"
    needs_anchor: bool = False
    needs_images: bool = False
    holds_empty: bool = False
    teachers: Callable[[LossSettings], tuple[ConditionName, ...]] = lambda settings: ()

    def teacher_conditions(self, settings: LossSettings) -> tuple[ConditionName, ...]:
        return self.teachers(settings)

    def compute(self, model: Any, draw: Any, settings: LossSettings) -> Tensor:
        return self.function(model, draw, settings)


def find(formulas: Mapping[str, Loss], loss: str | Loss | registry.Plugin) -> Loss:
    """Return the loss that an objective names.

    Args:
        formulas: The built-in losses of a target, e.g. `losses.denoiser.LOSSES`.
        loss: A built-in name, the name of an installed package's loss, one with options, or an
            object.

    Raises:
        UserError: There is no such loss.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str) and loss in formulas:
        return formulas[loss]
    return _outside(loss)


@functools.lru_cache(maxsize=64)
def _outside(loss: str | registry.Plugin) -> Loss:
    plugin: Loss = registry.read("loss", loss).build()
    return plugin


def each(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error of every example: [batch]."""
    return (prediction.float() - target.float()).square().flatten(1).mean(1)


def preference(losses: Tensor, before: Tensor, beta: float) -> Tensor:
    """Return -(2 / beta) mean log sigmoid(beta (losses - before)).

    It falls as the losses rise above their values before, and levels off. Its slope in a loss is -2
    sigmoid(-beta (loss - before)). At the start the slope is -1, which is gradient ascent, as for
    beta -> 0.
    """
    return 2 / beta * torch.nn.functional.softplus(-beta * (losses - before)).mean()


def bernoulli_divergence(p: Tensor, alpha: float) -> Tensor:
    """Return p log(p / (1 - alpha)) + (1 - p) log((1 - p) / alpha).

    This is the distance of a share p of retained samples from 1 - alpha.
    """
    # inside the logarithms only: at p = 0, where every sample shows the class, the slope must not
    # vanish
    tiny = 1e-6
    return (
        p * (p.clamp(min=tiny) / (1 - alpha)).log()
        + (1 - p) * ((1 - p).clamp(min=tiny) / alpha).log()
    )
