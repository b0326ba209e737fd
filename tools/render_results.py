"""Render eval/results/<study>.md, and the tables inside README.md, from the JSON that studies and builds wrote.

    python -m tools.render_results [--check]

`--check` writes nothing and fails where a file differs from what it would write.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from tools.rendering import attacks, benches, board_plot, guidance, labelled, leaderboard, many, others, studies
from tools.rendering.common import RESULTS, ROOT, load


def pages() -> dict[Path, str]:
    """What every rendered file should contain."""
    made: dict[Path, str] = {}
    blocks = {
        "world": others.world_table(),
        "quickstart": others.quickstart_block(),
        "methods": others.methods_table(),
        "attacks": others.attacks_table(),
        "default": leaderboard.default_block(),
        "together": leaderboard.together_block(),
    }
    titles: dict[str, Any] = {
        "tiny_star": ("Erasing star from tiny-sd", studies.star_table),
        "tiny_hard": ("Tasks on which the bargain should matter", studies.hard_table),
        "tiny_rules": ("The rules of the papers on a shape, a colour and a style", studies.rules_table),
        "tiny_methods": ("FORUM and adversarial training on the star", studies.star_table),
        "tiny_star_recipe": (
            "Which recipe for MUNBa? Candidates on seeds that are reported nowhere else",
            studies.star_table,
        ),
    }
    for study, (title, render) in titles.items():
        found = load(study)
        if found:
            body = render(found)
            made[RESULTS / f"{study}.md"] = studies.study_page(study, title, body, found)
            if study in ("tiny_star", "tiny_hard"):
                blocks[study] = body
    made[RESULTS / "papers.md"] = others.paper_problems()
    if list((RESULTS / "robustness").glob("*.json")):
        made[RESULTS / "robustness.md"] = others.robustness()
    for name, render in {
        **labelled.PAGES,
        **attacks.PAGES,
        **many.PAGES,
        **leaderboard.PAGES,
        **guidance.PAGES,
    }.items():
        if list((RESULTS / name).glob("*.json")):
            made[RESULTS / f"{name}.md"] = render()
    made |= benches.pages()
    readme = (ROOT / "README.md").read_text()
    for name, block in blocks.items():
        readme, places = re.subn(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", lambda m, b=block: m[1] + b + m[2], readme, flags=re.S)  # fmt: skip
        if places != 1:
            raise SystemExit(f"README.md has {places} places for the table {name!r}; it needs one")
    made[ROOT / "README.md"] = readme
    return made


def main() -> int:
    drawn = leaderboard.plots()
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    stale += [path for path, standings in drawn.items() if not board_plot.is_current(path, standings)]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what its JSON says; run python -m tools.render_results")
        return int(bool(stale))
    for path, text in pages().items():
        path.write_text(text)
    for path in drawn.keys() & set(stale):
        board_plot.draw(drawn[path], path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
