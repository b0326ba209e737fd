"""Tokenizers that are read once in each process of the tests.

A CLIP tokenizer takes 0.3 seconds to build from its file: more than half of the loading of the
bundled pipeline, which the suite loads many hundred times. Here transformers returns the tokenizer
that it has built before from files of the same content. Nothing in the package changes a tokenizer.

A tokenizer must not encode in two threads at once. Therefore other threads than the main one, the
demo and its tests read their own.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from concept_eraser.utils import resources

_read = PreTrainedTokenizerBase.from_pretrained.__func__  # the function below the class method
_tokenizers: dict[bytes, PreTrainedTokenizerBase] = {}
_is_shared = True


def share(*, is_shared: bool) -> None:
    """Turn the sharing on or off in this process."""
    global _is_shared
    _is_shared = is_shared


def _from_pretrained(
    cls: Any, pretrained_model_name_or_path: Any, *arguments: Any, **options: Any
) -> Any:
    location = pretrained_model_name_or_path
    folder = Path(location, options.get("subfolder") or "")
    is_local = _is_shared and threading.current_thread() is threading.main_thread()
    if not (is_local and folder.is_dir() and not arguments):
        return _read(cls, location, *arguments, **options)
    content = hashlib.blake2b(repr((cls, sorted(options.items()))).encode())
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        content.update(path.name.encode() + path.read_bytes())
    key = content.digest()
    if key not in _tokenizers:
        _tokenizers[key] = _read(cls, location, **options)
    return _tokenizers[key]


def install() -> None:
    """Replace the reader of transformers, and read the bundled pipeline's tokenizer."""
    from transformers import CLIPTokenizer

    PreTrainedTokenizerBase.from_pretrained = classmethod(_from_pretrained)
    CLIPTokenizer.from_pretrained(str(resources.tiny_weights() / "tiny-sd" / "tokenizer"))


install()
