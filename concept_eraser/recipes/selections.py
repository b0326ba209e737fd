"""Select the trainable parameters, by the usual names of selections or by regular expression."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from concept_eraser.utils.errors import UserError, quote, unknown_message

EXPRESSION = 500  # characters of a regular expression
SECONDS = 2  # of processor time, for all names together


def _is_text(name: str) -> bool:
    """Whether a tensor of a CLIP model belongs to the text tower.

    The names are those of transformers or of open_clip.
    """
    return (
        "visual" not in name
        and "vision" not in name
        and not name.endswith(("logit_scale", "logit_bias"))
    )


def _is_attention(name: str) -> bool:
    return ".self_attn." in name or ".attn." in name


# diffusers' names of `out.` and `time_embed.` in the names of CompVis
_UNET_ENDS = ("conv_norm_out.", "conv_out.", "time_embedding.")
# the same parts of PixArt and Sana, whose text is read by cross-attention as in a UNet
_CAPTIONED_ENDS = ("norm_out.", "proj_out.", "scale_shift_table", "adaln_single.", "time_embed.")
# the same parts of MMDiT (Stable Diffusion 3, Qwen-Image), Flux and Flux.2
_JOINT_ENDS = ("norm_out.", "proj_out.", "time_text_embed.", "time_guidance_embed.")

# `blocks`: without the first and last layers and the embeddings of the time step. sd-scripts,
# ComfyUI, A1111 and diffusers read all layers of a LoRA of it (models/lora_readers.py). The names
# are diffusers' of a UNet, MMDiT, Flux, DiT, PixArt, Sana and Z-Image, and transformers' of CLIP
_BLOCK = re.compile(
    r"(^|\.)(down_blocks|mid_block|up_blocks|(single_)?transformer_blocks|encoder\.layers)\."
    r"|^(layers|noise_refiner|context_refiner)\."
)

# diffusers' names: attn1 is self-attention, attn2 cross-attention with the text
_RULES: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "blocks": lambda name: _BLOCK.search(name) is not None,
    "cross_attention": lambda name: ".attn2." in name,
    "cross_attention_kv": lambda name: ".attn2.to_k." in name or ".attn2.to_v." in name,
    "self_attention": lambda name: ".attn1." in name,
    "all_but_cross_attention": lambda name: ".attn2." not in name,
    # ESD's code, train-esd.py: not "attn2", "out." at the start (of the UNet) or "time_embed"; the
    # codes of Selective Amnesia, EraseDiff and AdvUnlearn have the same lines
    "noxattn": lambda name: (
        ".attn2." not in name and not name.startswith((*_UNET_ENDS, *_CAPTIONED_ENDS))
    ),
    "text": _is_text,
    "text_attention": lambda name: _is_text(name) and _is_attention(name),
    "image": lambda name: "visual" in name or "vision" in name,
    "image_attention": lambda name: ("visual" in name or "vision" in name) and _is_attention(name),
    "attention": _is_attention,
}
SELECTIONS = tuple(_RULES)
# one line about each, for `concept-eraser list selections`
DESCRIPTIONS = {
    "all": "every tensor",
    "blocks": "all but the first and last layers and the embeddings of the time step",
    "cross_attention": "attention layers that read the text; in joint attention its projections",
    "cross_attention_kv": "the keys and values of cross_attention",
    "self_attention": "the other attention layers",
    "all_but_cross_attention": "all but cross_attention",
    "noxattn": "all_but_cross_attention without the last layers and the time embedding (ESD-u)",
    "text": "CLIP: the text tower",
    "text_attention": "CLIP: the attention layers of the text tower",
    "image": "CLIP: the image tower",
    "image_attention": "CLIP: the attention layers of the image tower",
    "attention": "CLIP: the attention layers of both towers",
}
_CROSS = ("cross_attention", "cross_attention_kv")
_OF_CLIP = ("text", "text_attention", "image", "image_attention", "attention")

# MMDiT and Flux have no cross-attention: image and text attend jointly. Here cross_attention
# selects the projections of the text ("added" in diffusers' names), and cross_attention_kv its keys
# and values. Flux's single blocks have one set of weights for both, which counts as self-attention.
# So does SD 3.5's second attention of the image, which diffusers calls attn2.
_CONTEXT = re.compile(r"\.attn\.(add_[qkv]_proj|to_add_out|norm_added_[qk])\.")
_JOINT_RULES: dict[str, Callable[[str], bool]] = {
    "cross_attention": lambda name: _CONTEXT.search(name) is not None,
    "cross_attention_kv": lambda name: ".attn.add_k_proj." in name or ".attn.add_v_proj." in name,
    "self_attention": lambda name: (
        (".attn." in name or ".attn2." in name) and _CONTEXT.search(name) is None
    ),
    "all_but_cross_attention": lambda name: _CONTEXT.search(name) is None,
    "noxattn": lambda name: _CONTEXT.search(name) is None and not name.startswith(_JOINT_ENDS),
}


# In Z-Image image and text are one sequence with one set of weights, which counts as self-attention
_SEQUENCE = re.compile(r"\.attention\.(to_[qkv]\.|to_out\.|norm_[qk]\.)")
_SEQUENCE_RULES: dict[str, Callable[[str], bool]] = {
    "self_attention": lambda name: _SEQUENCE.search(name) is not None,
    "noxattn": lambda name: not name.startswith(("all_final_layer.", "t_embedder.")),
}

# The time of some expressions grows exponentially with the length of a name, e.g. (a+)+$. Some take
# gigabytes to compile. Python cannot stop its own matching, so another process does it, and the
# system ends that process at a limit. The package `regex` has a time limit, but takes 30 GB to
# compile (?:(?:(?:a{1000}){1000}){1000}).
_MATCHER = """
import json, re, sys, warnings
request = json.load(sys.stdin)
try:
    import resource, signal
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
    signal.setitimer(signal.ITIMER_VIRTUAL, request["seconds"])
except ImportError:
    pass
warnings.simplefilter("ignore")
try:
    search = re.compile(request["expression"]).search
except (re.error, RecursionError, OverflowError, ValueError) as error:
    print(json.dumps({"problem": str(error)[:150]}))
else:
    print(json.dumps({"matches": [search(name) is not None for name in request["names"]]}))
"""


@cache
def _matches(expression: str, names: tuple[str, ...]) -> tuple[bool, ...]:
    """Return for each name whether a regular expression occurs in it.

    Raises ValueError if the expression is invalid or takes too long.
    """
    question = json.dumps({"expression": expression, "names": names, "seconds": SECONDS})
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCHER],
            input=question,
            capture_output=True,
            text=True,
            timeout=60,
        )
        answer = json.loads(process.stdout)
    except (subprocess.TimeoutExpired, ValueError):  # ended by the system
        raise ValueError(
            f"takes more than {SECONDS} seconds or 1 GB to match; use no repetition "
            "inside a repetition"
        ) from None
    if "problem" in answer:
        raise ValueError(f"is no regular expression: {answer['problem']}")
    return tuple(answer["matches"])


def problem(selection: str) -> str | None:
    """Return what is wrong with a selection, or None."""
    if selection in _RULES:
        return None
    if not selection.startswith("re:"):
        return unknown_message(
            "selection of parameters", selection, [*_RULES, "re:<regular expression>"]
        )
    if len(selection) > EXPRESSION:
        return (
            f"{quote(selection)} has {len(selection):,} characters; at most {EXPRESSION} are "
            "allowed in a regular expression"
        )
    try:
        _matches(selection[3:], ())
    except ValueError as error:
        return f"{quote(selection)} {error}"
    return None


def select(names: Iterable[str], selection: str) -> list[str]:
    """Return the names that a selection covers, in order.

    Raises UserError if it covers none, or takes too long to match.
    """
    wrong = problem(selection)
    if wrong:
        raise UserError(wrong)
    everything = list(names)
    names_of_selection = [
        name
        for name, is_covered in zip(everything, _is_covered(everything, selection), strict=True)
        if is_covered
    ]
    if not names_of_selection:
        raise UserError(_none_message(everything, selection))
    return names_of_selection


def _none_message(names: Sequence[str], selection: str) -> str:
    """Return what is wrong with a selection that covers no tensor, and what the model has."""
    example = f", e.g. {names[0]!r}" if names else ""
    reason = ""
    if selection in _CROSS and any(_SEQUENCE.search(name) for name in names):
        reason = " (image and text are one sequence with one set of weights)"
    elif selection in _CROSS and any(".attn1." in name for name in names):
        reason = " (it reads no text)"
    counts = _counts(names)
    choices = f"this model has {', '.join(counts)}; " if counts else ""
    return (
        f"the selection {quote(selection)} matches none of the {len(names)} tensors{reason}"
        f"{example}; {choices}see `concept-eraser list selections`"
    )


def _counts(names: Sequence[str]) -> list[str]:
    """Return the named selections that cover some of these tensors, with their numbers.

    Those that cover all are left out, except `all`.
    """
    has_clip_names = any(".self_attn." in one or "visual" in one for one in names)
    counts = []
    for selection in SELECTIONS:
        number = sum(_is_covered(names, selection))
        is_redundant = number == len(names) and selection != "all"
        if number and not is_redundant and (has_clip_names or selection not in _OF_CLIP):
            counts.append(f"{selection} ({number})")
    return counts


def _is_covered(names: Sequence[str], selection: str) -> Iterable[bool]:
    """Return for each name whether a selection covers it."""
    rules = _RULES
    if any(_CONTEXT.search(name) for name in names):
        rules = _RULES | _JOINT_RULES
    elif any(_SEQUENCE.search(name) for name in names):
        rules = _RULES | _SEQUENCE_RULES
    if rule := rules.get(selection):
        return map(rule, names)
    try:
        return _matches(selection[3:], tuple(names))
    except ValueError as error:
        raise UserError(f"{quote(selection)} {error}") from None
