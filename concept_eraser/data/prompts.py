"""Prompt sets: plain data that a user reads, copies and edits.

A set is a YAML file (or a plain text file with one prompt per line):

    about: what it is and where it comes from
    prompts:                      # rows: a text, or a mapping with `text` and any further fields
      - a photo of a tench
      - {text: a photo of a cassette player, class: cassette player}
      - {text: ""}                # the empty prompt, which only this form gives
    expand:                       # and / or the product of templates and fields
      templates: ["a {style} {color} star", "{color} star"]
      color: [red, blue]
      style: [flat, striped]

`expand` may also be a list of such products, whose prompts are joined.

A table is a prompt set too: a CSV, JSONL or JSON file (see tables.py), or a YAML file that takes
some of its rows:

    about: the rows of I2P that are sexual
    file: hf://AIML-TUDA/i2p/i2p_benchmark.csv      # or a path, or data://i2p.csv (tables.py)
    where: {categories: sexual, nudity_percentage: "> 50"}
    template: "a photo of {noun}"    # a prompt from other columns; may be left out

A set may include shipped sets by name, and leave out the rows that mention a word:

    include: [general]
    without: [star, pentagram]

A recipe or a suite may hold the same keys in place of a name, apart from `file`, `where`
and `template`.

Every field of a row can be used in an anchor: with `anchor: "a {color} square"` each prompt gets
its own; with `anchor: {shape: circle}` it is the prompt's own template with another shape. A value
given as a list (`color: [[crimson, red], ...]`) is the word that is written and the value it stands
for. `a(n)` becomes a or an.

A set may come from a stranger, so its file names a table on the hub, in its own folder or in the
user's folders of data, and templates fill in plain names only (templates.py). All mistakes in a
file are reported at once.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from concept_eraser.data import inflection, tables, templates
from concept_eraser.storage.readers import read_text, read_yaml
from concept_eraser.utils import limits, resources
from concept_eraser.utils.errors import (
    UserError,
    mistakes_message,
    names_text,
    quote,
    unknown_message,
)
from concept_eraser.utils.provenance import fingerprint


@dataclass(frozen=True)
class Prompt:
    """A prompt and the values of its fields.

    A prompt of a template also has the template and its words.
    """

    text: str
    # e.g. {"shape": "star", "color": "red"}
    fields: Mapping[str, str] = field(default_factory=dict)
    # e.g. {"shape": "pentagram", "color": "crimson"}
    words: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    seed: int | None = None  # the seed of its image, if its source states one (I2P)
    guidance: float | None = None

    def anchor_prompt(self, anchor: str | Mapping[str, str]) -> str:
        """Return the anchor's prompt.

        It is a template filled with this prompt's fields, or this prompt with some of its fields
        replaced. Raises UserError for a field that the prompt lacks.
        """
        if isinstance(anchor, str):
            return self._fill(anchor, {**self.fields, **self.words})
        if self.template is None:
            raise UserError(
                f"the anchor {quote(dict(anchor))} replaces words of a template, but the "
                f"prompt {quote(self.text)} has none; write the anchor as a text"
            )
        own_fields = _fields_of(self.template)
        if not set(anchor) & set(own_fields):
            raise UserError(
                f"the anchor {quote(dict(anchor))} changes nothing in "
                f"{quote(self.text)}; its fields: {names_text(own_fields)}"
            )
        return self._fill(self.template, {**self.words, **anchor})

    def _fill(self, template: str, words: Mapping[str, str]) -> str:
        missing = [name for name in _fields_of(template) if name not in words]
        if missing:
            raise UserError(
                f"the template {quote(template)} needs the field {quote(missing[0])}, "
                f"which the prompt {quote(self.text)} does not have; it has: "
                f"{names_text(words) or 'none'}"
            )
        return render(template, words)


def _fields_of(template: str) -> list[str]:
    try:
        return templates.fields(template)
    except ValueError as error:
        raise UserError(str(error)) from None


def render(template: str, words: Mapping[str, str]) -> str:
    """Fill a template. `a(n)` becomes a or an, and runs of spaces become one.

    Raises UserError for an invalid template.
    """
    try:
        return templates.fill(template, words)
    except ValueError as error:
        raise UserError(str(error)) from None


@dataclass(frozen=True)
class PromptSet:
    name: str
    prompts: tuple[Prompt, ...]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def texts(self) -> list[str]:
        return [prompt.text for prompt in self.prompts]

    @property
    def hash(self) -> str:
        return fingerprint(
            [
                [
                    p.text,
                    sorted(p.fields.items()),
                    *(v for v in (p.seed, p.guidance) if v is not None),
                ]
                for p in self.prompts
            ]
        )

    def describe(self) -> dict[str, Any]:
        """Return the set's id, number of rows and hash, which are stored with results."""
        return {"id": self.name, "rows": len(self), "hash": self.hash}

    def take(self, n: int, seed: int = 0) -> PromptSet:
        """Return `n` rows in a seeded random order, several times in turn if the set is smaller.

        A row's own seed counts once, or its image would occur twice.
        """
        rng = np.random.default_rng([seed, 0x5EED])
        rounds = -(-n // len(self))
        order = np.concatenate([rng.permutation(len(self)) for _ in range(rounds)])[:n]
        drawn_prompts = (
            self.prompts[i] if place < len(self) else replace(self.prompts[i], seed=None)
            for place, i in enumerate(order)
        )
        return PromptSet(self.name, tuple(drawn_prompts))


def load(source: str | Path | Sequence[str] | Mapping[str, Any] | PromptSet) -> PromptSet:
    """A prompt set by name or path, from a list of texts, or from a mapping as in a file.

    Raises:
        UserError: The set is unknown, empty or malformed.
    """
    if isinstance(source, PromptSet):
        return source
    if isinstance(source, str | Path):
        path = (
            tables.from_hub(str(source))
            if str(source).startswith(tables.HUB)
            else resources.find("prompts", str(source))
        )
        is_shipped = path.parent == resources.folder("prompts")
        rows, name = _read_shipped(path) if is_shipped else _read(path), path.stem
    elif isinstance(source, Mapping):
        rows, name = _rows(source, "the prompt set", INLINE_KEYS), "inline"
    else:
        mistakes, name = _Mistakes(), "given"
        rows = mistakes.all(_row, source, "prompt")
        mistakes.require_none("the given list")
    if not rows:
        raise UserError(f"the prompt set {quote(name)} is empty; give it at least one prompt")
    return PromptSet(name, tuple(rows))


_CHARACTERS = 100_000_000  # characters of all prompts of an expansion
KEYS = ("about", "include", "prompts", "expand", "without", "file", "where", "template")
INLINE_KEYS = KEYS[:5]  # of a set that a recipe or a suite holds: it has no folder of its own


class _Mistakes:
    """Collects the mistakes in a file, so that all are reported at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def all(self, read: Callable[[Any], Any], items: Iterable[Any], what: str) -> list[Any]:
        """Return the result of `read` for each item.

        A mistake is collected with the number of the item, counted from 1.
        """
        rows = []
        for place, item in enumerate(items, 1):
            try:
                rows.append(read(item))
            except ValueError as error:
                self.lines.append(f"{what} {place}: {error}")
                if len(self.lines) >= 100:
                    break
        return rows

    def one(self, read: Callable[[Any], Any], item: Any, default: Any) -> Any:
        """Return the result of `read` for one item, or the default after a mistake."""
        try:
            return read(item)
        except ValueError as error:
            self.lines.append(str(error))
            return default

    def require_none(self, where: str) -> None:
        if self.lines:
            raise UserError(mistakes_message(self.lines, where))


def _read_shipped(path: Path) -> Sequence[Prompt]:
    """The rows of a shipped set. A file that did not change is read once in a process."""
    status = path.stat()
    rows = _read_once(path, status.st_mtime_ns, status.st_size)
    return _read(path) if rows is None else rows


@lru_cache(maxsize=256)
def _read_once(path: Path, _time: int, _size: int) -> tuple[Prompt, ...] | None:
    """The rows of a set, which includes shipped sets at most. None if it has a table."""
    if re.search(r"^file:", read_text(path), flags=re.M):
        return None
    return tuple(_read(path))


def _read(path: Path) -> list[Prompt]:
    if path.suffix.lower() in tables.SUFFIXES:
        return _of_table(path, {})
    mistakes = _Mistakes()
    if path.suffix.lower() == ".txt":
        # str.splitlines would also split a prompt at rare characters such as U+2028
        all_lines = re.split(r"\r\n|\r|\n", read_text(path))
        lines = (line.strip() for line in all_lines if not line.startswith("#"))
        rows = mistakes.all(_row, filter(None, lines), "prompt")
        mistakes.require_none(str(path))
        return rows
    content = {} if (content := read_yaml(path)) is None else content
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: expected a mapping with `prompts` or `expand`, found a "
            f"{type(content).__name__}"
        )
    return _rows(content, str(path), KEYS, path)


def _rows(
    content: Mapping[str, Any], name: str, keys: Sequence[str], path: Path | None = None
) -> list[Prompt]:
    """The prompts of a mapping with the keys of a set.

    Args:
        content: The mapping.
        name: What errors call the set.
        keys: The allowed keys.
        path: The file of the set. Its table lies beside it.

    Raises:
        UserError: With every mistake.
    """
    mistakes = _Mistakes()
    mistakes.lines += [
        unknown_message("key", str(key)[:200], keys) for key in content if key not in keys
    ]
    if not isinstance(content.get("about", ""), str | None):
        mistakes.lines.append(
            f"about: expected a text, found {quote(content['about'])}; put it in quotes"
        )
    entries = content.get("prompts") or []
    if not isinstance(entries, list):
        mistakes.lines.append(f"prompts: expected a list of texts, found {quote(entries)}")
        entries = []
    rows = mistakes.all(_row, entries, "prompt")
    included_sets = mistakes.one(partial(_names, "include"), content.get("include"), [])
    included_rows = mistakes.all(_included, included_sets, "include, name")
    words = mistakes.one(partial(_names, "without"), content.get("without"), [])
    where = mistakes.one(_conditions, content.get("where"), {})
    table = None
    if path is not None:
        table = mistakes.one(partial(_beside, path), content.get("file"), None)
    template = mistakes.one(_template, content.get("template"), None)
    if where and content.get("file") is None:
        mistakes.lines.append(
            "where: there is no `file` whose rows it could choose; add it, or remove `where`"
        )
    if template is not None and content.get("file") is None:
        mistakes.lines.append(
            "template: there is no `file` whose columns it could name; for lists of values use "
            "`expand`"
        )
    expansion = _expand(content.get("expand"), mistakes)
    mistakes.require_none(name)
    if isinstance(table, str):
        is_local = table.startswith(tables.DATA)
        about = str(content.get("about") or "")
        table = tables.from_data(table, about) if is_local else tables.from_hub(table)
    rows = [row for prompt_set in included_rows for row in prompt_set] + rows
    rows += (_of_table(table, where, template) if table is not None else []) + expansion
    mention = mention_pattern(words)
    return [row for row in rows if mention is None or not mention.search(row.text.casefold())]


def _names(key: str, value: Any) -> list[str]:
    """A list of texts, or one text. Raises ValueError for anything else."""
    entries = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or len(entries) > limits.WORDS:
        raise ValueError(
            f"{key}: expected a list of at most {limits.WORDS} texts, found {quote(value)}"
        )
    for entry in entries:
        if not isinstance(entry, str) or not entry.strip() or len(entry) > limits.TEXT:
            raise ValueError(f"{key}: expected texts, found {quote(entry)}")
    return entries


def _included(name: str) -> tuple[Prompt, ...]:
    """The prompts of a shipped set. Raises ValueError for any other name."""
    shipped_names = resources.names("prompts")
    if name not in shipped_names:
        raise ValueError(unknown_message("shipped prompt set", name[:200], shipped_names))
    return load(name).prompts


def mentions(text: str, words: Iterable[str]) -> bool:
    """Whether a text has one of some words or phrases as whole words.

    Case does not count. A word also matches its plural, and a plural its singular.

    Example:
        >>> mentions("two Stars over a church", ["star"])
        True
    """
    pattern = mention_pattern(words)
    return pattern is not None and pattern.search(text.casefold()) is not None


def mention_pattern(words: Iterable[str]) -> re.Pattern[str] | None:
    """The expression that `mentions` looks for in a casefolded text; None for no words."""
    names = [word.strip().casefold() for word in words]
    names = [one for name in names for one in (name, *inflection.singulars(name))]
    forms = dict.fromkeys(one for name in names for one in (name, *inflection.plurals(name)))
    choices = "|".join(map(re.escape, forms))
    return re.compile(rf"(?<!\w)(?:{choices})(?:e?s)?(?!\w)") if choices else None


def _conditions(where: Any) -> dict[str, Any]:
    """Return the conditions under `where`.

    Raises ValueError if they are no mapping of columns to conditions.
    """
    if where is None:
        return {}
    if not isinstance(where, dict) or not all(isinstance(key, str) for key in where):
        raise ValueError(
            f"where: expected a mapping of columns to conditions, found {quote(where)}"
        )
    for condition in where.values():
        tables.require_condition(condition)
    return where


def _beside(path: Path, file: Any) -> Path | str | None:
    """Return the table that a set's file names: an address, or a file in the set's own folder.

    A set may come from a stranger, and the content of a table is written into the run's folder. So
    neither `..` nor a link may lead out of the folder. Raises ValueError for others.
    """
    if file is None:
        return None
    if not isinstance(file, str) or not file.strip() or not file.isprintable():
        raise ValueError(
            f"file: expected the path of a table, {tables.HUB}owner/dataset/file.csv or "
            f"{tables.DATA}file.csv, found {quote(file)}"
        )
    if file.startswith(tables.HUB):
        return file
    if file.startswith(tables.DATA):
        tables.require_data_name(file)
        return file
    table_path = Path(file)
    if table_path.is_absolute() or ".." in table_path.parts or "\\" in file:
        raise ValueError(
            f"file: {quote(file)} leads out of the set's folder; copy the table into "
            "that folder, or give its path as the prompt set itself"
        )
    if table_path.suffix.lower() not in tables.SUFFIXES:
        raise ValueError(
            f"file: {quote(file)} is no table; expected a file ending in "
            f"{', '.join(tables.SUFFIXES)}"
        )
    table = path.parent / table_path
    try:
        inside = table.resolve().is_relative_to(path.parent.resolve())
    except (OSError, RuntimeError):  # a name that is too long, links that form a circle
        inside = True  # the reader raises the error
    if not inside:
        raise ValueError(
            f"file: {quote(file)} is a link that leads out of the set's folder; copy the "
            "table into that folder"
        )
    return table


def _template(value: Any) -> str | None:
    """Return the text under `template`. Raises ValueError if it names no column."""
    if value is None:
        return None
    if not isinstance(value, str) or not templates.fields(value):
        raise ValueError(
            "template: expected a text with the name of a column in braces, e.g. "
            f'"a photo of {{noun}}", found {quote(value)}'
        )
    return value


def _of_table(path: Path, where: Mapping[str, Any], template: str | None = None) -> list[Prompt]:
    rows = [
        Prompt(row.text, row.fields, seed=row.seed, guidance=row.guidance)
        for row in tables.read(path, where, template)
    ]
    if not rows and where:
        raise UserError(
            f"no row of {path.name} has {names_text(f'{k}: {v}' for k, v in where.items())}"
        )
    return rows


def _row(item: Any) -> Prompt:
    """Make a prompt from an entry of a list. Raises ValueError if it is none."""
    if isinstance(item, Prompt):
        return item
    entry = {"text": item} if isinstance(item, str) else item
    text = entry.get("text") if isinstance(entry, dict) else None
    if not isinstance(text, str) or not (text.strip() or item == {"text": ""}):
        raise ValueError(f"expected a prompt or a mapping with `text`, found {quote(item)}")
    if wrong := templates.text_problem(text):
        raise ValueError(f"the text {quote(text)} {wrong}")
    fields = {
        _field(key): _word(key, value)
        for key, value in entry.items()
        if key not in ("text", "seed", "guidance")
    }
    seed, guidance = entry.get("seed"), entry.get("guidance")
    try:
        seed = None if seed is None else limits.whole(seed, 0, limits.SEED)
        guidance = None if guidance is None else limits.number(guidance, 0, limits.GUIDANCE)
    except ValueError as error:
        raise ValueError(f"seed and guidance are numbers: {error}") from None
    return Prompt(text.strip(), fields, seed=seed, guidance=guidance)


def _field(name: Any) -> str:
    if not isinstance(name, str) or not name or len(name) > limits.FIELD:
        raise ValueError(
            f"the name of a field is a text of at most {limits.FIELD} characters, found "
            f"{quote(name)}"
        )
    return name


def _word(field_name: str, value: Any) -> str:
    """Return a value of a field as it is written. Raises ValueError if it is no text or number."""
    if not isinstance(value, str | int | float):
        raise ValueError(
            f"{field_name}: expected a text or a number, found {quote(value)}; put a date in quotes"
        )
    if isinstance(value, int) and abs(value) > 10**50:
        raise ValueError(f"{field_name}: {quote(value)} has too many digits; put it in quotes")
    if wrong := templates.text_problem(str(value)):
        raise ValueError(f"{field_name}: {quote(value)} {wrong}")
    return str(value)


def _value(name: str, value: Any) -> tuple[str, str]:
    """Return the written word for a value of a field, and the value that it stands for.

    The two are equal, unless the value is a list of both.
    """
    if isinstance(value, list):
        if len(value) != 2:
            raise ValueError(
                "a list stands for the word that is written and the value it stands "
                f"for; found {quote(value)}"
            )
        return _word(name, value[0]), _word(name, value[1])
    return _word(name, value), _word(name, value)


def _expand(rules: Any, mistakes: _Mistakes) -> list[Prompt]:
    """Return the prompts of one product of templates and fields, or of a list of products.

    They have no duplicates. After a mistake the list is empty.
    """
    if not isinstance(rules, list):
        return _product(rules, mistakes)
    if len(rules) > limits.PRODUCTS:
        mistakes.lines.append(
            f"expand: expected at most {limits.PRODUCTS} products, found {len(rules):,}"
        )
        return []
    rows: dict[str, Prompt] = {}
    for rule in rules:
        for row in _product(rule, mistakes):
            rows.setdefault(row.text, row)
        if len(rows) > limits.ROWS:
            mistakes.lines.append(
                f"expand: its products give more than {limits.ROWS:,} prompts; give fewer values, "
                "or several sets"
            )
            return []
    return list(rows.values())


def _product(rule: Any, mistakes: _Mistakes) -> list[Prompt]:
    """Return all combinations of the fields in all templates, in a fixed order, as `_expand`."""
    if rule is None or rule == {}:
        return []
    if not isinstance(rule, dict):
        mistakes.lines.append(
            f"expand: expected a mapping with `templates` and fields, found {quote(rule)}"
        )
        return []
    texts = rule.get("templates")
    texts = [texts] if isinstance(texts, str) else texts
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(template_text, str) for template_text in texts)
    ):
        mistakes.lines.append(f"expand: templates is a list of texts, found {quote(texts)}")
        return []
    before = len(mistakes.lines)
    values = _values_of(rule, mistakes)
    pieces = mistakes.all(templates.parts, texts, "expand.templates, template")
    names = [
        list(dict.fromkeys(name for _, name in template_text if name is not None))
        for template_text in pieces
    ]
    if len(pieces) == len(texts):
        for template, some in zip(texts, names, strict=True):
            undefined_names = [name for name in some if name not in rule or name == "templates"]
            if undefined_names:
                mistakes.lines.append(
                    f"expand: the template {quote(template)} uses {quote(undefined_names[0])}, "
                    f"which has no list of values; fields: {names_text(values)}"
                )
    if len(mistakes.lines) == before:
        mistakes.lines += _too_much(pieces, names, values)
    if len(mistakes.lines) > before:
        return []
    rows: dict[str, Prompt] = {}
    for template, piece, some in zip(texts, pieces, names, strict=True):
        for combination in itertools.product(*(values[name] for name in some)):
            words = {n: word for n, (word, _) in zip(some, combination, strict=True)}
            text = templates.fill_parts(piece, words)
            if text not in rows:
                fields = {n: value for n, (_, value) in zip(some, combination, strict=True)}
                rows[text] = Prompt(text, fields, words, template)
    if "" in rows:
        mistakes.lines.append("expand: a template gives a prompt without any text; give it a word")
    return list(rows.values())


def _values_of(rule: Mapping[Any, Any], mistakes: _Mistakes) -> dict[str, list[tuple[str, str]]]:
    """Return the fields of an expansion, each with its words and the values that they stand for."""
    values: dict[str, list[tuple[str, str]]] = {}
    for name, some in rule.items():
        if name == "templates":
            continue
        if not isinstance(name, str) or isinstance(some, dict) or some is None or some == []:
            mistakes.lines.append(
                f"expand: {quote(name)} needs a list of values, found {quote(some)}"
            )
            continue
        entries = some if isinstance(some, list) else [some]
        values[name] = mistakes.all(partial(_value, name), entries, f"expand.{name[:60]}, value")
    return values


def _too_much(
    pieces: list[Any], names: list[list[str]], values: Mapping[str, list[tuple[str, str]]]
) -> list[str]:
    """Return the mistakes in the size of an expansion, which is computed before it is made."""
    counts = [min(math.prod(len(values[name]) for name in some), 10**18) for some in names]
    if sum(counts) > limits.ROWS:
        return [
            (
                f"expand: its templates and values give {sum(counts):,} prompts; at most "
                f"{limits.ROWS:,} are made. Give fewer values, or several sets"
            )
        ]
    longest = {name: max(len(word) for word, _ in some) for name, some in values.items()}
    sizes = [
        sum(len(text) + (longest[name] if name is not None else 0) for text, name in piece)
        for piece in pieces
    ]
    if max(sizes) > limits.TEXT:
        return [
            (
                f"expand: a prompt would have {max(sizes):,} characters; at most "
                f"{limits.TEXT:,} are read"
            )
        ]
    total = sum(size * count for size, count in zip(sizes, counts, strict=True))
    if total > _CHARACTERS:
        return [
            (
                f"expand: its prompts would have {total:,} characters in all; at most "
                f"{_CHARACTERS:,} are made"
            )
        ]
    return []


def slips(
    anchors: Mapping[str, str | Mapping[str, str] | None], sets: Mapping[str, PromptSet]
) -> list[str]:
    """Return warnings of anchor words that are probably misspelt.

    Such a word occurs in no prompt, but is similar to one that does. If all of an objective's
    prompts have one value, the anchor replaces it, and may be similar to it (a house, a horse).
    """
    messages = []
    for objective, anchor in anchors.items():
        for name, value in (
            anchor.items() if isinstance(anchor, Mapping) and objective in sets else ()
        ):
            all_values, own_values = _values(name, sets.values()), _values(name, [sets[objective]])
            candidates = all_values - own_values if len(own_values) == 1 else all_values
            close = difflib.get_close_matches(str(value), candidates, n=1, cutoff=0.8)
            if close and str(value) not in all_values:
                messages.append(
                    f"the anchor's {name} {quote(value)} is in none of the prompts; did "
                    f"you mean {quote(close[0])}?"
                )
    return messages


def _values(name: str, sets: Iterable[PromptSet]) -> set[str]:
    rows = [row for prompt_set in sets for row in prompt_set.prompts]
    return {str(of[name]) for row in rows for of in (row.fields, row.words) if name in of}


def require_disjoint(forget: PromptSet, retain: PromptSet) -> None:
    """Raise UserError if a prompt is both in the forget set and in the retain set."""
    shared = sorted(set(forget.texts) & set(retain.texts))
    if shared:
        raise UserError(
            f"{len(shared)} prompts are in both the forget set {forget.name!r} and the "
            f"retain set {retain.name!r}, e.g. {quote(shared[0])}; remove them from one"
        )
