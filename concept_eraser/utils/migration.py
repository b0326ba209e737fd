"""Recipes and results of earlier versions in present terms, so that old run folders still load."""

from __future__ import annotations

from typing import Any

_KEYS = {
    "concept_share": "concept_rate",
    "none_share": "no_object_rate",
    "pictures": "images",
    "pictures a prompt": "images a prompt",
}
_BY_GROUP = ("groups", "prompt_hashes")  # whose keys are names of groups, as the user chose them
_METRICS = {"concept_share": "concept_rate", "none_share": "no_object_rate"}
_CONCEPTS = {"players": "together"}
# settings of UNO with a judge, whose weight was 1 and is now the paper's 1000
_HATS: dict[str, dict[str, Any]] = {
    "uno-hat": {},
    "uno-s-hat": {"alternate": True},
    "s-hat": {"rule": "surgery"},
    "h": {"rule": "none"},
}


def migrate_results(content: Any) -> Any:
    """Rename the keys and metrics of an evaluation or an attack that version 0.1 wrote.

    Args:
        content: what the JSON file holds.

    Returns:
        A copy with present terms. Content with present terms does not change.
    """
    if isinstance(content, dict):
        return {
            _KEYS.get(key, key): (
                {name: migrate_results(one) for name, one in value.items()}
                if key in _BY_GROUP and isinstance(value, dict)
                else migrate_results(value)
            )
            for key, value in content.items()
        }
    if isinstance(content, list):
        return [migrate_results(value) for value in content]
    return _METRICS.get(content, content) if isinstance(content, str) else content


def migrate_recipe(content: dict[str, Any]) -> dict[str, Any]:
    """Rename the values of a recipe that an earlier version wrote.

    These are `concepts: players`, and UNO's settings with a judge whose weight was 1.

    Args:
        content: the mapping of the recipe's YAML file.

    Returns:
        A copy with present terms.
    """
    concepts, method = content.get("concepts"), content.get("method")
    if isinstance(concepts, str) and concepts in _CONCEPTS:
        content = {**content, "concepts": _CONCEPTS[concepts]}
    if isinstance(method, dict) and method.get("histogram") == 1:
        name = method.get("name")
        if isinstance(name, str) and name in _HATS:
            content = {**content, "method": {**_HATS[name], **method, "name": "uno"}}
    return content
