"""Recipes and results of version 0.1 in present terms, so that old run folders still load."""

from __future__ import annotations

from typing import Any

_KEYS = {
    "concept_share": "concept_rate",
    "none_share": "no_object_rate",
    "pictures": "images",
    "pictures a prompt": "images a prompt",
}
_METRICS = {"concept_share": "concept_rate", "none_share": "no_object_rate"}
_CONCEPTS = {"players": "together"}


def migrate_results(content: Any) -> Any:
    """Rename the keys and metrics of an evaluation or an attack that version 0.1 wrote.

    Args:
        content: what the JSON file holds.

    Returns:
        A copy with present terms. Content with present terms does not change.
    """
    if isinstance(content, dict):
        return {_KEYS.get(key, key): migrate_results(value) for key, value in content.items()}
    if isinstance(content, list):
        return [migrate_results(value) for value in content]
    return _METRICS.get(content, content) if isinstance(content, str) else content


def migrate_recipe(content: dict[str, Any]) -> dict[str, Any]:
    """Rename the values of a recipe that version 0.1 wrote: `concepts: players`.

    Args:
        content: the mapping of the recipe's YAML file.

    Returns:
        A copy with present terms.
    """
    concepts = content.get("concepts")
    if isinstance(concepts, str) and concepts in _CONCEPTS:
        return {**content, "concepts": _CONCEPTS[concepts]}
    return content
