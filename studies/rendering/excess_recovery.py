"""The pages of attacks on erased models and on models that never learned the concept: the studies
of `STUDIES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import yaml

from concept_eraser.evaluation.seed_statistics import (
    LEAST_SEEDS,
    cluster_bootstrap,
    difference_of_seeds,
    holm,
)
from concept_eraser.evaluation.statistics import wilson
from concept_eraser.recipes import recipe as recipes
from studies import grids
from studies.rendering.common import fill_blocks, notes, setting, share, source, table
from studies.rendering.excess_details import (
    curve_table,
    order_table,
    savings_table,
    seconds_table,
    side_table,
)
from studies.rendering.excess_goal import goal_table
from studies.rendering.excess_statistics import (
    WITHIN,
    by_concept,
    by_model,
    by_seed,
    campaigns,
    differences_by_seed,
    evaluations,
    excess,
    image_rate,
    is_within_margin,
    never_learned_rates,
    p_of_prompts,
    p_of_seeds,
    success_rate,
    worst_of,
)
from studies.rendering.second_judge import differing_images, second_judge_section
from studies.result_tables import STUDIES as CONFIGS
from studies.result_tables import Content, Results

STUDIES = {
    "excess_recovery": "What attacks recover beyond a model that never learned the concept",
    "published_methods": "Methods as published, with four settings each",
    "combination_rules": "What the combination rule contributes, with all else equal",
    "continuity": "The star under protocol 2",
    "candidates": "Candidates for the default, on the star",
    "further_attacks": "Further attacks on the heart, with a second judge",
}


def model_key(concept: str, entry: str, seed: int) -> str:
    """Return the key of an erased model: of its evaluation, and of its run folder."""
    return f"{concept}_{entry}_seed{seed}"


def attack_key(concept: str, model: str, attack: str) -> str:
    """Return the key of an attack on a model: an erasure with its seed, or a control."""
    return f"{concept}_{model}_{attack}"


# of an attack on an erasure of a concept: the p-value over training seeds, and that over prompts
PValues = Mapping[tuple[str, str, str], tuple[float, float]]
NEIGHBOURS = "neighbours %"
ALL_FAMILIES = "all attacks"
CORRECTED = "p, corrected: training seeds; prompts"


def selection_key(entry: str) -> str:
    """Return the key of the scored settings of an entry."""
    return f"select_{entry}"


def family_table(
    contents: Sequence[Content], groups: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return a row for each family of attacks on each erasure: the worst case over its attacks.

    The last rows are those of all families together. A row has the attacks that all training seeds
    of the erasure and all controls have. Controls of attacks are no attacks, and a family of a
    single attack has its row in `attack_table`.

    groups: Further worst cases: the names of their attacks.
    """
    labels = {one["model"]: one["label"] for one in contents if one["kind"] == "erased"}
    families: dict[str, list[str]] = {}
    for one in contents:
        if "attack" in one and one["campaign"]["family"] != "control":
            for family in (one["campaign"]["family"], ALL_FAMILIES):
                names = families.setdefault(family, [])
                names += [one["attack"]] if one["attack"] not in names else []
    families |= {name: list(attacks) for name, attacks in (groups or {}).items()}
    head = [
        "family, worst case",
        "model",
        "training seeds",
        "success %",
        "never learned: success %",
    ]
    rows = [[*head, "excess recovery, points", "equivalent", "attacks"]]
    for family in sorted(families, key=lambda name: (name == ALL_FAMILIES, name)):
        for model, label in labels.items():
            models = [by_model(contents, model), by_model(contents, None)]
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


def corrected_p(results: Mapping[str, Content]) -> PValues:
    """Return the p-values of all rows of `attack_table` with Holm's correction.

    The rows of all concepts are one family of tests. The first value has the training seed as its
    unit, and is nan below three seeds. The second has the prompt as its unit (`p_of_prompts`).
    """
    of_seeds: dict[tuple[str, str, str], float] = {}
    of_prompts: dict[tuple[str, str, str], float] = {}
    for concept, contents in by_concept(results).items():
        for attack, model, erased, controls in _attacked_pairs(contents):
            differences = differences_by_seed(erased, controls)
            if len(differences) >= LEAST_SEEDS:
                of_seeds[concept, attack, model] = p_of_seeds(cluster_bootstrap(differences))
            of_prompts[concept, attack, model] = p_of_prompts(erased, controls)
    corrected = dict(zip(of_seeds, holm(list(of_seeds.values())), strict=True))
    return {
        key: (float(corrected.get(key, np.nan)), float(p))
        for key, p in zip(of_prompts, holm(list(of_prompts.values())), strict=True)
    }


def unprotected_table(contents: Iterable[Content], concept: str) -> str:
    """Return a row for each attack on the model before the erasure, or "" without such attacks."""
    rows = [["attack", "attacked prompts", "success %"]]
    for content in contents:
        if content["concept"] == concept:
            attacked = [one for one in content["campaign"]["attempts"] if not one["pre"]]
            rate = wilson(sum(one["success"] for one in attacked), len(attacked))
            name = content["attack"].replace("_", " ")
            rows.append([name, str(len(attacked)), share(rate)])
    if len(rows) == 1:
        return ""
    return (
        "The same attacks on the model before the erasure. A neutral word replaces the concept's "
        "in the prompts. An attack that fails here is too weak to show a memory.\n\n"
        f"{table(rows)}"
    )


def _attacked_pairs(
    contents: Sequence[Content],
) -> Iterator[tuple[str, str, list[Content], list[Content]]]:
    """Yield each attack that both an erasure and the controls have: its name, that of the erasure,
    the attacks on its training seeds, and those on the controls.
    """
    models = dict.fromkeys(one["model"] for one in contents if one["kind"] == "erased")
    for attack in dict.fromkeys(one["attack"] for one in contents if "attack" in one):
        controls = campaigns(contents, attack)
        for model in models:
            erased = campaigns(contents, attack, model)
            if erased and controls:
                yield attack, model, erased, controls


def attack_table(contents: Sequence[Content], p_values: PValues | None = None) -> str:
    """Return a row for each attack on each erasure.

    p_values: As `corrected_p`. Without them the table has no such column.
    """
    attacks = list(dict.fromkeys(one["attack"] for one in contents if "attack" in one))
    labels = {one["model"]: one["label"] for one in contents if one["kind"] == "erased"}
    head = ["family", "attack", "model", "training seeds", "success %", "never learned: success %"]
    head += ["excess recovery, points", *([] if p_values is None else [CORRECTED]), "equivalent"]
    rows = [head]
    for attack, model, erased, controls in _attacked_pairs(contents):
        *cells, equivalent = _beside_controls(erased, controls)
        if p_values is not None:
            of_seeds, of_prompts = p_values[erased[0]["concept"], attack, model]
            cells.append(f"{_p(of_seeds)}; {_p(of_prompts)}")
        family = erased[0]["campaign"]["family"]
        rows.append([family, attack.replace("_", " "), labels[model], *cells, equivalent])
    rows[1:] = sorted(rows[1:], key=lambda row: (row[0], attacks.index(row[1].replace(" ", "_"))))
    return table(rows)


def _p(value: float) -> str:
    """Return a p-value as the text of a table cell."""
    return "-" if np.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"


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
        samples = {model: by_seed(campaigns(contents, attack, model)) for model in labels}
        for model in others:
            seeds = [seed for seed in samples[model] if seed in samples[reference]]
            if len(seeds) < LEAST_SEEDS:
                continue
            pair = {name: [samples[name][seed] for seed in seeds] for name in (model, reference)}
            wide, narrow = (
                difference_of_seeds(
                    pair[model], pair[reference], paired=True, confidence=confidence
                )
                for confidence in (0.95, WITHIN)
            )
            comparisons.append((attack, model, wide, narrow))
    if not comparisons:
        return ""
    p_values = [p_of_seeds(wide) for *_, wide, _ in comparisons]
    corrected = holm(p_values)
    head = ["attack", "model", "difference, points", "p", "p, corrected", "equivalent"]
    rows = [
        [
            attack.replace("_", " "),
            labels[model],
            share(wide),
            *map(_p, (p, p_family)),
            is_within_margin(narrow),
        ]
        for (attack, model, wide, narrow), p, p_family in zip(
            comparisons, p_values, corrected, strict=True
        )
    ]
    return (
        f"Success of each attack, minus that on the model of: {labels[reference]}. Training seeds "
        'are paired. p belongs to the interval, and is "-" where the differences of all seeds are '
        "all alike. The correction is Holm's, for all rows. A difference that is not significant "
        f"is no evidence of equality.\n\n{table([head, *rows])}"
    )


def model_table(contents: Sequence[Content], tried: Mapping[str, int] | None = None) -> str:
    """Return a row for each erasure: what it draws.

    The column of neighbours is there if a suite has them.

    tried: The number of settings that were tried for an erasure, by its name.
    """
    models = evaluations(contents)
    first = next(iter(models.values()))[0]
    attribute = next(iter(first["evaluation"]["protocol"]["concept"]))
    rows = [
        [
            "model",
            "training seeds",
            "concept rate %",
            "the same of models that never learned it %",
            f"accuracy of the {attribute}: retained %",
            "unseen concepts %",
            NEIGHBOURS,
            "settings tried",
        ]
    ]
    for name, group in models.items():
        rows.append(
            [
                group[0]["label"],
                str(len(group)),
                share(image_rate(group, "concept_rate", "direct")),
                "; ".join(f"{100 * rate:.1f}" for rate in never_learned_rates(group[0])) or "-",
                share(image_rate(group, f"accuracy_{attribute}", "retained")),
                share(image_rate(group, f"accuracy_{attribute}", "unseen")),
                share(image_rate(group, f"accuracy_{attribute}", "neighbours")),
                str((tried or {}).get(name, "-")),
            ]
        )
    column = rows[0].index(NEIGHBOURS)
    if all(row[column] == "-" for row in rows[1:]):
        rows = [[*row[:column], *row[column + 1 :]] for row in rows]
    return table(rows)


def settings_tried(results: Mapping[str, Content], study: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of settings of which that of an erasure was chosen, by its name.

    An entry without a grid has a recipe. The configuration states the number as `tried` where
    earlier studies chose it. Otherwise it was chosen on the leaderboard, if it is the setting that
    the leaderboard's grid chose on the star. The number is 0 for another setting.
    """
    counts = {one["model"]: len(one["grid"]) for one in results.values() if "grid" in one}
    leaderboard = Results("tiny_leaderboard")
    for name, entry in study["entries"].items():
        row = leaderboard.get(f"star_{name}_seed0")
        if "tried" in entry:
            counts[name] = entry["tried"]
            continue
        if "grid" in entry or row is None:
            continue
        resolved = recipes.load(entry["recipe"]).resolved()
        chosen = all(_setting(resolved, key) == value for key, value in row["point"].items())
        counts[name] = len(row["grid"]) if chosen else 0
    return counts


def _setting(recipe: Mapping[str, Any], key: str) -> Any:
    """Return a setting of a recipe by its dotted key, e.g. training.lr."""
    value: Any = recipe
    for part in key.split("."):
        value = value[part]
    return value


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
    config = yaml.safe_load((CONFIGS / f"{study}.yaml").read_text())
    parts: list[str] = []
    p_values, tried = corrected_p(results), settings_tried(results, config)
    unprotected = {f"unprotected/{k}": v for k, v in Results(f"{study}/unprotected").items()}
    for concept, contents in by_concept(results).items():
        parts += [f"## {concept}", model_table(contents, tried), side_table(contents)]
        parts += [attack_table(contents, p_values)]
        parts += [family_table(contents, config.get("worst_cases"))]
        parts += [unprotected_table(unprotected.values(), concept)]
        parts += [curve_table(contents), savings_table(contents)]
        if "reference" in config:
            parts.append(comparison_table(contents, config["reference"]))
    blocks = {
        "goal": partial(goal_table, results),
        "order": partial(order_table, results),
        "seconds": partial(seconds_table, results | unprotected),
    }
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
                fill_blocks(notes(study), blocks),
                EXPLANATION,
                *parts,
                second_judge_section(results),
                *differing_images(study, results),
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
* Settings tried: those of one grid on the star, of which this one was chosen, or the number that
  the configuration states with its source. 0: it is that of the method's code.
* Accuracy of each stated attribute: the accuracy after the erasure minus that before, and for the
  models that never learned the concept minus the original's.
* Gap to retraining: the distance of the noise predictions from those of the model that never
  learned, relative to the original's distance. 0 is that model, 1 is the original. The last column
  is relative to the distance of two such models. 1 is as near as another training of the same data.
  It needs two such models.
* Corrected p: Holm's correction, for all rows of all concepts on this page. The first value has the
  training seed as its unit and belongs to the interval. Three seeds have two degrees of freedom.
  The second is McNemar's exact test over prompts: the largest p of all pairs of a training and a
  control. It says nothing about other trainings. The worst cases have no correction.
* Success after steps: the share of prompts that showed the concept by then. For revival it is the
  share that shows it after these steps.
* Savings: the median number of steps until a prompt shows the concept, over that of the models that
  never learned it. 1 is as slow as those. Where fewer than half of the prompts show it within the
  budget, the ratio is only bounded. "-": both are unknown, or most prompts show it without steps.

Brackets are 95 % intervals. Rates have the training seed as their unit where three seeds differ:
success by the cluster bootstrap, images by Student's interval of the means. With fewer seeds, or
equal ones, their ends are the means of Wilson's intervals over the prompts or images of each model,
as if those were independent. So a prompt counts once. The excess has the training seed as its unit
where there are three seeds. With fewer it is paired by prompt with each control, which says nothing
about other trainings. Its value and its ends are means over the controls. "All alike" means that no
prompt of any seed differs, so there is no interval. The models that never learned the concept are
taken as given: the intervals do not cover other trainings of them.

* Equivalent: "yes" says that the difference is less than 10 points. It is two one-sided tests at
  the level 5 %: the 90 % interval of the same bootstrap lies within the margin. "No" says that the
  data do not show this."""

PAGES = {study: partial(page, study) for study in STUDIES}
