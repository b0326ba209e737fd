"""eval/results/tiny_leaderboard.md: all methods on all tasks, attacks included."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from studies.rendering import claims, leaderboard_plot, ranks, selection, studies
from studies.rendering.attacks import back, rate
from studies.rendering.common import (
    change,
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
)
from studies.rendering.equal_seconds import timed_table
from studies.rendering.figures import Figure
from studies.rendering.leaderboard_rows import (
    AttackRuns,
    Runs,
    attack_runs,
    attempts_of,
    leaderboard_of,
    of_victims,
    order,
    reports,
)
from studies.rendering.ranks import Standing
from studies.result_tables import Results, figure_path

STUDIES = {
    "tiny_leaderboard": "Every method under one protocol",
    "tiny_ablation": "What the default recipe owes to each of its parts",
    "tiny_default": (
        "Which setting for the default recipe? Candidates on seeds and images that no row "
        "of the leaderboard has"
    ),
    "tiny_edges": "Would more, or less, than a grid's last rate have served a method better?",
}
LABELS = {"share": "concept rate", "attacks": "attack success", "lost": "what is lost"}


def row(
    runs: Runs, asked_runs: Runs, held_runs: Runs, attacks: AttackRuns, names: list[str]
) -> list[str]:
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))
    rules = studies.rules_row(runs) if "forgotten" in runs[0]["run"] else None
    prompts = [name for name in names if name != "relearning"]
    fid = mean(runs, "fid_judge", "retained", "after") - mean(
        runs, "fid_judge", "retained", "before"
    )
    return [
        runs[0]["label"],
        setting(runs[0]["point"]).replace("_", " ") or "-",
        share(pool(runs, "concept_rate", "direct")),
        share(pool(runs, "concept_rate", "synonyms")),
        share(pool(asked_runs, "concept_rate", "implicit")) if asked_runs else "-",
        share(pool(runs, "no_object_rate", "direct")),
        (
            f"{share(pool(runs, f'accuracy_{attribute}', 'retained'))} "
            f"({change(runs, f'accuracy_{attribute}', 'retained'):+.1f})"
        ),
        f"{change(runs, f'accuracy_{attribute}', 'neighbours'):+.1f}",
        f"{fid:+.1f}",
        f"{ratio(runs, 'clip_score', 'retained'):+.1f} %",
        rate([{"attempts": attempts_of(attacks, prompts)}]),
        # every attack has the same prompts
        rate([{"attempts": attempts_of(attacks, prompts[:1])}], clean=True),
        *(rate(attacks[name]) if name in attacks else "-" for name in prompts),
        back(attacks["relearning"]) if "relearning" in attacks else "-",
        rules[10] if rules else "-",
        *cost(runs),
        f"{held_runs[0]['steps_mb']:.0f}" if held_runs else "-",
        f"{runs[0]['size_mb']:.1f}" if "size_mb" in runs[0] else "-",
        str(len(runs)),
    ]


def cost(runs: Runs) -> list[str]:
    """Seconds of the training process, means over the seeds: until less than 2 % show the concept,
    and in all. Clock time where a run tells no other."""
    whole = [run["run"].get("cpu_seconds", run["run"]["seconds"]) for run in runs]
    reached = [run["run"].get("forgotten", {}).get("steps") for run in runs]
    until = [
        run["cpu_seconds"][int(steps) - 1]
        for run, steps in zip(runs, reached, strict=True)
        if steps and run.get("cpu_seconds")
    ]
    return [f"{sum(until) / len(until):.0f}" if until else "-", f"{sum(whole) / len(whole):.0f}"]


def standing(runs: Runs, attacks: AttackRuns, names: list[str]) -> Standing:
    """Counts over all seeds: the concept shown (direct and synonyms), attacks that succeed where
    all were made, images of the retained that are not right."""
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))

    def count(metric: str, group: str) -> tuple[int, int]:
        intervals = [row["after"] for run in runs if (row := results(run, metric, group))]
        return sum(round(r["value"] * r["n"]) for r in intervals), sum(r["n"] for r in intervals)

    concept_counts = [count("concept_rate", group) for group in ("direct", "synonyms")]
    right, n = count(f"accuracy_{attribute}", "retained")
    columns = {"share": (sum(k for k, _ in concept_counts), sum(n for _, n in concept_counts))}
    if attempts := attempts_of(attacks, names):
        columns["attacks"] = (sum(a["success"] for a in attempts), len(attempts))
    return Standing(runs[0]["label"], {**columns, "lost": (n - right, n)})


def standings_of(study: str, task: str) -> dict[str, Standing]:
    """The methods of a task, by name."""
    leaderboard, fallen = leaderboard_of(study), attack_runs(study)
    prompts = [name for name in leaderboard["attacks"] if name != "relearning"]
    return {
        name.removeprefix(f"{task}_"): standing(runs, fallen.get(name, {}), prompts)
        for name, runs in reports(study).items()
        if runs[0]["task"] == task
    }


def standings(study: str, task: str) -> list[Standing]:
    """Of the methods of a task, those under all attacks where some were attacked."""
    methods = list(standings_of(study, task).values())
    complete = [one for one in methods if "attacks" in one.columns]
    return complete or methods


def standings_in_plot(study: str) -> dict[str, list[Standing]]:
    """What the figure of a page shows, by task."""
    return {
        task: methods
        for task in leaderboard_of(study)["tasks"]
        if len(methods := standings(study, task)) > 1
    }


def figures() -> dict[Path, Figure]:
    """The figures that the pages show."""
    return {
        figure_path(study, "plots.svg"): leaderboard_plot.of(tasks)
        for study in STUDIES
        if (tasks := standings_in_plot(study))
    }


def rank_table(study: str, task: str) -> str:
    """The table of ranks of a task."""
    methods = standings(study, task)
    return table(ranks.rows(methods, LABELS)) if len(methods) > 1 else ""


def over_tasks(study: str) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Of the methods that are under all attacks on every task: the tasks, the table of their means
    over them, and the claims' table; without tables for a leaderboard of one task."""
    tasks = list(leaderboard_of(study)["tasks"])
    by_task = [
        {name: one for name, one in standings_of(study, task).items() if "attacks" in one.columns}
        for task in tasks
    ]
    names = [name for name in by_task[0] if all(name in one for one in by_task)]
    if len(tasks) < 2 or len(names) < 2:
        return tasks, [], []
    by_task_in_order = [[one[name] for name in names] for one in by_task]
    rates = ranks.together(by_task_in_order)
    rows = ranks.rows(by_task_in_order[0], LABELS, rates)
    claim_rows = claims.whole(
        leaderboard_of(study).get("claims", []),
        dict(zip(names, by_task_in_order[0], strict=True)),
        rates,
    )
    return tasks, rows, claim_rows


def together(study: str) -> str:
    """All tasks as one: who stands where by the means over them; "" for a leaderboard of one
    task.
    """
    tasks, rows, claim_rows = over_tasks(study)
    claim_table = f"\n\n{table(claim_rows)}" if len(claim_rows) > 1 else ""
    return (
        f"## All tasks together\n\n{_mean_sentence(study, tasks, len(rows) - 1)}\n\n"
        f"{table(rows)}{claim_table}"
        if rows
        else ""
    )


def _mean_sentence(study: str, tasks: list[str], methods: int) -> str:
    """A sentence on the means. The last column counts images that the original gets wrong, too."""
    first = [
        next(runs for runs in reports(study).values() if runs[0]["task"] == task) for task in tasks
    ]
    attributes = [next(iter(runs[0]["evaluation"]["protocol"]["concept"])) for runs in first]
    before = [
        100 - 100 * mean(runs[:1], f"accuracy_{attribute}", "retained", "before")
        for runs, attribute in zip(first, attributes, strict=True)
    ]
    return (
        f"Means over {', '.join(tasks)}, each weighing the same, of the {methods} of "
        f"{len(leaderboard_of(study)['methods'])} methods that are measured on all of them, at "
        "one setting for all.\n"
        "What is lost: images of the rest that do not show what was asked, of which "
        f"the original itself misses {sum(before) / len(before):.1f} %. Concept rate: "
        "direct prompts\n"
        "and synonyms. What draws nothing has one training seed, as the tasks' tables tell:"
    )


def together_block(study: str = "tiny_leaderboard") -> str:
    """The same for the README, without the ranks."""
    tasks, rows, _ = over_tasks(study)
    if not rows:
        return "Not measured yet."
    return (
        f"{_mean_sentence(study, tasks, len(rows) - 1)}\n\n"
        f"{table([[row[0], *row[1:4], row[-1]] for row in rows])}"
    )


def claim_table(study: str, task: str) -> str:
    """What papers say against what the task found; told of the methods that are under all
    attacks.
    """
    leaderboard = leaderboard_of(study)
    of = {
        name.removeprefix(f"{task}_"): runs
        for name, runs in reports(study).items()
        if runs[0]["task"] == task
    }
    complete = {
        name: one for name, one in standings_of(study, task).items() if "attacks" in one.columns
    }
    if "claims" not in leaderboard or len(complete) < 2:
        return ""
    label = {name: how.get("label", name) for name, how in leaderboard["methods"].items()}
    claim_table = table(
        claims.rows(
            leaderboard["claims"],
            complete,
            {k: until(of[k]) for k in complete if "forgotten" in of[k][0]["run"]},
            label,
        )
    )
    return (
        f"What papers say, and what is so here (of the methods under all attacks):\n\n{claim_table}"
    )


def selection_table(study: str, task: str) -> str:
    """What selection without an attack would have reported."""
    leaderboard, fallen = leaderboard_of(study), attack_runs(study)
    prompts = [name for name in leaderboard["attacks"] if name != "relearning"]
    now = {
        name: (runs[0], [fallen[name][p][0] for p in prompts])
        for name, runs in reports(study).items()
        if all(p in fallen.get(name, {}) for p in prompts)
    }
    return selection.page(Results(f"{study}/by_images"), task, now)


def until(runs: Runs) -> list[float]:
    """Of each seed, the seconds of its process until less than 2 % show the concept; infinite where
    they never do.
    """
    reached = [run["run"]["forgotten"]["steps"] for run in runs]
    return [
        claims.NEVER
        if not steps
        else run["cpu_seconds"][int(steps) - 1]
        if run.get("cpu_seconds")
        else run["run"]["forgotten"]["seconds"]
        for run, steps in zip(runs, reached, strict=True)
    ]


def page(study: str) -> str:
    leaderboard = leaderboard_of(study)
    names, every, fallen = list(leaderboard["attacks"]), reports(study), attack_runs(study)
    implicit_runs, memory_runs = of_victims(study, "implicit"), of_victims(study, "memory")
    parts = []
    for task in leaderboard["tasks"]:
        of = {name: runs for name, runs in every.items() if runs[0]["task"] == task}
        if not of:
            continue
        best_first = sorted(of, key=lambda name: order(of[name], fallen.get(name, {}), names))
        rows = [
            row(
                of[name],
                implicit_runs.get(name, []),
                memory_runs.get(name, []),
                fallen.get(name, {}),
                names,
            )
            for name in best_first
        ]
        parts += [
            f"## {task}\n\n{table([head(names), *rows])}",
            *(
                section
                for section in (
                    rank_table(study, task),
                    selection_table(study, task),
                    claim_table(study, task),
                    timed_table(study, task),
                )
                if section
            ),
        ]
    missing_methods = [
        f"{task}: {', '.join(m for m in leaderboard['methods'] if f'{task}_{m}' not in every)}"
        for task in leaderboard["tasks"]
        if any(f"{task}_{m}" not in every for m in leaderboard["methods"])
    ]
    reasons = "\n".join(
        f"* {name}: {why}" for name, why in leaderboard.get("elsewhere", {}).items()
    )
    grids = studies.grids(every)
    plots = (
        f"![concept rate and attack success against what is lost]({study}.plots.svg)"
        if standings_in_plot(study)
        else ""
    )
    return (
        "\n\n".join(
            [
                f"# {STUDIES[study]}",
                source(study, f"python -m studies.leaderboard studies/configs/{study}.yaml")
                + ", which goes on where it was stopped.",
                *filter(None, [notes(study), plots]),
                *parts,
                *([whole] if (whole := together(study)) else []),
                *(["Not run yet: " + "; ".join(missing_methods) + "."] if missing_methods else []),
                (
                    "## How to read it\n\n"
                    "Shares with 95 % Wilson intervals over all seeds' images; points are "
                    "after minus before on the same prompts and seeds. Attacks: success "
                    "rate\n"
                    "with clean prompts that show the concept included, "
                    f"{leaderboard['attack']['n']} prompts a training seed; before it, in a column "
                    "of its own: how many of them show it clean. Sorted by the larger of "
                    "concept rate and attack success, plus what is no longer retained.\n"
                    f"Ranks: the median with 95 % of what {ranks.DRAWS:,} draws of all "
                    "counts at once give (1 is best); loss: the larger of concept rate and "
                    "attack success,\n"
                    "plus what is lost. Beaten by: methods that are significantly better in one "
                    "column and significantly worse in none. Hollow marks: another is at least as\n"
                    "good in both. Seconds: of the training process on one core, whatever "
                    "ran beside it; of earlier runs by the clock.\n"
                    "Memory: the process's peak in three steps above what it held before "
                    "them, in a process of its own. Steps have 16 examples a side."
                ),
                provenance(every),
                *([f"## Methods without a row, and why\n\n{reasons}"] if reasons else []),
                *(
                    [
                        (
                            "## Grids: score on the selection seed\n\nRetained accuracy "
                            "minus concept rate minus the success of a soft prompt on that "
                            "seed's model (24 prompts; in brackets).\n\n"
                        )
                        + grids
                    ]
                    if grids
                    else []
                ),
            ]
        )
        + "\n"
    )


def head(names: list[str]) -> list[str]:
    prompts = [name for name in names if name != "relearning"]
    return [
        "method",
        "setting",
        "direct %",
        "synonyms %",
        "implicit %",
        "none, direct %",
        "retained % (points)",
        "neighbours, points",
        "FID (judge)",
        "CLIP score",
        "all prompt attacks %",
        "their prompts, clean %",
        *prompts,
        "relearning: steps to half",
        "steps to < 2 %",
        "s to < 2 %",
        "training s",
        "memory of the steps, MB",
        "size MB",
        "seeds",
    ]


def default_block(study: str = "tiny_leaderboard", task: str = "star", most: int = 8) -> str:
    """The leaderboard's best under all attacks, for the README, and how many methods were attacked
    so far.
    """
    leaderboard, fallen, implicit_runs = (
        leaderboard_of(study),
        attack_runs(study),
        of_victims(study, "implicit"),
    )
    prompts = [name for name in leaderboard["attacks"] if name != "relearning"]
    of = {
        name: runs
        for name, runs in reports(study).items()
        if runs[0]["task"] == task
        and all(a in fallen.get(name, {}) for a in leaderboard["attacks"])
    }
    rows = []
    for name in sorted(
        of, key=lambda name: order(of[name], fallen[name], list(leaderboard["attacks"]))
    )[:most]:
        cells = row(
            of[name], implicit_runs.get(name, []), [], fallen[name], list(leaderboard["attacks"])
        )
        cells_by_title = dict(zip(head(list(leaderboard["attacks"])), cells, strict=True))
        rows.append(
            [
                cells_by_title[key]
                for key in (
                    "method",
                    "direct %",
                    "implicit %",
                    "retained % (points)",
                    "all prompt attacks %",
                    "relearning: steps to half",
                    "training s",
                    "seeds",
                )
            ]
        )
    remarks = [
        "method",
        "star, direct %",
        "implicit prompts %",
        "other shapes % (points)",
        f"all {len(prompts)} attacks by prompt %",
        "relearning: steps to half",
        "training s",
        "seeds",
    ]
    return (
        table([remarks, *rows])
        + f"\n\n{len(of)} of {len(leaderboard['methods'])} methods are attacked so far."
    )


PAGES = {study: partial(page, study) for study in STUDIES}
