"""The page of the study `one_line`: a concept by its name, and hand-written prompts."""

from __future__ import annotations

from typing import Any

import yaml

from concept_eraser.data import prompts
from concept_eraser.evaluation.statistics import Interval
from concept_eraser.recipes.defaults import LORA_LAYERS
from studies.rendering.common import results, share, table
from studies.result_tables import STUDIES, Results

STUDY = "one_line"
WAYS = {"by_name": "by its name", "hand_written": "hand-written prompts"}
COLUMNS = (
    ("concept_rate", "direct"),
    ("concept_rate", "synonyms"),
    ("no_object_rate", "direct"),
    ("accuracy", "neighbours"),
    ("accuracy", "retained"),
)


def page() -> str:
    """Return eval/results/one_line.md."""
    study = yaml.safe_load((STUDIES / f"{STUDY}.yaml").read_text())
    runs = Results(STUDY)
    concepts = [name for name in study["concepts"] if f"{name}_by_name" in runs]
    rows = [["concept", "given", *(f"{metric}, {group} %" for metric, group in COLUMNS), "s"]]
    for concept in concepts:
        rows.append(_row(runs[f"{concept}_by_name"], "before", "untouched model"))
        for way, label in WAYS.items():
            if (key := f"{concept}_{way}") in runs:
                rows.append(_row(runs[key], "after", label))
    environment = runs[f"{concepts[0]}_by_name"]["evaluation"]["environment"]
    return f"""# {study["title"]}

{_conclusion(runs, concepts)}

{table(rows)}

**Protocol 1, in part.** The reported prompts are in no training set. One judge counts, and no
attack runs. The default was developed on star, blue and dotted.

{study["about"].strip()}
One training seed; n = {study["images"]} images of each group; 95 % Wilson
intervals, which do not cover the choice of the training seed. Accuracy is that of the concept's
attribute. The column s has seconds of training on one thread, on a busy machine. Neighbours are the
two values that are nearest to the concept by the text encoder.
{_selection(runs, concepts)}
Command: `python -m studies.one_line studies/configs/one_line.yaml`.
Commit {str(environment["commit"])[:12]}; torch {environment["versions"]["torch"]}.
"""


def _selection(runs: Any, concepts: list[str]) -> str:
    """Return which layers the LoRA of the runs adapts, if they are not those of today's default."""
    selections = {
        runs[f"{concept}_by_name"]["recipe"]["trainable"]["select"] for concept in concepts
    }
    if selections == {LORA_LAYERS}:
        return ""
    return (
        f"The LoRA has the layers `{', '.join(sorted(selections))}`, the default at that time. "
        f"Today's default is\n`{LORA_LAYERS}`.\n"
    )


def _row(run: Any, when: str, label: str) -> list[str]:
    attribute = next(iter(run["evaluation"]["protocol"]["concept"]))
    cells = []
    for metric, group in COLUMNS:
        name = f"accuracy_{attribute}" if metric == "accuracy" else metric
        row = results(run, name, group)
        cells.append(share(Interval(**row[when])) if row else "-")
    seconds = f"{run['seconds']:.0f}" if when == "after" else ""
    return [run["concept"], label, *cells, seconds]


def _conclusion(runs: Any, concepts: list[str]) -> str:
    """Compare each number of a run by name with the interval of the run with written prompts."""
    inside: list[tuple[str, list[str]]] = []
    outside: list[tuple[str, list[str]]] = []
    better: list[str] = []
    for concept in concepts:
        if f"{concept}_hand_written" not in runs:
            continue
        named, written = (runs[f"{concept}_{way}"] for way in WAYS)
        attribute = next(iter(named["evaluation"]["protocol"]["concept"]))
        differences: list[str] = []
        for metric, group in COLUMNS:
            name = f"accuracy_{attribute}" if metric == "accuracy" else metric
            one, other = results(named, name, group), results(written, name, group)
            if not one or not other:
                continue
            value, interval = one["after"]["value"], other["after"]
            if interval["low"] <= value <= interval["high"]:
                continue
            text = f"{metric}, {group} ({share(Interval(**one['after']))})"
            is_better = (value > interval["high"]) == (metric == "accuracy")
            (better if is_better else differences).append(
                f"{concept}: {text}" if is_better else text
            )
        (outside if differences else inside).append((concept, differences))
    text = f"For {len(inside)} of {len(inside) + len(outside)} concepts every number of the run by "
    text += "name lies within the interval of the run with hand-written prompts, or is better."
    if better:
        text += f" Better, by one image or more, are {'; '.join(better)}."
    if same := [name for name, _ in inside if _has_equal_prompts(runs, name)]:
        text += (
            f" For {', '.join(same)} both runs have the same prompts, and therefore equal weights."
        )
    for concept, differences in outside:
        text += f" For {concept} these are worse: {'; '.join(differences)}."
    return text


def _has_equal_prompts(runs: Any, concept: str) -> bool:
    """Whether both runs of a concept have the same forget and retain prompts in the same order."""
    named, written = (runs[f"{concept}_{way}"]["recipe"] for way in WAYS)
    return all(
        prompts.load(named[objective]["prompts"]).texts
        == prompts.load(written[objective]["prompts"]).texts
        for objective in ("forget", "retain")
    )


PAGES = {STUDY: page}
