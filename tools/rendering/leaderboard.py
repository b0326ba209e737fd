"""eval/results/tiny_leaderboard.md: all methods on all tasks, attacks included."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tools.rendering import choices, claims, ranks, studies
from tools.rendering.attacks import back, rate
from tools.rendering.board import Attacked, Runs, attacked, attempts_of, board_of, of_victims, order, reports
from tools.rendering.common import (  # fmt: skip
    RESULTS,
    change,
    mean,
    pooled,
    provenance,
    ratio,
    results,
    setting,
    share,
    table,
)
from tools.rendering.ranks import Standing
from tools.rendering.seconds import timed

STUDIES = {
    "tiny_leaderboard": "Every method under one protocol",
    "tiny_ablation": "What the default recipe owes to each of its parts",
    "tiny_default": "Which setting for the default recipe? Candidates on seeds and pictures that no row of the board has",
    "tiny_edges": "Would more, or less, than a grid's last rate have served a method better?",
}
LABELS = {"share": "concept share", "attacks": "attack success", "lost": "what is lost"}


def row(runs: Runs, asked: Runs, held: Runs, attacks: Attacked, names: list[str]) -> list[str]:
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))
    rules = studies.rules_row(runs) if "forgotten" in runs[0]["run"] else None
    prompts = [name for name in names if name != "relearning"]
    fid = mean(runs, "fid_judge", "retained", "after") - mean(runs, "fid_judge", "retained", "before")
    return [
        runs[0]["label"],
        setting(runs[0]["point"]).replace("_", " ") or "-",
        share(pooled(runs, "concept_share", "direct")),
        share(pooled(runs, "concept_share", "synonyms")),
        share(pooled(asked, "concept_share", "implicit")) if asked else "-",
        share(pooled(runs, "none_share", "direct")),
        f"{share(pooled(runs, f'accuracy_{attribute}', 'retained'))} ({change(runs, f'accuracy_{attribute}', 'retained'):+.1f})",
        f"{change(runs, f'accuracy_{attribute}', 'neighbours'):+.1f}",
        f"{fid:+.1f}",
        f"{ratio(runs, 'clip_score', 'retained'):+.1f} %",
        rate([{"attempts": attempts_of(attacks, prompts)}]),
        rate([{"attempts": attempts_of(attacks, prompts[:1])}], clean=True),  # every attack has the same prompts
        *(rate(attacks[name]) if name in attacks else "-" for name in prompts),
        back(attacks["relearning"]) if "relearning" in attacks else "-",
        rules[10] if rules else "-",
        *cost(runs),
        f"{held[0]['steps_mb']:.0f}" if held else "-",
        f"{runs[0]['size_mb']:.1f}" if "size_mb" in runs[0] else "-",
        str(len(runs)),
    ]  # fmt: skip


def cost(runs: Runs) -> list[str]:
    """Seconds of the training process, means over the seeds: until less than 2 % show the concept, and in all. Clock time where
    a run tells no other."""
    whole = [run["run"].get("cpu_seconds", run["run"]["seconds"]) for run in runs]
    reached = [run["run"].get("forgotten", {}).get("steps") for run in runs]
    until = [run["cpu_seconds"][int(steps) - 1] for run, steps in zip(runs, reached, strict=True) if steps and run.get("cpu_seconds")]  # fmt: skip
    return [f"{sum(until) / len(until):.0f}" if until else "-", f"{sum(whole) / len(whole):.0f}"]


def standing(runs: Runs, attacks: Attacked, names: list[str]) -> Standing:
    """Counts over all seeds: the concept shown (direct and synonyms), attacks that succeed where all were made, pictures of
    the retained that are not right."""
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))

    def count(metric: str, group: str) -> tuple[int, int]:
        found = [row["after"] for run in runs if (row := results(run, metric, group))]
        return sum(round(r["value"] * r["n"]) for r in found), sum(r["n"] for r in found)

    shown = [count("concept_share", group) for group in ("direct", "synonyms")]
    right, n = count(f"accuracy_{attribute}", "retained")
    columns = {"share": (sum(k for k, _ in shown), sum(n for _, n in shown))}
    if attempts := attempts_of(attacks, names):
        columns["attacks"] = (sum(a["success"] for a in attempts), len(attempts))
    return Standing(runs[0]["label"], {**columns, "lost": (n - right, n)})


def measured(study: str, task: str) -> dict[str, Standing]:
    """The methods of a task, by name."""
    board, fallen = board_of(study), attacked(study)
    prompts = [name for name in board["attacks"] if name != "relearning"]
    return {name.removeprefix(f"{task}_"): standing(runs, fallen.get(name, {}), prompts) for name, runs in reports(study).items() if runs[0]["task"] == task}  # fmt: skip


def standings(study: str, task: str) -> list[Standing]:
    """Of the methods of a task, those under all attacks where some were attacked."""
    found = list(measured(study, task).values())
    complete = [one for one in found if "attacks" in one.columns]
    return complete or found


def plots() -> dict[Path, list[Standing]]:
    """The pictures that the pages show, with what they should show."""
    places = [(study, task) for study in STUDIES if (RESULTS / study).is_dir() for task in board_of(study)["tasks"]]
    return {RESULTS / study / f"plot_{task}.png": found for study, task in places if len(found := standings(study, task)) > 1}  # fmt: skip


def ranked(study: str, task: str) -> str:
    """The picture of a task and its table of ranks."""
    found = standings(study, task)
    if len(found) < 2:
        return ""
    return f"![concept share and attack success against what is lost]({study}/plot_{task}.png)\n\n{table(ranks.rows(found, LABELS))}"


def over_tasks(study: str) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Of the methods that are under all attacks on every task: the tasks, the table of their means over them, and the claims' table;
    without tables for a board of one task."""
    tasks = list(board_of(study)["tasks"])
    known = [{name: one for name, one in measured(study, task).items() if "attacks" in one.columns} for task in tasks]
    names = [name for name in known[0] if all(name in one for one in known)]
    if len(tasks) < 2 or len(names) < 2:
        return tasks, [], []
    found = [[one[name] for name in names] for one in known]
    drawn = ranks.together(found)
    rows = ranks.rows(found[0], LABELS, drawn)
    said = claims.whole(board_of(study).get("claims", []), dict(zip(names, found[0], strict=True)), drawn)
    return tasks, rows, said


def together(study: str) -> str:
    """All tasks as one: who stands where by the means over them; "" for a board of one task."""
    tasks, rows, said = over_tasks(study)
    judged = f"\n\n{table(said)}" if len(said) > 1 else ""
    return f"## All tasks together\n\n{_told(study, tasks, len(rows) - 1)}\n\n{table(rows)}{judged}" if rows else ""


def _told(study: str, tasks: list[str], methods: int) -> str:
    """What the means are of; `what is lost` holds what the original does not show right either."""
    first = [next(runs for runs in reports(study).values() if runs[0]["task"] == task) for task in tasks]
    attributes = [next(iter(runs[0]["evaluation"]["protocol"]["concept"])) for runs in first]
    before = [100 - 100 * mean(runs[:1], f"accuracy_{attribute}", "retained", "before") for runs, attribute in zip(first, attributes, strict=True)]  # fmt: skip
    return (
        f"Means over {', '.join(tasks)}, each weighing the same, of the {methods} of {len(board_of(study)['methods'])} methods that are measured on all of them, at one setting for all.\n"
        f"What is lost: pictures of the rest that do not show what was asked, of which the original itself misses {sum(before) / len(before):.1f} %. Concept share: direct prompts\n"
        "and synonyms. What draws nothing has one training seed, as the tasks' tables tell:"
    )


def together_block(study: str = "tiny_leaderboard") -> str:
    """The same for the README, without the ranks."""
    tasks, rows, _ = over_tasks(study)
    if not rows:
        return "Not measured yet."
    return f"{_told(study, tasks, len(rows) - 1)}\n\n{table([[row[0], *row[1:4], row[-1]] for row in rows])}"


def claimed(study: str, task: str) -> str:
    """What papers say against what the task found; told of the methods that are under all attacks."""
    board = board_of(study)
    of = {name.removeprefix(f"{task}_"): runs for name, runs in reports(study).items() if runs[0]["task"] == task}
    complete = {name: one for name, one in measured(study, task).items() if "attacks" in one.columns}
    if "claims" not in board or len(complete) < 2:
        return ""
    label = {name: how.get("label", name) for name, how in board["methods"].items()}
    told = table(claims.rows(board["claims"], complete, {k: until(of[k]) for k in complete if "forgotten" in of[k][0]["run"]}, label))  # fmt: skip
    return f"What papers say, and what is so here (of the methods under all attacks):\n\n{told}"


def chosen(study: str, task: str) -> str:
    """What selection without an attack would have reported."""
    board, fallen = board_of(study), attacked(study)
    prompts = [name for name in board["attacks"] if name != "relearning"]
    now = {name: (runs[0], [fallen[name][p][0] for p in prompts]) for name, runs in reports(study).items() if all(p in fallen.get(name, {}) for p in prompts)}  # fmt: skip
    return choices.page(RESULTS / study / "by_pictures", task, now)


def until(runs: Runs) -> list[float]:
    """Of each seed, the seconds of its process until less than 2 % show the concept; infinite where they never do."""
    reached = [run["run"]["forgotten"]["steps"] for run in runs]
    return [claims.NEVER if not steps else run["cpu_seconds"][int(steps) - 1] if run.get("cpu_seconds") else run["run"]["forgotten"]["seconds"] for run, steps in zip(runs, reached, strict=True)]  # fmt: skip


def page(study: str) -> str:
    board = board_of(study)
    names, every, fallen = list(board["attacks"]), reports(study), attacked(study)
    asked, held = of_victims(study, "implicit"), of_victims(study, "memory")
    parts = []
    for task in board["tasks"]:
        of = {name: runs for name, runs in every.items() if runs[0]["task"] == task}
        if not of:
            continue
        best_first = sorted(of, key=lambda name: order(of[name], fallen.get(name, {}), names))
        rows = [
            row(of[name], asked.get(name, []), held.get(name, []), fallen.get(name, {}), names) for name in best_first
        ]
        parts += [
            f"## {task}\n\n{table([head(names), *rows])}",
            *(
                found
                for found in (ranked(study, task), chosen(study, task), claimed(study, task), timed(study, task))
                if found
            ),
        ]
    missing = [f"{task}: {', '.join(m for m in board['methods'] if f'{task}_{m}' not in every)}" for task in board["tasks"] if any(f"{task}_{m}" not in every for m in board["methods"])]  # fmt: skip
    reasons = "\n".join(f"* {name}: {why}" for name, why in board.get("elsewhere", {}).items())
    grids, notes = studies.grids(every), RESULTS / study / "notes.md"
    return "\n\n".join(
        [
            f"# {STUDIES[study]}",
            f"Rendered from `{study}/*.json` by `python -m tools.render_results`; made by `python -m tools.leaderboard eval/studies/{study}.yaml`, which goes on where it was stopped.",
            *([notes.read_text().rstrip()] if notes.exists() else []),
            *parts,
            *([whole] if (whole := together(study)) else []),
            *(["Not run yet: " + "; ".join(missing) + "."] if missing else []),
            "## How to read it\n\n"
            f"Shares with 95 % Wilson intervals over all seeds' pictures; points are after minus before on the same prompts and seeds. Attacks: success rate\n"
            f"with clean prompts that show the concept included, {board['attack']['n']} prompts a training seed; before it, in a column of its own: how many of them show it clean. Sorted by the larger of concept share and attack success, plus what is no longer retained.\n"
            f"Ranks: the median with 95 % of what {ranks.DRAWS:,} draws of all counts at once give (1 is best); loss: the larger of concept share and attack success,\n"
            "plus what is lost. Beaten by: methods that are surely better in one column and surely worse in none. Hollow marks: another is at least as\n"
            "good in both. Seconds: of the training process on one core, whatever ran beside it; of earlier runs by the clock.\n"
            "Memory: the process's peak in three steps above what it held before them, in a process of its own. Steps have 16 examples a side.",
            provenance(every),
            *([f"## Methods without a row, and why\n\n{reasons}"] if reasons else []),
            *(["## Grids: score on the selection seed\n\nRetained accuracy minus concept share minus the success of a soft prompt on that seed's model (24 prompts; in brackets).\n\n" + grids] if grids else []),
        ]
    ) + "\n"  # fmt: skip


def head(names: list[str]) -> list[str]:
    prompts = [name for name in names if name != "relearning"]
    return ["method", "setting", "direct %", "synonyms %", "implicit %", "none, direct %", "retained % (points)", "neighbours, points", "FID (judge)", "CLIP score", "all prompt attacks %", "their prompts, clean %", *prompts, "relearning: steps to half", "steps to < 2 %", "s to < 2 %", "training s", "memory of the steps, MB", "size MB", "seeds"]  # fmt: skip


def default_block(study: str = "tiny_leaderboard", task: str = "star", most: int = 8) -> str:
    """The board's best under all attacks, for the README, and how many methods were attacked so far."""
    board, fallen, asked = board_of(study), attacked(study), of_victims(study, "implicit")
    prompts = [name for name in board["attacks"] if name != "relearning"]
    of = {name: runs for name, runs in reports(study).items() if runs[0]["task"] == task and all(a in fallen.get(name, {}) for a in board["attacks"])}  # fmt: skip
    rows = []
    for name in sorted(of, key=lambda name: order(of[name], fallen[name], list(board["attacks"])))[:most]:
        cells = row(of[name], asked.get(name, []), [], fallen[name], list(board["attacks"]))
        found = dict(zip(head(list(board["attacks"])), cells, strict=True))
        rows.append([found[key] for key in ("method", "direct %", "implicit %", "retained % (points)", "all prompt attacks %", "relearning: steps to half", "training s", "seeds")])  # fmt: skip
    told = ["method", "star, direct %", "implicit prompts %", "other shapes % (points)", f"all {len(prompts)} attacks by prompt %", "relearning: steps to half", "training s", "seeds"]  # fmt: skip
    return table([told, *rows]) + f"\n\n{len(of)} of {len(board['methods'])} methods are attacked so far."


PAGES = {study: partial(page, study) for study in STUDIES}
