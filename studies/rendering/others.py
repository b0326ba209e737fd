"""The other pages and the tables inside README.md."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from concept_eraser.evaluation.statistics import Interval, wilson
from studies.rendering.common import cell, notes, results, share, source, table
from studies.rendering.figures import Figure, canvas
from studies.result_tables import ROOT, TABLES, Content, Results, figure_path


def world_table() -> str:
    """Quality of the bundled model, from the JSON beside its weights."""
    facts = json.loads((ROOT / "concept_eraser" / "tiny" / "weights" / "tiny.json").read_text())
    score, judge, clip = facts["pipeline"], facts["parts"]["judge"], facts["parts"]["clip"]
    worst_shape = min(score["by_shape"].items(), key=lambda item: item[1])
    worst_synonym = min(score["by_synonym"].items(), key=lambda item: item[1])
    return table(
        [
            ["what", "value", "n"],
            [
                "generated images with the asked shape, by its own name",
                f"{100 * score['shape_by_own_name']:.1f} %",
                str(10 * score["n_per_noun"]),
            ],
            [
                "... with the asked colour",
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
                "training all parts on 2 cores (sum of the parts' own times)",
                f"{facts['training_seconds'] / 60:.0f} min",
                "1",
            ],
            ["size on disk", f"{facts['megabytes']} MB", ""],
        ]
    )


def _plugins(kind: str) -> list[tuple[str, str, Any]]:
    """Each plug-in of a kind: its name, the settings of it that have one, its class."""
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
    """Every attack of the registry, with its named settings, source and what it needs of the
    victim.
    """
    rows = [["attack", "settings with a name", "paper", "needs of the victim"]]
    rows += [
        [f"`{name}`", aliases, f"{attack.title} ({attack.source})", attack.access]
        for name, aliases, attack in _plugins("attack")
    ]
    return table(rows)


def methods_table() -> str:
    """Every method of the registry, with its named settings, source and proved theorems."""
    rows = [["method", "settings with a name", "paper", "theorems tested"]]
    for name, aliases, method in _plugins("method"):
        theorems = ", ".join(sorted(method.theorems)).replace("_", " ")
        rows.append([f"`{name}`", aliases, f"{method.title} ({method.source})", theorems])
    return table(rows)


def paper_problems() -> str:
    """eval/results/papers.md: the results of the papers' own small problems."""
    parts = [
        "# The papers' own problems",
        "",
        source("papers", "python -m studies.paper_problems") + ".",
        "Means over the seeds; [mean, standard deviation] where two numbers stand together.",
        "",
        "![the papers' own problems](papers.plots.svg)",
    ]
    sections = _sections(notes("papers"))
    for name, content in Results("papers").items():
        environment = content["environment"]
        head = list(content["table"][0])
        body = [[cell(row[key]) for key in head] for row in content["table"]]
        parts += [
            "",
            f"## {content['problem']}",
            "",
            content["about"],
            "",
            table([head, *body]),
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
    """The sections of a text by their titles, `## title`."""
    sections = (part.split("\n", 1) for part in f"\n{text}".split("\n## ")[1:])
    return {title: body.strip() for title, body in sections}


def paper_plots(contents: Mapping[str, Content]) -> Any:
    """A panel for each of the papers' problems."""
    figure = canvas(12, 12)
    for axes, (name, content) in zip(figure.subplots(3, 2).flat, contents.items(), strict=False):
        importlib.import_module(f"studies.papers.{name}").plot(content, axes)
        axes.set_title(name)
    for axes in figure.axes[len(contents) :]:
        axes.remove()
    return figure


def figures() -> dict[Path, Figure]:
    contents = dict(Results("papers"))
    return (
        {figure_path("papers", "plots.svg"): Figure(contents, partial(paper_plots, contents))}
        if contents
        else {}
    )


def robustness() -> str:
    """eval/results/robustness.md: the attack success of an embedding offset, by model and
    radius.
    """
    files = list(Results("robustness").values())
    rows = [
        [
            "model",
            "radius",
            "star, trained offset %",
            "star, random offset of the same length %",
            "none, trained offset %",
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
    return f"""# What a soft prompt brings back

{source("robustness", "python -m studies.soft_prompt")}. One offset
of the prompt's embedding a model, trained for {settings["steps"]} steps on the original model's images of the concept,
at most `radius` x the mean length of an embedding. Star shares with 95 % Wilson intervals.

{table(rows)}

{notes("robustness")}

Commits {", ".join(sorted({str(f["environment"]["commit"])[:12] for f in files}))}; torch {environment["versions"]["torch"]}; judge {files[0]["judge"]}.
"""  # noqa: E501


def quickstart_block() -> str:
    """The result of `make quickstart`, from the JSON it wrote."""
    facts = json.loads((TABLES / "quickstart.json").read_text())
    table_rows = [
        ("concept_rate", "direct"),
        ("concept_rate", "synonyms"),
        ("no_object_rate", "direct"),
        ("accuracy_shape", "neighbours"),
        ("accuracy_shape", "retained"),
        ("accuracy_color", "retained"),
    ]
    lines = ["metric            group         before                after                 n"]
    for metric, group in table_rows:
        row = results(facts, metric, group)
        if row:
            cells = (share(Interval(**row[when])) for when in ("before", "after"))
            lines.append(
                f"{metric:<17} {group:<13} "
                + "".join(f"{cell:<22}" for cell in cells)
                + str(row["after"]["n"])
            )
    s = facts["seconds"]
    lines += [
        "...",
        facts["verdict"],
        "",
        (
            f"erasing {s['erasing']:.0f} s (of which training {s['training']:.0f} s), "
            f"measuring {s['measuring']:.0f} s"
        )
        + (f"; installing took {s['installing']:.0f} s, once" if "installing" in s else ""),
    ]
    return "```text\n" + "\n".join(lines) + "\n```"
