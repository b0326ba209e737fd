"""LoRA files: written and read with the names of diffusers, kohya, musubi-tuner and ComfyUI.

* diffusers: `unet.<layer>.lora_A.weight` (down), `.lora_B.weight` (up), rank and alpha in the
  file's header, for `pipe.load_lora_weights`
* kohya: `lora_unet_<layer with _ for .>.lora_down.weight`, `.lora_up.weight`, `.alpha`, for A1111,
  ComfyUI, Forge (and diffusers)
* musubi: as kohya, with musubi-tuner's names of the layers
* comfyui: `diffusion_model.<layer>.lora_A.weight`, `.lora_B.weight`, with alpha / rank in `up`, for
  ComfyUI (and diffusers)

models/lora_names.py has the names of the layers. Where one projection stands for q, k and v, their
matrices are put together, block by block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from concept_eraser.models import lora_metadata, lora_names
from concept_eraser.models.base import Loaded
from concept_eraser.models.lora import Factors, Pair
from concept_eraser.utils.errors import UserError

# in a run's folder; diffusers expects this name
FOLDER, FILE = "lora", "pytorch_lora_weights.safetensors"
# numbers of a file. fp8 is e4m3, sd-scripts' default of the two (library/utils.py, line 187)
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
_DOWN_UP = (
    ("lora_A.weight", "lora_B.weight"),
    ("lora_down.weight", "lora_up.weight"),
    ("lora.down.weight", "lora.up.weight"),
)


def save(
    model: Loaded,
    factors: Sequence[Factors],
    file: Path,
    *,
    naming: str = "diffusers",
    notes: Mapping[str, str] | None = None,
    dtype: str = "fp32",
) -> None:
    """Write the matrices of one or more parts of a pipeline.

    naming: one of lora_names.NAMINGS. notes: for the file's header. dtype: one of DTYPES. Raises
    UserError as `build`.
    """
    tensors, header = build(model, factors, naming=naming, dtype=dtype)
    write(tensors, {**(notes or {}), **header}, file)


def write(tensors: Mapping[str, Tensor], header: Mapping[str, str], file: Path) -> None:
    """Write what `build` returns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), file, metadata=dict(header))


def build(
    model: Loaded,
    factors: Sequence[Factors],
    *,
    naming: str = "diffusers",
    dtype: str = "fp32",
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the header of a file.

    Raises UserError if the naming does not exist for the model's family or has no name for a layer,
    or if it has no place for the scale of fp8.
    """
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {}
    lora_names.require(model.family, naming)
    in_kohyas_format = naming in lora_names.KOHYA_FORMAT
    if dtype == "fp8" and not in_kohyas_format:
        raise UserError(
            f"fp8 needs a scale (alpha), which {naming}'s naming does not have; export --to kohya, "
            "or use fp16"
        )
    for part_factors in factors:
        if in_kohyas_format:
            tensors |= _kohya(model, part_factors, dtype, naming)
            continue
        if naming == "comfyui":
            tensors |= _comfyui(model, part_factors, dtype)
            continue
        prefix = _component(model, part_factors.part)
        metadata |= {f"{prefix}.{key}": value for key, value in _config(part_factors).items()}
        for layer, (down, up) in part_factors.layers.items():
            stem = f"{prefix}.{lora_names.full_name(part_factors.part, layer)}"
            tensors |= {
                f"{stem}.lora_A.weight": down.to(DTYPES[dtype]),
                f"{stem}.lora_B.weight": up.to(DTYPES[dtype]),
            }
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    if in_kohyas_format:
        return tensors, lora_metadata.network(model, tensors, factors)
    if naming == "comfyui":
        return tensors, {"format": "pt"}
    return tensors, {
        "format": "pt",
        "lora_adapter_metadata": json.dumps(metadata, sort_keys=True),
    }


def file_bytes(numbers: int, tensors: int, dtype: str = "fp32") -> int:
    """Return the size of a LoRA file, without the text of its header.

    numbers: of all matrices. tensors: how many matrices. An entry of the header takes about 150
    bytes for each.
    """
    return numbers * DTYPES[dtype].itemsize + 150 * tensors


def _octaves(value: Tensor) -> int:
    """Return k such that the largest absolute entry of value / 2^k is in (1, 2]; 0 for zeros."""
    largest = float(value.abs().max())
    return math.ceil(math.log2(largest)) - 1 if largest else 0


def _named(
    model: Loaded, one: Factors, naming: str
) -> Iterator[tuple[str, tuple[Tensor, Tensor, float]]]:
    """Return (name in the file, (down, up, alpha)) for each layer, or for layers of one name.

    Raises UserError if the naming has no name for a layer.
    """
    remaining = set(one.layers)
    for stem, layers in lora_names.stems(model, one.part, naming):
        if not remaining & set(layers):
            continue
        remaining -= set(layers)
        down, up = one.layers[layers[0]] if len(layers) == 1 else _fuse(model, one, layers)
        yield stem, (down, up, one.alpha * len(down) / one.rank)
    if remaining:
        raise UserError(
            f"{naming} has no name for the layer {min(remaining)} of {one.part} ({len(remaining)} "
            "such) that diffusers reads; export --to lora, or train with --select blocks"
        )


def _kohya(
    model: Loaded, one: Factors, dtype: str = "fp32", naming: str = "kohya"
) -> dict[str, Tensor]:
    """Return the tensors by kohya's names, or by musubi-tuner's.

    fp8 has few exponents, so each matrix is divided by a power of 2 and alpha multiplied by it. The
    product of both powers is the same for all layers of the part, so that they have one alpha for
    each rank: diffusers 0.42.1 confuses the alphas of layers where these differ. No entry is larger
    than 2, since some readers multiply in fp16.
    """
    tensors: dict[str, Tensor] = {}
    named = list(_named(model, one, naming))
    octaves = {stem: (_octaves(down), _octaves(up)) for stem, (down, up, _) in named}
    changing = [sum(octaves[stem]) for stem, (down, up, _) in named if down.any() and up.any()]
    total = max(changing, default=0)
    for stem, (down, up, alpha) in named:
        if dtype == "fp8":
            more = max(total - sum(octaves[stem]), 0)  # less only where the change is 0
            powers = octaves[stem][0] + more // 2, octaves[stem][1] + more - more // 2
            down, up = down * 2.0 ** -powers[0], up * 2.0 ** -powers[1]
            alpha *= 2.0**total
        tensors |= {
            f"{stem}.lora_down.weight": down.to(DTYPES[dtype]),
            f"{stem}.lora_up.weight": up.to(DTYPES[dtype]),
            f"{stem}.alpha": torch.tensor(alpha),
        }
    return tensors


def _comfyui(model: Loaded, one: Factors, dtype: str) -> dict[str, Tensor]:
    """Return the tensors by ComfyUI's names. Readers scale such a file by 1."""
    tensors: dict[str, Tensor] = {}
    for stem, (down, up, alpha) in _named(model, one, "comfyui"):
        tensors |= {
            f"{stem}.lora_A.weight": down.to(DTYPES[dtype]),
            f"{stem}.lora_B.weight": (up * (alpha / len(down))).to(DTYPES[dtype]),
        }
    return tensors


def _fuse(model: Loaded, one: Factors, layers: Sequence[str]) -> Pair:
    """Put together the matrices of layers that are one layer in the original code.

    Each has its own rows and its own share of the rank.
    """
    pairs = []
    width = next(down.shape[1] for name, (down, _) in one.layers.items() if name in layers)
    for layer in layers:
        height = len(model.parts[one.part].get_parameter(f"{layer}.weight"))
        pairs.append(
            one.layers.get(layer, (torch.zeros(one.rank, width), torch.zeros(height, one.rank)))
        )
    return torch.cat([down for down, _ in pairs]), torch.block_diag(*(up for _, up in pairs))


def _split(
    model: Loaded, part: str, layers: Sequence[str], down: Tensor, up: Tensor
) -> dict[str, Pair]:
    """Undo `_fuse`: return each layer's rows, with the part of the rank that is not zero there."""
    heights = [len(model.parts[part].get_parameter(f"{layer}.weight")) for layer in layers]
    if sum(heights) != len(up):
        raise UserError(
            f"factors for {' and '.join(layers)} have {len(up)} rows, {sum(heights)} are "
            "needed; was it made for another model?"
        )
    pairs = {}
    for layer, rows in zip(layers, up.split(heights), strict=True):
        columns = rows.any(0)
        if columns.any():
            pairs[layer] = down[columns], rows[:, columns]
    return pairs


def _config(one: Factors) -> dict[str, Any]:
    """Return peft's settings.

    peft matches layers by the endings of their names, so names without `text_model.` fit both
    kinds.
    """
    targets = sorted(layer.removeprefix("text_model.") for layer in one.layers)
    return {"r": one.rank, "lora_alpha": one.alpha, "target_modules": targets}


def _component(model: Loaded, part: str) -> str:
    """Return the pipeline's name of a part: unet or transformer, text_encoder."""
    components: Mapping[str, Any] = getattr(getattr(model, "pipeline", None), "components", {})
    component = next(
        (name for name, value in components.items() if value is model.parts[part]), None
    )
    if component is None:
        raise UserError(
            f"{model.source} is no diffusers pipeline, so a LoRA of its {part} has no "
            "name to be saved under"
        )
    return component


def read(
    model: Loaded, tensors: Mapping[str, Tensor], header: Mapping[str, str], source: str
) -> list[Factors]:
    """Read the matrices in a file with any naming, one entry for each part that has some.

    The file's own scales (alphas) go into `up`. Raises UserError for a layer that the model does
    not have or that has another size, for a damaged header, and for a file that is no plain LoRA.
    """
    config = _config_in(header, source)
    pairs_by_part: dict[str, dict[str, Pair]] = {}
    places = {
        name_in_file: (part, layers, prefix)
        for part in model.parts
        if part != "vae"
        for name_in_file, layers, prefix in _names_in_file(model, part)
    }
    remaining = {name for name in tensors if not name.endswith("alpha")}
    for name in sorted(remaining):
        kind = next(((down, up) for down, up in _DOWN_UP if name.endswith(f".{down}")), None)
        if kind is None:
            continue
        stem = name.removesuffix(f".{kind[0]}")
        if stem not in places:
            raise UserError(
                f"{source} has factors for {stem!r}, which {model.source} does not have; "
                "was it made for another model?"
            )
        (part, layers, prefix), up = places[stem], f"{stem}.{kind[1]}"
        if up not in tensors:
            raise UserError(f"{source} is incomplete: it has {name} but no {up}")
        if any(matrix.ndim < 2 or not matrix.numel() for matrix in (tensors[name], tensors[up])):
            raise UserError(f"{source} is damaged: {name} or {up} is no matrix")
        rank = len(tensors[name])
        scale = (
            float(tensors[f"{stem}.alpha"]) / rank
            if f"{stem}.alpha" in tensors
            else _scale(config, prefix, layers[0], rank=rank, source=source)
        )
        pair = tensors[name].float(), tensors[up].float() * scale
        pairs_by_part.setdefault(part, {}).update(
            {layers[0]: pair} if len(layers) == 1 else _split(model, part, layers, *pair)
        )
        remaining -= {name, up}
    if remaining:
        raise UserError(
            f"{source} is no plain LoRA: the tensor {min(remaining)!r} is unknown; only pairs "
            "of down and up can be converted"
        )
    for part, layers_of_part in pairs_by_part.items():
        for layer, pair in layers_of_part.items():
            _require_size(model, part, layer, pair=pair, source=source)
    # of fused layers without a change no matrices are left
    return [of_pairs(part, layers) for part, layers in pairs_by_part.items() if layers]


def _config_in(header: Mapping[str, str], source: str) -> dict[str, Any]:
    """Return peft's settings in a header. Raises UserError if they are no JSON object."""
    try:
        config = json.loads(header.get("lora_adapter_metadata") or "{}")
    except ValueError:  # damaged
        config = None
    if not isinstance(config, dict):
        raise UserError(
            f"the header of {source} is damaged: its lora_adapter_metadata is no JSON object"
        )
    return config


def _require_size(model: Loaded, part: str, layer: str, *, pair: Pair, source: str) -> None:
    """Raise UserError unless the product of two matrices has the size of a layer's weight."""
    down, up = pair
    shape = tuple(model.parts[part].get_parameter(f"{layer}.weight").shape)
    found = (len(up), up[0].numel(), len(down), down[0].numel())
    if found != (shape[0], len(down), len(down), math.prod(shape[1:])):
        raise UserError(
            f"{source} does not fit {model.source}: it has matrices of {list(up.shape)} and "
            f"{list(down.shape)} for the layer {layer} of {list(shape)}; was it made for another "
            "model?"
        )


def _scale(config: Mapping[str, Any], prefix: str, layer: str, *, rank: int, source: str) -> float:
    """Return the factor of up @ down by peft's settings in a header.

    A name in `alpha_pattern` is that of a layer, or its end. peft also takes regular expressions,
    which are not evaluated here, since a file may be a stranger's. With `use_rslora` the divisor is
    sqrt(rank) (arXiv 2312.03732). Raises UserError for an alpha that is no number.
    """
    patterns = config.get(f"{prefix}.alpha_pattern") or {}
    try:
        of_layer = (value for key, value in patterns.items() if f".{layer}".endswith(f".{key}"))
        alpha = float(next(of_layer, config.get(f"{prefix}.lora_alpha", rank)))
    except (AttributeError, TypeError, ValueError):
        raise UserError(
            f"the header of {source} is damaged: the alpha of the layer {layer} is no number"
        ) from None
    return alpha / (rank**0.5 if config.get(f"{prefix}.use_rslora") else rank)


def without_alphas(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply alpha / rank into each `up` of a file with alphas, and leave the alphas out.

    Readers scale such a file by 1. An alpha that is no number, or that lacks its two matrices,
    stays for its reader to refuse.
    """
    scaled = dict(tensors)
    for name, alpha in tensors.items():
        stem = name.removesuffix(".alpha")
        if stem == name or alpha.numel() != 1:
            continue
        for down, up in ((f"{stem}.{one}", f"{stem}.{other}") for one, other in _DOWN_UP):
            if up in tensors and down in tensors and tensors[down].numel():
                scaled[up] = tensors[up].float() * (float(alpha) / len(tensors[down]))
                scaled.pop(name, None)
    return scaled


def _names_in_file(model: Loaded, part: str) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Return (name in a file, layers, prefix) for each layer of a part, in any naming."""
    prefix = _component(model, part)
    kohya = lora_names.PREFIXES["kohya"].get(model.family, {}).get(part)
    for layer, _ in model.parts[part].named_modules():
        full = lora_names.full_name(part, layer)
        yield f"{prefix}.{full}", (layer,), prefix
        yield f"{prefix}.{layer}", (layer,), prefix
        if kohya is not None:  # some tools use diffusers' names for all families
            yield kohya + full.replace(".", "_"), (layer,), prefix
    for naming in lora_names.PREFIXES:
        for stem, layers in lora_names.stems(model, part, naming):
            yield stem, layers, prefix


def of_pairs(part: str, pairs: Mapping[str, Pair]) -> Factors:
    """Return matrices of any ranks, scaled by 1, as matrices of the largest rank.

    The smaller ones are filled up with zeros.
    """
    rank = max(len(down) for down, _ in pairs.values())
    return Factors(
        part, {name: _pad_rank(*pair, rank) for name, pair in pairs.items()}, rank, float(rank)
    )


def _pad_rank(down: Tensor, up: Tensor, rank: int) -> Pair:
    more = rank - len(down)
    if not more:
        return down, up
    return torch.cat([down, down.new_zeros(more, *down.shape[1:])]), torch.cat(
        [up, up.new_zeros(len(up), more, *up.shape[2:])], 1
    )
