"""The Python interface: erase, evaluate, attack, report and the functions around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from concept_eraser.concepts.known import KindName
from concept_eraser.concepts.plan import BUNDLED, ErasurePlan, make_plan
from concept_eraser.evaluation import retraining
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import cascade as cascades
from concept_eraser.evaluation.attacks import controlled, deciding_images, runner
from concept_eraser.evaluation.attacks.cascade import CascadeCampaign as CascadeCampaign
from concept_eraser.evaluation.attacks.runner import Campaign as Campaign
from concept_eraser.evaluation.base import Evaluation as Evaluation
from concept_eraser.evaluation.never_learned import (
    NeverLearned,
    RetrainingGap,
    read_record,
    require_different,
)
from concept_eraser.evaluation.suite import PromptEvaluation as PromptEvaluation
from concept_eraser.exporting import model_card
from concept_eraser.exporting.eval_results import hub_files as hub_files
from concept_eraser.exporting.formats import export as export
from concept_eraser.exporting.hub import push_to_hub as push_to_hub
from concept_eraser.exporting.merge import merge as merge
from concept_eraser.models import loading, residual_gate
from concept_eraser.models.base import Loaded, Model, ModelSource
from concept_eraser.models.families.clip import Clip
from concept_eraser.models.run_base import RunBase
from concept_eraser.models.safeguards import Guard, protected_name
from concept_eraser.recipes import keywords
from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.overrides import as_text
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.registry import memory_name
from concept_eraser.reporting import attack_sheet, html, plots, run_results, write
from concept_eraser.runs import concept_job, disk_estimate, labelled_measurement, suite_matching
from concept_eraser.runs import job as jobs
from concept_eraser.runs.labelled_measurement import LabelledEvaluation as LabelledEvaluation
from concept_eraser.storage import locks, output_folder
from concept_eraser.storage.readers import read_yaml
from concept_eraser.storage.writers import probe, write_folder
from concept_eraser.training import log as logs
from concept_eraser.utils import distributed
from concept_eraser.utils.commands import shell_command
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress, silent


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: the run folder, which describes itself.
        recipe: the resolved recipe.
        seconds: how long the training took.
        model: the erased model; None where the run had been finished before.

    Example:
        >>> import concept_eraser
        >>> run = concept_eraser.erase("tiny_star_munba", output="runs/star")
        >>> model = run.load()
    """

    folder: Path
    recipe: Recipe
    seconds: float
    model: Loaded | None = None

    def load(self) -> Loaded:
        """Return the erased model, from memory or from the run folder."""
        if self.model is not None:
            return self.model
        model = loading.load_part(self.folder, self.recipe.target)
        model.configure(self.recipe.model_options)
        return model


def load(
    source: ModelSource,
    *,
    allow_pickle: bool = False,
    base: ModelSource | None = None,
    guard: str | Guard | None = None,
) -> Model:
    """Load a text-to-image model.

    Args:
        source: a name ("tiny-sd"), a folder, a run folder, a hub id, or a pipeline in memory. It
            can also be one part from another eraser: a LoRA, a denoiser or a text encoder.
        allow_pickle: also load weights stored as pickles, which can execute code.
        base: for a part, the model that it belongs to. For a single file, a folder of its
            architecture.
        guard: a safeguard while sampling, as kind:text, for example "negative:a star".

    Returns:
        The model, with the model options of the run where the source is a run folder.

    Raises:
        UserError: the source is unknown, incomplete, damaged or of an unsupported kind.

    Example:
        >>> import concept_eraser
        >>> model = concept_eraser.load("tiny-sd")
        >>> images = model.sample(["a red star"], seeds=[0], steps=25, guidance=5.0)
    """
    model = loading.load(source, allow_pickle=allow_pickle, base=base)
    model.configure(_options_of(source))
    _protect(model, guard)
    return model


def erase(
    recipe: str | Path | Sequence[str] | Mapping[str, Any] | Recipe | None = None,
    *,
    kind: KindName | None = None,
    anchor: str | Sequence[str] | None = None,
    images: int | None = None,
    model: ModelSource | None = None,
    base: str | Path | None = None,
    model_options: Mapping[str, float] | None = None,
    target: keywords.Target | None = None,
    templates: list[str] | None = None,
    forget: keywords.Objectives | None = None,
    concepts: Literal["together", "rotate"] | None = None,
    retain: keywords.Objective | None = None,
    replace: keywords.Objective | None = None,
    relearn: keywords.Objective | None = None,
    attack: keywords.AttackSettings | None = None,
    histogram: keywords.HistogramSettings | None = None,
    watch: keywords.WatchSettings | None = None,
    rewinding: str | keywords.RewindingSettings | None = None,
    method: keywords.MethodSource | None = None,
    finish: keywords.MethodSource | None = None,
    trainable: str | keywords.TrainableSettings | None = None,
    training: keywords.TrainingSettings | None = None,
    generation: keywords.GenerationSettings | None = None,
    memory: keywords.MemoryPreset | None = None,
    save: keywords.SavedWeights | None = None,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
    allow_code: bool = False,
    command: str = "",
    progress: Progress = silent,
    cache: str | Path | None = None,
    on_step: Callable[[int, float], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> Run:
    """Erase a concept and write a run folder.

    The job is the name of a concept, a recipe, or the keys of a recipe as keywords.
    `concept-eraser show RECIPE` prints every key. Keys that are left out have a recipe's defaults,
    so all weights are trained. Only a concept has the defaults of the command line, such as the
    LoRA.

    For a concept the prompts, the anchor concept, the retain set and the evaluation suite are
    chosen from the shipped lists. The run folder has them in `recipe.yaml` and `suite.yaml`, which
    can be edited and used again. Before the training, the concept is counted in images of the
    original, if a judge is available and the device is fast enough.

    A model in memory is changed in place. It is left in eval mode, in fp32, on the device of the
    training (the CPU with training.offload or frozen: bf16). Only its trained parameters require a
    gradient. Its `source` is then the run folder, which a later run records as its original. After
    an error or an interruption it has its original weights again. The run can then be resumed with
    the same object.

    Args:
        recipe: a concept, such as "Van Gogh", or a list of concepts. Or a recipe: its name, its
            path or a mapping. Leave it out if its keys are keywords.
        kind: with concepts: object, style, person, character or content (default: guessed).
        anchor: with concepts: what is generated instead, one for all or one for each (default: from
            the shipped list, else of the kind).
        images: with concepts: how many images each group of the suite has (default: 96 for the
            bundled model, else 64). As many are generated before the training to count the concept.
        model: the model to erase from, in place of the recipe's: a name, a folder, a hub id, or an
            object in memory (a pipeline, a torch module, a CLIP model with its tokenizer).
        base: for a single-file checkpoint or a part of a pipeline, the folder or hub id of the
            whole model. The recipe then names the model FILE@BASE.
        model_options: options of the model's family, such as the size of its images.
        target: which part is trained.
        templates: for the target clip, the prompts of the classes; {} stands for the name.
        forget: what to forget: a prompt set, prompts, or a mapping with the loss. Several concepts
            are a list of these. For a classifier, VAE or CLIP model its `data` may be in memory: a
            torch Dataset, or a pair of arrays (inputs, labels).
        concepts: how several concepts are trained. "together" makes one objective of each.
            "rotate" trains one in each step, in turn.
        retain: what to preserve, as in `forget`. "rest" stands for all labelled data that are not
            in `forget`.
        replace: what the forgotten prompts generate instead, as an objective of its own.
        relearn: what a later fine-tuning would learn, for meta_unlearning and resalign.
        attack: the adversary of forum, adversarial, race, stereo, bome, moml and moco.
        histogram: the judge inside the training of UNO's hat versions.
        watch: measure the concept rate during the training.
        rewinding: for a classifier or CLIP model, return to the round whose error on the forget set
            is nearest to the last round's error on these unseen examples. Their `data` may be in
            memory, as in `forget`.
        method: the rule that combines the gradients: a name, a mapping with its options, or an
            object.
        finish: a closed form after the training: uce, rece, speed or mace-cfr.
        trainable: the trainable parameters: a selection, or a mapping.
        training: length, optimizer and precision of the training.
        generation: the sampler of the training images.
        memory: a preset for the memory of a GPU, such as "24gb". Other keywords take precedence.
        save: what the run folder holds of the weights. "lora" is the LoRA alone, "changed" the
            changed tensors and the LoRA, "pipeline" the whole model too (default: "lora" if the run
            trains a LoRA and its model has a name, else "pipeline").
        overrides: overrides of the recipe, such as "training.lr=1e-4".
        output: the run folder; default: runs/<concept>, or runs/<fingerprint of the recipe>.
        resume: continue an unfinished run.
        overwrite: replace the run that the folder holds. Its files are set aside, and removed when
            the new run is finished. Files that this package did not write stay.
        allow_pickle: also load weights stored as pickles, which can execute code.
        allow_code: also call a model that a recipe names as package.module:function. A model that
            `model` or `overrides` name is called without it.
        command: the command line that the recipe in the run folder states.
        progress: called as work advances.
        cache: a folder for generated images, in place of the user's cache.
        on_step: called before the first step and after each step, with the number of steps and the
            seconds of training. Its own time is not counted. The model in memory is the one in
            training, so it must not change the weights.
        notify: with concepts: called before the training with each line about the plan, and with
            how often the original generates the concept. Without it the lines are logged, and a
            concept that the original rarely generates is a warning.

    Returns:
        The run, with the erased model.

    Raises:
        UserError: the input is wrong, or the folder is in use or was not made by this package. Or
            it has this run with another number of images or with prompts that were edited since.
        Interrupted: Ctrl-C was pressed; the state was saved.

    Example:
        >>> import concept_eraser
        >>> run = concept_eraser.erase("Van Gogh", kind="style", model="./sd15")
        >>> run = concept_eraser.erase(
        ...     model="tiny-sd",
        ...     forget={"prompts": "tiny_star", "loss": "anchor", "anchor": "a {color} circle"},
        ...     retain="tiny_rest",
        ...     method="munba",
        ...     training={"steps": 100},
        ... )
    """
    cache = None if cache is None else Path(cache)
    allow_code = (
        allow_code
        or isinstance(model, str)
        or any(override.startswith("model=") for override in overrides)
    )
    model = model if base is None else loading.on_base(model, base)
    source = None if model is None or isinstance(model, str | Path) else model
    keys = {
        "model_options": model_options,
        "target": target,
        "templates": templates,
        "forget": forget,
        "concepts": concepts,
        "retain": retain,
        "replace": replace,
        "relearn": relearn,
        "attack": attack,
        "histogram": histogram,
        "watch": watch,
        "rewinding": rewinding,
        "method": method,
        "finish": finish,
        "trainable": trainable,
        "training": training,
        "generation": generation,
        "memory": memory,
    }
    name = _name_of(source) if source is not None else None if model is None else str(model)
    plan_concepts = _planner(recipe, name, kind=kind, anchor=anchor, images=images)
    plan = plan_concepts() if plan_concepts is not None else None
    suite_texts = concept_job.suites_beside(recipe)
    saved_key = [f"save={save}"] if save is not None else []
    job, objects = _resolve(recipe, keys, plan, name=name, overrides=[*overrides, *saved_key])
    folder_name = plan.folder_name if plan else job.fingerprint
    folder = Path(output) if output else Path("runs") / folder_name
    jobs.join(job)
    in_memory = source is not None or bool(objects) or job.has_objects
    with ExitStack() as lock:

        def is_finished() -> bool:
            lock.enter_context(locks.hold_lock(folder, "erase"))
            finished = jobs.check_folder(
                folder, job, resume=resume, overwrite=overwrite, in_memory=in_memory
            )
            if plan is not None and images is not None and not overwrite:
                concept_job.require_images(plan, folder, images)
            return finished

        if distributed.agree(is_finished):
            return Run(folder, job, jobs.read_done(folder)["seconds"])
        loaded_model = loading.load_part(
            job.model if source is None else source,
            job.target,
            allow_pickle=allow_pickle,
            allow_code=allow_code,
        )
        loaded_model.configure(job.model_options)
        saved = job.weights_to_save(has_name=source is None and not allow_pickle)
        if saved == "pipeline":
            residual_gate.refuse(
                loaded_model, "write the pipeline of this run (--save changed leaves it out)"
            )
        disk_estimate.check(job, loaded_model, folder, saved=saved)
        if plan_concepts is not None and isinstance(loaded_model, Model):
            concept_job.require_text_encoder(loaded_model)
            plan = plan_concepts(text_encoder=loaded_model)
            suite_texts = concept_job.suite_texts(plan, folder)
            concept_job.announce(
                plan,
                job,
                model=loaded_model,
                folder=folder,
                notify=notify,
                progress=progress,
                cache=cache,
            )
        command = command or shell_command("erase", folder / "recipe.yaml")
        environment = jobs.describe_start(job)
        base_name = str(getattr(source, "source", job.model))
        work = jobs.Job(
            recipe=job,
            model=loaded_model,
            folder=folder,
            progress=progress,
            cache=cache,
            objects=objects,
            base=(
                RunBase.of(loaded_model, base_name)
                if saved != "pipeline" and distributed.is_first()
                else None
            ),
            on_step=on_step,
            claim=lambda: jobs.claim_folder(
                folder,
                job,
                overwrite=overwrite,
                command=command,
                environment=environment,
                suites=suite_texts,
            ),
        )
        summary = work.write(work.run(resume=resume))
        if distributed.is_first():
            plots.save(plots.conflict(logs.read(folder / "log.jsonl")), folder / "conflict.png")
            output_folder.seal(folder)
            output_folder.remove_set_aside(folder)
        _rename(loaded_model, folder)
        return Run(folder, job, summary["seconds"], loaded_model)


def _planner(
    recipe: Any,
    model: str | None,
    *,
    kind: KindName | None,
    anchor: str | Sequence[str] | None,
    images: int | None,
) -> Callable[..., ErasurePlan] | None:
    """Return a function that plans the concepts which `recipe` names, or None for a recipe.

    The plan has neighbours once the function is given the text encoder of the loaded model.
    """
    names = concept_job.concept_names(recipe, kind=kind, anchor=anchor, images=images)
    if not names:
        return None
    return partial(
        make_plan,
        names,
        model=BUNDLED if model is None else model,
        kind=kind,
        anchors=[anchor] if isinstance(anchor, str) else list(anchor or ()),
        images=images,
    )


def _resolve(
    recipe: Any,
    keys: Mapping[str, Any],
    plan: ErasurePlan | None,
    *,
    name: str | None,
    overrides: Sequence[str],
) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe of a job, checked and complete, and its objects in memory by objective.

    Args:
        recipe: the recipe, or None if the keys are all of it. Concepts are in the plan.
        keys: the keys of a recipe that were given as keywords; None for the others.
        plan: the plan of the concepts, None for a recipe.
        name: the name of the model, None for that of the recipe.
        overrides: overrides of the recipe.
    """
    objects: dict[str, Any] = {}
    if plan is not None:
        settings = {key: _plain(value) for key, value in keys.items() if value is not None}
        content = concept_job.recipe_content(plan, settings, overrides)
        overrides = ()
    else:
        content, objects = _without_objects(_content(recipe, keys))
    of_model = [f"model={as_text(name)}"] if name is not None else []
    return recipes.load(content, [*overrides, *of_model]), objects


def _content(recipe: Any, keys: Mapping[str, Any]) -> Any:
    """Return the recipe, or a mapping of the keys that have a value.

    Raises UserError if there are both.
    """
    content = {key: _plain(value) for key, value in keys.items() if value is not None}
    if recipe is None:
        return content
    if content:
        raise UserError(
            f"give a recipe or its keys, not both: found a recipe and {', '.join(sorted(content))}"
        )
    if isinstance(recipe, Recipe):
        return recipe.model_dump(exclude_none=True)
    return _plain(recipe)


def _plain(value: Any) -> Any:
    """Convert a mapping to a dict and a tuple to a list, as in YAML."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _without_objects(content: Any) -> tuple[Any, dict[str, Any]]:
    """Replace the objects in memory by descriptions.

    Returns the recipe with the descriptions, and the objects by objective.
    """
    if not isinstance(content, dict):
        return content, {}
    description, objects = dict(content), {}
    sections = ("forget", "retain", "replace", "rewinding")
    places = (*((name, "data") for name in sections), ("histogram", "judge"))
    for objective, key in places:
        section = description.get(objective)
        if isinstance(section, dict) and not isinstance(section.get(key, ""), str | Path):
            value = section[key]
            if key == "judge":
                objects["judge"], name = value, memory_name(value)
            else:
                objects[objective], name = value, f"a {type(value).__name__} in memory"
            description[objective] = {**section, key: name}
    return description, objects


def _name_of(source: Any) -> str:
    """Return the name of an object in memory for a recipe.

    It is what a loaded model came from: after an erasure, the run folder. No model can be loaded by
    the name of another object.
    """
    return getattr(source, "source", None) or f"a {type(source).__name__} in memory"


def _rename(model: Loaded, folder: Path) -> None:
    """Give an erased model the name of its run folder, so that it does not pass for its original.

    It keeps the name of its safeguard.
    """
    guard = getattr(model, "guard", None)
    model.source = protected_name(str(folder), guard) if guard else str(folder)


def plug(pipeline: ModelSource, clip: ModelSource, *, output: str | Path | None = None) -> Model:
    """Put the text tower of a CLIP model in the place of a pipeline's text encoder.

    Args:
        pipeline: a text-to-image model, see `load`.
        clip: a run with the target clip, a folder, or a CLIP model in memory with its tokenizer.
        output: also save the whole pipeline there.

    Returns:
        The pipeline with the weights of the text tower.

    Raises:
        UserError: the two are not of the same architecture.

    Example:
        >>> import concept_eraser
        >>> model = concept_eraser.plug("tiny-sd", "runs/clip")
    """
    if output is not None:
        probe(Path(output))
    model, tower = loading.load(pipeline), loading.load_part(clip, "clip")
    if not isinstance(tower, Clip):
        raise UserError(f"{tower.source} is no CLIP model")
    model.take_text_tower(tower.text_tower(), tower.text_settings())
    if output is not None:
        write_folder(Path(output), model.save, kind="model")
    return model


@overload
def evaluate(
    model: ModelSource,
    suite: keywords.SuiteSource,
    *,
    before: ModelSource | None = ...,
    after: ModelSource | None = ...,
    data: Mapping[keywords.LabelledSet, keywords.LabelledData] | None = ...,
    judge: keywords.JudgeSource | None = ...,
    second_judge: keywords.JudgeSource | None = ...,
    metrics: Sequence[keywords.MetricSource] | None = ...,
    n: int | None = ...,
    guard: str | Guard | None = ...,
    control: ModelSource | Sequence[ModelSource] | None = ...,
    output: str | Path | None = ...,
    allow_pickle: bool = ...,
    allow_code: bool = ...,
    progress: Progress = ...,
    cache: str | Path | None = ...,
) -> PromptEvaluation: ...


@overload
def evaluate(
    model: ModelSource,
    suite: None = ...,
    *,
    before: ModelSource | None = ...,
    after: ModelSource | None = ...,
    data: Mapping[keywords.LabelledSet, keywords.LabelledData] | None = ...,
    judge: keywords.JudgeSource | None = ...,
    second_judge: keywords.JudgeSource | None = ...,
    metrics: Sequence[keywords.MetricSource] | None = ...,
    n: int | None = ...,
    guard: str | Guard | None = ...,
    control: ModelSource | Sequence[ModelSource] | None = ...,
    output: str | Path | None = ...,
    allow_pickle: bool = ...,
    allow_code: bool = ...,
    progress: Progress = ...,
    cache: str | Path | None = ...,
) -> PromptEvaluation | LabelledEvaluation: ...


def evaluate(
    model: ModelSource,
    suite: keywords.SuiteSource | None = None,
    *,
    before: ModelSource | None = None,
    after: ModelSource | None = None,
    data: Mapping[keywords.LabelledSet, keywords.LabelledData] | None = None,
    judge: keywords.JudgeSource | None = None,
    second_judge: keywords.JudgeSource | None = None,
    metrics: Sequence[keywords.MetricSource] | None = None,
    n: int | None = None,
    guard: str | Guard | None = None,
    control: ModelSource | Sequence[ModelSource] | None = None,
    output: str | Path | None = None,
    allow_pickle: bool = False,
    allow_code: bool = False,
    progress: Progress = silent,
    cache: str | Path | None = None,
) -> PromptEvaluation | LabelledEvaluation:
    """Measure an erased model against its original.

    A text-to-image model is measured on the prompts and seeds of a suite. A run on a classifier, a
    CLIP model or a VAE is measured on its labelled data. The numbers are accuracies and membership
    attacks, or the PSNR of the images that the VAE reconstructs.

    Args:
        model: what to measure, see `load`; for labelled data its run folder.
        suite: an evaluation suite by name or path, or a mapping (default: the one named like the
            forget set of the run, else tiny_star).
        before: the original (default: the model that the run's recipe names, else tiny-sd).
            Required for a LoRA or another part of a pipeline, and for any other model without a
            recipe that has not the architecture of tiny-sd. Also required for a run on labelled
            data whose model was in memory.
        after: the erased model of a run on labelled data, if it was in memory.
        data: the labelled data that were in memory, by "forget", "retain", "test".
        judge: a judge in place of the suite's, by name or as an object. Only for prompts.
        second_judge: a judge that labels the same images, by name or as an object. Its agreement
            with the first judge is reported. Only for prompts.
        metrics: metrics in place of the suite's, by name or as objects. Only for prompts.
        n: the largest number of images of each group, at least 2. Only for prompts.
        guard: a safeguard while sampling, as kind:text, for example "negative:a star". Only for
            prompts.
        control: a model that never learned the concept, or a list of them with different training
            seeds. The result shows how far the erased model is from them (`control`). Only for
            prompts.
        output: the folder of evaluation.json, and of evaluation.csv.xz with the outcome of each
            image. Only prompts have outcomes.
        allow_pickle: also load weights stored as pickles, which can execute code.
        allow_code: call a model that the run's recipe names as package.module:function. Only for
            labelled data.
        progress: called as work advances.
        cache: a folder for generated images, in place of the user's cache.

    Returns:
        The numbers with their intervals, by `find(metric, group)`. A `PromptEvaluation` also has
        the images.

    Raises:
        UserError: the suite, a judge or a metric is unknown, a judge does not know the concept, the
            data or a model are not available, or the folder cannot be written to or holds an
            evaluation.json that this package did not write. Or that file is of other models, of
            another suite or recipe, or of prompts that were edited since. Or `before` is missing,
            or a control has another tokenizer, text encoder or VAE than the original.

    Example:
        >>> import concept_eraser
        >>> evaluation = concept_eraser.evaluate("runs/tiny_star_munba", "tiny_star", n=100)
        >>> concept_rate = evaluation.find("concept_rate", "direct")
    """
    cache = None if cache is None else Path(cache)
    folder = None if output is None else Path(output)
    evaluation: PromptEvaluation | LabelledEvaluation
    if write.is_labelled(model):
        if any(value is not None for value in (suite, n, guard, control)):
            raise UserError(
                f"{model} is a run on labelled data, which no suite of prompts measures; "
                "leave out --suite, -n, --guard and --control"
            )
        if any(value is not None for value in (judge, second_judge, metrics)):
            raise UserError(
                f"{model} is a run on labelled data, which is measured without a judge; "
                "leave out judge, second_judge and metrics"
            )
        with _results(folder, "evaluation", "evaluation.json"):
            if folder is not None and distributed.is_first():
                run_results.require_same_recipe(folder, recipes.load_run(Path(model)).fingerprint)
            evaluation = labelled_measurement.measure(
                Path(model),
                before=before,
                after=after,
                objects=data,
                allow_pickle=allow_pickle,
                allow_code=allow_code,
            )
            _save(evaluation, folder)
        return evaluation
    if after is not None or data is not None:
        raise UserError(
            "after and data are for the folder of a run on labelled data; leave them out"
        )
    suite_content = suites.load(suite if suite is not None else suite_matching.suite_of(model))
    protocol = suite_content.using(judge, metrics, second_judge).with_at_most(n)
    suite_matching.require_kept(suite_matching.recipe_of(model), protocol)
    with _results(folder, "evaluation", "evaluation.json", "evaluation.csv.xz"):
        original, erased_model = _pair(model, before, allow_pickle, guard)
        controls = _controls(control, original, allow_pickle)
        retraining.require_comparable(controls, original, protocol)
        if folder is not None and (folder / "evaluation.json").is_file():
            models = suites.describe_models({"before": original, "after": erased_model})
            sources = {"before": before, "after": model}
            run_results.require_same_models(
                folder,
                protocol,
                models,
                inside=_is_inside(folder, model),
                objects=[
                    name
                    for name, source in sources.items()
                    if not isinstance(source, str | Path | None)
                ],
            )
        evaluation = suites.evaluate(
            original, erased_model, protocol, cache=cache, progress=progress
        )
        if controls:
            evaluation = retraining.with_controls(
                evaluation, original, erased_model, controls, cache=cache, progress=progress
            )
        _save(evaluation, folder)
    return evaluation


def _is_inside(folder: Path, model: ModelSource) -> bool:
    """Whether a folder is, or lies in, the run folder of a model."""
    if not isinstance(model, str | Path) or not (Path(model) / "recipe.yaml").is_file():
        return False
    return folder.resolve().is_relative_to(Path(model).resolve())


def _results(folder: Path | None, kind: str, *names: str) -> AbstractContextManager[None]:
    """Return the lock of a folder of results. Only the first of several processes holds it."""
    if folder is None or not distributed.is_first():
        return nullcontext()
    return output_folder.results(folder, kind, names)


def _save(evaluation: Evaluation, folder: Path | None) -> None:
    """Write evaluation.json, and the outcomes of the images, into a folder of results."""
    if folder is not None and distributed.is_first():
        output_folder.claim(folder, "evaluation")
        evaluation.save(folder / "evaluation.json")
        if isinstance(evaluation, PromptEvaluation):
            evaluation.save_outcomes(folder / "evaluation.csv.xz")


def attack(
    model: ModelSource,
    name: keywords.AttackSource = "unlearn_diff",
    suite: keywords.SuiteSource | None = None,
    *,
    judge: keywords.JudgeSource | None = None,
    group: str = "direct",
    before: ModelSource | None = None,
    n: int = 20,
    batch: int = 16,
    seed: int = 0,
    hide: str | None = None,
    word: str | None = None,
    options: Mapping[str, Any] | None = None,
    cascade: Sequence[keywords.CascadeEntry] | Literal["default"] | None = None,
    each_family: bool = False,
    guard: str | Guard | None = None,
    control: ModelSource | Sequence[ModelSource] | None = None,
    output: str | Path | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
    cache: str | Path | None = None,
) -> Campaign:
    """Attack a model by adversarial prompts or relearning, and count how often the concept returns.

    Args:
        model: the victim, see `load`.
        name: an attack by name, see `concept-eraser list attacks`, or as an object.
        suite: the suite whose concept, judge, sampler and prompts are used, as in `evaluate`.
        judge: a judge in place of the suite's, by name or as an object.
        group: the suite's group of prompts to attack.
        before: the original, as in `evaluate`.
        n: how many prompts of the group.
        batch: how many prompts are attacked at once.
        seed: the seed of the attack's own randomness.
        hide: a word that replaces the concept's word in the prompts. It tests an attack on an
            unprotected model.
        word: the word for the concept in the prompts, if it is not the suite's value.
        options: options of the attack.
        cascade: several attacks in place of one, from cheap to strong; "default" for those of
            `cascade.DEFAULT`. Each is a name, a mapping of `name` and options, or an object. Each
            attacks the prompts that none before has broken. Then leave out `name` and `options`.
        each_family: with a cascade, every family of attacks begins with all prompts.
        guard: a safeguard while sampling, as kind:text, for example "negative:a star".
        control: a model that never learned the concept, or a list of them with different training
            seeds. Each is attacked by the same protocol, without the safeguard. The result shows
            how much more the attack recovers from the victim (`Campaign.controls`).
        output: a folder for attack.json, attack.csv.xz with the outcome of each image, attack.png,
            and the image that decided each prompt in images/, unless the suite is sensitive. An
            interrupted attack is continued there.
        allow_pickle: also load weights stored as pickles, which can execute code.
        progress: called as work advances.
        cache: a folder for generated images, in place of the user's cache.

    Returns:
        The attempts. `rates()` gives the attack success rate with its interval. Of a cascade these
        are the worst case over its attacks, see `CascadeCampaign`.

    Raises:
        UserError: the attack, an option, the suite or the group is unknown, the folder holds
            another attack, or a cascade and a single attack are both given. Or a control has
            another tokenizer, text encoder or VAE than the original.

    Example:
        >>> import concept_eraser
        >>> campaign = concept_eraser.attack("runs/tiny_star_munba", "ring_a_bell", n=20)
        >>> success_rate = campaign.rates()["asr"]
    """
    cache = None if cache is None else Path(cache)
    if write.is_labelled(model):
        raise UserError(
            f"{model} is a run on labelled data, which has no prompts to attack; "
            "`concept-eraser evaluate` runs membership attacks on it. The text encoder of a CLIP "
            "model can be attacked in a pipeline, see concept_eraser.plug"
        )
    suite_content = suites.load(suite if suite is not None else suite_matching.suite_of(model))

    def protocol_of(source: keywords.CascadeEntry, values: Mapping[str, Any]) -> runner.Protocol:
        entry = dict(source) if isinstance(source, Mapping) else source
        attack_name, attack_options = runner.named(entry, dict(values))
        return runner.Protocol(
            suite=suite_content.using(judge),
            attack=attack_name,
            options=attack_options,
            group=group,
            n=n,
            batch=batch,
            seed=seed,
            hide=hide,
            word=word,
        )

    work: runner.Protocol | cascades.Cascade
    if cascade is None:
        if each_family:
            raise UserError("each_family goes with a cascade; give one, or leave it out")
        work = protocol_of(name, options or {})
    else:
        if options or name != "unlearn_diff":
            raise UserError(
                "a cascade has its attacks and their options in it; leave out the single attack "
                "and its options"
            )
        entries = cascades.DEFAULT if cascade == "default" else cascade
        work = cascades.Cascade([protocol_of(entry, {}) for entry in entries], each_family)
    folder = None if output is None else Path(output)
    names = ["attack.json", "attack.csv.xz", "attack.png", "attempts.jsonl"]
    if cascade is None and not suite_content.has_sensitive_images:
        names += map(deciding_images.name, range(n))
    with _results(folder, "attack", *names):
        original, victim = _pair(model, before, allow_pickle, guard)
        campaign = controlled.run(
            work,
            victim,
            original,
            controls=_controls(control, original, allow_pickle),
            folder=folder,
            cache=cache,
            progress=progress,
        )
        if folder is not None and distributed.is_first():
            output_folder.claim(folder, "attack")
            campaign.save(folder / "attack.json")
            campaign.save_outcomes(folder / "attack.csv.xz")
            plots.save(attack_sheet.sheet(campaign, victim, original), folder / "attack.png")
            output_folder.seal(folder)
    return campaign


def report(
    source: PromptEvaluation | str | Path | Sequence[str | Path],
    path: str | Path | None = None,
    *,
    run: str | Path | None = None,
    suite: keywords.SuiteSource | None = None,
    attacks: Sequence[str | Path] = (),
    control: ModelSource | Sequence[ModelSource] | None = None,
    show_sensitive: bool = False,
    allow_pickle: bool = False,
    progress: Progress = silent,
    cache: str | Path | None = None,
) -> Path:
    """Write an HTML page about one evaluated run, or about several.

    Images come from the cache, or are generated again from their seeds.

    Args:
        source: an evaluation, a run folder, or several evaluated folders. A run folder is measured
            again as it was evaluated. Several folders are compared side by side.
        path: the file (default: report.html in the run folder; for several runs in the working
            folder).
        run: with an evaluation, the run folder. It adds the recipe, the curves and its attacks.
        suite: with a run folder, a suite in place of the one that it was evaluated with.
        attacks: more folders of attacks. Those in a run's own folder attacks/ are always shown.
        control: with a run folder, a model that never learned the concept, or a list of them, as in
            `evaluate`. The controls of the run's evaluation and of its attacks are always shown.
        show_sensitive: do not blur the images of a sensitive suite.
        allow_pickle: with a run folder, also load pickled weights, which can execute code.
        progress: called as work advances.
        cache: a folder for generated images, in place of the user's cache.

    Returns:
        The path of the page.

    Raises:
        UserError: a run was not evaluated, was evaluated on labelled data, or has other weights or
            prompts by now; several runs have different protocols; a folder of attacks holds none on
            these models; or the file exists and this package did not write it.

    Example:
        >>> import concept_eraser
        >>> page = concept_eraser.report("runs/tiny_star_munba")
        >>> table = concept_eraser.report(["runs/star_munba", "runs/star_esd"], "both.html")
    """
    cache = None if cache is None else Path(cache)
    if isinstance(source, LabelledEvaluation):
        raise UserError("labelled data have no report of images; write the numbers with save()")
    if run is not None and not isinstance(source, PromptEvaluation):
        raise UserError(f"run goes with an evaluation; leave it out for {source}")
    if isinstance(source, str | Path):
        if suite is not None or not write.has_numbers_only(Path(source)):
            run = Path(source)
            source, path = _report_again(
                run,
                path,
                suite,
                control=control,
                allow_pickle=allow_pickle,
                progress=progress,
                cache=cache,
            )
            suite = control = None
        else:
            source = [source]
    if suite is not None:
        raise UserError(
            "--suite goes with one run; several runs are reported as they were evaluated"
        )
    if control is not None:
        raise UserError(
            "control goes with one run folder; give it to evaluate for every other evaluation"
        )
    if isinstance(source, PromptEvaluation):
        folder = Path(run) if run is not None else Path()
        return write.report_evaluation(
            source,
            Path(path or folder / "report.html"),
            run=run,
            attacks=attacks,
            show_sensitive=show_sensitive,
            progress=progress,
            cache=cache,
        )
    return write.report_runs(
        source,
        Path(path or "report.html"),
        attacks=attacks,
        show_sensitive=show_sensitive,
        progress=progress,
        cache=cache,
    )


def card(
    run: str | Path,
    *,
    repository: str = "owner/name",
    license: str = "other",
    kind: str | None = None,
    control: ModelSource | Sequence[ModelSource] | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
    cache: str | Path | None = None,
) -> str:
    """Write the model card of a finished run.

    It states what was erased and how, what was measured, and what was not measured.

    Args:
        run: the run folder.
        repository: the hub id in the card's code.
        license: the licence of the weights, as the hub spells it. The base model's licence is not
            known here, so the default is "other", and the card asks for it.
        kind: what the repository has, "pipeline", "lora" or "both" (default: all that the run has).
        control: a model that never learned the concept, or a list of them, as in `evaluate`. The
            run's evaluation is repeated against it. The controls of the run's evaluation and of its
            attacks are always shown.
        allow_pickle: with a control, also load pickled weights, which can execute code. The
            commands of the card permit it too.
        progress: called as work with a control advances.
        cache: with a control, a folder for generated images, in place of the user's cache.

    Returns:
        The card as Markdown with its YAML header.

    Raises:
        UserError: the folder is not a finished run; or with a control, the run was not evaluated,
            was evaluated on labelled data, or has other weights or prompts by now.

    Example:
        >>> import concept_eraser
        >>> text = concept_eraser.card("runs/tiny_star_munba", license="openrail++")
    """
    gap = None
    if control is not None:
        model_card.finished_run(Path(run))
        evaluation = _evaluate_again(
            Path(run),
            control=control,
            allow_pickle=allow_pickle,
            progress=progress,
            cache=None if cache is None else Path(cache),
        )
        gap = None if evaluation.control is None else evaluation.control.as_dict()
    return model_card.card(
        run,
        repository=repository,
        license=license,
        kind=kind,
        gap=gap,
        allow_pickle=allow_pickle,
    )


def _report_again(
    run: Path,
    path: str | Path | None,
    suite: keywords.SuiteSource | None,
    **options: Any,
) -> tuple[PromptEvaluation, Path]:
    """Return the evaluation of a run, and the file of its page.

    suite: a suite in place of the protocol of the run's evaluation. options: as `_evaluate_again`.
    """
    write.require_prompted(run)
    folder = run
    if suite is not None:
        protocol = suites.load(suite)
        name = Path(suite).stem if isinstance(suite, str | Path) else "suite"
        folder = run_results.place_for(run, protocol, name)
    place = Path(path or folder / "report.html")
    html.require_ours(place)
    return _evaluate_again(run, suite, **options), place


def _evaluate_again(
    run: Path,
    suite: keywords.SuiteSource | None = None,
    *,
    control: ModelSource | Sequence[ModelSource] | None,
    allow_pickle: bool,
    progress: Progress,
    cache: Path | None,
) -> PromptEvaluation:
    """Evaluate a run by a suite, or again by the protocol of its evaluation.

    Numbers of controls that the evaluation has already are not measured again.

    Raises UserError, by the protocol of the evaluation, if its prompts or weights have changed.
    """
    write.require_prompted(run)
    before, models, gap = None, None, None
    if suite is None:
        content = run_results.read_evaluation(run)
        models, gap = content["models"], content.get("control")
        before = models["before"].rsplit(" (", 1)[0]  # the original of that evaluation
        suite = {
            **content["protocol"],
            "sensitive": content.get("sensitive", False),
            "second_judge": content.get("second_judge", {}).get("name"),
        }
        run_results.require_same_prompts(content, suites.load(suite))
    evaluation = evaluate(
        run,
        suite,
        before=before,
        control=control,
        allow_pickle=allow_pickle,
        progress=progress,
        cache=cache,
    )
    sampled = {name: run_results.sampled_model(text) for name, text in evaluation.models.items()}
    if models is not None and sampled != {
        name: run_results.sampled_model(text) for name, text in models.items()
    }:
        raise UserError(
            f"{run} was measured as {models}, but it now holds {evaluation.models}; "
            "evaluate it again"
        )
    if gap is not None and control is None:
        evaluation = replace(evaluation, control=RetrainingGap(**gap))
    return evaluation


def _options_of(model: ModelSource) -> dict[str, float]:
    """Return the model options of a run folder. Its recipe may be of another version."""
    path = Path(model) / "recipe.yaml" if isinstance(model, str | Path) else None
    if path is None or not path.is_file():
        return {}
    content = read_yaml(path)
    options = content.get("model_options") if isinstance(content, dict) else None
    return options if isinstance(options, dict) else {}


def _pair(
    model: ModelSource,
    before: ModelSource | None,
    allow_pickle: bool,
    guard: str | Guard | None,
) -> tuple[Model, Model]:
    """Load the original and the model to measure.

    Raises UserError for a model of unknown origin that cannot be made from the bundled one.
    """
    recipe = suite_matching.recipe_of(model)
    source = before if before is not None else recipe.model if recipe else None
    original = loading.original_of(model, source, allow_pickle=allow_pickle)
    after = load(model, allow_pickle=allow_pickle, base=source if original is None else original)
    if original is None:
        original = loading.load(BUNDLED if source is None else source, allow_pickle=allow_pickle)
    if source is None and runner.layout(after) != runner.layout(original):
        raise UserError(
            f"the original model of {after.source} is not known, and it is not {BUNDLED}, which "
            "has another architecture; give the original with --before"
        )
    for loaded_model in (original, after):
        loaded_model.configure(recipe.model_options if recipe else {})
    _protect(after, guard)
    return original, after


def _controls(
    control: ModelSource | Sequence[ModelSource] | None, original: Model, allow_pickle: bool
) -> list[NeverLearned]:
    """Load the controls, with the options of the original.

    Raises UserError if two have the same weights: they would count as two trainings.
    """
    if control is None:
        return []
    sources = control if isinstance(control, list | tuple) else [control]
    controls = []
    for source in sources:
        model = loading.load(source, allow_pickle=allow_pickle, base=original)
        model.configure(original.configured())
        controls.append(NeverLearned(model, read_record(source)))
    require_different(controls)
    return controls


def _protect(model: Model, guard: str | Guard | None) -> None:
    """Make a model sample under a safeguard. Raises UserError for an unknown one."""
    if guard:
        model.protect(guard if isinstance(guard, Guard) else Guard.read(guard))
