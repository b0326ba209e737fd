"""The steps of one erasing job: eraser, engine, output folder. `api.erase` calls them in order."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from concept_eraser import registry
from concept_eraser.data import images, prompts
from concept_eraser.erasers.base import Eraser
from concept_eraser.erasers.classifier import Classifier
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.features.base import file_hash
from concept_eraser.evaluation.time_to_unlearn import Watch, concept_rate_of
from concept_eraser.methods.base import Method
from concept_eraser.models import lora_files, run_base
from concept_eraser.models.base import Loaded, Model, require_finite
from concept_eraser.models.run_base import RunBase
from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.objective_fields import PROMPTED
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.recipes.selections import select
from concept_eraser.recipes.training_fields import ASIDE, MEMORY
from concept_eraser.storage import output_folder
from concept_eraser.storage.readers import read_json
from concept_eraser.storage.writers import (
    remove_file,
    require_free_folder,
    write_folder,
    write_json,
    write_tensors,
    write_text,
)
from concept_eraser.targets import cross_attention_edit, labelled_data
from concept_eraser.targets.build import build_eraser, edit_model
from concept_eraser.targets.context import Context, describe_prompts
from concept_eraser.training import checkpoint, projection
from concept_eraser.training.distributed import fsdp
from concept_eraser.training.distributed.sharding import refuse_wrappers
from concept_eraser.training.engine import Engine, Schedule, optimizer_class
from concept_eraser.training.placement import Placement, needed
from concept_eraser.training.rewinding import Rewinding, WrongPredictions, round_ends
from concept_eraser.training.trackers import FOLDER as TRACKING
from concept_eraser.training.trackers import Trackers, require
from concept_eraser.utils import distributed, provenance, resources
from concept_eraser.utils.commands import shell_command
from concept_eraser.utils.devices import find_gpu
from concept_eraser.utils.errors import UserError, unknown
from concept_eraser.utils.progress import Progress

_LOG = logging.getLogger(__name__)

KIND = "run"  # of output folder
ENVIRONMENT = "environment.json"
COARSE = 0.1  # share of a change that a precision leaves out, above which there is a warning


def check_folder(
    folder: Path, recipe: Recipe, *, resume: bool, overwrite: bool, in_memory: bool = False
) -> bool:
    """Whether a finished run of this recipe is already there. No file is changed.

    in_memory: the model or its data is an object that the recipe only names, so that a finished run
    may be of another object.

    Raises UserError if the folder was not made by this package, holds another run or a run with
    other prompts, or holds this run unfinished without `resume`, or an unfinished run with both
    `resume` and `overwrite`.
    """
    ours = output_folder.require_claimable(folder, KIND, alone=True)
    for name in (
        *resources.WHOLE_MODEL,
        lora_files.FOLDER,
    ):  # written as a whole at the end, so a user's file there is an error now
        require_free_folder(folder / name)
    has_state = checkpoint.exists(folder / "state.ckpt")
    if ours and has_state and resume and overwrite:
        raise UserError(
            f"{folder} holds an unfinished run; --resume continues it, and --overwrite removes it; "
            "pass one of the two"
        )
    path = folder / "recipe.yaml"
    if not ours or overwrite or not path.exists():
        return False
    try:
        other = recipes.load_run(folder)
    except UserError:
        raise UserError(
            f"{folder} holds another run (its recipe.yaml does not fit this version); "
            "give a new folder, or pass --overwrite"
        ) from None
    if other.fingerprint != recipe.fingerprint:
        differences = ", ".join(provenance.differences(other.resolved(), recipe.resolved()))
        raise UserError(
            f"{folder} holds another run (differs in "
            f"{differences or 'nothing visible'}); "
            "give a new folder with --output, or pass --overwrite"
        )
    if (folder / "done.json").exists() or (resume and has_state):
        _require_same_inputs(folder, recipe)
    if (folder / "done.json").exists():
        if in_memory:
            raise UserError(
                f"{folder} holds a finished run on an object in memory, which may not "
                "have been this one; give another output, or overwrite=True"
            )
        _require_saved(folder, recipe)
        return True
    if not resume and has_state:
        raise UserError(
            f"{folder} holds this run, unfinished; continue with --resume, or start over "
            "with --overwrite"
        )
    return False


def _require_same_inputs(folder: Path, recipe: Recipe) -> None:
    """Raise UserError if a file has other prompts or data than those that the run began with."""
    if edited := edited_input(folder, recipe):
        raise UserError(
            f"{folder} holds this run with other prompts or data: {edited} was changed after the "
            "run had begun; restore the file, give a new folder with --output, or pass --overwrite"
        )


def edited_input(folder: Path, recipe: Recipe) -> str:
    """Return the first file that was edited since a run began, with its key, or "".

    These are files of prompts, of indices, and of data (.npz), and folders of images. A folder is
    compared by the names and sizes of its images and captions.

    Raises UserError if such a file cannot be read.
    """
    recorded = _recorded(folder, "prompts")
    for name, spec in recipe.objective_specs.items():
        if not isinstance(spec.prompts, str) or not resources.is_path("prompts", spec.prompts):
            continue
        facts = recorded.get(name)
        before = facts.get("hash") if isinstance(facts, dict) else None
        if before is not None and prompts.load(spec.prompts).hash != before:
            return f"{spec.prompts} ({name})"
    hashes = _recorded(folder, "files")
    for key, path in _data_files(recipe).items():
        if key in hashes and hashes[key] != _input_hash(path):
            return f"{path} ({key})"
    return ""


def _data_files(recipe: Recipe) -> dict[str, Path]:
    """Return the files of indices and of arrays, and the folders of images, that a recipe reads.

    They are by its keys. A name of a data set or of a source of images is no folder, even where one
    of that name exists.
    """
    names = {*registry.names("dataset"), "generate", "free"}
    sections: dict[str, Any] = dict(recipe.objective_specs)
    if recipe.rewinding is not None:
        sections["rewinding"] = recipe.rewinding
    texts = {
        f"{name}.{key}": getattr(section, key, None)
        for name, section in sections.items()
        for key in ("data", "indices", "images")
    }
    return {
        key: Path(text)
        for key, text in texts.items()
        if isinstance(text, str) and text not in names and os.path.exists(text)
    }


def _input_hash(path: Path) -> str:
    """Return a hash of a file's content, or of the names and sizes of what is read in a folder.

    Those are its images and their captions. Other files, such as those of a file manager, may come
    and go.
    """
    if path.is_file():
        return file_hash(path)
    endings = (*images.SUFFIXES, ".txt", ".jsonl")
    inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in endings)
    files = (file for file in inside if file.is_file())
    return provenance.fingerprint(
        [[file.relative_to(path).as_posix(), file.stat().st_size] for file in files]
    )


def _recorded(folder: Path, key: str) -> dict[str, Any]:
    """Return the facts about prompts or files that a run began with; {} if there are none."""
    path = folder / ENVIRONMENT
    facts = read_json(path).get(key) if path.is_file() else None
    return facts if isinstance(facts, dict) else {}


def _require_saved(folder: Path, recipe: Recipe) -> None:
    """Raise UserError if a finished run lacks the weights that its recipe now asks for."""
    if recipe.save == "pipeline" and not any(
        (folder / name).is_dir() for name in resources.WHOLE_MODEL
    ):
        raise UserError(
            f"{folder} holds this run, finished, without its pipeline; write it with: "
            f"{shell_command('export', folder, '--to', 'diffusers')}"
        )
    if recipe.save == "changed" and not (folder / run_base.WEIGHTS).is_file():
        raise UserError(
            f"{folder} holds this run, finished, without its changed tensors; write them with: "
            f"{shell_command('export', folder, '--to', 'tensors')}"
        )


def read_done(folder: Path) -> dict[str, Any]:
    """Read done.json of a finished run. Raises UserError if it is damaged."""
    content = read_json(folder / "done.json")
    if not isinstance(content.get("seconds"), int | float):
        raise UserError(
            f"{folder / 'done.json'} is damaged: it does not say how long the run took; "
            "run it again with --overwrite"
        )
    return content


def join(recipe: Recipe) -> bool:
    """Find the other processes of a launch, and whether this one computes on the CPU.

    Raises UserError for a device that is not there, a tracker that is not installed, and a launch
    that wraps models.
    """
    device, there = (
        recipe.training.device,
        {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()},
    )
    if not there.get(device, True):
        raise UserError(
            f"training.device is {device}, which this machine does not have; found: "
            f"{', '.join(k for k, v in there.items() if v)}. Use auto"
        )
    refuse_wrappers(recipe.training.shard)
    require(recipe.training.tracker)
    cpu = device == "cpu" or (find_gpu() is None and not there["mps"])
    distributed.join(cpu=cpu or None)
    return cpu


def describe_start(recipe: Recipe) -> dict[str, Any]:
    """Return the content of environment.json. Raises UserError if a prompt set cannot be read."""
    files = {key: _input_hash(path) for key, path in _data_files(recipe).items()}
    return {**provenance.describe(), "prompts": describe_prompts(recipe), "files": files}


def claim_folder(
    folder: Path,
    recipe: Recipe,
    *,
    overwrite: bool,
    command: str,
    environment: Mapping[str, Any],
    suites: Mapping[str, str] | None = None,
) -> None:
    """Mark the folder, and write the recipe, environment.json and the suites of its concepts.

    Called when model and data have been found to fit.

    Args:
        folder: The run folder.
        recipe: The recipe.
        overwrite: Set aside first what an earlier run left there.
        command: The command that the recipe states.
        environment: The result of `describe_start`, made before the prompts were used.
        suites: The suites as text by file name. One that is there already stays.

    Raises:
        UserError: As `output_folder.claim`.
    """
    output_folder.claim(folder, KIND, alone=True)
    if overwrite:
        output_folder.set_aside(folder, keep=_own_files(folder, recipe))
    write_text(folder / "recipe.yaml", recipes.dump(recipe, command))
    write_json(folder / ENVIRONMENT, dict(environment))
    for name, text in (suites or {}).items():
        if not (folder / name).exists():
            write_text(folder / name, text)


def _own_files(folder: Path, recipe: Recipe) -> set[str]:
    """Return the names of files in the run folder that the recipe itself reads."""
    texts: list[Any] = [
        text
        for objective in recipe.objective_specs.values()
        for text in (objective.prompts, objective.data)
    ]
    if recipe.rewinding is not None:
        texts += [recipe.rewinding.data, recipe.rewinding.indices]
    paths = [Path(text) for text in texts if isinstance(text, str)]
    root = folder.resolve()
    return {
        path.resolve().relative_to(root).as_posix()
        for path in paths
        if path.is_file() and path.resolve().is_relative_to(root)
    }


@dataclass(frozen=True)
class Outcome:
    """The result of training or editing. The notes are written into done.json."""

    eraser: Eraser
    seconds: float
    notes: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """A recipe with its model loaded.

    objects: data sets and judges in memory, which the recipe can only name.
    """

    recipe: Recipe
    model: Loaded
    folder: Path
    progress: Progress
    cache: Path | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    # the record of the original; None writes the whole model, which needs no original
    base: RunBase | None = None
    # called between steps, unless the recipe has `watch`
    on_step: Callable[[int, float], None] | None = None
    # called once, when all inputs are checked
    claim: Callable[[], None] = lambda: None

    def eraser(self, placement: Placement | None = None) -> Eraser:
        """Build the eraser.

        placement: moves the model's parts to the device for the steps that need them.
        """
        move_parts = placement.only if placement and placement.offload else None
        return build_eraser(replace(self.context, move_parts=move_parts))

    @property
    def context(self) -> Context:
        """The inputs for building an eraser."""
        return Context(
            self.recipe, self.model, progress=self.progress, cache=self.cache, objects=self.objects
        )

    def run(self, *, resume: bool) -> Outcome:
        """Train to the end, or edit. The model then holds the erased weights."""
        method: Any = self.recipe.method.build()
        if hasattr(method, "edit"):
            idle = [
                f"training.{key}"
                for key in ASIDE
                if getattr(self.recipe.training, key) not in ("none", [])
            ]
            if idle:
                raise UserError(
                    f"the method {self.recipe.method.name!r} edits the model without training "
                    f"steps or an optimizer, and does not use {', '.join(idle)}; leave "
                    "them out"
                )
            accelerator = self.accelerator()
            self.model.to(accelerator.device)
            eraser, facts, seconds = edit_model(method, self.context)
            self.claim_once(accelerator)
            return Outcome(eraser, seconds, {"edit": dict(facts)})
        engine = self.train(method, resume=resume)
        self._require_trained(engine)
        notes: dict[str, Any] = {
            "steps": self.recipe.training.steps,
            "skipped_steps": engine.skipped,
            "cpu_seconds": round(engine.cpu_seconds, 2),
        }
        if isinstance(engine.watch, Watch):
            notes["time_to_unlearn"] = engine.watch.summary()
        if engine.rewinding:
            notes["rewinding"] = engine.rewinding.summary
        facts, more = self.finish(engine)
        return Outcome(
            engine.eraser, engine.seconds + more, notes | ({"finish": dict(facts)} if facts else {})
        )

    def accelerator(self) -> Accelerator:
        """Return accelerate's object for the device and the processes of this run; see `join`."""
        cpu, tracker = join(self.recipe), self.recipe.training.tracker
        distributed.release_device(cpu=cpu)
        # no mixed_precision here: accelerate keeps it for the whole process, and the next run may
        # want another
        return Accelerator(
            cpu=cpu, log_with=list(tracker) or None, project_dir=self.folder / TRACKING
        )

    def claim_once(self, accelerator: Accelerator) -> None:
        """Claim the folder in one process only.

        A second claim would remove the log that the first process has opened.
        """
        if accelerator.is_main_process:
            self.claim()
        accelerator.wait_for_everyone()

    def train(self, method: Method, *, resume: bool) -> Engine:
        training, accelerator = self.recipe.training, self.accelerator()
        optimizer_class(
            training.optimizer
        )  # before the images are generated, which may take an hour
        if method.optimizer not in (None, training.optimizer):
            _LOG.warning(
                "training.optimizer is %s, which rescales each weight's step; the steps of the "
                "method %r are defined with %s",
                training.optimizer,
                self.recipe.method.name,
                method.optimizer,
            )
        if self.recipe.finish:
            cross_attention_edit.require_finishable(self.context)
        if training.shard == "weights":
            fsdp.require()
        self._require_projectable()
        watch = self.watch() or self.on_step
        placement = self.placement()
        fields = {
            k: v for k, v in training.model_dump().items() if k not in ("device", *MEMORY, *ASIDE)
        }
        eraser = None
        try:
            placement.narrow(self._selected_names())
            placement.arrive(accelerator.device)
            eraser = self.eraser(placement)
            placement.begin(needed(self.recipe.target, histogram=self.recipe.histogram is not None))
            rewinding = self.rewinding(eraser, method)
            self.claim_once(accelerator)
            with self._split(eraser, accelerator):
                engine = Engine(
                    eraser,
                    method,
                    schedule=Schedule(**fields),
                    folder=self.folder,
                    accelerator=accelerator,
                    progress=self.progress,
                    watch=watch,
                    saliency=self.recipe.trainable.saliency,
                    project=self.recipe.trainable.project,
                    reinitialise=self.recipe.trainable.reinitialise,
                    shard=training.shard != "none",
                    frees_weights=training.shard == "weights" and accelerator.num_processes > 1,
                    recomputes=training.checkpointing,
                    trackers=Trackers(accelerator, self.folder, self.recipe.resolved()),
                    rewinding=rewinding,
                )
                engine.run(resume=resume)
                if self.recipe.trainable.negate is not None:
                    eraser.negate(self.recipe.trainable.negate)
        except BaseException:
            # a model in memory must not stay partly trained; the state of the run is in its folder
            if eraser is not None:
                eraser.restore()
            raise
        finally:
            placement.undo()
        return engine

    def finish(self, engine: Engine) -> tuple[Mapping[str, float], float]:
        """Apply the closed form after the training, if the recipe has one.

        Returns its results and its seconds. A LoRA is merged before it, so the weights of its
        layers are written: the closed form is no LoRA of that rank.
        """
        if self.recipe.finish is None:
            return {}, 0.0
        try:
            engine.eraser.absorb()
            return cross_attention_edit.finish(self.context, engine.eraser.trainable())
        except BaseException:
            engine.eraser.restore()
            raise

    def _split(self, eraser: Eraser, accelerator: Accelerator) -> AbstractContextManager[None]:
        """Split the denoiser's frozen weights among the processes, if the recipe says so."""
        if self.recipe.training.shard != "weights" or accelerator.num_processes < 2:
            return nullcontext()
        eraser.origin  # noqa: B018 - computes and caches the fingerprint of the whole weights
        return fsdp.split(self.model, accelerator.device)

    def placement(self) -> Placement:
        """Return the placement of the model's parts.

        Raises UserError if a callback may need them elsewhere.
        """
        settings = {key: getattr(self.recipe.training, key) for key in MEMORY}
        split = self.recipe.training.shard == "weights"
        if self.on_step is not None and (
            settings["offload"] or settings["frozen"] == "bf16" or split
        ):
            raise UserError(
                "on_step is called between steps, when training.offload, training.frozen: "
                "bf16 or training.shard: weights have moved, rounded or split the model's "
                "weights; leave out one of the two"
            )
        return Placement(self.model, **settings)

    def _selected_names(self) -> list[str]:
        """Return the denoiser's weights that are trained themselves.

        There are none with a LoRA or another target.
        """
        if self.recipe.target != "denoiser" or self.recipe.trainable.lora is not None:
            return []
        names = [name for name, _ in self.model.parts["denoiser"].named_parameters()]
        return select(names, self.recipe.trainable.select)

    def _require_projectable(self) -> None:
        """Raise UserError if trainable.project leaves nothing of a pipeline's part to train.

        A LoRA has linear layers and convolutions only.
        """
        trainable = self.recipe.trainable
        if trainable.project is None or trainable.lora or self.recipe.target not in PROMPTED:
            return
        part = self.model.part(self.recipe.target)
        names = [name for name, _ in part.named_parameters()]
        projection.layers_of(part, select(names, trainable.select))

    def watch(self) -> Watch | None:
        watch = self.recipe.watch
        if watch is None or not isinstance(self.model, Model):
            return None
        suite = suites.load(watch.suite)
        if watch.group not in suite.groups:
            raise unknown("group of the suite to watch", watch.group, suite.groups)
        concept_rate = concept_rate_of(
            self.model, suite, watch.group, watch.n, progress=self.progress
        )
        return Watch(concept_rate, self.folder / "watch.jsonl", watch.every, watch.below)

    def rewinding(self, eraser: Eraser, method: Method) -> Rewinding | None:
        """Return what chooses a round after the training, if the recipe wants one.

        Raises UserError if its unseen examples do not fit the model or the forget set.
        """
        spec = self.recipe.rewinding
        if spec is None or not isinstance(eraser, Classifier):
            return None
        rows = {name: (one.data, one.rows) for name, one in eraser.objective_by_name.items()}
        unseen = labelled_data.select_unseen(
            spec, rows, self.objects, same_names=self.recipe.target == "clip"
        )
        eraser.require_fitting("rewinding", *unseen)
        forget_counts, unseen_counts = (
            WrongPredictions(len(positions), partial(eraser.count_wrong, data, positions))
            for data, positions in (rows["forget"], unseen)
        )
        return Rewinding(
            {**eraser.trainable(), **eraser.buffers()},
            round_ends(method, spec.every, self.recipe.training.steps),
            forget=forget_counts,
            unseen=unseen_counts,
        )

    def write(self, outcome: Outcome) -> dict[str, Any]:
        """Write the finished run.

        It has a LoRA's matrices, changed tensors and the whole model, as far as the recipe wants
        them, the environment, and done.json last. With several processes the first one writes; the
        others end their training too, and wait.
        """
        # a file of prompts or data may have changed since the run began
        recorded = {key: _recorded(self.folder, key) for key in ("prompts", "files")}
        describe = (
            {**provenance.describe(), **recorded}
            if recorded["prompts"] or recorded["files"]
            else describe_start(self.recipe)
        )
        adapter, trained_parameters = outcome.eraser.adapter, outcome.eraser.trainable()
        factors = adapter.factors(self.recipe.target) if adapter else None
        self._require_finite(outcome.eraser)
        changed_tensors = {
            name: value.detach().cpu().contiguous()
            for name, value in outcome.eraser.finish().items()
        }
        counted_tensors = trained_parameters if adapter else changed_tensors
        summary = {
            "recipe": self.recipe.fingerprint,
            "seconds": round(outcome.seconds, 2),
            "trained_tensors": len(counted_tensors),
            "trained_parameters": sum(value.numel() for value in counted_tensors.values()),
            **({} if distributed.alone() else {"processes": distributed.join().num_processes}),
            **outcome.notes,
        }
        if distributed.is_first():
            summary |= self._rounding(outcome.eraser, changed_tensors, factors)
            self._write_all(describe, changed_tensors, factors, summary)
        distributed.wait()
        return summary

    def _require_finite(self, eraser: Eraser) -> None:
        """Raise UserError if an erased weight is not finite. The model is then the original.

        A LoRA is checked before it is merged, since nothing undoes that.
        """
        adapter = eraser.adapter
        weights = adapter.sums() if adapter else {**eraser.trainable(), **eraser.buffers()}.items()
        advice = (
            f"lower training.lr (now {self.recipe.training.lr:g}) or the method's own weights, and "
            "start over with --overwrite"
        )
        try:
            for name, value in weights:
                require_finite({name: value}, "the erased weights", advice)
        except UserError:
            eraser.restore()
            raise

    def _rounding(
        self, eraser: Any, changed_tensors: dict[str, Tensor], factors: Any
    ) -> dict[str, float]:
        """Return the share of the change that the written pipeline leaves out, for done.json.

        It is measured for a pipeline in half precision only. A large share is a warning.
        """
        stored = getattr(self.model, "stored", {}).get(self.recipe.target)
        saved = self.recipe.weights_to_save(has_name=self.base is not None)
        if saved != "pipeline" or stored is None or stored.usual == torch.float32:
            return {}
        # one after the other: all of them are as large as the trained weights
        if factors is not None:
            changes = ((f"{layer}.weight", factors.change(layer)) for layer in factors.layers)
        else:
            changes = (
                (name, changed_tensors[name] - value.cpu())
                for name, value in eraser.originals.items()
            )
        share = stored.rounding(changed_tensors, changes)
        if not share <= COARSE:
            _LOG.warning(
                "the pipeline is in %s, as its checkpoint, which leaves out %.0f %% of "
                "the change; evaluate %s itself, or train a LoRA, which is written in fp32",
                str(stored.usual).removeprefix("torch."),
                100 * share,
                self.folder / resources.whole_model(self.model.family),
            )
        return {"rounding": float(f"{share:.3g}")}

    def _write_all(
        self,
        describe: dict[str, Any],
        changed_tensors: dict[str, Tensor],
        factors: Any,
        summary: dict[str, Any],
    ) -> None:
        part = (
            getattr(self.model, "network", "unet")
            if self.recipe.target == "denoiser"
            else self.recipe.target
        )
        write_json(self.folder / ENVIRONMENT, describe)
        saved = self.recipe.weights_to_save(has_name=self.base is not None)
        if saved != "lora":
            write_tensors(
                self.folder / run_base.WEIGHTS, changed_tensors, {"format": "pt", "part": part}
            )
        if factors is not None:
            write_folder(
                self.folder / lora_files.FOLDER,
                lambda p: lora_files.save(self.model, [factors], p / lora_files.FILE),
            )
        if saved == "pipeline":
            write_folder(self.folder / resources.whole_model(self.model.family), self.model.save)
        elif self.base is not None:
            write_json(self.folder / run_base.FILE, self.base.content())
        write_json(self.folder / "done.json", summary)
        for path in (self.folder / "state.ckpt", checkpoint.previous(self.folder / "state.ckpt")):
            remove_file(path)

    def _require_trained(self, engine: Engine) -> None:
        """Raise UserError if every step was skipped, so that the model did not change."""
        if engine.skipped and engine.skipped >= self.recipe.training.steps:
            engine.eraser.restore()
            raise UserError(
                f"all {engine.skipped} steps were skipped, since no loss and no combined "
                "gradient was finite, so nothing was trained; lower training.lr (now "
                f"{self.recipe.training.lr:g}), use precision fp32, or check the data. "
                f"The log is in {self.folder / 'log.jsonl'}"
            )
