"""The pages of docs/reference/generated, written from the code. conf.py calls `write_pages`.

Nothing of these pages is edited by hand: the text is in the docstrings, in the help texts of the
commands and in the descriptions of the recipe's keys.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any

from markdown_text import COPIES, GENERATED, ROOT, escape, from_docstring, rewrite_links
from page_parts import code, entry, first_line, page, table, toctree
from plugin_pages import KINDS, errata, plugin_pages
from schema_pages import recipe_page, suite_page

import concept_eraser

FOLDER = ROOT / GENERATED
# base classes of plug-ins that have pages, by module
BASES = {
    "concept_eraser.methods.base": ("Method", "GramMethod", "Closure", "Direction", "Edit"),
    "concept_eraser.methods.checks": ("check_laws",),
    "concept_eraser.losses.base": ("Loss",),
    "concept_eraser.evaluation.base": ("Judge", "Metric", "Evidence", "Result"),
    "concept_eraser.evaluation.attacks.base": ("Attack",),
}
_EXAMPLES = re.compile(r"\[bold\]Examples?\[/bold\]\n")
_MARKUP = re.compile(r"\[/?(?:bold|italic|dim|red|green|yellow|cyan)[^\]]*\]")


def write_pages(repository: str) -> None:
    """Write all pages, and remove files that are no longer among them. Unchanged files stay.

    Args:
        repository: The address of the repository on the web, for links to its files.
    """
    pages = {f"{GENERATED}/{name}": text for name, text in generate(repository)}
    pages |= {
        page: rewrite_links((ROOT / source).read_text(encoding="utf-8"), source, page, repository)
        for source, page in COPIES.items()
    }
    pages |= dict(figures())
    for name, text in pages.items():
        if name in COPIES.values():
            text = level_headings(text)
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in [*FOLDER.rglob("*.md"), *FOLDER.rglob("*.html")]:
        if path.relative_to(ROOT).as_posix() not in pages:
            path.unlink()


def figures() -> Iterator[tuple[str, str]]:
    """Yield the interactive figures of the studies, with links to pages of the site.

    They become files of the site's first folder.
    """
    for path in sorted((ROOT / "eval" / "results").glob("*.hover.html")):
        text = path.read_text(encoding="utf-8")
        page_link = r'target="_top" href="reference/generated/results/\1.html'  # out of its frame
        text = re.sub(r'href="(\w+)\.md', page_link, text)
        yield f"{GENERATED}/figures/{path.name}", text


def level_headings(text: str) -> str:
    """Let each heading be at most one level below the heading before it, as Sphinx requires."""
    level = 0
    lines = []
    for line in text.splitlines(keepends=True):
        match = re.match(r"(#+) ", line)
        if match:
            level = min(len(match[1]), level + 1)
            line = "#" * level + line[len(match[1]) :]
        lines.append(line)
    return "".join(lines)


def generate(repository: str) -> Iterator[tuple[str, str]]:
    """Yield the pages that are written from the code: path below the folder, and Markdown."""
    yield from api_pages()
    yield from command_pages()
    for kind in KINDS:
        yield from plugin_pages(kind, repository)
    yield "recipe.md", recipe_page()
    yield "suite.md", suite_page()
    yield "errata.md", errata(repository)
    yield "results/index.md", results_page()


def api_pages() -> Iterator[tuple[str, str]]:
    """Yield one page for each public name and for each base class of plug-ins."""
    functions, classes, errors = [], [], []
    for name in sorted(concept_eraser.__all__, key=str.lower):
        member = getattr(concept_eraser, name)
        is_error = isinstance(member, type) and issubclass(member, Exception)
        (errors if is_error else classes if isinstance(member, type) else functions).append(name)
        yield f"api/{name}.md", api_page("concept_eraser", name, member)
    bases = []
    for module_name, names in BASES.items():
        module = __import__(module_name, fromlist=["*"])
        for name in names:
            bases.append((name, first_line(inspect.getdoc(getattr(module, name)))))
            yield (
                f"api/{name}.md",
                api_page(module_name, name, getattr(module, name), undocumented=True),
            )

    def rows(names: list[str]) -> list[tuple[str, str]]:
        members = ((name, getattr(concept_eraser, name)) for name in names)
        return [(name, first_line(inspect.getdoc(member))) for name, member in members]

    parts = ["# Python interface", "Everything here is a name of the package `concept_eraser`."]
    for title, listed in (
        ("Functions", rows(functions)),
        ("Results", rows(classes)),
        ("Errors", rows(errors)),
        ("Base classes of plug-ins", bases),
    ):
        parts.append(f"## {title}")
        if title == "Base classes of plug-ins":
            parts.append("[Plug-ins of your own](../../../plugins.md) shows how they are used.")
        cells = ((f"[{code(name)}]({name}.md)", escape(text)) for name, text in listed)
        parts.append(table(["name", "what it is"], cells))
    parts += [
        "## Types of arguments",
        "The signatures use these names. A mapping of settings has the keys of the section in the "
        "[recipe](../recipe.md).",
        table(["name", "what is accepted"], argument_types()),
    ]
    names = [*functions, *classes, *errors, *(name for name, _ in bases)]
    yield "api/index.md", page(*parts, toctree(names))


def argument_types() -> Iterator[tuple[str, str]]:
    """Yield the names of types in the signatures with what they stand for."""
    from concept_eraser.models import base
    from concept_eraser.recipes import keywords

    names = {"ModelSource": base.ModelSource, **vars(keywords)}
    places = {
        "Objective": "forget",
        "Trajectory": "forget.trajectory",
        "Elastic": "forget.elastic",
        "Lora": "trainable.lora",
    }
    for name, kind in names.items():
        if isinstance(kind, type) and name.endswith("Settings"):
            section = name.removesuffix("Settings")
            place = places.get(section, section.lower())
            yield code(name), f"a mapping with the keys of [{code(place)}](#recipe-{place})"
        elif name[0].isupper() and getattr(kind, "__module__", "") != "collections.abc":
            text = kind if isinstance(kind, str) else re.sub(r"(?:\w+\.)+(?=\w)", "", str(kind))
            if isinstance(kind, str | UnionType) or text.startswith("Literal["):
                yield code(name), code(text)


def signature_of(function: Any) -> str:
    """Write the parameters of a function without types.

    It replaces the signatures of `typing.overload`, which differ in types only. Returns "" for a
    function without them: Sphinx reads its signature.
    """
    if not typing.get_overloads(function):
        return ""
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        default = parameter.default
        text = getattr(default, "__name__", repr(default))
        required = default is parameter.empty
        parameters.append(parameter.name if required else f"{parameter.name}={text}")
    return f"({', '.join(parameters)})"


def api_page(module: str, name: str, member: Any, *, undocumented: bool = False) -> str:
    """Write the page of a function or a class: its example, then what Sphinx reads.

    Args:
        module: The module that the page names.
        name: The name in that module.
        member: The function or the class.
        undocumented: Show members without a docstring too.
    """
    if isinstance(member, type):
        is_error = issubclass(member, Exception)
        options = [] if is_error else ["   :members:", "   :inherited-members:"]
        options += ["   :undoc-members:"] if undocumented and not is_error else []
        lines = [f".. autoclass:: {name}", *options]
    else:
        lines = [f".. autofunction:: {name}{signature_of(member)}"]
    lines = [f".. currentmodule:: {module}", "", *lines]
    example = example_code(inspect.getdoc(member) or "")
    return page(
        f"# {name}",
        f"```python\n{example}\n```" if example else "",
        "```{eval-rst}\n" + "\n".join(lines) + "\n```",
    )


def example_code(documentation: str) -> str:
    """Return the code of a docstring's example, without prompts and results."""
    lines = re.findall(r"^ *(?:>>>|\.\.\.)(?: (.*)|$)", documentation, flags=re.M)
    return "\n".join(lines).strip()


def without_example(lines: list[str]) -> list[str]:
    """Remove the section with the example from the lines of a docstring."""
    start = next((i for i, line in enumerate(lines) if line.strip() == "Example:"), None)
    if start is None:
        return lines
    rest = lines[start + 1 :]
    end = next((i for i, line in enumerate(rest) if line and not line.startswith(" ")), len(rest))
    return [*lines[:start], *rest[end:]]


def command_pages() -> Iterator[tuple[str, str]]:
    """Yield one page for each command."""
    import typer.main

    from concept_eraser.cli.application import app

    group: Any = typer.main.get_command(app)
    rows = []
    for name, command in group.commands.items():
        text, _ = help_text(command)
        rows.append((f"[{code(name)}]({name}.md)", escape(first_line(text))))
        yield f"cli/{name}.md", command_page(name, command)
    parts = [
        "# Command line",
        "`concept-eraser --help` lists the commands, and `concept-eraser COMMAND --help` shows one "
        "of them. A wrong input ends with one line that says what to change, and with exit code 2. "
        "Ctrl-C ends with exit code 130.",
        table(["command", "what it does"], rows),
        toctree(group.commands),
    ]
    yield "cli/index.md", page(*parts)


def help_text(command: Any) -> tuple[str, list[str]]:
    """Return the explanation of a command and its examples, without markup."""
    text, *examples = _EXAMPLES.split(inspect.cleandoc(command.help or ""))
    lines = [line.strip() for line in "\n".join(examples).splitlines()]
    return _MARKUP.sub("", text).strip(), [line for line in lines if line]


def command_page(name: str, command: Any) -> str:
    """Write the page of a command."""
    path = f"{GENERATED}/cli/{name}.md"
    text, examples = help_text(command)
    context = command.make_context(f"concept-eraser {name}", [], resilient_parsing=True)
    usage = command.get_usage(context).removeprefix("Usage: ")
    entries: dict[str, list[str]] = {"argument": [], "option": []}
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None:  # hidden
            continue
        title = re.sub(r"<list\[(.*?)\]>", r"<\1>", record[0])
        if parameter.param_type_name == "argument":
            title = re.sub(r"\s*<\w+>$", "", title)
        anchor = f"{name}-{parameter.name.replace('_', '-')}"
        description = escape(_MARKUP.sub("", record[1]), path)
        entries[parameter.param_type_name].append(entry(title, "", description, anchor))
    parts = [f"# {name}", from_docstring(text, path), f"```text\n{usage}\n```"]
    if examples:
        parts += ["## Examples", "```sh\n" + "\n".join(example_lines(examples)) + "\n```"]
    for title, lines in (("Arguments", entries["argument"]), ("Options", entries["option"])):
        if lines:
            parts += [f"## {title}", "\n".join(lines)]
    return page(*parts)


def example_lines(examples: list[str]) -> Iterator[str]:
    """Yield examples with their remarks, which follow in brackets, as comments."""
    for example in examples:
        match = re.fullmatch(r"(.*?)\s{2,}\((.*)\)", example)
        yield f"{match[1]}    # {match[2]}" if match else example


def results_page() -> str:
    """Write the index of the pages of the studies."""
    names = [Path(source).stem for source in COPIES if source.startswith("eval/results/")]
    rows = []
    for name in names:
        text = (ROOT / "eval" / "results" / f"{name}.md").read_text(encoding="utf-8")
        rows.append((f"[{code(name)}]({name}.md)", text.splitlines()[0].removeprefix("# ")))
    return page(
        "# Pages of the studies",
        "Every number of the studies, rendered from their tables. [Results]"
        "(../../../explanation/results.md) has the conclusions and the limits.",
        table(["study", "title"], rows),
        toctree(names),
    )
