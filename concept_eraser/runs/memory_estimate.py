"""Estimate the memory of a recipe before the run starts.

Nothing is computed; see training/memory.py.

The model may be loaded, or be an architecture without weights (tiny/published.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.data.batches import READ_AT_ONCE, Examples, chunk_of
from concept_eraser.erasers import denoiser, text_encoder
from concept_eraser.erasers.base import AttackTerms, Inseparable
from concept_eraser.losses import LossSettings
from concept_eraser.losses.trajectory import TrajectorySteps
from concept_eraser.methods.base import Method
from concept_eraser.models.base import Condition, Model
from concept_eraser.models.latent import Latent
from concept_eraser.recipes.objective_fields import PROMPTED, ObjectiveSpec
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.recipes.selections import select
from concept_eraser.targets.adapter import add_adapter
from concept_eraser.targets.encode import TokenizedPrompts
from concept_eraser.targets.objectives import denoiser_objective, text_encoder_objective
from concept_eraser.targets.plan import images_of
from concept_eraser.training import memory, method_memory, one_pass
from concept_eraser.training.memory import Estimate
from concept_eraser.training.placement import narrowable_of, needed


def estimate(recipe: Recipe, model: Model, *, gpu: bool = True, saved: str = "changed") -> Estimate:
    """Estimate the memory of a recipe with target denoiser or text_encoder.

    The loss `histogram` is counted without its judge.

    Args:
        recipe: The recipe.
        model: Its model. It may be on the meta device.
        gpu: Count CUDA's own memory, and the copies of its optimisers.
        saved: What is written at the end: "lora", "changed" or "pipeline".
    """
    if recipe.target not in PROMPTED:
        raise ValueError(
            f"only {' and '.join(PROMPTED)} have a memory estimate, found target {recipe.target!r}"
        )
    training, part = recipe.training, model.parts[recipe.target]
    context = {memory.CUDA: memory.CONTEXT} if gpu else {}
    lora = recipe.trainable.lora is not None
    names = select([name for name, _ in part.named_parameters()], recipe.trainable.select)
    whole = set() if lora else set(names)
    frozen = narrowable_of(model, whole) if training.frozen == "bf16" else []
    narrow = [weight for _, _, weight in frozen]
    writing = _writing(recipe, model) if saved == "pipeline" else {}
    # outside of `pretending`, since the method gets real numbers
    vectors = method_memory.vectors_of(recipe.method.build, recipe.objectives)
    with ExitStack() as stack:
        adapter = add_adapter(recipe, part, names)
        if adapter is not None:
            stack.callback(adapter.remove)
        stack.enter_context(memory.pretending(*model.parts.values(), narrow=narrow))
        stack.enter_context(_as_trained(model, training.checkpointing, bool(narrow)))
        making = {**context, **_making(recipe, model)}
        eraser = _eraser(recipe, model, adapter.tensors if adapter else names, adapter)
        needed_parts = needed(recipe.target, histogram=recipe.histogram is not None)
        there = _weights(model, needed_parts if training.offload else model.parts)
        away = _weights(model, model.parts.keys() - needed_parts) if training.offload else {}
        params = [*eraser.trainable().values(), *eraser.adversary().values()]
        pass_bytes = _joint_pass(eraser, recipe, gpu=gpu)
        if pass_bytes is not None:
            vectors = None
        else:
            heaviest = max(recipe.all_objectives, key=lambda name: _weight(recipe, name))
            pass_bytes = _pass(
                eraser, heaviest, recipe, params, twice=vectors is not None and vectors.is_exact
            )
        shapes = [tuple(p.shape) for p in params]
        trained_bytes = sum(p.numel() * p.element_size() for p in eraser.trainable().values())
        elastic = sum(spec.elastic is not None for spec in recipe.objective_specs.values())
    parameters = memory.Trained(
        shapes,
        objectives=len(recipe.objectives),
        micro_batches=training.micro_batches,
        optimizer=training.optimizer,
        momentum=training.momentum > 0,
        ema=training.ema is not None,
        masked=recipe.trainable.saliency is not None or recipe.trainable.project is not None,
        gpu=gpu,
    )
    always = {
        **context,
        **there,
        "their values before": parameters.bytes,
        "the optimiser's state": parameters.state(),
        **({"the elastic weights": elastic * trained_bytes} if elastic else {}),
        "the average of the weights": parameters.bytes if parameters.ema else 0,
    }
    is_moved = training.offload or training.frozen == "bf16"  # see Placement.undo
    in_fp32 = sum(_weights(model, model.parts).values()) if is_moved else 0
    if writing:
        writing |= {"their values before": parameters.bytes, **({} if is_moved else context)}
    return Estimate(
        always,
        memory.moments(
            parameters,
            pass_bytes,
            (vectors.during_pass, vectors.peak) if vectors else None,
        ),
        making,
        writing=writing,
        is_written_on_cpu=is_moved and gpu,
        whole=in_fp32,
        waiting={"frozen weights as stored": _as_stored(model, frozen), **away},
    )


@contextmanager
def _as_trained(model: Any, checkpointing: bool, narrow: bool) -> Iterator[None]:
    model.frozen_dtype = model.reader_dtype = torch.bfloat16 if narrow else None
    model.checkpoint(checkpointing)
    try:
        yield
    finally:
        model.frozen_dtype = model.reader_dtype = None
        model.checkpoint(False)


def _weights(model: Model, parts: Any) -> dict[str, int]:
    """Return the bytes of some parts' weights, in the precision of the tensors."""
    return {f"weights of {name}": memory.weights_of(model.parts[name]) for name in parts}


def _as_stored(model: Model, weights: Iterable[tuple[str, str, Tensor]]) -> int:
    """Return the bytes of weights, given as (part, name, weight), in their checkpoint's precision.

    A weight whose checkpoint is not known counts in its own.
    """
    stored = model.stored if isinstance(model, Latent) else {}
    return sum(
        weight.numel() * (stored[part].dtype_of(name) if part in stored else weight.dtype).itemsize
        for part, name, weight in weights
    )


def _writing(recipe: Recipe, model: Model) -> dict[str, int]:
    """Return the bytes by their use while the whole model is written.

    The part that was trained is converted to the precision of its checkpoint at once.
    """
    stored = model.stored.get(recipe.target) if isinstance(model, Latent) else None
    tensors = {id(one): (name, one) for name, one in model.parts[recipe.target].named_parameters()}
    copies = [
        one.numel() * stored.dtype_of(name).itemsize
        for name, one in tensors.values()
        if stored is not None and stored.dtype_of(name) != one.dtype
    ]
    return {**_weights(model, model.parts), "the trained part as it is written": sum(copies)}


Task = tuple[Callable[[], Any], bool]  # the computation, and whether it is in bf16


def _making(recipe: Recipe, model: Model) -> dict[str, int]:
    """Return the bytes by their use while the examples are made.

    With training.offload they are those of the largest phase.
    """
    phases = _phases(recipe, model)
    if not recipe.training.offload:
        phases = [(tuple(model.parts), [task for _, tasks in phases for task in tasks])]
    costs = [
        {
            **_weights(model, parts),
            "at work": max(memory.peak_of(run, bf16=bf16) for run, bf16 in tasks),
        }
        for parts, tasks in phases
    ]
    return max(costs, key=lambda one: sum(one.values()))


def _phases(recipe: Recipe, model: Model) -> list[tuple[tuple[str, ...], list[Task]]]:
    """Return the phases of targets/ with training.offload.

    Each has the parts that it needs, and its computation.
    """
    most = max(
        *(spec.n for spec in recipe.objective_specs.values()),
        recipe.attack.n if recipe.attack else 0,
    )
    reading: list[Task] = [(lambda: model.encode(["a"] * min(READ_AT_ONCE, most)), False)]
    if _on_embeddings(recipe) or all(
        one.images == "free" for one in recipe.objective_specs.values()
    ):
        return [(model.readers, reading)]
    seeing: list[Task] = [(lambda: _encode(model, most), False)]
    if all(one.images != "generate" for one in recipe.objective_specs.values()):
        return [(model.readers, reading), (("vae",), seeing)]
    batch, narrow = min(recipe.generation.batch_size, most), recipe.generation.precision == "bf16"
    one = model.encode(["a"])
    reading += [(lambda: model.encode(["a"] * batch), narrow)]
    drawing: list[Task] = [(lambda: _sample_step(model, one, batch), narrow)]
    seeing += [(lambda: _decode(model, batch), narrow)]
    return [(model.readers, reading), (("denoiser",), drawing), (("vae",), seeing)]


@torch.no_grad()
def _sample_step(model: Model, condition: Condition, batch: int) -> None:
    """Return one step with guidance, which needs twice the batch."""
    t = torch.zeros(2 * batch, dtype=torch.long)
    model.denoise(torch.empty(2 * batch, *model.latent_shape()), t, _rows(condition, 2 * batch))


@torch.no_grad()
def _decode(model: Model, batch: int) -> None:
    model.decode(torch.empty(batch, *model.latent_shape()))


@torch.no_grad()
def _encode(model: Model, most: int) -> None:
    height = width = model.image_width()
    model.encode_images(torch.empty(min(most, chunk_of(height, width)), 3, height, width))


def _on_embeddings(recipe: Recipe) -> bool:
    """Whether no loss needs images."""
    return (
        recipe.target == "text_encoder"
        and recipe.attack is None
        and not any(images_of(recipe.target, spec.loss) for spec in recipe.objective_specs.values())
    )


def _rows(one: Condition, n: int) -> Condition:
    return Condition(
        {name: value.expand(n, *value.shape[1:]).clone() for name, value in one.tensors.items()}
    )


def _eraser(recipe: Recipe, model: Model, names: list[str], adapter: Any) -> Any:
    """Return the eraser as the job builds it, on a batch of examples without content."""
    n = recipe.training.batch_size
    objective_specs: dict[str, ObjectiveSpec] = dict(recipe.objective_specs)
    if recipe.attack is not None:
        objective_specs["attack"] = ObjectiveSpec(prompts=recipe.forgotten[0].prompts, loss="data")
    if recipe.target == "text_encoder":
        return text_encoder.TextEncoder(
            model,
            {k: _encoder_objective(model, spec, n) for k, spec in objective_specs.items()},
            names,
            adapter=adapter,
        )
    condition, null = model.encode(["a"]), model.null()
    ready = {
        name: _denoiser_objective(model, spec, _rows(condition, n), null)
        for name, spec in objective_specs.items()
    }
    if recipe.histogram is not None:  # the judge is small beside its images
        ready["histogram"] = replace(
            ready["forget"],
            loss="histogram",
            settings=LossSettings(shows=lambda images: images.flatten(1).mean(1).sigmoid()),
        )
    return denoiser.Denoiser(
        model,
        {name: ready[name] for name in recipe.all_objectives},
        names,
        adapter=adapter,
        attack=AttackTerms(both_branches=recipe.attack is not None and recipe.attack.both_branches),
    )


def _denoiser_objective(
    model: Model, spec: ObjectiveSpec, condition: Condition, null: Condition
) -> denoiser.DenoiserObjective:
    n, rows = len(condition), torch.zeros(len(condition), dtype=torch.long)
    # data-free objectives too: their sampling stores nothing for a backward pass, and its random
    # length cannot be drawn without content
    latents = torch.empty(n, *model.latent_shape())
    anchor_condition = (condition, rows) if spec.anchor else (None, None)
    return denoiser_objective(
        spec,
        Examples(
            latents,
            condition,
            rows=rows,
            anchors=anchor_condition[0],
            anchor_rows=anchor_condition[1],
            null=null,
        ),
    )


def _encoder_objective(
    model: Model, spec: ObjectiveSpec, n: int
) -> text_encoder.TextEncoderObjective:
    tokens = Condition(
        {name: value.long() for name, value in _rows(model.tokenize(["a"]), n).tensors.items()}
    )
    latents = (
        torch.empty(n, *model.latent_shape()) if images_of("text_encoder", spec.loss) else None
    )
    return text_encoder_objective(
        spec, TokenizedPrompts(tokens, tokens if spec.anchor else None), latents
    )


def _weight(recipe: Recipe, objective: str) -> tuple[bool, ...]:
    """Return a number that is larger for an objective whose pass needs more memory."""
    spec = recipe.objective_specs.get(objective)
    has_images = images_of(recipe.target, spec.loss if spec else "data") is not None
    teacher = spec is not None and spec.loss in (
        "anchor",
        "distill",
        "distill_prediction",
        "esd",
        "npo",
    )
    # with the adversary's offset and without, or with the prompt and without
    twice = (objective == "forget" and recipe.attack is not None) or (
        spec is not None and spec.loss == "balance"
    )
    return objective == "histogram", has_images, twice, teacher


def _pass(
    eraser: Any, objective: str, recipe: Recipe, params: list[nn.Parameter], *, twice: bool
) -> int:
    """Return the peak memory of one objective's forward and backward pass.

    twice: the method computes exact Hessian products, whose second backward pass needs the graph of
        the first one.
    """
    n, bf16 = recipe.training.batch_size, recipe.training.precision == "bf16"
    draw = eraser.draw(objective, range(n))
    spec = recipe.objective_specs.get(objective)
    if spec is not None and spec.loss == "balance":
        draw = replace(draw, trajectory=_trajectory(draw.noisy, draw.t))

    def loss() -> Tensor:
        return eraser.loss(objective, draw)

    once = memory.passing(loss, params, bf16=bf16)
    return max(once, memory.passing_twice(loss, params)) if twice else once


def _trajectory(noisy: Tensor, t: Tensor) -> TrajectorySteps:
    """Return trajectories without content: two steps, as the activations of one are stored."""
    noisy, t = torch.stack([noisy] * 2), torch.stack([t] * 2)
    weight, offset = (torch.empty(t.shape) for _ in range(2))
    return TrajectorySteps(noisy, t, target=torch.empty_like(noisy), weight=weight, offset=offset)


def _joint_pass(eraser: Any, recipe: Recipe, *, gpu: bool) -> int | None:
    """Return the peak memory of one pass for all objectives, None if each has its own.

    The gradients of the other objectives are not included.
    """
    training, method = recipe.training, recipe.method.build()
    setting = one_pass.Setting(
        training.one_pass,
        batch_size=training.batch_size,
        micro_batches=training.micro_batches,
        device="cuda" if gpu else "cpu",
        uses_all=isinstance(method, Method) and method.uses_all(eraser.objectives),
        recomputes=training.checkpointing,
    )
    joint = one_pass.choose(eraser, setting)
    if joint is None:
        return None
    n, draws = training.batch_size, {}
    for objective in eraser.objectives:
        draws[objective] = eraser.draw(objective, range(n))
    gradient = sum(parameter.numel() * parameter.element_size() for parameter in joint.params)
    try:
        peak = memory.peak_of(
            lambda: joint.gradients(draws, (n,) * len(draws)), bf16=training.precision == "bf16"
        )
    except Inseparable:
        return None
    return peak - (len(draws) - 1) * gradient
