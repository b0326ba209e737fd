"""Plain docstrings and documents of the repository as Markdown of the documentation site."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "docs/reference/generated"
# documents outside docs/ that have a page of the site, by their path in the repository
COPIES = {
    "CHANGELOG.md": f"{GENERATED}/changelog.md",
    "CONTRIBUTING.md": f"{GENERATED}/contributing.md",
    "SECURITY.md": f"{GENERATED}/security.md",
    **{
        f"eval/results/{path.name}": f"{GENERATED}/results/{path.name}"
        for path in sorted((ROOT / "eval" / "results").glob("*.md"))
    },
}

SHOWN = {**COPIES, "eval/results/tiny_leaderboard.hover.html": "docs/explanation/leaderboard.md"}

_LINK = re.compile(r"(!?\[[^\]]*\])\(([^()\s]+)\)")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
_STRONG = re.compile(r"\*\*[^*]+\*\*|(?<![\w*/])\*\w+\*(?![\w*])")
_ARXIV = re.compile(r"arXiv[\s:]+(\d{4}\.\d{4,5})")
_PAGE = re.compile(r"(?<![\w/(\[`.])((?:docs|eval/results)/\w+\.md)\b")
_HELD = re.compile("\0(\\d+)\0")


def relative(target: str, page: str) -> str:
    """Return the path of a file of the repository, seen from a page. Both are from the root."""
    return os.path.relpath(target, os.path.dirname(page)).replace(os.sep, "/")


def rewrite_links(text: str, source: str, page: str, repository: str) -> str:
    """Adapt the links of a document to the place where it is shown.

    A link to a document of the site stays inside the site. A link to any other file of the
    repository leads to the repository on the web. Images are shown from their place.

    Args:
        text: The Markdown of the document.
        source: Its path in the repository, from the root.
        page: The path of the page that shows it, from the root.
        repository: The address of the repository.
    """

    def change(match: re.Match[str]) -> str:
        label, link = match.groups()
        path, hash_mark, fragment = link.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        target = os.path.normpath(os.path.join(os.path.dirname(source), path)).replace(os.sep, "/")
        target = SHOWN.get(target, target)
        if target.startswith("docs/") or label.startswith("!"):
            return f"{label}({relative(target, page)}{hash_mark}{fragment})"
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{label}({repository}/{kind}/main/{target}{hash_mark}{fragment})"

    return _LINK.sub(change, text)


def from_docstring(text: str, page: str) -> str:
    """Write a docstring as Markdown.

    Paragraphs and lists stay. Indented blocks become literal blocks. Characters with a meaning in
    Markdown are shown as they are, except for code in backticks and for words in bold.

    Args:
        text: The docstring, without indentation.
        page: The path of the page from the root of the repository, for links.
    """
    blocks: list[str] = []
    prose: list[str] = []
    code: list[str] = []
    column = 0  # where the text of the present list item begins
    lines = text.splitlines()

    def end_prose() -> None:
        if prose:
            blocks.append(escape("\n".join(prose), page))
            prose.clear()

    def end_code() -> None:
        while code and not code[-1].strip():
            code.pop()
        if code:
            indent = min(len(line) - len(line.lstrip()) for line in code if line.strip())
            fence = " " * column + "```"
            body = [" " * column + line[indent:] for line in code]
            blocks.append("\n".join([f"{fence}text", *body, fence]))
            code.clear()

    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            (code if code else prose).append("")
            continue
        after_blank = number == 0 or not lines[number - 1].strip()
        if (code or after_blank) and indent >= column + 4:
            end_prose()
            code.append(line)
            continue
        end_code()
        item = re.match(r"\s*(\*|\d+\.)\s+", line)
        if item:
            column = item.end() if item[1] != "*" else indent + 2
        elif after_blank and indent < column:
            column = 0
        if item and item[1] == "*":
            line = f"{line[:indent]}* {line[item.end() :]}"
        if item and prose and prose[-1].strip() and not re.match(r"\s*(\*|\d+\.)\s", prose[-1]):
            prose.extend([""] if indent == 0 and not prose[-1].startswith("  ") else [])
        prose.append(line)
    end_code()
    end_prose()
    return "\n\n".join(block.strip("\n") for block in blocks if block.strip())


def escape(text: str, page: str | None = None) -> str:
    """Show plain text as it is, except for code in backticks and words in bold.

    Args:
        text: One or more paragraphs, with the marks of lists.
        page: The path of the page from the root of the repository. With it, references to arXiv and
            to documents of the site become links.
    """
    held: list[str] = []

    def hold(markdown: str) -> str:
        held.append(markdown)
        return f"\0{len(held) - 1}\0"

    def page_link(match: re.Match[str]) -> str:
        target = COPIES.get(match[1], match[1])
        if not (ROOT / match[1]).is_file():
            return match[0]
        return hold(f"[{match[1]}]({relative(target, page or '')})")

    text = _CODE.sub(lambda match: hold(match[0]), text)
    text = _STRONG.sub(lambda match: hold(match[0]), text)
    if page is not None:
        text = _ARXIV.sub(lambda m: hold(f"[arXiv {m[1]}](https://arxiv.org/abs/{m[1]})"), text)
        text = _PAGE.sub(page_link, text)
    bullet = re.compile(r"^(\s*)\* ", re.M)
    text = bullet.sub(lambda match: f"{match[1]}{hold('*')} ", text)
    text = re.sub(r"([\\*_<>\[\]{}&#|])", r"\\\1", text)
    text = re.sub(r"^(\s*)([+=-])", r"\1\\\2", text, flags=re.M)
    while _HELD.search(text):
        text = _HELD.sub(lambda match: held[int(match[1])], text)
    return text
