"""The gap to retraining: how far an erased model is from one that never learned the concept.

A retrained model is what an erasure aims at. Two trainings without the concept differ as well, by
their seeds. So each distance is compared with two others: that of the original from the control,
and that between two controls of different seeds.

* Noise predictions: the images of each group by the original are noised at four time steps. All
  models predict the noise for the image's prompt, without guidance. The distance of two models is
  the mean squared difference of their predictions, for each image.
* The suite's metrics, with the control in the place of the original.
* FID and KID between the images of two models, where the suite measures them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concept_eraser.data import generate
from concept_eraser.evaluation import outcomes
from concept_eraser.evaluation.base import Evidence, Group, Judge, Metric, Result
from concept_eraser.evaluation.metrics.fid import FID
from concept_eraser.evaluation.never_learned import NeverLearned, RetrainingGap
from concept_eraser.evaluation.statistics import Interval, mean_interval
from concept_eraser.evaluation.suite import (
    PromptEvaluation,
    Suite,
    generate_group,
    group_prompts,
    group_seeds,
    metric,
)
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.progress import Progress, silent
from concept_eraser.utils.provenance import derive_seed

LEVELS = (0.125, 0.375, 0.625, 0.875)  # of the training schedule
DISTANCE = "distance_to_control"  # column of the outcomes


def require_comparable(controls: Sequence[NeverLearned], original: Model, suite: Suite) -> None:
    """Check the controls before any image is generated. Raises UserError as `NeverLearned`."""
    texts = [text for name in suite.groups for text in group_prompts(suite, name).texts]
    for control in controls:
        control.require_comparable(original, suite.concept, texts)


def with_controls(
    evaluation: PromptEvaluation,
    original: Model,
    erased_model: Model,
    controls: Sequence[NeverLearned],
    *,
    cache: Path | None = None,
    progress: Progress = silent,
) -> PromptEvaluation:
    """Measure the gap to retraining of an evaluated model.

    Args:
        evaluation: the evaluation of the erased model against the original.
        original: the original.
        erased_model: the erased model.
        controls: models that never learned the concept, at least one.
        cache: a folder for generated images, in place of the user's cache.
        progress: called as work advances.

    Returns:
        The evaluation with its `control`. The outcomes have the images of the controls, and the
        distance of the predictions for each image.
    """
    suite = evaluation.suite
    judge = suite.build_judge()
    onto_gpu(*(control.model for control in controls))
    stages = ["control" if i == 1 else f"control_{i}" for i in range(1, len(controls) + 1)]
    images_by_stage: dict[str, dict[str, Group]] = {}
    weights = {
        stage: generate.model_fingerprint(control.model)
        for stage, control in zip(stages, controls, strict=True)
    }
    for stage, control in zip(stages, controls, strict=True):
        images_by_stage[stage] = {}
        for name, group in evaluation.groups.items():
            images = generate_group(
                control.model,
                suite,
                name,
                stage,
                cache=cache,
                weights=weights[stage],
                progress=progress,
            )
            images_by_stage[stage][name] = replace(
                group, images={stage: images}, labels={stage: judge.classify(images)}
            )
    predictions = []
    columns: dict[tuple[str, str], np.ndarray] = {}
    for name, group in evaluation.groups.items():
        models = [erased_model, original, *(control.model for control in controls)]
        row, distances = _prediction_row(suite, group, models)
        predictions.append(row)
        columns |= {(name, stage): values for stage, values in distances.items()}
    comparison = _Comparison(evaluation, judge, images_by_stage)
    results, distances_of_images = comparison.measure()
    rows = [_with_distance(row, columns) for row in evaluation.outcomes]
    for stage in stages:
        for name, group in images_by_stage[stage].items():
            rows += outcomes.rows_of_group(
                group,
                judge,
                comparison.concept,
                seeds=group_seeds(suite, name, group.prompts),
                models={stage: weights[stage]},
                results=(),
            )
    gap = RetrainingGap(
        models=[
            f"{control.model.source} ({weights[stage]})"
            for stage, control in zip(stages, controls, strict=True)
        ],
        records=[dict(control.record) for control in controls],
        predictions=predictions,
        results=results,
        distances=distances_of_images,
        refused=comparison.refused,
    )
    return replace(evaluation, control=gap, outcomes=rows)


def _with_distance(
    row: Mapping[str, Any], columns: Mapping[tuple[str, str], np.ndarray]
) -> dict[str, Any]:
    value = columns[row["group"], row["stage"]][row["position"]]
    return {**row, DISTANCE: float(f"{value:.6g}")}


@torch.no_grad()
def predict(model: Model, latents: Tensor, prompts: Sequence[str], *, seed: int) -> Tensor:
    """Return a model's predictions for noised latents, on the CPU.

    Args:
        model: the model, which encodes the prompts itself.
        latents: [n, c, h, w].
        prompts: the prompt of each image, [n].
        seed: of the noise.

    Returns:
        The predictions at each of `LEVELS`, [levels, n, c, h, w].
    """
    generator = torch.Generator().manual_seed(seed)
    condition = model.encode(prompts).to(model.device)
    clean = latents.to(model.device)
    predictions = []
    for level in LEVELS:
        noise = torch.randn(latents.shape, generator=generator).to(clean)
        t = torch.full((len(clean),), round(level * model.timesteps), device=clean.device)
        predictions.append(model.denoise(model.corrupt(clean, noise, t), t, condition).cpu())
    return torch.stack(predictions)


def predict_group(
    suite: Suite,
    name: str,
    images: Tensor,
    *,
    texts: Sequence[str],
    original: Model,
    models: Sequence[Model],
) -> Iterator[list[Tensor]]:
    """Yield the predictions of several models for the images of a group, batch by batch.

    Args:
        suite: the suite, with the seed of the noise and the size of a batch.
        name: the name of the group.
        images: [n, h, w, 3] uint8.
        texts: the prompt of each image, [n].
        original: the model whose VAE encodes the images.
        models: the models that predict.

    Yields:
        For each batch the predictions of each model, [levels, images, c, h, w].
    """
    for start in range(0, len(texts), suite.sampling.batch_size):
        part = slice(start, start + suite.sampling.batch_size)
        pixels = images[part].permute(0, 3, 1, 2).float().div(127.5).sub(1)
        latents = original.encode_images(pixels)
        seed = derive_seed(suite.seed, "gap", name, start)
        yield [predict(model, latents, texts[part], seed=seed) for model in models]


def _prediction_row(
    suite: Suite, group: Group, models: Sequence[Model]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the distances of the predictions on one group, and those of each image by stage.

    models: the erased model, the original, and the controls.
    """
    erased_model, original, *controls = models
    texts = [prompt.text for prompt in group.prompts]
    to_controls: dict[str, list[np.ndarray]] = {"after": [], "before": []}
    between: list[np.ndarray] = []
    for predictions in predict_group(
        suite,
        group.name,
        group.images["before"],
        texts=texts,
        original=original,
        models=models,
    ):
        others = predictions[2:]
        for stage, prediction in zip(("after", "before"), predictions[:2], strict=True):
            to_controls[stage].append(mean_distance((prediction, other) for other in others))
        if len(controls) > 1:
            between.append(mean_distance(combinations(others, 2)))
    erased, unchanged = (np.concatenate(to_controls[stage]) for stage in ("after", "before"))
    seeds = np.concatenate(between) if between else None
    row = {
        "group": group.name,
        "role": group.role,
        "time_steps": [round(level * erased_model.timesteps) for level in LEVELS],
        "erased": mean_with_interval(erased),
        "original": mean_with_interval(unchanged),
        "between_controls": None if seeds is None else mean_with_interval(seeds),
        "relative_to_original": _ratio(erased, unchanged),
        "relative_to_controls": None if seeds is None else _ratio(erased, seeds),
    }
    return row, {"after": erased, "before": unchanged}


def mean_with_interval(distances: np.ndarray) -> dict[str, Any]:
    """Return the mean of distances [n] with its interval, which is empty where all are equal."""
    # without a finite limit, distances of zero would have the interval of counts
    return asdict(mean_interval(distances, 0.0, sys.float_info.max))


def mean_distance(pairs: Iterable[tuple[Tensor, Tensor]]) -> np.ndarray:
    """Return for each image the mean squared difference of predictions, over levels and pairs."""
    values = [(one - other).double().square().mean((0, 2, 3, 4)) for one, other in pairs]
    result: np.ndarray = torch.stack(values).mean(0).numpy()
    return result


def _ratio(values: np.ndarray, reference: np.ndarray) -> dict[str, Any] | None:
    """Return the geometric mean of the ratios of two distances [n], with its interval.

    It is the interval of the mean logarithm (Student). None where a distance is zero.
    """
    if not (values > 0).all() or not (reference > 0).all():
        return None
    mean = mean_interval(np.log(values / reference))
    return asdict(
        Interval(math.exp(mean.value), math.exp(mean.low), high=math.exp(mean.high), n=mean.n)
    )


class _Comparison:
    """The metrics of a suite, between the images of two models.

    The models are named "before", "after", and the stages of the controls.
    """

    def __init__(
        self,
        evaluation: PromptEvaluation,
        judge: Judge,
        controls: Mapping[str, Mapping[str, Group]],
    ) -> None:
        self.suite, self.judge = evaluation.suite, judge
        ((attribute, value),) = self.suite.concept.items()
        self.concept = (attribute, value)
        self.groups = evaluation.groups
        self.controls = controls
        self.refused: dict[str, str] = {}

    def measure(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the results against each control, and the distances of images."""
        results: list[dict[str, Any]] = []
        distances: list[dict[str, Any]] = []
        for entry in self.suite.metrics:
            instance = metric(entry)
            for number, stage in enumerate(self.controls):
                if isinstance(instance, FID):
                    fid = replace(instance, reference="before")
                    distances += self._distances(fid, number, stage)
                else:
                    rows = self._measure(instance, stage, "after")
                    results += [{"control": number, **row.as_dict()} for row in rows]
        return results, distances

    def _distances(self, fid: FID, number: int, stage: str) -> list[dict[str, Any]]:
        """Return the distances of the images of all other models from those of a control."""
        others = [name for name in self.controls if name != stage]
        values = {
            name: {(row.metric, row.group): row.after for row in self._measure(fid, stage, name)}
            for name in ("after", "before", *others)
        }
        return [
            {
                "control": number,
                "metric": metric_name,
                "group": group,
                "erased": asdict(erased),
                "original": asdict(values["before"][metric_name, group]),
                "between_controls": _mean_value(
                    [values[name][metric_name, group] for name in others]
                ),
            }
            for (metric_name, group), erased in values["after"].items()
        ]

    def _measure(self, instance: Metric, before: str, after: str) -> Sequence[Result]:
        groups = {
            name: replace(
                group,
                images={"before": self._images(before, name), "after": self._images(after, name)},
                labels={"before": self._labels(before, name), "after": self._labels(after, name)},
            )
            for name, group in self.groups.items()
        }
        try:
            return instance.measure(Evidence(groups, self.concept, self.judge, self.suite.seed))
        except UserError as error:
            self.refused[instance.result_prefix()] = str(error)
            return list(getattr(error, "results", ()))  # a metric may be refused in part

    def _images(self, stage: str, name: str) -> Tensor:
        return self._group(stage, name).images[stage]

    def _labels(self, stage: str, name: str) -> Mapping[str, np.ndarray]:
        return self._group(stage, name).labels[stage]

    def _group(self, stage: str, name: str) -> Group:
        return self.controls[stage][name] if stage in self.controls else self.groups[name]


def _mean_value(intervals: Sequence[Interval]) -> dict[str, Any] | None:
    """Return an interval, or the mean of several without bounds, or None for none."""
    if len(intervals) < 2:
        return asdict(intervals[0]) if intervals else None
    value = sum(interval.value for interval in intervals) / len(intervals)
    return asdict(Interval(value, math.nan, high=math.nan, n=intervals[0].n))
