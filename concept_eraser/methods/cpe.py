"""CPE: keys and values are corrected by a gate that reads the whole prompt (arXiv 2506.22806).

The paper is Lee, Lim, Lee, Kang & Chun, "Concept Pinpoint Eraser for Text-to-image Diffusion Models
via Residual Attention Gate". Of the paper only the abstract was read here. The definition below is
that of the authors' code, Hyun1A/CPE at commit 4d35d02: src/engine/trainer.py (lines 105-205 the
loss, 390-440 the adversary's), train/train_cpe.py (the bounds and the stages),
src/models/cpe_adv_memory.py and src/engine/sampling.py. models/residual_gate.py has the gate.

Of each layer of cross-attention, W is the matrix of keys or of values, and ||M|| the largest
singular value. The layer's error counts with

    keys    ||W_o W_v|| ||W_q|| / tokens
    values  ||W_o||

For a prompt of the concept with states c, its anchor's a, and the layer F = W + addition, the loss
of a step is the mean over the layers of the weighted mean squares of

    F(c) - W a - guidance W (a - c)                 forget
    F(c + d) - W a - guidance W (a - c)             adversaries d, times `adversary_scale`
    F(r) - W r                                      retain, times `retain_scale`

r are the empty prompt and `mixtures` random mixtures of two retained prompts: u r_1 + (1 - u) r_2
with u uniform, where each r_j has noise of `noise` times the length of all its states. One prompt
of the concept is drawn for each step.

Stages. Stage 0 has no adversary, `first_steps` times the steps, `first_lr` times the learning rate
and two cycles. After each stage but the last, `adversaries` new offsets d [tokens, width] minimise
the weighted mean squares of F(c + d) - W c for `adversary_steps` steps: they look for states that
the gate lets pass. Each part has a new AdamW with a warm-up and a cosine with hard restarts. No
image is generated, and the denoiser is not called.

The offsets of all stages stay in the pool. The code keeps them too (`prompts_prev`), but its loss
reads those of the newest stage only (`forward_eval`). `pool: all` reads all of them.

Deliberate differences from the code:
* One concept, whose prompts have their own anchors (code: a name and one anchor in templates).
  Gates of several concepts, of which the largest at each token counts, are left out.
* Retained prompts are those of the recipe (code: general words and the 50 names that are most
  similar to the concept's, in templates).
* AdamW in fp32 (code: with states of 8 bits). No offsets are trained after the last stage, where
  the code trains some that nothing reads.
* `trainable.select` decides which keys and values have the gate (code: all).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from concept_eraser.methods.base import GatedLayer, GateEdit, GateRequest, all_or_nothing

FIRST_CYCLES = 2  # of the learning rate in stage 0 (`factor_init_lr_cycle`)
WEIGHT_DECAY = 0.01  # the default of its optimizer
REMEDY = "use a smaller lr or a smaller retain_scale"


@dataclass(frozen=True)
class ConceptPinpointEraser(GateEdit):
    """Fit a gate that turns keys and values of the concept into its anchor's, and no others.

    Args:
        guidance: How far beyond the anchor's, away from the concept's.
        retain_scale: The weight of the retained prompts.
        adversary_scale: The weight of the adversaries.
        gate_rank: The width of the gate's projection.
        rank: The rank of a layer's addition.
        stages: The number of stages.
        steps: The steps on the gate in a stage.
        lr: Their learning rate.
        first_steps: The factor on the steps of stage 0.
        first_lr: The factor on the learning rate of stage 0.
        adversaries: The new offsets of a stage.
        adversary_steps: The steps on them.
        adversary_lr: Their learning rate.
        pool: Which offsets the loss reads: those of the newest stage, or all.
        mixtures: The retained mixtures in a step.
        noise: The noise of a retained state, relative to the length of all states of its prompt.
        warmup: The steps until a learning rate is reached.
    """

    title: ClassVar[str] = (
        "Concept Pinpoint Eraser for Text-to-image Diffusion Models via Residual Attention Gate"
    )
    source: ClassVar[str] = "Lee et al., arXiv 2506.22806"
    defaults: ClassVar[Mapping[str, str]] = {
        "guidance": "its command for artists (celebrities: 0.3, nudity: 3)",
        "retain_scale": "its command for artists (celebrities: 1e5)",
        "adversary_scale": "its configurations",
        "gate_rank": "its command for artists (nudity: 64)",
        "rank": "its configuration for artists (nudity: 4)",
        "stages": "its configuration for artists (celebrities: 5, nudity: 20)",
        "steps": "its configuration for artists (nudity: 1200)",
        "lr": "its configurations",
        "first_steps": "its configuration for artists (nudity: 2)",
        "first_lr": "its configurations",
        "adversaries": "its configuration for artists (nudity: 32)",
        "adversary_steps": "its configuration for artists (nudity: 1200)",
        "adversary_lr": "its configurations",
        "pool": "its code",
        "mixtures": "its configurations",
        "noise": "its code",
        "warmup": "its configuration for artists",
    }
    theorems: ClassVar[frozenset[str]] = frozenset({"fixed_point"})

    guidance: float = 0.5
    retain_scale: float = 1e4
    adversary_scale: float = 1.0
    gate_rank: int = 16
    rank: int = 1
    stages: int = 10
    steps: int = 450
    lr: float = 3e-5
    first_steps: int = 4
    first_lr: float = 10.0
    adversaries: int = 16
    adversary_steps: int = 450
    adversary_lr: float = 0.01
    pool: Literal["newest", "all"] = "newest"
    mixtures: int = 16
    noise: float = 0.001
    warmup: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("lr", "first_lr", "adversary_lr", "gate_rank", "rank", "stages", "steps")
        for option in (*positive, "first_steps", "adversary_steps", "adversaries", "mixtures"):
            if getattr(self, option) <= 0:
                raise ValueError(f"{option} must be > 0, found {getattr(self, option)}")
        for option in ("guidance", "retain_scale", "adversary_scale", "noise", "warmup"):
            if getattr(self, option) < 0:
                raise ValueError(f"{option} must be >= 0, found {getattr(self, option)}")

    def edit(self, request: GateRequest) -> Mapping[str, float]:
        """Fit the gate in place.

        Returns:
            left: The remainder of the concept, sqrt(sum L |F(c) - W a|^2 / sum L |W (c - a)|^2)
                over the layers with their weights L and the prompts.
            drift: The change of the retained prompts, sqrt(sum L |F(r) - W r|^2 / sum L |W r|^2).
            adversaries: The number of offsets in the pool.

        Raises:
            ValueError: The tensors are not finite at the end.
        """
        parameters = tuple(request.gate.parameters())
        if not len(request.forget):
            return {"left": 0.0, "drift": 0.0, "adversaries": 0.0}
        generator = torch.Generator().manual_seed(request.seed)
        fit = _Fit(self, request, generator)
        with all_or_nothing(parameters, REMEDY), torch.enable_grad():
            pool: list[Tensor] = []
            for parameter in parameters:
                parameter.requires_grad_(True)
            try:
                for stage in range(self.stages):
                    fit.train_gate(parameters, pool if self.pool == "all" else pool[-1:], stage)
                    if stage + 1 < self.stages:
                        pool.append(fit.train_adversaries(stage))
            finally:
                for parameter in parameters:
                    parameter.requires_grad_(False)
        return {**fit.outcome(), "adversaries": float(sum(map(len, pool)))}


def layer_bound(layer: GatedLayer, tokens: int) -> float:
    """Return the weight of a layer's squared error.

    Args:
        layer: The layer of keys or values, and the other matrices of its attention.
        tokens: The number of tokens of a prompt.
    """
    if layer.kind == "value":
        return _largest(layer.output)
    return _largest(layer.output @ layer.value) * _largest(layer.query) / tokens


def _largest(matrix: Tensor) -> float:
    """Return the largest singular value."""
    return float(torch.linalg.matrix_norm(matrix.double(), ord=2))


def rate(step: int, steps: int, *, warmup: int, cycles: int) -> float:
    """Return the factor on a learning rate: a warm-up, then a cosine with hard restarts.

    Args:
        step: From 0.
        steps: The number of steps.
        warmup: The steps of the warm-up.
        cycles: The number of cosines.

    Source: get_cosine_with_hard_restarts_schedule_with_warmup of transformers.
    """
    if step < warmup:
        return step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.0 if progress >= 1 else 0.5 * (1 + math.cos(math.pi * (cycles * progress % 1)))


def mixtures(retain: Tensor, count: int, *, noise: float, generator: torch.Generator) -> Tensor:
    """Return mixtures of two retained prompts each [count, tokens, width].

    Args:
        retain: Their states [prompts, tokens, width].
        count: The number of mixtures.
        noise: The deviation of the noise, relative to the length of all states of a prompt.
        generator: On the CPU.
    """
    chosen = torch.randint(len(retain), (2 * count,), generator=generator)
    states = retain[chosen.to(retain.device)]
    lengths = states.flatten(1).norm(dim=1)[:, None, None]
    drawn = torch.randn(states.shape, generator=generator).to(states)
    first, second = (states + noise * lengths * drawn).unflatten(0, (count, 2)).unbind(1)
    share = torch.rand(count, 1, 1, generator=generator).to(states)
    mixed: Tensor = share * first + (1 - share) * second
    return mixed


class _Fit:
    """The losses of one request, and the steps on the gate and on the offsets."""

    def __init__(
        self, options: ConceptPinpointEraser, request: GateRequest, generator: torch.Generator
    ) -> None:
        self.options, self.request, self.generator = options, request, generator
        tokens = request.forget.shape[1]
        self.bounds = {layer.name: layer_bound(layer, tokens) for layer in request.layers}

    def train_gate(self, parameters: Sequence[Tensor], pool: Sequence[Tensor], stage: int) -> None:
        """Train the gate for one stage against these offsets [adversaries, tokens, width]."""
        options, is_first = self.options, stage == 0
        offsets = torch.cat([self.request.forget[:0], *pool])

        def loss() -> Tensor:
            concept, anchor = self._pair()
            retain = mixtures(
                self.request.retain,
                options.mixtures,
                noise=options.noise,
                generator=self.generator,
            )
            return self.gate_loss(
                torch.cat([concept[None], concept + offsets]),
                concept=concept,
                anchor=anchor,
                retain=torch.cat([self.request.empty[None], retain]),
            )

        self._minimise(
            parameters,
            loss,
            steps=options.steps * (options.first_steps if is_first else 1),
            lr=options.lr * (options.first_lr if is_first else 1),
            cycles=FIRST_CYCLES if is_first else 1,
            remark=f"stage {stage + 1}, gate",
        )

    def train_adversaries(self, stage: int) -> Tensor:
        """Return new offsets [adversaries, tokens, width]."""
        options, shape = self.options, self.request.forget.shape[1:]
        bound = 1 / (shape[1] ** 2 * math.sqrt(shape[0] * shape[1]))
        drawn = torch.rand(options.adversaries, *shape, generator=self.generator) * 2 - 1
        offsets = (bound * drawn).to(self.request.forget).requires_grad_(True)
        self._minimise(
            [offsets],
            lambda: self.adversary_loss(offsets, self._pair()[0]),
            steps=options.adversary_steps,
            lr=options.adversary_lr,
            cycles=1,
            remark=f"stage {stage + 1}, adversaries",
        )
        return offsets.detach()

    def gate_loss(
        self, concepts: Tensor, *, concept: Tensor, anchor: Tensor, retain: Tensor
    ) -> Tensor:
        """Return the loss of the gate.

        Args:
            concepts: c, then c + d for each offset [1 + offsets, tokens, width].
            concept: c [tokens, width].
            anchor: a [tokens, width].
            retain: r [retained, tokens, width].
        """
        gate, total = self.request.gate, concept.new_zeros(())
        gated = gate.gated(torch.cat([concepts, retain]))
        goal = anchor + self.options.guidance * (anchor - concept)
        for layer in self.request.layers:
            addition = gate.addition(layer.name, gated)
            errors = (concepts - goal) @ layer.weight.T + addition[: len(concepts)]
            terms = errors[0].square().mean()
            if len(errors) > 1:
                terms = terms + self.options.adversary_scale * errors[1:].square().mean()
            terms = terms + self.options.retain_scale * addition[len(concepts) :].square().mean()
            total = total + self.bounds[layer.name] * terms
        return total / len(self.request.layers)

    def adversary_loss(self, offsets: Tensor, concept: Tensor) -> Tensor:
        """Return the loss of the offsets d: the squares of F(c + d) - W c.

        Args:
            offsets: d [offsets, tokens, width].
            concept: c [tokens, width].
        """
        gate, total = self.request.gate, offsets.new_zeros(())
        gated = gate.gated(concept + offsets)
        for layer in self.request.layers:
            errors = offsets @ layer.weight.T + gate.addition(layer.name, gated)
            total = total + self.bounds[layer.name] * errors.square().mean()
        return total / len(self.request.layers)

    def _pair(self) -> tuple[Tensor, Tensor]:
        """Draw a prompt of the concept and its anchor, each [tokens, width]."""
        row = int(torch.randint(len(self.request.forget), (), generator=self.generator))
        return self.request.forget[row], self.request.anchor[row]

    def _minimise(
        self,
        variables: Sequence[Tensor],
        loss: Callable[[], Tensor],
        *,
        steps: int,
        lr: float,
        cycles: int,
        remark: str,
    ) -> None:
        optimizer = torch.optim.AdamW(variables, lr=lr, weight_decay=WEIGHT_DECAY)
        for step in range(steps):
            factor = rate(step, steps, warmup=self.options.warmup, cycles=cycles)
            optimizer.param_groups[0]["lr"] = lr * factor
            gradients = torch.autograd.grad(loss(), variables)
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.grad = gradient
            optimizer.step()
            self.request.report(step + 1, steps, remark)
        for variable in variables:
            variable.grad = None

    @torch.no_grad()
    def outcome(self) -> dict[str, float]:
        """Return `left` and `drift`; see `ConceptPinpointEraser.edit`."""
        request, sums = self.request, [0.0] * 4
        pairs = zip(request.forget, request.anchor, strict=True)
        for concept, anchor in pairs:
            gated = request.gate.gated(concept)
            for layer in request.layers:
                bound, apart = self.bounds[layer.name], (concept - anchor) @ layer.weight.T
                error = apart + request.gate.addition(layer.name, gated)
                sums[0] += bound * float(error.square().sum())
                sums[1] += bound * float(apart.square().sum())
        for states in request.retain:
            gated = request.gate.gated(states)
            for layer in request.layers:
                bound, output = self.bounds[layer.name], states @ layer.weight.T
                change = request.gate.addition(layer.name, gated)
                sums[2] += bound * float(change.square().sum())
                sums[3] += bound * float(output.square().sum())
        left, drift = (
            math.sqrt(above / below) if below else 0.0
            for above, below in ((sums[0], sums[1]), (sums[2], sums[3]))
        )
        return {"left": left, "drift": drift}


PLUGIN = ConceptPinpointEraser
