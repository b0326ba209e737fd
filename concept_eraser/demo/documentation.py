"""The link to the documentation, and the route that serves it where it was built.

`make docs` builds the documentation into one fixed folder of a checkout. The demo serves this
folder if it is there, and nothing else. Otherwise the link leads to the address in the package's
metadata, and without such an address there is no link.
"""

from __future__ import annotations

import importlib.metadata
from html import escape
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
FOLDER = _PACKAGE.parent / "docs" / "_build" / "html"
ROUTE = "/documentation"


def is_built() -> bool:
    """Whether this is a checkout with built documentation. A wheel has its data in the package."""
    return not (_PACKAGE / "data_files").is_dir() and (FOLDER / "index.html").is_file()


def address() -> str | None:
    """Return the address of the documentation: on this server, on the web, or None."""
    return f"{ROUTE}/index.html" if is_built() else _address_on_the_web()


def _address_on_the_web() -> str | None:
    try:
        lines = importlib.metadata.metadata("concept-eraser").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    addresses = {
        name.strip(): url.strip() for name, _, url in (line.partition(",") for line in lines)
    }
    url = addresses.get("Documentation", "")
    return url if url.startswith("https://") else None


def link() -> str:
    """Return the link as HTML, or "" if there is no documentation."""
    url = address()
    if url is None:
        return ""
    return f'<a href="{escape(url)}" target="_blank" rel="noopener noreferrer">Documentation</a>'


def routes() -> list[Any]:
    """Return the route that serves the folder, if it is there. Links out of it are not followed."""
    if not is_built():
        return []
    from starlette.routing import Mount
    from starlette.staticfiles import StaticFiles

    return [Mount(ROUTE, StaticFiles(directory=FOLDER, html=True))]
