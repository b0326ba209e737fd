"""Check a model folder before diffusers or transformers opens it.

A folder that a stranger made is data. It may name weights and settings of classes that are listed
here. It may name nothing that makes a library import a module, run a file, or use a network:

* model_index.json names models and schedulers of diffusers, and classes in `TRANSFORMERS`, only
* no file of code is beside the weights (`CODE`)
* no configuration has a key that names code, kernels, quantizers or another model (`_REFUSED`)
* no path in a configuration leaves the folder
* no symbolic link leads out of the folder; a snapshot in the hub's cache may lead to the blobs of
  the same repository

The libraries refuse much of this themselves, but not in all versions. Every problem is a UserError
of one sentence. The check reads configurations only, no weights. `loading` checks the weights, and
refuses pickles.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from concept_eraser.storage.readers import JSON_BYTES, cannot, read_json, size_text
from concept_eraser.utils.errors import UserError, quote

INDEX = "model_index.json"
CODE = frozenset(
    [
        ".py",
        ".pyc",
        ".pyo",
        ".pyw",
        ".pyd",
        ".pyx",
        ".pyz",
        ".so",
        ".dll",
        ".dylib",
        ".egg",
        ".whl",
        ".jinja",
    ],
)
FILES = 10_000  # entries of a model folder
TOKENIZERS = (
    "CLIPTokenizer",
    "CLIPTokenizerFast",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
    "PreTrainedTokenizerFast",
    "Qwen2Tokenizer",
    "Qwen2TokenizerFast",
    "T5Tokenizer",
    "T5TokenizerFast",
    "TokenizersBackend",
)
TRANSFORMERS = frozenset(
    (
        *TOKENIZERS,
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
        "T5EncoderModel",
        "Gemma2Model",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3ForCausalLM",
        "Qwen3Model",
        "CLIPVisionModelWithProjection",
        "SiglipVisionModel",
        "CLIPFeatureExtractor",
        "CLIPImageProcessor",
        "CLIPImageProcessorFast",
        "CLIPImageProcessorPil",
        "SiglipImageProcessor",
    )
)
# Pipelines whose text encoder is a language model. Their tokenizers may have a chat template, which
# is never run: the families put their own in its place (models/chat.py), or render none.
TEMPLATED = ("SanaPipeline", "ZImagePipeline", "QwenImagePipeline", "Flux2KleinPipeline")
_TEMPLATE, _TEMPLATE_FILE = "chat_template", "chat_template.jinja"
# As the index of Stable Diffusion 1 and 2 names it; the part is never loaded.
_SAFETY_CHECKER = ("safety_checker", "stable_diffusion", "StableDiffusionSafetyChecker")
_CONFIGURATIONS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "scheduler_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_REFUSED = {  # keys of configurations, and what a library does with them
    "auto_map": "names Python code",
    "custom_pipeline": "names Python code",
    "custom_pipelines": "names Python code",
    "custom_generate": "names Python code",
    "trust_remote_code": "asks for Python code to be run",
    "use_kernels": "asks for compiled code of the hub",
    "kernel_config": "asks for compiled code of the hub",
    "quantization_config": "asks for a quantizer; quantized weights cannot be edited",
    "compression_config": "asks for a quantizer; quantized weights cannot be edited",
    "transformers_weights": "names other weights",
    "init_inputs": "names other files",
    "gguf_file": "names other weights",
    "chat_template": "is a program in Jinja, which no text encoder of a pipeline needs",
    "base_model_name_or_path": "names another model",
    "use_pretrained_backbone": "fetches another model",
    "use_timm_backbone": "fetches another model",
}
_ATTENTION = ("eager", "sdpa")  # others are kernels of the hub, or fall back to them
_ATTENTION_KEYS = (
    "_attn_implementation",
    "_attn_implementation_internal",
    "attn_implementation",
    "_experts_implementation",
)
_PATHS = (
    "vocab_file",
    "merges_file",
    "tokenizer_file",
    "spm_file",
    "fast_tokenizer_files",
    "tokenizer_config_file",
    "added_tokens_file",
)
_WEIGHTS = (".safetensors", ".bin")  # of shards; loading decides about pickles


def check_pipeline(folder: Path) -> dict[str, Any]:
    """Return the content of a pipeline folder's model_index.json, after all checks of the folder.

    Raises:
        UserError: a file in it is damaged, or could make a library run or fetch code.
    """
    index = check_index(folder / INDEX)
    root = _root_of(folder)
    for name in ["", *sorted(components(index))]:
        place = folder / name
        if os.path.lexists(place):
            templated = name == "tokenizer" and index["_class_name"] in TEMPLATED
            _check_files(place, root, deep=bool(name), templated=templated)
    return index


def check_part(folder: Path) -> None:
    """Check the folder of one model, as CLIPModel.save_pretrained writes it.

    Raises:
        UserError: as `check_pipeline`.
    """
    _check_files(folder, _root_of(folder), deep=True)


def check_index(file: Path) -> dict[str, Any]:
    """Return the content of a checked model_index.json.

    It names classes of diffusers and transformers only.

    Raises:
        UserError: it is damaged, or names something else.
    """
    index = read_json(file)
    entry = index.get("_class_name")
    if not isinstance(entry, str):
        raise UserError(
            f"{file} is damaged: its _class_name is {quote(entry)}, expected the "
            "name of a pipeline class of diffusers; copy the checkpoint again"
        )
    _check_keys({key: value for key, value in index.items() if key != "id2label"}, file)
    for name, entry in index.items():
        if name.startswith("_"):
            continue
        if isinstance(entry, list):
            _check_component(name, entry, file)
        elif isinstance(entry, dict) and name != "id2label":
            raise UserError(
                f"{file}: the entry {quote(name)} is a mapping; expected [library, class] or a "
                "plain value, so remove it or copy the checkpoint again"
            )
    return index


def components(index: Mapping[str, Any]) -> list[str]:
    """Return the names of the parts in a checked index."""
    lists = {name: entry for name, entry in index.items() if isinstance(entry, list)}
    return [name for name, entry in lists.items() if not name.startswith("_") and all(entry)]


def _check_component(name: str, component: list[Any], file: Path) -> None:
    """Check one entry of the index.

    It is [library, class], or [null, null] for a part that is left out.
    """
    if not name.isidentifier():
        raise UserError(
            f"{file}: {quote(name)} cannot be the name of a part; expected a plain name such as "
            "'unet', so copy the checkpoint again"
        )
    if component == [None, None]:
        return
    if len(component) != 2 or not all(
        isinstance(one, str) and one.isidentifier() for one in component
    ):
        raise UserError(
            f"{file}: the part {name!r} is {quote(component)}; expected [library, class], both "
            "plain names, or [null, null]. Do not load it unless you know its author"
        )
    library, class_name = component
    if (name, library, class_name) == _SAFETY_CHECKER:
        return
    if library not in ("diffusers", "transformers"):
        raise UserError(
            f"{file}: the part {name!r} is of the library {quote(library)}, whose code would run; "
            "only diffusers and transformers are allowed. Use a pipeline without custom code"
        )
    if library == "transformers":
        plain = sorted(name for name in TRANSFORMERS if not name.endswith(("Fast", "Pil")))
        is_allowed, kinds = class_name in TRANSFORMERS, ", ".join(plain)
    else:
        is_allowed, kinds = _is_part_of_diffusers(class_name), "its models and schedulers"
    if not is_allowed:
        raise UserError(
            f"{file}: the part {name!r} is {library}'s {quote(class_name)}, which is no part that "
            f"is loaded; of {library} these are: {kinds}. Use a pipeline of such parts"
        )


@cache
def _is_part_of_diffusers(class_name: str) -> bool:
    import diffusers

    attribute = getattr(diffusers, class_name, None)
    bases = (diffusers.ModelMixin, diffusers.SchedulerMixin)
    return isinstance(attribute, type) and issubclass(attribute, bases)


def _root_of(folder: Path) -> Path:
    """Return the folder that a model's links may not leave.

    It is the model's own folder, or its repository's in the hub cache.
    """
    try:
        own = folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise UserError(cannot("read", folder, error)) from None
    for place in (own, own.parent):  # for a part, the folder of the pipeline above it
        if place.parent.name == "snapshots" and place.parents[1].name.startswith("models--"):
            return place.parents[1]
    return own


def _check_files(folder: Path, root: Path, *, deep: bool, templated: bool = False) -> None:
    """Check every file of a folder.

    Args:
        folder: The folder.
        root: The folder that links may not leave.
        deep: Also check the files of its subfolders.
        templated: It is a tokenizer's, whose chat template is never run.
    """
    for number, path in enumerate(_walk(folder, deep)):
        if number >= FILES:
            raise UserError(
                f"{folder} has more than {FILES:,} files, which no model has; check that "
                "it is the right folder"
            )
        _check_link(path, root)
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            continue
        if not stat.S_ISREG(status.st_mode):
            raise UserError(
                f"{path} is no regular file (a pipe or a device); remove it, or copy the "
                "model again"
            )
        if templated and path == folder / _TEMPLATE_FILE:
            continue
        if CODE & {suffix.lower() for suffix in path.suffixes}:
            raise UserError(
                f"{path} is code beside a model's weights, which a library may run; only weights "
                "and configurations are read. Remove it if you trust its author and do not need it"
            )
        if path.name in _ADAPTERS:
            raise UserError(
                f"{path} belongs to an adapter, for which transformers would load another model; "
                "merge it into the weights first, or remove it"
            )
        if path.suffix == ".json":
            _check_json(path, status.st_size, templated=templated)


def _walk(folder: Path, deep: bool) -> Iterator[Path]:
    """Yield a folder and its content. Folders behind links are not entered."""
    yield folder
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(cannot("read", folder, error)) from None
    for entry in entries:
        path = Path(entry.path)
        if deep and entry.is_dir(follow_symlinks=False):
            yield from _walk(path, deep)
        else:
            yield path


def _check_link(path: Path, root: Path) -> None:
    try:
        inside = path.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError) as error:  # it leads nowhere, or is part of a circle
        raise UserError(cannot("read", path, error)) from None
    if not inside:
        raise UserError(
            f"{path} is a link that leads out of the model's folder; put the files themselves there"
        )


def _check_json(path: Path, size: int, *, templated: bool) -> None:
    if size > JSON_BYTES:
        raise UserError(
            f"{path} has {size_text(size)}; at most {size_text(JSON_BYTES)} are read of a "
            "configuration. Check that it is the right file"
        )
    if path.name.endswith(".index.json"):
        _check_shards(path)
    elif path.name in _CONFIGURATIONS:
        content = read_json(path)
        if templated and isinstance(content.get(_TEMPLATE), str):
            del content[_TEMPLATE]
        _check_keys(content, path)


def _check_shards(path: Path) -> None:
    """Check the index of weights in several files. It may name files of its own folder only."""
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict):
        raise UserError(
            f"{path} is damaged: its weight_map is {quote(shards)}, expected a mapping of tensors "
            "to files; copy the checkpoint again"
        )
    for file in shards.values():
        plain = isinstance(file, str) and Path(file).name == file and "\\" not in file
        if not plain or not file.endswith(_WEIGHTS):
            raise UserError(
                f"{path} names the weights {quote(file)}; expected the name of a file beside it ("
                f"{' or '.join(_WEIGHTS)}), so copy the checkpoint again"
            )


def _check_keys(content: Mapping[str, Any], file: Path) -> None:
    """Refuse keys for code, another model, or a path out of the folder, at any depth."""
    level: list[Any] = [content]
    while level:
        value_at_hand = level.pop()
        if isinstance(value_at_hand, list):
            level.extend(value_at_hand)
        elif isinstance(value_at_hand, dict):
            for key, value in value_at_hand.items():
                _check_entry(key, value, file)
            level.extend(value_at_hand.values())


def _check_entry(key: str, value: Any, file: Path) -> None:
    if key in _REFUSED and value not in (None, False, [], {}, ""):
        raise UserError(
            f"{file} has {key}: {quote(value, 80)}, which {_REFUSED[key]}; remove the "
            "entry, or use a model without it"
        )
    if key in _ATTENTION_KEYS:
        kinds = list(value.values()) if isinstance(value, dict) else [value]  # a mapping is by part
        names = [one for one in kinds if one is not None and one not in _ATTENTION]
        if names:
            raise UserError(
                f"{file} has {key}: {quote(names[0], 80)}, which may name code of the hub; allowed "
                f"are {', '.join(_ATTENTION)}. Remove the entry"
            )
    if key in _PATHS:
        for path in value if isinstance(value, list) else [value]:
            if path is not None and not _stays(path):
                raise UserError(
                    f"{file} has {key}: {quote(path, 80)}, a path out of the model's "
                    "folder; remove "
                    "the entry, or name a file of the folder"
                )
    if key == "tokenizer_class" and value is not None and value not in TOKENIZERS:
        raise UserError(
            f"{file} names the tokenizer {quote(value, 80)}; allowed are {', '.join(TOKENIZERS)}. "
            "Use a pipeline with one of these"
        )
    if key == "_class_name" and not isinstance(value, str):
        raise UserError(
            f"{file} has _class_name: {quote(value, 80)}, which is no class name but may name "
            "Python code; copy the checkpoint again"
        )
    if key == "_commit_hash" and value is not None and not str(value).isalnum():
        raise UserError(
            f"{file} has _commit_hash: {quote(value, 80)}, which is no commit; remove the entry"
        )


def _stays(path: Any) -> bool:
    """Whether a path of a configuration stays in its folder, on any system."""
    if not isinstance(path, str):
        return False
    parts = path.replace("\\", "/").split("/")
    return ".." not in parts and not path.startswith(("/", "\\", "~")) and ":" not in path
