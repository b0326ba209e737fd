"""concept-eraser list, show, check, copy"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from concept_eraser import registry
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError, unknown

_DATA = {"recipes": "pipelines", "prompts": "prompts", "suites": "eval"}
_PLUGINS = {
    "methods": "method",
    "losses": "loss",
    "metrics": "metric",
    "features": "feature",
    "judges": "judge",
    "attacks": "attack",
    "datasets": "dataset",
    "architectures": "architecture",
}
_ALL = (
    "models",
    "methods",
    "losses",
    "selections",
    "metrics",
    "features",
    "judges",
    "attacks",
    "datasets",
    "architectures",
    "presets",
    *_DATA,
)


def list_(
    what: Annotated[
        str,
        typer.Argument(
            help=(
                "models, methods, losses, selections, metrics, features, judges, attacks, "
                "datasets, architectures, presets, recipes, prompts or suites"
            )
        ),
    ] = "all",
) -> None:
    """List the available names, with one line about each.

    [bold]Examples[/bold]

      concept-eraser list

      concept-eraser list methods
    """
    if what not in (*_ALL, "all"):
        raise unknown("list", what, [*_ALL, "all"])
    for kind in _ALL if what == "all" else (what,):
        if what == "all":
            typer.echo(f"\n{kind}")
        for name, text in _entries(kind):
            typer.echo(f"  {name:<28} {text}")


def _entries(kind: str) -> list[tuple[str, str]]:
    if kind in _PLUGINS:
        plugins = [
            (
                name,
                (f"[{registry.family(name)}] " if kind == "attacks" else "")
                + registry.summary(_PLUGINS[kind], name),
            )
            for name in registry.names(_PLUGINS[kind])
        ]
        settings = registry.named(_PLUGINS[kind]).items()
        return plugins + [
            (
                alias,
                (
                    f"= {owner} with "
                    f"{', '.join(f'{k}: {v}' for k, v in options.items()) or 'its defaults'}"
                ),
            )
            for alias, (owner, options) in settings
        ]
    if kind in _DATA:
        return [
            (name, _about(resources.find(_DATA[kind], name)))
            for name in resources.names(_DATA[kind])
        ]
    if kind == "models":
        from concept_eraser.storage.base_model import BUNDLED_MODELS

        families = [name for name in registry.names("model") if name != "clip"]
        return [
            *BUNDLED_MODELS.items(),
            ("<folder | hub id>", f"a diffusers pipeline of a family: {', '.join(families)}"),
        ]
    if kind == "presets":
        from concept_eraser.recipes.memory_presets import PRESETS, describe

        return [(name, describe(name)) for name in PRESETS]
    from concept_eraser.recipes.selections import DESCRIPTIONS

    return [*DESCRIPTIONS.items(), ("re:<expression>", "every tensor whose name matches")]


def _about(path: Path) -> str:
    """Return the `about` of a data file, else its first comment."""
    lines = path.read_text(encoding="utf-8").splitlines()
    about = [
        line.removeprefix("about:").strip().strip("\"'")
        for line in lines
        if line.startswith("about:")
    ]
    comments = [
        line[2:].strip()
        for line in lines
        if line.startswith("# ") and not line.startswith("# concept-eraser")
    ]
    return next(iter([*about, *comments]), "")


KindOption = Annotated[
    Optional[str],
    typer.Option(help="recipes, prompts or suites, for a name that several of them have"),
]


def _data_file(name: str, kind: str | None) -> tuple[Path | None, str]:
    """Return the data file of a name, and a note on other kinds with this name.

    The file is None if there is none. Raises UserError for an unknown kind.
    """
    if kind is not None and kind not in _DATA:
        raise unknown("kind", kind, _DATA)
    kinds = [key for key in _DATA if name in resources.names(_DATA[key])]
    if kind is not None and kind not in kinds:
        raise unknown(kind.removesuffix("s"), name, resources.names(_DATA[kind]))
    if not kinds:
        return None, ""
    chosen_kind = kind or kinds[0]
    others = [key for key in kinds if key != chosen_kind]
    note = ""
    if others and kind is None:
        note = f" ({chosen_kind}; --kind {others[0]} takes the other file of this name)"
    return resources.find(_DATA[chosen_kind], name), note


# kinds of plug-ins, in the order in which `show` prints those of one name
_SHOW_KINDS = ("method", "attack", "loss", "judge", "metric", "feature", "dataset", "architecture")
_FIRST_KINDS = ("method", "attack")  # kinds that come before recipes, prompt sets and suites


def show(
    name: Annotated[
        str,
        typer.Argument(
            help=(
                "a method, attack, loss, judge, metric, feature extractor, data set, architecture, "
                "recipe, prompt set or suite"
            )
        ),
    ],
    kind: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "a kind of `concept-eraser list`, for a name that several kinds have, e.g. judges "
                "or suites"
            )
        ),
    ] = None,
) -> None:
    """Show a plug-in with its options and source, or the text of a recipe, prompt set or suite.

    [bold]Examples[/bold]

      concept-eraser show munba

      concept-eraser show tiny_star_munba

      concept-eraser show tiny --kind judges
    """
    if kind is not None and kind not in (*_PLUGINS, *_DATA):
        raise unknown("kind", kind, [*_PLUGINS, *_DATA])
    if kind in _PLUGINS:
        _show_plugins([_PLUGINS[kind]], name)
        return
    plugin_kinds = [one for one in _SHOW_KINDS if name in _names(one)]
    path, _ = _data_file(name, kind)
    if path is not None and (kind is not None or not set(plugin_kinds) & set(_FIRST_KINDS)):
        typer.echo(path.read_text(encoding="utf-8"), nl=False)
        return
    if plugin_kinds:
        _show_plugins(plugin_kinds, name)
        return
    names = [n for kind in _SHOW_KINDS for n in _names(kind)]
    names += [n for kind in _DATA.values() for n in resources.names(kind)]
    raise unknown("name", name, names)


def _names(plugin_kind: str) -> list[str]:
    """Return the names of the plug-ins of a kind, and of their settings."""
    return [*registry.names(plugin_kind), *registry.named(plugin_kind)]


def _show_plugins(plugin_kinds: Sequence[str], name: str) -> None:
    """Show the plug-in of this name of each kind. Raises UserError for an unknown name."""
    for number, plugin_kind in enumerate(plugin_kinds):
        if name not in _names(plugin_kind):
            raise unknown(plugin_kind, name, _names(plugin_kind))
        if number:
            typer.echo()
        if plugin_kind == "loss" and name in registry.builtin(plugin_kind):
            _show_loss(name)
        else:
            _show_plugin(plugin_kind, name)


def _show_loss(name: str) -> None:
    typer.echo(f"the loss {name} is, of each module of concept_eraser/losses:")
    for module, formula in registry.formulas(name).items():
        typer.echo(f"  {module:<14} {formula}")


def _show_plugin(kind: str, name: str) -> None:
    from concept_eraser.cli.descriptions import describe, settings_text

    plugin = describe(kind, name)
    if plugin.plugin != name:
        typer.echo(f"{name} is the {kind} {plugin.plugin} with {settings_text(plugin.fixed)}\n")
    source = f"source: {plugin.source}\n" if plugin.source else ""
    typer.echo(f"the {kind} {plugin.title}\n{source}")
    typer.echo("options:")
    for option in plugin.options:
        value = "(required)" if option.is_required else repr(option.value)
        typer.echo(
            f"  {option.name} = {value}    ({option.type_name})"
            + (f"    from: {option.origin}" if option.origin else "")
        )
    typer.echo(f"\n{plugin.documentation}\n")
    if plugin.settings:
        typer.echo(f"settings with a name of their own: {', '.join(plugin.settings)}")
    for label, text in plugin.facts:
        typer.echo(f"{label}: {text}\n")
    typer.echo(plugin.module_documentation)


def check(files: Annotated[list[Path], typer.Argument(help="recipe files")]) -> None:
    """Check recipes and report every mistake of every file. The exit code is 2 if there is one.

    [bold]Example[/bold]

      concept-eraser check my_recipe.yaml other.yaml
    """
    from concept_eraser.recipes import recipe

    mistakes = []
    for file in files:
        try:
            recipe.load(str(file))
            typer.echo(f"{file}: valid")
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError("\n".join(mistakes))


def copy(
    name: Annotated[str, typer.Argument(help="a recipe, prompt set or suite")],
    file: Annotated[Path, typer.Argument(help="the new file")],
    kind: KindOption = None,
) -> None:
    """Copy a recipe, prompt set or suite to a new file, to edit it.

    [bold]Example[/bold]

      concept-eraser copy tiny_star_munba my_recipe.yaml
    """
    from concept_eraser.storage.writers import write_text

    if file.exists():
        raise UserError(f"{file} exists already; give another name")
    path, note = _data_file(name, kind)
    if path is None:
        raise unknown(
            "recipe, prompt set or suite",
            name,
            [n for folder in _DATA.values() for n in resources.names(folder)],
        )
    if file.suffix.lower() != path.suffix:
        raise UserError(
            f"{file} would be read as another kind of file; end its name in {path.suffix}"
        )
    write_text(file, path.read_text(encoding="utf-8"))
    typer.echo(f"copied {name} to {file}{note}")
