"""Closed-form edits of the keys and values of cross-attention in Stable Diffusion 1, 2 and XL.

Each prompt of the forget set is a concept with its anchor. Without an anchor it has the empty
prompt. The prompts of the retain set and the empty prompt are preserved. The option `tokens` of a
method selects the tokens of a concept that are paired with tokens of its anchor:

    all        start tokens; the words that both begin with, the words in which they differ, the
               words that both end with; end tokens and padding. Of the words that differ, the last
               ones are paired from the end. If the anchor has fewer, its first word is paired with
               all that remain. If it has none, the token that follows is paired with all.
    context    all, without the words in which they differ
    from_last  the last words, and the tokens after them
    last       the last words; of the empty prompt the start token

The pooled embedding, which also conditions SDXL's UNet, does not pass through these layers and does
not change.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser import registry
from concept_eraser.erasers.base import Eraser, Part
from concept_eraser.methods.base import ProjectionEdit, ProjectionRequest, Tokens, all_or_nothing
from concept_eraser.models.base import Model
from concept_eraser.recipes.objective_fields import ObjectiveSpec
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.recipes.selections import select
from concept_eraser.recipes.training_fields import GenerationSpec, TrainingSpec
from concept_eraser.targets.context import Context, read_prompt_sets, require_pipeline
from concept_eraser.utils.errors import UserError

SELECTION = "cross_attention_kv"
BATCH = 32  # prompts that are encoded at once
REMEDY = "use a larger lamb"


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
        with all_or_nothing(tuple(weights.values()), REMEDY):
            notes = method.edit(request)
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(request.layers[name])
    except ValueError as error:
        raise UserError(str(error)) from error
    return notes, time.monotonic() - began


def layers(model: Model, selection: str) -> list[str]:
    """Return the selected weights. All of them belong to layers that read the text's states.

    Raises:
        UserError: The model has no such layers, or the selection covers other weights too.
    """
    names = [name for name, _ in model.denoiser.named_parameters()]
    suffixes = (".attn2.to_k.weight", ".attn2.to_v.weight")
    readers = {name for name in names if name.endswith(suffixes)}
    has_states = len(model.null().tensors["states"].shape) == 3 if readers else False
    if not has_states or model.family not in ("sd", "sdxl"):
        raise UserError(
            f"{model.source} ({model.family}) has no cross-attention whose keys and values are "
            "linear in the text's states, which this method edits; it works on Stable Diffusion 1, "
            "2 and XL. In SD 3 and Flux text and image attend jointly, DiT has no text input, and "
            "PixArt changes the states before its keys and values"
        )
    weights = select(names, selection)
    if not set(weights) <= readers:
        unsupported_name = next(name for name in weights if name not in readers)
        raise UserError(
            f"trainable.select: {selection!r} covers {unsupported_name}, but this method edits "
            f"keys and values of the cross-attention only; use {SELECTION}"
        )
    return weights


def projection_request(
    model: Model, recipe: Recipe, how: Tokens, weights: Mapping[str, nn.Parameter]
) -> ProjectionRequest:
    """Return the states of the paired prompts and copies of the weights.

    They are on the CPU if the device has no float64.
    """
    objectives = recipe.objective_specs
    # if the edit follows a training, the training has warned already
    sets = read_prompt_sets(objectives, warn=recipe.finish is None)
    retain = sets.pop("retain", None)
    pairs = dict.fromkeys(
        (row.text, row.anchor_prompt(objectives[name].anchor or ""))
        for name, concept in sets.items()
        for row in concept.prompts
    )
    unchanged_text = next((text for text, anchor in pairs if text == anchor), None)
    if unchanged_text is not None:
        raise UserError(
            f"forget: the anchor of {unchanged_text!r} is that prompt itself, so nothing would "
            "change; give an anchor that describes something else"
        )
    preserved_texts = list(dict.fromkeys(["", *(retain.texts if retain else ())]))
    ids, states = _encode(model, [*(text for pair in pairs for text in pair), *preserved_texts])
    end = int(ids[""][1])
    device = torch.device("cpu") if model.device.type == "mps" else model.device
    forget_states, anchor_states = [], []
    for text, anchor in pairs:
        text_places, anchor_places = pair_tokens(ids[text], ids[anchor], end, how)
        forget_states.append(states[text][text_places].to(device))
        anchor_states.append(states[anchor][anchor_places].to(device))
    retain_states = [
        (states[text][[_end(ids[text], end) - 1]] if how == "last" else states[text]).to(device)
        for text in preserved_texts
    ]
    copies = {name: weight.detach().to(device, copy=True) for name, weight in weights.items()}
    return ProjectionRequest(
        copies, forget_states, anchor_states, retain_states, empty=states[""].to(device)
    )


def _encode(model: Model, texts: Iterable[str]) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    """Return the token ids of each text, and its states [tokens, width] on the CPU."""
    distinct = list(dict.fromkeys(texts))
    ids, states = {}, {}
    for start in range(0, len(distinct), BATCH):
        batch_texts = distinct[start : start + BATCH]
        tokens = model.tokenize(batch_texts)
        batch_states = model.encode(batch_texts).tensors["states"].cpu()
        # SDXL's two encoders split texts into the same tokens
        for text, row, row_states in zip(
            batch_texts, next(iter(tokens.tensors.values())).tolist(), batch_states, strict=True
        ):
            ids[text], states[text] = row, row_states
    return ids, states


def _end(ids: Sequence[int], end: int) -> int:
    return list(ids).index(end)


def pair_tokens(
    ids: Sequence[int], anchor: Sequence[int], end: int, how: Tokens
) -> tuple[list[int], list[int]]:
    """Return the positions of a concept's edited tokens, and of the paired tokens of its anchor.

    ids, anchor: start token, words, end token and padding, of one length.
    """
    length, text_end, anchor_end = len(ids), _end(ids, end), _end(anchor, end)
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
    for key in ("lora", "saliency", "project", "reinitialise"):
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
