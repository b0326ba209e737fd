"""The training loop that serves every method, loss, model and selection of weights."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from concept_eraser.environment import derive_seed
from concept_eraser.errors import Interrupted, UserError
from concept_eraser.methods.base import Direction, Method
from concept_eraser.progress import Progress, silent
from concept_eraser.training import checkpoint, saliency
from concept_eraser.training.closure import Draw, of_step
from concept_eraser.training.log import Log, describe_gram, peak_memory
from concept_eraser.vectors import is_finite

MAX_SKIPPED = 10  # steps in a row without a finite loss before the run is given up


class Eraser(Protocol):
    """All that the engine knows of what is trained."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def players(self) -> tuple[str, ...]: ...
    def trainable(self) -> dict[str, nn.Parameter]: ...
    @property
    def adapter(self) -> Any: ...
    def finish(self) -> dict[str, Tensor]: ...
    def scratch(self) -> dict[str, nn.Parameter]: ...
    def restore(self) -> None: ...
    @property
    def origin(self) -> str: ...
    def buffers(self) -> dict[str, Tensor]: ...
    def settle(self, player: str, draw: Any) -> None: ...
    def adversary(self) -> dict[str, nn.Parameter]: ...
    def draw(self, player: str, seeds: Sequence[int]) -> Any: ...
    def loss(self, player: str, draw: Any) -> Tensor: ...


@dataclass(frozen=True)
class Schedule:
    """How long and how fast: see sections.Training for the meaning and the defaults of each."""

    steps: int
    batch_size: int
    micro_batches: int = 1
    lr: float = 1e-4
    warmup: int = 0
    decay: Literal["none", "linear"] = "none"
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    weight_decay: float = 0.0
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    save_every: int = 50

    def lr_at(self, step: int) -> float:
        """Linear warm-up, then constant or falling linearly to 0 after the last step."""
        up = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return self.lr * up * ((1 - step / self.steps) if self.decay == "linear" else 1.0)


@dataclass
class Engine:
    """Trains an eraser with a method; `run` returns when all steps are done.

    The state of the run lies in `folder`: log.jsonl, and state.ckpt while it is not finished.
    """

    eraser: Eraser
    method: Method
    schedule: Schedule
    folder: Path
    accelerator: Accelerator
    progress: Progress = silent
    watch: Callable[[int, float], None] | None = None  # asked between steps: steps done, seconds of training so far
    saliency: float | None = None  # the share of the trained weights that may move; None for all
    reinitialise: float | None = None  # the share of them that is drawn anew before training; None for none
    trained: int = field(init=False, default=0)
    skipped: int = 0
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    params: dict[str, nn.Parameter] = field(init=False)  # what the method sees: trained tensors, then the adversary's

    def __post_init__(self) -> None:
        self.params = {**self.eraser.trainable(), **self.eraser.scratch()}
        self.trained = len(self.params)
        self.optimizer = _optimizer(list(self.params.values()), self.schedule)
        self.params = {**self.params, **self.eraser.adversary()}
        began = time.monotonic()
        self.mask = self._prepare()
        self.seconds += time.monotonic() - began

    @property
    def checkpoint(self) -> Path:
        return self.folder / "state.ckpt"

    def run(self, *, resume: bool = False) -> None:
        done = self._restore() if resume else 0
        log = Log(self.folder / "log.jsonl", keep=done) if self.accelerator.is_main_process else None
        try:
            self._look(done)
            for step in range(done, self.schedule.steps):
                began = time.monotonic()
                with whole_steps():
                    row = self._step(step)
                    done = step + 1
                    row["seconds"] = time.monotonic() - began
                    self.seconds += row["seconds"]
                    if log:
                        log.write({"step": done, **row, "memory_mb": round(peak_memory(), 1)})
                self.progress("erasing", done, self.schedule.steps, _note(row))
                if done % self.schedule.save_every == 0:
                    self._save(done)
                self._look(done)
                self._give_up_if_hopeless(done)
        except KeyboardInterrupt:
            self._save(done)
            raise Interrupted(f"stopped after {done} of {self.schedule.steps} steps; the state is in {self.checkpoint}") from None  # fmt: skip

    def _look(self, done: int) -> None:
        if self.watch and self.accelerator.is_main_process:
            self.watch(done, self.seconds)

    def _step(self, step: int) -> dict:
        """One optimiser step, or none where a loss or the direction is not finite. Returns its log row."""
        draws = {player: self._draws(player, step) for player in self.eraser.players}
        closure = of_step(
            self.eraser,
            tuple(self.params.values()),
            draws,
            step=step,
            inner=range(self.trained, len(self.params)),
            mask=self.mask,
            ranks=self.accelerator.num_processes,
            autocast=self._autocast,
            reduce=self._mean,
        )
        kept = self.method.state_dict()
        with self._full_precision():
            direction = self.method.direction(closure)
        row = {"losses": closure.losses, **describe_gram(closure.players, direction.gram, direction.weights), **direction.notes}  # fmt: skip
        if all(math.isfinite(value) for value in closure.losses.values()) and is_finite(direction.vec):
            self._move(step, direction)
            self._settle({player: draws[player] for player in closure.losses})  # a player never asked moves nothing
            self.skipped_in_a_row = 0
        else:
            self.method.load_state_dict(kept)  # what it learned from this step is as good as the step
            self.skipped += 1
            self.skipped_in_a_row += 1
            row["skipped"] = 1
        return row

    def _prepare(self) -> list[Tensor | None] | None:
        """Choose the weights that may move, and draw anew those that shall; an adversary is neither."""
        if self.saliency is None and self.reinitialise is None:
            return None
        params = dict(list(self.params.items())[: self.trained])
        seed, size = self.schedule.seed, self.schedule.batch_size
        gradient = saliency.sensitivity(self.eraser, params, seed, size, self._mean)
        if self.reinitialise is not None:
            saliency.start_anew(params, gradient, self.reinitialise, seed)
        if self.saliency is None:
            return None
        return [*saliency.salient(gradient, self.saliency), *[None] * (len(self.params) - self.trained)]

    def _mean(self, value: Tensor) -> Tensor:
        """Over the ranks."""
        return self.accelerator.reduce(value, reduction="mean")

    def _autocast(self) -> AbstractContextManager:
        """bf16 for the forward pass; weights, gradients and inner products stay in fp32 or better."""
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.schedule.precision == "bf16")

    def _full_precision(self) -> AbstractContextManager:
        """No TF32 in convolutions for methods that take differences of gradients (it is cuDNN's default)."""
        cudnn = torch.backends.cudnn
        if not self.method.needs_fp32 or not torch.cuda.is_available():
            return nullcontext()
        return cudnn.flags(enabled=cudnn.enabled, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False)  # fmt: skip

    def _move(self, step: int, direction: Direction) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr_at(step)
        for i, (parameter, gradient) in enumerate(zip(self.params.values(), direction.vec, strict=True)):
            if i < self.trained:
                parameter.grad = gradient.to(parameter.dtype)
            else:  # the method has given the adversary's step its length
                parameter.data.sub_(gradient)
        trained = list(self.params.values())[: self.trained]
        before = [p.detach().clone() for p in trained] if self.mask else []
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():  # weight decay and preconditioners know no mask
            for parameter, old, mask in zip(trained, before, self.mask or [], strict=False):
                parameter.copy_(torch.where(mask.bool(), parameter, old))  # type: ignore[union-attr]

    def _settle(self, draws: Mapping[str, list[Draw]]) -> None:
        """Running statistics of batch-norm layers, where they are trained: once a micro-batch, the mean over ranks."""
        for player, some in draws.items():
            for draw in some:
                self.eraser.settle(player, draw)
        if self.accelerator.num_processes > 1:
            for value in self.eraser.buffers().values():
                if value.is_floating_point():
                    value.copy_(self._mean(value))

    def _draws(self, player: str, step: int) -> list[Draw]:
        """This rank's micro-batches of a step. Example e of the global batch draws from (seed, step, player, e)."""
        size, micro = self.schedule.batch_size, self.schedule.micro_batches
        first = self.accelerator.process_index * micro * size
        seeds = [derive_seed(self.schedule.seed, step, player, first + e) for e in range(micro * size)]
        return [self.eraser.draw(player, seeds[m * size : (m + 1) * size]) for m in range(micro)]

    def _give_up_if_hopeless(self, step: int) -> None:
        if self.skipped_in_a_row < MAX_SKIPPED:
            return
        self._save(step)  # skipped steps moved nothing: this is the last good state
        raise UserError(f"the loss was not finite in {MAX_SKIPPED} steps in a row (steps {step - MAX_SKIPPED + 1}-{step}); the last good state is in {self.checkpoint}; lower training.lr (now {self.schedule.lr:g}) or use precision fp32")  # fmt: skip

    def _save(self, step: int) -> None:
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": step,
            "params": {name: value.detach().cpu() for name, value in self.params.items()},
            "optimizer": self.optimizer.state_dict(),
            "method": self.method.state_dict(),
            "origin": self.eraser.origin,
            "buffers": {name: value.detach().cpu().clone() for name, value in self.eraser.buffers().items()},
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "seconds": self.seconds,
        }
        checkpoint.save(self.checkpoint, state)

    def _restore(self) -> int:
        """Load the checkpoint if there is one; the step to go on with."""
        if not self.checkpoint.exists():
            return 0
        state = checkpoint.load(self.checkpoint)
        if set(state["params"]) != set(self.params):
            raise UserError(
                f"{self.checkpoint} belongs to a run that trained other tensors; start over in a new folder"
            )
        if state.get("origin", self.eraser.origin) != self.eraser.origin:  # the teacher and the mask would be others
            raise UserError(f"{self.checkpoint} belongs to a run that started from other weights; give the original model again (an object in memory has been trained already)")  # fmt: skip
        with torch.no_grad():
            for name, value in state["params"].items():
                self.params[name].copy_(value)
            for name, value in state.get("buffers", {}).items():
                self.eraser.buffers()[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.method.load_state_dict(state["method"])
        self.skipped, self.skipped_in_a_row, self.seconds = (
            state["skipped"],
            state["skipped_in_a_row"],
            state["seconds"],
        )
        if self.skipped_in_a_row >= MAX_SKIPPED:
            self.skipped_in_a_row = 0  # the user asked to try on, perhaps with luck in the draw
        return int(state["step"])


@contextmanager
def whole_steps() -> Iterator[None]:
    """Hold back Ctrl-C until the block is done, so that a saved state lies between steps, never inside one.

    Signals reach the main thread only; elsewhere, and where somebody ignores Ctrl-C, nothing is to be held back.
    """
    ours = signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None)
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _optimizer(params: list[nn.Parameter], schedule: Schedule) -> torch.optim.Optimizer:
    if schedule.optimizer == "sgd":
        return torch.optim.SGD(params, lr=schedule.lr, weight_decay=schedule.weight_decay)
    kind = torch.optim.AdamW if schedule.optimizer == "adamw" else torch.optim.Adam
    return kind(params, lr=schedule.lr, weight_decay=schedule.weight_decay)


def _note(row: dict) -> str:
    losses = "  ".join(f"{player} {value:.4f}" for player, value in row["losses"].items())
    cosine = row.get("cosine")
    return losses + (f"  cos {cosine:+.2f}" if cosine is not None and math.isfinite(cosine) else "")
