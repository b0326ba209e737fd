"""Which weights may move: by the names the field uses, or by regular expression."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from concept_eraser.errors import UserError, unknown_message


def _is_text(name: str) -> bool:
    """Of a CLIP model: transformers' names, then open_clip's."""
    return "visual" not in name and "vision" not in name and not name.endswith(("logit_scale", "logit_bias"))


def _is_attention(name: str) -> bool:
    return ".self_attn." in name or ".attn." in name


# diffusers' names: attn1 is self-attention, attn2 cross-attention with the text
_RULES: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "cross_attention": lambda name: ".attn2." in name,
    "cross_attention_kv": lambda name: ".attn2.to_k." in name or ".attn2.to_v." in name,
    "self_attention": lambda name: ".attn1." in name,
    "all_but_cross_attention": lambda name: ".attn2." not in name,
    "text": _is_text,
    "text_attention": lambda name: _is_text(name) and _is_attention(name),
    "image": lambda name: "visual" in name or "vision" in name,
    "image_attention": lambda name: ("visual" in name or "vision" in name) and _is_attention(name),
    "attention": _is_attention,
}
SELECTIONS = tuple(_RULES)

# MMDiT and Flux have no cross-attention: picture and text attend jointly. What stands for it is the text's side of that,
# the projections of the context ("added" in diffusers' names); cross_attention_kv is what the picture reads of the text.
# Flux's single blocks have one set of weights for both, which counts as self-attention, as does SD 3.5's second
# attention of the picture, which diffusers calls attn2.
_CONTEXT = re.compile(r"\.attn\.(add_[qkv]_proj|to_add_out|norm_added_[qk])\.")
_JOINT_RULES: dict[str, Callable[[str], bool]] = {
    "cross_attention": lambda name: _CONTEXT.search(name) is not None,
    "cross_attention_kv": lambda name: ".attn.add_k_proj." in name or ".attn.add_v_proj." in name,
    "self_attention": lambda name: (".attn." in name or ".attn2." in name) and _CONTEXT.search(name) is None,
    "all_but_cross_attention": lambda name: _CONTEXT.search(name) is None,
}


def problem(selection: str) -> str | None:
    """What is wrong with a selection, or None."""
    if selection in _RULES:
        return None
    if not selection.startswith("re:"):
        return unknown_message("selection of parameters", selection, [*_RULES, "re:<regular expression>"])
    try:
        re.compile(selection[3:])
    except re.error as error:
        return f"{selection!r} is no regular expression: {error}"
    return None


def select(names: Iterable[str], selection: str) -> list[str]:
    """The names that a selection covers, in order. Raises UserError where it covers none."""
    wrong = problem(selection)
    if wrong:
        raise UserError(wrong)
    everything = list(names)
    rules = _RULES | _JOINT_RULES if any(_CONTEXT.search(name) for name in everything) else _RULES
    rule = rules.get(selection) or (lambda name: re.search(selection[3:], name) is not None)
    chosen = [name for name in everything if rule(name)]
    if not chosen:
        raise UserError(
            f"the selection {selection!r} matches none of the {len(everything)} tensors, e.g. {everything[0]!r}"
        )
    return chosen
