"""A rehearsal device: finds tensors on the wrong device, and counts what a GPU would wait for.

The device `rehearsal` is a backend of PyTorch (PrivateUse1), written in Python. Its tensors wrap
tensors of the CPU, which compute. So the numbers are those of the CPU, and the rules those of a
GPU:

* An operator with tensors of both devices raises an error that names it. Only copies, numbers
  (CPU tensors without dimensions) and indices may be on the CPU, as with CUDA.
* Random numbers are drawn without a generator of the CPU.
* Each result that the host waits for is counted: `item`, `float(tensor)`, copies to the CPU, and
  operators whose result has a shape that depends on values. A blocking copy to the device waits
  too, for all operators before it.
* The bytes that move between host and device are counted, and the bytes that tensors occupy.

It has neither kernels nor streams of its own. So it measures no time, and nothing of the numerics,
the workspaces and the fragmentation of a GPU.

    with rehearsal() as device:
        model.to(device)
        with count() as counts:
            step()
    counts.syncs, counts.bytes_to_host, counts.bytes_to_device, counts.peak_bytes
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from benchmarks import device_counts
from benchmarks.device_counts import Counts

NAME = "rehearsal"
aten = torch.ops.aten
BLOCK = 512  # bytes: the allocator of CUDA rounds to it


# --- counts ---------------------------------------------------------------------------------------


def note_sync(counts: Counts, operator: str) -> None:
    """Count that the host waited for the result of an operator."""
    counts.syncs += 1
    if counts.notes_places:
        counts.places[f"{operator} {_place()}"] += 1


def _place() -> str:
    """Return file and line of the innermost call outside of torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and frame.filename != __file__:
            return f"{frame.filename}:{frame.lineno}"
    return "unknown"


_counts: list[Counts] = []  # those in progress, of the whole process
_occupied = 0  # bytes of all tensors on the device
_peak = 0


@contextmanager
def count(*, places: bool = False) -> Iterator[Counts]:
    """Count what happens on the device inside the context.

    The device is the rehearsal device, or CUDA's if that one is not in use.
    """
    if not _state["is_on"] and torch.cuda.is_available():
        with device_counts.on_cuda(places=places) as counts:
            yield counts
        return
    counts = Counts(peak_bytes=_occupied, notes_places=places)
    _counts.append(counts)
    try:
        yield counts
    finally:
        _counts.remove(counts)


def occupied() -> int:
    """Return the bytes that tensors occupy on the device now."""
    return _occupied


class _Block:
    """The memory of a tensor and of all its views."""

    def __init__(self, size: int) -> None:
        global _occupied, _peak
        self.size = -(-size // BLOCK) * BLOCK
        _occupied += self.size
        _peak = max(_peak, _occupied)
        for counts in _counts:
            counts.peak_bytes = max(counts.peak_bytes, _occupied)

    def __del__(self) -> None:
        global _occupied
        _occupied -= self.size


_blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()


def _block_of(host: Tensor) -> _Block:
    storage = host.untyped_storage()
    key = storage._cdata
    block = _blocks.get(key)
    if block is None:
        block = _blocks[key] = _Block(storage.nbytes())
    return block


# --- tensors --------------------------------------------------------------------------------------


class RehearsalTensor(Tensor):
    """A tensor on the device. `host` computes, and has the same shape and strides."""

    host: Tensor
    block: _Block

    @staticmethod
    def __new__(cls, host: Tensor) -> RehearsalTensor:
        tensor: RehearsalTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=torch.device(NAME, 0),
        )
        tensor.host, tensor.block = host, _block_of(host)
        return tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func == _SET_DATA:  # the C++ code has copied shape and type
            args[0].host, args[0].block = args[1].host, args[1].block
        return result

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"a tensor of {NAME} cannot be an array; copy it to the CPU first")
        return self.detach().cpu().numpy()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def storage(self) -> Any:
        return self.host.storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the host's tensor: a file has no tensors of the device."""
        return self.host.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            known: Tensor = memo[id(self)]
            return known
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"RehearsalTensor({list(self.shape)}, {self.dtype})"


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _on_device(device: Any) -> bool:
    return torch.device(device).type == NAME


def _unwrapped(value: Any) -> Any:
    if isinstance(value, RehearsalTensor):
        return value.host
    if isinstance(value, list | tuple):
        return type(value)(_unwrapped(one) for one in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _wrapped(result: Any, known: dict[int, RehearsalTensor]) -> Any:
    """Wrap the tensors of a result. A tensor that was changed in place keeps its wrapper."""
    if isinstance(result, Tensor):
        own = known.get(id(result))
        if own is None:
            return RehearsalTensor(result)
        if own.shape != result.shape or own.stride() != result.stride():  # such as unsqueeze_
            own.data = RehearsalTensor(result)
        return own
    if isinstance(result, list | tuple):
        return type(result)(_wrapped(one, known) for one in result)
    return result


# operators whose result has a shape that depends on values, or is a number for the host
WAITING = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
    "aten::bincount",
    "aten::linalg_eig",
    "aten::_linalg_check_errors",
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
# these take no number of the CPU
STRICT = {"aten::cat", "aten::stack"}


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    for counts in _counts:
        counts.operators += 1
    if name == "aten::_to_copy":
        return _to_copy(args[0], kwargs)
    if name == "aten::copy_":
        return _copy(args[0], *args[1:], **kwargs)
    if name == "aten::set_":
        raise NotImplementedError("the rehearsal device shares no storage")
    tensors = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
    _require_one_device(name, func, args, tensors)
    generator = kwargs.get("generator")
    if generator is None:
        generator = next((one for one in args if isinstance(one, torch.Generator)), None)
    if generator is not None and generator.device.type != NAME:
        raise RuntimeError(
            f"{name}: expected a {NAME!r} device type for generator but found "
            f"{generator.device.type!r}"
        )
    waits = name in WAITING or (
        name in INDEXING
        and any(
            isinstance(one, RehearsalTensor) and one.dtype in (torch.bool, torch.uint8)
            for one in args[1]
        )
    )
    if waits:
        for counts in _counts:
            note_sync(counts, name)
            counts.bytes_to_host += tensors[0].element_size()
    device = kwargs.get("device")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    known = {id(one.host): one for one in tensors if isinstance(one, RehearsalTensor)}
    result = func(*_unwrapped(args), **{key: _unwrapped(value) for key, value in kwargs.items()})
    if device is not None and not _on_device(device):
        return result
    return _wrapped(result, known)


def _require_one_device(name: str, func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Raise RuntimeError if a tensor is on the CPU, as CUDA does."""
    away = [one for one in tensors if not isinstance(one, RehearsalTensor)]
    if name in INDEXING and isinstance(args[0], RehearsalTensor):
        indices = list(_tensors(args[1]))
        for index in indices:
            if not isinstance(index, RehearsalTensor):
                for counts in _counts:
                    counts.copies_to_device += 1
                    counts.bytes_to_device += index.numel() * index.element_size()
        away = [one for one in away if not any(one is index for index in indices)]
    changed = [
        one
        for one, argument in zip(args, func._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for one in away:
        if one.dim() or name in STRICT or any(one is target for target in changed):
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found at least two "
                f"devices, {NAME}:0 and {one.device}: a tensor of the shape {list(one.shape)}"
            )


def _to_copy(tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
    device = kwargs.pop("device", None)
    non_blocking = bool(kwargs.pop("non_blocking", False))
    kwargs.pop("pin_memory", None)
    assert isinstance(tensor, RehearsalTensor)
    stays = device is None or _on_device(device)
    if not stays:
        for counts in _counts:
            counts.bytes_to_host += tensor.numel() * tensor.element_size()
            if not non_blocking:
                note_sync(counts, "to the host")
    copied = aten._to_copy.default(tensor.host, **kwargs)
    return RehearsalTensor(copied) if stays else copied


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    size = source.numel() * source.element_size()
    if not isinstance(target, RehearsalTensor):
        for counts in _counts:
            counts.bytes_to_host += size
            if not non_blocking:
                note_sync(counts, "to the host")
    elif not isinstance(source, RehearsalTensor):
        for counts in _counts:
            counts.copies_to_device += 1
            counts.bytes_to_device += size
            if not non_blocking:
                note_sync(counts, "to the device")
    aten.copy_.default(_unwrapped(target), _unwrapped(source))
    return target


# --- operators without tensors, attention, autocast -----------------------------------------------

FACTORIES = (
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "logspace",
    "eye",
    "eye.m",
    "randperm",
    "randperm.generator",
    "tril_indices",
    "triu_indices",
)
LOWER = (  # autocast computes them in half precision, as on CUDA
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "convolution",
    "scaled_dot_product_attention",
)
FULL = (  # in fp32
    "softmax.int",
    "log_softmax.int",
    "layer_norm",
    "group_norm",
    "mse_loss",
    "cross_entropy_loss",
    "nll_loss",
    "kl_div",
    "cosine_similarity",
    "norm.ScalarOpt_dim",
    "exp",
    "log",
    "pow.Tensor_Scalar",
    "prod",
    "cumsum",
    "softplus",
    "sum",
    "sum.dim_IntList",
)
_libraries: list[torch.library.Library] = []  # they are in effect as long as they exist


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _factory(name: str) -> Callable[..., Tensor]:
    operator = _operator(name)

    def make(*args: Any, **kwargs: Any) -> Tensor:
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != NAME:
            raise RuntimeError(
                f"aten::{name}: expected a {NAME!r} device type for generator but found "
                f"{generator.device.type!r}"
            )
        kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
        return RehearsalTensor(operator(*args, **kwargs))

    return make


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention that does not store its matrices, unless the flags of the kernels exclude it."""
    fused = torch.backends.cuda.flash_sdp_enabled() and query.dim() == 4
    options: dict[str, Any] = {"attn_mask": attn_mask, "scale": scale}
    if fused and not enable_gqa and dropout_p == 0 and (attn_mask is None or attn_mask.dim() != 3):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            zero = torch.zeros_like(attn_mask, dtype=query.dtype)
            options["attn_mask"] = zero.masked_fill(~attn_mask, float("-inf"))
        output: Tensor = aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, is_causal, **options
        )[0]
        return output
    plain: Tensor = aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return plain


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(dtype) if isinstance(value, RehearsalTensor) else value
    if isinstance(value, list | tuple):
        return type(value)(_cast(one, dtype) for one in value)
    return value


def _in_precision(name: str, *, lower: bool) -> Callable[..., Any]:
    operator = _operator(name)

    def compute(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME) if lower else torch.float32
        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        ):
            return operator(
                *_cast(args, dtype), **{key: _cast(one, dtype) for key, one in kwargs.items()}
            )

    return compute


# --- registration ---------------------------------------------------------------------------------

_state = {"is_registered": False, "is_on": False}


class _Module:
    """What torch.cuda is for CUDA: `torch.rehearsal`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return _state["is_on"]

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        return

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return int(_state["is_on"])

    def set_device(self, device: Any) -> None:
        return

    def get_device_name(self, device: Any = None) -> str:
        return NAME

    def manual_seed_all(self, seed: int) -> None:
        return

    def synchronize(self, device: Any = None) -> None:
        for counts in _counts:
            note_sync(counts, "synchronize")

    def empty_cache(self) -> None:
        return

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, device: Any = None) -> int:
        return _occupied

    def max_memory_allocated(self, device: Any = None) -> int:
        return _peak

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        global _peak
        _peak = _occupied

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def is_possible() -> bool:
    """Whether this torch has backends that are written in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def register() -> None:
    """Register the device, once for each process. It is available inside `rehearsal` only.

    The first backward pass of a process starts the threads for all devices. So this must come
    before it.
    """
    if _state["is_registered"]:
        return

    class Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[name-defined,misc]
        def is_available(self) -> bool:
            return _state["is_on"]

        def has_primary_context(self, device: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=_Module(), hook=Hooks()
    )
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        library.impl(name, _factory(name), "PrivateUse1")
    # the forward mode of automatic differentiation uses it
    library.impl(
        "_efficientzerotensor", lambda size, **_: torch.zeros(size, device=NAME), "PrivateUse1"
    )
    # torch.tensor(..., device=...) copies in this way
    library.impl("_copy_from", lambda source, to, wait=0: _copy(to, source, wait), "PrivateUse1")
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    for name in LOWER:
        library.impl(name, _in_precision(name, lower=True), "AutocastPrivateUse1")
    for name in FULL:
        library.impl(name, _in_precision(name, lower=False), "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.extend((library, others))
    _state["is_registered"] = True


def _require_thread(device: torch.device) -> None:
    """Raise RuntimeError if the process has no thread for backward passes on the device."""
    there = torch.ones(1, device=device, requires_grad=True)
    try:
        torch.autograd.grad(there.sum(), [there])
    except RuntimeError as error:
        raise RuntimeError(
            "a backward pass ran before the rehearsal device was registered; call "
            "rehearsal_device.register() at the start of the process"
        ) from error


def _swap(one: Any, other: Any) -> None:
    """Exchange two tensors. `torch.utils.swap_tensors` refuses those that a graph refers to."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


@contextmanager
def rehearsal() -> Iterator[torch.device]:
    """Make the device available inside the context, for torch and for accelerate.

    Yields the device.
    """
    from accelerate.state import AcceleratorState, PartialState

    register()
    device = torch.device(NAME, 0)
    default_device, swap, swaps = (
        PartialState.default_device,
        torch.utils.swap_tensors,
        torch.__future__.get_swap_module_params_on_conversion(),
    )
    # parameters keep their identity when a module moves to the device, as with CUDA
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.swap_tensors = _swap
    PartialState.default_device = property(lambda self: device)
    AcceleratorState._reset_state(reset_partial_state=True)
    _state["is_on"] = True
    try:
        _require_thread(device)
        yield device
    finally:
        _state["is_on"] = False
        PartialState.default_device = default_device
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        torch.utils.swap_tensors = swap


@contextmanager
def count_steps(*, places: bool = False) -> Iterator[list[Counts]]:
    """Count what each training step of the package does, its row of the log included."""
    from concept_eraser.training.engine import Engine

    steps: list[Counts] = []
    do_step = Engine.do_step

    def counted(engine: Engine, step: int, log: Any) -> dict[str, Any]:
        with count(places=places) as counts:
            row = do_step(engine, step, log)
        steps.append(counts)
        return row

    Engine.do_step = counted  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        Engine.do_step = do_step  # type: ignore[method-assign]
