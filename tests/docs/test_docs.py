"""The code in the documentation runs as it is written, all blocks of a page in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from concept_eraser import registry
from concept_eraser.recipes import recipe
from concept_eraser.utils import resources

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.S)


def run_block(block: str, namespace: dict[str, object]) -> None:
    """Run a block of a page as a script, without the `__future__` imports of this module."""
    exec(compile(block, "<page>", "exec", dont_inherit=True), namespace)


def test_the_page_on_targets_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((DOCS / "targets.md").read_text())
    assert len(blocks) == 5
    namespace: dict[str, object] = {}
    for block in blocks:
        run_block(block, namespace)
    runs = sorted(path.parent.name for path in tmp_path.glob("runs/*/done.json"))
    assert runs == ["classifier", "clip", "denoiser", "text_encoder", "vae"]


def test_the_page_on_plugins_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method has at most 30 lines, and the recipe records what the page states."""
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "plugins.md").read_text()
    blocks = BLOCK.findall(page)
    assert len(blocks) == 4
    assert len(blocks[0].splitlines()) <= 30
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        run_block(block, namespace)
    recipe_text = (tmp_path / "runs" / "unit_sum" / "recipe.yaml").read_text()
    for example in re.findall(r"```yaml\n(.*?)```", page, re.S)[:1]:
        assert example in recipe_text
    huber = recipe.load(
        {
            "forget": {"prompts": "tiny_star", "loss": namespace["Huber"](delta=0.1)},
            "retain": "tiny_rest",
        }
    )  # type: ignore[operator]
    assert huber.has_objects


def test_the_page_on_methods_names_every_method() -> None:
    """Every recipe loads with the overrides that the page gives.

    The page names every method of the registry, and every recipe for the star.
    """
    page = (DOCS / "methods.md").read_text()
    mentions = re.findall(r"`((?:tiny|sd14)_\w+)([^`]*)`", page)
    assert len(mentions) > 20
    methods = {recipe.load(name, changes.split()).method.name for name, changes in mentions}
    missing = [
        name
        for name in registry.names("method")
        if name not in methods and f"method: {name}" not in page
    ]
    assert not missing
    recipes = {name for name in resources.names("pipelines") if name.startswith("tiny_star")}
    assert not recipes - {name for name, _ in mentions}


def test_the_page_on_own_checkpoints_has_the_estimates_of_the_memory_page() -> None:
    """Its table is written by hand, the one of the memory page by `benchmarks.estimates`."""
    estimates: dict[tuple[str, str], str] = {}
    rows = [line.strip("| ").split(" | ") for line in (DOCS / "memory.md").read_text().splitlines()]
    (head,) = [row for row in rows if row[:2] == ["Model", "Trained"]]
    for row in rows:
        if row[0] == "Stable Diffusion 1.4, 512 px":
            cells = zip(head[2:], row[2:], strict=True)
            estimates |= {(row[1], preset): cell.strip("*") for preset, cell in cells}
    trained = {
        "the default LoRA": "LoRA, rank 64, all layers",
        "the same, with larger micro-batches": "LoRA, rank 64, all layers",
        "also all weights": "full",
    }
    page = (DOCS / "how_to" / "own_checkpoint.md").read_text()
    stated = re.findall(r"`--memory (\w+)` \| ([\w ,-]+) \| ([\d.]+) GB / ([\d.]+) GB \|", page)
    assert [name for _, name, *_ in stated] == list(trained)
    for preset, name, *numbers in stated:
        assert " / ".join(numbers) == estimates[trained[name], preset]
