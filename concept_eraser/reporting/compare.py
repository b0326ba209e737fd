"""A comparison of several models' numbers, which requires one protocol."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concept_eraser.evaluation import result_schema
from concept_eraser.evaluation.base import is_share
from concept_eraser.models.safeguards import safeguard_in
from concept_eraser.storage.readers import read_json
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.migration import migrate_results
from concept_eraser.utils.provenance import differences

FILES = ("evaluation.json", "attack.json", "distance.json")


def read(path: Path) -> tuple[Path, dict[str, Any]]:
    """Read an evaluation or an attack, from its file or its folder.

    Raises UserError if it is neither, or an evaluation on labelled data.
    """
    files = [path] if path.is_file() else [path / name for name in FILES if (path / name).is_file()]
    if not files:
        raise UserError(
            f"{path} holds no {' or '.join(FILES)}; run `concept-eraser evaluate` or "
            "`attack` on it first"
        )
    content = migrate_results(read_json(files[0]))
    if "recipe" in content and isinstance(content.get("results"), dict):
        raise UserError(
            f"{files[0]} was measured on labelled data, without a protocol that `compare` and "
            "`report` read; `concept-eraser evaluate` on its run prints the numbers"
        )
    if "protocol" not in content or not {"results", "rates"} & content.keys():
        raise UserError(f"{files[0]} is neither an evaluation nor an attack: it names no protocol")
    rows = content.get("results", ())
    if not isinstance(rows, list | tuple) or not all(
        isinstance(r, dict) and {"metric", "group", "after"} <= r.keys() for r in rows
    ):
        raise UserError(
            f"{files[0]} is damaged: its results have no metric, group and value; measure it again"
        )
    result_schema.require(content, result_schema.METRICS, files[0])
    for name, rate in (content.get("rates") or {}).items():
        result_schema.require({name: rate}, {f"{name}~": result_schema.INTERVAL}, files[0])
    return files[0], content


def require_alike(contents: Mapping[str, dict[str, Any]]) -> None:
    """Raise UserError if the contents were measured by different protocols.

    The message names the differences.
    """
    (first, content), *others = contents.items()
    for name, other in others:
        if content.get("protocol_hash") and content["protocol_hash"] == other.get("protocol_hash"):
            continue
        groups = [
            {
                "protocol": _protocol_of(one),
                **{key: one.get(key) for key in ("prompt_hashes", "judge")},
            }
            for one in (content, other)
        ]
        differ = differences(*groups)
        if not differ and "original" in _protocol_of(content):
            continue  # only the place of the original differs
        differ = differ or ["the protocol's hash"]
        raise UserError(
            f"{first} and {name} were not measured alike, so their numbers are not "
            f"compared; they differ in {', '.join(differ)}"
        )


def _protocol_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the protocol, with the original of an attack by its weights instead of its place."""
    protocol = content.get("protocol")
    if not isinstance(protocol, dict):
        return {}
    original = protocol.get("original")  # "source (fingerprint)"
    if not isinstance(original, str):
        return protocol
    return {**protocol, "original": original.rpartition(" (")[2]}


def require_alike_settings(contents: Mapping[str, dict[str, Any]], metric: str, group: str) -> None:
    """Raise UserError if one metric was measured with different settings.

    The message names the metric and the differences.
    """
    settings = {
        name: result.get("settings") or {}
        for name, c in contents.items()
        if (result := _find(c, metric, group))
    }
    (first, values), *others = settings.items()
    for name, other in others:
        if differ := differences(values, other):
            differing_text = "; ".join(
                f"{key}: {values.get(key)!r} and {other.get(key)!r}" for key in differ
            )
            raise UserError(
                f"{metric} ({group}) of {first} and of {name} are not compared, because they "
                f"were measured with unlike settings: {differing_text}. Measure both with the same "
                "settings and version"
            )


def _require_safeguards_alike(contents: Mapping[str, dict[str, Any]]) -> None:
    """Raise UserError for attacks of which only some are on a model under a safeguard."""
    guards = {}
    for name, content in contents.items():
        models = content.get("models")
        victim = models.get("victim") if isinstance(models, Mapping) else None
        guards[name] = safeguard_in(victim) if isinstance(victim, str) else ""
    guarded = next((name for name, guard in guards.items() if guard), None)
    bare = next((name for name, guard in guards.items() if not guard), None)
    if guarded is not None and bare is not None:
        raise UserError(
            f"{guarded} was attacked under the safeguard {guards[guarded]!r} and {bare} without "
            "one, so their rates are not compared; attack both with a safeguard, or both without"
        )


def _find(content: Mapping[str, Any], metric: str, group: str) -> dict[str, Any] | None:
    return next(
        (r for r in content["results"] if (r["metric"], r["group"]) == (metric, group)), None
    )


def table(contents: Mapping[str, dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table: metric and group, then each model's value with its interval.

    Raises UserError for different protocols or settings, and for attacks with and without a
    safeguard.
    """
    require_alike(contents)
    _require_safeguards_alike(contents)
    if any("rates" in content for content in contents.values()):
        keys = list(dict.fromkeys(key for content in contents.values() for key in content["rates"]))
        return [
            [key, *(_show(content["rates"].get(key), 100) for content in contents.values())]
            for key in keys
        ]
    rows = dict.fromkeys(
        (r["metric"], r["group"]) for content in contents.values() for r in content["results"]
    )
    table_rows = []
    for metric, group in rows:
        require_alike_settings(contents, metric, group)
        factor = 100 if is_share(metric) else 1
        results = [_find(content, metric, group) for content in contents.values()]
        cells = [_show(result and result["after"], factor) for result in results]
        table_rows.append([f"{metric}, {group}", *cells])
    return table_rows


def _show(value: Mapping[str, Any] | None, factor: int) -> str:
    if value is None or value.get("value") is None:
        return "-"
    bounds = (
        ""
        if None in (value.get("low"), value.get("high"))
        else f" [{factor * value['low']:.3g}, {factor * value['high']:.3g}]"
    )
    return f"{factor * value['value']:.3g}{bounds}"
