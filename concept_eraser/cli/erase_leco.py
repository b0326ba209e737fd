"""`concept-eraser erase --leco FILE`: from a configuration of LECO or of a slider to a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from concept_eraser.utils.errors import UserError

if TYPE_CHECKING:
    from concept_eraser.recipes.leco import LecoRecipe


def recipe_of(file: Path, settings: Sequence[str], others: Sequence[str]) -> LecoRecipe:
    """Read the file, and print what of it is done in another way or not at all.

    Args:
        file: A `prompts.yaml`, `config.yaml` or `prompts.toml`.
        settings: Overrides of the user.
        others: What else the user names to erase, which must be empty.

    Raises:
        UserError: There is something else to erase, or the file cannot be read or expressed.
    """
    if others:
        raise UserError(
            f"--leco describes what to erase, so it cannot be used with {', '.join(others)}"
        )
    from concept_eraser.recipes import leco
    from concept_eraser.utils import distributed

    recipe = leco.load(file, settings)
    if distributed.is_first():
        for warning in recipe.warnings:
            typer.echo(f"warning: {warning}", err=True)
    return recipe
