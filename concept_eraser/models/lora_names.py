"""The names of a model's layers in LoRA files of other programs.

* kohya: `lora_unet_<layer with _ for .>`. The names are diffusers' own for Stable Diffusion 1 and 2
  (text encoder `lora_te_`) and for Qwen-Image, the original code's for SDXL (`lora_te1_`,
  `lora_te2_`), Flux (its CLIP `lora_te1_`), Flux.2 and Z-Image
* musubi: the names of the networks that musubi-tuner trains. They differ from kohya's for Z-Image
  only, where they are diffusers' own
* comfyui: `diffusion_model.<layer>`, as AI Toolkit writes it. The names are the original code's for
  Flux.2, and diffusers' for Qwen-Image and Z-Image

In the original code one projection stands for q, k and v, so several layers have one name. A naming
exists for a family where diffusers converts it (diffusers 0.42.1, loaders/lora_conversion_utils.py,
lines 2221-2385, 2434-2778 and 2935-3166), so that a test can load it. It has the layers that
ComfyUI or musubi-tuner read by these names (models/lora_readers.py has their code), and that
diffusers reads or ignores:

* Flux.2's `norm_out.linear` has none: diffusers' converter does not swap its scale and shift
* In kohya's naming Z-Image's first and last layer have ComfyUI's names, and Flux.2's modulations
  the original code's. diffusers ignores them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from concept_eraser.models.base import Loaded
from concept_eraser.models.single_file import ldm, transformers
from concept_eraser.models.single_file.places import Place
from concept_eraser.utils.errors import UserError

NAMINGS = ("diffusers", "kohya", "musubi", "comfyui")
KOHYA_FORMAT = ("kohya", "musubi")  # with alphas, and with a header as sd-scripts writes it
_COMFYUI = "diffusion_model."
PREFIXES: dict[str, dict[str, dict[str, str]]] = {  # naming -> family -> part -> prefix
    "kohya": {
        "sd": {"denoiser": "lora_unet_", "text_encoder": "lora_te_"},
        "sdxl": {
            "denoiser": "lora_unet_",
            "text_encoder": "lora_te1_",
            "text_encoder_2": "lora_te2_",
        },
        "flux": {"denoiser": "lora_unet_", "text_encoder": "lora_te1_"},
        "zimage": {"denoiser": "lora_unet_"},
        "qwenimage": {"denoiser": "lora_unet_"},
        "flux2": {"denoiser": "lora_unet_"},
    },
    "musubi": {
        "zimage": {"denoiser": "lora_unet_"},
        "qwenimage": {"denoiser": "lora_unet_"},
        "flux2": {"denoiser": "lora_unet_"},
    },
    "comfyui": {
        "zimage": {"denoiser": _COMFYUI},
        "qwenimage": {"denoiser": _COMFYUI},
        "flux2": {"denoiser": _COMFYUI},
    },
}
_NO_READER = "diffusers reads no LoRA into its pipelines"
# what to do instead where a family does not have a naming
_INSTEAD = {
    "sd": "export --to kohya, which ComfyUI reads",
    "sdxl": "export --to kohya, which ComfyUI reads",
    "flux": "export --to kohya, which ComfyUI reads",
    "sd3": "export --to lora, which diffusers and ComfyUI read",
    "pixart": f"{_NO_READER}; export --to lora for ComfyUI, or --to diffusers",
    "sana": "export --to lora, which diffusers reads; ComfyUI has no Sana",
    "dit": f"{_NO_READER}; export --to diffusers",
}


def require(family: str, naming: str) -> None:
    """Raise UserError with the reason if a family has no such naming."""
    if naming == "diffusers" or family in PREFIXES[naming]:
        return
    instead = _INSTEAD.get(family, "export --to lora")
    raise UserError(
        f"diffusers has no converter of {naming}'s names for the family {family!r}, so no such "
        f"file could be tested: {instead}"
    )


def full_name(part: str, layer: str) -> str:
    """Add `text_model.`, which newer transformers dropped from a text encoder's names.

    Files have it, and readers accept both.
    """
    return (
        f"text_model.{layer}"
        if part == "text_encoder" and not layer.startswith("text_model.")
        else layer
    )


def stems(model: Loaded, part: str, naming: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return pairs of a name in the file and the part's layers that it stands for.

    Args:
        model: The model.
        part: Its part, such as "denoiser". A part without names has no pairs.
        naming: One of NAMINGS except "diffusers".
    """
    prefix = PREFIXES[naming].get(model.family, {}).get(part)
    if prefix is None:
        return
    module: Any = model.parts[part]
    places = _original(model.family, module, naming) if part == "denoiser" else None
    if places is None:
        for layer, _ in module.named_modules():
            yield _name(prefix, full_name(part, layer)), (layer,)
        return
    for place in places:
        if place.name.endswith(".weight"):
            layers = tuple(name.removesuffix(".weight") for name in place.sources)
            yield _name(prefix, place.name.removesuffix(".weight")), layers


def _name(prefix: str, layer: str) -> str:
    return prefix + (layer if prefix == _COMFYUI else layer.replace(".", "_"))


def _original(family: str, module: Any, naming: str) -> Iterable[Place] | None:
    """Return the places of the layers in the original code. None: diffusers' names are used."""
    if family == "sdxl":
        return ldm.unet(module)
    if family == "flux":
        blocks = ("double_blocks.", "single_blocks.")
        return (place for place in transformers.flux(module) if place.name.startswith(blocks))
    if family == "flux2":
        return transformers.flux2_layers(module)
    if family == "zimage" and naming == "kohya":
        return transformers.zimage_layers(module)
    return None
