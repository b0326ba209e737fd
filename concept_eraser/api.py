"""The Python face: erase, evaluate, load. The only place that wires the parts together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concept_eraser import jobs, matching, measuring, ranks
from concept_eraser import recipe as recipes
from concept_eraser.cards import card as card
from concept_eraser.errors import UserError
from concept_eraser.evaluation import attacking, plots
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacking import Campaign
from concept_eraser.evaluation.suite import Evaluation
from concept_eraser.exporting import export as export
from concept_eraser.merging import merge as merge
from concept_eraser.models import loading
from concept_eraser.models.base import Loaded, Model
from concept_eraser.models.clip import Clip
from concept_eraser.models.guards import Guard
from concept_eraser.progress import Progress, silent
from concept_eraser.publishing import push_to_hub as push_to_hub
from concept_eraser.recipe import Recipe
from concept_eraser.reporting import overview as overview
from concept_eraser.reporting import report as report
from concept_eraser.storage import locks, output_folder
from concept_eraser.storage.readers import read_yaml
from concept_eraser.storage.writers import probe, write_folder
from concept_eraser.training import log as logs


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, which describes itself, and the erased model."""

    folder: Path
    recipe: Recipe
    seconds: float
    model: Loaded | None = None  # None when the run had been finished before

    def load(self) -> Loaded:
        if self.model is not None:
            return self.model
        loaded = loading.load_part(self.folder, self.recipe.target)
        loaded.configure(self.recipe.model_options)
        return loaded


def load(source: Any, *, allow_pickle: bool = False, base: Any = None, guard: str | None = None) -> Model:
    """Load a model by name ("tiny-sd"), folder, run folder, hub id, or from a pipeline in memory; or a LoRA, denoiser or
    text encoder of another eraser on the `base` it was made for. guard: a safeguard while sampling, e.g. "negative:a star"."""
    found = loading.load(source, allow_pickle=allow_pickle, base=base)
    found.configure(_options_of(source))
    if guard:
        found.protect(Guard.read(guard))
    return found


def erase(
    recipe: str | Path | dict | Recipe | None = None,
    *,
    model: Any = None,
    base: str | Path | None = None,
    output: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
    allow_code: bool = False,
    command: str = "",
    progress: Progress = silent,
    cache: Path | None = None,
    look: Callable[[int, float], None] | None = None,
    **settings: Any,
) -> Run:
    """Erase a concept and write a run folder.

    recipe: a recipe by name or path, or a mapping; or leave it out and give its keys as keywords, e.g.
        erase(model="tiny-sd", forget={"prompts": "tiny_star", "loss": "anchor", "anchor": "a {color} circle"},
              retain="tiny_rest", method="munba", training={"steps": 100})
    model: overrides the recipe's; a name, folder, hub id, or an object in memory (a pipeline, a torch module, a CLIP
        model with its tokenizer). An object in memory is changed in place, and left in eval mode, in fp32, on the device
        of the training (the CPU with training.offload or frozen: bf16), with no parameter requiring a gradient but the trained ones. After an error or an interruption
        it has the weights it came with, so that a run is resumed with the same object.
    base: where the model is a single-file checkpoint (.safetensors), the diffusers folder or hub id of its architecture,
        of which no weights are needed; where it is a part of a pipeline (a LoRA, a denoiser), what that was made for. The
        recipe then names the model FILE@BASE.
    forget, retain: for a classifier, VAE or CLIP model their `data` may be an object in memory too: a torch Dataset or
        a pair of arrays (inputs, labels).
    output: the run folder; default runs/<fingerprint of the recipe>.
    look: called before the first step and after each with (steps done, seconds of training so far); the time it takes is
        not counted. The model in memory is the one in training: sample it, measure it, leave its weights alone.
    resume: go on with an unfinished run. overwrite: replace the run that the folder holds: its files are set aside, and
        removed when the new run is finished. Files that this package did not write stay.
    allow_code: also call a model that a recipe names as package.module:function. One that `model` or `overrides` name is
        called without it.

    Raises UserError for bad input and for a folder that is not ours or in use, Interrupted on Ctrl-C (after saving the state).
    """
    allow_code = allow_code or isinstance(model, str) or any(one.startswith("model=") for one in overrides)
    model = model if base is None else loading.on_base(model, base)
    source = model if model is not None and not isinstance(model, str | Path) else None
    settings, objects = _without_objects(settings)
    if isinstance(recipe, dict):
        recipe, objects = _without_objects(recipe)
    job = _recipe(recipe, _name_of(source) if source is not None else model, overrides, settings)
    folder = Path(output) if output else Path("runs") / job.fingerprint
    jobs.join(job)
    in_memory = source is not None or bool(objects)
    with ExitStack() as lock:

        def is_finished() -> bool:
            lock.enter_context(locks.locked(folder, "erase"))
            return jobs.check_folder(folder, job, resume=resume, overwrite=overwrite, in_memory=in_memory)

        if ranks.agreed(is_finished):
            return Run(folder, job, jobs.read_done(folder)["seconds"])
        loaded = loading.load_part(source if source is not None else job.model, job.target, allow_pickle=allow_pickle, allow_code=allow_code)  # fmt: skip
        loaded.configure(job.model_options)
        told = command or f"concept-eraser erase {folder / 'recipe.yaml'}"
        work = jobs.Job(job, loaded, folder, progress, cache, objects, look, lambda: jobs.claim_folder(folder, job, overwrite=overwrite, command=told))  # fmt: skip
        done = work.write(work.run(resume=resume))
        if ranks.is_first():
            plots.save(plots.conflict(logs.read(folder / "log.jsonl")), folder / "conflict.png")
            output_folder.seal(folder)
            output_folder.remove_set_aside(folder)
        return Run(folder, job, done["seconds"], loaded)


def _recipe(recipe: Any, model: Any, overrides: Sequence[str], settings: dict[str, Any]) -> Recipe:
    if isinstance(recipe, Recipe):
        recipe = recipe.model_dump(exclude_none=True)
    if recipe is None:
        content: Any = settings
    elif settings:
        raise UserError(f"give a recipe or its keys, not both: found a recipe and {', '.join(sorted(settings))}")
    else:
        content = recipe
    changes = list(overrides) + ([f"model={json.dumps(str(model))}"] if model is not None else [])
    return recipes.load(content, changes)


def _without_objects(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings with data sets and judges in memory replaced by what to call them, and these objects by player."""
    named, objects = dict(settings), {}
    for player, key in (("forget", "data"), ("retain", "data"), ("replace", "data"), ("histogram", "judge")):
        side = named.get(player)
        if isinstance(side, dict) and key in side and not isinstance(side[key], str | Path):
            objects["judge" if key == "judge" else player] = side[key]
            named[player] = {**side, key: f"a {type(side[key]).__name__} in memory"}
    return named, objects


def _name_of(source: Any) -> str:
    """What the recipe of a run on an object in memory says instead of a name; it cannot be loaded again."""
    return getattr(source, "source", None) or f"a {type(source).__name__} in memory"


def plug(pipeline: Any, clip: Any, *, output: str | Path | None = None) -> Model:
    """A text-to-image pipeline with the text tower of a (scrubbed) CLIP model in place of its text encoder's weights.

    pipeline: see `load`; clip: a run with target clip, a folder, or a CLIP model in memory with its tokenizer.
    output: also save the whole pipeline there.

    Raises UserError where the two are not the same architecture.
    """
    if output is not None:
        probe(Path(output))
    model, tower = loading.load(pipeline), loading.load_part(clip, "clip")
    if not isinstance(tower, Clip):
        raise UserError(f"{tower.source} is no CLIP model")
    model.take_text_tower(tower.text_tower())
    if output is not None:
        write_folder(Path(output), model.save, kind="model")
    return model


def evaluate(
    model: Any,
    suite: str | Path | dict | None = None,
    *,
    before: Any = None,
    n: int | None = None,
    guard: str | None = None,
    output: str | Path | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
    cache: Path | None = None,
) -> Evaluation:
    """Measure a model against the one before it, on the same prompts and seeds.

    model: what to measure, see `load`; suite: an evaluation suite by name or path (default: the one named like the prompt set
    that the run forgot, else tiny_star); before: the original (default: the model that
    a run's recipe names, else tiny-sd; needed for a LoRA or another part of a pipeline); n: at most so many pictures a group;
    output: a folder, into which evaluation.json goes.

    Raises UserError for an unknown suite, judge or metric, a judge that cannot see the concept, and where the folder cannot
    be written to or holds an evaluation.json that is not ours.
    """
    folder = _output_folder(output)
    protocol = suites.load(suite if suite is not None else matching.suite_of(model)).scaled(n)
    matching.require_kept(matching.recipe_of(model), protocol)
    with _results(folder, "evaluation", "evaluation.json"):
        original, after = _pair(model, before, allow_pickle, guard)
        found = suites.evaluate(original, after, protocol, cache=cache, progress=progress)
        if folder is not None and ranks.is_first():
            output_folder.claim(folder, "evaluation")
            found.save(folder / "evaluation.json")
    return found


def _output_folder(output: str | Path | None) -> Path | None:
    """Where results go. Raises UserError for the name of a file."""
    folder = Path(output) if output is not None else None
    if folder is not None and folder.suffix in (".json", ".html", ".md"):
        raise UserError(f"output is a folder, found {folder}; give the folder that the files go into")
    return folder


def _results(folder: Path | None, kind: str, *names: str) -> AbstractContextManager[None]:
    """The lock of a folder of results, held by the first of several processes."""
    return nullcontext() if folder is None or not ranks.is_first() else output_folder.results(folder, kind, names)


def attack(
    model: Any,
    name: str = "unlearn_diff",
    suite: str | Path | dict | None = None,
    *,
    group: str = "direct",
    before: Any = None,
    n: int = 20,
    batch: int = 16,
    seed: int = 0,
    hide: str | None = None,
    word: str | None = None,
    options: dict[str, Any] | None = None,
    guard: str | None = None,
    output: str | Path | None = None,
    allow_pickle: bool = False,
    progress: Progress = silent,
    cache: Path | None = None,
) -> Campaign:
    """Attack a model with adversarial prompts and count how often the concept comes back.

    model: the victim; name: an attack of evaluation/attacks/ with its `options`; suite, before: as in `evaluate`;
    group: the suite's prompts that are attacked, n of them, `batch` at once; hide: the word that replaces the concept's
    in them (to prove an attack on an unprotected model); word: how prompts name the concept, where the suite's value is not it; output: folder of attack.json and
    attack.png (the first that fell: by the original, the victim, the victim attacked); an interrupted attack goes on there.

    Raises UserError for an unknown attack, option, suite or group, and where the folder holds another attack.
    """
    protocol = attacking.Protocol(suites.load(suite if suite is not None else matching.suite_of(model)), name, options or {}, group, n, batch, seed, hide, word)  # fmt: skip
    folder = _output_folder(output)
    with _results(folder, "attack", "attack.json", "attack.png", "attempts.jsonl"):
        whole, victim = _pair(model, before, allow_pickle, guard)
        found = attacking.run(protocol, victim, whole, folder=folder, cache=cache, progress=progress)
        if folder is not None and ranks.is_first():
            found.save(folder / "attack.json")
            plots.save(attacking.sheet(found, victim, whole), folder / "attack.png")
            output_folder.seal(folder)
    return found


def measure(run: str | Path, *, before: Any = None, after: Any = None, data: dict[str, Any] | None = None, allow_code: bool = False) -> dict[str, Any]:  # fmt: skip
    """Measure a run on labelled data, before and after: accuracies with intervals and membership attacks of a classifier
    or CLIP model, or the PSNR of what a VAE reconstructs.

    before, after: the model it started from and the erased one, if they were in memory; data: likewise its data sets, by
        "forget", "retain", "test". allow_code: call a model that the run's recipe names as package.module:function.
    """
    return measuring.measure(Path(run), before=before, after=after, objects=data, allow_code=allow_code)


def _options_of(model: Any) -> dict[str, float]:
    """The model options of a run folder, whatever else its recipe says (it may be of another version)."""
    path = Path(str(model)) / "recipe.yaml" if isinstance(model, str | Path) else None
    if path is None or not path.is_file():
        return {}
    content = read_yaml(path)
    options = content.get("model_options") if isinstance(content, dict) else None
    return options if isinstance(options, dict) else {}


def _pair(model: Any, before: Any, allow_pickle: bool, guard: str | None = None) -> tuple[Model, Model]:
    """The original and the model to be measured, loaded."""
    found = matching.recipe_of(model)
    known = before if before is not None else found.model if found else None
    after = load(model, allow_pickle=allow_pickle, base=known)
    original = loading.load(known if known is not None else "tiny-sd", allow_pickle=allow_pickle)
    for one in (original, after):
        one.configure(found.model_options if found else {})
    if guard:
        after.protect(Guard.read(guard))
    return original, after
