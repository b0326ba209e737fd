"""The other pages and the tables inside README.md."""

from __future__ import annotations

import json
from typing import Any

from concept_eraser.evaluation.statistics import Interval, wilson
from tools.rendering.common import RESULTS, ROOT, cell, results, share, table


def world_table() -> str:
    """Quality of the bundled model, from the JSON beside its weights."""
    built = json.loads((ROOT / "concept_eraser" / "tiny" / "weights" / "tiny.json").read_text())
    score, judge, clip = built["pipeline"], built["parts"]["judge"], built["parts"]["clip"]
    worst_shape = min(score["by_shape"].items(), key=lambda item: item[1])
    worst_synonym = min(score["by_synonym"].items(), key=lambda item: item[1])
    return table([
        ["what", "value", "n"],
        ["generated pictures with the asked shape, by its own name", f"{100 * score['shape_by_own_name']:.1f} %", str(10 * score["n_per_noun"])],
        ["... with the asked colour", f"{100 * score['accuracy']['color']:.1f} %", str(score["n"])],
        ["worst shape", f"{worst_shape[0]}, {100 * worst_shape[1]:.1f} %", str(score["n_per_noun"])],
        ["worst synonym", f"{worst_synonym[0].split('/')[1]}, {100 * worst_synonym[1]:.1f} %", str(score["n_per_noun"])],
        ["sampling 16 pictures, 25 steps, fp32", f"{score['seconds_for_16_pictures_fp32']} s", "1"],
        ["judge, held-out painted pictures: shape", f"{100 * judge['accuracy_shape']:.2f} %", str(judge["n_painted"])],
        ["small CLIP, zero-shot shape", f"{100 * clip['zero_shot_shape']:.1f} %", str(clip["n"])],
        ["training all parts on 2 cores (sum of the parts' own times)", f"{built['training_seconds'] / 60:.0f} min", "1"],
        ["size on disk", f"{built['megabytes']} MB", ""],
    ])  # fmt: skip


def _plugins(kind: str) -> list[tuple[str, str, Any]]:
    """Each plug-in of a kind: its name, the settings of it that have one, its class."""
    from concept_eraser import registry

    named = registry.named(kind).items()
    return [(name, ", ".join(f"`{alias}`" for alias, (owner, _) in named if owner == name), registry.load(kind, name)) for name in registry.names(kind)]  # fmt: skip


def attacks_table() -> str:
    """Every attack of the registry, with its named settings, source and what it needs of the victim."""
    rows = [["attack", "settings with a name", "paper", "needs of the victim"]]
    rows += [[f"`{name}`", aliases, f"{attack.title} ({attack.source})", attack.access] for name, aliases, attack in _plugins("attack")]  # fmt: skip
    return table(rows)


def methods_table() -> str:
    """Every method of the registry, with its named settings, source and proved theorems."""
    rows = [["method", "settings with a name", "paper", "theorems tested"]]
    for name, aliases, method in _plugins("method"):
        theorems = ", ".join(sorted(method.theorems)).replace("_", " ")
        rows.append([f"`{name}`", aliases, f"{method.title} ({method.source})", theorems])
    return table(rows)


def paper_problems() -> str:
    """eval/results/papers.md: what the papers' own small problems gave."""
    parts = ["# The papers' own problems", "", "Rendered from `papers/*.json` by `python -m tools.render_results`; made by `python -m tools.paper_problems`.", "Means over the seeds; [mean, standard deviation] where two numbers stand together."]  # fmt: skip
    for path in sorted((RESULTS / "papers").glob("*.json")):
        content = json.loads(path.read_text())
        environment = content["environment"]
        head = list(content["table"][0])
        body = [[cell(row[key]) for key in head] for row in content["table"]]
        parts += ["", f"## {content['problem']}", "", content["about"], "", table([head, *body]), ""]
        for extra in ("log-log slopes",):
            if extra in content:
                parts += [f"{extra}: " + ", ".join(f"{k} {v:.2f}" for k, v in content[extra].items()), ""]
        notes = path.with_suffix(".md")
        if notes.exists():
            parts += [notes.read_text().rstrip(), ""]
        settings = ", ".join(f"{k} {v}" for k, v in content["settings"].items())
        parts += [f"![{content['problem']}](papers/{path.stem}.png)", "", f"Settings: {settings}. Seeds {content['seeds']}; commit {str(environment['commit'])[:12]}; torch {environment['versions']['torch']}."]  # fmt: skip
    return "\n".join(parts) + "\n"


def robustness() -> str:
    """eval/results/robustness.md: what an offset of the embedding brings back, by model and radius."""
    files = [json.loads(path.read_text()) for path in sorted((RESULTS / "robustness").glob("*.json"))]
    rows = [["model", "radius", "star, trained offset %", "star, random offset of the same length %", "none, trained offset %", "seeds x n"]]  # fmt: skip
    keys = list(dict.fromkeys((row["model"], row["radius"]) for content in files for row in content["rows"]))
    for model, radius in keys:
        found = [
            row for content in files for row in content["rows"] if (row["model"], row["radius"]) == (model, radius)
        ]

        def pool(kinds: tuple[str, ...], what: str, found: list[dict] = found) -> str:
            chosen = [row[what] for row in found if row["offset"] in kinds]
            if not chosen:
                return "-"
            return share(wilson(sum(round(c["value"] * c["n"]) for c in chosen), sum(c["n"] for c in chosen)))

        seeds = len({content["seed"] for content in files if any((r["model"], r["radius"]) == (model, radius) for r in content["rows"])})  # fmt: skip
        rows.append([model, f"{radius:g}", pool(("trained", "none"), "concept"), pool(("random",), "concept"), pool(("trained", "none"), "none"), f"{seeds} x {found[0]['concept']['n']}"])  # fmt: skip
    environment, settings = files[0]["environment"], files[0]["settings"]
    notes = RESULTS / "robustness" / "notes.md"
    return f"""# What a soft prompt brings back

Rendered from `robustness/*.json` by `python -m tools.render_results`; made by `python -m tools.soft_prompt`. One offset
of the prompt's embedding a model, trained for {settings["steps"]} steps on the original model's pictures of the concept,
at most `radius` x the mean length of an embedding. Star shares with 95 % Wilson intervals.

{table(rows)}

{notes.read_text() if notes.exists() else ""}
Commits {", ".join(sorted({str(f["environment"]["commit"])[:12] for f in files}))}; torch {environment["versions"]["torch"]}; judge {files[0]["judge"]}.
"""


def quickstart_block() -> str:
    """What `make quickstart` ended with, from the JSON it wrote."""
    facts = json.loads((RESULTS / "quickstart.json").read_text())
    shown = [("concept_share", "direct"), ("concept_share", "synonyms"), ("none_share", "direct"), ("accuracy_shape", "neighbours"), ("accuracy_shape", "retained"), ("accuracy_color", "retained")]  # fmt: skip
    lines = ["metric            group         before                after                 n"]
    for metric, group in shown:
        row = results(facts, metric, group)
        if row:
            cells = (share(Interval(**row[when])) for when in ("before", "after"))
            lines.append(
                f"{metric:<17} {group:<13} " + "".join(f"{cell:<22}" for cell in cells) + str(row["after"]["n"])
            )
    s = facts["seconds"]
    lines += ["...", facts["verdict"], "", f"erasing {s['erasing']:.0f} s (of which training {s['training']:.0f} s), measuring {s['measuring']:.0f} s" + (f"; installing took {s['installing']:.0f} s, once" if "installing" in s else "")]  # fmt: skip
    return "```text\n" + "\n".join(lines) + "\n```"
