"""Training a classifier, or anything with one logit a class (a CLIP model with its class names): [n, ...] -> [n, classes].

Losses of a side's examples (x, y), with f the model in training, f* its teacher, all to be minimised:

* data     cross-entropy of f(x) to y
* ascent   the negative of it
* relabel  cross-entropy to a random other class, drawn anew at every step (random labels: MUNBa section 4.2, SalUn)
* anchor   cross-entropy to one given class
* boundary cross-entropy to the class that the teacher says after one FGSM step of 0.1 on it away from y: the nearest
             other class (boundary shrink, arXiv 2303.11570; the likeliest other one where the step does not cross)
* expand   cross-entropy to one more class, whose output is trained along and thrown away at the end (boundary
             expanding, arXiv 2303.11570); for models whose last layer is linear
* distill  KL(softmax f*(x) || softmax f(x)): keep what the model says
* diverge  the negative of it: say something else than the teacher, whatever the label (SCRUB's max-steps, arXiv
             2302.09880); at the teacher its gradient is 0, so the first step is the others'
* npo      -(2/beta) log sigmoid(-beta log(p(y | x) / p*(y | x))) (negative preference optimisation, arXiv 2404.05868,
             y the label instead of an answer): the gradient of `ascent`, example by example times
             2 p^beta / (p^beta + p*^beta), which is 1 at the teacher (and anywhere for beta -> 0) and falls to 0 as the
             example is forgotten. The paper's NPO is this alone, its NPO+RT a retain side with the loss `data`

Terms that a side may add: l1 sum |weights| (l1-sparse, arXiv 2304.04934), and distill KL(softmax f* || softmax f), which
with the loss `data` is the min-step of SCRUB: scale its gamma, distill its alpha.

Batch norm: see erasers/base.py. Each player's batch passes through separately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser.data.labelled import Labelled
from concept_eraser.erasers.base import BatchNorm, Part, Teacher, one_each
from concept_eraser.erasers.expansion import Expansion
from concept_eraser.errors import UserError, first_line
from concept_eraser.losses import preference


@dataclass(frozen=True)
class Side:
    """One player: which examples of which data, and its loss."""

    data: Labelled
    rows: Tensor  # positions in the data
    loss: str
    scale: float = 1.0
    anchor: int | None = None
    teacher: Teacher = "frozen"
    l1: float = 0.0
    distill: float = 0.0
    beta: float = 0.1


@dataclass(frozen=True)
class Draw:
    """One micro-batch: inputs [b, ...], labels [b], other labels [b]."""

    inputs: Tensor
    labels: Tensor
    others: Tensor

    @property
    def terms(self) -> int:
        """How many numbers the loss is the mean of."""
        return len(self.labels)


class Classifier(Part):
    """See the module's docstring. Raises UserError where the model's outputs do not fit the labels."""

    def __init__(self, module: nn.Module, sides: Mapping[str, Side], selected: Sequence[str], *, batchnorm: BatchNorm = "frozen", batch_size: int = 2) -> None:  # fmt: skip
        super().__init__(module, selected, list(sides), batchnorm=batchnorm, batch_size=batch_size)
        self.sides = sides
        self.classes = min(self._fits(name, side) for name, side in sides.items())  # as many as the model tells apart
        wanting = [side for side in sides.values() if side.loss == "expand"]
        self.expansion = Expansion(module, self._example(wanting[0])) if wanting else None

    def _example(self, side: Side) -> Tensor:
        """Two examples where there are two: some norm layers cannot take one."""
        return side.data.inputs(side.rows[:2].tolist()).to(self.device)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def _fits(self, name: str, side: Side) -> int:
        """The number of logits for an example of a side. Raises UserError where they are no logits of its classes."""
        with torch.no_grad():
            try:
                found = self.module(self._example(side))
            except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
                if isinstance(error, UserError):  # the data's own complaint
                    raise
                raise UserError(f"{name}: the model cannot take an example of {side.data.about} ({first_line(error)})") from error  # fmt: skip
        classes = len(side.data.names)
        if not isinstance(found, Tensor) or found.ndim != 2 or found.shape[1] < classes:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UserError(f"{name}: expected logits of shape [n, {classes}] for the {classes} classes of {side.data.about}, found {shape}")  # fmt: skip
        if found.shape[1] > classes and not all(name.isdigit() for name in side.data.names):
            raise UserError(f"{name}: the model has {found.shape[1]} outputs, {side.data.about} has {classes} named classes, so which output means which is unknown; give data with all {found.shape[1]} classes' names (numbers as names may leave some out)")  # fmt: skip
        if side.anchor is not None and side.anchor >= found.shape[1]:
            raise UserError(f"{name}: the anchor is class {side.anchor}, the model has {found.shape[1]}")
        if side.loss in ("relabel", "boundary") and found.shape[1] < 2:
            raise UserError(f"{name}: the loss {side.loss!r} needs another class to give, the model has one")
        return int(found.shape[1])

    def scratch(self) -> dict[str, nn.Parameter]:
        return self.expansion.parameters() if self.expansion else {}

    def draw(self, player: str, seeds: Sequence[int]) -> Draw:
        side = self.sides[player]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rows = one_each(side.rows, generators)
        labels = side.data.labels[rows]
        step = torch.cat([torch.randint(1, max(2, self.classes), (1,), generator=g) for g in generators])
        others = (labels + step) % self.classes
        device = self.device
        return Draw(side.data.inputs(rows.tolist()).to(device), labels.to(device), others.to(device))

    def logits(self, draw: Draw, *, teacher: Teacher | None = None) -> Tensor:
        if teacher is not None:
            return self.ask("forward", draw.inputs, teacher=teacher).float()
        with self.batch_statistics():
            return self.ask("forward", draw.inputs).float()

    def settle(self, player: str, draw: Draw) -> None:
        if self.batchnorm == "train":
            with torch.no_grad(), self.batch_statistics(moving=True):
                self.ask("forward", draw.inputs)

    def loss(self, player: str, draw: Draw) -> Tensor:
        side = self.sides[player]
        found = side.scale * LOSSES[side.loss](self, draw, side)
        if side.distill:
            found = found + side.distill * _distill(self, draw, side)
        if side.l1:
            found = found + side.l1 * torch.stack([p.abs().sum() for p in self.trainable().values()]).sum()
        return found


def _data(model: Classifier, draw: Draw, side: Side) -> Tensor:
    return F.cross_entropy(model.logits(draw), draw.labels)


def _ascent(model: Classifier, draw: Draw, side: Side) -> Tensor:
    return -_data(model, draw, side)


def _relabel(model: Classifier, draw: Draw, side: Side) -> Tensor:
    return F.cross_entropy(model.logits(draw), draw.others)


def _anchor(model: Classifier, draw: Draw, side: Side) -> Tensor:
    assert side.anchor is not None  # the recipe asks for it
    return F.cross_entropy(model.logits(draw), torch.full_like(draw.labels, side.anchor))


def _boundary(model: Classifier, draw: Draw, side: Side) -> Tensor:
    inputs = draw.inputs.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        before = model.ask("forward", inputs, teacher=side.teacher, gradients=True)
        (slope,) = torch.autograd.grad(F.cross_entropy(before.float(), draw.labels), [inputs])
    across = Draw((inputs + 0.1 * slope.sign()).detach(), draw.labels, draw.others)
    seen = model.logits(across, teacher=side.teacher).clone()
    seen.scatter_(1, draw.labels[:, None], -torch.inf)
    return F.cross_entropy(model.logits(draw), seen.argmax(1))


def _expand(model: Classifier, draw: Draw, side: Side) -> Tensor:
    assert model.expansion is not None  # made where a side asks for this loss
    logits = model.expansion.logits(lambda: model.logits(draw))
    return F.cross_entropy(logits, torch.full_like(draw.labels, logits.shape[1] - 1))


def _distill(model: Classifier, draw: Draw, side: Side) -> Tensor:
    before = model.logits(draw, teacher=side.teacher).log_softmax(1)
    return F.kl_div(model.logits(draw).log_softmax(1), before, log_target=True, reduction="batchmean")


def _diverge(model: Classifier, draw: Draw, side: Side) -> Tensor:
    return -_distill(model, draw, side)


def _npo(model: Classifier, draw: Draw, side: Side) -> Tensor:
    before = F.cross_entropy(model.logits(draw, teacher=side.teacher), draw.labels, reduction="none")
    return preference(F.cross_entropy(model.logits(draw), draw.labels, reduction="none"), before, side.beta)


LOSSES: dict[str, Callable[[Classifier, Draw, Side], Tensor]] = {
    "data": _data,
    "ascent": _ascent,
    "relabel": _relabel,
    "anchor": _anchor,
    "boundary": _boundary,
    "expand": _expand,
    "distill": _distill,
    "diverge": _diverge,
    "npo": _npo,
}
