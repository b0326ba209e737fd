"""How far trainings of the bundled denoiser on the same data are from each other.

    python -m concept_eraser.tiny.build --unet-only --seed 1
    python -m concept_eraser.tiny.build --unet-only --seed 2
    python -m studies.full_models studies/configs/full_models.yaml [--concepts heart]

The full models have the same data, text encoder and VAE, and other seeds. Their numbers in the
suites of protocol 2 say what a change of the seed alone does. The distance of the noise predictions
is measured as in the gap to retraining (concept_eraser/evaluation/retraining.py). It stands beside
the distance of each full model from one that never learned the concept.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from concept_eraser import api
from concept_eraser.data import generate
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.retraining import (
    mean_distance,
    mean_with_interval,
    predict_group,
)
from concept_eraser.evaluation.suite import PromptEvaluation
from concept_eraser.models.base import Model
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from studies.result_tables import Content, Results
from studies.tasks import parse_names

NEVER_LEARNED = "never learned"


def distances(suite: suites.Suite, group: str, models: Mapping[str, Model]) -> list[Content]:
    """Return the distances of the noise predictions of each pair of models.

    The images of the group are those of the first model.

    Args:
        suite: The suite, which has the prompts and the sampling.
        group: The name of its group.
        models: The models by their names.

    Returns:
        For each pair its two names, and the mean squared difference with its 95 % interval over
        the images.
    """
    original = next(iter(models.values()))
    texts = suites.group_prompts(suite, group).texts
    images = suites.generate_group(
        original, suite, group, "before", weights=generate.model_fingerprint(original)
    )
    values: dict[tuple[str, str], list[np.ndarray]] = {}
    for predictions in predict_group(
        suite, group, images, texts=texts, original=original, models=list(models.values())
    ):
        by_name = dict(zip(models, predictions, strict=True))
        for one, other in combinations(models, 2):
            distance = mean_distance([(by_name[one], by_name[other])])
            values.setdefault((one, other), []).append(distance)
    return [
        {"models": list(pair), "distance": mean_with_interval(np.concatenate(each))}
        for pair, each in values.items()
    ]


def drawn(evaluation: PromptEvaluation) -> dict[str, dict[str, int]]:
    """Return what the evaluated model draws for the prompts of the concept.

    Returns:
        For each group of prompts of the concept, the number of images by the judge's value of the
        concept's attribute, the most frequent first. The value is "none" where no object is seen.
    """
    (attribute,) = evaluation.suite.concept
    counts: dict[str, Counter[str]] = {}
    for row in evaluation.outcomes:
        if row["stage"] == "after" and row["role"] == "forget":
            counts.setdefault(row["group"], Counter())[row[f"predicted_{attribute}"]] += 1
    return {group: dict(counter.most_common()) for group, counter in counts.items()}


def measure(study: Mapping[str, Any], concept: str) -> Content:
    """Return the numbers and the distances of all models on the suite of a concept.

    Raises:
        UserError: A model is missing.
    """
    case = study["concepts"][concept]
    suite = suites.load(case["suite"])
    sources = {**study["full_models"], NEVER_LEARNED: case["control"]}
    models = {name: api.load(source) for name, source in sources.items()}
    first, *others = sources
    evaluations = {name: api.evaluate(models[name], suite, before=models[first]) for name in others}
    return {
        "concept": concept,
        "sources": sources,
        "results": {  # each beside the first model
            name: evaluation.as_dict()["results"] for name, evaluation in evaluations.items()
        },
        "drawn": drawn(evaluations[NEVER_LEARNED]),
        "predictions": [
            {"group": group, "pairs": distances(suite, group, models)} for group in suite.groups
        ],
        "settings": {
            "suite": provenance.fingerprint(suite.model_dump(mode="json")),
            "seed": suite.seed,  # of the images
        },
        "models": {name: generate.model_fingerprint(model) for name, model in models.items()},
        "environment": provenance.describe(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--concepts", default="", help="only these")
    args = parser.parse_args(arguments)
    study = yaml.safe_load(args.study.read_text())
    results = Results(args.study.stem)
    try:
        for concept in parse_names(parser, "concepts", args.concepts, study["concepts"]):
            results[concept] = measure(study, concept)
            print(concept, flush=True)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
