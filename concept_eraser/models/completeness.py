"""Check that a loaded model has all its weights and its vocabulary from the files.

diffusers and transformers draw a missing weight at random, and only log it. A checkpoint may lack a
tensor, or have names that a library no longer supports. transformers builds a tokenizer without
words where its files are missing. Without these checks such a model would be erased, measured and
published as if it were whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from concept_eraser.storage.readers import read_tensor_header
from concept_eraser.utils.errors import UserError


class Incomplete(UserError):
    """A folder lacks files that its model needs."""


_OLDER = {
    ".to_q.": ".query.",
    ".to_k.": ".key.",
    ".to_v.": ".value.",
    ".to_out.0.": ".proj_attn.",
}  # diffusers before 0.18
_VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
# transformers writes the parts of Qwen 2.5 VL without these
_WITHOUT = {"model.visual.": "visual.", "model.language_model.": "model."}


def require_all_weights(module: nn.Module, folder: Path) -> None:
    """Raise UserError if a parameter of a module is in none of the safetensors files of its folder.

    A parameter with several names (tied weights) needs one of them. A folder of pickles is not
    checked.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return
    file_tensors = {name for file in files for name in read_tensor_header(file)[1]}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    missing = [
        some[0]
        for some in names.values()
        if not any(one in file_tensors for name in some for one in names_in_files(name))
    ]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{folder} lacks weights: {missing[0]}{more}. The library would draw them at "
            "random; copy the checkpoint again"
        )


def require_vocabulary(folder: Path) -> None:
    """Raise Incomplete if the folder of a tokenizer has no file with its words."""
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise Incomplete(
            f"{folder} holds no vocabulary ({', '.join(_VOCABULARIES[:-1])} or "
            f"{_VOCABULARIES[-1]}); copy the checkpoint again"
        )


def names_in_files(name: str) -> Iterator[str]:
    """Return a parameter's name as older versions of the libraries wrote it."""
    older = name
    for new, old in _OLDER.items():
        older = older.replace(new, old)
    for longer, shorter in _WITHOUT.items():
        if name.startswith(longer):
            yield shorter + name.removeprefix(longer)
    for spelling in (name, older):
        yield spelling
        yield spelling.removeprefix("text_model.")
        yield f"text_model.{spelling}"
