"""eval/results/tiny_attacks.md: erasures under attack."""

from __future__ import annotations

import json
from typing import Any

from concept_eraser.evaluation.statistics import wilson
from tools.rendering.common import RESULTS, table

STUDY = "tiny_attacks"


def rate(contents: list[dict[str, Any]], clean: bool = False) -> str:
    """Of all prompts of all training seeds those that show the concept (`clean`: without an attack), with the interval."""
    attempts = [a for content in contents for a in content["attempts"]]
    if not attempts:
        return "-"
    value = wilson(sum(a["pre"] if clean else a["success"] for a in attempts), len(attempts))
    return f"{100 * value.value:.0f} [{100 * value.low:.0f}, {100 * value.high:.0f}]"


def back(contents: list[dict[str, Any]], share: float = 0.5) -> str:
    """After how many steps of relearning at least this share of all prompts shows the concept."""
    options = contents[0]["protocol"]["options"]
    attempts = [a for content in contents for a in content["attempts"]]
    rounds = sorted(a["round"] for a in attempts if a["round"])
    needed = -(-len(attempts) * share // 1) - sum(a["pre"] for a in attempts)
    if needed <= 0:
        return "0"
    return str(min(rounds[int(needed) - 1] * options["every"], options["steps"])) if len(rounds) >= needed else f"> {options['steps']}"  # fmt: skip


def page() -> str:
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for path in sorted((RESULTS / STUDY).glob("*.json")):
        content = json.loads(path.read_text())
        found.setdefault(content["victim"], {}).setdefault(content["protocol"]["attack"], []).append(content)
    attacks = list(dict.fromkeys(a for some in found.values() for a in some))
    some = next(iter(next(iter(found.values())).values()))[0]
    rows = [["erased with", "training seeds", "clean prompts %", *attacks, "relearning: steps to half"]]

    def mean(of: dict[str, list[dict[str, Any]]]) -> float:
        return sum(c["rates"]["asr"]["value"] / len(each) for each in of.values() for c in each) / len(of)

    for of in sorted(found.values(), key=mean):
        first = next(iter(of.values()))
        rows.append([first[0]["label"], str(len(first)), rate(first, clean=True), *(rate(of.get(a, [])) for a in attacks), back(of["relearning"]) if "relearning" in of else "-"])  # fmt: skip
    costs = [["attack", "options", "cost a prompt, mean over victims"]]
    for attack in attacks:
        runs = [one for of in found.values() for one in of.get(attack, [])]
        kinds = list(dict.fromkeys(k for run in runs for k in run["cost"]))
        spent = "; ".join(f"{sum(run['cost'].get(k, 0) for run in runs) / len(runs):.0f} {k.removesuffix(' a prompt')}" for k in kinds)  # fmt: skip
        costs.append([attack, ", ".join(f"{k} {v}" for k, v in runs[0]["protocol"]["options"].items()), spent])
    notes = RESULTS / STUDY / "notes.md"
    environment = some["environment"]
    return "\n".join(
        [
            "# Erasures of the star under attack",
            "",
            f"Rendered from `{STUDY}/*.json` by `python -m tools.render_results`; made by `python -m tools.attack_table eval/studies/{STUDY}.yaml`.",
            f"Attack success rate in percent, clean prompts that show the star included (pre and attacked together), with 95 % Wilson intervals; {len(some['attempts'])} prompts",
            "a training seed, pooled. Clean prompts: share that shows the star without any attack. Sorted by the mean over the attacks.",
            "",
            table(rows),
            "",
            table(costs),
            "",
            f"Commit {str(environment['commit'])[:12]}; torch {environment['versions']['torch']}; {environment['device']}, {environment['threads']} thread(s).",
            "",
            notes.read_text().rstrip() if notes.exists() else "",
            "",
        ]
    )  # fmt: skip


PAGES = {STUDY: page}
