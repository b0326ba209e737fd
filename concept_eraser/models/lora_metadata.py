"""The header of a LoRA file, as sd-scripts writes it.

A file in kohya's naming or in musubi-tuner's has all keys, a file in other namings those of
`modelspec`. Only keys whose meaning was read are written (kohya-ss/sd-scripts 48d368f):

* `ss_network_module`, `ss_network_dim`, `ss_network_alpha`, `ss_network_args`, `ss_v2`,
  `ss_base_model_version`: networks/extract_lora_from_models.py, lines 242-255;
  networks/flux_extract_lora.py, lines 129-138; library/train_util.py, lines 3455-3492. "Dynamic"
  where the layers differ: networks/resize_lora.py, lines 357-358. Where q, k and v are put
  together (`split_qkv`), rank and alpha are those of one of them, as there
* `ss_output_name`, `ss_training_comment`, `ss_sd_model_name`, `ss_new_sd_model_hash`:
  train_network.py, lines 1006, 1038 and 1206-1213
* `sshs_model_hash`: library/train_util.py, lines 3259-3299
* `modelspec.*`: library/sai_model_spec.py, lines 20-65, 193-269 and 316-346. The three versions of
  Stable Diffusion 3 by their layers: library/sd3_utils.py, lines 53-60

Those of Z-Image, Qwen-Image and Flux.2 are kohya-ss/musubi-tuner's (30c658c): src/musubi_tuner/
networks/, dataset/architectures.py, lines 10-27, training/trainer_base.py, lines 72-84 and
1835-1887, flux_2/flux2_models.py, lines 42-60, and utils/sai_model_spec.py, lines 50-114 and
148-312. It writes no `ss_v2`, and an older version of the specification.

A model of no known version, such as PixArt, Sana or the bundled one, has only the keys of
`modelspec` that need no architecture. Both programs write more keys, which are left out here:

* `modelspec.date`, so that the same export gives the same bytes
* `modelspec.implementation_version`: it names a commit of sd-scripts
* `sshs_legacy_hash` and `ss_sd_model_hash`: old hashes of a part of a file
* the settings of their training, such as `ss_learning_rate`
* `modelspec.prediction_type` of Stable Diffusion 3: sd-scripts writes `epsilon`, and it is a flow

The resolution of Flux.2 is 1024x1024 here. musubi-tuner writes 1280x720 as a placeholder.

A1111 takes the version of a LoRA from `ss_base_model_version` and `ss_v2`. With an SDXL or SD 2
model it lists only LoRAs of that version (stable-diffusion-webui f2844bd,
extensions-builtin/Lora/network.py, detect_version, and ui_extra_networks_lora.py, create_item).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from concept_eraser.models.base import Loaded
from concept_eraser.models.lora import Factors
from concept_eraser.storage.digests import file_digest
from concept_eraser.utils.path_redaction import shorten

_IMPLEMENTATIONS = {
    "sdxl": "https://github.com/Stability-AI/generative-models",
    "flux": "https://github.com/black-forest-labs/flux",
    "flux2": "https://github.com/black-forest-labs/flux2",
    "zimage": "https://github.com/Tongyi-MAI/Z-Image",
    "qwenimage": "https://github.com/QwenLM/Qwen-Image",
}
_MODULES = {
    "flux": "networks.lora_flux",
    "flux2": "networks.lora_flux_2",
    "zimage": "networks.lora_zimage",
    "qwenimage": "networks.lora_qwen_image",
}
# of the UNet's cross-attention: library/model_util.py, lines 36 and 50
_WIDTHS = {768: "sd_v1", 1024: "sd_v2"}
_ARCHITECTURES = {
    "sd_v1": "stable-diffusion-v1",
    "sd_v1_v": "stable-diffusion-v1",
    "sd_v2": "stable-diffusion-v2-512",
    "sd_v2_v": "stable-diffusion-v2-768-v",
    "sdxl_base_v1-0": "stable-diffusion-xl-v1-base",
    "sd3_medium": "stable-diffusion-3-medium",
    "sd3_5-medium": "stable-diffusion-3-5-medium",
    "sd3_5-large": "stable-diffusion-3-5-large",
    "flux_2_klein_4b": "Flux.2-klein-4b",
    "flux_2_klein_9b": "Flux.2-klein-9b",
    "z_image": "Z-Image",
    "qwen_image": "Qwen-Image",
}
_VERSIONS = {  # of families with one version
    "sdxl": "sdxl_base_v1-0",
    "flux": "flux1",
    "zimage": "z_image",
    "qwenimage": "qwen_image",
}
# by the numbers of double and single blocks
_KLEINS: dict[Any, str] = {(5, 20): "flux_2_klein_4b", (8, 24): "flux_2_klein_9b"}
_OF_SD_SCRIPTS = ("sd", "sdxl", "sd3", "flux")  # the others are musubi-tuner's
_SIDES = {"sd_v2_v": 768, "qwen_image": 1328}  # in pixels; the others of sd have 512


def base_version(model: Loaded) -> str | None:
    """Return sd-scripts' name of the model's version, or None if it has none.

    Stable Diffusion 1 and 2 differ by the width of the text (768, 1024). The bundled model has
    neither. Flux.2 Klein 4B and 9B are known by the numbers of their blocks.
    """
    if model.family in _VERSIONS:
        return _VERSIONS[model.family]
    denoiser: Any = model.parts.get("denoiser")
    config = getattr(denoiser, "config", None)
    if model.family == "flux2":
        blocks = getattr(config, "num_layers", None), getattr(config, "num_single_layers", None)
        return _KLEINS.get(blocks)
    width = getattr(config, "cross_attention_dim", None)
    version = _WIDTHS.get(width) if model.family == "sd" and isinstance(width, int) else None
    return version and version + ("_v" if _prediction(model) == "v_prediction" else "")


def _prediction(model: Loaded) -> str | None:
    scheduler = getattr(getattr(model, "pipeline", None), "scheduler", None)
    return getattr(getattr(scheduler, "config", None), "prediction_type", None)


def _known_version(model: Loaded) -> str | None:
    """Return the key of `_ARCHITECTURES`; None for a model of no known version.

    It is sd-scripts' name of the version where there is one.
    """
    if model.family != "sd3":
        return base_version(model)
    config: Any = getattr(model.parts["denoiser"], "config", None)
    if not getattr(config, "qk_norm", None):
        return "sd3_medium"
    return "sd3_5-medium" if getattr(config, "dual_attention_layers", None) else "sd3_5-large"


def network(
    model: Loaded, tensors: Mapping[str, Tensor], factors: Sequence[Factors]
) -> dict[str, str]:
    """Return the keys about the matrices, the base model and the hash of the file.

    Args:
        model: The original model.
        tensors: The file's tensors, by kohya's names.
        factors: The LoRA, one entry for each part.
    """
    downs = {name: value for name, value in tensors.items() if name.endswith(".lora_down.weight")}
    ranks = {one.rank for one in factors}
    rank = alpha = "Dynamic"
    if len(ranks) == 1:
        (number,) = ranks
        rank = str(number)
        alphas = {  # of one projection, without float32's last digits
            f"{float(tensors[_alpha_of(name)]) * number / len(down):.6g}"
            for name, down in downs.items()
        }
        alpha = str(float(alphas.pop())) if len(alphas) == 1 else "Dynamic"
    version = base_version(model)
    keys = {
        "ss_network_module": _MODULES.get(model.family, "networks.lora"),
        "ss_network_dim": rank,
        "ss_network_alpha": alpha,
        "ss_sd_model_name": _name(model.source),
        "sshs_model_hash": _hash(tensors),
    }
    if any(value.dim() == 4 and value.shape[-1] > 1 for value in downs.values()):
        keys["ss_network_args"] = json.dumps({"conv_dim": rank, "conv_alpha": alpha})
    if version:
        keys["ss_base_model_version"] = version
        if model.family in _OF_SD_SCRIPTS:
            keys["ss_v2"] = str(version.startswith("sd_v2"))
    if Path(model.source).is_file():
        keys["ss_new_sd_model_hash"] = file_digest(Path(model.source))
    return keys


def _alpha_of(down: str) -> str:
    return down.removesuffix(".lora_down.weight") + ".alpha"


def _name(source: str) -> str:
    """Return the last component of a path, as sd-scripts does, and a hub id as it is.

    Of a file on a base it is that of both.
    """
    if Path(source).exists():
        return Path(source).name
    for separator in (" on ", "@"):
        source = separator.join(
            Path(one).name if Path(one).exists() else shorten(one)
            for one in source.split(separator)
        )
    return source


def _hash(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the file's bytes after its header."""
    content = save({name: value.contiguous() for name, value in tensors.items()})
    start = 8 + int.from_bytes(content[:8], "little")
    return hashlib.sha256(memoryview(content)[start:]).hexdigest()


def description(
    model: Loaded, title: str, comment: str, *, tags: str, usage: str
) -> dict[str, str]:
    """Return the keys that programs show: name, comment, and the specification `modelspec`.

    Args:
        model: The original model.
        title: The name of the file without its ending.
        comment: What the LoRA does.
        tags: Tags, with commas between them.
        usage: A short hint.
    """
    return {
        "ss_output_name": title,
        "ss_training_comment": comment,
        **specification(model, title, comment, tags=tags, usage=usage),
    }


def specification(
    model: Loaded, title: str, comment: str, *, tags: str, usage: str
) -> dict[str, str]:
    """Return the keys of `modelspec`, which do not depend on the names of the layers.

    Args:
        model: The original model. One of no known version has no architecture, and so none of the
            keys that go with it.
        title: The name of the file without its ending.
        comment: What the LoRA does.
        tags: Tags, with commas between them.
        usage: A short hint.
    """
    keys = {"title": title, "description": comment, "tags": tags, "usage_hint": usage}
    version = _known_version(model)
    if version is not None:
        guided = getattr(getattr(model.parts["denoiser"], "config", None), "guidance_embeds", False)
        flux = "flux-1-dev" if guided else "flux-1-schnell"
        keys |= {
            "sai_model_spec": "1.0.1" if model.family in _OF_SD_SCRIPTS else "1.0.0",
            "architecture": f"{_ARCHITECTURES.get(version, flux)}/lora",
            "implementation": _IMPLEMENTATIONS.get(model.family, "diffusers"),
            "resolution": _resolution(model.family, version),
        }
        if model.family in ("sd", "sdxl"):
            keys["prediction_type"] = "v" if _prediction(model) == "v_prediction" else "epsilon"
    return {f"modelspec.{key}": value for key, value in keys.items()}


def _resolution(family: str, version: str) -> str:
    side = _SIDES.get(version, 512 if family == "sd" else 1024)
    return f"{side}x{side}"
