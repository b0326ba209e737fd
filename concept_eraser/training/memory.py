"""Estimate the memory of a training before it starts.

The forward and backward pass runs with tensors that have a shape and no content (torch's fake
tensors), and `Peak` counts every tensor that is created and freed. This takes seconds for Stable
Diffusion on a laptop. `moments` counts what lives longer than a pass: weights, their original
values (the frozen teacher), the gradients and other vectors of the method (method_memory.py), the
direction, the optimiser's state, and masks.

Assumptions: attention kernels do not store the matrix of scores, as torch's default kernels; norms
are in fp32 under autocast, as on CUDA; CUDA itself takes CONTEXT bytes. Not counted: memory that
the allocator cannot use because it is fragmented, and workspaces of kernels.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CONTEXT = 780 * 2**20  # of CUDA itself: 769 to 783 MB on an H200 with CUDA 13 (benchmarks/gpu.json)
CUDA = "CUDA itself (assumed)"  # the name of this use
GB = 2**30
_FP32 = 4
_NORMS = (nn.GroupNorm, nn.LayerNorm)


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that are created inside. Views count once.

    `now` is the present number, and `peak` the largest so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._storages: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                # tensors from before do not count, nor do views of them
                self._count(value, is_new=False)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._count(value, is_new=True)
        return result

    def _count(self, value: Tensor, *, is_new: bool) -> None:
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes() if is_new else 0
        self._storages[key] = (size, weakref.finalize(storage, self._release, key))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _release(self, key: int) -> None:
        self.now -= self._storages.pop(key, (0, None))[0]

    def __exit__(self, *about: Any) -> None:
        for _, watcher in self._storages.values():
            watcher.detach()
        super().__exit__(*about)  # type: ignore[no-untyped-call]


def _widen(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the inputs of a norm to fp32 under autocast, as CUDA's autocast does.

    The CPU's autocast does not.
    """
    if not torch.is_autocast_enabled("cpu"):
        return inputs
    return tuple(
        x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x for x in inputs
    )


@contextmanager
def pretending(*modules: nn.Module, narrow: Iterable[Tensor] = ()) -> Iterator[None]:
    """Replace tensors by fake ones inside the context, also those of these modules.

    Fake tensors have shapes and no content, and nothing is computed. Modules may be on any device,
    also on the meta device. Afterwards they have their original tensors.

    narrow: tensors that are bf16 inside.
    """
    bf16_ids = {id(value) for value in narrow}
    from torch._subclasses.fake_tensor import FakeTensorMode

    originals: list[tuple[dict[str, Any], dict[str, Any]]] = []
    layers = {id(layer): layer for module in modules for layer in module.modules()}.values()
    hooks = [
        layer.register_forward_pre_hook(_widen) for layer in layers if isinstance(layer, _NORMS)
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            shared: dict[int, Tensor] = {}
            for layer in layers:
                for values in (layer._parameters, layer._buffers):
                    originals.append((values, dict(values)))
                    for name, value in values.items():
                        if value is not None:
                            values[name] = shared.setdefault(
                                id(value), _hollow(value, id(value) in bf16_ids)
                            )  # type: ignore[assignment]
            yield
        finally:
            for values, before in originals:
                values.clear()
                values.update(before)
            for hook in hooks:
                hook.remove()


def _hollow(value: Tensor, is_bf16: bool) -> Tensor:
    empty = torch.empty(value.shape, dtype=torch.bfloat16 if is_bf16 else value.dtype)
    return (
        nn.Parameter(empty, requires_grad=value.requires_grad)
        if isinstance(value, nn.Parameter)
        else empty
    )


def peak_of(run: Callable[[], Any], *, bf16: bool = False) -> int:
    """Return the peak of the bytes of tensors that `run` creates (inside `pretending`)."""
    counter = Peak()
    with counter, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        run()
    return counter.peak


def passing(loss: Callable[[], Tensor], params: Sequence[Tensor], *, bf16: bool = False) -> int:
    """Return the peak of the bytes of one forward and backward pass (inside `pretending`).

    The resulting gradient is included.
    """

    def run() -> None:
        torch.autograd.grad(loss(), list(params), allow_unused=True, materialize_grads=True)

    return peak_of(run, bf16=bf16)


def passing_twice(loss: Callable[[], Tensor], params: Sequence[Tensor]) -> int:
    """Return the peak of the bytes of an exact Hessian product (inside `pretending`).

    It has attention whose scores are stored, since the fused kernels have no second derivative.
    """

    def run() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            gradients = torch.autograd.grad(
                loss(), list(params), create_graph=True, materialize_grads=True
            )
            slope = torch.stack([gradient.sum() for gradient in gradients]).sum()
            torch.autograd.grad(slope, list(params), allow_unused=True, materialize_grads=True)

    return peak_of(run)


def weights_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers, each tensor once."""
    return sum(
        {
            id(v): v.numel() * v.element_size() for v in (*module.parameters(), *module.buffers())
        }.values()
    )


@dataclass(frozen=True)
class Trained:
    """The shapes of the trained tensors, and the settings that determine how many copies there are.

    Attributes:
        shapes: The shapes of the tensors.
        objectives: The number of gradients that the method needs at once.
        micro_batches: The number of micro-batches.
        optimizer: The name of the optimizer.
        momentum: Whether SGD has momentum.
        ema: Whether the average of the weights is kept.
        masked: Whether there is a saliency mask.
        gpu: Whether torch's optimisers update all tensors at once, which needs one copy.
    """

    shapes: Sequence[Sequence[int]]
    objectives: int = 2
    micro_batches: int = 1
    optimizer: str = "adam"
    momentum: bool = False
    ema: bool = False
    masked: bool = False
    gpu: bool = True

    @property
    def bytes(self) -> int:
        return _FP32 * sum(map(math.prod, self.shapes))

    @property
    def largest(self) -> int:
        return _FP32 * max(map(math.prod, self.shapes))

    def state(self) -> int:
        """The bytes of the optimiser's state between the steps."""
        if self.optimizer == "sgd":
            return self.bytes if self.momentum else 0
        if self.optimizer == "adafactor":  # torch factorises the last two axes
            return sum(_FP32 * _adafactor_size(shape) for shape in self.shapes)
        # two bytes for each number and two scales for each block of 256; small tensors in fp32
        if self.optimizer == "adamw8bit":
            return sum(
                2 * n + 8 * -(-n // 256) if n >= 4096 else 8 * n
                for n in map(math.prod, self.shapes)
            )
        return 2 * self.bytes


def _adafactor_size(shape: Sequence[int]) -> int:
    """Return how many numbers Adafactor stores for a tensor."""
    if len(shape) < 2:
        return math.prod(shape)
    return math.prod(shape[:-1]) + math.prod((*shape[:-2], shape[-1]))


def moments(
    parameters: Trained, pass_bytes: int, vectors: tuple[float, float] | None = None
) -> dict[str, dict[str, int]]:
    """Return the bytes by their use at the three moments of a step with the highest memory.

    They are in addition to the bytes that are in use all the time.

    Clipping is none of them: it holds the direction twice, after the gradients are freed. That is
    no more than combining, which frees each tensor of the gradients when its sum is computed.

    pass_bytes: those of one forward and backward pass, see `passing`.
    vectors: what the method holds while a pass runs, and at most, in vectors of the size of the
        trained parameters (method_memory.py). Without it, one gradient for each objective.
    """
    total, largest = parameters.bytes, parameters.largest
    masks = {"masks": total} if parameters.masked else {}
    others = parameters.objectives - 1
    during_pass, most = vectors or (others, max(parameters.objectives, 2))
    sums = {"gradients of other objectives": round(min(during_pass, others) * total)}
    if during_pass > others + 0.25:  # less is what is held tensor by tensor
        sums["other vectors of the method"] = round((during_pass - others) * total)
    if parameters.micro_batches > 1:
        sums["sum over micro-batches"] = total
    # a GPU sums the Gram matrix in float64 tensor by tensor, a CPU in blocks of a fixed size
    wide = parameters.objectives * 2 * largest if parameters.gpu else 0
    extra = total if parameters.gpu and parameters.optimizer in ("adam", "adamw") else 2 * largest
    return {
        "last gradient": {**masks, **sums, "forward and backward pass": pass_bytes},
        "combining": {
            **masks,
            "gradients": round(most * total),
            "sums of one tensor": max(2 * largest, wide),
        },
        "moving": {
            **masks,
            "the direction": total,
            "weights before the step": total if parameters.masked else 0,
            "inside the optimiser": extra,
        },
    }


@dataclass(frozen=True)
class Estimate:
    """An estimate in bytes by their use.

    Attributes:
        always: What is in use during the whole training.
        moments: What is in use beside it, at the moments with the highest memory.
        making: All that is in use while the examples are made.
        writing: All that is in use while the whole model is written at the end, if it is.
        is_written_on_cpu: Whether the model is on the CPU by then, in a training on a GPU too.
        whole: The whole model in fp32, as it is on the CPU when it is loaded, and at the end. 0
            where the training takes it all in fp32 anyway.
        waiting: What waits on the CPU during the training (training/placement.py). `training` is
            without it.
    """

    always: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]
    making: Mapping[str, int] = field(default_factory=dict)
    writing: Mapping[str, int] = field(default_factory=dict)
    is_written_on_cpu: bool = False
    whole: int = 0
    waiting: Mapping[str, int] = field(default_factory=dict)

    @property
    def on_cpu(self) -> int:
        """The bytes of a training on the CPU, where nothing can wait elsewhere."""
        training = self.training - self.always.get(CUDA, 0) + sum(self.waiting.values())
        return max(training, self.whole)

    @property
    def fullest(self) -> str:
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def training(self) -> int:
        return sum(self.always.values()) + sum(self.moments[self.fullest].values())

    @property
    def examples(self) -> int:
        return sum(self.making.values())

    @property
    def peak(self) -> int:
        at_the_end = 0 if self.is_written_on_cpu else max(sum(self.writing.values()), self.whole)
        return max(self.training, self.examples, at_the_end)

    def lines(self) -> list[str]:
        """Return lines for people, in GB (2^30 bytes), the largest first."""
        parts = {**self.always, **self.moments[self.fullest]}
        parts_text = ", ".join(
            f"{name} {size / GB:.2f}"
            for name, size in sorted(parts.items(), key=lambda item: -item[1])
            if size
        )
        examples_text = (
            f"; while the examples are made {self.examples / GB:.2f} GB" if self.making else ""
        )
        place = " of the CPU's memory" if self.is_written_on_cpu else ""
        writing_text = (
            f"; while the model is written {sum(self.writing.values()) / GB:.2f} GB{place}"
            if self.writing
            else ""
        )
        whole_text = (
            f"; when the model is loaded, and at the end, {self.whole / GB:.2f} GB of the CPU's "
            "memory"
            if self.whole
            else ""
        )
        cpu_text = (
            f"; a training on the CPU takes {self.on_cpu / GB:.2f} GB of the CPU's memory"
            if any(self.waiting.values())
            else ""
        )
        return [
            f"memory (an estimate, not measured): {self.training / GB:.2f} GB{examples_text}"
            f"{writing_text}{whole_text}{cpu_text}",
            f"  of which {parts_text}",
        ]
