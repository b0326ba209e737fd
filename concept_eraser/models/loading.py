"""Load a `Model` from a name, folder, hub id or object in memory. Unsafe files are refused."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from concept_eraser import registry
from concept_eraser.models import folder_check, hub, overlay, run_base, single_file
from concept_eraser.models.base import Loaded, Model
from concept_eraser.models.completeness import (
    Incomplete,
    require_all_weights,
    require_vocabulary,
)
from concept_eraser.models.module import CONFIG, Module, open_folder
from concept_eraser.models.stored_parts import weight_files
from concept_eraser.storage.base_model import (
    BUNDLED,
    BUNDLED_MODELS,
    CONTROLS,
    LEFT_OUT,
    LONGEST_CHAIN,
)
from concept_eraser.storage.manifest import require_intact
from concept_eraser.storage.readers import read_tensor_header, read_text
from concept_eraser.utils import resources
from concept_eraser.utils.commands import erase_command, shell_command
from concept_eraser.utils.errors import UserError, first_line, quote, unknown
from concept_eraser.utils.heap import own_pages
from concept_eraser.utils.path_redaction import FILE_ON

FAMILIES = {
    "StableDiffusionPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
    "DiTPipeline": "dit",
    "PixArtAlphaPipeline": "pixart",
    "PixArtSigmaPipeline": "pixart",
    "SanaPipeline": "sana",
    "ZImagePipeline": "zimage",
    "QwenImagePipeline": "qwenimage",
    "Flux2KleinPipeline": "flux2",
}
_CODE = re.compile(r"[^\d\W]\w*(\.[^\d\W]\w*)*:[^\d\W]\w*")  # package.module:function
# a file of another precision, e.g. model.fp16.safetensors or model.fp16-00001-of-00002.safetensors
_VARIANT = re.compile(r"^[^.]+\.([^.]+?)(?:-\d+-of-\d+)?\.safetensors$")
# the first letters of the parts of a pipeline whose weights are loaded
_WEIGHED = ("unet", "transformer", "vae", "text_encoder")


def on_base(file: Any, base: Any) -> str:
    """Return the name FILE@BASE of a checkpoint or part of a pipeline, and of its base.

    Raises UserError if there is no such file, or the base has no name.
    """
    if not isinstance(file, str | Path) or Path(file).suffix != ".safetensors":
        raise UserError(
            "a base belongs to a model that is one .safetensors file, found the model "
            f"{file if isinstance(file, str | Path) else type(file).__name__}; leave it "
            "out"
        )
    if not isinstance(base, str | Path):
        raise UserError(
            f"a base is a diffusers folder or a hub id, found a {type(base).__name__}; "
            "for one in memory give model=concept_eraser.load(FILE, base=...)"
        )
    if not Path(file).is_file():
        raise UserError(f"no such model: {file}")
    return f"{file}@{base}"


class EndlessChain(UserError):
    """Runs without a pipeline name each other as their original."""


def load_part(
    source: Any, target: str, *, allow_pickle: bool = False, allow_code: bool = False
) -> Loaded:
    """Load the model for a job with some target.

    A denoiser or text encoder: see `load`. A classifier, VAE or CLIP model: a torch module in
    memory (for CLIP also the pair of a transformers CLIPModel and its tokenizer), the folder of a
    saved one, a run folder, "tiny-sd" (its VAE or its small CLIP), or "package.module:function",
    which is called without arguments and makes the module.

    allow_code: also import and call "package.module:function". It runs code, so it is only for
    names that the user has given, never for those of a recipe or a run folder.

    Raises UserError if the source is unknown, incomplete, damaged or of an unsupported kind.
    """
    if isinstance(source, Loaded):
        return source
    if target in ("denoiser", "text_encoder"):
        return load(source, allow_pickle=allow_pickle)
    if target == "clip":
        return _clip(source)
    if type(source).__name__ in FAMILIES:
        return load(source)  # a pipeline, which has the VAE as a part
    if isinstance(source, nn.Module):
        return Module(source, target, f"a {type(source).__name__} in memory")
    if names_code(source):
        if not allow_code:
            raise UserError(
                f"the model {quote(source)} names Python code, which is not run for a "
                "recipe or a run folder: they may be a stranger's. If you trust it, "
                "pass --allow-code (allow_code=True), or name the model yourself with "
                "--model"
            )
        return Module(_made_by(source), target, source)
    if not isinstance(source, str | Path):
        raise UserError(
            f"a {type(source).__name__} cannot be trained as a {target}; give a torch "
            "module, or the folder of a saved one"
        )
    path = Path(source)
    for folder in (path / resources.whole_model("module"), path):
        if (folder / CONFIG).is_file():
            require_intact(folder)
            return (
                _autoencoder(folder)
                if target == "vae" and "_class_name" in read_text(folder / CONFIG)
                else open_folder(folder, target)
            )
    if target == "vae":
        return load(source, allow_pickle=allow_pickle)
    raise UserError(
        f"no such {target}: {source!r}; give the folder of a saved one, a run folder, "
        "package.module:function, or in Python the module itself"
    )


def names_code(source: Any) -> bool:
    """Whether a model is named as "package.module:function", which is code."""
    return (
        isinstance(source, str)
        and _CODE.fullmatch(source) is not None
        and not Path(source).exists()
    )


def _made_by(source: str) -> nn.Module:
    """Return the module that a named function makes."""
    name, _, attribute = source.rpartition(":")
    if str(Path.cwd()) not in sys.path:  # `python -m` does this, the console script does not
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = getattr(importlib.import_module(name), attribute)()
    except Exception as error:  # the code may raise anything
        raise UserError(f"cannot call {source} without arguments: {first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"{source} returned a {type(module).__name__}, not a torch module")
    return module


def _autoencoder(folder: Path) -> Module:
    """Load a folder of diffusers' AutoencoderKL."""
    folder_check.check_part(folder)
    from diffusers import AutoencoderKL

    try:
        module = AutoencoderKL.from_pretrained(folder, use_safetensors=True)
    except Exception as error:  # wrong types in a configuration cause any type of error
        raise UserError(f"cannot load the VAE {folder}: {first_line(error)}") from error
    require_all_weights(module, folder)
    return Module(module, "vae", str(folder))


def _clip(source: Any) -> Loaded:
    family: Any = registry.load("model", "clip")
    if isinstance(source, tuple) and len(source) == 2:
        return family.from_object(*source)
    if isinstance(source, nn.Module):
        return family.from_object(source)
    if not isinstance(source, str | Path):
        raise UserError(
            f"a {type(source).__name__} is no CLIP model; give (CLIPModel, tokenizer) or "
            "an open_clip model"
        )
    if str(source) == BUNDLED:
        return _bundled_clip(family, str(source))
    path = Path(source)
    for folder in (path / resources.whole_model("clip"), path):
        if (folder / CONFIG).is_file():
            require_intact(folder)
            return family.from_folder(folder, str(source))
    raise UserError(
        f"no such CLIP model: {source!r}; give a folder that CLIPModel.save_pretrained "
        "wrote, a run folder, 'tiny-sd', or in Python (model, tokenizer) or an "
        "open_clip model"
    )


def _bundled_clip(family: Any, name: str) -> Loaded:
    """Return the small bundled CLIP, whose text tower is the pipeline's text encoder."""
    from transformers import CLIPTokenizer

    from concept_eraser.models.families.clip import load_bundled_clip

    weights = resources.tiny_weights()
    tokenizer = CLIPTokenizer.from_pretrained(weights / name / "tokenizer")
    clip = family.from_object(load_bundled_clip(weights), tokenizer, name)
    clip.mean = clip.std = (0.5, 0.5, 0.5)
    clip.preprocessing = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return clip


def load(
    source: Any,
    *,
    allow_pickle: bool = False,
    base: Any = None,
    token: str | None = None,
    chain: int = 0,
) -> Model:
    """Load a text-to-image model.

    Args:
        source: "tiny-sd", a bundled control (`BUNDLED_MODELS`), a diffusers folder, a run folder, a
            hub id ("owner/name", "owner/name@revision"), a diffusers pipeline object, or a Model
            (returned as it is). It can also be a part of a pipeline that another eraser made: a
            LoRA, a state dict or folder of the denoiser or the text encoder (see overlay.py).
            FILE.safetensors@BASE is one of these or a single-file checkpoint with its base.
        allow_pickle: also load weights stored as pickles, which can execute code; off by default.
        base: for a part, the model it was made for, which does not change. For a single-file
            checkpoint (.safetensors in the original layout), the diffusers folder of its
            architecture. For a run folder without a pipeline, another place of its original. Not
            used otherwise.
        token: for the hub; default $HF_TOKEN or the token of `hf auth login`.
        chain: how many runs were erased from this one, for a run whose original is a run.

    Raises:
        UserError: the source is unknown, incomplete, damaged or of an unsupported kind.
    """
    if isinstance(source, Model):
        return source
    if not isinstance(source, str | Path):
        return _from_object(source)
    name = str(source)
    if name == BUNDLED:
        return _from_folder(resources.tiny_weights() / name, name, allow_pickle)
    if name in CONTROLS:
        return _bundled_control(name)
    path = Path(name)
    try:
        (path / "pipeline").exists()
    except OSError as error:  # a name that the system does not allow
        raise UserError(
            f"cannot load {quote(name)}: {str(error.strerror).lower()}; check the name"
        ) from None
    if not run_base.is_rebuilt(path):  # of such a run only the change is read, and checked then
        require_intact(path / "pipeline" if (path / "pipeline").is_dir() else path)
    file, at, beside = name.partition(FILE_ON)
    if at and not path.exists():
        if not Path(file + FILE_ON[:-1]).is_file():
            raise UserError(f"no such model: {file}{FILE_ON[:-1]}")
        return _part(Path(file + FILE_ON[:-1]), beside, allow_pickle, token)
    if path.is_dir() and (path / "pipeline").is_dir():
        return _from_run(path, allow_pickle)
    if run_base.is_rebuilt(path):
        return _rebuilt(path, base, allow_pickle=allow_pickle, token=token, chain=chain)
    if overlay.is_overlay(path):
        return _part(path, base, allow_pickle, token)
    if path.is_dir():
        return _from_folder(path, name, allow_pickle)
    if path.suffix in (*overlay.PICKLES, ".safetensors"):
        raise UserError(f"no such model: {path}; check the path")
    if path.is_file():
        raise UserError(
            f"{path} is no model; give a .safetensors file, a diffusers folder, a run "
            "folder or a hub id"
        )
    if hub.is_id(name):
        return _from_hub(name, allow_pickle, token)
    hint = "a diffusers folder, a run folder or a hub id (owner/name) works too"
    if "/" in name:
        hint = "there is no such folder or file; check the path"
    raise unknown("model", name, BUNDLED_MODELS, hint=hint)


def _bundled_control(name: str) -> Model:
    """Return the bundled model with the UNet of a control.

    Raises UserError where the package was installed without it.
    """
    folder = resources.tiny_control(name)
    if not folder.is_dir():
        raise UserError(
            f"{name} is not part of the installed package; take it from the repository, or train "
            f"it: python -m concept_eraser.tiny.build --without {LEFT_OUT[name]}"
        )
    model = load(BUNDLED)
    overlay.put_on(model, folder / "unet")
    model.source = name
    return model


def original_of(source: Any, original: Any, *, allow_pickle: bool = False) -> Model | None:
    """Load the original of a run that wrote no pipeline, so that it is read from the disk once.

    Give the result to `load` as the base of the run.

    Args:
        source: the run.
        original: where its original is.
        allow_pickle: as in `load`.

    Returns:
        The original. None if the source is no such run, or if its original cannot be loaded: `load`
        of the run then names the reason.
    """
    if original is None or not isinstance(source, str | Path):
        return None
    try:
        if not run_base.is_rebuilt(Path(source)):
            return None
        return load(original, allow_pickle=allow_pickle)
    except (UserError, OSError):
        return None


def outline(name: str) -> Model | None:
    """Return a model without its weights: names, shapes and configurations.

    Args:
        name: the name of a model, as in `load`.

    Returns:
        The model with all parts on the meta device. None if it is in no diffusers folder, or if its
        configurations cannot be read: `load` then names the reason.
    """
    try:
        return _outline(Path(_configuration(name, None)), name)
    except Exception:  # a damaged configuration causes any type of error
        return None


def outline_of_files(name: str) -> Model | None:
    """Return a model without its weights, after the checks that `load` makes of their files.

    Of the weights only the headers are read: names, shapes and precisions. Files that a manifest
    lists are also compared with it.

    Args:
        name: a diffusers folder.

    Returns:
        The model as `outline` returns it, with the precision of its checkpoint. None if the name is
        no such folder, or if a check fails: `load` then names the reason.
    """
    if name in BUNDLED_MODELS:
        return None  # not a folder of that name
    folder = Path(name)
    try:
        require_intact(folder)
        content = folder_check.check_pipeline(folder)
        _check_parts(folder, content, allow_pickle=False)
        model = _outline(folder, name)
        _require_weights(model, folder, content)
    except Exception:  # a damaged configuration causes any type of error
        return None
    model.remember_files(folder)
    return model


def _outline(folder: Path, name: str) -> Any:
    content = folder_check.check_pipeline(folder)
    return _family(content["_class_name"], name).outline(folder, source=name)


def beside(source: str | Path, original: Model) -> Model | None:
    """Load a run that wrote no pipeline, beside its original.

    Both models share the tensors that the run did not change, so neither may be trained.

    Args:
        source: the run, of which `run_base.is_rebuilt` is true.
        original: a model from `original_of`.

    Returns:
        The erased model. None if `original` has other weights than the run's original.

    Raises:
        UserError: the run's tensors are damaged or do not fit the model.
    """
    path = Path(source)
    record = run_base.read(path)
    if record is None or record.differences(original):
        return None
    tensors = [
        tensor
        for part in original.parts.values()
        for tensor in (*part.parameters(), *part.buffers())
    ]
    model = _copy(original, tensors)
    run_base.apply(path, model, is_shared=True)
    model.source = str(path)
    return model


def _copy(model: Model, shared: Sequence[Any] = ()) -> Model:
    """Copy a model, without its tokenizers, which nothing changes, and without `shared` objects."""
    components = getattr(getattr(model, "pipeline", None), "components", {})
    tokenizers = [part for name, part in components.items() if name.startswith("tokenizer")]
    return copy.deepcopy(model, {id(one): one for one in (*tokenizers, *shared)})


def _from_run(path: Path, allow_pickle: bool) -> Model:
    """Load the pipeline of a run folder.

    If its files are in half precision, the trained tensors are read from the run's own file, which
    has all bits of the training.
    """
    model: Any = _from_folder(path / "pipeline", str(path), allow_pickle)
    is_rounded = any(part.usual != torch.float32 for part in model.stored.values())
    if is_rounded and (path / run_base.WEIGHTS).is_file() and (path / "recipe.yaml").is_file():
        run_base.apply_changed_tensors(path, model)
    return model


def _rebuilt(path: Path, base: Any, *, allow_pickle: bool, token: str | None, chain: int) -> Model:
    """Make the erased model of a run that wrote no pipeline, from its original and its change.

    base: another place of the original. It is used if it has the original's weights.

    Raises UserError if the original is not there, or has other weights by now.
    """
    record = run_base.read(path)
    assert record is not None  # is_rebuilt has checked it
    if chain >= LONGEST_CHAIN:
        raise EndlessChain(
            f"{path} holds only its change, and so do the {chain} runs before it, each made from "
            "another; write one of them as a pipeline with: concept-eraser export RUN --to "
            "diffusers"
        )
    if base is not None and str(base) != record.model:
        model = load(base, allow_pickle=allow_pickle, token=token, chain=chain + 1)
        if not record.differences(model):
            # the caller's own does not change
            model = model if isinstance(base, str | Path) else _copy(model)
            return _with_change(path, model)
    try:
        model = load(record.model, allow_pickle=allow_pickle, token=token, chain=chain + 1)
    except EndlessChain:
        raise
    except UserError as error:
        raise UserError(
            f"{path} holds only its change of {quote(record.model)}, which cannot be loaded "
            f"({error}); give the original with --before (base=)"
        ) from None
    if parts := record.differences(model):
        raise run_base.other_base(path, record, model, parts)
    return _with_change(path, model)


def _with_change(path: Path, model: Model) -> Model:
    run_base.apply(path, model)
    model.source = str(path)
    return model


def _family(class_name: str, name: str) -> Any:
    if class_name not in FAMILIES:
        raise UserError(
            f"{name} is a {class_name}, which is not supported; supported: {', '.join(FAMILIES)}"
        )
    return registry.load("model", FAMILIES[class_name])


def _from_object(pipeline: Any) -> Model:
    return _family(type(pipeline).__name__, "the given object")(
        pipeline, f"a {type(pipeline).__name__} in memory"
    )


def _part(path: Path, base: Any, allow_pickle: bool, token: str | None) -> Model:
    """Load a part of a pipeline on its base, or a checkpoint in the original layout."""
    file_parts = overlay.parts_in(path) if path.is_file() else set()
    if base is None and file_parts:
        raise UserError(
            f"{path} is a single-file checkpoint: weights without configuration, "
            "scheduler and tokenizer; give a diffusers folder or hub id of the same "
            "architecture with --base (erase), --before (other commands) or base=, or "
            f"convert it once: {shell_command('export', path)} --before FOLDER --to diffusers"
        )
    if base is None:
        if path.is_file() and path.suffix == ".safetensors":
            read_tensor_header(path)  # a damaged file is no part of anything
        raise UserError(
            f"{path} is only a part of a pipeline (a LoRA, a denoiser or a text "
            "encoder); give the model it was made for with --before (erase: --base)"
        )
    in_memory = not isinstance(base, str | Path)
    if file_parts:
        if in_memory:
            pipeline = single_file.read_as(
                path, base if isinstance(base, Model) else _from_object(base), file_parts
            )
        else:
            pipeline = single_file.read(path, _configuration(str(base), token), file_parts)
        if pipeline is not None:
            model_of_file: Any = _from_object(pipeline)
            single_file.require_same_prediction(path, model_of_file)
            model_of_file.source = str(path)
            model_of_file.remember_file(path)
            return model_of_file
    model = load(base, allow_pickle=allow_pickle, token=token)
    model = _copy(model) if in_memory else model  # the caller's own does not change
    if file_parts:
        single_file.require_same_prediction(path, model)
    overlay.put_on(model, path, allow_pickle=allow_pickle)
    return model


def _configuration(name: str, token: str | None, chain: int = 0) -> str:
    """Return the diffusers folder of a model's name. Its reader checks it.

    Raises UserError if it is no diffusers folder.
    """
    if name in BUNDLED_MODELS:
        return str(resources.tiny_weights() / BUNDLED)
    for folder in (Path(name) / "pipeline", Path(name)):
        if (folder / "model_index.json").is_file():
            return str(folder)
    if chain < LONGEST_CHAIN and (record := run_base.read(Path(name))) is not None:
        return _configuration(record.model, token, chain + 1)
    if Path(name).exists() or not hub.is_id(name):
        raise UserError(
            f"{name} holds no configuration (model_index.json); give a diffusers folder "
            "of the checkpoint's architecture"
        )
    return str(hub.folder_of(name, token=token, weights=False))


def _from_folder(folder: Path, name: str, allow_pickle: bool) -> Model:
    index = folder / "model_index.json"
    if not index.is_file():
        if (folder / resources.RECIPE).is_file() and not (folder / "done.json").is_file():
            raise Incomplete(
                f"{name} is a run that is not finished, so it holds no model; continue with: "
                f"{erase_command(folder, '--resume')}"
            )
        raise Incomplete(
            f"{name} is no diffusers pipeline: it has no model_index.json (found: "
            f"{', '.join(sorted(p.name for p in folder.iterdir())[:6]) or 'nothing'})"
        )
    content = folder_check.check_pipeline(folder)
    family = _family(content["_class_name"], name)
    _check_parts(folder, content, allow_pickle=allow_pickle)
    model = _load_family(
        family, str(folder), name, {"use_safetensors": None if allow_pickle else True}
    )
    _require_weights(model, folder, content)
    return model


def _check_parts(folder: Path, content: Any, *, allow_pickle: bool) -> None:
    """Check that the files of a pipeline's weights are whole, and that tokenizers have words."""
    for part in folder_check.components(content):
        if part.startswith(_WEIGHED):
            _check_weights(folder / part, allow_pickle)
        elif part.startswith("tokenizer"):
            require_vocabulary(folder / part)


def _require_weights(model: Any, folder: Path, content: Any) -> None:
    """Raise UserError if a file lacks a weight of its part."""
    for part in folder_check.components(content):
        component = getattr(getattr(model, "pipeline", None), part, None)
        if part.startswith(_WEIGHED) and isinstance(component, nn.Module):
            require_all_weights(component, folder / part)


def _check_weights(folder: Path, allow_pickle: bool) -> None:
    """Check that every part has whole safetensors files.

    A pickle is refused before anything opens it.
    """
    from safetensors import SafetensorError, safe_open

    if not folder.is_dir():
        raise Incomplete(f"{folder.parent} is incomplete: it has no {folder.name}/ folder")
    tensors = sorted(folder.glob("*.safetensors"))
    pickles = [p for p in folder.iterdir() if p.suffix in overlay.PICKLES]
    if not tensors and pickles and not allow_pickle:
        raise UserError(
            f"{pickles[0]} is a pickle, which can execute code when loaded; convert it "
            "to safetensors, or pass --allow-pickle (allow_pickle=True) if you trust "
            "its author"
        )
    if not tensors and not pickles:
        raise Incomplete(f"{folder} holds no weights (*.safetensors)")
    variants = [found[1] for path in tensors if (found := _VARIANT.search(path.name))]
    if variants and not pickles and not weight_files(folder):
        raise UserError(
            f"{folder} holds its weights only as the variant {variants[0]!r} ({tensors[0].name}), "
            "which is not loaded; write the pipeline once without a variant, in Python: "
            f"diffusers.DiffusionPipeline.from_pretrained({str(folder.parent)!r}, "
            f"variant={variants[0]!r}).save_pretrained(FOLDER)"
        )
    for path in tensors:
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path} is damaged or truncated ({error}); copy the checkpoint again"
            ) from None


def _from_hub(name: str, allow_pickle: bool, token: str | None) -> Model:
    """Load a pipeline of the hub from its folder in the cache.

    Missing files are downloaded first if the hub answers.
    """
    folder = hub.folder_of(
        name,
        token=token,
        allow_pickle=allow_pickle,
        left_out={"safety_checker": None, "feature_extractor": None},
    )
    try:
        return _from_folder(folder, name, allow_pickle)
    except Incomplete as error:
        raise UserError(hub.half_filled(name, folder, str(error))) from None


def _load_family(family: Any, location: str, name: str, options: dict) -> Model:
    """Load the family's model from a folder."""
    try:
        with own_pages():  # its files are in half precision, and the model in fp32
            return family.from_folder(location, source=name, **options)
    except UserError:
        raise
    except Exception as error:  # wrong types in a configuration cause any type of error
        raise UserError(
            f"cannot load {name}: "
            f"{(str(error).strip().splitlines() or [type(error).__name__])[0][:300]}"
        ) from error
