"""What the README and the how-to guides say about one's own checkpoint runs as it is written.

The bundled pipeline takes the place of SD v1.4.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
PAGES = {
    name: (ROOT / "docs" / "how_to" / f"{name}.md").read_text()
    for name in ("own_checkpoint", "lora")
}
# Page, and the beginning of the commands of it that are run, in this order.
HOW_TO = (
    ("own_checkpoint", "erase --model ./stable-diffusion-v1-4 "),
    ("own_checkpoint", "generate runs/mine "),
    ("lora", "erase --model ./stable-diffusion-v1-4 "),
    ("lora", "export runs/lora --to kohya"),
    ("lora", "export runs/mine --to single-file"),
    ("lora", "export runs/mine --to diffusers --strength"),
    ("lora", "merge runs/mine runs/lora --output runs/both"),
)
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


def commands(text: str) -> list[str]:
    """The commands in the shell blocks of a text, without the name of the program."""
    lines = [
        line
        for block in re.findall(r"```sh\n(.*?)```", text, flags=re.S)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return [
        " ".join(line.split()).removeprefix("concept-eraser ")
        for line in lines
        if line.startswith("concept-eraser ")
    ]


def run(cli: Any, command: str, place: Path) -> str:
    """Run a command with few steps and images, and return what it printed."""
    words = shlex.split(command, comments=True)
    few = {"erase": [*FEW, "-q"], "generate": ["-n", "2"]}.get(words[0], [])
    result = cli(*words, *few, cwd=place)
    assert result.returncode == 0, (command, result.stderr)
    return str(result.stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from concept_eraser.models.loading import load

    folder = tmp_path_factory.mktemp("own")
    for name in (MODEL, "sd15"):
        load("tiny-sd").save(folder / name)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def test_a_concept_of_ones_own_checkpoint(place: Path, cli: Any) -> None:
    """The README's section: plan, run, whole checkpoint, and the LoRA in plain diffusers."""
    from diffusers import StableDiffusionPipeline

    section = README[README.index("## Your own checkpoint") : README.index("## Is it really")]
    plan, training, export = commands(section)
    assert "would write runs/van_gogh" in run(cli, plan, place)
    output = run(cli, training, place)
    assert "concept:  Van Gogh (style); anchor concept: an unknown painter" in output
    assert "not evaluated: the CLIP weights" in output
    run(cli, export, place)
    folder = place / "runs" / "van_gogh"
    assert (folder / "exports" / "van_gogh-single-file.safetensors").is_file()
    assert (folder / "exports" / "van_gogh-kohya.safetensors").is_file()
    pipeline = StableDiffusionPipeline.from_pretrained(place / "sd15")
    pipeline.load_lora_weights(folder / "lora")
    assert pipeline.get_active_adapters()


def test_the_commands_of_the_how_to_guides(place: Path, cli: Any) -> None:
    for page, beginning in HOW_TO:
        chosen = [line for line in commands(PAGES[page]) if line.startswith(beginning)]
        assert chosen, (page, beginning)
        for line in chosen:
            run(cli, line, place)
    run(cli, "push runs/mine me/sd-without --dry-run", place)
    for path in (
        "runs/mine/pipeline",
        "runs/mine/exports/mine-single-file.safetensors",
        "half/model_index.json",
        "runs/lora/exports/lora-kohya.safetensors",
        "runs/both/model_index.json",
        "after/00001.png",
    ):
        assert (place / path).exists(), path
    bare = place / "bare"  # as the section describes for single files
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
    result = cli(*words, cwd=place)
    assert result.returncode == 0, result.stderr
