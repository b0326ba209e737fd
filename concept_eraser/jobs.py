"""The steps of one erasing job: data, eraser, engine, output folder. `api.erase` calls them in order."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from concept_eraser import environment, registry
from concept_eraser import recipe as recipes
from concept_eraser.data import batches, generate, images, prompts
from concept_eraser.erasers.denoiser import Denoiser, Side
from concept_eraser.errors import UserError, unknown
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.watch import Watch, share_of
from concept_eraser.losses import LOSSES, Settings
from concept_eraser.models.base import Model
from concept_eraser.progress import Progress
from concept_eraser.recipe import Recipe
from concept_eraser.training.checkpoint import write_whole
from concept_eraser.training.engine import Engine, Schedule
from concept_eraser.training.parameters import select


def prepare_folder(folder: Path, recipe: Recipe, *, resume: bool, overwrite: bool, command: str) -> bool:
    """Claim the output folder for this recipe; True if a finished run of it is already there.

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
            raise UserError(f"{folder} holds another run (differs in {_difference(other, recipe)}); give a new folder with --output, or pass --overwrite")  # fmt: skip
        if (folder / "done.json").exists():
            return True
        if not resume and (folder / "state.ckpt").exists():
            raise UserError(
                f"{folder} holds this run, unfinished; continue with --resume, or start over with --overwrite"
            )
    if overwrite and folder.exists():
        for name in ("done.json", "state.ckpt", "log.jsonl", "watch.jsonl"):
            (folder / name).unlink(missing_ok=True)
    write_whole(path, lambda partial: _text(partial, recipes.dump(recipe, command)))
    return False


def _text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _difference(a: Recipe, b: Recipe) -> str:
    """The dotted names of the settings in which two recipes differ."""

    def flat(value: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {
            k: v for key, inner in value.items() for k, v in flat(inner, f"{prefix}.{key}" if prefix else key).items()
        }

    left, right = flat(a.resolved()), flat(b.resolved())
    return ", ".join(sorted(k for k in left.keys() | right.keys() if left.get(k) != right.get(k))) or "nothing visible"


@dataclass(frozen=True)
class Job:
    """A recipe with its model loaded."""

    recipe: Recipe
    model: Model
    folder: Path
    progress: Progress
    cache: Path | None = None

    def sides(self) -> dict[str, Side]:
        """The players in the order the methods expect, with their data ready."""
        sides = {name: getattr(self.recipe, name) for name in self.recipe.players}
        asked = sides.pop("histogram", None)  # of the forget side's own examples, where the concept would show
        if self.recipe.attack:  # it wants the forgotten prompts' own images back
            attack = self.recipe.attack
            sides["attack"] = recipes.Side(prompts=self.recipe.forget.prompts, loss="data", n=attack.n)
        sets = {name: prompts.load(side.prompts) for name, side in sides.items()}
        if "retain" in sets:
            prompts.require_disjoint(sets["forget"], sets["retain"])
        made = {name: self._side(name, side, sets[name]) for name, side in sides.items()}
        if asked:
            made["histogram"] = replace(made["forget"], loss="histogram", scale=1.0, timesteps=asked.timesteps, settings=self._judged(asked))  # fmt: skip
        if self.recipe.attack:
            made["attack"] = replace(made["attack"], decay=self.recipe.attack.decay)
        return {name: made[name] for name in self.recipe.players}

    def _judged(self, histogram: recipes.Histogram) -> Settings:
        judge = registry.build("judge", histogram.judge, {})
        ((attribute, value),) = histogram.concept.items()
        return Settings(shows=lambda images: judge.probability(images, attribute, value), alpha=histogram.alpha)

    def _side(self, player: str, side: recipes.Side, source: prompts.PromptSet) -> Side:
        rows = list(source.take(side.n, self.recipe.generation.seed).prompts)
        latents = None
        if side.images == "generate":
            latents, rows = self._generated(player, side, rows)
        elif side.images != "free":
            latents, rows = self._from_folder(side, source)
        anchors = [row.anchored(side.anchor) for row in rows] if side.anchor else None
        examples = batches.make_examples(self.model, [row.text for row in rows], latents=latents, anchors=anchors)
        return Side(examples, side.loss, Settings(side.teacher, side.eta), side.scale, side.timesteps)

    def _generated(self, player: str, side: recipes.Side, rows: list[prompts.Prompt]) -> tuple[torch.Tensor, list]:
        """Images by the model itself; those of the anchor where the loss noises the anchor's images."""
        settings = self.recipe.generation
        of_anchor = (side.noised or LOSSES[side.loss].images) == "anchor"
        shown = [row.anchored(side.anchor) if of_anchor and side.anchor else row.text for row in rows]
        sampling = generate.Sampling(settings.steps, settings.guidance, settings.batch_size, settings.precision)
        base = environment.derive_seed(settings.seed, player)
        pictures = generate.generate(self.model, shown, generate.seeds_for(shown, base), sampling, cache=self.cache, what=f"generating {player} images", progress=self.progress)  # fmt: skip
        return batches.encode_pictures(self.model, pictures), rows

    def _from_folder(self, side: recipes.Side, source: prompts.PromptSet) -> tuple[torch.Tensor, list]:
        """A folder's images; its captions, or the set's only prompt for images without one."""
        _channels, height, width = self.model.latent_shape()
        scale = 2 ** (len(self.model.parts["vae"].config.block_out_channels) - 1)  # type: ignore[union-attr, arg-type]
        only = source.texts[0] if len(source) == 1 else None
        pictures, captions = images.read_folder(Path(side.images), (height * scale, width * scale), caption=only)
        known = {prompt.text: prompt for prompt in source.prompts}
        return batches.encode_pictures(self.model, pictures), [known.get(c, prompts.Prompt(c)) for c in captions]

    def eraser(self) -> Denoiser:
        names = [name for name, _ in self.model.denoiser.named_parameters()]
        return Denoiser(self.model, self.sides(), select(names, self.recipe.trainable.select))

    def train(self, *, resume: bool) -> tuple[Engine, Denoiser]:
        """Train to the end (or raise); the model then holds the erased weights."""
        training = self.recipe.training
        there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        if not there.get(training.device, True):
            raise UserError(f"training.device is {training.device}, which this machine does not have; found: {', '.join(k for k, v in there.items() if v)}. Use auto")  # fmt: skip
        cpu = training.device == "cpu" or not (there["cuda"] or there["mps"])
        # no mixed_precision here: accelerate keeps it for the whole process, and the next run may want another
        accelerator = Accelerator(cpu=cpu)
        self.model.to(accelerator.device)
        eraser = self.eraser()
        fields = {k: v for k, v in training.model_dump().items() if k != "device"}
        method = registry.build("method", self.recipe.method.name, self.recipe.method.options)
        engine = Engine(eraser, method, Schedule(**fields), self.folder, accelerator, self.progress, self.watch())
        engine.run(resume=resume)
        return engine, eraser

    def watch(self) -> Watch | None:
        asked = self.recipe.watch
        if asked is None:
            return None
        suite = suites.load(asked.suite)
        if asked.group not in suite.groups:
            raise unknown("group of the suite to watch", asked.group, suite.groups)
        share = share_of(self.model, suite, asked.group, asked.n, progress=self.progress)
        return Watch(share, self.folder / "watch.jsonl", asked.every, asked.below)

    def write(self, engine: Engine, eraser: Denoiser) -> dict[str, Any]:
        """The finished run: pipeline folder, changed tensors, environment, and done.json last of all."""
        describe = environment.describe()
        changed = {name: value.detach().cpu().contiguous() for name, value in eraser.trainable().items()}
        self._write("environment.json", lambda p: _text(p, json.dumps(describe, indent=1) + "\n"))
        self._write("weights.safetensors", lambda p: save_file(changed, p, metadata={"format": "pt", "part": "unet"}))
        self._write("pipeline", self.model.save)
        done = {
            "recipe": self.recipe.fingerprint,
            "steps": self.recipe.training.steps,
            "seconds": round(engine.seconds, 2),
            "skipped_steps": engine.skipped,
            "trained_tensors": len(changed),
            "trained_parameters": sum(value.numel() for value in changed.values()),
        }
        if isinstance(engine.watch, Watch):
            done["forgotten"] = engine.watch.summary()
        self._write("done.json", lambda p: _text(p, json.dumps(done, indent=1) + "\n"))
        engine.checkpoint.unlink(missing_ok=True)
        return done

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        write_whole(self.folder / name, write)
