"""Text encoders in single files: as transformers saves them behind a prefix, or in OpenCLIP's
layout.

transformers                                  OpenCLIP
embeddings.token_embedding.weight             token_embedding.weight
embeddings.position_embedding.weight          positional_embedding
encoder.layers.i.self_attn.{q,k,v}_proj.*     transformer.resblocks.i.attn.in_proj_*, concatenated
encoder.layers.i.self_attn.out_proj.*         transformer.resblocks.i.attn.out_proj.*
encoder.layers.i.layer_norm{1,2}.*            transformer.resblocks.i.ln_{1,2}.*
encoder.layers.i.mlp.fc{1,2}.*                transformer.resblocks.i.mlp.{c_fc,c_proj}.*
final_layer_norm.*                            ln_final.*
text_projection.weight                        text_projection, transposed
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from concept_eraser.models.single_file.places import Place

_TOP = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


def clip(part: str, module: Any, prefix: str) -> Iterator[Place]:
    """Return the places of a CLIP as older transformers saved it.

    All but the projection has the prefix `text_model.`
    """
    for name in module.state_dict():
        bare = name.removeprefix("text_model.")
        yield Place(
            part,
            prefix + (bare if bare.startswith("text_projection.") else f"text_model.{bare}"),
            (name,),
        )


def open_clip(part: str, module: Any, prefix: str) -> Iterator[Place]:
    for name in module.state_dict():
        bare = name.removeprefix("text_model.")
        if bare in _TOP:
            yield Place(part, prefix + _TOP[bare], (name,))
        elif bare == "text_projection.weight":
            yield Place(part, f"{prefix}text_projection", (name,), "transpose")
        elif match := re.fullmatch(
            r"encoder\.layers\.(\d+)\.self_attn\.q_proj\.(weight|bias)", bare
        ):
            sources = tuple(name.replace("q_proj", f"{letter}_proj") for letter in "qkv")
            yield Place(
                part,
                f"{prefix}transformer.resblocks.{match[1]}.attn.in_proj_{match[2]}",
                sources,
                "rows",
            )
        elif not re.search(r"self_attn\.[kv]_proj", bare):
            _, _, i, suffix = bare.split(".", 3)
            layer, _, kind = suffix.rpartition(".")
            yield Place(part, f"{prefix}transformer.resblocks.{i}.{_LAYER[layer]}.{kind}", (name,))


def t5(part: str, module: Any, prefix: str) -> Iterator[Place]:
    for name in module.state_dict():
        yield Place(part, prefix + name, (name,))
