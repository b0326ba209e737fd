"""Pages of the studies on the bundled pipeline: eval/results/tiny_*.md."""

from __future__ import annotations

from studies import grids
from studies.rendering.common import (
    LIMITS,
    change,
    learning_rate,
    mean,
    notes,
    pool,
    provenance,
    ratio,
    results,
    setting,
    share,
    source,
    table,
    worst_value,
)
from studies.result_tables import figure_path


def _concept(runs: list[dict]) -> tuple[str, str]:
    return next(iter(runs[0]["evaluation"]["protocol"]["concept"].items()))


def star_row(runs: list[dict]) -> list[str]:
    """Return the row of an entry of a study on the star."""
    attribute, _ = _concept(runs)
    n = results(runs[0], "concept_rate", "direct")["after"]["n"]  # type: ignore[index]
    name, worst = worst_value(runs, f"accuracy_{attribute}")
    fid = (
        "-"
        if results(runs[0], "fid_judge", "retained") is None
        else (
            f"{mean(runs, 'fid_judge', 'retained', 'before'):.1f} → "
            f"{mean(runs, 'fid_judge', 'retained', 'after'):.1f}"
        )
    )
    return [
        runs[0]["label"],
        runs[0]["recipe"]["trainable"]["select"].replace("_", " "),
        learning_rate(runs[0]),
        share(pool(runs, "concept_rate", "direct")),
        share(pool(runs, "concept_rate", "synonyms")),
        share(pool(runs, "no_object_rate", "direct")),
        f"{change(runs, f'accuracy_{attribute}', 'neighbours'):+.1f}",
        (
            f"{share(pool(runs, f'accuracy_{attribute}', 'retained'))} "
            f"({change(runs, f'accuracy_{attribute}', 'retained'):+.1f})"
        ),
        f"{name} {worst:+.1f}",
        f"{change(runs, 'accuracy_color', 'retained'):+.1f}",
        fid,
        f"{ratio(runs, 'clip_score', 'retained'):+.1f} %",
        f"{sum(run['run']['seconds'] for run in runs) / len(runs):.0f}",
        f"{len(runs)} x {n}",
    ]


STAR_HEAD = [
    "method",
    "trainable parameters",
    "lr",
    "concept rate, direct %",
    "concept rate, synonyms %",
    "no-object rate, direct %",
    "neighbours, points",
    "retain accuracy, other shapes % (points)",
    "worst shape, points",
    "colours, points",
    "FID (judge)",
    "CLIP score",
    "training s",
    "seeds x n",
]


def before_row(runs: list[dict]) -> list[str]:
    """Return the row of the original model."""
    one = runs[:1]
    n = results(runs[0], "concept_rate", "direct")["before"]["n"]  # type: ignore[index]
    return [
        "before",
        "",
        "",
        share(pool(one, "concept_rate", "direct", "before")),
        share(pool(one, "concept_rate", "synonyms", "before")),
        share(pool(one, "no_object_rate", "direct", "before")),
        "",
        share(pool(one, "accuracy_shape", "retained", "before")),
        "",
        "",
        "",
        "",
        "",
        f"1 x {n}",
    ]


def star_table(runs_by_name: dict[str, list[dict]]) -> str:
    """Return the table of a study on the star."""
    first = next(iter(runs_by_name.values()))
    return table(
        [STAR_HEAD, before_row(first), *(star_row(runs) for runs in runs_by_name.values())]
    )


def hard_table(runs_by_name: dict[str, list[dict]]) -> str:
    """Return the table of tiny_hard: two combination rules for each task."""
    head = [
        "task",
        "rule",
        "concept rate, direct %",
        "concept rate, synonyms %",
        "no-object rate, direct %",
        "retain accuracy % (points)",
        "colours, points",
        "cos (mean; share < 0)",
        "training s",
        "n",
    ]
    rows = [head]
    for runs in runs_by_name.values():
        attribute, _ = _concept(runs)
        conflict = runs[0]["conflict"]
        colours = (
            "-" if attribute == "color" else f"{change(runs, 'accuracy_color', 'retained'):+.1f}"
        )
        n = results(runs[0], "concept_rate", "direct")["after"]["n"]  # type: ignore[index]
        rows.append(
            [
                runs[0]["task"],
                runs[0]["label"],
                share(pool(runs, "concept_rate", "direct")),
                share(pool(runs, "concept_rate", "synonyms")),
                share(pool(runs, "no_object_rate", "direct")),
                (
                    f"{share(pool(runs, f'accuracy_{attribute}', 'retained'))} "
                    f"({change(runs, f'accuracy_{attribute}', 'retained'):+.1f})"
                ),
                colours,
                f"{conflict['mean_cosine']:+.2f}; {100 * conflict['share_negative']:.0f} %",
                f"{runs[0]['run']['seconds']:.0f}",
                f"{len(runs)} x {n}",
            ]
        )
    return table(rows)


def rules_table(runs_by_name: dict[str, list[dict]]) -> str:
    """Return a table for each task: rates, and the steps and seconds until the concept rate is
    below 2 %.
    """
    tasks: dict[str, list[list[dict]]] = {}
    for runs in runs_by_name.values():
        tasks.setdefault(runs[0]["task"], []).append(runs)
    parts = []
    for task, entries in tasks.items():
        head = [
            "method",
            "trainable parameters",
            "lr",
            "concept rate, direct %",
            "each seed",
            "concept rate, synonyms %",
            "no-object rate, direct %",
            "retain accuracy % (points)",
            "FID (judge)",
            "CLIP score",
            "steps to < 2 %",
            "seconds to < 2 %",
            "training s",
            "seeds x n",
        ]
        rows = [head, *(rules_row(runs) for runs in entries)]
        before = before_row(entries[0])
        attribute, _ = _concept(entries[0])
        retain_accuracy = share(pool(entries[0][:1], f"accuracy_{attribute}", "retained", "before"))
        rows.insert(
            1,
            [
                "before",
                "",
                "",
                before[3],
                "",
                before[4],
                before[5],
                retain_accuracy,
                "",
                "",
                "",
                "",
                "",
                before[-1],
            ],
        )
        parts.append(f"### {task[0].upper()}{task[1:]}\n\n{table(rows)}")
    return "\n\n".join(parts)


def rules_row(runs: list[dict]) -> list[str]:
    """Return the row of an entry of tiny_rules."""
    attribute, _ = _concept(runs)
    rates = [
        100 * row["after"]["value"]
        for run in runs
        if (row := results(run, "concept_rate", "direct"))
    ]
    n = results(runs[0], "concept_rate", "direct")["after"]["n"]  # type: ignore[index]
    fid = [results(run, "fid_judge", "retained") for run in runs]
    crossings = [run["run"]["time_to_unlearn"] for run in runs]

    def steps_until(key: str) -> str:
        values = [crossing[key] for crossing in crossings if crossing[key] is not None]
        if not values:
            return "never"
        return f"{sum(values) / len(values):.0f}" + (
            f" ({len(values)} of {len(crossings)} seeds)" if len(values) < len(crossings) else ""
        )

    return [
        runs[0]["label"],
        runs[0]["recipe"]["trainable"]["select"].replace("_", " "),
        learning_rate(runs[0]),
        share(pool(runs, "concept_rate", "direct")),
        ", ".join(f"{value:.0f}" for value in rates),
        share(pool(runs, "concept_rate", "synonyms")),
        share(pool(runs, "no_object_rate", "direct")),
        (
            f"{share(pool(runs, f'accuracy_{attribute}', 'retained'))} "
            f"({change(runs, f'accuracy_{attribute}', 'retained'):+.1f})"
        ),
        "-"
        if None in fid
        else (
            f"{mean(runs, 'fid_judge', 'retained', 'before'):.1f} → "
            f"{mean(runs, 'fid_judge', 'retained', 'after'):.1f}"
        ),
        f"{ratio(runs, 'clip_score', 'retained'):+.1f} %",
        steps_until("steps"),
        steps_until("seconds"),
        f"{sum(run['run']['seconds'] for run in runs) / len(runs):.0f}",
        f"{len(runs)} x {n}",
    ]


def scored_grids(runs_by_name: dict[str, list[dict]]) -> str:
    """Return the scored grids as a list, or ""."""
    lines = []
    for runs in runs_by_name.values():
        if runs[0]["grid"]:
            scores = "; ".join(
                f"{setting(g['point'])}: {g['score']:.3f}"
                + (f" ({sum(g['attacked']) / len(g['attacked']):.2f})" if "attacked" in g else "")
                for g in runs[0]["grid"]
            )
            lines.append(f"* {runs[0]['label']}: {scores}")
    return "\n".join(dict.fromkeys(lines))  # entries with the grid of another repeat it


def study_page(study: str, title: str, body: str, runs_by_name: dict[str, list[dict]]) -> str:
    """Return the page of a study with its tables, notes, grids and contact sheets."""
    parts = []
    for name, runs in runs_by_name.items():
        path = figure_path(study, f"{name}.webp")
        task = f"{runs[0]['task']}, " if runs[0]["task"] else ""
        parts += (
            [f"\n**{task}{runs[0]['label']}**\n\n![contact sheet]({path.name})"]
            if path.exists()
            else []
        )
    command = f"python -m studies.study studies/configs/{study}.yaml"
    sheets = "\n".join([*parts, ""]) if parts else ""
    others = "the other entries" if parts else "all entries"
    notes_text = f"\n{text}\n" if (text := notes(study)) else ""
    grid_table = scored_grids(runs_by_name)
    selection = (
        (
            "\n## Grids: score on the selection seeds (retain accuracy minus concept rate)\n\n"
            f"{grid_table}\n"
        )
        if grid_table
        else ""
    )
    return f"""# {title}

{source(study, command)}.
Rates have 95 % Wilson intervals over the images of all training seeds. Points are after minus before, on the same
prompts and seeds. The no-object rate is the share of images in which the judge sees no clear shape.
{provenance(runs_by_name)}

{LIMITS}

{grids.with_note(body)}
{notes_text}{selection}
## Contact sheets (seed 0; pairs of rows before / after: direct, synonyms, retained)
{sheets}
`{command} --sheets` trains the models of {others} again. It writes their sheets to runs/studies/{study}/<entry>/sheet.webp.
"""  # noqa: E501
