"""Change of a model's predictions by an erasure, with the concept's prompts and without a prompt.

    python -m studies.guidance studies/configs/guidance.yaml [--tasks star] [--cases all,empty]
    [--work runs/guidance]

With e the original's prediction at a state x_t on its way to an image of the concept, e' the erased
model's, c a prompt of the concept, a its anchor, d = e(a) - e(c) and g = e(a) - e(""):

    learned    <e'(c) - e(c), d> / <d, d>
               1: the predictions for the concept's prompts equal those for the anchor
    followed   <e'("") - e(""), d> / <d, d>
               1: so does the unconditional prediction
    guidance   <e'(c) - e'(""), g> / <g, g>
               1: guidance to the anchor is unchanged; 0: there is none

Each case is a result of the study `guidance` (studies/result_tables.py), with the concept rate of
its images. Existing results are not made again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import torch
import yaml

from concept_eraser import api
from concept_eraser.data import prompts
from concept_eraser.models.base import Model
from concept_eraser.utils import provenance
from studies.never_learned_change import along
from studies.result_tables import Results
from studies.runs import has_protocol, model_of, recipe_of, run_one, same, suite_of
from studies.tasks import parse_names

STUDY = "guidance"


@torch.no_grad()
def rows(
    original: Model,
    erased_model: Model,
    concept: list[str],
    anchors: list[str],
    how: dict[str, Any],
) -> list[dict[str, float]]:
    """Return the time step and the three measures of the module's docstring, for each step of the
    sampler.
    """
    concept_output, anchor_output, empty_output = (
        original.encode(texts) for texts in (concept, anchors, [""] * len(concept))
    )
    noise = torch.randn(
        len(concept), *original.latent_shape(), generator=torch.Generator().manual_seed(how["seed"])
    )
    steps_rows = []
    for stop in range(how["steps"]):
        x, t = original.partial(
            noise,
            concept_output,
            empty_output,
            stop=stop,
            steps=how["steps"],
            guidance=how["guidance"],
        )
        times = torch.full((len(concept),), t)
        c, a, none = (
            original.denoise(x, times, one) for one in (concept_output, anchor_output, empty_output)
        )
        c_after, none_after = (
            erased_model.denoise(x, times, one) for one in (concept_output, empty_output)
        )
        steps_rows.append(
            {
                "t": t,
                "learned": along(c_after - c, a - c),
                "followed": along(none_after - none, a - c),
                "guidance": along(c_after - none_after, a - none),
            }
        )
    return steps_rows


def case(study: dict[str, Any], task: str, name: str) -> dict[str, Any]:
    """Return a case on a task as an entry of studies/study.py."""
    where, how = study["tasks"][task], study["cases"][name]
    data = {
        "forget.prompts": where["forget"],
        "forget.anchor": where["anchor"],
        "retain.prompts": where["retain"],
    }
    return {
        "recipe": study["recipe"],
        "suite": where["suite"],
        "label": how["label"],
        "set": {**study["set"], **data, **how["set"]},
    }


def measure(study: dict[str, Any], task: str, name: str, work: Path) -> None:
    """Train and measure a case, and write its result."""
    entry, seed = case(study, task, name), study["seed"]
    recipe, results, key = recipe_of(entry, {}, seed), Results(STUDY), f"{task}_{name}"
    sizes, suite = {"n": study["n"], "images": study["images"]}, suite_of(study, entry, None)
    settings = {"states": study["states"], "sizes": sizes}
    previous = results.get(key)
    if (
        previous is not None
        and same({**previous, "entry": key}, recipe)
        and has_protocol(previous["evaluation"], suite, study["n"])
        and all(previous.get(setting) == value for setting, value in settings.items())
    ):
        return
    folder = work / key
    result, _ = run_one(entry, {}, seed=seed, suite=suite, n=study["n"], folder=folder)
    run = api.erase(recipe, output=folder, resume=True)
    concept_rows = (
        prompts.load(study["tasks"][task]["forget"])
        .take(study["states"]["n"], study["states"]["seed"])
        .prompts
    )
    texts, anchors = (
        [row.text for row in concept_rows],
        [row.anchor_prompt(study["tasks"][task]["anchor"]) for row in concept_rows],
    )
    measurements = rows(
        original=api.load(recipe.model),
        erased_model=cast(Model, model_of(run)),
        concept=texts,
        anchors=anchors,
        how=study["states"],
    )
    results[key] = {
        "task": task,
        "case": name,
        "label": entry["label"],
        "recipe": recipe.resolved(),
        **settings,
        "rows": measurements,
        "evaluation": result["evaluation"],
        "environment": provenance.describe(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--tasks", default="", help="only these")
    parser.add_argument("--cases", default="", help="only these")
    parser.add_argument("--work", type=Path, default=Path("runs/guidance"))
    args = parser.parse_args()
    study = yaml.safe_load(args.study.read_text())
    for task in parse_names(parser, "tasks", args.tasks, study["tasks"]):
        for name in parse_names(parser, "cases", args.cases, study["cases"]):
            measure(study, task, name, args.work)


if __name__ == "__main__":
    main()
