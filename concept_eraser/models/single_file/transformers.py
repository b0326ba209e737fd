"""The transformers of SD 3, Flux, Flux.2 and Z-Image under the names of their original code.

The code is Stability's MMDiT, that of Black Forest Labs and that of Z-Image's checkpoints. All keep
q, k and v of a joint block in one projection; Flux's single blocks also the feed-forward's first
layer. diffusers splits a modulation into (scale, shift), the original code into (shift, scale):
those are swapped.

Of Flux.2 and Z-Image the tables have the layers that a LoRA adapts, and no norms: they are for
LoRA files only. They agree with diffusers 0.42.1, loaders/single_file_utils.py, lines 3852-4134.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from concept_eraser.models.single_file.places import How, Place

# (original layer, diffusers' layer, how); {i} counts blocks. Most layers have a bias.
Rows = tuple[str, tuple[str, ...], How]


def _one(theirs: str, ours: str, how: How = "same") -> Rows:
    return theirs, (ours,), how


def _qkv(theirs: str, root: str, *names: str) -> Rows:
    return theirs, tuple(f"{root}.{name}" for name in names), "rows"


_T, _ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
_B, _X, _C = "transformer_blocks.{i}", "joint_blocks.{i}.x_block", "joint_blocks.{i}.context_block"
SD3_BLOCK = (
    _qkv(f"{_X}.attn.qkv", f"{_B}.attn", *_T),
    _qkv(f"{_C}.attn.qkv", f"{_B}.attn", *_ADDED),
    _qkv(f"{_X}.attn2.qkv", f"{_B}.attn2", *_T),
    _one(f"{_X}.attn.ln_q", f"{_B}.attn.norm_q"),
    _one(f"{_X}.attn.ln_k", f"{_B}.attn.norm_k"),
    _one(f"{_C}.attn.ln_q", f"{_B}.attn.norm_added_q"),
    _one(f"{_C}.attn.ln_k", f"{_B}.attn.norm_added_k"),
    _one(f"{_X}.attn2.ln_q", f"{_B}.attn2.norm_q"),
    _one(f"{_X}.attn2.ln_k", f"{_B}.attn2.norm_k"),
    _one(f"{_X}.attn.proj", f"{_B}.attn.to_out.0"),
    _one(f"{_C}.attn.proj", f"{_B}.attn.to_add_out"),
    _one(f"{_X}.attn2.proj", f"{_B}.attn2.to_out.0"),
    _one(f"{_X}.adaLN_modulation.1", f"{_B}.norm1.linear"),
    # swapped in the last block, where the text is not updated
    _one(f"{_C}.adaLN_modulation.1", f"{_B}.norm1_context.linear"),
    _one(f"{_X}.mlp.fc1", f"{_B}.ff.net.0.proj"),
    _one(f"{_X}.mlp.fc2", f"{_B}.ff.net.2"),
    _one(f"{_C}.mlp.fc1", f"{_B}.ff_context.net.0.proj"),
    _one(f"{_C}.mlp.fc2", f"{_B}.ff_context.net.2"),
)
SD3_TOP = (
    _one("x_embedder.proj", "pos_embed.proj"),
    _one("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
    _one("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
    _one("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
    _one("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2"),
    _one("context_embedder", "context_embedder"),
    _one("final_layer.linear", "proj_out"),
    _one("final_layer.adaLN_modulation.1", "norm_out.linear", "swap"),
)
_D, _S = "double_blocks.{i}", "single_transformer_blocks.{i}"
_FLUX_ATTENTION: tuple[Rows, ...] = (
    _qkv(f"{_D}.img_attn.qkv", f"{_B}.attn", *_T),
    _qkv(f"{_D}.txt_attn.qkv", f"{_B}.attn", *_ADDED),
    _one(f"{_D}.img_attn.proj", f"{_B}.attn.to_out.0"),
    _one(f"{_D}.txt_attn.proj", f"{_B}.attn.to_add_out"),
)
FLUX_BLOCK: tuple[Rows, ...] = (
    *_FLUX_ATTENTION,
    _one(f"{_D}.img_mod.lin", f"{_B}.norm1.linear"),
    _one(f"{_D}.txt_mod.lin", f"{_B}.norm1_context.linear"),
    _one(f"{_D}.img_mlp.0", f"{_B}.ff.net.0.proj"),
    _one(f"{_D}.img_mlp.2", f"{_B}.ff.net.2"),
    _one(f"{_D}.txt_mlp.0", f"{_B}.ff_context.net.0.proj"),
    _one(f"{_D}.txt_mlp.2", f"{_B}.ff_context.net.2"),
    (
        "single_blocks.{i}.linear1",
        (*(f"{_S}.attn.{name}" for name in _T), f"{_S}.proj_mlp"),
        "rows",
    ),
    _one("single_blocks.{i}.linear2", f"{_S}.proj_out"),
    _one("single_blocks.{i}.modulation.lin", f"{_S}.norm.linear"),
)
FLUX_SCALES = (  # weights of the norms of queries and keys, called `scale` there
    _one(f"{_D}.img_attn.norm.query_norm", f"{_B}.attn.norm_q"),
    _one(f"{_D}.img_attn.norm.key_norm", f"{_B}.attn.norm_k"),
    _one(f"{_D}.txt_attn.norm.query_norm", f"{_B}.attn.norm_added_q"),
    _one(f"{_D}.txt_attn.norm.key_norm", f"{_B}.attn.norm_added_k"),
    _one("single_blocks.{i}.norm.query_norm", f"{_S}.attn.norm_q"),
    _one("single_blocks.{i}.norm.key_norm", f"{_S}.attn.norm_k"),
)
FLUX_TOP = (
    _one("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
    _one("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2"),
    _one("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
    _one("vector_in.out_layer", "time_text_embed.text_embedder.linear_2"),
    _one("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
    _one("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2"),
    _one("txt_in", "context_embedder"),
    _one("img_in", "x_embedder"),
    _one("final_layer.linear", "proj_out"),
    _one("final_layer.adaLN_modulation.1", "norm_out.linear", "swap"),
)
_S2 = f"{_S}.attn"
FLUX2_BLOCK: tuple[Rows, ...] = (
    *_FLUX_ATTENTION,
    _one(f"{_D}.img_mlp.0", f"{_B}.ff.linear_in"),
    _one(f"{_D}.img_mlp.2", f"{_B}.ff.linear_out"),
    _one(f"{_D}.txt_mlp.0", f"{_B}.ff_context.linear_in"),
    _one(f"{_D}.txt_mlp.2", f"{_B}.ff_context.linear_out"),
    _one("single_blocks.{i}.linear1", f"{_S2}.to_qkv_mlp_proj"),
    _one("single_blocks.{i}.linear2", f"{_S2}.to_out"),
)
FLUX2_TOP = (  # without norm_out.linear, whose rows are swapped
    _one("img_in", "x_embedder"),
    _one("txt_in", "context_embedder"),
    _one("time_in.in_layer", "time_guidance_embed.timestep_embedder.linear_1"),
    _one("time_in.out_layer", "time_guidance_embed.timestep_embedder.linear_2"),
    _one("final_layer.linear", "proj_out"),
    _one("double_stream_modulation_img.lin", "double_stream_modulation_img.linear"),
    _one("double_stream_modulation_txt.lin", "double_stream_modulation_txt.linear"),
    _one("single_stream_modulation.lin", "single_stream_modulation.linear"),
)
_Z = ("layers.{i}", "noise_refiner.{i}", "context_refiner.{i}")
_Z_SAME = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0")
ZIMAGE_BLOCK: tuple[Rows, ...] = tuple(
    row
    for block in _Z
    for row in (
        _qkv(f"{block}.attention.qkv", f"{block}.attention", *_T),
        _one(f"{block}.attention.out", f"{block}.attention.to_out.0"),
        *(_one(f"{block}.{name}", f"{block}.{name}") for name in _Z_SAME),
    )
)
ZIMAGE_TOP = (
    *(_one(name, name) for name in ("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")),
    # of the patch size 2 in space and 1 in time, the only one of the published models
    _one("x_embedder", "all_x_embedder.2-1"),
    _one("final_layer.linear", "all_final_layer.2-1.linear"),
    _one("final_layer.adaLN_modulation.1", "all_final_layer.2-1.adaLN_modulation.1"),
)


def sd3(module: Any, prefix: str = "") -> Iterator[Place]:
    """Return the places of SD 3's transformer. Raises KeyError for another architecture."""
    own, last = module.state_dict(), module.config.num_layers - 1
    places = [Place("denoiser", "pos_embed", ("pos_embed.pos_embed",))]
    places += [*_places(own, SD3_TOP, range(1)), *_places(own, SD3_BLOCK, range(last + 1))]
    reads = f"joint_blocks.{last}.context_block.adaLN_modulation."
    for place in _complete(own, places):
        how: How = "swap" if place.name.startswith(reads) else place.how
        yield Place("denoiser", prefix + place.name, place.sources, how)


def flux(module: Any) -> Iterator[Place]:
    """Return the places of Flux's transformer. Raises KeyError for another architecture."""
    own, count = (
        module.state_dict(),
        range(max(module.config.num_layers, module.config.num_single_layers)),
    )
    places = [*_places(own, FLUX_TOP, range(1)), *_places(own, FLUX_BLOCK, count)]
    scales = _places(own, FLUX_SCALES, count)
    places += [Place(p.part, p.name.removesuffix("weight") + "scale", p.sources) for p in scales]
    return iter(_complete(own, places))


def flux2_layers(module: Any) -> Iterator[Place]:
    """Return the places of the layers of Flux.2's transformer, of weights and biases."""
    own, config = module.state_dict(), module.config
    blocks = range(max(config.num_layers, config.num_single_layers))
    return iter([*_places(own, FLUX2_TOP, range(1)), *_places(own, FLUX2_BLOCK, blocks)])


def zimage_layers(module: Any) -> Iterator[Place]:
    """Return the places of the layers of Z-Image's transformer, of weights and biases."""
    own, config = module.state_dict(), module.config
    blocks = range(max(config.n_layers, config.n_refiner_layers))
    return iter([*_places(own, ZIMAGE_TOP, range(1)), *_places(own, ZIMAGE_BLOCK, blocks)])


def _places(own: Mapping[str, Any], table: tuple[Rows, ...], blocks: range) -> Iterator[Place]:
    """Return the entries of a table that a state dict has."""
    for i in blocks:
        for original_name, diffusers_name, how in table:
            for kind in ("weight", "bias"):
                sources = tuple(f"{name.format(i=i)}.{kind}" for name in diffusers_name)
                if sources[0] in own:
                    yield Place("denoiser", f"{original_name.format(i=i)}.{kind}", sources, how)


def _complete(own: Mapping[str, Any], places: list[Place]) -> list[Place]:
    """Return the places if every tensor has one. Raises KeyError with the name of one without."""
    remaining = own.keys() - {name for place in places for name in place.sources}
    if remaining:
        raise KeyError(min(remaining))
    return places
