"""Closed-form edits of the keys and values of cross-attention.

They are linear in the text's states in Stable Diffusion 1, 2 and XL. PixArt and Sana project the
states first, each token by itself, so that keys and values are linear in the projected states, up
to a bias that the edit leaves as it is. There the tokens of a prompt are its own ones: the denoiser
does not attend to padding. Sana's prompts have no end token.

Each prompt of the forget set is a concept with its anchor. Without an anchor it has the empty
prompt. The prompts of the retain set and the empty prompt are preserved. The option `tokens` of a
method selects the tokens of a concept that are paired with tokens of its anchor:

    all        start tokens; the words that both begin with, the words in which they differ, the
               words that both end with; end tokens and padding. Of the words that differ, the last
               ones are paired from the end. If the anchor has fewer, its first word is paired with
               all that remain. If it has none, the token that follows is paired with all.
    context    all, without the words in which they differ
    from_last  the last words, and the tokens after them
    last       the last words; of the empty prompt its first token

The pooled embedding, which also conditions SDXL's UNet, does not pass through these layers and does
not change.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser import registry
from concept_eraser.erasers.base import Eraser, Part
from concept_eraser.methods.base import ProjectionEdit, ProjectionRequest, Tokens, all_or_nothing
from concept_eraser.models.base import Model
from concept_eraser.models.captioned import Captioned
from concept_eraser.recipes.objective_fields import ObjectiveSpec, role
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.recipes.selections import select
from concept_eraser.recipes.training_fields import GenerationSpec, TrainingSpec
from concept_eraser.targets.context import Context, read_prompt_sets, require_pipeline
from concept_eraser.utils.errors import UserError

SELECTION = "cross_attention_kv"
BATCH = 32  # prompts that are encoded at once


def apply(method: ProjectionEdit, context: Context) -> tuple[Eraser, Mapping[str, float], float]:
    """Edit the denoiser of a recipe in place.

    Returns:
        The eraser, the edit's results, and the seconds it took.

    Raises:
        UserError: The recipe has settings that an edit ignores, the model has no such layers, or
            the method cannot edit them.
    """
    refuse_ignored(context.recipe)
    model, recipe = require_pipeline(context), context.recipe
    part = Part(model.denoiser, layers(model, recipe.trainable.select), list(recipe.objectives))
    return part, *edit(method, model, recipe, part.trainable())


def finish(
    context: Context, trained_parameters: Mapping[str, nn.Parameter]
) -> tuple[Mapping[str, float], float]:
    """Edit the trained keys and values of a denoiser, if a closed form follows the training.

    Args:
        context: The recipe, which has the key `finish`, and the model.
        trained_parameters: The trained tensors by name.

    Returns:
        The edit's results, and the seconds it took.
    """
    recipe, model = context.recipe, require_pipeline(context)
    assert recipe.finish is not None  # the caller checks
    method: Any = registry.build("method", recipe.finish.name, recipe.finish.options)
    weights = {name: trained_parameters[name] for name in layers(model, SELECTION)}
    return edit(method, model, recipe, weights)


def require_finishable(context: Context) -> None:
    """Check before training that it covers all keys and values that the closed form edits.

    Raises:
        UserError: The model has none, or trainable.select leaves some of them out.
    """
    recipe, model = context.recipe, require_pipeline(context)
    assert recipe.finish is not None  # the caller checks
    names = [name for name, _ in model.denoiser.named_parameters()]
    missing = sorted(set(layers(model, SELECTION)) - set(select(names, recipe.trainable.select)))
    if missing:
        raise UserError(
            f"finish: {recipe.finish.name} rewrites keys and values of the cross-attention, and "
            f"trainable.select: {recipe.trainable.select!r} leaves out {missing[0]}; "
            f"select all, cross_attention or {SELECTION}"
        )


def edit(
    method: ProjectionEdit, model: Model, recipe: Recipe, weights: Mapping[str, nn.Parameter]
) -> tuple[Mapping[str, float], float]:
    """Edit these weights in place by the prompts of a recipe.

    Returns:
        The edit's results, and the seconds it took.
    """
    began = time.monotonic()
    request = projection_request(model, recipe, method.tokens, weights)
    try:
        with all_or_nothing(tuple(weights.values()), method.remedy):
            notes = method.edit(request)
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(request.layers[name])
    except ValueError as error:
        raise UserError(str(error)) from error
    return notes, time.monotonic() - began


def layers(model: Model, selection: str) -> list[str]:
    """Return the selected weights. All of them belong to layers that read the text's states.

    A bias of such a layer may be selected too. It is not edited, so it is not returned.

    Raises:
        UserError: The model has no such layers, or the selection covers other weights too.
    """
    names = [name for name, _ in model.denoiser.named_parameters()]
    suffixes = (".attn2.to_k.weight", ".attn2.to_v.weight")
    readers = {name for name in names if name.endswith(suffixes)}
    is_linear = model.family in ("sd", "sdxl") or isinstance(model, Captioned)
    has_states = len(model.null().tensors["states"].shape) == 3 if readers else False
    if not (has_states and is_linear):
        raise UserError(
            f"{model.source} ({model.family}) has no cross-attention whose keys and values are "
            "linear in the text's states, which this method edits; it works on Stable Diffusion 1, "
            "2 and XL, PixArt and Sana. In SD 3, Flux, Qwen-Image and Flux.2 text and image attend "
            "jointly, Z-Image has one sequence of both, and DiT has no text input"
        )
    biases = {f"{name.removesuffix('.weight')}.bias" for name in readers}
    weights = [name for name in select(names, selection) if name not in biases]
    if not set(weights) <= readers:
        unsupported_name = next(name for name in weights if name not in readers)
        raise UserError(
            f"trainable.select: {selection!r} covers {unsupported_name}, but this method edits "
            f"keys and values of the cross-attention only; use {SELECTION}"
        )
    return weights


def paired_prompts(recipe: Recipe) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the prompts of the concepts with their anchors, and the preserved prompts.

    Each occurs once. The empty prompt is the first of the preserved ones.

    Raises:
        UserError: The anchor of a prompt is that prompt itself.
    """
    objectives = recipe.objective_specs
    # if the edit follows a training, the training has warned already
    sets = read_prompt_sets(objectives, warn=recipe.finish is None)
    retain = sets.pop("retain", None)
    pairs = dict.fromkeys(
        (row.text, row.anchor_prompt(objectives[name].anchor or ""))
        for name, concept in sets.items()
        if role(name) == "forget"  # a training before may have others, such as relearn
        for row in concept.prompts
    )
    unchanged_text = next((text for text, anchor in pairs if text == anchor), None)
    if unchanged_text is not None:
        raise UserError(
            f"forget: the anchor of {unchanged_text!r} is that prompt itself, so nothing would "
            "change; give an anchor that describes something else"
        )
    return list(pairs), list(dict.fromkeys(["", *(retain.texts if retain else ())]))


def projection_request(
    model: Model, recipe: Recipe, how: Tokens, weights: Mapping[str, nn.Parameter]
) -> ProjectionRequest:
    """Return the states of the paired prompts and copies of the weights.

    They are on the CPU if the device has no float64.
    """
    pairs, preserved_texts = paired_prompts(recipe)
    texts = _encode(model, [*(text for pair in pairs for text in pair), *preserved_texts])
    device = torch.device("cpu") if model.device.type == "mps" else model.device
    forget_states, anchor_states = [], []
    for text, anchor in pairs:
        text_places, anchor_places = _pair(texts[text], texts[anchor], how)
        forget_states.append(texts[text].states[text_places].to(device))
        anchor_states.append(texts[anchor].states[anchor_places].to(device))
    retain_states = [
        (texts[text].last_word if how == "last" else texts[text].states).to(device)
        for text in preserved_texts
    ]
    copies = {name: weight.detach().to(device, copy=True) for name, weight in weights.items()}
    return ProjectionRequest(
        copies, forget_states, anchor_states, retain_states, empty=texts[""].states.to(device)
    )


@dataclass(frozen=True)
class _Text:
    """A prompt as the keys and values read it.

    Attributes:
        ids: Token ids. CLIP's have one length for all prompts: they end with end tokens as padding.
        states: [tokens, width] on the CPU.
        end: The number of tokens before the end token, if there is one.
    """

    ids: list[int]
    states: Tensor
    end: int

    @property
    def last_word(self) -> Tensor:
        """The state of the last word [1, width]; of the empty prompt that of the first token."""
        return self.states[[max(self.end - 1, 0)]]


def _encode(model: Model, texts: Iterable[str]) -> dict[str, _Text]:
    """Return the tokens of each text and what the keys and values read."""
    encode = _encode_captioned if isinstance(model, Captioned) else _encode_clip
    distinct = list(dict.fromkeys(texts))
    encoded: dict[str, _Text] = {}
    for start in range(0, len(distinct), BATCH):
        batch_texts = distinct[start : start + BATCH]
        encoded |= zip(batch_texts, encode(model, batch_texts), strict=True)
    return encoded


def _encode_clip(model: Model, texts: Sequence[str]) -> list[_Text]:
    # SDXL's two encoders split texts into the same tokens
    ids = [next(iter(model.tokenize(some).tensors.values())).tolist() for some in (texts, [""])]
    end_token = ids[1][0][1]
    states = model.encode(texts).tensors["states"].cpu()
    return [
        _Text(row, row_states, _end(row, end_token))
        for row, row_states in zip(ids[0], states, strict=True)
    ]


def _encode_captioned(model: Any, texts: Sequence[str]) -> list[_Text]:
    ids, mask, states = (value.cpu() for value in model.attended_text(texts))
    end_token = model.pipeline.tokenizer.eos_token_id
    encoded = []
    for row, row_states, count in zip(ids.tolist(), states, mask.sum(1).tolist(), strict=True):
        own = row[: int(count)]
        encoded.append(_Text(own, row_states[: len(own)], len(own) - (own[-1] == end_token)))
    return encoded


def _pair(text: _Text, anchor: _Text, how: Tokens) -> tuple[list[int], list[int]]:
    """Return the positions of the edited tokens of a text, and of the paired ones of its anchor.

    If one of them has no such token, as the empty prompts of PixArt and Sana, which are one token,
    its nearest one is taken.
    """
    ends = text.end, anchor.end
    after = min(len(text.ids) - text.end, len(anchor.ids) - anchor.end)
    pairs = zip(
        (text, anchor),
        _places(text.ids, anchor.ids, ends=ends, length=max(ends) + after, how=how),
        strict=True,
    )
    places, anchor_places = (
        [min(max(place, 0), len(one.ids) - 1) for place in places] for one, places in pairs
    )
    return places, anchor_places


def _end(ids: Sequence[int], end: int) -> int:
    return list(ids).index(end)


def pair_tokens(
    ids: Sequence[int], anchor: Sequence[int], end: int, how: Tokens
) -> tuple[list[int], list[int]]:
    """Return the positions of a concept's edited tokens, and of the paired tokens of its anchor.

    ids, anchor: start token, words, end token and padding, of one length.
    """
    ends = _end(ids, end), _end(anchor, end)
    return _places(ids, anchor, ends=ends, length=len(ids), how=how)


def _places(
    ids: Sequence[int], anchor: Sequence[int], ends: tuple[int, int], length: int, how: Tokens
) -> tuple[list[int], list[int]]:
    """Return the positions as `pair_tokens`.

    ends: the numbers of tokens before the end tokens. length: the number of tokens of the longer
    text, of both if they have padding.
    """
    text_end, anchor_end = ends
    if how in ("last", "from_last"):
        text_end, anchor_end = text_end - 1, anchor_end - 1
        count = 1 if how == "last" else length - max(text_end, anchor_end)
        return list(range(text_end, text_end + count)), list(range(anchor_end, anchor_end + count))
    shorter = min(text_end, anchor_end)
    head = next((i for i in range(shorter) if ids[i] != anchor[i]), shorter)
    tail = next(
        (i for i in range(shorter - head) if ids[text_end - 1 - i] != anchor[anchor_end - 1 - i]),
        shorter - head,
    )
    tail_length = length - max(text_end, anchor_end) + tail
    head_places, tail_places = (
        list(range(head)),
        list(range(text_end - tail, text_end - tail + tail_length)),
    )
    words = [] if how == "context" else list(range(head, text_end - tail))
    own = list(range(head, anchor_end - tail)) or [head]
    anchor_words = [own[max(len(own) - len(words) + i, 0)] for i in range(len(words))]
    return [*head_places, *words, *tail_places], [
        *head_places,
        *anchor_words,
        *range(anchor_end - tail, anchor_end - tail + tail_length),
    ]


def refuse_ignored(recipe: Recipe) -> None:
    """Raise UserError for settings of training and generation that an edit would ignore."""
    ignored: list[str] = []
    for name, spec in recipe.objective_specs.items():
        allowed_keys = ("prompts",) if name == "retain" else ("prompts", "anchor")
        ignored += [
            f"{name}.{key}" for key in _changed_keys(spec, ObjectiveSpec) if key not in allowed_keys
        ]
    for key in ("lora", "saliency", "project", "reinitialise", "negate"):
        if getattr(recipe.trainable, key) is not None:
            ignored.append(f"trainable.{key}")
    training = _changed_keys(recipe.training, TrainingSpec)
    ignored += [f"training.{key}" for key in training if key not in ("device", "seed")]
    ignored += [f"generation.{key}" for key in _changed_keys(recipe.generation, GenerationSpec)]
    if recipe.concepts != "together":
        ignored.append("concepts")
    if recipe.watch is not None:
        ignored.append("watch")
    if ignored:
        raise UserError(
            f"the method {recipe.method.name!r} edits the model without training steps and does "
            f"not use {', '.join(ignored)}; leave them out"
        )


def _changed_keys(section: Any, kind: Any) -> list[str]:
    """Return the keys of a section that do not have their default value."""
    fields = kind.model_fields
    return [
        key
        for key in fields
        if getattr(section, key) != fields[key].get_default(call_default_factory=True)
    ]
