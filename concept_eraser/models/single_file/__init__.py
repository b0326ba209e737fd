"""Checkpoints of one file, in the layout of the original code, for A1111, ComfyUI and Forge.

A file holds weights only: the architecture, scheduler and tokenizer come from a diffusers folder.
One table of places for each family serves both directions. The tests compare with diffusers' own
reader.

    family  denoiser                 text encoders
    SD 1    model.diffusion_model.*  cond_stage_model.transformer.text_model.*
    SD 2                             cond_stage_model.model.* (OpenCLIP)
    SDXL                             conditioner.embedders.0.transformer.text_model.*,
                                     conditioner.embedders.1.model.* (OpenCLIP)
    SD 3                             text_encoders.{clip_l,clip_g,t5xxl}.transformer.*
    Flux    no prefix                not written: its files hold the transformer only

The VAE is first_stage_model.* (not written for Flux).

A file has the precision of the model's checkpoint.

A whole file is read by diffusers' `from_single_file`, which needs no other weights. A file of some
parts is applied to a loaded pipeline (`place_on`), which has the other parts.

Names and shapes do not show what a denoiser predicts. Programs mark it: a tensor `v_pred` stands
for v-prediction, `ztsnr` for betas with a last signal of zero, and `edm_mean` or
`edm_vpred.sigma_max` for EDM (comfyanonymous/ComfyUI, comfy/supported_models.py, SDXL.model_type).
In the header `modelspec.prediction_type` is `v` or `epsilon`. The marks of v-prediction are
written, and compared with the base.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from concept_eraser.models.base import Model
from concept_eraser.models.completeness import require_vocabulary
from concept_eraser.models.folder_check import check_pipeline, components
from concept_eraser.models.single_file import ldm, text, transformers
from concept_eraser.models.single_file.places import Place
from concept_eraser.storage.readers import read_tensor_header
from concept_eraser.utils.errors import UserError

UNET, VAE = "model.diffusion_model.", "first_stage_model."
_DENOISERS = (UNET, "double_blocks.", "joint_blocks.")  # the last two: a transformer only
_OTHERS = {
    VAE: "vae",
    "vae.": "vae",
    "cond_stage_model.": "text_encoder",
    "conditioner.embedders.0.": "text_encoder",
    "conditioner.embedders.1.": "text_encoder_2",
    "text_encoders.clip_l.": "text_encoder",
    "text_encoders.clip_g.": "text_encoder_2",
    "text_encoders.t5xxl.": "text_encoder_3",
}
# read by diffusers
_CLASSES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "StableDiffusion3Pipeline")


def parts_in(names: Iterable[str]) -> set[str]:
    """Return the parts of a file's tensors; none without a denoiser in an original layout."""
    tensor_names = list(names)
    if not any(name.startswith(_DENOISERS) for name in tensor_names) or any(
        "lora" in name for name in tensor_names
    ):
        return set()
    return {
        "denoiser",
        *(
            part
            for prefix, part in _OTHERS.items()
            if any(n.startswith(prefix) for n in tensor_names)
        ),
    }


def _layouts() -> dict[str, Callable[[Mapping[str, Any]], Iterator[Place]]]:
    """Return the tables of places by family."""
    return {"sd": _sd, "sdxl": _sdxl, "sd3": _sd3, "flux": _flux}


def has_layout(family: str) -> bool:
    """Whether the models of a family can be written as one file."""
    return family in _layouts()


def places(model: Model) -> list[Place]:
    """Return every tensor's place in the file of a model's family.

    Raises UserError for a pipeline with parts that the original code does not have.
    """
    entries: list[Place] = []
    layout = _layouts().get(model.family)
    if layout is None:
        raise UserError(
            f"{model.source}: there is no layout of single files for the family "
            f"{model.family!r}; export --to diffusers"
        )
    try:
        for place in layout(model.parts):
            entries.append(place)
    except (KeyError, ValueError, TypeError) as error:
        position = (
            error.args[0]
            if isinstance(error, KeyError)
            else f"what follows {entries[-1].sources[0] if entries else 'its beginning'}"
        )
        raise UserError(
            f"{model.source}: the original code has no place for {position}; export --to diffusers"
        ) from None
    return entries


def _sd(parts: Mapping[str, Any]) -> Iterator[Place]:
    yield from ldm.unet(parts["denoiser"], UNET)
    yield from ldm.vae(parts["vae"], VAE)
    encoder = parts["text_encoder"]
    if encoder.config.hidden_act == "gelu":  # OpenCLIP's, in Stable Diffusion 2
        yield from text.open_clip("text_encoder", encoder, "cond_stage_model.model.")
    else:
        yield from text.clip("text_encoder", encoder, "cond_stage_model.transformer.")


def _sdxl(parts: Mapping[str, Any]) -> Iterator[Place]:
    yield from ldm.unet(parts["denoiser"], UNET)
    yield from ldm.vae(parts["vae"], VAE)
    yield from text.clip(
        "text_encoder", parts["text_encoder"], "conditioner.embedders.0.transformer."
    )
    yield from text.open_clip(
        "text_encoder_2", parts["text_encoder_2"], "conditioner.embedders.1.model."
    )


def _sd3(parts: Mapping[str, Any]) -> Iterator[Place]:
    yield from transformers.sd3(parts["denoiser"], UNET)
    yield from ldm.vae(parts["vae"], VAE)
    for place in text.clip(
        "text_encoder", parts["text_encoder"], "text_encoders.clip_l.transformer."
    ):
        # readers assume the identity: see _check_projection
        if place.sources != ("text_projection.weight",):
            yield place
    yield from text.clip(
        "text_encoder_2", parts["text_encoder_2"], "text_encoders.clip_g.transformer."
    )
    if "text_encoder_3" in parts:
        yield from text.t5(
            "text_encoder_3", parts["text_encoder_3"], "text_encoders.t5xxl.transformer."
        )


def _flux(parts: Mapping[str, Any]) -> Iterator[Place]:
    yield from transformers.flux(parts["denoiser"])
    yield from ldm.vae(parts["vae"], VAE)
    yield from text.clip("text_encoder", parts["text_encoder"], "text_encoders.clip_l.transformer.")
    yield from text.t5(
        "text_encoder_2", parts["text_encoder_2"], "text_encoders.t5xxl.transformer."
    )


def written_parts(model: Model) -> list[str]:
    """Return the parts that `write` puts into a file of a model's family."""
    return ["denoiser"] if model.family == "flux" else list(model.parts)


def original_layout(model: Model) -> dict[str, Tensor]:
    """Return the tensors of the written parts under their original names.

    Raises UserError as `places`.
    """
    _check_projection(model)
    own = {part: module.state_dict() for part, module in model.parts.items()}
    return {
        place.name: place.join(own[place.part])
        for place in places(model)
        if place.part in written_parts(model)
    }


def _check_projection(model: Model) -> None:
    """Raise UserError unless the projection of SD 3's first CLIP is the identity.

    Its files have no such projection, and diffusers and ComfyUI assume the identity.
    """
    if model.family == "sd3":
        matrix = model.parts["text_encoder"].state_dict()["text_projection.weight"]
        if matrix.device.type != "meta" and not torch.equal(
            matrix, torch.eye(*matrix.shape).to(matrix)
        ):
            raise UserError(
                f"{model.source}: the projection of the first text encoder is not the "
                "identity, which every reader of a single SD 3 file takes it for; "
                "export --to diffusers"
            )


def write(model: Model, file: Path) -> None:
    """Write a pipeline as one file in the original layout, in the precision of its checkpoint.

    Raises UserError as `original_layout`.
    """
    layout, stored = original_layout(model), getattr(model, "stored", {})
    tensors = {}
    for place in places(model):
        if place.name in layout:
            value = layout[place.name].detach().cpu()
            if place.part in stored and value.is_floating_point():
                value = value.to(stored[place.part].dtype_of(place.sources[0]))
            tensors[place.name] = value.contiguous()
    pointers: set[int] = set()
    for name, value in tensors.items():  # T5's table of embeddings has two names
        tensors[name] = value.clone() if value.data_ptr() in pointers else value
        pointers.add(value.data_ptr())
    save_file(tensors | _marks(model), file, metadata=_header(model))


def _config(model: Any) -> Mapping[str, Any]:
    """Return the configuration of a model's scheduler."""
    config: Mapping[str, Any] = model.pipeline.scheduler.config
    return config


def _marks(model: Model) -> dict[str, Tensor]:
    """Return tensors without content that say what an SDXL predicts; none for epsilon."""
    config, names = _config(model), []
    if model.family == "sdxl" and config.get("prediction_type") == "v_prediction":
        names = ["v_pred", *(["ztsnr"] if config.get("rescale_betas_zero_snr") else [])]
    return {name: torch.zeros(0) for name in names}


def _header(model: Model) -> dict[str, str]:
    is_v = _config(model).get("prediction_type") == "v_prediction"
    return {"format": "pt", **({"modelspec.prediction_type": "v"} if is_v else {})}


def require_same_prediction(file: Path, model: Model) -> None:
    """Raise UserError if a file says that it predicts something else than its base.

    Args:
        file: The safetensors file.
        model: The model with the scheduler of its base.
    """
    metadata, names = read_tensor_header(file)
    if {"edm_mean", "edm_vpred.sigma_max"} & set(names):
        raise UserError(
            f"{file} is of another diffusion than DDPM's (EDM), which is not supported; give a "
            "checkpoint that predicts the noise or v"
        )
    is_v = "v_pred" in names or metadata.get("modelspec.prediction_type") == "v"
    for is_stated, key, value in (
        (is_v, "prediction_type", "v_prediction"),
        ("ztsnr" in names, "rescale_betas_zero_snr", True),
    ):
        own = _config(model).get(key)
        if is_stated and own != value:
            raise UserError(
                f"{file} is marked as a model with {key} {value}, and the scheduler of its base "
                f"has {key} {own}; set it in scheduler/scheduler_config.json of a copy of the "
                "base, or give another base"
            )


def place_on(model: Model, tensors: Mapping[str, Tensor], source: str) -> list[str]:
    """Apply the parts in a file to a loaded pipeline. Returns the changed parts.

    Raises UserError if a part is not complete there, has another shape, or has tensors that the
    model has no place for.
    """
    file_parts = parts_in(tensors)
    if model.family == "flux":  # its second text encoder is the T5
        file_parts = {"text_encoder_2" if part == "text_encoder_3" else part for part in file_parts}
    file = _spelled_alike(tensors, bare=model.family == "flux")
    part_places = [place for place in places(model) if place.part in file_parts]
    absent = next(
        (
            p
            for p in part_places
            if p.name not in file and not p.name.endswith("embed_tokens.weight")
        ),
        None,
    )
    extra = file.keys() - {p.name for p in part_places}
    unplaced_name = min((n for n in extra if n.startswith(_DENOISERS)), default=None)
    if absent or unplaced_name or not part_places:
        cause = (
            f"it has nothing for {absent.name}"
            if absent
            else f"the model has no place for {unplaced_name}"
        )
        raise UserError(
            f"{source} does not fit {model.source}: {cause}; was it made for another architecture?"
        )
    for part in sorted(file_parts):
        own: dict[str, Tensor] = model.parts[part].state_dict()
        part_tensors: dict[str, Tensor] = {}
        for place in part_places:
            if place.part == part and place.name in file:
                try:
                    part_tensors |= place.split(file[place.name], own)
                except (ValueError, RuntimeError, IndexError) as error:
                    raise UserError(f"{source} does not fit {model.source}: {error}") from None
        model.parts[part].load_state_dict(
            {k: v.to(own[k].dtype) for k, v in part_tensors.items()}, strict=False
        )
    return sorted(file_parts)


def _spelled_alike(tensors: Mapping[str, Tensor], *, bare: bool) -> dict[str, Tensor]:
    """Return the tensors with uniform prefixes.

    Some tools write `vae.` for `first_stage_model.`, and a transformer with or without its prefix.
    """
    renamed_tensors = {}
    has_prefix = any(name.startswith(UNET) for name in tensors)
    for name, value in tensors.items():
        if name.startswith("vae."):
            name = VAE + name.removeprefix("vae.")
        elif bare:
            name = name.removeprefix(UNET)
        elif not has_prefix and not name.startswith(tuple(_OTHERS)):
            name = UNET + name
        renamed_tensors[name] = value
    return renamed_tensors


def read(file: Path, config: str, file_parts: set[str]) -> Any:
    """Read the pipeline of a single file that holds all parts, by diffusers' own reader.

    Returns None if the file lacks parts, or if the reader supports one size only (Flux). config: a
    diffusers folder of the same architecture. file_parts: see `parts_in`. Raises UserError if the
    two do not fit.
    """
    import diffusers

    content = check_pipeline(Path(config))
    class_name = content.get("_class_name")
    weight_parts = [
        n
        for n, kind in content.items()
        if n.startswith(("text_encoder", "vae")) and isinstance(kind, list) and all(kind)
    ]
    if class_name not in _CLASSES or not {"denoiser", *weight_parts} <= file_parts:
        return None
    for name in components(content):
        if name.startswith("tokenizer"):
            require_vocabulary(Path(config) / name)
    absent = {
        n: None
        for n, kind in content.items()
        if kind == [None, None] or n in ("safety_checker", "feature_extractor")
    }
    try:
        pipeline = getattr(diffusers, class_name).from_single_file(
            str(file), config=config, local_files_only=True, **absent
        )
        if "requires_safety_checker" in pipeline.config:
            pipeline.register_to_config(requires_safety_checker=False)
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as error:
        raise UserError(
            f"{file} does not fit the configuration in {config}: "
            f"{str(error).strip().splitlines()[0][:200]}"
        ) from error
    parts = {
        name: part
        for name, part in pipeline.components.items()
        if isinstance(part, torch.nn.Module)
    }
    gaps = [
        f"{name}.{key}"
        for name, part in parts.items()
        for key, value in part.named_parameters()
        if value.is_meta
    ]
    if gaps:
        raise UserError(
            f"{file} does not fit the configuration in {config}: it has nothing for {gaps[0]}"
        )
    return pipeline


def read_as(file: Path, model: Any, parts: set[str]) -> Any:
    """Call `read` with the configuration of a pipeline in memory."""
    with tempfile.TemporaryDirectory() as folder:
        where, pipeline = Path(folder), model.pipeline
        pipeline.save_config(where)
        for name, part in pipeline.components.items():
            if isinstance(part, torch.nn.Module):
                config: Any = part if hasattr(part, "save_config") else part.config
                (config.save_config if hasattr(config, "save_config") else config.save_pretrained)(
                    where / name
                )
            elif part is not None:
                part.save_pretrained(where / name)
        return read(file, folder, parts)
