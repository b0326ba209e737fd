"""The models behind the page: each base once, of an erased one only the tensors that changed, and
what was drawn lately.

A strength s draws with `original + s * (erased - original)`. At 0 nothing is touched and at 1 the
erased values are taken as they are, so that both ends are bit-equal to the models themselves. (A
LoRA merged into its base is such a difference too, so the slider is its scale.)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concept_eraser.demo import presets, safety
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.storage.readers import read_tensor_header, read_tensors
from concept_eraser.utils.errors import Interrupted, UserError, quote, unknown

DRAWN = ("denoiser", "text_encoder")  # targets whose runs draw images
REMEMBERED = 128 * 2**20  # bytes of images
BASES = 3  # models that are kept, the bundled one among them
CHANGED = 4 * 2**30  # bytes of the runs' tensors that are kept, those that were drawn last
BUNDLED = "tiny-sd"
Options = tuple[tuple[str, float], ...]  # of a model's family, by name
Tell = Callable[[int, int], None]  # sampler steps done, of how many


@dataclass(frozen=True)
class Erased:
    """What a run changed: part of the pipeline -> tensor by name, and the model it started from."""

    name: str
    base: str
    parts: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Look:
    """One image's settings but for its model: prompt, seed, sampler."""

    prompt: str
    seed: int
    steps: int
    guidance: float


class Library:
    """Runs by name (those of the runs folder and those given), and their images. Every method may
    be called by several threads; one draws at a time."""

    def __init__(
        self, runs: Path, run_paths: Sequence[str] = (), before: str | None = None
    ) -> None:
        """given: run folders, or what another eraser published, to be put on `before`. Raises
        UserError where one is neither.
        """
        self.runs, self.before = runs, before
        self._run_paths = _shortest_names(run_paths)
        self._bases: OrderedDict[str, Any] = OrderedDict()
        # a base's family options, as they were when it was loaded
        self._plain: dict[str, dict[str, Any]] = {}
        self._cached_runs: OrderedDict[str, tuple[float, Erased]] = OrderedDict()
        self._images: OrderedDict[tuple, Any] = OrderedDict()
        self._lock, self._stop = threading.RLock(), threading.Event()
        self.dropped: set[str] = set()
        for name, path in self._run_paths.items():
            if not (path / "recipe.yaml").is_file() and (before is None or not path.exists()):
                raise UserError(
                    f"{name}: {path} is no run folder (it has no recipe.yaml); of "
                    "another eraser's file or folder say with --before what it was made "
                    "from"
                )

    def folders(self) -> dict[str, Path]:
        """Run folders by name, finished or not, the newest first; those given on the command line
        lead.

        What a symbolic link leads to outside of the runs folder is no run of it, and is left out.
        """
        inside = []
        for path in self.runs.iterdir() if self.runs.is_dir() else ():
            recipe = path / "recipe.yaml"
            # few are, and to follow links takes time
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
        """The folder of a run by its name. Raises UserError for any other text: no path is ever
        made of it.
        """
        folders = self.folders()
        if name not in folders:
            raise unknown("run", str(name)[:80], folders)
        return folders[name]

    def finished_runs(self, targets: Sequence[str] = DRAWN) -> list[str]:
        """Names of the runs that are done and whose target is one of these."""
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
        """The recipe of a run; None where it has none that this version reads."""
        return recipe_in(self.folder(name))

    def base_of(self, name: str | None) -> str:
        """What a run started from: a model's name or folder."""
        recipe = self.recipe(name) if name else None
        return recipe.model if recipe else (self.before if name and self.before else BUNDLED)

    def bases_of(self, names: Sequence[str]) -> list[str]:
        """What several runs started from, each once."""
        folders = self.folders()
        recipes = [recipe_in(folders[name]) for name in names if name in folders]
        return list(
            dict.fromkeys(
                recipe.model if recipe else (self.before or BUNDLED) for recipe in recipes
            )
        )

    def options_of(self, name: str | None) -> Options:
        """What a run's recipe sets of the family's options."""
        recipe = self.recipe(name) if name else None
        return tuple(sorted(recipe.model_options.items())) if recipe else ()

    def model(self, source: str) -> Any:
        """A base, loaded once; of several the last BASES are kept. Raises UserError where its name
        is code.
        """
        if safety.names_code(source):
            raise UserError(
                f"{quote(source, 80)} names code, and the page runs no code that a recipe names"
            )
        with self._lock:
            if source not in self._bases:
                others = [name for name in self._bases if name != BUNDLED]
                for name in others[: max(0, len(self._bases) + 1 - BASES)]:
                    del self._bases[name], self._plain[name]
                from concept_eraser import api
                from concept_eraser.models.base import onto_gpu

                self._bases[source] = api.load(source)
                self._plain[source] = self._bases[source].configured()
                onto_gpu(self._bases[source])
            self._bases.move_to_end(source)
            return self._bases[source]

    def load_change(self, name: str) -> Erased:
        """What a run changed; read again only where its file is another. Raises UserError for runs
        that draw nothing.
        """
        if name not in self.finished_runs():
            raise unknown("finished run", str(name)[:80], self.finished_runs())
        folder = self.folder(name)
        weights = folder / "weights.safetensors"
        if (recipe := self.recipe(name)) is not None:
            safety.require_no_code(recipe)
        stamp = _stamp(weights)
        with self._lock:
            cache_entry = self._cached_runs.get(name)
            if cache_entry is None or cache_entry[0] != stamp:
                cache_entry = self._cached_runs[name] = (stamp, self._read(name, folder))
            self._cached_runs.move_to_end(name)
            while (
                len(self._cached_runs) > 1
                and sum(_size(one) for _, one in self._cached_runs.values()) > CHANGED
            ):
                self._cached_runs.popitem(last=False)
            return cache_entry[1]

    def _read(self, name: str, folder: Path) -> Erased:
        base, weights = self.base_of(name), folder / "weights.safetensors"
        if not _is_file(weights):
            return Erased(name, base, self._difference(folder, base))
        part_name = read_tensor_header(weights)[0].get("part", "unet")
        part = {"unet": "denoiser", "transformer": "denoiser"}.get(part_name, part_name)
        return Erased(name, base, {part: read_tensors(weights)})

    def _difference(self, path: Path, base: str) -> dict[str, dict[str, Any]]:
        """The tensors of somebody else's model that are not its base's."""
        from concept_eraser.models import loading

        whole, tensors, model = loading.load(str(path), base=base), {}, self.model(base)
        for part in model.parts:
            before, after = (
                m.parts[part].state_dict() if part in m.parts else {} for m in (model, whole)
            )
            if before.keys() != after.keys() or any(
                before[k].shape != after[k].shape for k in before
            ):
                raise UserError(
                    f"{path} is of another architecture than {base}; say with --before "
                    "what it was made from"
                )
            tensors[part] = {
                k: v.cpu() for k, v in after.items() if not v.equal(before[k].to(v.device))
            }
        return tensors

    def draw(
        self,
        name: str | None,
        looks: Sequence[Look],
        strength: float = 1.0,
        tell: Tell | None = None,
        base: str | None = None,
        options: Options | None = None,
    ) -> Any:
        """[n, h, w, 3] uint8 images by a run at some strength, or (name None, or strength 0) by
        its base. options: of the family; default: as the run's recipe says.

        Raises Interrupted where `stop` was called meanwhile."""
        import torch

        changes = self.load_change(name) if name is not None and strength > 0 else None
        source = self.base_of(name) if base is None else base
        options = self.options_of(name) if options is None else options
        keys: list[tuple] = [
            (source, name if changes else None, strength if changes else 0.0, options, look)
            for look in looks
        ]
        stamp = (
            self._cached_runs[changes.name][0]
            if changes and changes.name in self._cached_runs
            else 0.0
        )
        with self._lock:
            keys = [(*key, stamp) for key in keys] if changes else keys
            model = self.model(source)
            missing_rows = [i for i, key in enumerate(keys) if key not in self._images]
            if missing_rows:
                model.configure({**self._plain[source], **dict(options)})
                with _wearing(model, changes, strength):
                    new_images = self._sample(model, [looks[i] for i in missing_rows], tell)
                for i, image in zip(missing_rows, new_images, strict=True):
                    self._images[keys[i]] = image
            images = torch.stack([self._images[key] for key in keys])
            for key in keys:
                self._images.move_to_end(key)
            while (
                len(self._images) > 1 and sum(p.numel() for p in self._images.values()) > REMEMBERED
            ):
                self._images.popitem(last=False)
        return images

    def _sample(self, model: Any, looks: Sequence[Look], tell: Tell | None) -> Any:
        """Images of the same sampler, all at once."""

        def report(steps_done: int) -> None:
            if self._stop.is_set():
                raise Interrupted("stopped; the settings are as they were")
            if tell:
                tell(steps_done, looks[0].steps)

        self._stop.clear()
        return model.sample(
            [look.prompt for look in looks],
            seeds=[look.seed for look in looks],
            steps=looks[0].steps,
            guidance=looks[0].guidance,
            progress=report,
        )

    def stop(self) -> None:
        """End the drawing that is going on."""
        self._stop.set()

    def drop(self, name: str) -> None:
        """Forget a run's tensors and images, and its base where no other run needs it. Its folder
        stays.

        Raises UserError where there is no such run."""
        base = self.base_of(name)
        with self._lock:
            self._cached_runs.pop(name, None)
            self.dropped.add(name)
            for key in [key for key in self._images if key[1] == name]:
                del self._images[key]
            if base != BUNDLED and all(self.base_of(other) != base for other in self._cached_runs):
                self._bases.pop(base, None)
                self._plain.pop(base, None)
                for key in [key for key in self._images if key[0] == base]:
                    del self._images[key]

    def memory_use(self) -> dict[str, int]:
        """What is in memory: bases, runs, images."""
        with self._lock:
            return {
                "bases": len(self._bases),
                "runs": len(self._cached_runs),
                "images": len(self._images),
            }


@contextmanager
def _wearing(model: Any, change: Erased | None, strength: float) -> Iterator[None]:
    """Inside, the changed tensors have this strength; afterwards they are bit for bit what they
    were.
    """
    import torch

    originals: list[tuple[Any, Any]] = []
    try:
        with torch.no_grad():
            for part, tensors in (change.parts if change else {}).items():
                if part not in model.parts:
                    raise UserError(
                        f"the run {change.name} changes a part that {change.base} does "  # type: ignore[union-attr]
                        f"not have ({quote(part, 40)})"
                    )
                state = model.parts[part].state_dict()
                for name, value in tensors.items():
                    if name not in state or state[name].shape != value.shape:
                        raise UserError(f"the run {change.name} does not fit {change.base}: {name}")  # type: ignore[union-attr]
                    originals.append((state[name], state[name].clone()))
                    new = value.to(state[name])
                    state[name].copy_(
                        new if strength == 1 else state[name] + strength * (new - state[name])
                    )
        yield
    finally:
        with torch.no_grad():
            for tensor, original in originals:
                tensor.copy_(original)


def _shortest_names(files: Sequence[str]) -> dict[str, Path]:
    """Paths by the shortest ends that tell them apart, each once."""
    if not files:
        return {}  # the import below takes seconds, which the page's opening need not wait for
    from concept_eraser.reporting.run_results import names_of

    paths = list({Path(path).resolve(): Path(path) for path in files}.values())
    return dict(zip(names_of(paths), paths, strict=True))


def _is_file(path: Path) -> bool:
    """Whether there is a regular file; False also where its links lead in a circle or this user may
    not look.
    """
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _stamp(path: Path) -> float:
    """When a file was changed; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except (OSError, ValueError):
        return 0.0


def _size(change: Erased) -> int:
    """Bytes of a run's tensors."""
    return sum(tensor.nbytes for tensors in change.parts.values() for tensor in tensors.values())


def recipe_in(folder: Path) -> Recipe | None:
    """The recipe of a run folder; None where it has none that this version reads."""
    path = folder / "recipe.yaml"
    return _recipe(folder, _stamp(path)) if _is_file(path) else None


_READ: dict[Path, tuple[float, Recipe | None]] = {}


def _recipe(folder: Path, stamp: float) -> Recipe | None:
    """A recipe, read again only where its file changed: the page asks every second."""
    cache_entry = _READ.get(folder)
    if cache_entry is None or cache_entry[0] != stamp:
        cache_entry = _READ[folder] = (stamp, presets.read_recipe(folder))
    return cache_entry[1]
