"""Render eval/results/<study>.md with its figures, and the tables inside README.md, from the tables
of the studies.

    python -m studies.render_results [--check]

New results of studies (studies/result_tables.py) are moved into their tables first. `--check`
writes nothing and fails where a file differs from what it would write.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from studies import result_tables
from studies.rendering import (
    attacks,
    benchmarks,
    figures,
    guidance,
    labelled,
    leaderboard,
    others,
    several_concepts,
    studies,
)
from studies.rendering.common import load
from studies.result_tables import NEW_RESULTS, ROOT, TABLES, Results


def pages() -> dict[Path, str]:
    """What every rendered file should contain."""
    contents: dict[Path, str] = {}
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
        "tiny_rules": (
            "The rules of the papers on a shape, a colour and a style",
            studies.rules_table,
        ),
        "tiny_methods": ("FORUM and adversarial training on the star", studies.star_table),
        "tiny_star_recipe": (
            "Which recipe for MUNBa? Candidates on seeds that are reported nowhere else",
            studies.star_table,
        ),
    }
    for study, (title, render) in titles.items():
        runs = load(study)
        if runs:
            body = render(runs)
            contents[TABLES / f"{study}.md"] = studies.study_page(study, title, body, runs)
            if study in ("tiny_star", "tiny_hard"):
                blocks[study] = body
    contents[TABLES / "papers.md"] = others.paper_problems()
    if Results("robustness"):
        contents[TABLES / "robustness.md"] = others.robustness()
    for name, render in {
        **labelled.PAGES,
        **attacks.PAGES,
        **several_concepts.PAGES,
        **leaderboard.PAGES,
        **guidance.PAGES,
    }.items():
        if Results(name):
            contents[TABLES / f"{name}.md"] = render()
    contents |= benchmarks.pages()
    readme = (ROOT / "README.md").read_text()
    for name, block in blocks.items():
        readme, places = re.subn(
            rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)",
            lambda m, b=block: m[1] + b + m[2],
            readme,
            flags=re.S,
        )
        if places != 1:
            raise SystemExit(f"README.md has {places} places for the table {name!r}; it needs one")
    contents[ROOT / "README.md"] = readme
    return contents


def main() -> int:
    if "--check" not in sys.argv:
        for folder in sorted(NEW_RESULTS.glob("*/")):
            result_tables.pack(folder.name)
    texts = {
        path: text
        for path, text in pages().items()
        if not path.exists() or path.read_text() != text
    }
    all_figures = {**leaderboard.figures(), **labelled.figures(), **others.figures()}
    stale = {
        path: figure for path, figure in all_figures.items() if not figures.is_current(path, figure)
    }
    if "--check" in sys.argv:
        for path in (*texts, *stale):
            print(
                f"{path.relative_to(ROOT)} is not what its table says; run python -m "
                "studies.render_results"
            )
        return int(bool(texts or stale))
    for path, text in texts.items():
        path.write_text(text)
    for path, figure in stale.items():
        figures.write(path, figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
