"""The pages of methods, losses, attacks and the other plug-ins, and the errata of the papers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from markdown_text import GENERATED, ROOT, escape, from_docstring
from page_parts import code, entry, first_line, page, table, toctree, value

from concept_eraser import registry
from concept_eraser.cli.descriptions import PluginDescription, describe, settings_text

# the kinds of plug-ins that have pages, with what their index says
KINDS = {
    "method": "A method turns the gradients of the objectives into one step, or edits the model in "
    "one go. A recipe names it: `method: munba`, or `method: {name: munba, xi: 0.01}`.",
    "loss": "A loss says what forget or retain means. An objective of a recipe names it: `loss: "
    "anchor`. Each target has its own formula.",
    "attack": "An attack searches prompts, embeddings, ways of sampling or weights that recover "
    "the concept. Rates of different families answer different questions. The command is "
    "`concept-eraser attack RUN --attack NAME`.",
    "metric": "A metric is a number of an evaluation. A suite names its metrics.",
    "judge": "A judge decides whether an image shows a concept. A suite names its judge.",
    "feature": "Features turn images into rows of numbers, by which the metric `fid` compares two "
    "sets of images.",
    "dataset": "A labelled data set for the targets classifier, VAE and CLIP. An objective names "
    "it: `data: digits`.",
    "architecture": "A small network of the benchmarks in papers. The folder of a saved model "
    "names it.",
}
_DIFFERENCES = re.compile(
    r"^(?:.*[.:] )?((?:Deliberate d|D)ifferences?\b|There is a difference of\b)", re.M
)


def plugin_pages(kind: str, repository: str) -> Iterator[tuple[str, str]]:
    """Yield one page for each plug-in of this package, and the index of the kind."""
    folder = registry.plural(kind)
    rows = []
    head = ["name", "family", "what it is"] if kind == "attack" else ["name", "what it is"]
    for name in registry.builtin(kind):
        path = f"{GENERATED}/{folder}/{name}.md"
        cells = [f"[{code(name)}]({name}.md)", escape(registry.summary(kind, name), path)]
        if kind == "attack":
            cells.insert(1, registry.family(name))
        rows.append(cells)
        text = (
            loss_page(name, path)
            if kind == "loss"
            else plugin_page(describe(kind, name), path, repository)
        )
        yield f"{folder}/{name}.md", text
    parts = [f"# {folder.capitalize()}", KINDS[kind], table(head, rows)]
    if registry.named(kind):
        parts += [
            "## Settings with a name of their own",
            "Papers name some settings of these rules. Such a name can be used like the others.",
            settings_table(kind),
        ]
    parts.append(f"`concept-eraser list {folder}` prints these names.")
    yield f"{folder}/index.md", page(*parts, toctree(registry.builtin(kind)))


def settings_table(kind: str, plugin: str | None = None) -> str:
    """Write the table of the settings with a name: of all plug-ins of a kind, or of one."""
    rows = []
    for alias, (owner, fixed) in registry.named(kind).items():
        if plugin in (None, owner):
            target = f"[{code(owner)}]({owner}.md)"
            name = f"[{code(alias)}]{{#setting-{alias}}}" if plugin else code(alias)
            rows.append((name, target, escape(settings_text(fixed))))
    return table(["name", kind, "with"], rows)


def loss_page(name: str, path: str) -> str:
    """Write the page of a built-in loss: its formula for each kind of target."""
    titles = {
        "denoiser": "Denoiser of a text-to-image model",
        "text_encoder": "Text encoder",
        "labelled": "Classifier, CLIP model and VAE",
    }
    parts = [f"# {name}", f"The loss `{name}` has these forms. All losses are minimised."]
    for module, formulas in registry.formula_items(name).items():
        parts.append(f"## {titles.get(module, module)}")
        parts.append("\n".join(f"* {escape(text, path)}" for text in formulas))
        documentation = inspect.getdoc(__import__(f"concept_eraser.losses.{module}", fromlist="*"))
        lines = (documentation or "").split("\n\n")
        symbols = [line for line in lines if line.startswith(("With ", "Of ", "For "))]
        parts += [from_docstring(symbol.rstrip(":") + ".", path) for symbol in symbols]
    keys = "[the recipe's keys of an objective](#recipe-forget)"
    parts.append(f"Settings such as `eta`, `beta` or `anchor` are {keys}.")
    return page(*parts)


def plugin_page(plugin: PluginDescription, path: str, repository: str) -> str:
    """Write the page of a plug-in with a class."""
    file = f"{plugin.module.replace('.', '/')}.py"
    title = plugin.title if plugin.title != plugin.name else ""
    facts = [("Name", code(plugin.name))]
    facts += [("Source", escape(arxiv(plugin.source), path))] if plugin.source else []
    facts += [(label.capitalize(), escape(text)) for label, text in plugin.facts]
    facts += [("Code", f"[{code(file)}]({repository}/blob/main/{file})")]
    parts = [f"# {plugin.name}"]
    if title:
        parts.append(f"**{escape(title)}**")
    parts.append("\n".join(f"* {label}: {text}" for label, text in facts))
    if plugin.introduction:
        parts.append(from_docstring(plugin.introduction, path))
    if plugin.options:
        parts += ["## Options", "\n".join(option_entries(plugin, path))]
    if plugin.settings:
        parts += [
            "## Settings with a name of their own",
            settings_table(plugin.kind, plugin.name),
        ]
    summary, _, rest = plugin.module_documentation.partition("\n\n")
    parts += ["## Details", from_docstring(summary, path), from_docstring(rest, path)]
    return page(*parts)


def arxiv(source: str) -> str:
    """Write a bare arXiv id with the word before it."""
    return re.sub(r"(?<!arXiv )(?<![\w./])(\d{4}\.\d{4,5})\b", r"arXiv \1", source)


def option_entries(plugin: PluginDescription, path: str) -> Iterator[str]:
    """Yield the options of a plug-in with type, default, origin and explanation."""
    for option in plugin.options:
        default = "required" if option.is_required else f"default {code(value(option.value))}"
        text = [escape(option.text, path)] if option.text else []
        if option.origin:
            text.append(f"Origin of the default: {escape(option.origin, path)}.")
        kind = f"{type_text(option.type_name)}, {default}"
        yield entry(option.name, kind, "\n\n".join(text), f"option-{option.name}")


def type_text(name: str) -> str:
    """Write the type of an option in words: allowed values for a Literal."""
    match = re.fullmatch(r"Literal\[(.*)\]", name)
    if match:
        return " or ".join(code(one.strip().strip("'")) for one in match[1].split(","))
    if name.startswith("list of "):
        return f"list of {type_text(name.removeprefix('list of '))}, separated by commas"
    words = {"int": "integer", "float": "number", "bool": "true or false", "str": "text"}
    return " or ".join(words.get(one.strip(), escape(one.strip())) for one in name.split("|"))


def errata(repository: str) -> str:
    """Write what each module says about its differences from the paper."""
    parts = ["## Deliberate differences"]
    for title, folder in (
        ("Methods", "methods"),
        ("Losses", "losses"),
        ("Attacks", "evaluation/attacks"),
        ("Judges", "evaluation/judges"),
        ("Features", "evaluation/features"),
        ("Metrics", "evaluation/metrics"),
    ):
        parts.append(f"### {title}")
        for path in sorted((ROOT / "concept_eraser" / folder).glob("*.py")):
            module = __import__(
                f"concept_eraser.{folder.replace('/', '.')}.{path.stem}", fromlist="*"
            )
            documentation = inspect.getdoc(module) or ""
            text = differences(documentation)
            if not text:
                continue
            file = path.relative_to(ROOT).as_posix()
            page_path = "docs/reference/errata.md"
            parts.append(f"#### {path.stem}")
            parts.append(escape(first_line(documentation), page_path))
            parts.append(f"[{code(file)}]({repository}/blob/main/{file})")
            parts.append(from_docstring(text, page_path))
    return page(*parts)


def differences(documentation: str) -> str:
    """Return the part of a module's docstring about its differences from the paper, or ""."""
    match = _DIFFERENCES.search(documentation)
    if match is None:
        return ""
    first, *rest = documentation[match.start(1) :].split("\n\n")
    blocks = [first]
    for block in rest:
        if not block.startswith((" ", "*")):
            break
        blocks.append(block)
    return "\n\n".join(blocks)
