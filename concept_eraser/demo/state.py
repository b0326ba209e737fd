"""The models and images in the memory of the page.

Each base is loaded once. Of an erased model only the changed tensors are in memory. The latest
images are cached. A control, a model that never learned the concept, is one more model of its base.

Images at strength s use the weights `original + s * (erased - original)`. At 0 no weight is
touched, and at 1 the erased values are copied. Both ends are therefore bit-equal to the models
themselves. A LoRA merged into its base is such a difference too, so the slider is its scale.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concept_eraser.demo import presets, safety
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.storage.readers import read_tensor_header, read_tensors
from concept_eraser.utils.errors import Interrupted, UserError, quote, unknown

if TYPE_CHECKING:
    from concept_eraser.evaluation.never_learned import NeverLearned

IMAGE_TARGETS = ("denoiser", "text_encoder")  # targets whose runs generate images
IMAGE_CACHE_BYTES = 128 * 2**20  # size of the image cache in bytes
BASES = 3  # models in memory, including the bundled one and the controls
CHANGE_CACHE_BYTES = 4 * 2**30  # size of the cache of the runs' tensors in bytes, the latest runs
BUNDLED = "tiny-sd"
TEST_PROMPT = "a red star"  # a control must tokenise it as its base does
Options = tuple[tuple[str, float], ...]  # options of a model's family, by name
ModelKey = str | tuple[str, str]  # a base, or a base and its control
StepProgress = Callable[[int, int], None]  # finished sampler steps, total sampler steps


@dataclass(frozen=True)
class WeightChange:
    """The tensors that a run changed, by part of the pipeline and name, and the original model."""

    name: str
    base: str
    parts: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ImageSettings:
    """The settings of one image without its model: prompt, seed, sampler."""

    prompt: str
    seed: int
    steps: int
    guidance: float


class Library:
    """The runs by name, and their images.

    The runs are those of the runs folder and of the command line. Several threads may call every
    method. One thread generates images at a time.
    """

    def __init__(
        self,
        runs: Path,
        run_paths: Sequence[str] = (),
        before: str | None = None,
        controls: Sequence[str] = (),
    ) -> None:
        """Check the runs and the controls of the command line.

        Args:
            runs: The runs folder.
            run_paths: Run folders, or results of another eraser.
            before: The original model of results of another eraser.
            controls: Models that never learned the concept.

        Raises:
            UserError: A path is neither a run folder nor another result with `before`. Or a control
                cannot be loaded, or differs from every original in more than its denoiser.
        """
        self.runs, self.before, self.controls = runs, before, tuple(controls)
        self._run_paths = _shortest_names(run_paths)
        self._bases: OrderedDict[ModelKey, Any] = OrderedDict()
        # the family options of a base after its loading
        self._base_options: dict[ModelKey, dict[str, Any]] = {}
        # why a control cannot be compared with runs of a base
        self._unfit_controls: dict[ModelKey, str] = {}
        self._cached_runs: OrderedDict[str, tuple[float, WeightChange]] = OrderedDict()
        self._images: OrderedDict[tuple, Any] = OrderedDict()
        self._lock, self._stop = threading.RLock(), threading.Event()
        self.dropped: set[str] = set()
        for path in self._run_paths.values():
            if not (path / "recipe.yaml").is_file() and (before is None or not path.exists()):
                raise UserError(
                    f"{path} is no run folder (it has no recipe.yaml); for a file or "
                    "folder of another eraser, give the original model with --before"
                )
        for control in self.controls:
            self._require_original(control)

    def _require_original(self, control: str) -> None:
        """Raise UserError if a control fits none of the originals."""
        bases = [self.before or BUNDLED, *self.bases_of(self.finished_runs())]
        reasons = []
        for base in dict.fromkeys(bases):
            try:
                self.never_learned(base, control)
                return
            except UserError as error:
                reasons.append(str(error))
        raise UserError("; ".join(dict.fromkeys(reasons[:3])))

    def folders(self) -> dict[str, Path]:
        """Return the run folders by name, finished or not.

        The runs of the command line are first, then the newest. A symbolic link that leads out of
        the runs folder is left out.
        """
        inside = []
        for path in self.runs.iterdir() if self.runs.is_dir() else ():
            recipe = path / "recipe.yaml"
            # links are rare, and resolving a path takes time
            is_link = path.is_symlink() or recipe.is_symlink()
            if safety.can_be_listed(path.name) and _is_file(recipe):
                inside += (
                    [(_stamp(recipe), path)]
                    if not is_link or safety.lies_inside(recipe, self.runs)
                    else []
                )
        inside.sort(key=lambda pair: pair[0], reverse=True)
        newest = [path for _, path in inside[: safety.LISTED]]
        return {**self._run_paths, **{p.name: p for p in newest if p.name not in self._run_paths}}

    def folder(self, name: Any) -> Path:
        """Return the folder of a run by its name.

        Raises UserError for any other text. The text itself never becomes a path.
        """
        folders = self.folders()
        if name not in folders:
            raise unknown("run", str(name)[:80], folders)
        return folders[name]

    def finished_runs(self, targets: Sequence[str] = IMAGE_TARGETS) -> list[str]:
        """List the names of the finished runs with one of these targets."""
        names = []
        for name, folder in self.folders().items():
            if name in self._run_paths and not (folder / "recipe.yaml").is_file():
                names += [name] if "denoiser" in targets else []
            elif (
                _is_file(folder / "done.json")
                and (recipe := recipe_in(folder))
                and recipe.target in targets
            ):
                names.append(name)
        return [name for name in names if name not in self.dropped]

    def unfinished_runs(self) -> list[str]:
        return [
            n
            for n, p in self.folders().items()
            if _is_file(p / "recipe.yaml") and not _is_file(p / "done.json") and recipe_in(p)
        ]

    def recipe(self, name: str) -> Recipe | None:
        """Return the recipe of a run, or None if this version cannot read one."""
        return recipe_in(self.folder(name))

    def base_of(self, name: str | None) -> str:
        """Return the original model of a run, as a name or folder."""
        recipe = self.recipe(name) if name else None
        return recipe.model if recipe else (self.before if name and self.before else BUNDLED)

    def bases_of(self, names: Sequence[str]) -> list[str]:
        """List the original models of several runs, each once."""
        folders = self.folders()
        recipes = [recipe_in(folders[name]) for name in names if name in folders]
        return list(
            dict.fromkeys(
                recipe.model if recipe else (self.before or BUNDLED) for recipe in recipes
            )
        )

    def options_of(self, name: str | None) -> Options:
        """Return the options of the model's family in a run's recipe."""
        recipe = self.recipe(name) if name else None
        return tuple(sorted(recipe.model_options.items())) if recipe else ()

    def model(self, source: str, control: str | None = None) -> Any:
        """Load a base model or one of its controls, with a cache of BASES models.

        Args:
            source: The base.
            control: A control, which must differ from the base in its denoiser only.

        Raises:
            UserError: A name is code, or the control has other parts than the base.
        """
        key = source if control is None else (source, control)
        if safety.names_code(source):
            raise UserError(
                f"{quote(source, 80)} names code, and the page runs no code that a recipe names"
            )
        with self._lock:
            if key in self._unfit_controls:
                raise UserError(self._unfit_controls[key])
            if key not in self._bases:
                from concept_eraser import api
                from concept_eraser.models.base import onto_gpu

                base: Any = None if control is None else self.model(source)
                others = [name for name in self._bases if name != BUNDLED]
                for name in others[: max(0, len(self._bases) + 1 - BASES)]:
                    del self._bases[name], self._base_options[name]
                if control is None:
                    model = api.load(source)
                    options = model.configured()
                else:
                    options = self._base_options[source]
                    base.configure(options)
                    model = self._load_control(control, base, source)
                self._bases[key], self._base_options[key] = model, options
                onto_gpu(model)
            self._bases.move_to_end(key)
            return self._bases[key]

    def _load_control(self, control: str, base: Any, source: str) -> Any:
        """Load a control with the options of its base. Raises UserError if the two differ."""
        from concept_eraser import api
        from concept_eraser.evaluation.never_learned import NeverLearned

        model = api.load(control, base=base)
        if model.family == base.family:
            model.configure(base.configured())
        try:
            NeverLearned(model, {}).require_equal_parts(base, [TEST_PROMPT])
        except UserError as error:
            self._unfit_controls[source, control] = str(error)
            raise
        return model

    def never_learned(self, source: str, control: str) -> NeverLearned:
        """Load a control of a base, and its record. Raises UserError as `model`."""
        from concept_eraser.evaluation.never_learned import NeverLearned, read_record

        return NeverLearned(self.model(source, control), read_record(control))

    def load_change(self, name: str) -> WeightChange:
        """Load the change of a run, with a cache.

        A file is read again only after a change. Raises UserError for a run that generates no
        images.
        """
        if name not in self.finished_runs():
            raise unknown("finished run", str(name)[:80], self.finished_runs())
        folder = self.folder(name)
        weights = folder / "weights.safetensors"
        if (recipe := self.recipe(name)) is not None:
            safety.require_no_code(recipe)
        # a run without changed tensors has a LoRA and a record of its original
        stamp = _stamp(weights) or _stamp(folder / "base.json") or _newest_weights(folder)
        with self._lock:
            cache_entry = self._cached_runs.get(name)
            if cache_entry is None or cache_entry[0] != stamp:
                cache_entry = self._cached_runs[name] = (stamp, self._read(name, folder))
            self._cached_runs.move_to_end(name)
            while (
                len(self._cached_runs) > 1
                and sum(_size(change) for _, change in self._cached_runs.values())
                > CHANGE_CACHE_BYTES
            ):
                self._cached_runs.popitem(last=False)
            return cache_entry[1]

    def _read(self, name: str, folder: Path) -> WeightChange:
        from concept_eraser.models import residual_gate

        base, weights = self.base_of(name), folder / "weights.safetensors"
        if not _is_file(weights):
            return WeightChange(name, base, self._difference(folder, base))
        part_name = read_tensor_header(weights)[0].get("part", "unet")
        part = {"unet": "denoiser", "transformer": "denoiser"}.get(part_name, part_name)
        tensors = read_tensors(weights)
        if any(one.startswith(f"{residual_gate.NAME}.") for one in tensors):
            raise UserError(
                f"the run {name} holds a gate beside the weights, which has no strength to change; "
                "use the commands generate, evaluate and attack"
            )
        return WeightChange(name, base, {part: tensors})

    def _difference(self, path: Path, base: str) -> dict[str, dict[str, Any]]:
        """Return the tensors of another eraser's model that differ from its base."""
        from concept_eraser.models import loading

        erased_model, tensors, model = loading.load(str(path), base=base), {}, self.model(base)
        for part in model.parts:
            before, after = (
                m.parts[part].state_dict() if part in m.parts else {} for m in (model, erased_model)
            )
            if before.keys() != after.keys() or any(
                before[k].shape != after[k].shape for k in before
            ):
                raise UserError(
                    f"{path} has another architecture than {base}; give its original model "
                    "with --before"
                )
            tensors[part] = {
                k: v.cpu() for k, v in after.items() if not v.equal(before[k].to(v.device))
            }
        return tensors

    def draw(
        self,
        name: str | None,
        image_settings: Sequence[ImageSettings],
        strength: float = 1.0,
        tell: StepProgress | None = None,
        base: str | None = None,
        options: Options | None = None,
        control: str | None = None,
    ) -> Any:
        """Generate images with a run at some strength, its base or a control, and cache them.

        Args:
            name: The run. None for the base.
            image_settings: The settings of the images.
            strength: The strength of the erasure. 0 is the base.
            tell: Called with the finished and the total sampler steps.
            base: The base (default: the original model of the run).
            options: The options of the model's family (default: those of the run's recipe).
            control: A control of the base, in place of the base itself.

        Returns:
            The images [n, h, w, 3] uint8.

        Raises:
            Interrupted: `stop` was called meanwhile.
        """
        import torch

        changes = self.load_change(name) if name is not None and strength > 0 else None
        source = self.base_of(name) if base is None else base
        options = self.options_of(name) if options is None else options
        model_key = source if control is None else (source, control)
        keys: list[tuple] = [
            (model_key, name if changes else None, strength if changes else 0.0, options, image)
            for image in image_settings
        ]
        stamp = (
            self._cached_runs[changes.name][0]
            if changes and changes.name in self._cached_runs
            else 0.0
        )
        with self._lock:
            keys = [(*key, stamp) for key in keys] if changes else keys
            model = self.model(source, control)
            missing_rows = [i for i, key in enumerate(keys) if key not in self._images]
            if missing_rows:
                model.configure({**self._base_options[model_key], **dict(options)})
                with _apply_change(model, changes, strength):
                    new_images = self._sample(
                        model, [image_settings[i] for i in missing_rows], tell
                    )
                for i, image in zip(missing_rows, new_images, strict=True):
                    self._images[keys[i]] = image
            images = torch.stack([self._images[key] for key in keys])
            for key in keys:
                self._images.move_to_end(key)
            while (
                len(self._images) > 1
                and sum(p.numel() for p in self._images.values()) > IMAGE_CACHE_BYTES
            ):
                self._images.popitem(last=False)
        return images

    def _sample(
        self, model: Any, image_settings: Sequence[ImageSettings], tell: StepProgress | None
    ) -> Any:
        """Generate images with the same sampler settings in one batch."""

        def report(steps_done: int) -> None:
            if self._stop.is_set():
                self._stop.clear()
                raise Interrupted("stopped; the settings are as they were")
            if tell:
                tell(steps_done, image_settings[0].steps)

        return model.sample(
            [image.prompt for image in image_settings],
            seeds=[image.seed for image in image_settings],
            steps=image_settings[0].steps,
            guidance=image_settings[0].guidance,
            progress=report,
        )

    def stop(self) -> None:
        """Stop the current generation of images."""
        self._stop.set()

    def start(self) -> None:
        """Begin a new comparison, which a `stop` from before does not end."""
        self._stop.clear()

    def drop(self, name: str) -> None:
        """Remove a run's tensors and images from memory, and its base if no other run needs it.

        The base's controls go with it. The run's folder is not changed. Raises UserError if there
        is no such run.
        """
        base = self.base_of(name)
        with self._lock:
            self._cached_runs.pop(name, None)
            self.dropped.add(name)
            for key in [key for key in self._images if key[1] == name]:
                del self._images[key]
            if base != BUNDLED and all(self.base_of(other) != base for other in self._cached_runs):
                model_keys: list[ModelKey] = [base, *((base, control) for control in self.controls)]
                for model_key in model_keys:
                    self._bases.pop(model_key, None)
                    self._base_options.pop(model_key, None)
                for key in [key for key in self._images if key[0] in model_keys]:
                    del self._images[key]

    def memory_use(self) -> dict[str, int]:
        """Count the bases, runs and images in memory."""
        with self._lock:
            return {
                "bases": len(self._bases),
                "runs": len(self._cached_runs),
                "images": len(self._images),
            }


@contextmanager
def _apply_change(model: Any, change: WeightChange | None, strength: float) -> Iterator[None]:
    """Apply a change at some strength inside the context, once to a tensor with several names.

    Afterwards all tensors have their original values, bit for bit.
    """
    import torch

    originals: dict[int, tuple[Any, Any]] = {}  # by the id of the tensor
    try:
        with torch.no_grad():
            for part, tensors in (change.parts if change else {}).items():
                if part not in model.parts:
                    raise UserError(
                        f"the run {change.name} changes a part that {change.base} does "  # type: ignore[union-attr]
                        f"not have ({quote(part, 40)})"
                    )
                state = model.parts[part].state_dict(keep_vars=True)
                for name, value in tensors.items():
                    if name not in state or state[name].shape != value.shape:
                        raise UserError(f"the run {change.name} does not fit {change.base}: {name}")  # type: ignore[union-attr]
                    if id(state[name]) in originals:
                        continue
                    originals[id(state[name])] = state[name], state[name].clone()
                    new = value.to(state[name])
                    state[name].copy_(
                        new if strength == 1 else state[name] + strength * (new - state[name])
                    )
        yield
    finally:
        with torch.no_grad():
            for tensor, original in originals.values():
                tensor.copy_(original)


def _shortest_names(files: Sequence[str]) -> dict[str, Path]:
    """Name paths by their shortest distinct endings, each path once."""
    if not files:
        return {}  # avoid the import below, which takes seconds
    from concept_eraser.reporting.run_results import names_of

    paths = list({Path(path).resolve(): Path(path) for path in files}.values())
    return dict(zip(names_of(paths), paths, strict=True))


def _is_file(path: Path) -> bool:
    """Whether a path is a regular file. False also for circular links and without permission."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _stamp(path: Path) -> float:
    """Return the modification time of a file, or 0 if there is none."""
    try:
        return path.stat().st_mtime
    except (OSError, ValueError):
        return 0.0


def _newest_weights(path: Path) -> float:
    """Return the modification time of another eraser's file, or the newest one in its folder."""
    files = path.rglob("*.safetensors") if path.is_dir() else [path]
    return max(map(_stamp, files), default=0.0)


def _size(change: WeightChange) -> int:
    """Return the size of a run's tensors in bytes."""
    return sum(tensor.nbytes for tensors in change.parts.values() for tensor in tensors.values())


def recipe_in(folder: Path) -> Recipe | None:
    """Return the recipe of a run folder, or None if this version cannot read one."""
    path = folder / "recipe.yaml"
    return _recipe(folder, _stamp(path)) if _is_file(path) else None


_RECIPES: dict[Path, tuple[float, Recipe | None]] = {}


def _recipe(folder: Path, stamp: float) -> Recipe | None:
    """Read a recipe with a cache, because the page needs it every second."""
    cache_entry = _RECIPES.get(folder)
    if cache_entry is None or cache_entry[0] != stamp:
        cache_entry = _RECIPES[folder] = (stamp, presets.read_recipe(folder))
    return cache_entry[1]
