"""The code in a model card that loads the uploaded weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from concept_eraser.models import hub, run_base
from concept_eraser.models.lora_readers import is_loaded_by_diffusers
from concept_eraser.models.stored_parts import precision_of_pipeline
from concept_eraser.recipes import defaults
from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.storage.readers import read_json
from concept_eraser.utils import resources
from concept_eraser.utils.path_redaction import is_place


def use(
    recipe: Recipe,
    folder: Path,
    repository: str,
    *,
    kind: str | None = None,
    revision: str | None = None,
) -> str:
    """Return Markdown with code that loads the run's weights from a repository of the hub.

    Args:
        recipe: the recipe of the run.
        folder: the run folder.
        repository: owner/name.
        kind: what the repository has: "pipeline", "lora" or "both" (default: all that the run has).
        revision: the branch of the repository; None for its main branch.

    Returns:
        The Markdown.
    """
    source = f'"{repository}"'
    of_branch = f", revision={json.dumps(revision)}" if revision else ""
    model_folder = whole_model(folder)
    if recipe.target not in recipes.PROMPTED and (
        model_folder is None or model_folder.name == resources.whole_model("module")
    ):
        return _of_module(recipe, model_folder, source, of_branch)
    run = _python(
        f'import concept_eraser\n\nmodel = concept_eraser.load("runs/{folder.resolve().name}")'
    )
    if recipe.method.adds_gate:
        return f"Its gate is beside the weights, so the run folder is loaded:\n\n{run}"
    pipe = _python(
        _loading(source + of_branch, model_folder) + '\nimage = pipe("a prompt").images[0]'
    )
    if kind == "pipeline" or not (folder / "lora").is_dir():
        return pipe
    is_lora_alone = kind == "lora" or (model_folder is None and run_base.is_rebuilt(folder))
    if not loads_lora(recipe):
        return (
            f"diffusers loads no such LoRA, so the run folder is loaded:\n\n{run}"
            if is_lora_alone
            else pipe
        )
    local = not hub.is_id(recipe.model) or Path(recipe.model).exists() or is_place(recipe.model)
    name, commit = ("path/of/the/base/model", None) if local else hub.split(recipe.model)
    revision_argument = f', revision="{commit}"' if commit else ""
    base = Path(recipe.model)
    lora = _python(
        _loading(f'"{name}"{revision_argument}', base if base.is_dir() else model_folder) + "\n"
        f"pipe.load_lora_weights({source}{of_branch}, "
        'adapter_name="erase")\npipe.set_adapters("erase", 1.0)'
    )
    if is_lora_alone:
        return f"Its LoRA on the base model, with a strength from 0 to 1:\n\n{lora}"
    return (
        f"The whole pipeline:\n\n{pipe}\n\nor its LoRA on the base model, with a strength "
        f"from 0 to 1:\n\n{lora}"
    )


def loads_lora(recipe: Recipe) -> bool:
    """Whether diffusers loads a LoRA into the part of the pipeline that a run trained."""
    return is_loaded_by_diffusers(defaults.family_of(recipe.model), recipe.target)


def whole_model(folder: Path) -> Path | None:
    """Return the folder with the whole model of a run: its own, or its export to diffusers.

    Returns None if there is neither.
    """
    places = [*(folder / name for name in resources.WHOLE_MODEL), exported_pipeline(folder)]
    return next((place for place in places if place.is_dir()), None)


def exported_pipeline(folder: Path) -> Path:
    """Return the place where `export --to diffusers` writes the pipeline of a run.

    It has the name of the folder itself, also if that is given as `.`.
    """
    return folder / "exports" / f"{folder.resolve().name}-diffusers"


def _loading(arguments: str, folder: Path | None) -> str:
    """Return the lines that load a pipeline in the precision of a folder with the same weights.

    Without a precision diffusers loads the denoiser in fp32, and transformers the text encoder in
    the precision of its file. The two do not fit together if that is another one. Where the
    precision is not known, it is fp32, which fits every file.
    """
    dtype = (None if folder is None else precision_of_pipeline(folder)) or torch.float32
    return (
        "import torch\nfrom diffusers import DiffusionPipeline\n\n"
        f"pipe = DiffusionPipeline.from_pretrained({arguments}, torch_dtype={dtype})"
    )


def _python(code: str) -> str:
    return f"```python\n{code}\n```"


def _of_module(recipe: Recipe, model_folder: Path | None, source: str, of_branch: str) -> str:
    """Return the code for a classifier, CLIP model or VAE.

    It depends on the files in its folder, see `Module.save` and `Clip.save`. `source` and
    `of_branch` are arguments in Python: the repository, and its branch after a comma or "".
    """
    if model_folder is None:
        return "The run folder has no whole model any more (model/), so there is nothing to load."
    config: dict[str, Any] = (
        read_json(model_folder / "config.json") if (model_folder / "config.json").is_file() else {}
    )
    if "architecture" in config:
        return _python(
            "from huggingface_hub import snapshot_download\n\nfrom "
            "concept_eraser.models.loading import load_part\n\nmodel = "
            f'load_part(snapshot_download({source}{of_branch}), "{recipe.target}").module'
        )
    library, name = (
        ("diffusers", config.get("_class_name"))
        if "_class_name" in config
        else ("transformers", next(iter(config.get("architectures") or []), None))
    )
    if name:
        words = (model_folder / "tokenizer_config.json").is_file()
        tokenizer_line = (
            f"\ntokenizer = AutoTokenizer.from_pretrained({source}{of_branch})" if words else ""
        )
        names = ", ".join(sorted([name, *(["AutoTokenizer"] if words else [])]))
        return _python(
            f"from {library} import {names}\n\nmodel = {name}.from_pretrained({source}{of_branch})"
            f"{tokenizer_line}"
        )
    return _by_its_own_code(recipe, model_folder, config, source, of_branch=of_branch)


def _by_its_own_code(
    recipe: Recipe, model_folder: Path, config: dict[str, Any], source: str, *, of_branch: str
) -> str:
    """Return the code for a folder with weights only.

    The network is made by the function that the recipe names, else by the reader.
    """
    file = next(
        (path.name for path in sorted(model_folder.glob("*.safetensors"))), "model.safetensors"
    )
    package, colon, function = recipe.model.partition(":")
    is_function_name = colon and package.replace(".", "").isidentifier() and function.isidentifier()
    constructor = (
        f"from {package} import {function}\n\nmodel = {function}()"
        if is_function_name
        else "model = your_own_network()"
    )
    about = (
        ""
        if is_function_name
        else (
            "The files hold only weights. Make the network as it was made for the training "
            f"(it was a `{config.get('class', 'model of open_clip')}`), then load them.\n\n"
        )
    )
    return about + _python(
        "from huggingface_hub import hf_hub_download\nfrom safetensors.torch import "
        f"load_file\n\n{constructor}\n"
        f"model.load_state_dict(load_file(hf_hub_download({source}, "
        f'"{file}"{of_branch})))\nmodel.eval()'
    )
