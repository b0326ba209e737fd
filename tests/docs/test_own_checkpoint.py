"""The README's section on one's own checkpoint, word for word, with the bundled pipeline in the
place of SD v1.4.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

TEXT = (ROOT / "README.md").read_text()
SECTION = TEXT[TEXT.index("## Your own checkpoint") : TEXT.index("| family | class | predicts")]
MODEL = "stable-diffusion-v1-4"
FILES = {
    "forget.txt": "a star\na red star\n",
    "others.txt": "a moon\na blue moon\n",
    "retain.txt": "a house\na green tree\n",
}
FEW = [
    "training.steps=2",
    "training.batch_size=2",
    "forget.n=2",
    "retain.n=2",
    "generation.steps=2",
    "training.device=cpu",
]


def commands() -> Iterator[list[str]]:
    for block in re.findall(r"```sh\n(.*?)```", SECTION, flags=re.S):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from concept_eraser.models.loading import load

    folder = tmp_path_factory.mktemp("own")
    load("tiny-sd").save(folder / MODEL)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def test_every_command_works_as_written(
    place: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list(commands())
    assert {words[1] for words in asked} == {"erase", "generate", "export", "merge", "push"}
    for words in asked:
        few = [*FEW, "-q"] if words[1] == "erase" else ["-n", "2"] if words[1] == "generate" else []
        found = cli(*words[1:], *few, cwd=place)
        assert found.returncode == 0, (words, found.stderr)
    for made in (
        "runs/mine/pipeline",
        "runs/mine/exports/mine-single-file.safetensors",
        "half/model_index.json",
        "runs/lora/exports/lora-kohya.safetensors",
        "runs/both/model_index.json",
        "after/00001.png",
    ):
        assert (place / made).exists(), made
    monkeypatch.chdir(place)
    code = re.findall(r"```python\n(.*?)```", SECTION, flags=re.S)[0]
    exec(compile(code, "README.md", "exec"), {})
    bare = place / "bare"  # what the section says of single files
    shutil.copytree(place / MODEL, bare)
    for weights in bare.rglob("*.safetensors"):
        weights.unlink()
    words = [
        "export",
        "runs/mine/exports/mine-single-file.safetensors",
        "--before",
        "bare",
        "--to",
        "diffusers",
        "--output",
        "whole",
    ]
    found = cli(*words, cwd=place)
    assert found.returncode == 0, found.stderr
