"""Block weights: one factor for the layers of a LoRA in each block of the UNet.

Users know them from the extension LoRA Block Weight of A1111 and Forge: a list of 17 or 26 numbers
for Stable Diffusion 1 and 2, of 12 or 20 for XL (hako-mikan/sd-webui-lora-block-weight b403cb7,
scripts/lora_block_weight.py, lines 53-59 and 1287-1307). The first one, BASE, is for the text
encoders. The others are for blocks by their numbers in the original code: IN01 is
`input_blocks.1`, M00 `middle_block`, OUT03 `output_blocks.3`.

The short lists name the blocks with attention. Layers outside of blocks, such as the embedding of
the time step, keep the factor 1, as in the extension.

Difference: the extension gives the factor 0 to blocks that a short list does not name. Here such a
list is refused, so that no part of a LoRA is dropped in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from concept_eraser.models.base import Loaded
from concept_eraser.models.lora import Factors
from concept_eraser.models.lora_readers import TEXT_ENCODERS
from concept_eraser.models.single_file import ldm
from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError, names_text, quote


def _numbered(kind: str, numbers: Sequence[int]) -> list[str]:
    return [f"{kind}{number:02}" for number in numbers]


_SD_ATTENTION = _numbered("IN", (1, 2, 4, 5, 7, 8)), _numbered("OUT", range(3, 12))
_XL_ATTENTION = _numbered("IN", (4, 5, 7, 8)), _numbered("OUT", range(6))
# the blocks of each list, by the family
CONVENTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sd": (
        ("BASE", *_SD_ATTENTION[0], "M00", *_SD_ATTENTION[1]),
        ("BASE", *_numbered("IN", range(12)), "M00", *_numbered("OUT", range(12))),
    ),
    "sdxl": (
        ("BASE", *_XL_ATTENTION[0], "M00", *_XL_ATTENTION[1]),
        ("BASE", *_numbered("IN", range(9)), "M00", *_numbered("OUT", range(9))),
    ),
}
_PLACE = re.compile(r"(input_blocks|middle_block|output_blocks)\.(\d+)\.")


def weigh(model: Loaded, factors: Sequence[Factors], weights: Sequence[float]) -> list[Factors]:
    """Multiply the change of each layer by the weight of its block.

    Args:
        model: The original model.
        factors: The LoRA, one entry for each part.
        weights: One number for each block of a list in CONVENTIONS.

    Returns:
        The LoRA without the layers of blocks of weight 0, and without parts that have none left.

    Raises:
        UserError: The family has no such convention, the number of weights is another, a layer is
            in a block that the list does not name, or all weights are 0.
    """
    blocks = _blocks(model, weights)
    weight_of = dict(zip(blocks, map(float, weights), strict=True))
    places = _places(model)
    weighted = []
    for one in factors:
        layers = {}
        unnamed: dict[str, str] = {}
        for layer, (down, up) in one.layers.items():
            block = "BASE" if one.part in TEXT_ENCODERS else places.get(layer)
            if block is not None and block not in weight_of:
                unnamed[block] = layer
                continue
            weight = 1.0 if block is None else weight_of[block]
            if weight:
                layers[layer] = (down, up if weight == 1 else up * weight)
        if unnamed:
            raise UserError(
                f"the LoRA has layers in the blocks {names_text(sorted(unnamed))}, which a list of "
                f"{len(blocks)} weights does not name (e.g. {next(iter(unnamed.values()))}); give "
                f"{len(CONVENTIONS[model.family][-1])} weights: "
                f"{', '.join(CONVENTIONS[model.family][-1])}"
            )
        if layers:
            weighted.append(replace(one, layers=layers))
    if not weighted:
        raise UserError(
            "all layers of the LoRA are in blocks of weight 0; give a block another weight"
        )
    return weighted


def _blocks(model: Loaded, weights: Sequence[float]) -> tuple[str, ...]:
    """Return the names of the blocks that the weights are for. Raises UserError as `weigh`."""
    conventions = CONVENTIONS.get(model.family)
    if conventions is None:
        raise UserError(
            f"block weights are for the UNets of Stable Diffusion 1, 2 and XL; {model.source} is "
            f"of the family {model.family!r}, for which there is no list of blocks"
        )
    if not all(math.isfinite(weight) and abs(weight) <= limits.PORTION for weight in weights):
        raise UserError(
            f"block weights are numbers from -{limits.PORTION:g} to {limits.PORTION:g}, found "
            f"{quote(list(weights))}"
        )
    blocks = next((names for names in conventions if len(names) == len(weights)), None)
    if blocks is None:
        choices = "; or ".join(f"{len(names)} ({', '.join(names)})" for names in conventions)
        raise UserError(f"found {len(weights)} block weights; {model.source} takes {choices}")
    return blocks


def _places(model: Loaded) -> dict[str, str]:
    """Return the block of each layer of the UNet. Layers outside of blocks have none.

    Raises UserError if the UNet is none of the original code.
    """
    module: Any = model.parts["denoiser"]
    try:
        places = list(ldm.unet(module))
    except (KeyError, ValueError, TypeError):
        raise UserError(
            f"block weights are for the UNets of Stable Diffusion 1, 2 and XL; {model.source} has "
            "layers that have no place there"
        ) from None
    blocks = {}
    for place in places:
        match = _PLACE.match(place.name)
        if match:
            kind = {"input_blocks": "IN", "output_blocks": "OUT"}.get(match[1])
            block = f"{kind}{int(match[2]):02}" if kind else "M00"
            blocks.update({name.rpartition(".")[0]: block for name in place.sources})
    return blocks
