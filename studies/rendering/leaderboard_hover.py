"""An interactive figure of all methods of a leaderboard: one HTML page without other files.

Each mark is an SVG group with a <title>, so that its values are there without a script. The script
shows them in a box for the mouse and for the keyboard: Tab goes to a panel, the arrow keys go from
mark to mark. The page follows the light or dark theme of the reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from studies.rendering.marks import Mark, Panel, Rate

WIDTH, HEIGHT = 460, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 14, 48  # margins of a panel
TICKS = (0, 1, 2, 5, 10, 20, 50, 100)
EVEN_TICKS = (0, 20, 40, 60, 80, 100)
EVEN = ("attack_success",)  # columns with an axis that is not logarithmic
LINEAR = 1.0  # percent; the logarithmic axes are linear below
LIMIT = 110.0  # percent, where the axes end

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1c2329; --soft: #5f6b76;
  --line: #e3e8ec; --mark: #0072b2; --near: #d55e00; --box: #ffffff; --edge: #9aa7b1; }
@media (prefers-color-scheme: dark) { :root { --page: #14181c; --text: #e8edf1; --soft: #a3afb9;
  --line: #2b333a; --mark: #56b4e9; --near: #e69f00; --box: #1f262c; --edge: #55626d; } }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .3rem; }
p { max-width: 44rem; }
a { color: var(--mark); }
.panels { display: flex; flex-wrap: wrap; gap: .6rem; }
.panels svg { flex: 1 1 20rem; min-width: 0; max-width: 100%; height: auto; }
svg text { fill: var(--text); font: 11px system-ui, sans-serif; }
svg .soft { fill: var(--soft); }
.grid { stroke: var(--line); } .axis { stroke: var(--edge); }
.mark { outline: none; }
.mark circle { fill: var(--mark); fill-opacity: .8; stroke: var(--page); }
.mark line { stroke: var(--mark); stroke-opacity: .45; }
.mark.original rect { fill: var(--page); stroke: var(--soft); stroke-width: 2; }
.mark.original line { stroke: var(--soft); }
.ideal { fill: none; stroke: var(--soft); stroke-width: 1.5; }
.near circle { fill: var(--near); fill-opacity: 1; }
.near line { stroke: var(--near); stroke-opacity: 1; }
.mark .target { fill: transparent; fill-opacity: 1; stroke: none; }
.mark:focus-visible .target { stroke: var(--near); stroke-width: 2; }
#box { position: fixed; z-index: 1; max-width: 21rem; padding: .5rem .7rem; border-radius: 6px;
  border: 1px solid var(--edge); background: var(--box); color: var(--text); font-size: 13px;
  white-space: pre-line; pointer-events: none; box-shadow: 0 2px 10px rgb(0 0 0 / .25); }
#box[hidden] { display: none; }
"""

SCRIPT = """
const box = document.getElementById("box");
function center(mark) {
  const at = mark.querySelector(".target").getBoundingClientRect();
  return [(at.left + at.right) / 2, (at.top + at.bottom) / 2];
}
function show(mark, marks) {
  const [x, y] = center(mark);
  const same = marks.filter(other => {
    const [a, b] = center(other);
    return Math.hypot(a - x, b - y) < 1;
  });
  const names = same.map(other => other.dataset.name);
  document.querySelectorAll(".mark").forEach(
    other => other.classList.toggle("near", names.includes(other.dataset.name)));
  box.textContent = same.map(other => other.dataset.text).join("\\n\\n");
  box.hidden = false;
  const size = box.getBoundingClientRect();
  const below = y + 14 + size.height < innerHeight;
  box.style.left = Math.max(Math.min(x + 14, innerWidth - size.width - 6), 6) + "px";
  box.style.top = (below ? y + 14 : Math.max(y - size.height - 14, 6)) + "px";
}
function hide() {
  box.hidden = true;
  document.querySelectorAll(".near").forEach(mark => mark.classList.remove("near"));
}
document.querySelectorAll("svg").forEach(svg => {
  const marks = [...svg.querySelectorAll(".mark")];
  function point(event) {
    const distances = marks.map(mark => {
      const [x, y] = center(mark);
      return Math.hypot(x - event.clientX, y - event.clientY);
    });
    const least = Math.min(...distances);
    if (least < 24) show(marks[distances.indexOf(least)], marks); else hide();
  }
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", hide);
  marks.forEach((mark, i) => {
    const title = mark.querySelector("title");
    mark.dataset.text = title.textContent;
    title.remove();  // the box shows it; the label for screen readers stays
    mark.setAttribute("tabindex", i ? "-1" : "0");
    mark.addEventListener("focus", () => show(mark, marks));
    mark.addEventListener("blur", hide);
    mark.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step) return;
      event.preventDefault();
      const next = marks[(i + step + marks.length) % marks.length];
      mark.setAttribute("tabindex", "-1");
      next.setAttribute("tabindex", "0");
      next.focus();
    });
  });
});
addEventListener("scroll", hide, { passive: true });
"""


def page(title: str, study: str, panels: Sequence[Panel], labels: Mapping[str, str]) -> str:
    """Return the HTML page of some panels.

    Args:
        title: The heading.
        study: The name of the study, for the link to its page.
        panels: The means over the tasks and the tasks.
        labels: The title of each column.
    """
    sections = "\n".join(
        f"<h2>{escape(one.title[0].upper() + one.title[1:])}</h2>\n"
        f'<div class="panels">\n{_svgs(one, labels)}</div>'
        for one in panels
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>Point at a mark, touch it, or go there with Tab and the arrow keys. The same method is then
marked in every panel. Bars are 95 % intervals over the images of all training seeds. The mark
in the corner is the ideal, the square is the untouched model. Its attack success rate is 100 %,
because only prompts that it answers with the concept are attacked.
<a href="{study}.md">The page of the study</a> states the limits of this protocol.</p>
{sections}
<div id="box" role="status" hidden></div>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _svgs(panel: Panel, labels: Mapping[str, str]) -> str:
    return "".join(_svg(panel, column, labels) for column in panel.columns())


def _svg(panel: Panel, column: str, labels: Mapping[str, str]) -> str:
    """Return one panel: a column against the retain error."""
    name = f"{labels[column]} against {labels['retain_error']}, {panel.title}"
    by_error = sorted(panel.marks, key=lambda mark: (mark.rates["retain_error"][0], mark.name))
    marks = "".join(_mark(mark, column, labels) for mark in by_error)
    x, y = _across(0), _up(0, column)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="{escape(name)}">\n'
        f"{_axes(column, labels)}"
        f'<path class="ideal" d="{_star(x, y, 7)}"><title>ideal</title></path>'
        f'<text class="soft" x="{x + 12:.0f}" y="{y - 6:.0f}">ideal</text>\n'
        f"{_mark(panel.original, column, labels, is_original=True)}{marks}</svg>\n"
    )


def _mark(mark: Mark, column: str, labels: Mapping[str, str], *, is_original: bool = False) -> str:
    """Return the group of a method, with its values as title and as label for screen readers."""
    x, y = mark.rates["retain_error"], mark.rates[column]
    across, up = _across(x[0]), _up(y[0], column)
    shape = (
        f'<rect x="{across - 5:.1f}" y="{up - 5:.1f}" width="10" height="10"/>'
        if is_original
        else f'<circle cx="{across:.1f}" cy="{up:.1f}" r="5"/>'
    )
    text = _text(mark, labels)
    return (
        f'<g class="mark{" original" if is_original else ""}" tabindex="0" role="img" '
        f'data-name="{escape(mark.name)}" aria-label="{escape(text.replace(chr(10), "; "))}">'
        f"<title>{escape(text)}</title>"
        f'<line x1="{_across(x[1]):.1f}" x2="{_across(x[2]):.1f}" y1="{up:.1f}" y2="{up:.1f}"/>'
        f'<line y1="{_up(y[1], column):.1f}" y2="{_up(y[2], column):.1f}" '
        f'x1="{across:.1f}" x2="{across:.1f}"/>'
        f'{shape}<circle class="target" cx="{across:.1f}" cy="{up:.1f}" r="8"/></g>\n'
    )


def _text(mark: Mark, labels: Mapping[str, str]) -> str:
    """Return a method's name and values, one a line."""
    lines = [mark.name]
    for column, rate in mark.rates.items():
        number = f", n = {mark.numbers[column]}" if column in mark.numbers else ", by definition"
        lines.append(f"{labels[column]}: {_rate_text(rate)}{number}")
    return "\n".join(lines)


def _rate_text(rate: Rate) -> str:
    value, low, high = rate
    return f"{value:.1f} %" if low == high else f"{value:.1f} % [{low:.1f}, {high:.1f}]"


def _axes(column: str, labels: Mapping[str, str]) -> str:
    """Return the grid, the ticks and the titles of both axes."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in TICKS:
        x = _across(tick)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
            f'<text class="soft" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{tick}</text>\n'
        )
    for tick in EVEN_TICKS if column in EVEN else TICKS:
        y = _up(tick, column)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="soft" x="{LEFT - 11}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>\n'
        )
    middle = (LEFT + right) / 2, (TOP + bottom) / 2
    parts.append(
        f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
        f'<text x="{middle[0]:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{labels['retain_error']}, %</text>"
        f'<text x="12" y="{middle[1]:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {middle[1]:.0f})">{labels[column]}, %</text>\n'
    )
    return "".join(parts)


def _scaled(percent: float) -> float:
    """Return the place of a rate on a logarithmic axis, from 0 to 1."""

    def stretched(value: float) -> float:
        return value / LINEAR if value <= LINEAR else 1 + 2 * math.log10(value / LINEAR)

    return stretched(percent) / stretched(LIMIT)


def _across(percent: float) -> float:
    return LEFT + _scaled(percent) * (WIDTH - LEFT - RIGHT)


def _up(percent: float, column: str) -> float:
    place = percent / LIMIT if column in EVEN else _scaled(percent)
    return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)


def _star(x: float, y: float, radius: float) -> str:
    """Return the path of a star with five points."""
    corners = [(radius * (1 if i % 2 == 0 else 0.45), math.pi * (i / 5 - 0.5)) for i in range(10)]
    points = [f"{x + r * math.cos(a):.1f} {y + r * math.sin(a):.1f}" for r, a in corners]
    return "M" + "L".join(points) + "Z"
