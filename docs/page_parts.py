"""Parts of generated pages: tables, lists of definitions, values as a recipe has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a table. Cells hold Markdown."""
    lines = [[*head], *rows]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def toctree(names: Iterable[str], *, title: str = "") -> str:
    """Write a table of contents that only the navigation shows."""
    caption = f":caption: {title}\n" if title else ""
    return "```{toctree}\n:hidden:\n" + caption + "\n" + "\n".join(names) + "\n```"


def page(*parts: str) -> str:
    """Join the parts of a page that are not empty."""
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def entry(name: str, kind: str, text: str, anchor: str) -> str:
    """Write an entry of a list of definitions: a name with its type, and its description."""
    body = "\n".join(f"  {line}".rstrip() for line in text.splitlines()).strip()
    anchor = re.sub(r"[^\w-]", "-", anchor)  # a dot begins a class
    return f"[{code(name)}]{{#{anchor} .key}} {kind}\n: {body or '&nbsp;'}\n"


def code(text: str) -> str:
    """Write text as code in a line."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def value(content: Any) -> str:
    """Write a value as a recipe has it."""
    if content is None:
        return "none"
    if isinstance(content, bool | int | str | list | dict | tuple):
        return content if isinstance(content, str) and content else json.dumps(content)
    return f"{content:g}" if isinstance(content, float) else str(content)


def first_line(documentation: str | None) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((documentation or "").split("\n\n")[0].split())
