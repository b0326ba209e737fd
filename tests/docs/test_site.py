"""The documentation site: it builds without a warning, is complete, and has no broken link."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import sphinx
import typer.main
from docutils.nodes import make_id

import concept_eraser
from concept_eraser import registry
from concept_eraser.cli.application import app
from concept_eraser.cli.descriptions import describe
from concept_eraser.evaluation.suite import Suite
from concept_eraser.recipes.recipe import Recipe
from tests.conftest import ROOT
from tests.demo.test_browser import CHROMIUM, FLAGS, PHONE, needs_browser
from tests.processes import Command

GENERATED = "reference/generated"
KINDS = (
    "method",
    "loss",
    "attack",
    "metric",
    "judge",
    "feature",
    "dataset",
    "architecture",
)
NARROW = (
    "index.html",
    "reference/run_folder.html",
    "reference/errata.html",
    f"{GENERATED}/api/erase.html",
    f"{GENERATED}/cli/erase.html",
    f"{GENERATED}/methods/index.html",
    f"{GENERATED}/recipe.html",
    f"{GENERATED}/results/tiny_leaderboard.html",
    "explanation/leaderboard.html",
    "licences.html",
)


class Page(HTMLParser):
    """A page of the site: its text, the ids of its elements and its links."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := values.get(key))}
        self.links += [value for key in ("href", "src") if (value := values.get(key))]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does, in a temporary folder."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(folder / "doctrees")]
    sphinx_main = Path(sphinx.__file__).with_name("__main__.py")
    process = Command(
        *options, str(ROOT / "docs"), str(folder / "html"), folder=ROOT, script=sphinx_main
    )
    assert process.wait(600) == 0, process.stderr
    assert process.stderr == ""
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """All pages by their path."""
    paths = {path.relative_to(site).as_posix(): path for path in sorted(site.rglob("*.html"))}
    return {name: Page(path) for name, path in paths.items()}


def test_every_internal_link_leads_somewhere(site: Path, pages: dict[str, Page]) -> None:
    assert len(pages) > 150
    broken = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            place = os.path.relpath(target.resolve(), site.resolve())
            fragment = unquote(parts.fragment)
            if place.startswith("..") or not target.exists():
                broken.append(f"{name}: {link}")
            elif fragment and place in pages and fragment not in pages[place].ids:
                broken.append(f"{name}: {link} (no such place on the page)")
    assert broken == []


def test_nothing_is_loaded_from_the_web(site: Path) -> None:
    """The site works without a network: styles, scripts and images are its own."""
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        for mark in ('src="http', 'rel="stylesheet" href="http', "url(http"):
            assert mark not in text, f"{path.name} has {mark}"


@pytest.mark.parametrize("name", sorted(concept_eraser.__all__))
def test_every_public_name_has_a_page_with_an_example(pages: dict[str, Page], name: str) -> None:
    page = pages[f"{GENERATED}/api/{name}.html"]
    assert f"concept_eraser.{name}" in page.ids
    assert "import concept_eraser" in page.text
    assert ">>>" not in page.text
    assert f"api/{name}.html" in " ".join(pages["reference/generated/api/index.html"].links) or (
        f"{name}.html" in pages["reference/generated/api/index.html"].links
    )


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


@pytest.mark.parametrize("name", commands())
def test_every_command_has_a_page_with_its_options(pages: dict[str, Page], name: str) -> None:
    page = pages[f"{GENERATED}/cli/{name}.html"]
    command = commands()[name]
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            assert f"{name}-{parameter.name.replace('_', '-')}" in page.ids
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert option in page.text
    assert f"concept-eraser {name}" in page.text
    assert "Examples" in page.text
    for mark in ("[bold]", "[/bold]", "[dim]", "\x1b"):
        assert mark not in page.text


@pytest.mark.parametrize("kind", KINDS)
def test_every_plug_in_has_a_page_with_its_options(pages: dict[str, Page], kind: str) -> None:
    folder = f"{GENERATED}/{registry.plural(kind)}"
    index = pages[f"{folder}/index.html"]
    assert registry.builtin(kind)
    for name in registry.builtin(kind):
        page = pages[f"{folder}/{name}.html"]
        assert f"{name}.html" in index.links
        if kind == "loss":
            continue
        plugin = describe(kind, name)
        for option in plugin.options:
            assert make_id(f"option-{option.name}") in page.ids, f"{name}: {option.name}"
        if plugin.source.startswith("arXiv"):
            assert "https://arxiv.org/abs/" in " ".join(page.links), name
    for alias, (owner, _) in registry.named(kind).items():
        assert make_id(f"setting-{alias}") in pages[f"{folder}/{owner}.html"].ids
        assert alias in index.text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "loss"])
def test_every_option_is_explained(kind: str) -> None:
    missing = [
        f"{name}: {option.name}"
        for name in registry.builtin(kind)
        for option in describe(kind, name).options
        if not option.text
    ]
    assert missing == []


def keys(model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a recipe or a suite by their path, with their fields."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        inner = [field.annotation]
        while inner:
            one = inner.pop()
            if isinstance(one, type) and hasattr(one, "model_fields"):
                yield from keys(one, f"{prefix}{name}.")
                break
            inner += getattr(one, "__args__", ())


@pytest.mark.parametrize(("model", "page"), [(Recipe, "recipe"), (Suite, "suite")])
def test_every_key_has_a_place_and_a_description(
    pages: dict[str, Page], model: Any, page: str
) -> None:
    places = pages[f"{GENERATED}/{page}.html"].ids
    for path, field in keys(model):
        shared = path.replace("finish.", "method.")
        for objective in ("retain.", "replace.", "relearn."):
            shared = shared.replace(objective, "forget.")
        assert make_id(f"key-{shared}") in places, path
        assert field.description, path
    assert page != "recipe" or "key-memory" in places


def test_every_method_with_differences_is_in_the_errata(pages: dict[str, Page]) -> None:
    text = pages["reference/errata.html"].text
    for name in registry.builtin("method"):
        if "Deliberate differences" in describe("method", name).module_documentation:
            assert f"concept_eraser/methods/{name}.py" in text, name


@needs_browser
def test_no_page_is_wider_than_a_phone(site: Path) -> None:
    """Wide tables and code scroll inside the page. The dark theme is dark."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport=PHONE, color_scheme="dark")
        page = context.new_page()
        for name in NARROW:
            page.goto((site / name).as_uri())
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= PHONE["width"], f"{name} is {width} px wide"
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
            brightness = [int(part) for part in colour.strip("rgba()").split(",")[:3]]
            assert max(brightness) < 60, f"{name}: {colour}"
        browser.close()
