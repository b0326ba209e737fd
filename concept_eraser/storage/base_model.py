"""The bundled models, and the runs that began with `tiny-sd`."""

from __future__ import annotations

import os
from pathlib import Path

from concept_eraser.storage.readers import read_yaml
from concept_eraser.utils import path_redaction, resources

BUNDLED = "tiny-sd"
# models that never learned a concept, and what their training left out
LEFT_OUT = {
    f"{BUNDLED}-without-{value}": f"{attribute}={value}"
    for value, attribute in {
        "heart": "shape",
        "star": "shape",
        "purple": "color",
        "striped": "style",
        "dotted": "style",
        "blue": "color",
    }.items()
}
CONTROLS = {
    name: f"the bundled model, but its UNet was trained without images of {left_out}"
    for name, left_out in LEFT_OUT.items()
}
BUNDLED_MODELS = {
    BUNDLED: "the bundled model of ten shapes, 64x64, trained from scratch for this package",
    **CONTROLS,
}
LONGEST_CHAIN = 50  # runs one after the other, each from the result of the one before


def is_bundled(model: object) -> bool:
    """Whether this is a bundled model, its folder, or a run folder that began with it.

    A file on a bundled model as its base counts too.

    Raises UserError for a run folder whose recipe is no YAML.
    """
    for _ in range(LONGEST_CHAIN):
        if not isinstance(model, str):
            return False
        base = path_redaction.base_of(model)
        if base in BUNDLED_MODELS or os.path.realpath(base) == _folder():
            return True
        recipe = Path(base) / "recipe.yaml"
        content = read_yaml(recipe) if recipe.is_file() else None
        if not isinstance(content, dict):
            return False
        model = content.get("model", BUNDLED)
    return False


def _folder() -> str:
    return os.path.realpath(resources.tiny_weights() / BUNDLED)
