"""From a name, folder, hub id or object in memory to a `Model`, refusing what cannot be loaded safely."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from concept_eraser import registry, resources
from concept_eraser.errors import UserError, unknown
from concept_eraser.models.base import Model

BUNDLED = {"tiny-sd": "the bundled world of ten shapes, 64x64, trained from scratch for this package"}
_PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
_FAMILIES = {"StableDiffusionPipeline": "sd"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load(source: Any, *, allow_pickle: bool = False) -> Model:
    """Load a model.

    source: "tiny-sd", a diffusers folder, a run folder of ours, a hub id ("owner/name"), a diffusers pipeline
        object, or a Model (returned as it is).
    allow_pickle: also load weights stored as pickles, which can execute code; off by default.

    Raises UserError where the source is unknown, incomplete, damaged or of an unsupported kind.
    """
    if isinstance(source, Model):
        return source
    if not isinstance(source, str | Path):
        return _from_object(source)
    name = str(source)
    if name in BUNDLED:
        return _from_folder(resources.tiny_weights() / name, name, allow_pickle)
    path = Path(name)
    if path.is_dir():
        return _from_folder(path / "pipeline" if (path / "pipeline").is_dir() else path, name, allow_pickle)
    if path.is_file() or path.suffix in (*_PICKLES, ".safetensors"):
        raise UserError(_single_file_problem(path))
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, allow_pickle)
    raise unknown("model", name, BUNDLED, hint="a diffusers folder, a run folder or a hub id (owner/name) works too")


def _family(class_name: str, name: str) -> Any:
    if class_name not in _FAMILIES:
        raise UserError(f"{name} is a {class_name}, which is not supported; supported: {', '.join(_FAMILIES)}")
    return registry.load("model", _FAMILIES[class_name])


def _from_object(pipeline: Any) -> Model:
    return _family(type(pipeline).__name__, "the given object")(pipeline, f"a {type(pipeline).__name__} in memory")


def _single_file_problem(path: Path) -> str:
    if not path.exists():
        return f"no such model: {path}"
    if path.suffix == ".safetensors":
        return f"{path}: single-file checkpoints are not read yet; convert it to a diffusers folder with StableDiffusionPipeline.from_single_file(...).save_pretrained(...)"  # fmt: skip
    return (
        f"{path} is a pickle, which can execute code when loaded; convert it to a diffusers folder of safetensors first"
    )


def _from_folder(folder: Path, name: str, allow_pickle: bool) -> Model:
    index = folder / "model_index.json"
    if not index.is_file():
        raise UserError(f"{name} is no diffusers pipeline: it has no model_index.json (found: {', '.join(sorted(p.name for p in folder.iterdir())[:6]) or 'nothing'})")  # fmt: skip
    try:
        content = json.loads(index.read_text())
        family = _family(content["_class_name"], name)
    except (json.JSONDecodeError, KeyError, UnicodeDecodeError):
        raise UserError(f"{index} is damaged; copy the checkpoint again") from None
    for part in ("unet", "vae", "text_encoder"):
        _check_weights(folder / part, allow_pickle)
    return _guarded(family, str(folder), name, {"use_safetensors": None if allow_pickle else True})


def _check_weights(folder: Path, allow_pickle: bool) -> None:
    """Every part must have whole safetensors files; a pickle is refused before anything opens it."""
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        raise UserError(f"{folder.parent} is incomplete: it has no {folder.name}/ folder")
    tensors = sorted(folder.glob("*.safetensors"))
    pickles = [p for p in folder.iterdir() if p.suffix in _PICKLES]
    if not tensors and pickles and not allow_pickle:
        raise UserError(f"{pickles[0]} is a pickle, which can execute code when loaded; convert it to safetensors, or pass --allow-pickle (allow_pickle=True) if you trust its author")  # fmt: skip
    if not tensors and not pickles:
        raise UserError(f"{folder} holds no weights (*.safetensors)")
    for path in tensors:
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged or truncated ({error}); copy the checkpoint again") from None


def _from_hub(name: str, allow_pickle: bool) -> Model:
    return _guarded(registry.load("model", "sd"), name, name, {"use_safetensors": None if allow_pickle else True})


def _guarded(family: Any, location: str, name: str, options: dict) -> Model:
    try:
        return family.from_folder(location, source=name, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0][:300]
        if not Path(location).exists():
            reason += ". If this machine has no network, give a local folder, or set HF_HOME to a cache that holds it"
        raise UserError(f"cannot load {name}: {reason}") from error
