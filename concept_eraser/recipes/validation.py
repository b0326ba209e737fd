"""The checks across the sections of a recipe. Each contradiction is an error with its remedy."""

from __future__ import annotations

from typing import Any

from concept_eraser.recipes.objective_fields import (
    LOSS_NAMES,
    PROMPTED,
    WITH_EMPTY,
    ObjectiveSpec,
    concept_objective,
    fits,
    requires,
)
from concept_eraser.recipes.schema import RecipeFields
from concept_eraser.recipes.training_fields import MEMORY, TrainingSpec
from concept_eraser.utils.errors import unknown_message


def check(recipe: RecipeFields, method: Any) -> None:
    """Raise ValueError if the sections of a recipe do not fit each other, or the method.

    Args:
        recipe: The recipe.
        method: Its method; None if a file records an object of another process, which cannot be
            checked.
    """
    if method is not None:
        _use(recipe, method)
    _concepts(recipe)
    if method is not None:
        _objectives(recipe, method)
    _fits_target(recipe)
    if method is not None and recipe.attack is not None and not method.needs_attack:
        raise ValueError(
            f"the method {recipe.method.name!r} has no lower-level problem for "
            "`attack`; use forum, adversarial, race, stereo, bome, moml or moco"
        )
    if (
        method is not None
        and recipe.relearn is not None
        and not getattr(method, "needs_relearning", False)
    ):
        raise ValueError(
            f"the method {recipe.method.name!r} would train on `relearn` as on any objective; use "
            "meta_unlearning or resalign, which harden the model against it"
        )
    if method is not None:
        _search(recipe, method)
    _lora(recipe)
    _projection(recipe)
    _start_token(recipe, method)
    _negation(recipe)
    _rewinding(recipe, method)
    _finish(recipe, method)
    _optimisation(recipe.training)
    if method is not None:
        _clip(recipe, method)
    if recipe.training.ema is not None and recipe.trainable.batchnorm == "train":
        raise ValueError(
            "training.ema averages weights, and batchnorm: train fits the running statistics to "
            "the last weights; use batchnorm: frozen, or leave ema out"
        )
    _memory(recipe, method)
    _split(recipe)
    _saved(recipe)
    if method is not None and method.needs_fp32 and recipe.training.precision != "fp32":
        raise ValueError(
            f"the method {recipe.method.name!r} takes differences of gradients, for "
            "which bf16 is too coarse; set training.precision: fp32"
        )


def check_effects(recipe: RecipeFields, method: Any) -> None:
    """Raise ValueError for a setting that would have no effect in a new run.

    The recipe of a run folder is exempt, so that runs of earlier versions can be read.

    Args:
        recipe: The recipe.
        method: Its method; None if a file records an object of another process.
    """
    if recipe.target in PROMPTED and recipe.trainable.batchnorm == "train":
        raise ValueError(
            f"trainable.batchnorm: train is for a classifier, a CLIP model or a VAE; the target "
            f"{recipe.target!r} does not use it; leave it out"
        )
    if hasattr(method, "edit"):  # it has no steps and no losses
        return
    _schedules(recipe)
    for name, spec in recipe.objective_specs.items():
        if spec.teacher == "current":
            _current_teacher(recipe, name, spec)


def _schedules(recipe: RecipeFields) -> None:
    """Raise ValueError for a part of the training that would begin after the last step."""
    steps = recipe.training.steps
    if recipe.attack is not None and recipe.attack.warmup >= steps:
        raise ValueError(
            f"attack.warmup: {recipe.attack.warmup} leaves none of the {steps} training steps "
            "under attack; set it below training.steps, or to 0"
        )
    milestones = recipe.training.milestones
    if milestones and milestones[0] >= steps:
        raise ValueError(
            f"training.milestones: all lie after the last of the {steps} training steps, so the "
            f"learning rate would not change; the first is {milestones[0]}; set one below "
            "training.steps, or decay: none"
        )


def _current_teacher(recipe: RecipeFields, name: str, spec: ObjectiveSpec) -> None:
    """Raise ValueError if an objective compares the model in training with itself.

    The two differ in the statistics of the batch (`batchnorm: train`), and under an attack, which
    the teacher's prompts do not have.
    """
    if recipe.trainable.batchnorm == "train" or (recipe.attack is not None and name == "forget"):
        return
    remedy = "use teacher: frozen, the model before the training"
    if spec.distill:
        raise ValueError(
            f"{name}.distill compares the model with itself under teacher: current, so it is 0 at "
            f"each step; {remedy}"
        )
    has_other_term = spec.l1 > 0 or spec.elastic is not None
    if spec.loss in ("distill", "distill_prediction", "diverge") and not has_other_term:
        raise ValueError(
            f"{name}: the loss {spec.loss!r} compares the model with itself under teacher: "
            f"current, so it is 0 at each step; {remedy}"
        )


def _use(recipe: RecipeFields, method: Any) -> None:
    """Raise ValueError if the method lacks a retain set, or does not fit the target."""
    if (
        recipe.retain is None
        and recipe.method.name != "weighted"
        and getattr(method, "needs_retain", True)
    ):
        raise ValueError(
            f"the method {recipe.method.name!r} needs a retain set; to forget without "
            "one use method: {name: weighted, retain: 0}"
        )
    if method.targets is not None and recipe.target not in method.targets:
        reason = f", since {method.why}" if getattr(method, "why", "") else ""
        raise ValueError(
            f"the method {recipe.method.name!r} works on {', '.join(method.targets)} "
            f"only{reason}; found target {recipe.target!r}"
        )


def _objectives(recipe: RecipeFields, method: Any) -> None:
    """Raise ValueError if the method cannot combine the objectives.

    A method of two objectives can train one concept in each step.
    """
    try:
        method.check_objectives(recipe.objectives)
    except ValueError as error:
        with_one_concept = recipe.objectives_with(1)
        several = len(recipe.objectives) > len(with_one_concept)
        if several and hasattr(method, "direction") and _combines(method, with_one_concept):
            raise ValueError(
                f"{error}; or train one concept in each step with concepts: rotate, which "
                "suits every method of two objectives"
            ) from None
        raise


def _combines(method: Any, objectives: tuple[str, ...]) -> bool:
    try:
        method.check_objectives(objectives)
    except ValueError:
        return False
    return True


def _concepts(recipe: RecipeFields) -> None:
    """Raise ValueError for a setting that several concepts cannot have."""
    several = len(recipe.forgotten)
    if several == 1:
        if recipe.concepts == "rotate":
            raise ValueError(
                "concepts: rotate trains several concepts in turn; give forget as a list of "
                "them, or leave it out"
            )
        return
    if recipe.target not in PROMPTED:
        raise ValueError(
            "forget: a list of concepts is for prompts (target "
            f"{' or '.join(PROMPTED)}); labelled data take several classes in one objective, "
            f"classes: [...], found target {recipe.target!r}"
        )
    for name in ("replace", "relearn", "attack", "histogram"):
        if getattr(recipe, name) is not None:
            raise ValueError(
                f"{name} is defined for one concept, found {several} in forget; erase "
                "them one at a time and add the results with `concept-eraser merge`"
            )
    for place, objective in enumerate(recipe.forgotten):
        twin = next(
            (i for i in range(place) if recipe.forgotten[i].prompts == objective.prompts), None
        )
        if twin is not None:
            raise ValueError(
                f"forget: concepts {twin + 1} and {place + 1} have the same prompts; "
                "remove one of them"
            )
    if recipe.concepts == "rotate" and recipe.training.steps < several:
        raise ValueError(
            f"concepts: rotate trains one concept in each step, so {several} concepts need "
            f"training.steps >= {several}, found {recipe.training.steps}"
        )
    if recipe.concepts == "rotate" and recipe.method.options.get("every", 1) != 1:
        raise ValueError(
            "method.every keeps the weights for some steps, and concepts: rotate "
            "trains another concept in each; leave every at 1, or use concepts: together"
        )


def _fits_target(recipe: RecipeFields) -> None:
    """Raise ValueError if an objective does not fit the target."""
    loss_names = LOSS_NAMES[recipe.target]
    # the objectives that forget come first
    for name, spec in sorted(recipe.objective_specs.items(), key=lambda item: item[0] == "retain"):
        has_prompts = recipe.target in PROMPTED
        if has_prompts != (spec.prompts is not None):
            raise ValueError(
                f"{name}: the target {recipe.target!r} needs "
                f"{'prompts' if has_prompts else 'data, labelled examples'}"
            )
        if not fits(spec.loss, recipe.target):
            raise ValueError(
                f"{name}.loss: "
                + unknown_message(f"loss of target {recipe.target!r}", str(spec.loss), loss_names)
            )
        through_denoiser = spec.loss in ("esd", "distill_prediction")
        if recipe.target == "text_encoder" and spec.images == "free" and through_denoiser:
            raise ValueError(
                f"{name}: for a text encoder the loss {spec.loss!r} needs images, so images: free "
                "is not possible"
            )
        _settings(recipe, name, spec)
        if (
            recipe.target in ("clip", "classifier")
            and spec.loss == "anchor"
            and not isinstance(spec.anchor, str)
        ):
            raise ValueError(
                f"{name}: the loss 'anchor' needs an anchor: the class to predict instead, "
                "by name or number"
            )
    if recipe.forgotten[0].data == "rest":
        raise ValueError("forget: data: rest is for the retain objective; name the data to forget")
    if recipe.attack is not None and recipe.target not in PROMPTED:
        raise ValueError(
            f"attack: the target {recipe.target!r} has no prompt embedding to attack; "
            f"use the target {' or '.join(map(repr, PROMPTED))}"
        )
    if recipe.attack is not None and recipe.attack.tokens and recipe.target != "text_encoder":
        raise ValueError(
            "attack.tokens learns embeddings of tokens, which the target text_encoder reads; found "
            f"target {recipe.target!r}; leave it out for an offset of the prompt's encoding"
        )
    _both_branches(recipe)
    if recipe.relearn is not None and recipe.target not in PROMPTED:
        raise ValueError(
            f"relearn: the target {recipe.target!r} has no objective for a later fine-tuning; use "
            f"the target {' or '.join(map(repr, PROMPTED))}"
        )
    if recipe.attack is not None and recipe.attack.tokens and recipe.method.name == "race":
        raise ValueError(
            "the method 'race' keeps an offset of the prompt in a box, and attack.tokens learns "
            "whole embeddings; leave attack.tokens out"
        )
    if recipe.histogram is not None and recipe.target not in ("denoiser", "vae"):
        raise ValueError(
            f"histogram: the target {recipe.target!r} generates no samples for a "
            "judge; use denoiser or vae"
        )
    if recipe.watch is not None and recipe.target not in PROMPTED:
        raise ValueError(
            f"watch: the suites of prompts do not apply to the target {recipe.target!r}"
        )


def _both_branches(recipe: RecipeFields) -> None:
    """Raise ValueError if the unconditional prediction cannot be preserved under an attack."""
    if recipe.attack is None or not recipe.attack.both_branches:
        return
    if recipe.target != "denoiser":
        raise ValueError(
            "attack.both_branches attacks the unconditional prediction of the denoiser; found "
            f"target {recipe.target!r}; leave it out"
        )
    if recipe.attack.loss != "noise":
        raise ValueError(
            "attack.both_branches needs attack.loss: noise, since the original's prediction for "
            f"the empty prompt does not show the concept; found {recipe.attack.loss!r}"
        )
    forget = recipe.forgotten[0]
    if not requires(forget.loss, "holds_empty") or forget.teacher == "current":
        raise ValueError(
            "attack.both_branches needs a forget loss that preserves the unconditional prediction "
            f"({', '.join(WITH_EMPTY)}) of teacher: frozen; found loss: {forget.loss}, "
            f"teacher: {forget.teacher}"
        )


def _settings(recipe: RecipeFields, name: str, objective: ObjectiveSpec) -> None:
    """Raise ValueError for settings of an objective that the target does not use."""
    unused_settings = recipe.unused_settings & objective.model_fields_set
    if recipe.target == "vae" and objective.anchor is not None:
        unused_settings = {*unused_settings, "anchor"}
    changed_keys = [
        key
        for key in sorted(unused_settings)
        if getattr(objective, key)
        != ObjectiveSpec.model_fields[key].get_default(call_default_factory=True)
    ]
    if changed_keys:
        raise ValueError(
            f"{name}: the target {recipe.target!r} does not use {', '.join(changed_keys)}"
        )


def _lora(recipe: RecipeFields) -> None:
    """Raise ValueError if the recipe's target or objectives cannot have a LoRA."""
    if recipe.trainable.lora is None:
        return
    if recipe.target not in PROMPTED:
        raise ValueError(
            f"trainable.lora: only the targets {' and '.join(PROMPTED)} train a LoRA, "
            f"found target {recipe.target!r}"
        )
    if recipe.trainable.reinitialise is not None:
        raise ValueError(
            "trainable: reinitialise changes weights that a LoRA keeps frozen; give one of the two"
        )
    if any(objective.elastic for objective in recipe.objective_specs.values()):
        raise ValueError(
            "elastic is a penalty on changes of weights, which a LoRA keeps frozen; train the "
            "weights themselves, or leave elastic out"
        )


def _search(recipe: RecipeFields, method: Any) -> None:
    """Raise ValueError if a search for attacks before the training does not fit the recipe."""
    search = getattr(method, "search", None)
    if any(objective.loss == "stereo" for objective in recipe.objective_specs.values()) != bool(
        search
    ):
        raise ValueError(
            "the method 'stereo' searches for attacks, and the forget loss 'stereo' is about them; "
            f"use both or none, found the method {recipe.method.name!r}"
        )
    if search is None:
        return
    attack = recipe.attack
    if attack is not None and (attack.warmup or attack.forget != "both"):
        raise ValueError(
            f"the method {recipe.method.name!r} searches for attacks before the training and takes "
            "no attack.warmup and no attack.forget; leave them out"
        )
    if any(objective.images == "free" for objective in recipe.forgotten):
        raise ValueError(
            f"the method {recipe.method.name!r} trains under its attacks on noised images; use "
            "images: generate or a folder in place of free"
        )
    rounds, on_weights, on_attack = search
    steps = rounds * (on_weights + on_attack)
    if recipe.training.steps <= steps:
        raise ValueError(
            f"the method {recipe.method.name!r} searches for attacks in the first {steps} steps "
            f"({rounds} rounds of {on_weights} and {on_attack}), so training.steps must be larger, "
            f"found {recipe.training.steps}"
        )
    if recipe.training.ema is not None:
        raise ValueError(
            f"training.ema averages over all steps, and the method {recipe.method.name!r} starts "
            "anew after a search; leave ema out"
        )
    if recipe.trainable.reinitialise is not None:
        raise ValueError(
            f"trainable.reinitialise changes weights before the training, and the method "
            f"{recipe.method.name!r} restores the original's after a search; leave it out"
        )


def _projection(recipe: RecipeFields) -> None:
    """Raise ValueError if the training cannot be projected away from retained inputs."""
    trainable = recipe.trainable
    if trainable.project is None:
        return
    if recipe.retain is None:
        raise ValueError(
            "trainable.project keeps the outputs for the inputs of the retain objective, and there "
            "is none; give the recipe `retain`"
        )
    others = [
        key for key in ("lora", "saliency", "reinitialise") if getattr(trainable, key) is not None
    ]
    if others:
        raise ValueError(
            f"trainable: project is for changes of whole weights; it cannot be combined with "
            f"{', '.join(others)}; leave out one of them"
        )


def _start_token(recipe: RecipeFields, method: Any) -> None:
    """Raise ValueError if gradients cannot be kept from the start token's keys and values."""
    if recipe.trainable.start_token is None:
        return
    _require_training(
        recipe,
        method,
        "trainable.start_token: frozen is for training the cross-attention of a denoiser",
    )


def _require_training(recipe: RecipeFields, method: Any, reason: str) -> None:
    """Raise ValueError, with the reason and what was found, if no denoiser is trained."""
    if recipe.target != "denoiser":
        raise ValueError(f"{reason}; found target: {recipe.target}")
    if hasattr(method, "edit"):
        raise ValueError(f"{reason}; found the method {recipe.method.name!r}, which trains nothing")


def _negation(recipe: RecipeFields) -> None:
    """Raise ValueError if the training does not give a task vector to negate."""
    if recipe.trainable.negate is None:
        return
    wrong = [
        f"{concept_objective(i)}.loss: {objective.loss}"
        for i, objective in enumerate(recipe.forgotten)
        if objective.loss != "data"
    ]
    wrong += [
        f"a {name} objective"
        for name in ("retain", "replace", "relearn", "attack", "histogram")
        if getattr(recipe, name) is not None
    ]
    wrong += ["batchnorm: train"] if recipe.trainable.batchnorm == "train" else []
    wrong += (
        ["watch, which measures while the model still learns the concept"]
        if recipe.watch is not None
        else []
    )
    if wrong:
        raise ValueError(
            "trainable.negate reverses the change by training on the concept alone "
            "(forget.loss: data, method: {name: weighted, retain: 0}); found "
            f"{'; '.join(wrong)}"
        )


def _rewinding(recipe: RecipeFields, method: Any) -> None:
    """Raise ValueError if the training has no rounds to return to, or no errors to compare."""
    rewinding = recipe.rewinding
    if rewinding is None:
        return
    if recipe.target not in ("classifier", "clip"):
        raise ValueError(
            "rewinding compares errors of a classifier, so it needs target: classifier or clip; "
            f"found target: {recipe.target}"
        )
    if hasattr(method, "edit"):
        raise ValueError(
            f"rewinding returns to a round of a training, and the method {recipe.method.name!r} "
            "trains nothing; leave rewinding out"
        )
    if rewinding.every is None and method is not None and not method.has_rounds:
        raise ValueError(
            f"the method {recipe.method.name!r} has no rounds of its own; give rewinding.every, "
            "the training steps between two states to choose from, e.g. 20"
        )
    if rewinding.data == "rest":
        raise ValueError(
            "rewinding.data: rest are examples that the model was trained on; name a set of unseen "
            "examples"
        )
    others = {
        "training.ema, which saves an average of all rounds": recipe.training.ema,
        "trainable.negate, which reverses the training of the last round": recipe.trainable.negate,
    }
    for other, value in others.items():
        if value is not None:
            raise ValueError(f"rewinding cannot be combined with {other}; leave out one of the two")


def _finish(recipe: RecipeFields, method: Any) -> None:
    """Raise ValueError if a closed form cannot follow the training."""
    if recipe.finish is None:
        return
    _require_training(
        recipe, method, "finish: a closed form that follows the training of a denoiser"
    )
    for key in ("saliency", "project"):
        if getattr(recipe.trainable, key) is not None:
            raise ValueError(
                "finish rewrites all keys and values of the cross-attention, also those that "
                f"trainable.{key} keeps frozen; leave out one of the two"
            )


_WITH_BETAS = ("adam", "adamw", "adamw8bit")


def _optimisation(training: TrainingSpec) -> None:
    """Raise ValueError for settings of another optimizer or of another schedule."""
    if training.momentum > 0 and training.optimizer != "sgd":
        other = (
            ", whose momentum is the first of training.betas"
            if training.optimizer in _WITH_BETAS
            else ""
        )
        raise ValueError(
            "training.momentum is for training.optimizer: sgd, found optimizer: "
            f"{training.optimizer}{other}"
        )
    if training.nesterov and training.momentum == 0:
        raise ValueError("training.nesterov is a form of momentum; set training.momentum, e.g. 0.9")
    if _is_set(training, "betas") and training.optimizer not in _WITH_BETAS:
        raise ValueError(
            f"training.betas are for training.optimizer: {', '.join(_WITH_BETAS)}; found "
            f"optimizer: {training.optimizer}"
        )
    if training.clip_each and training.clip is None:
        raise ValueError("training.clip_each needs training.clip, the largest norm")
    if training.decay == "step" and not training.milestones:
        raise ValueError(
            "training.decay: step needs training.milestones, the numbers of steps after which the "
            "learning rate changes, e.g. [100, 150]"
        )
    if sorted(set(training.milestones)) != training.milestones:
        raise ValueError(
            f"training.milestones must ascend, found {', '.join(map(str, training.milestones))}"
        )
    for schedule, keys in (("step", ("milestones", "decay_factor")), ("cosine", ("cycles",))):
        for key in keys:
            if _is_set(training, key) and training.decay != schedule:
                raise ValueError(
                    f"training.{key} is for training.decay: {schedule}, found decay: "
                    f"{training.decay}"
                )


def _is_set(training: TrainingSpec, key: str) -> bool:
    """Whether a setting has another value than the default."""
    default = TrainingSpec.model_fields[key].default
    return bool(getattr(training, key) != default)


def _clip(recipe: RecipeFields, method: Any) -> None:
    """Raise ValueError if a method cannot have the gradient of each objective clipped."""
    if not recipe.training.clip_each or hasattr(method, "edit"):
        return
    if method.needs_fp32 or method.needs_attack or method.needs_relearning:
        reason = (
            "solves a lower-level problem with them"
            if method.needs_attack
            else "also simulates a fine-tuning with them"
            if method.needs_relearning
            else "also takes Hessian products, or differences of gradients"
        )
        raise ValueError(
            f"training.clip_each changes the gradients that the method {recipe.method.name!r} "
            f"combines, and this method {reason}; leave clip_each out, so that clip applies to "
            "the combined gradient"
        )


def _memory(recipe: RecipeFields, method: Any) -> None:
    """Raise ValueError for settings of memory that the target does not use.

    Also for settings that contradict others.
    """
    memory_keys = [
        key
        for key in MEMORY
        if getattr(recipe.training, key) != TrainingSpec.model_fields[key].default
    ]
    if memory_keys and recipe.target not in PROMPTED:
        raise ValueError(
            f"training: the target {recipe.target!r} does not use {', '.join(memory_keys)}; "
            f"only pipelines have parts to move or to hold in bf16 ({', '.join(PROMPTED)})"
        )
    if memory_keys and hasattr(method, "edit"):
        raise ValueError(
            f"training: the method {recipe.method.name!r} edits the model without training steps "
            f"and does not use {', '.join(memory_keys)}; leave it out"
        )
    if "frozen" in memory_keys and recipe.target != "denoiser":
        raise ValueError(
            "training.frozen: bf16 holds the weights of the denoiser that are not "
            "trained, so it needs target: denoiser"
        )
    if "frozen" in memory_keys and recipe.training.precision != "bf16":
        raise ValueError(
            "training.frozen: bf16 needs training.precision: bf16, since the frozen "
            "weights are in bf16 only"
        )
    if "frozen" in memory_keys and recipe.generation.precision != "bf16":
        raise ValueError(
            "training.frozen: bf16 needs generation.precision: bf16, since the images "
            "are generated with these weights"
        )
    if recipe.watch is not None and ({"offload", "frozen"} & set(memory_keys)):
        raise ValueError(
            "watch generates whole images between the steps, and with "
            f"training.{memory_keys[-1]} the model lacks parts or precision for it; leave out "
            "one of the two"
        )


def _split(recipe: RecipeFields) -> None:
    """Raise ValueError if the frozen weights cannot be split (training/distributed/fsdp.py)."""
    if recipe.training.shard != "weights":
        return
    if recipe.target != "denoiser" or recipe.trainable.lora is None:
        finding = f"target: {recipe.target}" if recipe.target != "denoiser" else "no trainable.lora"
        raise ValueError(
            "training.shard: weights splits the frozen weights of a denoiser, so it needs "
            "target: denoiser and a LoRA to train, e.g. trainable: "
            f"{{lora: 8}}; found {finding}. Trained weights stay whole, since FSDP keeps "
            "the gradient of one loss, in pieces, and a method combines one gradient "
            "for each objective; use training.shard: optimizer"
        )
    if recipe.method.options.get("hvp") == "exact":
        raise ValueError(
            "training.shard: weights frees the weights of a block after each pass, and hvp: "
            "exact needs them again for the second derivative; use hvp: difference"
        )
    if recipe.watch is not None:
        raise ValueError(
            "watch generates images in one process between the steps, and with "
            "training.shard: weights this process has only a part of the weights; leave out "
            "one of the two"
        )
    if recipe.trainable.start_token is not None:
        raise ValueError(
            "trainable.start_token: frozen changes the layers of the whole denoiser, and "
            "training.shard: weights trains with other ones; use training.shard: optimizer"
        )
    for loss, reason in (
        ("resteer", "calls attention layers outside of their blocks"),
        ("balance", "computes whole passes again in the backward pass"),
    ):
        objective = next(
            (name for name, spec in recipe.objective_specs.items() if spec.loss == loss), None
        )
        if objective is None:
            continue
        raise ValueError(
            f"{objective}: the loss {loss!r} {reason}, "
            "where training.shard: weights has freed their weights; use training.shard: "
            "optimizer"
        )


def _saved(recipe: RecipeFields) -> None:
    """Raise ValueError if the run does not make what it is to write."""
    if recipe.save == "pipeline" and recipe.method.adds_gate:
        raise ValueError(
            f"save: pipeline cannot hold the gate of the method {recipe.method.name!r}, which no "
            "pipeline of diffusers can load; leave save out, so that the run holds the gate alone"
        )
    if recipe.save in (None, "pipeline"):
        return
    if recipe.target not in PROMPTED:
        raise ValueError(
            f"save: {recipe.save} leaves out the pipeline, which can be made again for the targets "
            f"{' and '.join(PROMPTED)} only; found target {recipe.target!r}. Leave save out"
        )
    if recipe.save == "lora" and recipe.trainable.lora is None:
        raise ValueError(
            "save: lora needs a LoRA to train, e.g. trainable: {lora: 8}; found none. Use save: "
            "changed for the changed tensors"
        )
    if recipe.save == "lora" and recipe.finish is not None:
        raise ValueError(
            "save: lora has no LoRA to write, since finish merges it into the weights; use save: "
            "changed or save: pipeline"
        )
