"""The documentation site: `make docs` builds it into docs/_build/html."""

from __future__ import annotations

import functools
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.search.en import SearchEnglish

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))

import generate_reference  # noqa: E402 - needs the path above
import markdown_text  # noqa: E402

_PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = _PROJECT["urls"]["Source"]

project = "concept_eraser"
author = "the concept_eraser founders"
project_copyright = "the concept_eraser founders, Apache-2.0"
release = version = _PROJECT["version"]

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
exclude_patterns = ["_build", "reference/generated/errata.md"]  # the second is included
nitpicky = False
default_role = "py:obj"  # `name` in a docstring: a link where there is such a name, else code

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True

myst_enable_extensions = ["attrs_inline", "deflist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = "concept_eraser"
html_static_path = ["_static"]
html_extra_path = ["reference/generated/figures"]  # shown by explanation/leaderboard
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "source_repository": REPOSITORY,
    "top_of_page_buttons": [],
    "light_css_variables": {
        "color-brand-primary": "#115e59",
        "color-brand-content": "#115e59",
        "color-brand-visited": "#115e59",
    },
    "dark_css_variables": {
        "color-brand-primary": "#5eead4",
        "color-brand-content": "#5eead4",
        "color-brand-visited": "#5eead4",
    },
}


def _generate(app: Any, config: Any) -> None:
    generate_reference.write_pages(REPOSITORY)


def _rewrite_links(app: Any, docname: str, source: list[str]) -> None:
    """Adapt the links of written pages that lead out of docs/."""
    path = Path(app.env.doc2path(docname)).resolve().relative_to(DOCS.parent).as_posix()
    if not path.startswith(markdown_text.GENERATED):
        source[0] = markdown_text.rewrite_links(source[0], path, path, REPOSITORY)


def _move_example(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Remove the example of a page's subject, which the page shows first."""
    if what in ("function", "class"):
        lines[:] = generate_reference.without_example(lines)


def _shorten_types(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Write the types of attributes without their modules."""
    for i, line in enumerate(lines):
        if line.startswith(":vartype "):
            lines[i] = re.sub(r"(?:\w+\.)+(?=\w)", "", line)


def _shorten_navigation(
    app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Expand the present branch of the navigation only.

    Furo writes all pages of the site into each page. With 200 pages that takes half of the build.
    """
    whole = context["toctree"]
    context["toctree"] = lambda **options: whole(**{**options, "collapse": True})


def _shorten_aliases(app: Any, domain: str, objtype: str, content: Any) -> None:
    """Write the types of parameters without the module `keywords`."""
    for text in list(content.findall(nodes.Text)):
        if "keywords." in text:
            text.parent.replace(text, nodes.Text(text.replace("keywords.", "")))


def setup(app: Any) -> None:
    # a word of the search index is stemmed once, and not again at each of its places
    SearchEnglish.stem = functools.cache(SearchEnglish.stem)  # type: ignore[method-assign]
    app.connect("object-description-transform", _shorten_aliases, priority=900)
    app.connect("html-page-context", _shorten_navigation, priority=100)  # before the theme
    app.connect("autodoc-process-docstring", _move_example, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", _shorten_types, priority=900)  # after napoleon
    app.connect("config-inited", _generate)  # before Sphinx looks for the folder of figures
    app.connect("source-read", _rewrite_links)
