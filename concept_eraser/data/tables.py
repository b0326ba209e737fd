"""Prompts from tables: CSV, TSV, JSONL or JSON, with the column names that the field's files use.

I2P (Schramowski et al., arXiv 2211.05105) circulates in two spellings: `sd_seed`, `sd_guidance_scale` (the original, and
SPM's copy) and `evaluation_seed`, `evaluation_guidance` (ESD, UnlearnDiffAtk, MUNBa). Both are read. A row's own seed and
guidance are used for its picture, as in the papers; all other columns become fields.

Rows are chosen by `where`: {categories: sexual} for a column that lists several values, {nudity_percentage: "> 50"} for
a number, {source: lexica} for a word.
"""

from __future__ import annotations

import csv
import json
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concept_eraser.errors import UserError
from concept_eraser.models import hub

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")
HUB = "hf://"
_TEXT = ("prompt", "text", "caption")
_SEED = ("evaluation_seed", "sd_seed", "seed")
_GUIDANCE = ("evaluation_guidance", "sd_guidance_scale", "guidance")
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq}
_CONDITION = re.compile(r"\s*(>=|<=|==|>|<)\s*(-?[\d.]+)\s*")


@dataclass(frozen=True)
class Row:
    """A prompt with what its table says of it."""

    text: str
    fields: Mapping[str, str]
    seed: int | None
    guidance: float | None


def from_hub(address: str) -> Path:
    """The file `hf://owner/dataset/path/in/it.csv`, from the hub or its cache on disk.

    Raises UserError where the address is incomplete or the hub (or the cache of a machine without network) has no such file.
    """
    parts = address.removeprefix(HUB).split("/", 2)
    if len(parts) < 3 or not all(parts):
        raise UserError(f"{address} names no file; write {HUB}owner/dataset/file.csv")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(f"{parts[0]}/{parts[1]}", parts[2], repo_type="dataset", local_files_only=hub.is_silent_about_dataset(f"{parts[0]}/{parts[1]}")))  # fmt: skip
    except Exception as error:  # the hub's client raises some twenty kinds, OSErrors and ValueErrors among them
        raise UserError(f"the hub, or its cache, did not give {address}: {str(error).splitlines()[0][:160]}. Download the file and give its path") from None  # fmt: skip


def read(path: Path, where: Mapping[str, Any]) -> list[Row]:
    """The rows of a table that fulfil all conditions, in its order. Raises UserError for what is no table of prompts."""
    if not path.is_file():
        raise UserError(f"no such table of prompts: {path}")
    try:
        rows = [row for row in _records(path) if row]
    except (ValueError, csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no {path.suffix[1:].upper()} of prompts ({str(error)[:100]})") from None
    if not rows:
        return []
    text, seed, guidance = (_column(rows[0], names) for names in (_TEXT, _SEED, _GUIDANCE))
    if text is None:
        raise UserError(f"{path} has no column of prompts ({' or '.join(_TEXT)}); it has {', '.join(rows[0])}")
    strange = [key for key in where if key not in rows[0]]
    if strange:
        raise UserError(f"{path} has no column {strange[0]!r}; it has {', '.join(rows[0])}")
    used = {text, seed, guidance}
    chosen = [row for row in rows if row.get(text) and all(fulfils(row.get(k), v) for k, v in where.items())]
    return [Row(str(row[text]).strip(), {k: str(v) for k, v in row.items() if k not in used and v not in (None, "")}, _number(row, seed, int, path), _number(row, guidance, float, path)) for row in chosen]  # fmt: skip


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix in (".csv", ".tsv"):
            yield from csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            return
        content = json.load(file) if path.suffix == ".json" else [json.loads(line) for line in file if line.strip()]
    if isinstance(content, dict):  # COCO's captions: {"annotations": [{"caption": ...}, ...]}
        content = content.get("annotations", content.get("prompts"))
    if not isinstance(content, list):
        raise ValueError("expected a list of prompts")
    for row in content:
        yield row if isinstance(row, dict) else {"prompt": str(row)}


def _column(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in row), None)


def _number(row: Mapping[str, Any], column: str | None, kind: type, path: Path) -> Any:
    if column is None or row.get(column) in (None, ""):
        return None
    try:
        number = kind(float(row[column]))
        if not -(2**63) <= number < 2**63:  # nan too; seeds are 64-bit numbers
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{path}: {column} is {row[column]!r} in the row {str(row)[:80]!r}; a number is needed") from None  # fmt: skip


def fulfils(value: Any, condition: Any) -> bool:
    """Whether a cell meets a condition: a comparison of numbers, or a word that it is or lists. An empty cell meets none."""
    if value in (None, ""):
        return False
    match = _CONDITION.fullmatch(str(condition))
    if match:
        try:
            return bool(_COMPARE[match[1]](float(value), float(match[2])))
        except (TypeError, ValueError):
            return False
    return str(condition).strip().lower() in {part.strip().lower() for part in str(value).split(",")}
