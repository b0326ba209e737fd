"""Training a classifier, or any model with one logit per class, such as CLIP with class names.

The model maps [n, ...] to [n, classes]. The losses are those of losses/labelled.py. An objective
may add two terms. `l1` adds sum |weights| (l1-sparse, arXiv 2304.04934). `distill` adds KL(softmax
f* || softmax f), which with the loss `data` is the min-step of SCRUB: scale is its gamma, distill
its alpha.

Batch norm: see erasers/base.py. Each objective's batch passes through separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from concept_eraser.data.labelled import Labelled
from concept_eraser.erasers.base import BatchNorm, Part, Teacher, one_each
from concept_eraser.erasers.expansion import Expansion
from concept_eraser.losses import LossSettings, find
from concept_eraser.losses.labelled import CLASSIFIER_LOSSES, ClassifierDraw, distill
from concept_eraser.registry import Plugin
from concept_eraser.utils.devices import send
from concept_eraser.utils.errors import UserError, first_line

COUNTED = 256  # examples whose predictions are counted at once
RANGED = 256  # examples whose values give the range of the data


@dataclass(frozen=True)
class ClassifierObjective:
    """One objective: which examples of which data, and its loss."""

    data: Labelled
    rows: Tensor  # positions in the data
    loss: str | Plugin
    scale: float = 1.0
    anchor: int | None = None
    teacher: Teacher = "frozen"
    l1: float = 0.0
    distill: float = 0.0
    beta: float = 0.1

    @property
    def settings(self) -> LossSettings:
        return LossSettings(self.teacher, beta=self.beta, anchor=self.anchor)


class Classifier(Part):
    """The eraser of a classifier.

    Raises UserError if the model's outputs do not fit the labels.
    """

    def __init__(
        self,
        module: nn.Module,
        objectives: Mapping[str, ClassifierObjective],
        selected_names: Sequence[str],
        *,
        batchnorm: BatchNorm = "frozen",
        batch_size: int = 2,
    ) -> None:
        super().__init__(
            module, selected_names, list(objectives), batchnorm=batchnorm, batch_size=batch_size
        )
        self.objective_by_name = objectives
        # as many as the model has outputs for
        self.classes = min(self._fits(name, objective) for name, objective in objectives.items())
        wanting = [objective for objective in objectives.values() if objective.loss == "expand"]
        self.expansion = Expansion(module, self._example(wanting[0])) if wanting else None
        self.input_ranges = {
            name: _input_range(objective)
            for name, objective in objectives.items()
            if objective.loss == "boundary"
        }

    def _example(self, objective: ClassifierObjective) -> Tensor:
        """Return two examples if there are two, since some norm layers need more than one."""
        return objective.data.inputs(objective.rows[:2].tolist()).to(self.device)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def _fits(self, name: str, objective: ClassifierObjective) -> int:
        """Return the number of logits for an example of an objective.

        Raises UserError if they are no logits of its classes.
        """
        with torch.no_grad():
            try:
                outputs = self.module(self._example(objective))
            except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
                if isinstance(error, UserError):  # an error of the data themselves
                    raise
                raise UserError(
                    f"{name}: the model cannot take an example of {objective.data.about} "
                    f"({first_line(error)})"
                ) from error
        classes = len(objective.data.names)
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[1] < classes:
            shape = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise UserError(
                f"{name}: expected logits of shape [n, {classes}] for the {classes} "
                f"classes of {objective.data.about}, found {shape}"
            )
        numbers = tuple(map(str, range(classes)))
        if outputs.shape[1] > classes and objective.data.names != numbers:
            raise UserError(
                f"{name}: the model has {outputs.shape[1]} outputs, {objective.data.about} "
                f"has {classes} named classes, so the meaning of the outputs is unknown; "
                f"give data with all {outputs.shape[1]} classes' names (the numbers from 0 as "
                "names may leave out the last ones)"
            )
        if objective.anchor is not None and objective.anchor >= outputs.shape[1]:
            raise UserError(
                f"{name}: the anchor is class {objective.anchor}, the model has {outputs.shape[1]}"
            )
        if objective.loss in ("relabel", "boundary") and outputs.shape[1] < 2:
            raise UserError(
                f"{name}: the loss {objective.loss!r} needs another class, the model has only one"
            )
        return int(outputs.shape[1])

    def scratch(self) -> dict[str, nn.Parameter]:
        return self.expansion.parameters() if self.expansion else {}

    def draw(self, objective_name: str, seeds: Sequence[int]) -> ClassifierDraw:
        objective = self.objective_by_name[objective_name]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rows = one_each(objective.rows, generators)
        labels = objective.data.labels[rows]
        step = torch.cat(
            [torch.randint(1, max(2, self.classes), (1,), generator=g) for g in generators]
        )
        others = (labels + step) % self.classes
        device = self.device
        return ClassifierDraw(
            send(objective.data.inputs(rows.tolist()), device),
            send(labels, device),
            send(others, device),
        )

    def logits(self, draw: ClassifierDraw, *, teacher: Teacher | None = None) -> Tensor:
        if teacher is not None:
            return self.ask("forward", draw.inputs, teacher=teacher).float()
        with self.batch_statistics():
            return self.ask("forward", draw.inputs).float()

    def settle(self, objective_name: str, draw: ClassifierDraw) -> None:
        if self.batchnorm == "train":
            with torch.no_grad(), self.batch_statistics(moving=True):
                self.ask("forward", draw.inputs)

    def require_fitting(self, name: str, data: Labelled, rows: Tensor) -> None:
        """Raise UserError if the model's outputs do not fit the labels of further examples."""
        self._fits(name, ClassifierObjective(data, rows, "data"))

    @torch.no_grad()
    def count_wrong(self, data: Labelled, rows: Tensor) -> int:
        """Return how many examples at some positions the model predicts wrong.

        Batch-norm layers use their running statistics, as in the erased model.
        """
        wrong = 0
        for some in rows.split(COUNTED):
            predicted = self.module(send(data.inputs(some.tolist()), self.device)).argmax(1)
            wrong += int((predicted.cpu() != data.labels[some]).sum())
        return wrong

    def training_loss(self, objective_name: str, draw: ClassifierDraw) -> Tensor:
        """The training loss of the model on a draw: cross-entropy to the examples' own labels."""
        settings = self.objective_by_name[objective_name].settings
        return CLASSIFIER_LOSSES["data"].compute(self, draw, settings)

    def loss(self, objective_name: str, draw: ClassifierDraw) -> Tensor:
        objective = self.objective_by_name[objective_name]
        loss, settings = find(CLASSIFIER_LOSSES, objective.loss), objective.settings
        if objective_name in self.input_ranges:
            settings = replace(settings, input_range=self.input_ranges[objective_name])
        value = objective.scale * loss.compute(self, draw, settings)
        if objective.distill:
            value = value + objective.distill * distill(self, draw, settings)
        if objective.l1:
            value = (
                value
                + objective.l1
                * torch.stack([p.abs().sum() for p in self.trainable().values()]).sum()
            )
        return value


def _input_range(objective: ClassifierObjective) -> float:
    """Return the largest minus the smallest value of an objective's examples.

    Of many examples some are read, evenly spread over them.
    """
    count = len(objective.rows)
    places = torch.linspace(0, count - 1, min(count, RANGED)).long()
    low, high = float("inf"), -float("inf")
    for some in objective.rows[places].split(16):
        inputs = objective.data.inputs(some.tolist())
        low, high = min(low, float(inputs.min())), max(high, float(inputs.max()))
    return high - low
