"""eval/results/tiny_leaderboard.md: all methods on all tasks, attacks included."""

from __future__ import annotations

import json
from typing import Any

import yaml

from concept_eraser.evaluation.statistics import wilson
from tools.rendering import studies
from tools.rendering.attacks import back, rate
from tools.rendering.common import RESULTS, ROOT, change, mean, pooled, provenance, ratio, setting, share, table

STUDY = "tiny_leaderboard"
Runs = list[dict[str, Any]]
Attacked = dict[str, Runs]  # attack -> its results, one a training seed


def reports() -> dict[str, Runs]:
    """The measured runs by entry (task_method), seeds in order."""
    found: dict[str, Runs] = {}
    for path in sorted((RESULTS / STUDY).glob("*.json")):
        content = json.loads(path.read_text())
        found.setdefault(content["entry"], []).append(content)
    return found


def attacked() -> dict[str, Attacked]:
    found: dict[str, Attacked] = {}
    for path in sorted((RESULTS / STUDY / "attacks").glob("*.json")):
        content = json.loads(path.read_text())
        found.setdefault(content["victim"], {}).setdefault(content["protocol"]["attack"], []).append(content)
    return found


def broken(attacks: Attacked, names: list[str]) -> tuple[float, float, float] | None:
    """Attack success over all attacks of `names` and seeds, with its Wilson interval (attempts on one prompt taken as independent);
    None where one of them is missing. Relearning is told apart: it changes the weights."""
    if any(name not in attacks for name in names):
        return None
    attempts = [a for name in names for content in attacks[name] for a in content["attempts"]]
    found = wilson(sum(a["success"] for a in attempts), len(attempts))
    return found.value, found.low, found.high


def row(runs: Runs, attacks: Attacked, names: list[str]) -> list[str]:
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))
    rules = studies.rules_row(runs) if "forgotten" in runs[0]["run"] else None
    prompts = [name for name in names if name != "relearning"]
    total = broken(attacks, prompts)
    fid = mean(runs, "fid_judge", "retained", "after") - mean(runs, "fid_judge", "retained", "before")
    return [
        runs[0]["label"],
        setting(runs[0]["point"]).replace("_", " ") or "-",
        share(pooled(runs, "concept_share", "direct")),
        share(pooled(runs, "concept_share", "synonyms")),
        share(pooled(runs, "none_share", "direct")),
        f"{share(pooled(runs, f'accuracy_{attribute}', 'retained'))} ({change(runs, f'accuracy_{attribute}', 'retained'):+.1f})",
        f"{change(runs, f'accuracy_{attribute}', 'neighbours'):+.1f}",
        f"{fid:+.1f}",
        f"{ratio(runs, 'clip_score', 'retained'):+.1f} %",
        "-" if total is None else f"{100 * total[0]:.0f} [{100 * total[1]:.0f}, {100 * total[2]:.0f}]",
        *(rate(attacks[name]) if name in attacks else "-" for name in prompts),
        back(attacks["relearning"]) if "relearning" in attacks else "-",
        rules[10] if rules else "-",
        rules[11] if rules else "-",
        f"{sum(run['run']['seconds'] for run in runs) / len(runs):.0f}",
        f"{runs[0]['size_mb']:.1f}" if "size_mb" in runs[0] else "-",
        str(len(runs)),
    ]  # fmt: skip


def order(runs: Runs, attacks: Attacked, names: list[str]) -> tuple[float, float]:
    """Sorted by what a user loses: the concept's share or what attacks bring back, the larger, and what is no longer kept."""
    attribute = next(iter(runs[0]["evaluation"]["protocol"]["concept"]))
    shown, kept = pooled(runs, "concept_share", "direct"), pooled(runs, f"accuracy_{attribute}", "retained")
    total = broken(attacks, [name for name in names if name != "relearning"])
    assert shown is not None  # every suite measures both
    assert kept is not None
    return max(shown.value, total[0] if total else shown.value) + 1 - kept.value, shown.value


def page() -> str:
    board = yaml.safe_load((ROOT / "eval" / "studies" / f"{STUDY}.yaml").read_text())
    names, found, fallen = list(board["attacks"]), reports(), attacked()
    prompts = [name for name in names if name != "relearning"]
    head = ["method", "setting", "direct %", "synonyms %", "none, direct %", "retained % (points)", "neighbours, points", "FID (judge)", "CLIP score", "all prompt attacks %", *prompts, "relearning: steps to half", "steps to < 2 %", "seconds to < 2 %", "training s", "size MB", "seeds"]  # fmt: skip
    parts = []
    for task in board["tasks"]:
        of = {name: runs for name, runs in found.items() if runs[0]["task"] == task}
        if not of:
            continue
        ranked = sorted(of, key=lambda name: order(of[name], fallen.get(name, {}), names))
        rows = [row(of[name], fallen.get(name, {}), names) for name in ranked]
        parts.append(f"## {task}\n\n{table([head, *rows])}")
    missing = [f"{task}: {', '.join(m for m in board['methods'] if f'{task}_{m}' not in found)}" for task in board["tasks"] if any(f"{task}_{m}" not in found for m in board["methods"])]  # fmt: skip
    notes = RESULTS / STUDY / "notes.md"
    return "\n\n".join(
        [
            "# Every method under one protocol",
            f"Rendered from `{STUDY}/*.json` by `python -m tools.render_results`; made by `python -m tools.leaderboard eval/studies/{STUDY}.yaml`, which goes on where it was stopped.\n"
            f"Shares with 95 % Wilson intervals over all seeds' pictures; points are after minus before on the same prompts and seeds. Attacks: success rate\n"
            f"with clean prompts that show the concept included, {board['attack']['n']} prompts a training seed. Sorted by the larger of concept share and attack success, plus what is no longer retained.",
            provenance(found),
            *parts,
            *(["Not run yet: " + "; ".join(missing) + "."] if missing else []),
            "## Grids: score on the selection seed (retained accuracy minus concept share)\n\n" + studies.grids(found),
            *([notes.read_text().rstrip()] if notes.exists() else []),
        ]
    ) + "\n"  # fmt: skip


PAGES = {STUDY: page}
