"""eval/results/tiny_leaderboard.md: all methods on all tasks, attacks included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from studies import grids
from studies.rendering import (
    claims,
    hub,
    leaderboard_hover,
    leaderboard_plot,
    marks,
    ranks,
    selection,
    studies,
)
from studies.rendering.attacks import back, rate
from studies.rendering.common import (
    change,
    limits,
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
    excess_recovery,
    has_entry,
    is_control,
    leaderboard_of,
    of_victims,
    order,
    reports,
)
from studies.rendering.marks import Panel
from studies.rendering.ranks import Standing
from studies.result_tables import Results, figure_path

STUDIES = {
    "tiny_leaderboard": "All methods under protocol 1",
    "tiny_ablation": "Ablation of the default recipe",
    "tiny_default": (
        "Candidates for the default recipe, on seeds and images that no row of the leaderboard has"
    ),
    "tiny_edges": "Learning rates and strengths beyond the grids of the leaderboard",
}
LABELS = {
    "concept_rate": "concept rate",
    "attack_success": "attack success rate",
    "retain_error": "retain error",
}
IN_FIGURE = 12  # the largest number of methods with names
WITH_HOVER = ("tiny_leaderboard",)  # studies with a figure of all methods
# The rows of the README's table, by the method's name in the study.
IN_README = {
    "munba_lora": "MUNBa on a LoRA of all layers",
    "munba": "MUNBa",
    "uno_anchor": "UNO + anchor term",
    "sum": "plain sum",
    "uce": "UCE",
}
README_DOCS = "docs/measuring.md"
EXCESS = (
    "Excess: the attack success rate minus that on a model that never learned the concept, paired "
    "by prompt and attack. Its interval has the training seed as its unit where three were "
    "attacked. Otherwise its unit is the prompt, and it says nothing about other trainings. Tasks "
    "without such a model have no such column."
)


def row(
    runs: Runs,
    implicit_runs: Runs,
    memory_runs: Runs,
    attacks: AttackRuns,
    control: AttackRuns | None,
    names: list[str],
) -> list[str]:
    """Return the row of a method on a task.

    Args:
        runs: The reported runs, one a training seed.
        implicit_runs: Their results on prompts without the names of the concept.
        memory_runs: Their memory.
        attacks: The attacks on them.
        control: The attacks on the model that never learned the concept. Without them the row has
            no column of the excess.
        names: All attacks.
    """
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))
    rules = studies.rules_row(runs) if "time_to_unlearn" in runs[0]["run"] else None
    prompts = [name for name in names if name != "relearning"]
    fid = mean(runs, "fid_judge", "retained", "after") - mean(
        runs, "fid_judge", "retained", "before"
    )
    return [
        runs[0]["label"],
        setting(runs[0]["point"], grids.of_row(runs[0])).replace("_", " ") or "-",
        share(pool(runs, "concept_rate", "direct")),
        share(pool(runs, "concept_rate", "synonyms")),
        share(pool(implicit_runs, "concept_rate", "implicit")) if implicit_runs else "-",
        share(pool(runs, "no_object_rate", "direct")),
        (
            f"{share(pool(runs, f'accuracy_{attribute}', 'retained'))} "
            f"({change(runs, f'accuracy_{attribute}', 'retained'):+.1f})"
        ),
        f"{change(runs, f'accuracy_{attribute}', 'neighbours'):+.1f}",
        f"{fid:+.1f}",
        f"{ratio(runs, 'clip_score', 'retained'):+.1f} %",
        rate([{"attempts": attempts_of(attacks, prompts)}]),
        *([_excess_text(attacks, control, prompts)] if control else []),
        # every attack has the same prompts
        rate([{"attempts": attempts_of(attacks, prompts[:1])}], clean=True),
        *(rate(attacks[name]) if name in attacks else "-" for name in prompts),
        back(attacks["relearning"]) if "relearning" in attacks else "-",
        rules[10] if rules else "-",
        *cost(runs),
        f"{memory_runs[0]['steps_mb']:.0f}" if memory_runs else "-",
        f"{runs[0]['size_mb']:.1f}" if "size_mb" in runs[0] else "-",
        str(len(runs)),
    ]


def _excess_text(attacks: AttackRuns, control: AttackRuns, names: list[str]) -> str:
    """Return the excess recovery of a method in points, "-" for the control itself."""
    return "-" if attacks is control else share(excess_recovery(attacks, control, names))


def cost(runs: Runs) -> list[str]:
    """Return the seconds of the training process, as means over the training seeds.

    The first value ends where the concept rate is below 2 %, the second at the last step. Runs
    without seconds of the process have the seconds of the clock.
    """
    whole = [run["run"].get("cpu_seconds", run["run"]["seconds"]) for run in runs]
    steps_by_seed = [run["run"].get("time_to_unlearn", {}).get("steps") for run in runs]
    until_below = [
        run["cpu_seconds"][int(steps) - 1]
        for run, steps in zip(runs, steps_by_seed, strict=True)
        if steps and run.get("cpu_seconds")
    ]
    first = f"{sum(until_below) / len(until_below):.0f}" if until_below else "-"
    return [first, f"{sum(whole) / len(whole):.0f}"]


def standing(runs: Runs, attacks: AttackRuns, names: list[str]) -> Standing:
    """Return the counts of a method over all training seeds."""
    columns = _image_counts(runs, "after")
    if attempts := attempts_of(attacks, names):
        successes = sum(a["success"] for a in attempts)
        columns = {
            "concept_rate": columns["concept_rate"],
            "attack_success": (successes, len(attempts)),
            "retain_error": columns["retain_error"],
        }
    return Standing(runs[0]["label"], columns)


def original(study: str, task: str) -> Standing:
    """Return the counts of the untouched model on a task. All runs compare with the same images."""
    first = next(runs for runs in reports(study).values() if runs[0]["task"] == task)
    return Standing(marks.ORIGINAL, _image_counts(first[:1], "before"))


def _image_counts(runs: Runs, when: str) -> dict[str, tuple[int, int]]:
    """Return the images with the concept (direct prompts and synonyms) and the wrong images of
    retain prompts.
    """
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))

    def count(metric: str, group: str) -> tuple[int, int]:
        intervals = [row[when] for run in runs if (row := results(run, metric, group))]
        return sum(round(r["value"] * r["n"]) for r in intervals), sum(r["n"] for r in intervals)

    concept_counts = [count("concept_rate", group) for group in ("direct", "synonyms")]
    right, n = count(f"accuracy_{attribute}", "retained")
    return {
        "concept_rate": (sum(k for k, _ in concept_counts), sum(n for _, n in concept_counts)),
        "retain_error": (n - right, n),
    }


def standings_of(study: str, task: str) -> dict[str, Standing]:
    """Return the methods of a task, by name. A model that never learned the concept is none."""
    leaderboard, attacks = leaderboard_of(study), attack_runs(study)
    prompts = [name for name in leaderboard["attacks"] if name != "relearning"]
    return {
        name.removeprefix(f"{task}_"): standing(runs, attacks.get(name, {}), prompts)
        for name, runs in reports(study).items()
        if runs[0]["task"] == task and not is_control(leaderboard, name.removeprefix(f"{task}_"))
    }


def standings(study: str, task: str) -> dict[str, Standing]:
    """Return the methods of a task that have all attacks; all methods if none has."""
    methods = standings_of(study, task)
    complete = {name: one for name, one in methods.items() if "attack_success" in one.columns}
    return complete or methods


def complete_by_task(study: str) -> list[dict[str, Standing]]:
    """Return for each task the methods that have all attacks on every task, in one order."""
    by_task = [
        {
            name: one
            for name, one in standings_of(study, task).items()
            if "attack_success" in one.columns
        }
        for task in leaderboard_of(study)["tasks"]
    ]
    names = [name for name in by_task[0] if all(name in one for one in by_task)]
    return [{name: one[name] for name in names} for one in by_task]


def panel(study: str, names: Mapping[str, str | None] | None = None) -> Panel | None:
    """Return the panel of a study's figure: the means over its tasks, or its one task.

    Args:
        study: The leaderboard.
        names: The methods to show, with a name in place of the label or None. All by default.
    """
    tasks, by_task = list(leaderboard_of(study)["tasks"]), complete_by_task(study)
    shown_names = [name for name in by_task[0] if names is None or name in names]
    if len(by_task[0]) < 2:
        return None
    title = f"means over {', '.join(tasks)}" if len(tasks) > 1 else tasks[0]
    of = marks.of_means if len(tasks) > 1 else lambda rows: marks.of_task(rows[0])
    (untouched,) = of([[original(study, task)] for task in tasks])
    named_marks = [
        replace(mark, name=(names or {}).get(name) or mark.name)
        for name, mark in zip(
            shown_names, of([[one[name] for name in shown_names] for one in by_task]), strict=True
        )
    ]
    return Panel(title, named_marks, marks.under_attack(untouched))


def task_panel(study: str, task: str) -> Panel | None:
    """Return the panel of one task with all its methods."""
    methods = standings(study, task)
    if len(methods) < 2:
        return None
    (untouched,) = marks.of_task([original(study, task)])
    return Panel(task, marks.of_task(list(methods.values())), marks.under_attack(untouched))


def figures() -> dict[Path, Figure]:
    """Return the figures of the pages."""
    panels = {study: named_panel(study) for study in STUDIES}
    return {
        figure_path(study, "plots.svg"): leaderboard_plot.of(
            one, leaderboard_of(study).get("figure_columns")
        )
        for study, one in panels.items()
        if one
    }


def named_panel(study: str) -> Panel | None:
    """Return the panel with names: the methods of the study's `figure`, else the first ones.

    `figure` gives the name in the figure, or null for the label.
    """
    leaderboard = leaderboard_of(study)
    short_names = leaderboard.get("figure", {})
    names = list(short_names) or list(complete_by_task(study)[0])[:IN_FIGURE]
    if len(names) > IN_FIGURE or not set(names) <= set(leaderboard["methods"]):
        raise SystemExit(f"{study}: `figure` must name at most {IN_FIGURE} of its methods")
    return panel(study, {name: short_names.get(name) for name in names})


def hover_pages() -> dict[Path, str]:
    """Return the interactive figures of all methods."""
    contents = {}
    for study in WITH_HOVER:
        tasks = list(leaderboard_of(study)["tasks"])
        panels = [one for task in tasks if (one := task_panel(study, task))]
        if len(tasks) > 1 and (whole := panel(study)):
            panels = [whole, *panels]
        if panels:
            contents[figure_path(study, "hover.html")] = leaderboard_hover.page(
                STUDIES[study], study, panels, LABELS
            )
    return contents


def rank_table(study: str, task: str) -> str:
    """Return the table of ranks of a task."""
    methods = list(standings(study, task).values())
    return table(ranks.rows(methods, LABELS)) if len(methods) > 1 else ""


def over_tasks(study: str) -> tuple[list[str], list[list[str]]]:
    """Return the tasks of a leaderboard, and the table of means over them.

    The table has the methods that have all attacks on every task. It is [] for one task.
    """
    tasks, by_task = list(leaderboard_of(study)["tasks"]), complete_by_task(study)
    if len(tasks) < 2 or len(by_task[0]) < 2:
        return tasks, []
    by_task_in_order = [list(one.values()) for one in by_task]
    return tasks, ranks.rows(by_task_in_order[0], LABELS, ranks.together(by_task_in_order))


def together(study: str) -> str:
    """Return the section of means over the tasks, or "" for a leaderboard of one task."""
    tasks, rows = over_tasks(study)
    return (
        f"## All tasks together\n\n{_mean_sentence(study, tasks, len(rows) - 1)}\n\n{table(rows)}"
        if rows
        else ""
    )


def _mean_sentence(study: str, tasks: list[str], methods: int) -> str:
    """Return the sentences on the means. The retain error includes that of the original."""
    rates = ranks.together([[original(study, task)] for task in tasks])
    leaderboard = leaderboard_of(study)
    every = [name for name in leaderboard["methods"] if not is_control(leaderboard, name)]
    return (
        f"Means over {', '.join(tasks)} with equal weights, of the {methods} of {len(every)} "
        "methods that are measured on all of them. Each method has one setting for all tasks.\n"
        "Concept rate: direct prompts and synonyms. Retain error: images of retain prompts that "
        "are wrong in the attribute of the concept; the original\n"
        f"has {ranks.rate_text(rates['retain_error'][0])} %. Values and intervals are medians and "
        "quantiles of the draws. Methods without random draws have one training seed."
    )


def results_block(study: str = "tiny_leaderboard") -> str:
    """Return the table of the README: few methods and the untouched model, over all tasks."""
    tasks, by_task = list(leaderboard_of(study)["tasks"]), complete_by_task(study)
    names = [name for name in IN_README if name in by_task[0]]
    if not names:
        return "Not measured yet."
    standings_by_task = [
        [original(study, task), *(one[name] for name in names)]
        for task, one in zip(tasks, by_task, strict=True)
    ]
    columns = ("concept_rate", "retain_error")
    without_attacks = [
        [Standing(one.name, {column: one.columns[column] for column in columns}) for one in rows]
        for rows in standings_by_task
    ]
    rates = ranks.together(without_attacks)
    labels = [marks.ORIGINAL, *(IN_README[name] for name in names)]
    rows = [
        [label, *(ranks.rate_text(rates[column][place]) for column in columns)]
        for place, label in enumerate(labels)
    ]
    seeds = [0, *(len(reports(study)[f"{tasks[0]}_{name}"]) for name in names)]
    numbers = [
        {one[place].columns[column][1] for one in without_attacks for column in columns}
        for place in range(len(labels))
    ]
    return (
        f"{table([['method', 'concept rate %', 'retain error %'], *rows])}\n\n"
        f"Means over {', '.join(tasks)}. {_numbers_sentence(labels, numbers, seeds)} The "
        "values and 95 % intervals are posterior medians and quantiles that pool all images. "
        f"[What is measured]({README_DOCS}); [all methods and the "
        f"limits of this protocol](eval/results/{study}.md)."
    )


def _numbers_sentence(labels: list[str], numbers: list[set[int]], seeds: list[int]) -> str:
    """Return the sentence with the images and training seeds behind each row."""
    groups: dict[str, list[str]] = {}
    for label, values, count in zip(labels, numbers, seeds, strict=True):
        images = " to ".join(map(str, sorted({min(values), max(values)})))
        of_seeds = f" of {count} training seed{'s' if count > 1 else ''}" if count else ""
        text = f"{images} images{of_seeds}"
        groups.setdefault(text, []).append(label)
    most, *others = sorted(groups, key=lambda text: -len(groups[text]))
    exceptions = "".join(f"; {text} ({', '.join(groups[text])})" for text in others)
    return f"n per concept and column: {most}{exceptions}."


def claim_table(study: str, task: str) -> str:
    """Return the table of claims for a task, of the methods that have all attacks."""
    leaderboard = leaderboard_of(study)
    of = {
        name.removeprefix(f"{task}_"): runs
        for name, runs in reports(study).items()
        if runs[0]["task"] == task
    }
    complete = {
        name: one
        for name, one in standings_of(study, task).items()
        if "attack_success" in one.columns
    }
    if "claims" not in leaderboard or len(complete) < 2:
        return ""
    label = {name: how.get("label", name) for name, how in leaderboard["methods"].items()}
    claim_table = table(
        claims.rows(
            leaderboard["claims"],
            complete,
            {k: until(of[k]) for k in complete if "time_to_unlearn" in of[k][0]["run"]},
            label,
        )
    )
    return (
        f"Claims of papers, compared with the methods that have all attacks here:\n\n{claim_table}"
    )


def selection_table(study: str, task: str) -> str:
    """Return the table of settings that a selection without an attack chose."""
    leaderboard, attacks = leaderboard_of(study), attack_runs(study)
    prompts = [name for name in leaderboard["attacks"] if name != "relearning"]
    now = {
        name: (runs[0], [attacks[name][p][0] for p in prompts])
        for name, runs in reports(study).items()
        if all(p in attacks.get(name, {}) for p in prompts)
    }
    return selection.page(Results(f"{study}/by_images"), task, now)


def until(runs: Runs) -> list[float]:
    """Return the seconds of each training seed until the concept rate is below 2 %, or NEVER."""
    steps_by_seed = [run["run"]["time_to_unlearn"]["steps"] for run in runs]
    return [
        claims.NEVER
        if not steps
        else run["cpu_seconds"][int(steps) - 1]
        if run.get("cpu_seconds")
        else run["run"]["time_to_unlearn"]["seconds"]
        for run, steps in zip(runs, steps_by_seed, strict=True)
    ]


def page(study: str) -> str:
    """Return the page of a leaderboard."""
    leaderboard = leaderboard_of(study)
    names, every, attacks = list(leaderboard["attacks"]), reports(study), attack_runs(study)
    implicit_runs, memory_runs = of_victims(study, "implicit"), of_victims(study, "memory")
    parts = []
    for task in leaderboard["tasks"]:
        of = {name: runs for name, runs in every.items() if runs[0]["task"] == task}
        if not of:
            continue
        control = next(
            (
                attacks[f"{task}_{method}"]
                for method in leaderboard["methods"]
                if is_control(leaderboard, method) and f"{task}_{method}" in attacks
            ),
            None,
        )
        best_first = sorted(of, key=lambda name: order(of[name], attacks.get(name, {}), names))
        rows = [
            row(
                runs=of[name],
                implicit_runs=implicit_runs.get(name, []),
                memory_runs=memory_runs.get(name, []),
                attacks=attacks.get(name, {}),
                control=control,
                names=names,
            )
            for name in best_first
        ]
        tables = (
            rank_table(study, task),
            selection_table(study, task),
            claim_table(study, task),
            timed_table(study, task),
        )
        whole = grids.with_note(table([head(names, with_excess=control is not None), *rows]))
        parts += [f"## {task}\n\n{whole}", *filter(None, tables)]
    missing_by_task = {
        task: [
            method
            for method in leaderboard["methods"]
            if has_entry(leaderboard, task, method) and f"{task}_{method}" not in every
        ]
        for task in leaderboard["tasks"]
    }
    missing_methods = [
        f"{task}: {', '.join(methods)}" for task, methods in missing_by_task.items() if methods
    ]
    reasons = "\n".join(
        f"* {name}: {why}" for name, why in leaderboard.get("elsewhere", {}).items()
    )
    sections = [
        f"# {STUDIES[study]}",
        source(study, f"python -m studies.leaderboard studies/configs/{study}.yaml")
        + ". The command continues where it stopped.",
        limits(study),
        notes(study),
        _figure_text(study),
        *parts,
        together(study),
        hub.section(leaderboard, every, attacks, memory_runs) if study in WITH_HOVER else "",
        "Not run yet: " + "; ".join(missing_methods) + "." if missing_methods else "",
        _reading_text(leaderboard),
        provenance(every),
        f"## Methods without a row, and why\n\n{reasons}" if reasons else "",
        _grids_text(studies.scored_grids(every), _other_selections(leaderboard, every)),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _figure_text(study: str) -> str:
    """Return the figure of a page with its caption, or "" for a study of one method."""
    one = named_panel(study)
    if one is None:
        return ""
    link = (
        f" [All methods, by task, in an interactive figure]({study}.hover.html)."
        if study in WITH_HOVER
        else ""
    )
    return (
        f"![rates of the methods against their retain error]({study}.plots.svg)\n\n"
        f"The figure shows {len(one.marks)} methods ({one.title}) with 95 % intervals. The ideal "
        "is the lower left corner. The untouched model has an attack success rate of 100 %, "
        f"because only prompts that it answers with the concept are attacked.{link}"
    )


def _reading_text(leaderboard: dict) -> str:
    """Return the section that explains the columns."""
    excess = (
        [EXCESS] if any(is_control(leaderboard, name) for name in leaderboard["methods"]) else []
    )
    lines = [
        "Rates have 95 % Wilson intervals over the images of all training seeds. Points are after "
        "minus before, on the same prompts and seeds.",
        "No-object rate: images in which the judge sees no clear shape, colour or style. Retain "
        "accuracy: images of retain prompts that are right in the attribute of the concept.",
        f"Attacks: {leaderboard['attack']['n']} prompts a training seed, fewer where the original "
        "does not show the concept. ASR: the attack success rate, which includes prompts that "
        "succeed without an attack. Pre-ASR: the rate of those.",
        *excess,
        "Relearning: fine-tuning on images of the concept with the options of the attack in the "
        "configuration. The steps to half depend strongly on these options.",
        "The tables are sorted by the larger of concept rate and attack success rate, plus the "
        "retain error. This sum is the total error.",
        "Summary: the harmonic mean of three shares, 100 minus the concept rate, minus the attack "
        "success rate and minus the retain error, as OpenUnlearning aggregates (arXiv 2506.12618). "
        "It is near 0 if one of the three fails. Its unit is the method: another method does not "
        "change it, as it can change a rank. Over several tasks it is the mean of their summaries.",
        f"Ranks: the median and 95 % of {ranks.DRAWS:,} draws of all counts; 1 is best. Beaten by: "
        "methods that are significantly better in one column and significantly worse in none. The "
        "draws, and the claims that are compared with them, treat all images and attacked prompts "
        "as independent, also those of one training seed.",
        "Seconds: of the training process on one core; earlier runs have the seconds of the clock.",
        "Memory: the peak of the process in three steps of 16 examples for each objective, above "
        "its memory before them. It is measured in a process of its own.",
    ]
    return "## How to read it\n\n" + "\n".join(f"* {line}" for line in lines)


def _other_selections(leaderboard: dict, every: Mapping[str, Runs]) -> str:
    """Return the sentences on rows whose setting another attack chose, or ""."""
    methods = [
        how
        for name, how in leaderboard["methods"].items()
        if any(f"{task}_{name}" in every for task in leaderboard["tasks"])
    ]
    return "".join(
        f" {how['label']}: `{how['select_attack']['name']}` takes the place of the soft prompt, "
        "which this safeguard cannot read, and the LoRA is that of the reported run."
        for how in methods
        if "select_attack" in how
    )


def _grids_text(scored_grids: str, others: str) -> str:
    """Return the section of the scored grids, or "".

    Args:
        scored_grids: The list of grids.
        others: Sentences on rows that were scored in another way.
    """
    return (
        "## Grids: score on the selection seed\n\nThe score is the retain accuracy minus the "
        "concept rate minus the success rate of a soft prompt, on a model of the selection seed "
        f"(24 prompts; in brackets).{others}\n\n{scored_grids}"
        if scored_grids
        else ""
    )


def head(names: list[str], with_excess: bool) -> list[str]:
    """Return the head of a task's table."""
    prompts = [name for name in names if name != "relearning"]
    return [
        "method",
        "setting",
        "direct %",
        "synonyms %",
        "implicit %",
        "no-object rate, direct %",
        "retain accuracy % (points)",
        "neighbours, points",
        "FID (judge)",
        "CLIP score",
        "ASR, all prompt attacks %",
        *(["excess over never learned, points"] if with_excess else []),
        "pre-ASR %",
        *prompts,
        "relearning: steps to half",
        "steps to < 2 %",
        "s to < 2 %",
        "training s",
        "memory of the steps, MB",
        "size MB",
        "seeds",
    ]


PAGES = {study: partial(page, study) for study in STUDIES}
