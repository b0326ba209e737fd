"""Prompts from tables: CSV, TSV, JSONL or JSON, with the column names of published files.

I2P (Schramowski et al., arXiv 2211.05105) circulates in two spellings: `sd_seed`,
`sd_guidance_scale` (the original, and SPM's copy) and `evaluation_seed`, `evaluation_guidance`
(ESD, UnlearnDiffAtk, MUNBa). Both are read. A row's own seed and guidance are used for its image,
as in the papers; all other columns become fields.

A shipped set may name a table that users must get for themselves, by `data://NAME`. The file is
looked for in $CONCEPT_ERASER_DATA, in the folder `data`, and in the folder `data` of the cache.

Rows are chosen by `where`: {categories: sexual} for a column that lists several values,
{nudity_percentage: "> 50"} for a number, {source: lexica} for a word.
"""

from __future__ import annotations

import csv
import io
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concept_eraser.data import templates
from concept_eraser.data.templates import text_problem
from concept_eraser.models import hub
from concept_eraser.storage.readers import TABLE_BYTES, parse_json, read_text
from concept_eraser.utils import limits, resources
from concept_eraser.utils.errors import UserError, first_line, names_text, quote

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")
HUB = "hf://"
DATA = "data://"
_TEXT = ("prompt", "text", "caption")
_PROMPT = ""  # where a row has the text of a template; no column of a table has this name
_SEED = ("evaluation_seed", "sd_seed", "seed")
_GUIDANCE = ("evaluation_guidance", "sd_guidance_scale", "guidance")
_COMPARE = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
}
_CONDITION = re.compile(r"(>=|<=|==|>|<)\s*(.+)", re.DOTALL)
_OWNER, _FILE = re.compile(r"[A-Za-z0-9][\w.-]*"), re.compile(r"[\w .()+@-]+")


@dataclass(frozen=True)
class Row:
    """A prompt with the values of its row."""

    text: str
    fields: Mapping[str, str]
    seed: int | None
    guidance: float | None


def from_hub(address: str) -> Path:
    """Return the file `hf://owner/dataset/path/in/it.csv`, from the hub or its cache on disk.

    Raises UserError if the address is incomplete or the hub (or the cache of a machine without
    network) has no such file.
    """
    parts = address.removeprefix(HUB).split("/")
    if len(parts) < 3 or not all(parts):
        raise UserError(f"{quote(address)} names no file; write {HUB}owner/dataset/file.csv")
    owner, *path = parts
    if not all(map(_OWNER.fullmatch, (owner, path[0]))) or not all(
        _FILE.fullmatch(p) and p.strip(".") for p in path
    ):
        raise UserError(
            f"{quote(address)} is no address of a file on the hub; write "
            f"{HUB}owner/dataset/file.csv"
        )
    from huggingface_hub import hf_hub_download

    try:
        silent = hub.is_silent_about_dataset(f"{owner}/{path[0]}")
        return Path(
            hf_hub_download(
                f"{owner}/{path[0]}",
                "/".join(path[1:]),
                repo_type="dataset",
                local_files_only=silent,
            )
        )
    except Exception as error:
        # the hub's client raises about twenty types, OSErrors and ValueErrors among them
        raise UserError(
            f"the hub, or its cache, did not give {quote(address)}: {first_line(error)}. "
            "Download the file and give its path"
        ) from None


def data_folders() -> list[Path]:
    """The folders of the tables that users get for themselves, in the order of the search."""
    folder = os.environ.get("CONCEPT_ERASER_DATA")
    own = [Path(folder).expanduser()] if folder else []
    return [*own, Path("data"), resources.cache() / "data"]


def require_data_name(address: str) -> str:
    """Return the file name in `data://NAME`. Raises ValueError unless it is a plain name."""
    name = address.removeprefix(DATA)
    is_table = Path(name).suffix.lower() in SUFFIXES
    if not _FILE.fullmatch(name) or not name.strip(".") or not is_table:
        raise ValueError(
            f"file: {quote(address)} names no table; write {DATA} and the name of a file ending "
            f"in {', '.join(SUFFIXES)}"
        )
    return name


def from_data(address: str, about: str = "") -> Path:
    """Return the file of `data://NAME` in one of `data_folders`.

    `about` is what the table is and where it is from, for the error. Raises UserError if no folder
    has the file.
    """
    name = require_data_name(address)
    for folder in data_folders():
        if (folder / name).is_file():
            return folder / name
    places = " or ".join(str(folder.absolute()) for folder in data_folders())
    raise UserError(
        f"the table {name} is missing, and nothing is downloaded"
        + (f" ({about.strip()[:300]})" if about.strip() else "")
        + f": put it into {places}, or name its folder by $CONCEPT_ERASER_DATA"
    )


def read(path: Path, where: Mapping[str, Any], template: str | None = None) -> list[Row]:
    """Return the rows of a table that meet all conditions, in its order.

    Args:
        path: The table.
        where: A condition for each of some columns.
        template: A text with names of columns in braces, which makes the prompt of a row. Rows with
            an empty cell in one of these columns are left out. None: the column of prompts.

    Raises:
        UserError: The file is no table of prompts, or has no such column.
        ValueError: The template is invalid.
    """
    if not path.exists():
        raise UserError(f"no such table of prompts: {path}; check the path")
    tests = {column: _test(condition) for column, condition in where.items()}
    rows = [(place, row) for place, row in _records(path) if row]
    if not rows:
        return []
    columns = dict.fromkeys(column for _, row in rows for column in row)
    names = [] if template is None else templates.fields(template)
    unknown_columns = [key for key in (*where, *names) if key not in columns]
    if unknown_columns:
        raise UserError(
            f"{path} has no column {quote(unknown_columns[0])}; it has {names_text(columns)}"
        )
    selection = []
    for place, row in rows:
        text, seed, guidance = (_column(row, known) for known in (_TEXT, _SEED, _GUIDANCE))
        if template is not None:
            if any(row.get(name) in (None, "") for name in names):
                continue
            text = _PROMPT
            row = {**row, text: templates.fill(template, row)}
        if text is None:
            raise UserError(
                f"{place} has no column of prompts ({' or '.join(_TEXT)}); it has {names_text(row)}"
            )
        if not row[text] or not all(test(row.get(column)) for column, test in tests.items()):
            continue
        words = row[text]
        if not isinstance(words, str) or not words.strip():
            raise UserError(f"{place}: {text} is {quote(words)}; expected a prompt, a text")
        if wrong := text_problem(words):
            raise UserError(f"{place}: the text {quote(words)} {wrong}")
        fields = {
            k: str(v)
            for k, v in row.items()
            if k not in (text, seed, guidance) and v not in (None, "")
        }
        own_seed = _number(row, seed, place, lambda value: limits.whole(value, 0, limits.SEED))
        own_guidance = _number(
            row, guidance, place, lambda value: limits.number(value, 0, limits.GUIDANCE)
        )
        selection.append(Row(words.strip(), fields, own_seed, own_guidance))
    return selection


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the rows of a table, each with its place for errors.

    Raises UserError for a file that is no table.
    """
    content = read_text(path, TABLE_BYTES)
    if "\0" in content:
        raise UserError(
            f"{path} is no {path.suffix[1:].upper()} of prompts: it holds null bytes; "
            "check that it is the right file"
        )
    if path.suffix.lower() in (".csv", ".tsv"):
        yield from _of_csv(path, content)
        return
    if path.suffix.lower() == ".jsonl":
        numbered_lines = (
            (number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()
        )
        records: Any = (
            (f"{path}, line {number}", _of_json(line, f"{path}, line {number}", path))
            for number, line in numbered_lines
        )
    else:
        value = _of_json(content, str(path), path)
        if isinstance(value, dict):  # COCO's captions: {"annotations": [{"caption": ...}, ...]}
            value = value.get("annotations", value.get("prompts"))
        if not isinstance(value, list):
            raise UserError(
                f"{path} is no JSON of prompts: expected a list of prompts, found {quote(value)}"
            )
        records = ((f"{path}, row {number}", row) for number, row in enumerate(value, 1))
    for place, row in records:
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, dict):
            raise UserError(
                f"{place}: expected a prompt or a mapping with a column "
                f"{' or '.join(_TEXT)}, found {quote(row)}"
            )
        yield place, row


def _of_csv(path: Path, content: str) -> Iterator[tuple[str, dict[str, Any]]]:
    by_tabs = path.suffix.lower() == ".tsv"  # published ones have bare quotes
    reader = csv.DictReader(
        io.StringIO(content, newline=""), delimiter="\t" if by_tabs else ",", strict=not by_tabs
    )
    try:
        reader.fieldnames = columns = [name.strip() for name in reader.fieldnames or ()]
        if twice := [name for name in columns if name and columns.count(name) > 1]:
            raise UserError(f"{path} has the column {quote(twice[0])} twice; rename or remove one")
        for number, row in enumerate(reader, 1):
            if number > limits.TABLE_ROWS:
                raise UserError(f"{path} has more than {limits.TABLE_ROWS:,} rows; split it")
            if None in row:  # cells without a column
                raise UserError(
                    f"{path}, line {reader.line_num}: the row has more cells than the "
                    f"{len(reader.fieldnames or ())} columns; put a text with commas "
                    "into quotes"
                )
            yield f"{path}, line {reader.line_num}", row
    except csv.Error as error:  # e.g. a cell of more than 131,072 characters
        raise UserError(
            f"{path} is no {path.suffix[1:].upper()} of prompts ({str(error)[:100]}, "
            f"line {reader.line_num}); check its quotes"
        ) from None


def _of_json(text: str, place: str, path: Path) -> Any:
    try:
        return parse_json(text, place, object)
    except UserError as error:
        raise UserError(f"{path} is no {path.suffix[1:].upper()} of prompts: {error}") from None


def _column(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in row), None)


def _number(
    row: Mapping[str, Any], column: str | None, place: str, read: Callable[[Any], Any]
) -> Any:
    if column is None or row.get(column) in (None, ""):
        return None
    try:
        return read(row[column])
    except ValueError as error:
        raise UserError(f"{place}: {column} is {quote(row[column], 80)}: {error}") from None


def require_condition(condition: Any) -> None:
    """Raise UserError for an invalid value under `where`.

    Valid are a word, a number, or a comparison such as "> 50".
    """
    _test(condition)


def fulfils(value: Any, condition: Any) -> bool:
    """Whether a cell meets a condition.

    The condition is a comparison of numbers, or a word that the cell equals or lists. An empty cell
    meets none.
    """
    return _test(condition)(value)


def _test(condition: Any) -> Callable[[Any], bool]:
    """Return a function that tests whether a cell meets a condition."""
    if isinstance(condition, bool | int | float):
        condition = (
            str(condition) if isinstance(condition, float) or abs(condition) < 10**50 else None
        )
    if not isinstance(condition, str) or len(condition) > limits.FIELD:
        raise UserError(
            'where: expected a word, a number or a comparison such as "> 50", found '
            f"{quote(condition)}"
        )
    comparison = _CONDITION.fullmatch(condition.strip())
    if comparison is None:
        word = condition.strip().lower()
        return lambda cell: (
            cell not in (None, "")
            and word
            in {str(cell).strip().lower(), *(part.strip().lower() for part in str(cell).split(","))}
        )
    compare = _COMPARE[comparison[1]]
    try:
        bound = float(comparison[2])
        if not math.isfinite(bound):
            raise ValueError
    except ValueError:
        raise UserError(
            f'where: {quote(condition)} compares with no number; write e.g. "> 50"'
        ) from None

    def holds(cell: Any) -> bool:
        try:
            return cell not in (None, "") and bool(compare(float(cell), bound))
        except (TypeError, ValueError, OverflowError):
            return False

    return holds
