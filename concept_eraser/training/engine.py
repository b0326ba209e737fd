"""The training loop that serves every method, loss, model and selection of weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from concept_eraser.erasers.base import Draw, Eraser, Inseparable
from concept_eraser.methods.base import Direction, Method
from concept_eraser.methods.vectors import clip
from concept_eraser.storage import output_folder
from concept_eraser.training import checkpoint, one_pass, projection, saliency
from concept_eraser.training.averaging import Average
from concept_eraser.training.closure import of_step
from concept_eraser.training.distributed import sharding
from concept_eraser.training.log import Log, describe_gram, peak_memory
from concept_eraser.training.rewinding import Rewinding
from concept_eraser.training.stopping import Stops
from concept_eraser.training.trackers import Trackers
from concept_eraser.utils import distributed
from concept_eraser.utils.errors import Interrupted, UserError
from concept_eraser.utils.extras import import_from_extra
from concept_eraser.utils.progress import Progress, silent
from concept_eraser.utils.provenance import derive_seed

MAX_SKIPPED = 10  # steps in a row without a finite loss until the run stops


@dataclass(frozen=True)
class Schedule:
    """The numbers of a training. training_fields.TrainingSpec explains each of them."""

    steps: int
    batch_size: int
    micro_batches: int = 1
    lr: float = 1e-4
    warmup: int = 0
    decay: Literal["none", "linear", "cosine", "step"] = "none"
    cycles: int = 1
    milestones: Sequence[int] = ()
    decay_factor: float = 0.1
    optimizer: Literal["adam", "adamw", "sgd", "adafactor", "adamw8bit"] = "adam"
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None
    clip_each: bool = False
    ema: float | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    one_pass: Literal["auto", "on", "off"] = "off"
    seed: int = 0
    save_every: int = 50

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        It has a linear warm-up, and is then constant or decreases. `linear` decreases from the
        first step on, to 0 after the last. `cosine` decreases to 0 between the warm-up and the last
        step, `cycles` times. `step` multiplies the learning rate by `decay_factor` after each
        number of steps in `milestones`.
        """
        up = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return self.lr * up * self._fall(step)

    def _fall(self, step: int) -> float:
        if self.decay == "linear":
            return 1 - step / self.steps
        if self.decay == "cosine":
            done = max(0, step - self.warmup) / max(1, self.steps - self.warmup)
            return 0.5 * (1 + math.cos(math.pi * (self.cycles * done % 1.0)))
        if self.decay == "step":
            return float(self.decay_factor ** sum(step >= one for one in self.milestones))
        return 1.0


@dataclass
class Engine:
    """Trains an eraser with a method. `run` returns when all steps are done.

    The state of the run is stored in `folder`: log.jsonl, and state.ckpt until the run is finished.
    """

    eraser: Eraser
    method: Method
    schedule: Schedule
    folder: Path
    accelerator: Accelerator
    progress: Progress = silent
    # called between steps with the number of steps and the seconds of training so far
    watch: Callable[[int, float], None] | None = None
    saliency: float | None = None  # the share of the selected weights that is trained; None: all
    # the share of the retained inputs' singular values that the training leaves out; None: none
    project: float | None = None
    # the share of them that is reinitialised before training; None for none
    reinitialise: float | None = None
    shard: bool = False  # split the optimizer's state among the processes
    frees_weights: bool = False  # frozen weights are split too, and freed after each pass
    recomputes: bool = False  # the backward pass recomputes activations (training.checkpointing)
    trackers: Trackers | None = None
    rewinding: Rewinding | None = None  # returns to the state of a round after the last step
    trained_count: int = field(init=False, default=0)
    skipped: int = 0
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    # of this process with all its threads, independent of other processes
    cpu_seconds: float = 0.0
    # the parameters of the method: trained tensors, then the adversary's
    params: dict[str, nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.params = {**self.eraser.trainable(), **self.eraser.scratch()}
        self.trained_count = len(self.params)
        self._require_same_start()
        self.one_pass = one_pass.choose(
            self.eraser,
            one_pass.Setting(
                self.schedule.one_pass,
                batch_size=self.schedule.batch_size,
                device=(
                    self.accelerator.device.type if self.accelerator.num_processes == 1 else None
                ),
                uses_all=self.method.uses_all(self.eraser.objectives),
                micro_batches=self.schedule.micro_batches,
                recomputes=self.recomputes,
                frees_weights=self.frees_weights,
            ),
        )
        self.optimizer = self._optimizer(list(self.params.values()))
        self.params = {**self.params, **self.eraser.adversary()}
        began, busy = time.monotonic(), time.process_time()
        self.mask, self.bases = self._prepare()
        self.average = (
            Average(self.eraser.trainable(), self.schedule.ema) if self.schedule.ema else None
        )
        self.seconds += time.monotonic() - began
        self.cpu_seconds += time.process_time() - busy

    @property
    def checkpoint(self) -> Path:
        return self.folder / "state.ckpt"

    def run(self, *, resume: bool = False) -> None:
        if self.accelerator.is_main_process:
            output_folder.claim(self.folder, "run")  # a job has claimed it already
        step_count = self._restore() if resume else 0
        if self.skipped_in_a_row >= MAX_SKIPPED:
            self.skipped_in_a_row = (
                0  # the user resumes the run: other draws may give finite losses
            )
        log = (
            Log(self.folder / "log.jsonl", keep=step_count)
            if self.accelerator.is_main_process
            else None
        )
        stops = Stops(self._anyone if self.accelerator.num_processes > 1 else None)
        if self.trackers:
            self.trackers.start(step_count)
        try:
            with stops.loop():
                self._look(step_count)
                while step_count < self.schedule.steps:
                    with stops.step():
                        row = self.do_step(step_count, log)
                        step_count += 1
                    self.progress("erasing", step_count, self.schedule.steps, _note(row))
                    if step_count % self.schedule.save_every == 0:
                        self._save(step_count)
                    self._look(step_count)
                    self._give_up_if_hopeless(step_count)
            if self.average:
                self.average.write()
            if self.rewinding:
                self._rewind(self.rewinding)
        except KeyboardInterrupt:
            self._save(step_count)
            raise Interrupted(
                f"stopped after {step_count} of {self.schedule.steps} steps; the state is in "
                f"{self.checkpoint}"
            ) from None
        finally:
            if self.trackers:
                self.trackers.finish()

    def _save(self, step: int) -> None:
        """Write the state after `step` steps.

        All processes call this together; the main one writes.
        """
        # if the state is split, it is gathered from all processes
        optimizer = self.optimizer.state_dict()
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": step,
            "ranks": self.accelerator.num_processes,
            "params": {name: value.detach().cpu() for name, value in self.params.items()},
            "optimizer": optimizer,
            "method": self.method.state_dict(),
            "origin": self.eraser.origin,
            "buffers": {
                name: value.detach().cpu().clone() for name, value in self.eraser.buffers().items()
            },
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
        }
        if self.average:
            state["average"] = self.average.state_dict()
        if self.rewinding:
            state["rewinding"] = self.rewinding.state_dict()
        checkpoint.save(self.checkpoint, state)

    def _restore(self) -> int:
        """Load the state if there is one. Returns the number of steps that are done.

        Raises:
            UserError: The state is of another run, or not all processes see it.
        """
        exists = checkpoint.exists(self.checkpoint)
        if not distributed.same(exists):
            raise UserError(
                f"not all processes see {self.checkpoint}; the run folder must lie where "
                "all of them can read it"
            )
        if not exists:
            return 0
        state = checkpoint.load(self.checkpoint)
        checkpoint.require_same_run(
            self.checkpoint,
            state,
            params=set(self.params),
            origin=self.eraser.origin,
            processes=self.accelerator.num_processes,
        )
        with torch.no_grad():
            for name, value in state["params"].items():
                self.params[name].copy_(value)
            for name, value in state.get("buffers", {}).items():
                self.eraser.buffers()[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average:
            self.average.load_state_dict(state["average"])
        if self.rewinding:
            self.rewinding.load_state_dict(state["rewinding"])
        self.method.load_state_dict(state["method"])
        self.skipped, self.skipped_in_a_row = state["skipped"], state["skipped_in_a_row"]
        self.seconds, self.cpu_seconds = state["seconds"], state.get("cpu_seconds", 0.0)
        return int(state["step"])

    def do_step(self, step: int, log: Log | None) -> dict[str, Any]:
        """Do a step, count its time and write its row of the log."""
        began, busy = time.monotonic(), time.process_time()
        row = self._step(step)
        if self.rewinding:
            row |= self.rewinding.after_step(step + 1)
        row["seconds"] = time.monotonic() - began
        row["cpu_seconds"] = time.process_time() - busy
        self.seconds += row["seconds"]
        self.cpu_seconds += row["cpu_seconds"]
        row = {"step": step + 1, **row, "memory_mb": round(peak_memory(), 1)}
        if log:
            log.write(row)
        if self.trackers:
            self.trackers.log({**row, "lr": self.schedule.lr_at(step)})
        return row

    def _rewind(self, rewinding: Rewinding) -> None:
        """Return to a round, and count its time."""
        began, busy = time.monotonic(), time.process_time()
        rewinding.rewind()
        self.seconds += time.monotonic() - began
        self.cpu_seconds += time.process_time() - busy

    def _anyone(self, came: bool) -> bool:
        """Whether any process was asked to stop. All processes must call this."""
        return float(self._mean([torch.tensor(float(came), device=self.accelerator.device)])[0]) > 0

    def _require_same_start(self) -> None:
        """Raise UserError if the processes start from different weights.

        They would train different models.
        """
        if self.accelerator.num_processes > 1 and not distributed.same(self.eraser.origin):
            raise UserError(
                "the processes have loaded different weights; give all of them the same model files"
            )

    def _optimizer(self, params: list[nn.Parameter]) -> Any:
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        if not self.shard or ranks == 1:
            return _optimizer(params, self.schedule)
        return sharding.ShardedOptimizer(
            lambda some: _optimizer(some, self.schedule), params, rank, ranks
        )

    def _look(self, steps_done: int) -> None:
        if self.watch and self.accelerator.is_main_process:
            with self.average.applied() if self.average else nullcontext():
                self.watch(steps_done, self.seconds)

    def _step(self, step: int) -> dict[str, Any]:
        """Take one optimiser step, or none if a loss or the direction is not finite.

        Returns its row of the log.
        """
        turn = self.eraser.turn(step)
        if self.eraser.begins_anew:  # the moments are of other weights
            self.optimizer = self._optimizer(list(self.params.values())[: self.trained_count])
        draws = {objective: self._draws(objective, step) for objective in self.eraser.objectives}
        closure = of_step(
            self.eraser,
            tuple(self.params.values()),
            draws,
            step=step,
            inner=range(self.trained_count, len(self.params)),
            mask=self.mask,
            bases=self.bases,
            ranks=self.accelerator.num_processes,
            autocast=self._autocast,
            reduce=self._mean,
            frees_weights=self.frees_weights,
            clip=self.schedule.clip if self.schedule.clip_each else None,
            joint=partial(self._joint, draws) if self.one_pass else None,
        )
        method_state = self.method.state_dict()
        with self._full_precision():
            direction = self.method.direction(closure)
        is_finite = closure.is_finite(direction)
        row = {
            **turn,
            "losses": closure.losses,
            **describe_gram(closure.objectives, direction.gram, direction.weights),
            **direction.notes,
        }
        if is_finite:
            if not direction.hold:
                direction, is_clipped = self._clip(direction)
                if self.schedule.clip is not None:
                    row["clipped"] = closure.clipped + int(is_clipped)
                self._move(step, direction)
                if self.average:
                    self.average.update()
                # an objective whose gradient the method did not use changes nothing
                self._settle({objective: draws[objective] for objective in closure.losses})
            self.skipped_in_a_row = 0
        else:
            # the method's new state may not be finite either
            self.method.load_state_dict(method_state)
            self.skipped += 1
            self.skipped_in_a_row += 1
            row["skipped"] = 1
        return row

    def _joint(self, draws: Mapping[str, list[Draw]]) -> one_pass.Gradients:
        """Return the loss and the gradient of each objective, from one pass.

        Returns {} if they need a pass for each objective, as all steps from now on.
        """
        assert self.one_pass is not None
        sizes = (self.schedule.batch_size,) * len(draws)
        try:
            with self._autocast():
                return self.one_pass.gradients({name: one for name, (one,) in draws.items()}, sizes)
        except Inseparable as reason:
            one_pass.tell(self.schedule.one_pass, str(reason))
            self.one_pass = None
            return {}

    def _prepare(self) -> tuple[list[Tensor | None] | None, list[Tensor | None] | None]:
        """Choose the weights that are trained and their directions, and reinitialise some of them.

        Tensors that a loss adds, and an adversary, are excluded. Returns the masks and the bases of
        training/projection.py.
        """
        if self.project is not None:
            return self._project(self.project)
        if self.saliency is None and self.reinitialise is None:
            return None, None
        params = self.eraser.trainable()
        seed, size = self.schedule.seed, self.schedule.batch_size
        gradient = saliency.sensitivity(
            self.eraser,
            params,
            seed=seed,
            batch_size=size,
            micro_batches=self.schedule.micro_batches,
            reduce=self._mean,
        )
        if self.reinitialise is not None:
            saliency.start_anew(params, gradient, self.reinitialise, seed)
        if self.saliency is None:
            return None, None
        others = [None] * (len(self.params) - len(params))
        adapter = self.eraser.adapter
        masks = saliency.salient(
            dict(zip(params, gradient, strict=True)),
            self.saliency,
            whole=adapter.down if adapter else (),
        )
        return [*masks.values(), *others], None

    def _project(self, share: float) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the masks that hold what is not projected, and the bases of all other weights."""
        params = self.eraser.trainable()
        others = [None] * (len(self.params) - len(params))
        found = projection.bases(
            self.eraser,
            params,
            share=share,
            seed=self.schedule.seed,
            batch_size=self.schedule.batch_size,
            micro_batches=self.schedule.micro_batches,
        )
        masks = [
            torch.zeros_like(parameter) if basis is None else None
            for parameter, basis in zip(params.values(), found, strict=True)
        ]
        return [*masks, *others], [*found, *others]

    def _mean(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the mean of each tensor over the ranks."""
        return sharding.mean(values) if self.accelerator.num_processes > 1 else values

    def _autocast(self) -> AbstractContextManager[Any]:
        """Use bf16 in the forward pass of the losses.

        The draws are in fp32, also those that data-free training samples, unless the frozen weights
        are in bf16.
        Weights, gradients and inner products stay in fp32 or better.
        """
        return torch.autocast(
            self.accelerator.device.type, torch.bfloat16, enabled=self.schedule.precision == "bf16"
        )

    def _full_precision(self) -> AbstractContextManager[Any]:
        """Turn off TF32 in convolutions for methods that take differences of gradients.

        TF32 is cuDNN's default.
        """
        cudnn = torch.backends.cudnn
        if not self.method.needs_fp32 or not torch.cuda.is_available():
            return nullcontext()
        return cudnn.flags(
            enabled=cudnn.enabled,
            benchmark=cudnn.benchmark,
            deterministic=cudnn.deterministic,
            allow_tf32=False,
        )

    def _clip(self, direction: Direction) -> tuple[Direction, bool]:
        """Scale the combined gradient down to the largest norm, and say whether that was needed.

        The step of an adversary is left as it is.
        """
        if self.schedule.clip is None or self.schedule.clip_each:
            return direction, False
        trained, adversary = (
            direction.vec[: self.trained_count],
            direction.vec[self.trained_count :],
        )
        clipped = clip(trained, self.schedule.clip)
        return replace(direction, vec=(*clipped, *adversary)), clipped is not trained

    def _move(self, step: int, direction: Direction) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr_at(step)
        for i, (parameter, gradient) in enumerate(
            zip(self.params.values(), direction.vec, strict=True)
        ):
            if i < self.trained_count:
                parameter.grad = gradient.to(parameter.dtype)
            else:  # the method has scaled the adversary's step already
                parameter.data.sub_(gradient)
        if direction.hold_trained:
            self.optimizer.zero_grad(set_to_none=True)
            return
        parameters = list(self.params.values())[: self.trained_count]
        before = [p.detach().clone() for p in parameters] if self.mask else []
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():  # weight decay and preconditioners ignore the mask and the bases
            for parameter, old, mask in zip(parameters, before, self.mask or [], strict=False):
                if mask is not None:
                    parameter.copy_(torch.where(mask.bool(), parameter, old))
            for parameter, old, basis in zip(parameters, before, self.bases or [], strict=False):
                if basis is not None:
                    parameter.copy_(old + projection.without(parameter - old, basis))

    def _settle(self, draws: Mapping[str, list[Draw]]) -> None:
        """Update the running statistics of batch-norm layers, if they are trained.

        This happens once for each micro-batch, in one process after the other, so that the result
        is that of one process with all the micro-batches.
        """
        statistics = self.eraser.buffers()
        for objective, some in draws.items():
            for rank in range(self.accelerator.num_processes if statistics else 1):
                if rank == self.accelerator.process_index or not statistics:
                    for draw in some:
                        self.eraser.settle(objective, draw)
                if self.accelerator.num_processes > 1:
                    for value in statistics.values():
                        torch.distributed.broadcast(value, rank)

    def _draws(self, objective: str, step: int) -> list[Draw]:
        """Return this rank's micro-batches of a step.

        Example e of the global batch is drawn from (seed, step, objective, e).
        """
        size, micro = self.schedule.batch_size, self.schedule.micro_batches
        first = self.accelerator.process_index * micro * size
        seeds = [
            derive_seed(self.schedule.seed, step, objective, first + e) for e in range(micro * size)
        ]
        return [self.eraser.draw(objective, seeds[m * size : (m + 1) * size]) for m in range(micro)]

    def _give_up_if_hopeless(self, step: int) -> None:
        if self.skipped_in_a_row < MAX_SKIPPED:
            return
        self._save(step)  # skipped steps changed nothing, so this is the last good state
        raise UserError(
            f"the loss was not finite in {MAX_SKIPPED} steps in a row (steps "
            f"{step - MAX_SKIPPED + 1}-{step}); the last good state is in "
            f"{self.checkpoint}; lower training.lr (now {self.schedule.lr:g}) or use "
            "precision fp32"
        )


def optimizer_class(name: str) -> Any:
    """Return torch's or bitsandbytes' optimizer of a name.

    Raises UserError if it is not installed, before any work is done.
    """
    torch_classes = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "adafactor": torch.optim.Adafactor,
    }
    if name in torch_classes:
        return torch_classes[name]
    hint = "Without it, adafactor also has a small state"
    with import_from_extra("memory", f"training.optimizer {name}", hint=hint):
        from bitsandbytes.optim import AdamW8bit
    return AdamW8bit


def _optimizer(params: list[nn.Parameter], schedule: Schedule) -> torch.optim.Optimizer:
    make = optimizer_class(schedule.optimizer)
    own: dict[str, Any] = {}
    if schedule.optimizer == "sgd":
        own = {"momentum": schedule.momentum, "nesterov": schedule.nesterov}
    elif schedule.optimizer != "adafactor":
        own = {"betas": tuple(schedule.betas)}
    optimizer: torch.optim.Optimizer = make(
        params, lr=schedule.lr, weight_decay=schedule.weight_decay, **own
    )
    return optimizer


def _note(row: dict[str, Any]) -> str:
    losses = "  ".join(f"{objective} {value:.4f}" for objective, value in row["losses"].items())
    cosine = row.get("cosine")
    return losses + (f"  cos {cosine:+.2f}" if cosine is not None and math.isfinite(cosine) else "")
