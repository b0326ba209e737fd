"""The tests read a tokenizer once, and read it again where a file differs."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

from transformers import CLIPTokenizer

from concept_eraser.utils import resources
from tests import shared_tokenizers

FOLDER = resources.tiny_weights() / "tiny-sd" / "tokenizer"


def read(folder: Path = FOLDER) -> Any:
    return CLIPTokenizer.from_pretrained(str(folder))


def test_equal_files_give_one_tokenizer_and_other_files_another(tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer"
    shutil.copytree(FOLDER, copy)
    assert read(copy) is read()
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 60}))
    assert (read(copy).model_max_length, read().model_max_length) == (60, 77)


def test_other_threads_and_the_demo_have_their_own() -> None:
    others: list[Any] = []
    thread = threading.Thread(target=lambda: others.append(read()))
    thread.start()
    thread.join()
    shared_tokenizers.share(is_shared=False)
    others.append(read())
    shared_tokenizers.share(is_shared=True)
    assert all(other is not read() for other in others)
    assert all(other("a red star").input_ids == read()("a red star").input_ids for other in others)
