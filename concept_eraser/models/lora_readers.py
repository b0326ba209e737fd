"""Which layers of a LoRA file each program reads.

A program ignores the other layers of a file without an error. What it generates then differs from
the trained model. The table was read in the programs' code; they were not run here. Layers have
diffusers' names. `--to kohya` writes kohya's naming, `--to lora` diffusers', `--to musubi`
musubi-tuner's and `--to comfyui` ComfyUI's (see lora_files).

Only diffusers was run: tests load a file with its `load_lora_weights` for the entries of diffusers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from concept_eraser.models.lora import Factors

_EVERY = r""
_NONE = r"(?!)"
_UNET_BLOCKS = r"^(down_blocks|mid_block|up_blocks)\."
_FLUX_BLOCKS = r"^(transformer_blocks|single_transformer_blocks)\."
_FLUX_EMBEDDERS = r"^(x_embedder|context_embedder|time_text_embed)\."
# Z-Image's layers outside of attention that have one name in the original code and in diffusers
_ZIMAGE_SAME = r"^(?!all_)(?!.*\.attention\.)"
_NO_MODULATION = r"^(?!(double|single)_stream_modulation)"
_CLIP = r"(^|\.)encoder\.layers\.\d+\.(self_attn|mlp)\."
_FP16 = "export --dtype fp16 for diffusers"
_WHOLE_MODEL = "export --to diffusers for a whole model"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


@dataclass(frozen=True)
class Reader:
    """One program that reads LoRA files of one naming.

    Attributes:
        program: Its name.
        naming: One of lora_names.NAMINGS.
        families: The model families that the entry is for.
        denoiser: A regular expression that occurs in the names of the layers that it reads.
        text: The same for the layers of the text encoders.
        source: Where this was read: repository, commit, file, lines.
        advice: What to do for the layers that it ignores, if that is not the usual.
    """

    program: str
    naming: str
    families: tuple[str, ...]
    denoiser: str
    text: str
    source: str
    advice: str = ""

    def reads(self, part: str, layer: str) -> bool:
        """Whether the program reads a layer of a part of the pipeline."""
        pattern = self.text if part in TEXT_ENCODERS else self.denoiser
        return re.search(pattern, layer) is not None


READERS = (
    Reader(
        program="sd-scripts",
        naming="kohya",
        families=("sd", "sdxl"),
        denoiser=_UNET_BLOCKS,
        text=_CLIP,
        source="kohya-ss/sd-scripts 48d368f, networks/lora.py, lines 867-869 and 962-971: linear "
        "layers and convolutions inside Transformer2DModel, ResnetBlock2D, Downsample2D and "
        "Upsample2D; CLIPAttention, CLIPMLP",
    ),
    Reader(
        program="sd-scripts",
        naming="kohya",
        families=("flux",),
        denoiser=rf"{_FLUX_BLOCKS}|{_FLUX_EMBEDDERS}",
        text=_CLIP,
        source="kohya-ss/sd-scripts 48d368f, networks/lora_flux.py, lines 709-711, 775 and 951-965",
    ),
    Reader(
        program="ComfyUI",
        naming="kohya",
        families=("sd", "sdxl", "flux"),
        denoiser=_EVERY,
        text=rf"{_CLIP}|^text_projection$",
        source="Comfy-Org/ComfyUI ec93dca, comfy/lora.py, model_lora_keys_unet (each weight of the "
        "model, by its original name and by diffusers') and model_lora_keys_clip; comfy/utils.py, "
        "UNET_MAP_BASIC",
    ),
    Reader(
        program="ComfyUI",
        naming="diffusers",
        families=("sd", "sdxl"),
        # of attention it expects `.processor.to_q`, the naming before peft's
        denoiser=r"^(?!.*\.to_(q|k|v|out\.0)$)",
        text=_CLIP,
        source="Comfy-Org/ComfyUI ec93dca, comfy/lora.py, model_lora_keys_unet",
    ),
    Reader(
        program="A1111",
        naming="kohya",
        families=("sd", "sdxl"),
        denoiser=_EVERY,
        text=_CLIP,
        source="AUTOMATIC1111/stable-diffusion-webui 873edba, extensions-builtin/Lora/networks.py, "
        "lines 57-99 (Stable Diffusion 1 and 2) and load_network (SDXL)",
    ),
    Reader(
        program="diffusers",
        naming="kohya",
        families=("sd", "sdxl"),
        denoiser=_EVERY,
        text=rf"{_CLIP}|^text_projection$",
        source="diffusers 0.42.1, loaders/lora_conversion_utils.py, lines 74-79 and 259-358",
    ),
    Reader(
        program="diffusers",
        naming="kohya",
        families=("flux",),
        denoiser=_FLUX_BLOCKS,
        text=_CLIP,
        source="diffusers 0.42.1, loaders/lora_conversion_utils.py, lines 380-700",
    ),
    *(
        Reader(
            program="ComfyUI",
            naming=naming,
            families=families,
            denoiser=layers,
            text=_EVERY,
            source="Comfy-Org/ComfyUI ec93dca, comfy/lora.py, model_lora_keys_unet; 09708ea, "
            "comfy/utils.py, z_image_to_diffusers and flux_to_diffusers; 617048a, "
            "comfy/ldm/lumina/model.py, NextDiT",
            advice="export --to comfyui",
        )
        for naming, families, layers in (
            ("kohya", ("zimage", "qwenimage", "flux2"), _EVERY),
            ("comfyui", ("zimage", "qwenimage", "flux2"), _EVERY),
            ("musubi", ("qwenimage", "flux2"), _EVERY),
            ("musubi", ("zimage",), _ZIMAGE_SAME),
        )
    ),
    *(
        Reader(
            program="diffusers",
            naming=naming,
            families=families,
            denoiser=layers,
            text=_EVERY,
            source="diffusers 0.42.1, loaders/lora_conversion_utils.py, lines 2221-2385, 2434-2778 "
            "and 2935-3166",
            advice="export --to lora",
        )
        for naming, families, layers in (
            ("kohya", ("qwenimage",), _EVERY),
            ("kohya", ("zimage",), r"^(?!all_)"),
            ("kohya", ("flux2",), _NO_MODULATION),
            ("comfyui", ("zimage", "qwenimage", "flux2"), _EVERY),
            ("musubi", ("zimage", "qwenimage"), _EVERY),
            ("musubi", ("flux2",), _NO_MODULATION),
        )
    ),
    *(
        Reader(
            program="musubi-tuner",
            naming=naming,
            families=families,
            denoiser=layers,
            text=_EVERY,
            source="kohya-ss/musubi-tuner 30c658c, src/musubi_tuner/utils/lora_utils.py, lines "
            "135-202 (each weight of the model by its name); zimage/zimage_model.py, "
            "qwen_image/qwen_image_model.py, flux_2/flux2_models.py",
            advice="export --to musubi",
        )
        for naming, families, layers in (
            ("kohya", ("qwenimage", "flux2"), _EVERY),
            ("kohya", ("zimage",), _ZIMAGE_SAME),
            ("musubi", ("zimage", "qwenimage", "flux2"), _EVERY),
        )
    ),
    Reader(
        program="ComfyUI",
        naming="diffusers",
        families=("zimage", "qwenimage", "pixart"),
        denoiser=_EVERY,
        text=_EVERY,
        source="Comfy-Org/ComfyUI ec93dca, comfy/lora.py, model_lora_keys_unet; 09708ea, "
        "comfy/utils.py, z_image_to_diffusers and pixart_to_diffusers",
    ),
    Reader(
        program="ComfyUI",
        naming="diffusers",
        families=("sd3", "flux"),
        denoiser=_EVERY,
        text=_CLIP,
        source="Comfy-Org/ComfyUI ec93dca, comfy/lora.py, model_lora_keys_unet and "
        "model_lora_keys_clip; 09708ea, comfy/utils.py, mmdit_to_diffusers and flux_to_diffusers",
        advice=_WHOLE_MODEL,
    ),
    Reader(
        program="ComfyUI",
        naming="diffusers",
        families=("flux2",),
        denoiser=rf"{_FLUX_BLOCKS}|^(x_embedder|context_embedder|norm_out|proj_out)(\.|$)",
        text=_EVERY,
        source="Comfy-Org/ComfyUI 09708ea, comfy/utils.py, flux_to_diffusers: the embedding of the "
        "time has Flux.1's name there, and the modulation none",
        advice="export --to comfyui",
    ),
    Reader(
        program="diffusers",
        naming="diffusers",
        families=("pixart", "dit"),
        denoiser=_NONE,
        text=_NONE,
        source="diffusers 0.42.1, pipelines/pixart_alpha/pipeline_pixart_alpha.py, the class's "
        "bases: none loads a LoRA",
        advice=_WHOLE_MODEL,
    ),
    *(
        Reader(
            program="diffusers",
            naming="diffusers",
            families=families,
            denoiser=_EVERY,
            text=layers,
            source="diffusers 0.42.1, loaders/lora_pipeline.py, _lora_loadable_modules: the CLIP "
            "text encoders of Stable Diffusion 3 and Flux, and no other text encoder",
            advice=_WHOLE_MODEL,
        )
        for families, layers in (
            (("sd3", "flux"), rf"{_CLIP}|^text_projection$"),
            (("sana", "zimage", "qwenimage", "flux2"), _NONE),
        )
    ),
)


@dataclass(frozen=True)
class Ignored:
    """The layers of a LoRA that one program ignores.

    Attributes:
        program: Its name.
        naming: One of lora_names.NAMINGS.
        layers: The layers, with their part if it is not the denoiser.
        of: The number of layers in the file.
        share: The share of the squared length of the whole change that lies in these layers.
        advice: What to do for them.
        verb: What the program does with them.
    """

    program: str
    naming: str
    layers: tuple[str, ...]
    of: int
    share: float
    advice: str
    verb: str = "ignores"

    def sentence(self) -> str:
        """Return the warning for the user, with what to do."""
        names = ", ".join(self.layers[:4]) + (", ..." if len(self.layers) > 4 else "")
        return (
            f"{self.program} {self.verb} {len(self.layers)} of the {self.of} layers ({names}), "
            f"with {100 * self.share:.3g} % of the squared length of the change; {self.advice}"
        )


def is_loaded_by_diffusers(family: str | None, part: str) -> bool:
    """Whether `load_lora_weights` of the family's pipeline reads layers of a part.

    family: None for an unknown one, which is taken for one that does.
    """
    return not any(
        (reader.text if part in TEXT_ENCODERS else reader.denoiser) == _NONE
        for reader in READERS
        if reader.program == reader.naming == "diffusers" and family in reader.families
    )


def find_ignored(
    family: str,
    factors: Sequence[Factors],
    naming: str,
    readers: Sequence[Reader] = READERS,
    *,
    is_fp8: bool = False,
) -> tuple[Ignored, ...]:
    """Return for each program the layers that it ignores, without programs that read all.

    diffusers reads a file of fp8 for the families with a UNet only: the converters of the others
    multiply the matrices, which torch cannot do (diffusers 0.42.1, loaders/
    lora_conversion_utils.py, lines 380-420 and 2326-2350).

    Args:
        family: The model's family.
        factors: The LoRA, one entry for each part.
        naming: The naming of the file, one of lora_names.NAMINGS.
        readers: The table.
        is_fp8: Whether the file's numbers are fp8.
    """
    squares: Mapping[tuple[str, str], float] = {
        (one.part, layer): one.squared_length(layer) for one in factors for layer in one.layers
    }
    total = sum(squares.values())
    findings = []
    for reader in readers:
        if reader.naming != naming or family not in reader.families:
            continue
        fails = is_fp8 and reader.program == "diffusers" and family not in ("sd", "sdxl")
        places = [place for place in squares if fails or not reader.reads(*place)]
        if places:
            share = sum(squares[place] for place in places) / total if total else 0.0
            names = tuple(
                layer if part == "denoiser" else f"{part}.{layer}" for part, layer in places
            )
            findings.append(
                Ignored(
                    program=reader.program,
                    naming=naming,
                    layers=names,
                    of=len(squares),
                    share=share,
                    advice=_FP16 if fails else reader.advice or _advice(reader),
                    verb="cannot read" if fails else "ignores",
                )
            )
    return tuple(findings)


def _advice(reader: Reader) -> str:
    if reader.naming == "diffusers":
        return f"export --to kohya for {reader.program}"
    return "train with --select blocks --lora RANK to leave them out"
