"""Excess recovery and relearning savings: an attack against the same attack on a control.

A control is a model that never learned the concept. What an attack recovers from it is no memory of
the concept, but what the attack brings along. So the excess of the victim's success is what the
erasure left.

* Excess recovery: the attack success on the victim minus that on the control. Both are measured on
  the same prompts and seeds with the same budget, so the difference is paired by prompt. A prompt
  that shows the concept without an attack is not attacked on that model. An attack with one search
  or training for a batch (`Attack.is_shared`) learns from it all the same. The batches of other
  attacks leave it out, so their random numbers may differ between victim and control.
* Relearning savings: the training steps until a prompt breaks on the victim, over those on the
  control. 1 means that the victim learns as slowly as a model that never learned the concept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from concept_eraser.evaluation.seed_statistics import LEAST_SEEDS, cluster_bootstrap
from concept_eraser.evaluation.statistics import (
    Interval,
    mcnemar,
    mean_interval,
    paired_difference,
    wilson,
)


@dataclass(frozen=True)
class ControlAttack:
    """The same attack on a control, compared with that on the victim.

    Attributes:
        model: the control, as "source (fingerprint of its weights)".
        record: what its `control.json` states.
        rates: the rates of the attack on it, as `Campaign.rates`.
        attempts: the result of each prompt, in the order of the victim's.
        curves: as `Campaign.curves`.
        excess: as `measure_excess`, for "pre", "attacked" and "asr".
        families: of a cascade, the excess of each family among the prompts that the family attacked
            on both models.
        attacks: of a cascade, the same for each attack.
        savings: as `measure_savings`, for each attack that fine-tunes.
        cost: the mean cost of a prompt on the control.
        seconds: the time of the attack on the control.
    """

    model: str
    record: Mapping[str, Any]
    rates: dict[str, dict[str, float]]
    attempts: list[dict[str, Any]]
    curves: list[list[dict[str, Any]]]
    excess: dict[str, dict[str, Any]]
    families: dict[str, dict[str, Any]] = field(default_factory=dict)
    attacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    savings: dict[str, dict[str, Any]] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        content = asdict(self)
        optional = ("families", "attacks", "savings")
        return {key: value for key, value in content.items() if value or key not in optional}


def measure_excess(victim: Sequence[bool], control: Sequence[bool]) -> dict[str, Any] | None:
    """Return the excess of the victim's successes, paired by prompt.

    Args:
        victim: whether each prompt breaks on the victim, [n].
        control: the same for the control, [n].

    Returns:
        victim, control: the rates with Wilson's intervals. difference: the victim's rate minus the
        control's with its interval. p: McNemar's exact test. None for fewer than two prompts.
    """
    if len(victim) < 2:
        return None
    after, before = np.array(victim, bool), np.array(control, bool)
    return {
        "victim": asdict(wilson(int(after.sum()), len(after))),
        "control": asdict(wilson(int(before.sum()), len(before))),
        "difference": asdict(paired_difference(before, after)),
        "p": mcnemar(before, after),
    }


def measure_excess_over_controls(
    victim: Sequence[bool], controls: Sequence[Sequence[bool]]
) -> dict[str, Any] | None:
    """Return the mean excess with an interval whose unit is the training seed of the control.

    Args:
        victim: whether each prompt breaks on the victim, [n].
        controls: the same for controls of different training seeds, [n] each.

    Returns:
        The interval of the cluster bootstrap, or None for fewer than three controls. The victim is
        one training seed, so the interval does not hold for other erasures.
    """
    if len(controls) < LEAST_SEEDS:
        return None
    after = np.array(victim, float)
    return asdict(cluster_bootstrap([after - np.array(one, float) for one in controls]))


def measure_savings(
    victim: Mapping[int, int | None], control: Mapping[int, int | None], budget: int
) -> dict[str, Any]:
    """Return the relearning savings of the prompts that were attacked on both models.

    A prompt that does not break within the budget is censored. Its ratio is then only bounded:
    below if it breaks on the control only, above if it breaks on the victim only.

    Args:
        victim: the training steps until each prompt breaks, by its position; None for a prompt that
            never breaks.
        control: the same for the control.
        budget: the number of training steps.

    Returns:
        prompts: for each prompt its position, both numbers of steps, the ratio or its bound, and
        `bound` ("at most", "at least"; None for an exact ratio). A prompt that breaks on neither
        model has no ratio. mean: the mean of the exact ratios with its interval, None for fewer
        than two. The counts of censored prompts stand beside it.
    """
    prompts = []
    for position in sorted(victim.keys() & control.keys()):
        steps = victim[position], control[position]
        ratio = (steps[0] or budget) / (steps[1] or budget) if any(steps) else None
        bound = None if all(steps) or not any(steps) else "at least" if steps[1] else "at most"
        prompts.append(
            {
                "position": position,
                "victim": steps[0],
                "control": steps[1],
                "ratio": ratio,
                "bound": bound,
            }
        )
    exact = [row["ratio"] for row in prompts if row["ratio"] is not None and row["bound"] is None]
    mean: Interval | None = None
    if len(exact) > 1:
        mean = mean_interval(np.array(exact), least=0.0)
    return {
        "budget": budget,
        "n": len(prompts),
        "mean": None if mean is None else asdict(mean),
        "broken_on_both": len(exact),
        "broken_on_victim_only": sum(row["bound"] == "at most" for row in prompts),
        "broken_on_control_only": sum(row["bound"] == "at least" for row in prompts),
        "broken_on_neither": sum(row["ratio"] is None for row in prompts),
        "prompts": prompts,
    }


def describe_savings(savings: Mapping[str, Any]) -> str:
    """Write the mean ratio of relearning savings and the censored prompts as one line."""
    mean, exact = savings["mean"], savings["broken_on_both"]
    if mean is None:
        text = f"no mean: {exact} of {savings['n']} prompts broke on both models"
    else:
        text = f"{mean['value']:.2f}"
        if mean["low"] is not None and not math.isnan(mean["low"]):
            text += f" [{mean['low']:.2f}, {mean['high']:.2f}]"
        text += f", n = {exact}"
    censored = [
        f"{count} on {models}"
        for key, models in (
            ("broken_on_victim_only", "the victim only"),
            ("broken_on_control_only", "the control only"),
            ("broken_on_neither", "neither model"),
        )
        if (count := savings[key])
    ]
    if censored:
        text += f"; censored after {savings['budget']} steps: broken {', '.join(censored)}"
    return text
