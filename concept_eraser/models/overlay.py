"""Apply a part of a pipeline, as other erasers publish it, to the pipeline it was made for.

* a LoRA file or folder (diffusers' or kohya's names: all that the pipeline's own
  `load_lora_weights`
  reads), merged
* a state dict of the denoiser, whole or the changed tensors only (ESD, UCE, SalUn), or of the text
  encoder (AdvUnlearn)
* a folder of one part: a `UNet2DConditionModel`, or a transformers text encoder
* the changed tensors of a run of this package (weights.safetensors)
* parts in the original layout of single files: a UNet or transformer alone, or a checkpoint that
  lacks a text encoder

The base is loaded anew, so the caller's own model does not change.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from concept_eraser.models import single_file
from concept_eraser.models.base import Model
from concept_eraser.models.folder_check import check_part
from concept_eraser.models.lora_files import without_alphas
from concept_eraser.storage.readers import read_json, read_tensor_header
from concept_eraser.utils.errors import UserError, first_line, names_text, quote

PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LORA_FILE = "pytorch_lora_weights.safetensors"
_DENOISERS = (
    "UNet2DConditionModel",
    "SD3Transformer2DModel",
    "FluxTransformer2DModel",
    "DiTTransformer2DModel",
    "PixArtTransformer2DModel",
    "SanaTransformer2DModel",
    "ZImageTransformer2DModel",
    "QwenImageTransformer2DModel",
    "Flux2Transformer2DModel",
)
_PARTS = {**dict.fromkeys(_DENOISERS, "denoiser"), "CLIPTextModel": "text_encoder"}
# prefixes of names by other tools
_PREFIXES = ("module.", "model.", "unet.", "transformer.", "text_encoder.", "text_model.")


def is_overlay(path: Path) -> bool:
    """Whether a path holds a part of a pipeline only."""
    if path.is_dir():
        return not (path / "model_index.json").is_file() and _weights_of(path) is not None
    return path.is_file() and path.suffix in (".safetensors", *PICKLES)


def put_on(base: Model, path: Path, *, allow_pickle: bool = False) -> None:
    """Change `base` in place into the model that `path` describes.

    Raises UserError if the file is a pickle (without `allow_pickle`), damaged, or does not fit the
    base: every tensor must have its place.
    """
    file = _weights_of(path) if path.is_dir() else path
    assert file is not None  # is_overlay has checked it
    tensors = _read(file, allow_pickle)
    if any("lora" in name.lower() for name in tensors):
        _require_read_parts(base, tensors, path)
        _merge_lora(base, _lora_of(tensors, file, base.family), path, idle=_idle(tensors))
        return
    if hasattr(base, "pipeline") and single_file.parts_in(tensors):
        single_file.place_on(base, tensors, str(path))
        base.source = f"{path} on {base.source}"
        return
    names = ["denoiser", *base.readers]
    part = _part_of(path) or _part_in_header(file)
    if part in names:
        names = [part]
    for name in names:
        part_tensors = _place(tensors, base.parts[name])
        if part_tensors is not None:
            base.parts[name].load_state_dict(part_tensors, strict=False)
            base.source = f"{path} on {base.source}"
            return
    raise UserError(_misfit(path, tensors, base, names))


def _lora_of(tensors: dict[str, Tensor], file: Path, family: str) -> dict[str, Tensor] | Path:
    """Return a LoRA as diffusers' reader gives each layer its own scale.

    From the file, not from its tensors: the scale (lora_alpha) may be in the file's header only.
    There are two exceptions (diffusers 0.42.1). For a UNet and its text encoders it keeps alphas
    that differ among the layers under names that no layer has (utils/peft_utils.py,
    get_peft_kwargs, with the names of loaders/lora_conversion_utils.py, line 364). The converters
    of the other families multiply the matrices, which torch cannot do in fp8.
    """
    if family in ("sd", "sdxl") and any(name.endswith(".alpha") for name in tensors):
        return without_alphas(tensors)
    if file.suffix in PICKLES:
        return tensors
    has_metadata = "lora_adapter_metadata" in read_tensor_header(file)[0]
    if not has_metadata and any(value.dtype in _FP8 for value in tensors.values()):
        return {name: value.float() for name, value in tensors.items()}
    return file


def _weights_of(folder: Path) -> Path | None:
    """Return the one file of weights in a part's folder or a run folder."""
    candidates = [
        folder / LORA_FILE,
        folder / "weights.safetensors",
        *(
            folder / f"{stem}{suffix}"
            for stem in ("diffusion_pytorch_model", "model", "pytorch_model")
            for suffix in (".safetensors", ".bin")
        ),
    ]
    return next((path for path in candidates if path.is_file()), None)


def _part_of(path: Path) -> str | None:
    """Return the part that a folder's config.json names; None without one."""
    config = path / "config.json"
    if not path.is_dir() or not config.is_file():
        return None
    check_part(path)
    content = read_json(config)
    architectures = content.get("architectures") or [None]
    class_name = content.get("_class_name") or (
        architectures[0] if isinstance(architectures, list) else None
    )
    if isinstance(class_name, str) and class_name in _PARTS:
        return _PARTS[class_name]
    raise UserError(
        f"{path} holds a {quote(class_name, 80) if class_name else 'model of no name'}, which is "
        f"no part of a pipeline that is read; {' and '.join(_PARTS)} are"
    )


def _part_in_header(file: Path) -> str | None:
    """Return the part that the header of a run's or an export's changed tensors names, else None.

    Two text encoders may have tensors of the same names and shapes (Stable Diffusion 3).
    """
    if file.suffix != ".safetensors":
        return None
    name = read_tensor_header(file)[0].get("part")
    return "denoiser" if name in ("unet", "transformer") else name


def parts_in(path: Path) -> set[str]:
    """Return the parts in a safetensors file of the original layout; none for other files."""
    if path.suffix != ".safetensors":
        return set()
    try:
        with safe_open(path, "pt") as file:
            return single_file.parts_in(file.keys())
    except (SafetensorError, OSError):
        return set()  # its reader reports it


def _read(file: Path, allow_pickle: bool) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged or truncated ({error}); copy it again") from None
    if not allow_pickle:
        raise UserError(
            f"{file} is a pickle, which can execute code when loaded; convert it to "
            "safetensors, or pass --allow-pickle (allow_pickle=True) if you trust its "
            "author"
        )
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many types
        raise UserError(f"{file} cannot be read as plain tensors: {_why(error)}") from None
    content = content.get("state_dict", content) if isinstance(content, Mapping) else content
    if not isinstance(content, Mapping) or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{file} is no state dict: expected tensors by name")
    return dict(content)


def _why(error: Exception) -> str:
    """Explain why torch reads no tensors from a pickle.

    torch's own message describes ways around the refusal, which this package does not have.
    """
    if not isinstance(error, pickle.UnpicklingError):
        return first_line(error)
    if any(word in str(error) for word in ("GLOBAL", "Unsupported class", "REDUCE", "BUILD")):
        return (
            "it holds more than tensors, objects that can execute code, so it is refused; "
            "ask its author for a .safetensors file, or for a state dict alone"
        )
    return (
        "it is damaged, or holds more than tensors; copy it again, or ask its author for a "
        ".safetensors file"
    )


def _idle(lora: Mapping[str, Tensor]) -> bool:
    """Whether every pair of a LoRA has a matrix of zeros, as at strength 0.

    Then it may change nothing.
    """
    ups = [
        v
        for name, v in lora.items()
        if name.endswith(
            ("lora_B.weight", "lora_up.weight", "lora.up.weight", "lora_linear_layer.up.weight")
        )
    ]
    return bool(ups) and not any(v.any() for v in ups)


def _require_read_parts(base: Model, lora: Mapping[str, Tensor], path: Path) -> None:
    """Raise UserError if a LoRA changes a part that diffusers reads no LoRA into.

    diffusers 0.42.1 ignores such a part without a warning: its pipelines list the others in
    `_lora_loadable_modules`, and tensors of a T5 in ComfyUI's names are removed
    (loaders/lora_conversion_utils.py, lines 872-885).
    """
    pipeline = getattr(base, "pipeline", None)
    read_parts = getattr(pipeline, "_lora_loadable_modules", None)
    if pipeline is None or read_parts is None:
        return
    ignored_parts = set(pipeline.components) - set(read_parts)
    ignored = {
        name: value
        for name, value in lora.items()
        if name.partition(".")[0] in ignored_parts or name.startswith("text_encoders.t5xxl.")
    }
    if ignored and not _idle(ignored):
        raise UserError(
            f"{path} is a LoRA that changes {min(ignored).rpartition('.lora')[0]}, and diffusers "
            f"reads a LoRA for {base.source} into {names_text(read_parts)} only; give a whole "
            "model (export --to diffusers), or remove these tensors from the file"
        )


def _merge_lora(base: Model, lora: dict[str, Tensor] | Path, path: Path, *, idle: bool) -> None:
    """Add a LoRA's matrices to the weights by diffusers' own reader, and remove the adapters again.

    idle: it is all zeros, so that it may change nothing.
    """
    pipeline: Any = getattr(base, "pipeline", None)
    if pipeline is None or not hasattr(pipeline, "load_lora_weights"):
        raise UserError(
            f"{path} is a LoRA, which {base.source} cannot take: its pipeline reads none"
        )
    before = {name: part.state_dict() for name, part in base.parts.items()}
    before = {name: {k: v.clone() for k, v in state.items()} for name, state in before.items()}
    try:
        with _of_one_part():
            if isinstance(lora, Path):
                pipeline.load_lora_weights(str(lora.parent), weight_name=lora.name)
            else:
                pipeline.load_lora_weights(lora)
        # Flux's own default leaves its text encoder out
        pipeline.fuse_lora(components=_adapted_components(pipeline))
        pipeline.unload_lora_weights()
    # the converter of Flux asserts the widths of Flux.1 (diffusers 0.42.1)
    except (ValueError, KeyError, RuntimeError, TypeError, AssertionError) as error:
        lines = str(error).splitlines() or ["diffusers' reader expects matrices of other sizes"]
        raise UserError(
            f"{path} is a LoRA that does not fit {base.source}: {lines[0][:200]}"
        ) from None
    is_unchanged = all(
        torch.equal(v, before[name][k])
        for name, part in base.parts.items()
        for k, v in part.state_dict().items()
        if k in before[name]
    )
    if is_unchanged and not idle:
        raise UserError(
            f"{path} is a LoRA that changes nothing in {base.source}; was it made for "
            "another architecture?"
        )
    base.source = f"{path} on {base.source}"
    for part in base.parts.values():
        part.eval().requires_grad_(False)


def _adapted_components(pipeline: Any) -> list[str]:
    """Return the components that have adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = {
        name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)
    }
    return [
        name
        for name, part in modules.items()
        if any(isinstance(m, BaseTunerLayer) for m in part.modules())
    ]


@contextlib.contextmanager
def _of_one_part() -> Iterator[None]:
    """Suppress diffusers' warning of each part that a LoRA has no matrices for.

    Its other warnings stay.
    """
    import diffusers  # noqa: F401  (makes its loggers' root)

    loggers = [
        logging.getLogger(f"diffusers.loaders.{name}")
        for name in ("peft", "lora_base", "lora_pipeline")
    ]

    def hears(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No LoRA keys associated to")

    for logger in loggers:
        logger.addFilter(hears)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(hears)


def _spellings(name: str) -> Iterator[str]:
    """Return a tensor's names in other tools.

    Prefixes are removed one after the other, and CLIP's is added.
    """
    has_prefix = True
    while has_prefix:
        yield name
        yield f"text_model.{name}"
        has_prefix = False
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name, has_prefix = name[len(prefix) :], True
                break


def _place(tensors: Mapping[str, Tensor], part: nn.Module) -> dict[str, Tensor] | None:
    """Return the tensors under the part's own names.

    Returns None if one has no place or another shape there.
    """
    own = part.state_dict()
    part_tensors: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith("position_ids"):  # a buffer that older transformers saved
            continue
        fits = next((s for s in _spellings(name) if s in own and own[s].shape == value.shape), None)
        if fits is None:
            return None
        part_tensors[fits] = value.to(own[fits].dtype)
    return part_tensors or None


def _misfit(path: Path, tensors: Mapping[str, Tensor], base: Model, names: list[str]) -> str:
    own = {name: base.parts[name].state_dict() for name in names}
    for key, value in tensors.items():
        candidates = [state[s] for state in own.values() for s in _spellings(key) if s in state]
        if not candidates:
            return (
                f"{path} does not fit {base.source}: nothing there is called {key!r}; was it "
                "made for another model?"
            )
        if all(k.shape != value.shape for k in candidates):
            return (
                f"{path} does not fit {base.source}: {key} is {list(value.shape)}, "
                f"{list(candidates[0].shape)} is needed"
            )
    return (
        f"{path} does not fit {base.source}: its tensors belong to several parts; give them "
        "one at a time"
    )
