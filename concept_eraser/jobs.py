"""The steps of one erasing job: eraser, engine, output folder. `api.erase` calls them in order."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from concept_eraser import environment, registry, resources
from concept_eraser import recipe as recipes
from concept_eraser.errors import UserError, unknown
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.watch import Watch, share_of
from concept_eraser.methods.base import Method
from concept_eraser.models import lora_files
from concept_eraser.models.base import Loaded, Model
from concept_eraser.progress import Progress
from concept_eraser.recipe import Recipe
from concept_eraser.targets import edits, labelled, prompted
from concept_eraser.targets.base import Request
from concept_eraser.training.checkpoint import write_whole
from concept_eraser.training.engine import Engine, Eraser, Schedule

MADE = ("done.json", "state.ckpt", "log.jsonl", "watch.jsonl", "weights.safetensors", "environment.json", "conflict.png", "evaluation.json", "report.html")  # fmt: skip


def check_folder(folder: Path, recipe: Recipe, *, resume: bool, overwrite: bool, in_memory: bool = False) -> bool:
    """Whether a finished run of this recipe is already there; nothing is touched.

    in_memory: the model or its data is an object that the recipe only names, so that a finished run may be another's.

    Raises UserError where the folder holds another run, or this one unfinished without `resume`.
    """
    path = folder / "recipe.yaml"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; give the folder of a run")
    if not path.exists():
        if folder.exists() and any(folder.iterdir()) and not overwrite:
            raise UserError(f"{folder} is not empty and holds no run of ours; give a new folder, or pass --overwrite")
    elif not overwrite:
        try:
            other = recipes.load(str(path))
        except UserError:
            raise UserError(f"{folder} holds another run (its recipe.yaml does not fit this version); give a new folder, or pass --overwrite") from None  # fmt: skip
        if other.fingerprint != recipe.fingerprint:
            raise UserError(f"{folder} holds another run (differs in {', '.join(environment.differences(other.resolved(), recipe.resolved())) or 'nothing visible'}); give a new folder with --output, or pass --overwrite")  # fmt: skip
        if (folder / "done.json").exists():
            if in_memory:
                raise UserError(f"{folder} holds a finished run on an object in memory, which may not have been this one; give another output, or overwrite=True")  # fmt: skip
            return True
        if not resume and (folder / "state.ckpt").exists():
            raise UserError(
                f"{folder} holds this run, unfinished; continue with --resume, or start over with --overwrite"
            )
    return False


def claim_folder(folder: Path, recipe: Recipe, *, overwrite: bool, command: str) -> None:
    """Write the recipe, and take away what an earlier run left: called when model and data have been found to fit."""
    if overwrite and folder.exists():
        ours = (folder / "recipe.yaml").exists()
        for name in MADE if ours else MADE[:4]:
            (folder / name).unlink(missing_ok=True)
        for name in (*resources.WHOLE_MODEL, "attacks", lora_files.FOLDER) if ours else ():
            shutil.rmtree(folder / name, ignore_errors=True)
    write_whole(folder / "recipe.yaml", lambda partial: _text(partial, recipes.dump(recipe, command)))


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    """What training or editing left behind; notes go into done.json."""

    eraser: Eraser
    seconds: float
    notes: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """A recipe with its model loaded. objects: data sets and judges in memory that the recipe can only name."""

    recipe: Recipe
    model: Loaded
    folder: Path
    progress: Progress
    cache: Path | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)
    look: Callable[[int, float], None] | None = None  # asked between steps, unless the recipe watches
    claim: Callable[[], None] = lambda: None  # called once, when nothing about the input can be wrong any more

    def eraser(self) -> Eraser:
        return (prompted if self.recipe.target in recipes.PROMPTED else labelled).build(self.request)

    @property
    def request(self) -> Request:
        return Request(self.recipe, self.model, self.progress, self.cache, self.objects)

    def run(self, *, resume: bool) -> Outcome:
        """Train to the end, or edit (or raise); the model then holds the erased weights."""
        method: Any = registry.build("method", self.recipe.method.name, self.recipe.method.options)
        if hasattr(method, "edit"):
            accelerator = self.accelerator()
            self.model.to(accelerator.device)
            eraser, told, seconds = edits.apply(method, self.request)
            self.claim_once(accelerator)
            return Outcome(eraser, seconds, {"edit": dict(told)})
        engine = self.train(method, resume=resume)
        notes: dict[str, Any] = {"steps": self.recipe.training.steps, "skipped_steps": engine.skipped}
        if isinstance(engine.watch, Watch):
            notes["forgotten"] = engine.watch.summary()
        return Outcome(engine.eraser, engine.seconds, notes)

    def accelerator(self) -> Accelerator:
        """Where and with how many others this runs. Raises UserError for a device that is not there."""
        training = self.recipe.training
        there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        if not there.get(training.device, True):
            raise UserError(f"training.device is {training.device}, which this machine does not have; found: {', '.join(k for k, v in there.items() if v)}. Use auto")  # fmt: skip
        cpu = training.device == "cpu" or not (there["cuda"] or there["mps"])
        # no mixed_precision here: accelerate keeps it for the whole process, and the next run may want another
        return Accelerator(cpu=cpu)

    def claim_once(self, accelerator: Accelerator) -> None:
        """Claim the folder by one process only: another's claim would take away the log that the first has opened."""
        if accelerator.is_main_process:
            self.claim()
        accelerator.wait_for_everyone()

    def train(self, method: Method, *, resume: bool) -> Engine:
        training, accelerator = self.recipe.training, self.accelerator()
        self.model.to(accelerator.device)
        fields = {k: v for k, v in training.model_dump().items() if k != "device"}
        eraser = self.eraser()
        try:
            self.claim_once(accelerator)
            engine = Engine(eraser, method, Schedule(**fields), self.folder, accelerator, self.progress, self.watch() or self.look, self.recipe.trainable.saliency, self.recipe.trainable.reinitialise)  # fmt: skip
            engine.run(resume=resume)
        except BaseException:  # a model in memory must not stay half trained; the state of the run is in its folder
            eraser.restore()
            raise
        return engine

    def watch(self) -> Watch | None:
        asked = self.recipe.watch
        if asked is None or not isinstance(self.model, Model):
            return None
        suite = suites.load(asked.suite)
        if asked.group not in suite.groups:
            raise unknown("group of the suite to watch", asked.group, suite.groups)
        share = share_of(self.model, suite, asked.group, asked.n, progress=self.progress)
        return Watch(share, self.folder / "watch.jsonl", asked.every, asked.below)

    def write(self, outcome: Outcome) -> dict[str, Any]:
        """The finished run: whole model, changed tensors, a LoRA's factors, environment, and done.json last of all."""
        describe = {**environment.describe(), "prompts": prompted.described(self.recipe)}
        adapter, trained = outcome.eraser.adapter, outcome.eraser.trainable()
        factors = adapter.factors(self.recipe.target) if adapter else None
        changed = {name: value.detach().cpu().contiguous() for name, value in outcome.eraser.finish().items()}
        counted = trained if adapter else changed
        part = {"denoiser": "unet"}.get(self.recipe.target, self.recipe.target)
        self._write("environment.json", lambda p: _text(p, json.dumps(describe, indent=1) + "\n"))
        self._write("weights.safetensors", lambda p: save_file(changed, p, metadata={"format": "pt", "part": part}))
        if factors is not None:
            self._write(lora_files.FOLDER, lambda p: lora_files.save(self.model, [factors], p / lora_files.FILE))
        self._write(resources.whole_model(self.model.family), self.model.save)
        done = {
            "recipe": self.recipe.fingerprint,
            "seconds": round(outcome.seconds, 2),
            "trained_tensors": len(counted),
            "trained_parameters": sum(value.numel() for value in counted.values()),
            **outcome.notes,
        }
        self._write("done.json", lambda p: _text(p, json.dumps(done, indent=1) + "\n"))
        (self.folder / "state.ckpt").unlink(missing_ok=True)
        return done

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        write_whole(self.folder / name, write)
