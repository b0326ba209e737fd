"""Render the pages and figures of eval/results, and the tables inside README.md, from the tables of
the studies.

    python -m studies.render_results [--check]

New results of studies (studies/result_tables.py) are moved into their tables first. `--check`
writes nothing. It fails if a file differs from what the command would write.

A table stands in README.md between `<!-- NAME -->` and `<!-- /NAME -->`. Only the tables with such
marks are rendered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies import result_tables
from studies.rendering import (
    attacks,
    benchmarks,
    conflict,
    excess_recovery,
    figures,
    full_models,
    guidance,
    labelled,
    leaderboard,
    location,
    lora,
    one_line,
    others,
    published,
    quickstart,
    recovery,
    several_concepts,
    side_effects,
    studies,
)
from studies.rendering.common import current_label, fill_blocks, load
from studies.result_tables import NEW_RESULTS, ROOT, TABLES, Results

README = ROOT / "README.md"
# The tables of README.md by the name of their marks.
BLOCKS: dict[str, Callable[[], str]] = {
    "quickstart": quickstart.block,
    "recovery": recovery.block,
    "results": leaderboard.results_block,
    "world": others.world_table,
    "methods": others.methods_table,
    "attacks": others.attacks_table,
}
# The studies of studies/study.py: the title and the table of each page.
STUDIES: dict[str, tuple[str, Any]] = {
    "tiny_star": ("Erasing star from tiny-sd", studies.star_table),
    "tiny_hard": ("MUNBa and the plain sum at one learning rate", studies.hard_table),
    "tiny_rules": (
        "The rules of the papers on a shape, a colour and a style",
        studies.rules_table,
    ),
    "tiny_methods": ("FORUM and adversarial training on the star", studies.star_table),
    "tiny_star_recipe": (
        "Candidates for MUNBa's recipe, on seeds that no other page reports",
        studies.star_table,
    ),
}


def pages() -> dict[Path, str]:
    """Return what every rendered text file should contain."""
    contents: dict[Path, str] = {}
    for study, (title, render) in STUDIES.items():
        runs = load(study)
        if runs:
            contents[TABLES / f"{study}.md"] = studies.study_page(study, title, render(runs), runs)
    contents[TABLES / "papers.md"] = others.paper_problems()
    if Results("robustness"):
        contents[TABLES / "robustness.md"] = others.robustness()
    renderers: dict[str, Callable[[], str]] = {
        **labelled.PAGES,
        **attacks.PAGES,
        **several_concepts.PAGES,
        **leaderboard.PAGES,
        **guidance.PAGES,
        **one_line.PAGES,
        **conflict.PAGES,
        **side_effects.PAGES,
        **location.PAGES,
        **lora.PAGES,
        **excess_recovery.PAGES,
        **full_models.PAGES,
    }
    for name, renderer in renderers.items():
        if Results(name):
            contents[TABLES / f"{name}.md"] = renderer()
    if Results(published.STUDY):
        contents[TABLES / f"{published.STUDY}.md"] += "\n" + published.section()
    contents = {path: current_label(text) for path, text in contents.items()}
    contents |= leaderboard.hover_pages()
    contents |= benchmarks.pages()
    contents[README] = fill_blocks(README.read_text(), BLOCKS)
    return contents


def main() -> int:
    """Render everything, or with --check compare it with the files."""
    if "--check" not in sys.argv:
        for folder in sorted(NEW_RESULTS.glob("*/")):
            result_tables.pack(folder.name)
    texts = {
        path: text
        for path, text in pages().items()
        if not path.exists() or path.read_text() != text
    }
    all_figures = {
        **leaderboard.figures(),
        **labelled.figures(),
        **others.figures(),
        **recovery.figures(),
        **conflict.figures(),
        **side_effects.figures(),
        **location.figures(),
    }
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
