"""eval/results/tiny_attacks.md: erasures under attack."""

from __future__ import annotations

import json
from typing import Any

from tools.rendering.common import RESULTS, table

STUDY = "tiny_attacks"


def rate(value: dict[str, Any] | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value['value']:.0f} [{100 * value['low']:.0f}, {100 * value['high']:.0f}]"


def back(content: dict[str, Any], share: float = 0.5) -> str:
    """After how many steps of relearning at least this share of all prompts shows the concept."""
    options, n = content["protocol"]["options"], len(content["attempts"])
    pre = sum(a["pre"] for a in content["attempts"])
    rounds = sorted(a["round"] for a in content["attempts"] if a["round"])
    needed = -(-n * share // 1) - pre
    if needed <= 0:
        return "0"
    return str(min(rounds[int(needed) - 1] * options["every"], options["steps"])) if len(rounds) >= needed else f"> {options['steps']}"  # fmt: skip


def page() -> str:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted((RESULTS / STUDY).glob("*.json")):
        content = json.loads(path.read_text())
        found.setdefault(content["victim"], {})[content["protocol"]["attack"]] = content
    attacks = list(dict.fromkeys(a for some in found.values() for a in some))
    some = next(iter(next(iter(found.values())).values()))
    rows = [["erased with", "clean prompts %", *attacks, "relearning: steps to half"]]
    for contents in sorted(found.values(), key=lambda c: sum(v["rates"]["asr"]["value"] for v in c.values())):
        first = next(iter(contents.values()))
        rows.append([first["label"], rate(first["rates"]["pre"]), *(rate(contents[a]["rates"]["asr"]) if a in contents else "-" for a in attacks), back(contents["relearning"]) if "relearning" in contents else "-"])  # fmt: skip
    costs = [["attack", "options", "cost a prompt, mean over victims"]]
    for attack in attacks:
        runs = [contents[attack] for contents in found.values() if attack in contents]
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
            f"Attack success rate in percent, clean prompts that show the star included (pre and attacked together), with 95 % Wilson intervals; {len(some['attempts'])} prompts,",
            "one training seed each. Clean prompts: share that shows the star without any attack. Sorted by the mean over the attacks.",
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
