"""A resumable training loop for the parts of the bundled model.

Each step draws its data from a generator seeded by (seed, stage, step). So a resumed build gives
the same weights as one without an interruption.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from concept_eraser.tiny.painter import SIZE


def as_tensor(images: np.ndarray) -> Tensor:
    """Convert images [n, 64, 64, 3] uint8 to [n, 3, 64, 64] float in [-1, 1]."""
    return (
        torch.from_numpy(np.ascontiguousarray(images))
        .permute(0, 3, 1, 2)
        .float()
        .div(127.5)
        .sub(1)
        .view(-1, 3, SIZE, SIZE)
    )


def step_rng(seed: int, stage: str, step: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(stage.encode()), step])


def cosine(step: int, steps: int, *, warmup: int = 50, flat: float = 0.0) -> float:
    """Return the learning-rate factor: linear warm-up, constant, then half a cosine to zero.

    flat: the share of the run in which it is constant.
    """
    if step < warmup:
        return (step + 1) / warmup
    start = flat * steps
    if step < start:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - start) / max(1, steps - start)))


def decay_groups(module: nn.Module, weight_decay: float) -> list[dict]:
    """Return AdamW groups without weight decay on vectors and on embedding tables.

    Weight decay would only shrink rare words.
    """
    tables = {
        id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()
    }
    weights = [
        p for p in module.parameters() if p.requires_grad and p.ndim > 1 and id(p) not in tables
    ]
    rest = [p for p in module.parameters() if p.requires_grad and (p.ndim <= 1 or id(p) in tables)]
    return [
        {"params": weights, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


@dataclass
class Trainer:
    """Runs `loss(step, rng)` for `steps` optimiser steps.

    It has checkpoints, resume, EMA and a progress line.
    """

    stage: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    seed: int
    folder: Path
    flat: float = 0.0
    ema_decay: float | None = None
    clip: float = 1.0
    save_every: int = 250
    ema: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        if self.ema_decay is not None:
            self.ema = {k: v.detach().clone() for k, v in self.module.state_dict().items()}

    @property
    def checkpoint(self) -> Path:
        return self.folder / f"{self.stage}.ckpt"

    def run(
        self, loss: Callable[[int, np.random.Generator], Tensor], say: Callable[[str], None]
    ) -> float:
        """Train to the end. Returns the seconds spent in this and earlier, interrupted calls."""
        first, seconds_before = self._resume(say)
        began, last = time.monotonic(), time.monotonic()
        for step in range(first, self.steps):
            factor = cosine(step, self.steps, flat=self.flat)
            for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
                group["lr"] = lr * factor
            torch.manual_seed(self.seed * 1_000_003 + step)
            self.optimizer.zero_grad(set_to_none=True)
            value = loss(step, step_rng(self.seed, self.stage, step))
            value.backward()
            nn.utils.clip_grad_norm_(self._parameters(), self.clip)
            self.optimizer.step()
            self._average(step)
            if time.monotonic() - last > 5 or step + 1 == self.steps:
                last = time.monotonic()
                rate = (step + 1 - first) / (last - began)
                remaining = (self.steps - step - 1) / rate
                say(
                    f"{self.stage}: step {step + 1}/{self.steps}  loss "
                    f"{value.item():.4f}  {rate:.2f} steps/s  {remaining:.0f} s left"
                )
            if (step + 1) % self.save_every == 0 or step + 1 == self.steps:
                self._save(step + 1, seconds_before + time.monotonic() - began)
        if self.ema:
            self.module.load_state_dict(self.ema)
        return seconds_before + time.monotonic() - began

    def _parameters(self) -> Iterable[Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    @torch.no_grad()
    def _average(self, step: int) -> None:
        if self.ema_decay is None:
            return
        decay = min(self.ema_decay, (1 + step) / (10 + step))
        state = self.module.state_dict()
        real = [name for name, value in state.items() if value.is_floating_point()]
        torch._foreach_lerp_([self.ema[k] for k in real], [state[k] for k in real], 1 - decay)
        for name in state.keys() - set(real):
            self.ema[name].copy_(state[name])

    def _save(self, step: int, seconds: float) -> None:
        state = {
            "step": step,
            "seconds": seconds,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def _resume(self, say: Callable[[str], None]) -> tuple[int, float]:
        if not self.checkpoint.exists():
            return 0, 0.0
        device = next(self.module.parameters()).device
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ema = {name: value.to(device) for name, value in state["ema"].items()}
        say(f"{self.stage}: resuming at step {state['step']}")
        return int(state["step"]), float(state["seconds"])
