"""Figures of the pages, drawn from the tables as SVG.

Each file holds a digest of its content. So an outdated file is recognised without a new drawing.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from concept_eraser.utils import provenance

_LONG_NUMBER = re.compile(r"\b(\d{2,}\.\d\d)\d+")  # of a place in points; two digits are enough


class Figure(NamedTuple):
    """A figure before it is drawn.

    Args:
        content: What the figure shows, as values that JSON can hold.
        draw: A function that returns the matplotlib figure.
    """

    content: Any
    draw: Callable[[], Any]


def digest(figure: Figure) -> str:
    """Return the text that stands in the file of a figure."""
    return f"shows {provenance.fingerprint(figure.content)}"


def is_current(path: Path, figure: Figure) -> bool:
    """Return whether a file shows the content of a figure."""
    return path.exists() and digest(figure) in path.read_text(encoding="utf-8")


def write(path: Path, figure: Figure) -> None:
    """Draw a figure and write it as SVG. Equal contents give equal files."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "concept_eraser", "svg.fonttype": "none"}):
        figure.draw().savefig(
            text, format="svg", metadata={"Date": None, "Description": digest(figure)}
        )
    short = _LONG_NUMBER.sub(r"\1", text.getvalue())
    path.write_text("".join(f"{line.rstrip()}\n" for line in short.splitlines()), encoding="utf-8")


def canvas(width: float, height: float) -> Any:
    """Return an empty matplotlib figure without a display. Sizes are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as MatplotlibFigure

    figure = MatplotlibFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
