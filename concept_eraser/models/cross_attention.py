"""What a UNet's picture looks at in the prompt: the maps of its cross-attention, and which tokens are the concept's.

The maps are computed beside the layers from what these are given, so a prediction is the same, bit by bit, whether they
are asked for or not, and fused attention stays.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.errors import UserError
from concept_eraser.models.words import Words


def layers(network: nn.Module) -> list[nn.Module]:
    """The layers in which a UNet's picture attends to the text and to nothing else."""
    from diffusers.models.attention_processor import Attention

    found = [m for m in network.modules() if isinstance(m, Attention) and m.is_cross_attention]
    # the kinds whose keys or queries are not plain projections belong to other architectures than Stable Diffusion's
    return [m for m in found if not m.norm_cross and m.added_kv_proj_dim is None and m.group_norm is None and m.norm_q is None]  # fmt: skip


def maps(attentions: Sequence[nn.Module], run: Callable[[], Any]) -> list[Tensor]:
    """Run the network and say what each layer attended to: softmax(Q K^T / sqrt(d)), [b, heads, places, tokens]."""
    seen: list[tuple[Any, Tensor, Tensor]] = []

    def note(layer: nn.Module, inputs: tuple, named: dict) -> None:
        seen.append((layer, inputs[0] if inputs else named["hidden_states"], named["encoder_hidden_states"]))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in attentions]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [_probabilities(*one) for one in seen]


def _probabilities(layer: Any, picture: Tensor, text: Tensor) -> Tensor:
    query, key = (layer.head_to_batch_dim(made) for made in (layer.to_q(picture), layer.to_k(text)))
    return layer.get_attention_scores(query, key).unflatten(0, (len(picture), layer.heads))


def concept_tokens(ids: Tensor, anchors: Tensor | None, words: Words, *, end: bool) -> Tensor:
    """Which of the tokens [n, length] stand for the concept: [n, length] bool.

    Those between start and end that the anchor's prompt does not have (by the longest common parts of the two), all of
    them where there is no anchor; with `end` also every end token, which gathers what was read before it (Forget-Me-Not's
    `use_pooler`; Stable Diffusion 1 pads with it). Raises UserError for a prompt of which nothing is left.
    """
    found = torch.zeros_like(ids, dtype=torch.bool)
    for row, own in enumerate(ids.tolist()):
        stop = own.index(words.end) if words.end in own else len(own)
        said = own[1:stop] if own[0] == words.start else own[:stop]
        other = [] if anchors is None else [t for t in anchors[row].tolist() if t not in (words.start, words.end)]
        changes = difflib.SequenceMatcher(None, said, other, autojunk=False).get_opcodes()
        for kind, first, last, _, _ in changes:
            found[row, stop - len(said) + first : stop - len(said) + last] = kind != "equal"
        if not bool(found[row].any()):
            raise UserError(f"the prompt {words.text(own)!r} has no word that its anchor does not have, so there is no token of the concept to steer away from; give another anchor, or none to take all words")  # fmt: skip
    return found | (ids == words.end) if end else found
