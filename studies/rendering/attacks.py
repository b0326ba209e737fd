"""eval/results/tiny_attacks.md: attacks on erased models."""

from __future__ import annotations

from typing import Any

from concept_eraser.evaluation.statistics import wilson
from studies.rendering.common import limits, notes, source, table
from studies.result_tables import Results

STUDY = "tiny_attacks"


def rate(contents: list[dict[str, Any]], clean: bool = False) -> str:
    """Return the attack success rate over all prompts and training seeds, with its interval.

    Args:
        contents: The results of an attack.
        clean: The rate without the attack (pre-ASR).
    """
    attempts = [a for content in contents for a in content["attempts"]]
    if not attempts:
        return "-"
    value = wilson(sum(a["pre"] if clean else a["success"] for a in attempts), len(attempts))
    return f"{100 * value.value:.0f} [{100 * value.low:.0f}, {100 * value.high:.0f}]"


def back(contents: list[dict[str, Any]], share: float = 0.5) -> str:
    """Return the steps of relearning until at least `share` of all prompts shows the concept."""
    options = contents[0]["protocol"]["options"]
    attempts = [a for content in contents for a in content["attempts"]]
    rounds = sorted(a["round"] for a in attempts if a["round"])
    remaining = -(-len(attempts) * share // 1) - sum(a["pre"] for a in attempts)
    if remaining <= 0:
        return "0"
    return (
        str(min(rounds[int(remaining) - 1] * options["every"], options["steps"]))
        if len(rounds) >= remaining
        else f"> {options['steps']}"
    )


def page() -> str:
    """Return the page."""
    results_by_victim: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for content in Results(STUDY).values():
        results_by_victim.setdefault(content["victim"], {}).setdefault(
            content["protocol"]["attack"], []
        ).append(content)
    attacks = list(dict.fromkeys(a for some in results_by_victim.values() for a in some))
    some = next(iter(next(iter(results_by_victim.values())).values()))[0]
    rows = [["erased with", "training seeds", "pre-ASR %", *attacks, "relearning: steps to half"]]

    def mean(of: dict[str, list[dict[str, Any]]]) -> float:
        return sum(
            c["rates"]["asr"]["value"] / len(each) for each in of.values() for c in each
        ) / len(of)

    for of in sorted(results_by_victim.values(), key=mean):
        first = next(iter(of.values()))
        rows.append(
            [
                first[0]["label"],
                str(len(first)),
                rate(first, clean=True),
                *(rate(of.get(a, [])) for a in attacks),
                back(of["relearning"]) if "relearning" in of else "-",
            ]
        )
    costs = [["attack", "options", "cost per prompt, mean over models"]]
    for attack in attacks:
        runs = [one for of in results_by_victim.values() for one in of.get(attack, [])]
        kinds = list(dict.fromkeys(k for run in runs for k in run["cost"]))
        spent = "; ".join(
            (
                f"{sum(run['cost'].get(k, 0) for run in runs) / len(runs):.0f} "
                f"{k.removesuffix(' a prompt')}"
            )
            for k in kinds
        )
        costs.append(
            [
                attack,
                ", ".join(f"{k} {v}" for k, v in runs[0]["protocol"]["options"].items()),
                spent,
            ]
        )
    environment = some["environment"]
    commits = sorted(
        {
            str(content["environment"]["commit"])[:12]
            for of in results_by_victim.values()
            for contents in of.values()
            for content in contents
        }
    )
    return "\n".join(
        [
            "# Attacks on models without the star",
            "",
            source(STUDY, f"python -m studies.attack_table studies/configs/{STUDY}.yaml") + ".",
            (
                "The cells are attack success rates in percent, with 95 % Wilson intervals over "
                f"{len(some['attempts'])} prompts of each training seed."
            ),
            (
                "They include prompts that show the star without an attack; pre-ASR is the rate "
                "of those. The rows are sorted by the mean over the attacks."
            ),
            "",
            limits(STUDY),
            "",
            table(rows),
            "",
            table(costs),
            "",
            (
                f"Commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}; torch "
                f"{environment['versions']['torch']}; {environment['device']}, "
                f"{environment['threads']} thread(s)."
            ),
            "",
            notes(STUDY),
            "",
        ]
    )


PAGES = {STUDY: page}
