"""Templates of prompts: a text with the names of fields in braces, e.g. `a {color} {shape}`.

Only plain names are filled in. Python's other formatting (`{a.b}`, `{a[0]}`, `{a!r}`,
`{a:>1000000000}`) reads attributes of objects or makes texts of any length. A prompt needs neither.
`{{` and `}}` are braces.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

from concept_eraser.utils.errors import quote
from concept_eraser.utils.limits import FIELD, TEXT

_ARTICLE = re.compile(r"\ba\(n\) (?=(\w))")
_NAME = re.compile(r"[^\W\d][\w -]*")


def parts(template: str) -> list[tuple[str, str | None]]:
    """Split a template into pieces: (text, the field that follows it or None).

    Raises ValueError for an invalid template.
    """
    if wrong := text_problem(template):
        raise ValueError(f"the template {quote(template)} {wrong}")
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"the template {quote(template)}: {error}; write {{name}} for a field, and "
            "{{ or }} for a brace"
        ) from None
    for _, name, layout, conversion in pieces:
        if name is not None and (
            layout or conversion or not _NAME.fullmatch(name) or len(name) > FIELD
        ):
            inside = (
                name + (f"!{conversion}" if conversion else "") + (f":{layout}" if layout else "")
            )
            raise ValueError(
                f"the template {quote(template)} has {quote(inside, 60)} in braces; "
                "write the name of a field there, e.g. {color}, and {{ or }} for "
                "a brace"
            )
    return [(text, name) for text, name, _, _ in pieces]


def fields(template: str) -> list[str]:
    """Return the names of the fields of a template, each once, in order.

    Raises ValueError as `parts`.
    """
    return list(dict.fromkeys(name for _, name in parts(template) if name is not None))


def fill(template: str, words: Mapping[str, str]) -> str:
    """Fill a template with words. `a(n)` becomes a or an, and runs of spaces become one.

    Raises ValueError as `parts`, and KeyError for a field without a word.
    """
    return fill_parts(parts(template), words)


def fill_parts(pieces: list[tuple[str, str | None]], words: Mapping[str, str]) -> str:
    """Fill a template that is already split into pieces, as `fill`."""
    text = "".join(text + (str(words[name]) if name is not None else "") for text, name in pieces)
    text = " ".join(text.split())
    return _ARTICLE.sub(lambda match: "an " if match[1].lower() in "aeiou" else "a ", text)


def text_problem(text: str) -> str | None:
    """Return what is wrong with a text for a model, or None."""
    if len(text) > TEXT:
        return f"has {len(text):,} characters; at most {TEXT:,} are read"
    if "\0" in text:
        return "holds a null byte; remove it"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds half of a character (a lone surrogate); write the character itself"
    return None
