"""The statistics of attacks on erased models and on models that never learned the concept, of the
studies in `studies/rendering/excess_recovery.py`.

An attack on one model is a row of a study's table, with the result of each prompt. Prompts and
seeds are the same on all models, so differences are paired by prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from concept_eraser.evaluation.seed_statistics import (
    LEAST_SEEDS,
    SeedInterval,
    cluster_bootstrap,
)
from concept_eraser.evaluation.statistics import Interval, mcnemar, paired_difference, wilson
from studies.rendering import second_judge
from studies.rendering.common import results
from studies.result_tables import Content

MARGIN = 0.1  # the largest difference of a success that counts as none, in the tests of equivalence
WITHIN = 0.9  # the confidence of the intervals of these tests


def by_concept(results: Mapping[str, Content]) -> dict[str, list[Content]]:
    """Return the evaluations and attacks of each concept, without the choice of settings and the
    labels of a second judge.
    """
    groups: dict[str, list[Content]] = {}
    for content in results.values():
        if content["kind"] in ("selection", second_judge.KIND):
            continue
        groups.setdefault(content["concept"], []).append(content)
    return groups


def evaluations(contents: Sequence[Content]) -> dict[str, list[Content]]:
    """Return the evaluations of each erasure, one for each training seed."""
    groups: dict[str, list[Content]] = {}
    for content in contents:
        if "evaluation" in content:
            groups.setdefault(content["model"], []).append(content)
    return groups


def campaigns(contents: Sequence[Content], attack: str, model: str | None = None) -> list[Content]:
    """Return the attacks of a name on an erasure, or on the controls without a `model`."""
    return [
        one
        for one in contents
        if one.get("attack") == attack
        and (one["kind"] == "control" if model is None else one["model"] == model)
    ]


def successes(content: Content) -> dict[tuple[str, int], bool]:
    """Return whether each attacked prompt showed the concept in the end, by prompt and seed."""
    return {(a["prompt"], a["seed"]): a["success"] for a in content["campaign"]["attempts"]}


def success_rate(contents: Sequence[Content]) -> Interval:
    """Return the mean attack success rate of models, over the same prompts.

    The unit of the interval is the model where there are three or more, each a training seed.
    Below three, and where no prompt of any model differs, its ends are the means of Wilson's over
    the prompts of each model.
    """
    hits = [np.array(list(successes(one).values()), float) for one in contents]
    if len(hits) >= LEAST_SEEDS:
        interval = cluster_bootstrap(hits)
        if not np.isnan(interval.low):
            return clipped(interval)
    return mean_interval([wilson(int(values.sum()), len(values)) for values in hits])


def mean_interval(intervals: Sequence[Interval]) -> Interval:
    """Return the means of values and ends, of models with the same prompts or images.

    So a prompt counts once. The interval is not shorter than one of 95 % for the mean.
    """
    value, low, high = np.mean([(one.value, one.low, one.high) for one in intervals], axis=0)
    return Interval(float(value), float(low), float(high), intervals[0].n)


def clipped(rate: Interval) -> Interval:
    """Return a rate whose interval does not leave the range from 0 to 1."""
    return Interval(rate.value, max(0.0, rate.low), min(1.0, rate.high), rate.n)


def mean_over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean over training seeds with Student's interval.

    The interval is nan below three seeds, and for equal values.
    """
    from scipy.stats import t

    n = len(values)
    value, half = float(np.mean(values)), float("nan")
    if n >= LEAST_SEEDS and np.ptp(values) > 0:
        half = float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n))
    return Interval(value, value - half, value + half, n)


def image_rate(runs: Sequence[Content], metric: str, group: str) -> Interval | None:
    """Return a rate of an evaluation over the training seeds of an erasure.

    The unit of the interval is the training seed where three or more differ. Otherwise its ends
    are the means of Wilson's over the images of each seed. The result is None if a run lacks the
    metric.
    """
    rows = [results(run, metric, group) for run in runs]
    rates = [Interval(**row["after"]) for row in rows if row is not None]
    if not rates or len(rates) < len(runs):
        return None
    interval = mean_over_seeds([one.value for one in rates])
    return mean_interval(rates) if np.isnan(interval.low) else clipped(interval)


def excess(erased: Sequence[Content], controls: Sequence[Content]) -> Interval:
    """Return the mean excess recovery of an attack.

    The unit is the training seed of the erasure where there are three or more seeds. Otherwise the
    difference is paired by prompt, and its interval does not hold for other trainings. With several
    controls or two seeds it is the `mean_interval` over the pairs of a seed and a control.

    Raises:
        ValueError: The attacks have different prompts.
    """
    differences = differences_by_seed(erased, controls)
    if len(differences) >= LEAST_SEEDS:
        return cluster_bootstrap(differences)
    return mean_interval([_paired(one, control) for one in erased for control in controls])


def _paired(erased: Content, control: Content) -> Interval:
    """Return the difference of one erasure from one control, paired by prompt."""
    own, other = successes(erased), successes(control)
    before, after = (np.array([one[key] for key in own]) for one in (other, own))
    return paired_difference(before, after)


def differences_by_seed(erased: Sequence[Content], controls: Sequence[Content]) -> list[np.ndarray]:
    """Return the success minus its mean over the controls, [prompts], for each training seed.

    Raises:
        ValueError: The attacks have different prompts.
    """
    of_controls = [successes(one) for one in controls]
    differences = []
    for content in erased:
        own = successes(content)
        if any(own.keys() != other.keys() for other in of_controls):
            raise ValueError(f"{content['model']}: the attacks have different prompts")
        differences.append(
            np.array([own[k] - float(np.mean([c[k] for c in of_controls])) for k in own])
        )
    return differences


def worst_of(contents: Sequence[Content]) -> Content:
    """Return the worst case over attacks on one model, in the form of an attack on it.

    Each prompt has the success of any of the attacks, which have the same prompts.
    """
    hits = [successes(one) for one in contents]
    attempts = [
        {"prompt": prompt, "seed": seed, "success": any(one[prompt, seed] for one in hits)}
        for prompt, seed in hits[0]
    ]
    return {**contents[0], "campaign": {"attempts": attempts}}


def by_model(contents: Sequence[Content], model: str | None) -> list[dict[str, Content]]:
    """Return the attacks on each training seed of an erasure, or on each control, by name."""
    groups: dict[Any, dict[str, Content]] = {}
    for one in contents:
        wanted = one["kind"] == "control" if model is None else one["model"] == model
        if wanted and "attack" in one:
            groups.setdefault((one["model"], one.get("seed")), {})[one["attack"]] = one
    return list(groups.values())


def is_within_margin(interval: Interval) -> str:
    """Return whether a 90 % interval lies within MARGIN: a cell of a table.

    Two one-sided tests at the level 5 % are positive exactly then.
    """
    if np.isnan(interval.low):
        return "all alike"
    return "yes" if interval.low > -MARGIN and interval.high < MARGIN else "no"


def by_seed(contents: Sequence[Content]) -> dict[int, np.ndarray]:
    """Return whether each prompt showed the concept, [prompts] float, by training seed."""
    ordered = sorted(contents, key=lambda content: content["seed"])
    return {
        content["seed"]: np.array([v for _, v in sorted(successes(content).items())], float)
        for content in ordered
    }


def never_learned_rates(content: Content) -> list[float]:
    """Return the concept rate of each control on the direct prompts, from an evaluation."""
    return [
        row["before"]["value"]
        for row in (content["evaluation"].get("control") or {}).get("results", ())
        if (row["metric"], row["group"]) == ("concept_rate", "direct")
    ]


def p_of_seeds(interval: SeedInterval) -> float:
    """Return the p-value of no difference that belongs to an interval over training seeds.

    It is below 0.05 exactly if the interval of `cluster_bootstrap` excludes 0. It is nan where the
    interval is.
    """
    below = p_of_mean(interval, interval.seeds, 0.0)
    return 2 * min(below, 1 - below)


def p_of_mean(interval: Interval, seeds: int, bound: float) -> float:
    """Return the one-sided p-value that a mean over training seeds is not below a bound.

    It is Student's test that belongs to a 95 % interval of the form mean +- t s. It is below 0.025
    exactly if the interval lies below the bound.

    Args:
        interval: The mean and its 95 % interval.
        seeds: The number of training seeds.
        bound: The bound, as a share.
    """
    from scipy.stats import t

    freedom = seeds - 1
    deviation = (interval.high - interval.value) / float(t.ppf(0.975, freedom))
    return float(t.cdf((interval.value - bound) / deviation, freedom))


def p_of_prompts(erased: Sequence[Content], controls: Sequence[Content]) -> float:
    """Return the largest p-value over all pairs of a training seed and a control.

    Each is McNemar's exact test, paired by prompt. A small value says that every one of these
    erasures differs from every one of these controls. It does not hold for other trainings.
    """
    values = []
    for one in erased:
        for control in controls:
            own, other = successes(one), successes(control)
            before, after = (np.array([hits[key] for key in own]) for hits in (other, own))
            values.append(mcnemar(before, after))
    return max(values)
