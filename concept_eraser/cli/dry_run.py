"""What `concept-eraser erase --dry-run` says about a recipe."""

from __future__ import annotations

from typing import Any


def report(recipe: Any, allow_pickle: bool, trial: bool | None, allow_code: bool = False) -> list[str]:
    """Sides, weights, memory, time. trial: make two steps; None: where they take seconds."""
    from concept_eraser.recipe import PROMPTED

    return (_prompted if recipe.target in PROMPTED else _labelled)(recipe, allow_pickle, trial, allow_code)


def _prompted(recipe: Any, allow_pickle: bool, trial: bool | None, allow_code: bool) -> list[str]:
    from concept_eraser import forecast, trials
    from concept_eraser.targets import projections
    from concept_eraser.tiny import published

    lines = _sides(recipe)
    if trials.edits(recipe):
        projections.refuse_what_is_ignored(recipe)
    found = trials.load(recipe, allow_pickle=allow_pickle, allow_code=allow_code)
    whole: Any = found.model
    if found.hollow:  # weights and memory are those of the true size
        whole = published.hollow(recipe.model)
        whole.configure(recipe.model_options)
    lines.append(_weights(recipe, whole))
    if not trials.edits(recipe):
        lines += forecast.estimate(recipe, whole).lines()
    return [*lines, *_trial(found, trial)]


def _sides(recipe: Any) -> list[str]:
    from concept_eraser.data import prompts

    lines, sets = [], {name: prompts.load(side.prompts) for name, side in recipe.sides.items()}
    for name in sorted(sets, key=lambda player: player == "retain"):
        if name.startswith("forget") and "retain" in sets:
            prompts.require_disjoint(sets[name], sets["retain"])
        lines.append(f"{name}: {len(sets[name])} prompts, e.g. {sets[name].texts[0]!r}")
        if name.startswith("forget") and (anchor := recipe.sides[name].anchor):
            lines.append(f"  shown instead: {sets[name].prompts[0].anchored(anchor)!r}")
    return lines + prompts.slips({name: side.anchor for name, side in recipe.sides.items()}, sets)


def _weights(recipe: Any, model: Any) -> str:
    from concept_eraser.targets import prompted
    from concept_eraser.targets.base import Request
    from concept_eraser.training.parameters import select

    part = model.parts[recipe.target]
    parameters = dict(part.named_parameters())
    chosen = select(parameters, recipe.trainable.select)
    count, of = sum(parameters[name].numel() for name in chosen), sum(p.numel() for p in parameters.values())
    adapter = prompted.adapted(Request(recipe, model), part, chosen)
    if adapter is None:
        return f"trains {count:,} of {of:,} weights in {len(chosen)} tensors"
    own, layers = sum(part.get_parameter(name).numel() for name in adapter.tensors), len(adapter.layers)
    adapter.remove()
    return f"trains a LoRA of {own:,} numbers on {layers} layers, beside {of:,} weights"


def _labelled(recipe: Any, allow_pickle: bool, trial: bool | None, allow_code: bool) -> list[str]:
    """How many examples each side has, how many weights would move, and two steps."""
    from concept_eraser import trials
    from concept_eraser.targets import labelled
    from concept_eraser.targets.base import Request

    found = trials.load(recipe, allow_pickle=allow_pickle, allow_code=allow_code)
    request, lines = Request(found.recipe, found.model, objects=found.objects), []
    if found.recipe is recipe:  # else a few pictures stand in, and count for nothing
        lines = [f"{name}: {len(rows)} of {len(data)} examples of {data.about}" for name, (data, rows) in labelled.rows(request).items()]  # fmt: skip
    if not found.hollow:
        eraser = labelled.build(request)
        counts = sum(p.numel() for p in eraser.trainable().values()), sum(p.numel() for p in eraser.module.parameters())  # fmt: skip
        lines.append(f"trains {counts[0]:,} of {counts[1]:,} weights in {len(eraser.trainable())} tensors")
    return [*lines, *_trial(found, trial)]


def _trial(found: Any, trial: bool | None) -> list[str]:
    from concept_eraser import trials

    if trial is False or (trial is None and not found.hollow and not trials.worth_trying(found)):
        slow = " (here it would take minutes; ask for it with --trial)" if trial is None else ""
        return [*found.reasons, "time: no trial was made" + slow]
    return [*found.reasons, trials.told(found)]
