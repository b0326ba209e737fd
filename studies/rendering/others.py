"""The pages of the papers' problems and of robustness, and the tables inside README.md."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from concept_eraser.evaluation.statistics import wilson
from studies.rendering.common import LIMITS, cell, notes, share, source, table
from studies.rendering.figures import Figure, canvas
from studies.result_tables import ROOT, Content, Results, figure_path


def world_table() -> str:
    """Return the quality of the bundled model, from the JSON file beside its weights."""
    facts = json.loads((ROOT / "concept_eraser" / "tiny" / "weights" / "tiny.json").read_text())
    score, judge, clip = facts["pipeline"], facts["parts"]["judge"], facts["parts"]["clip"]
    worst_shape = min(score["by_shape"].items(), key=lambda item: item[1])
    worst_synonym = min(score["by_synonym"].items(), key=lambda item: item[1])
    return table(
        [
            ["what", "value", "n"],
            [
                "generated images with the shape of the prompt, by its own name",
                f"{100 * score['shape_by_own_name']:.1f} %",
                str(10 * score["n_per_noun"]),
            ],
            [
                "... with the colour of the prompt",
                f"{100 * score['accuracy']['color']:.1f} %",
                str(score["n"]),
            ],
            [
                "worst shape",
                f"{worst_shape[0]}, {100 * worst_shape[1]:.1f} %",
                str(score["n_per_noun"]),
            ],
            [
                "worst synonym",
                f"{worst_synonym[0].split('/')[1]}, {100 * worst_synonym[1]:.1f} %",
                str(score["n_per_noun"]),
            ],
            [
                "sampling 16 images, 25 steps, fp32",
                f"{score['seconds_for_16_images_fp32']} s",
                "1",
            ],
            [
                "judge, held-out painted images: shape",
                f"{100 * judge['accuracy_shape']:.2f} %",
                str(judge["n_painted"]),
            ],
            [
                "small CLIP, zero-shot shape",
                f"{100 * clip['zero_shot_shape']:.1f} %",
                str(clip["n"]),
            ],
            [
                "training all parts on 2 cores (sum of the times of the parts)",
                f"{facts['training_seconds'] / 60:.0f} min",
                "1",
            ],
            ["size on disk", f"{facts['megabytes']} MB", ""],
        ]
    )


def _plugins(kind: str) -> list[tuple[str, str, Any]]:
    """Return the name, the named settings and the class of each plug-in of a kind."""
    from concept_eraser import registry

    settings = registry.named(kind).items()
    return [
        (
            name,
            ", ".join(f"`{alias}`" for alias, (owner, _) in settings if owner == name),
            registry.load(kind, name),
        )
        for name in registry.names(kind)
    ]


def attacks_table() -> str:
    """Return the table of attacks: named settings, family, source, needs of the model."""
    rows = [["attack", "named settings", "family", "paper", "needs of the attacked model"]]
    rows += [
        [
            f"`{name}`",
            aliases,
            attack.family,
            f"{attack.title} ({attack.source})",
            attack.access,
        ]
        for name, aliases, attack in _plugins("attack")
    ]
    return table(rows)


def methods_table() -> str:
    """Return the table of methods: named settings, source and tested theorems."""
    rows = [["method", "named settings", "paper", "theorems tested"]]
    for name, aliases, method in _plugins("method"):
        theorems = ", ".join(sorted(method.theorems)).replace("_", " ")
        rows.append([f"`{name}`", aliases, f"{method.title} ({method.source})", theorems])
    return table(rows)


def paper_problems() -> str:
    """Return eval/results/papers.md: small problems that the papers used."""
    parts = [
        "# Small problems of the papers",
        "",
        source("papers", "python -m studies.paper_problems") + ".",
        "The cells are means over the seeds. Two numbers are [mean, standard deviation].",
        "",
        "![results of the small problems of the papers](papers.plots.svg)",
    ]
    sections = _sections(notes("papers"))
    for name, content in Results("papers").items():
        environment = content["environment"]
        head = list(content["table"][0])
        body = [[cell(row[key]) for key in head] for row in content["table"]]
        parts += [
            "",
            f"## {name}",
            "",
            " ".join(
                (
                    importlib.import_module(f"studies.papers.{content['problem']}").__doc__ or ""
                ).split()
            ),
            "",
            table([head, *body]),
            "",
        ]
        if "selection" in content:
            choice_head = list(content["selection"][0])
            choice = [[cell(row[key]) for key in choice_head] for row in content["selection"]]
            parts += [
                "Mean accuracy of both tasks where the rate was chosen:",
                "",
                table([choice_head, *choice]),
                "",
            ]
        for extra in ("log-log slopes",):
            if extra in content:
                parts += [
                    f"{extra}: " + ", ".join(f"{k} {v:.2f}" for k, v in content[extra].items()),
                    "",
                ]
        if name in sections:
            parts += [sections[name], ""]
        settings = ", ".join(f"{k} {v}" for k, v in content["settings"].items())
        parts += [
            (
                f"Settings: {settings}. Seeds {content['seeds']}; commit "
                f"{str(environment['commit'])[:12]}; torch "
                f"{environment['versions']['torch']}."
            )
        ]
    return "\n".join(parts) + "\n"


def _sections(text: str) -> dict[str, str]:
    """Return the sections of a text by their titles, `## title`."""
    sections = (part.split("\n", 1) for part in f"\n{text}".split("\n## ")[1:])
    return {title: body.strip() for title, body in sections}


def paper_plots(contents: Mapping[str, Content]) -> Any:
    """Draw a panel for each problem of the papers."""
    rows = -(-len(contents) // 2)
    figure = canvas(12, 4 * rows)
    panels = figure.subplots(rows, 2, squeeze=False).flat
    for axes, (name, content) in zip(panels, contents.items(), strict=False):
        importlib.import_module(f"studies.papers.{content['problem']}").plot(content, axes)
        axes.set_title(name)
    for axes in figure.axes[len(contents) :]:
        axes.remove()
    return figure


def figures() -> dict[Path, Figure]:
    """Return the figure of papers.md."""
    contents = dict(Results("papers"))
    return (
        {figure_path("papers", "plots.svg"): Figure(contents, partial(paper_plots, contents))}
        if contents
        else {}
    )


def robustness() -> str:
    """Return eval/results/robustness.md: concept rates under an offset of the embedding."""
    files = list(Results("robustness").values())
    rows = [
        [
            "model",
            "radius",
            "star, trained offset %",
            "star, random offset of the same length %",
            "no-object rate, trained offset %",
            "seeds x n",
        ]
    ]
    keys = list(
        dict.fromkeys((row["model"], row["radius"]) for content in files for row in content["rows"])
    )
    for model, radius in keys:
        entries = [
            row
            for content in files
            for row in content["rows"]
            if (row["model"], row["radius"]) == (model, radius)
        ]

        def pool(kinds: tuple[str, ...], what: str, selected: list[dict] = entries) -> str:
            values = [row[what] for row in selected if row["offset"] in kinds]
            if not values:
                return "-"
            return share(
                wilson(sum(round(c["value"] * c["n"]) for c in values), sum(c["n"] for c in values))
            )

        seeds = len(
            {
                content["seed"]
                for content in files
                if any((r["model"], r["radius"]) == (model, radius) for r in content["rows"])
            }
        )
        rows.append(
            [
                model,
                f"{radius:g}",
                pool(("trained", "none"), "concept"),
                pool(("random",), "concept"),
                pool(("trained", "none"), "none"),
                f"{seeds} x {entries[0]['concept']['n']}",
            ]
        )
    environment, settings = files[0]["environment"], files[0]["settings"]
    return f"""# Concept rate under an offset of the prompt's embedding

{source("robustness", "python -m studies.soft_prompt")}. Each model has one offset of the
prompt's embedding. It is trained for {settings["steps"]} steps on images of the concept by the original model. Its length
is at most `radius` x the mean length of an embedding. The cells are rates with 95 % Wilson intervals.

{LIMITS}

{table(rows)}

{notes("robustness")}

Commits {", ".join(sorted({str(f["environment"]["commit"])[:12] for f in files}))}; torch {environment["versions"]["torch"]}; judge {files[0]["judge"]}.
"""  # noqa: E501
