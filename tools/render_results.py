"""Render eval/results/<study>.md, and the tables inside README.md, from the JSON that studies and builds wrote.

    python -m tools.render_results [--check]

`--check` writes nothing and fails where a file differs from what it would write.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from concept_eraser.evaluation.statistics import Interval, wilson

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "eval" / "results"


def load(study: str) -> dict[str, list[dict]]:
    """The reported runs of a study, by entry, in the order of the study file."""
    import yaml

    order = list(yaml.safe_load((ROOT / "eval" / "studies" / f"{study}.yaml").read_text())["entries"])
    found: dict[str, list[dict]] = defaultdict(list)
    for path in sorted((RESULTS / study).glob("*.json")):
        content = json.loads(path.read_text())
        found[content["entry"]].append(content)
    return {name: found[name] for name in order if name in found}


def results(run: dict, metric: str, group: str) -> dict | None:
    return next((r for r in run["evaluation"]["results"] if (r["metric"], r["group"]) == (metric, group)), None)


def pooled(runs: list[dict], metric: str, group: str, when: str = "after") -> Interval | None:
    """A share over all seeds' pictures, with its Wilson interval."""
    rows = [results(run, metric, group) for run in runs]
    if any(row is None for row in rows):
        return None
    counts = [(round(row[when]["value"] * row[when]["n"]), row[when]["n"]) for row in rows if row]
    return wilson(sum(k for k, _ in counts), sum(n for _, n in counts))


def share(value: Interval | None) -> str:
    return "-" if value is None else f"{100 * value.value:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def change(runs: list[dict], metric: str, group: str) -> float:
    """Mean over seeds of after - before, in points."""
    rows = [row for run in runs if (row := results(run, metric, group))]
    return 100 * sum(row["after"]["value"] - row["before"]["value"] for row in rows) / len(rows)


def worst_value(runs: list[dict], metric: str) -> tuple[str, float]:
    """The retained value (shape, colour) that lost most, pooled over seeds."""
    names = {r["group"] for r in runs[0]["evaluation"]["results"] if r["metric"] == metric and ":" in r["group"]}
    return min(((name.split(":")[1], change(runs, metric, name)) for name in sorted(names)), key=lambda item: item[1])


def ratio(runs: list[dict], metric: str, group: str) -> float:
    rows = [row for run in runs if (row := results(run, metric, group))]
    return 100 * (sum(row["after"]["value"] / row["before"]["value"] for row in rows) / len(rows) - 1)


def mean(runs: list[dict], metric: str, group: str, when: str) -> float:
    rows = [row for run in runs if (row := results(run, metric, group))]
    return sum(row[when]["value"] for row in rows) / len(rows)


def table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def _concept(runs: list[dict]) -> tuple[str, str]:
    return next(iter(runs[0]["evaluation"]["protocol"]["concept"].items()))


def star_row(runs: list[dict]) -> list[str]:
    attribute, _ = _concept(runs)
    n = results(runs[0], "concept_share", "direct")["after"]["n"]  # type: ignore[index]
    name, lost = worst_value(runs, f"accuracy_{attribute}")
    fid = "-" if results(runs[0], "fid_judge", "retained") is None else f"{mean(runs, 'fid_judge', 'retained', 'before'):.1f} → {mean(runs, 'fid_judge', 'retained', 'after'):.1f}"  # fmt: skip
    return [
        runs[0]["label"],
        runs[0]["recipe"]["trainable"]["select"].replace("_", " "),
        f"{runs[0]['recipe']['training']['lr']:g}",
        share(pooled(runs, "concept_share", "direct")),
        share(pooled(runs, "concept_share", "synonyms")),
        share(pooled(runs, "none_share", "direct")),
        f"{change(runs, f'accuracy_{attribute}', 'neighbours'):+.1f}",
        f"{share(pooled(runs, f'accuracy_{attribute}', 'retained'))} ({change(runs, f'accuracy_{attribute}', 'retained'):+.1f})",
        f"{name} {lost:+.1f}",
        f"{change(runs, 'accuracy_color', 'retained'):+.1f}",
        fid,
        f"{ratio(runs, 'clip_score', 'retained'):+.1f} %",
        f"{sum(run['run']['seconds'] for run in runs) / len(runs):.0f}",
        f"{len(runs)} x {n}",
    ]


STAR_HEAD = ["method", "weights", "lr", "star, direct %", "star, synonyms %", "none, direct %", "neighbours, points", "other shapes % (points)", "worst shape, points", "colours, points", "FID (judge)", "CLIP score", "training s", "seeds x n"]  # fmt: skip


def before_row(runs: list[dict]) -> list[str]:
    one = runs[:1]
    n = results(runs[0], "concept_share", "direct")["before"]["n"]  # type: ignore[index]
    return ["before", "", "", share(pooled(one, "concept_share", "direct", "before")), share(pooled(one, "concept_share", "synonyms", "before")), share(pooled(one, "none_share", "direct", "before")), "", share(pooled(one, "accuracy_shape", "retained", "before")), "", "", "", "", "", f"1 x {n}"]  # fmt: skip


def star_table(found: dict[str, list[dict]]) -> str:
    first = next(iter(found.values()))
    return table([STAR_HEAD, before_row(first), *(star_row(runs) for runs in found.values())])


def hard_table(found: dict[str, list[dict]]) -> str:
    head = ["task", "rule", "concept, direct %", "concept, synonyms %", "none, direct %", "retained % (points)", "colours, points", "cos (mean; share < 0)", "training s", "n"]  # fmt: skip
    rows = [head]
    for runs in found.values():
        attribute, _ = _concept(runs)
        conflict = runs[0]["conflict"]
        colours = "-" if attribute == "color" else f"{change(runs, 'accuracy_color', 'retained'):+.1f}"
        n = results(runs[0], "concept_share", "direct")["after"]["n"]  # type: ignore[index]
        rows.append([
            runs[0]["task"], runs[0]["label"],
            share(pooled(runs, "concept_share", "direct")), share(pooled(runs, "concept_share", "synonyms")),
            share(pooled(runs, "none_share", "direct")),
            f"{share(pooled(runs, f'accuracy_{attribute}', 'retained'))} ({change(runs, f'accuracy_{attribute}', 'retained'):+.1f})",
            colours, f"{conflict['mean_cosine']:+.2f}; {100 * conflict['share_negative']:.0f} %",
            f"{runs[0]['run']['seconds']:.0f}", f"{len(runs)} x {n}",
        ])  # fmt: skip
    return table(rows)


def provenance(found: dict[str, list[dict]]) -> str:
    environments = [run["evaluation"]["environment"] for runs in found.values() for run in runs]
    commits = sorted(
        {str(e["commit"])[:12] + ("+changes" if "+changes" in str(e["commit"]) else "") for e in environments}
    )
    versions = environments[0]["versions"]
    kept = ", ".join(f"{k} {versions[k]}" for k in ("torch", "diffusers", "transformers"))
    hashes = sorted({run["evaluation"]["protocol_hash"] for runs in found.values() for run in runs})
    return f"Commits {', '.join(commits)}; {kept}; {environments[0]['device']}, {environments[0]['threads']} thread(s) a run; protocols {', '.join(hashes)}."  # fmt: skip


def setting(point: dict[str, Any]) -> str:
    """A point of a grid, e.g. "cross_attention 0.0005"."""
    return " ".join(value if isinstance(value, str) else f"{value:g}" for value in point.values())


def grids(found: dict[str, list[dict]]) -> str:
    lines = []
    for runs in found.values():
        if runs[0]["grid"]:
            points = "; ".join(f"{setting(g['point'])}: {g['score']:.3f}" for g in runs[0]["grid"])
            lines.append(f"* {runs[0]['label']}: {points}")
    return "\n".join(lines)


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


def methods_table() -> str:
    """Every method of the registry, with its named settings, source and proved theorems."""
    from concept_eraser import registry

    rows = [["method", "settings with a name", "paper", "theorems tested"]]
    for name in registry.names("method"):
        plugin: Any = registry.load("method", name)
        aliases = [f"`{alias}`" for alias, (owner, _) in registry.named("method").items() if owner == name]
        theorems = ", ".join(sorted(plugin.theorems)).replace("_", " ")
        rows.append([f"`{name}`", ", ".join(aliases), f"{plugin.title} ({plugin.source})", theorems])
    return table(rows)


def paper_problems() -> str:
    """eval/results/papers.md: what the papers' own small problems gave."""
    parts = ["# The papers' own problems", "", "Rendered from `papers/*.json` by `python -m tools.render_results`; made by `python -m tools.paper_problems`.", "Means over the seeds; [mean, standard deviation] where two numbers stand together."]  # fmt: skip
    for path in sorted((RESULTS / "papers").glob("*.json")):
        content = json.loads(path.read_text())
        environment = content["environment"]
        head = list(content["table"][0])
        body = [[_cell(row[key]) for key in head] for row in content["table"]]
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
Commit {str(environment["commit"])[:12]}; torch {environment["versions"]["torch"]}; judge {files[0]["judge"]}.
"""


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_cell(v) for v in value) + "]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


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


def study_page(study: str, title: str, body: str, found: dict[str, list[dict]]) -> str:
    sheets = "\n".join(f"\n**{runs[0]['task'] + ', ' if runs[0]['task'] else ''}{runs[0]['label']}**\n\n![contact sheet]({study}/{name}.png)" for name, runs in found.items() if (RESULTS / study / f"{name}.png").exists())  # fmt: skip
    notes = RESULTS / study / "notes.md"
    said = "\n" + notes.read_text() if notes.exists() else ""
    chosen = grids(found)
    selection = (
        f"\n## Weights and learning rates: score on the selection seeds (retained accuracy minus concept share)\n\n{chosen}\n"
        if chosen
        else ""
    )
    return f"""# {title}

Rendered from `{study}/*.json` by `python -m tools.render_results`; made by `python -m tools.study eval/studies/{study}.yaml`.
Shares with 95 % Wilson intervals over all seeds' pictures; "points" are after minus before on the same prompts and seeds.
"none" is the share of pictures in which the judge sees no clear shape.
{provenance(found)}

{body}
{said}{selection}
## Contact sheets (seed 0; pairs of rows before / after: direct, synonyms, retained)
{sheets}
"""


def pages() -> dict[Path, str]:
    """What every rendered file should contain."""
    made: dict[Path, str] = {}
    blocks = {"world": world_table(), "quickstart": quickstart_block(), "methods": methods_table()}
    titles: dict[str, Any] = {
        "tiny_star": ("Erasing star from tiny-sd", star_table),
        "tiny_hard": ("Tasks on which the bargain should matter", hard_table),
        "tiny_methods": ("The methods of the five papers on the star: a first look", star_table),
        "tiny_star_recipe": ("Which recipe for MUNBa? Candidates on seeds that are reported nowhere else", star_table),
    }
    for study, (title, render) in titles.items():
        found = load(study)
        if found:
            body = render(found)
            made[RESULTS / f"{study}.md"] = study_page(study, title, body, found)
            if study in ("tiny_star", "tiny_hard"):
                blocks[study] = body
    made[RESULTS / "papers.md"] = paper_problems()
    if list((RESULTS / "robustness").glob("*.json")):
        made[RESULTS / "robustness.md"] = robustness()
    readme = (ROOT / "README.md").read_text()
    for name, block in blocks.items():
        readme, places = re.subn(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", lambda m, b=block: m[1] + b + m[2], readme, flags=re.S)  # fmt: skip
        if places != 1:
            raise SystemExit(f"README.md has {places} places for the table {name!r}; it needs one")
    made[ROOT / "README.md"] = readme
    return made


def main() -> int:
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what its JSON says; run python -m tools.render_results")
        return int(bool(stale))
    for path, text in pages().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
