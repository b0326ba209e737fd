"""The cross-attention maps of a UNet, and the tokens of a prompt that stand for the concept.

The maps are computed beside the layers, from the layers' inputs. So the prediction is the same, bit
by bit, with and without them, and fused attention stays.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from concept_eraser.models.vocabulary import Words
from concept_eraser.utils.errors import UserError


def layers(network: nn.Module) -> list[nn.Module]:
    """Return the layers in which a UNet's image attends to the text only."""
    from diffusers.models.attention_processor import Attention

    candidates = [m for m in network.modules() if isinstance(m, Attention) and m.is_cross_attention]
    # other architectures than Stable Diffusion's have processors whose keys or queries are no plain
    # projections
    return [
        m
        for m in candidates
        if not m.norm_cross
        and m.added_kv_proj_dim is None
        and m.group_norm is None
        and m.norm_q is None
    ]


def detach_start_token(attentions: Sequence[nn.Module]) -> list[RemovableHandle]:
    """Pass no gradient through the keys and values of the first token, until the hooks are removed.

    Every prompt has the same state at this token. So a layer's weights learn from the other tokens
    only. The output of a layer stays the same, bit by bit. The hooks must stay until the backward
    pass has ended, since it may recompute the layers.

    Source: concept ablation (arXiv 2303.13516), the authors' diffusers/model_pipeline.py, lines
    100-106.
    """

    def detach(_layer: nn.Module, _inputs: tuple, output: Tensor) -> Tensor:
        return torch.cat([output[:, :1].detach(), output[:, 1:]], dim=1)

    projections = [getattr(layer, name) for layer in attentions for name in ("to_k", "to_v")]
    return [layer.register_forward_hook(detach) for layer in projections]


def maps(attentions: Sequence[nn.Module], run: Callable[[], Any]) -> list[Tensor]:
    """Run the network, and return the attention map of each layer.

    A map is softmax(Q K^T / sqrt(d)): [b, heads, positions, tokens].
    """
    calls: list[tuple[Any, Tensor, Tensor]] = []

    def note(layer: nn.Module, inputs: tuple, keywords: dict) -> None:
        calls.append(
            (
                layer,
                inputs[0] if inputs else keywords["hidden_states"],
                keywords["encoder_hidden_states"],
            )
        )

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in attentions]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return [_probabilities(*one) for one in calls]


def _probabilities(layer: Any, image: Tensor, text: Tensor) -> Tensor:
    query, key = (
        layer.head_to_batch_dim(projection) for projection in (layer.to_q(image), layer.to_k(text))
    )
    return layer.get_attention_scores(query, key).unflatten(0, (len(image), layer.heads))


def concept_tokens(ids: Tensor, anchors: Tensor | None, words: Words, *, end: bool) -> Tensor:
    """Return which of the tokens [n, length] stand for the concept: [n, length] bool.

    They are the tokens between start and end that the anchor's prompt does not have, by the longest
    common parts of the two. Without an anchor they are all. With `end` every end token is included,
    since it gathers the tokens before it (Forget-Me-Not's `use_pooler`; Stable Diffusion 1 pads
    with it). Raises UserError if no token of a prompt remains.
    """
    is_concept = torch.zeros_like(ids, dtype=torch.bool)
    for row, own in enumerate(ids.tolist()):
        stop = own.index(words.end) if words.end in own else len(own)
        own_words = own[1:stop] if own[0] == words.start else own[:stop]
        anchor_words = (
            []
            if anchors is None
            else [t for t in anchors[row].tolist() if t not in (words.start, words.end)]
        )
        changes = difflib.SequenceMatcher(
            None, own_words, anchor_words, autojunk=False
        ).get_opcodes()
        for kind, first, last, _, _ in changes:
            is_concept[row, stop - len(own_words) + first : stop - len(own_words) + last] = (
                kind != "equal"
            )
        if not bool(is_concept[row].any()):
            raise UserError(
                f"the prompt {words.text(own)!r} has no word that its anchor does not "
                "have, so there is no token of the concept to steer away from; give "
                "another anchor, or none to take all words"
            )
    return is_concept | (ids == words.end) if end else is_concept
