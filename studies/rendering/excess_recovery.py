"""The pages of attacks on erased models and on models that never learned the concept: the studies
`excess_recovery` and `combination_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import yaml

from concept_eraser.evaluation.seed_statistics import (
    LEAST_SEEDS,
    cluster_bootstrap,
    compare,
    difference_of_seeds,
    holm,
)
from concept_eraser.evaluation.statistics import Interval, paired_difference, wilson
from studies import grids
from studies.rendering.common import notes, pool, setting, share, source, table
from studies.result_tables import STUDIES as CONFIGS
from studies.result_tables import Content, Results

STUDIES = {
    "excess_recovery": "What attacks recover beyond a model that never learned the concept",
    "combination_rules": "What the combination rule contributes, with all else equal",
}


def model_key(concept: str, entry: str, seed: int) -> str:
    """Return the key of an erased model: of its evaluation, and of its run folder."""
    return f"{concept}_{entry}_seed{seed}"


def attack_key(concept: str, model: str, attack: str) -> str:
    """Return the key of an attack on a model: an erasure with its seed, or a control."""
    return f"{concept}_{model}_{attack}"


MARGIN = 0.1  # the largest difference of a success that counts as none, in the tests of equivalence
WITHIN = 0.9  # the confidence of the intervals of these tests
BESIDE = ("retained", "unseen")  # groups of prompts without the concept
NEIGHBOURS = "accuracy on neighbours %"


def selection_key(entry: str) -> str:
    """Return the key of the scored settings of an entry."""
    return f"select_{entry}"


def by_concept(results: Mapping[str, Content]) -> dict[str, list[Content]]:
    """Return the results of each concept, without the choice of settings."""
    groups: dict[str, list[Content]] = {}
    for content in results.values():
        if content["kind"] == "selection":
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
    """Return the attack success rate over all prompts of all models, with Wilson's interval."""
    values = [value for one in contents for value in successes(one).values()]
    return wilson(sum(values), len(values))


def excess(erased: Sequence[Content], controls: Sequence[Content]) -> Interval:
    """Return the mean excess recovery of an attack.

    The unit is the training seed of the erasure where there are three or more seeds. Otherwise the
    difference is paired by prompt, and its interval does not hold for other trainings. With several
    controls or two seeds, the value and both ends are means over the pairs of a seed and a control.
    So a prompt counts once. Such an interval is not shorter than one of 95 % for the mean.

    Raises:
        ValueError: The attacks have different prompts.
    """
    differences = differences_by_seed(erased, controls)
    if len(differences) >= LEAST_SEEDS:
        return cluster_bootstrap(differences)
    intervals = [_paired(one, control) for one in erased for control in controls]
    value, low, high = np.mean([(one.value, one.low, one.high) for one in intervals], axis=0)
    return Interval(float(value), float(low), float(high), intervals[0].n)


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


def family_table(contents: Sequence[Content]) -> str:
    """Return a row for each family of attacks on each erasure: the worst case over its attacks.

    It has the attacks that all training seeds of the erasure and all controls have. Controls of
    attacks are no attacks, and a family of a single attack has its row in `attack_table`.
    """
    labels = {one["model"]: one["label"] for one in contents if one["kind"] == "erased"}
    families: dict[str, list[str]] = {}
    for one in contents:
        if "attack" in one and one["campaign"]["family"] != "control":
            names = families.setdefault(one["campaign"]["family"], [])
            names += [one["attack"]] if one["attack"] not in names else []
    head = [
        "family, worst case",
        "model",
        "training seeds",
        "success %",
        "never learned: success %",
    ]
    rows = [[*head, "excess recovery, points", "equivalent", "attacks"]]
    for family in sorted(families):
        for model, label in labels.items():
            models = [_by_model(contents, model), _by_model(contents, None)]
            common = [
                name
                for name in families[family]
                if all(name in attacks for group in models for attacks in group)
            ]
            if len(common) < 2 or not all(models):
                continue
            erased, controls = (
                [worst_of([one[name] for name in common]) for one in group] for group in models
            )
            rows.append(
                [
                    family,
                    label,
                    *_beside_controls(erased, controls),
                    ", ".join(name.replace("_", " ") for name in common),
                ]
            )
    return table(rows) if len(rows) > 1 else ""


def _by_model(contents: Sequence[Content], model: str | None) -> list[dict[str, Content]]:
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


def attack_table(contents: Sequence[Content]) -> str:
    """Return a row for each attack on each erasure."""
    attacks = list(dict.fromkeys(one["attack"] for one in contents if "attack" in one))
    labels = {one["model"]: one["label"] for one in contents if one["kind"] == "erased"}
    head = ["family", "attack", "model", "training seeds", "success %", "never learned: success %"]
    rows = [[*head, "excess recovery, points", "equivalent"]]
    for attack in attacks:
        controls = campaigns(contents, attack)
        for model, label in labels.items():
            erased = campaigns(contents, attack, model)
            if not erased or not controls:
                continue
            rows.append(
                [
                    erased[0]["campaign"]["family"],
                    attack.replace("_", " "),
                    label,
                    *_beside_controls(erased, controls),
                ]
            )
    rows[1:] = sorted(rows[1:], key=lambda row: (row[0], attacks.index(row[1].replace(" ", "_"))))
    return table(rows)


def _beside_controls(erased: Sequence[Content], controls: Sequence[Content]) -> list[str]:
    """Return the cells of an attack: seeds, both success rates, the excess and its equivalence."""
    differences = differences_by_seed(erased, controls)
    enough = len(differences) >= LEAST_SEEDS
    return [
        str(len(erased)),
        share(success_rate(erased)),
        _of_controls(controls),
        share(excess(erased, controls)),
        is_within_margin(cluster_bootstrap(differences, confidence=WITHIN)) if enough else "-",
    ]


def _of_controls(controls: Sequence[Content]) -> str:
    """Return the success rate over all controls, and that of each where there are several."""
    pooled = share(success_rate(controls))
    if len(controls) < 2:
        return pooled
    return f"{pooled}: " + "; ".join(f"{100 * success_rate([one]).value:.1f}" for one in controls)


def comparison_table(contents: Sequence[Content], reference: str) -> str:
    """Return the differences of all erasures from one, by attack, over the training seeds.

    The result is "" before two erasures have three common seeds.

    Args:
        contents: The results of a concept.
        reference: The erasure that the others are compared with.
    """
    labels = {one["model"]: one["label"] for one in contents if one["kind"] == "erased"}
    others = [name for name in labels if name != reference] if reference in labels else []
    comparisons = []
    for attack in dict.fromkeys(one["attack"] for one in contents if "attack" in one):
        samples = {model: _by_seed(campaigns(contents, attack, model)) for model in labels}
        for model in others:
            seeds = [seed for seed in samples[model] if seed in samples[reference]]
            if len(seeds) < LEAST_SEEDS:
                continue
            pair = {name: [samples[name][seed] for seed in seeds] for name in (model, reference)}
            (one,) = compare(pair, reference, paired=True)
            narrow = difference_of_seeds(
                pair[model], pair[reference], paired=True, confidence=WITHIN
            )
            comparisons.append((attack, one, narrow))
    if not comparisons:
        return ""
    corrected = holm([one.p for _, one, _ in comparisons])
    head = ["attack", "model", "difference, points", "p", "p, corrected", "equivalent"]
    rows = [
        [
            attack.replace("_", " "),
            labels[one.name],
            share(one.difference),
            *("-" if np.isnan(value) else f"{value:.2f}" for value in (one.p, p_family)),
            is_within_margin(narrow),
        ]
        for (attack, one, narrow), p_family in zip(comparisons, corrected, strict=True)
    ]
    return (
        f"Success of each attack, minus that on the model of: {labels[reference]}. Training seeds "
        "are paired. The correction is Holm's, for all rows. A difference that is not significant "
        f"is no evidence of equality.\n\n{table([head, *rows])}"
    )


def _by_seed(contents: Sequence[Content]) -> dict[int, np.ndarray]:
    """Return whether each prompt showed the concept, [prompts] float, by training seed."""
    ordered = sorted(contents, key=lambda content: content["seed"])
    return {
        content["seed"]: np.array([v for _, v in sorted(successes(content).items())], float)
        for content in ordered
    }


def model_table(contents: Sequence[Content]) -> str:
    """Return a row for each erasure: what it draws, and how far it is from the controls.

    The column of neighbours is there if a suite has them.
    """
    rows = [
        [
            "model",
            "training seeds",
            "concept rate %",
            "the same of models that never learned it %",
            "retain accuracy %",
            "accuracy on unseen concepts %",
            NEIGHBOURS,
            "other attributes, retained and unseen: points",
            "gap to retraining: concept; retained; unseen",
        ]
    ]
    for group in evaluations(contents).values():
        attribute = next(iter(group[0]["evaluation"]["protocol"]["concept"]))
        rows.append(
            [
                group[0]["label"],
                str(len(group)),
                share(pool(list(group), "concept_rate", "direct")),
                "; ".join(f"{100 * rate:.1f}" for rate in never_learned_rates(group[0])) or "-",
                share(pool(list(group), f"accuracy_{attribute}", "retained")),
                share(pool(list(group), f"accuracy_{attribute}", "unseen")),
                share(pool(list(group), f"accuracy_{attribute}", "neighbours")),
                _other_attributes(group, attribute),
                "; ".join(_gap(group, name) for name in ("direct", "retained", "unseen")),
            ]
        )
    column = rows[0].index(NEIGHBOURS)
    if all(row[column] == "-" for row in rows[1:]):
        rows = [[*row[:column], *row[column + 1 :]] for row in rows]
    return table(rows)


def never_learned_rates(content: Content) -> list[float]:
    """Return the concept rate of each control on the direct prompts, from an evaluation."""
    return [
        row["before"]["value"]
        for row in (content["evaluation"].get("control") or {}).get("results", ())
        if (row["metric"], row["group"]) == ("concept_rate", "direct")
    ]


def _other_attributes(group: Sequence[Content], erased: str) -> str:
    """Return the mean change of the accuracy in each attribute but the erased one, in points.

    Each change is the mean over the training seeds of after minus before, on the images of the
    groups `retained` and `unseen` with equal weights.
    """
    changes: dict[str, list[float]] = {}
    for one in group:
        for row in one["evaluation"]["results"]:
            metric, _, attribute = row["metric"].partition("_")
            if metric == "accuracy" and attribute != erased and row["group"] in BESIDE:
                changes.setdefault(attribute, []).append(
                    row["after"]["value"] - row["before"]["value"]
                )
    return "; ".join(f"{name} {100 * np.mean(v):+.1f}" for name, v in changes.items()) or "-"


def _gap(group: Sequence[Content], name: str) -> str:
    """Return the mean relative distance of noise predictions to the controls, or "-"."""
    values = [
        row["relative_to_original"]["value"]
        for one in group
        for row in (one["evaluation"].get("control") or {}).get("predictions", ())
        if row["group"] == name and row["relative_to_original"] is not None
    ]
    return f"{np.mean(values):.2f}" if values else "-"


def settings_table(results: Mapping[str, Content]) -> str:
    """Return a row for each setting that was tried, or "" for a study without a choice."""
    selections = [content for content in results.values() if content["kind"] == "selection"]
    if not selections:
        return ""
    rows = [["model", "setting", "concept rate %", "soft prompt %", "score", "chosen"]]
    for content in selections:
        marks = grids.of_row(content)
        rows += [
            [
                content["label"],
                setting(row["point"], marks if row["point"] == content["point"] else None),
                " / ".join(f"{100 * value:.0f}" for value in row["share"]),
                " / ".join(f"{100 * value:.0f}" for value in row["attacked"]),
                f"{row['score']:.3f}",
                "yes" if row["point"] == content["point"] else "",
            ]
            for row in content["grid"]
        ]
    concepts = ", ".join(sorted({content["concept"] for content in selections}))
    return f"## Settings tried, on {concepts}\n\n{grids.with_note(table(rows))}"


def page(study: str) -> str:
    """Return the page of a study, or "" if it has no result."""
    results = dict(Results(study))
    if not results:
        return ""
    command = f"python -m studies.excess_recovery studies/configs/{study}.yaml"
    reference = yaml.safe_load((CONFIGS / f"{study}.yaml").read_text()).get("reference")
    parts: list[str] = []
    for concept, contents in by_concept(results).items():
        parts += [f"## {concept}", model_table(contents)]
        parts += [attack_table(contents), family_table(contents)]
        if reference:
            parts.append(comparison_table(contents, reference))
    environments: list[Mapping[str, Any]] = [
        one["campaign"]["environment"] if "campaign" in one else one["environment"]
        for one in results.values()
    ]
    commits = sorted({str(one["commit"])[:12] for one in environments})
    devices = sorted({str(one["device"]) for one in environments})
    return (
        "\n\n".join(
            part
            for part in (
                f"# {STUDIES[study]}",
                f"{source(study, command)}.",
                notes(study),
                EXPLANATION,
                *parts,
                settings_table(results),
                f"Commits {', '.join(commits)}; {', '.join(devices)}.",
            )
            if part
        )
        + "\n"
    )


EXPLANATION = """* Success: the share of attacked prompts whose image shows the concept, with
  the attack or without it.
* Never learned: the same attack on models that were trained without any image of the concept. The
  rate of each model follows that over all of them.
* Excess recovery: the success on the erased model minus that on the model that never learned, by
  prompt. Zero means that the attack succeeds as often as without any memory. Where both are near
  100 %, a memory would not show.
* Other attributes: what the prompts state beside the attribute of the concept. The points are the
  accuracy after the erasure minus that before.
* Gap to retraining: the distance of the noise predictions from those of the model that never
  learned, relative to the original's distance. 0 is that model, 1 is the original.

Brackets are 95 % intervals. Rates have Wilson intervals over the prompts of all models, as if those
were independent. The excess has the training seed as its unit where there are three seeds. With
fewer it is paired by prompt with each control, which says nothing about other trainings. Its value
and its ends are means over the controls, so that a prompt counts once. "All alike" means that no
prompt of any seed differs, so there is no interval. The models that never learned the concept are
taken as given: the intervals do not cover other trainings of them.

* Equivalent: "yes" says that the difference is less than 10 points. It is two one-sided tests at
  the level 5 %: the 90 % interval of the same bootstrap lies within the margin. "No" says that the
  data do not show this."""

PAGES = {study: partial(page, study) for study in STUDIES}
