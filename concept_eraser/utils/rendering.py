"""Templates as text: HTML pages, in which every value is escaped, and model cards in Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parents[1] / "templates"


def render(template: str, **content: Any) -> str:
    """Render a template.

    Args:
        template: its file name; what ends with .html is escaped.
        content: the values of its variables; each variable needs one.

    Returns:
        The text.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**content)
