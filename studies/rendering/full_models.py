"""The page of the study `full_models`: trainings of the bundled UNet on the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from concept_eraser.evaluation.statistics import Interval
from studies.full_models import NEVER_LEARNED
from studies.rendering.common import notes, share, source, table
from studies.result_tables import Content, Results

STUDY = "full_models"
FIRST = "seed 0"  # the bundled model
GROUPS = ("direct", "synonyms", "neighbours", "retained", "unseen")


def page() -> str:
    """Return eval/results/full_models.md."""
    contents = dict(Results(STUDY))
    environment = next(iter(contents.values()))["environment"]
    return "\n".join(
        [
            "# Trainings of the same data",
            "",
            source(STUDY, "python -m studies.full_models studies/configs/full_models.yaml") + ".",
            "The models of seeds 1 and 2 were trained by `python -m concept_eraser.tiny.build "
            "--unet-only --seed 1` and `--seed 2`.",
            "",
            notes(STUDY).strip(),
            "",
            "## Images",
            "",
            "Rates in percent, with 95 % intervals over the images (Wilson).",
            "",
            _image_table(contents),
            "",
            "## What the models that never learned a concept draw for it",
            "",
            "The images by what the judge sees.",
            "",
            _drawn_table(contents),
            "",
            "## Noise predictions",
            "",
            "The mean squared difference of two models' predictions, times 1000. A mean over "
            "pairs of models stands with the smallest and the largest of them. The stored results "
            "have the interval of each pair over the images.",
            "",
            _distance_table(contents),
            "",
            f"Commit {str(environment['commit'])[:12]}; torch {environment['versions']['torch']}.",
            "",
        ]
    )


def _image_table(contents: Mapping[str, Content]) -> str:
    models = next(iter(contents.values()))["sources"]
    rows = [["suite", "prompts", "metric", *models, "largest difference of full models, points"]]
    for concept, content in contents.items():
        for same_metric in zip(*content["results"].values(), strict=True):
            row = same_metric[0]
            is_rate = row["metric"].endswith("_rate") or row["metric"].startswith("accuracy_")
            if row["group"] not in GROUPS or not is_rate or row["before"] is None:
                continue
            rates = [Interval(**row["before"])]
            rates += [Interval(**other["after"]) for other in same_metric]
            full = [
                rate.value
                for rate, model in zip(rates, models, strict=True)
                if model != NEVER_LEARNED
            ]
            rows.append(
                [
                    concept,
                    row["group"],
                    row["metric"].replace("_", " "),
                    *map(share, rates),
                    f"{100 * (max(full) - min(full)):.1f}",
                ]
            )
    return table(rows)


def _drawn_table(contents: Mapping[str, Content]) -> str:
    rows = [["suite", "prompts", "images", "drawn"]]
    for concept, content in contents.items():
        for group, counts in content["drawn"].items():
            values = ", ".join(f"{value} {count}" for value, count in counts.items())
            rows.append([concept, group, str(sum(counts.values())), values])
    return table(rows)


def _distance_table(contents: Mapping[str, Content]) -> str:
    rows = [
        [
            "suite",
            "prompts",
            "two full models",
            "seed 0 and never learned",
            "other full models and never learned",
            "two full models / seed 0 and never learned",
        ]
    ]
    for concept, content in contents.items():
        for prediction in content["predictions"]:
            full: list[float] = []
            first: list[float] = []
            others: list[float] = []
            for pair in prediction["pairs"]:
                kind = full
                if NEVER_LEARNED in pair["models"]:
                    kind = first if FIRST in pair["models"] else others
                kind.append(1000 * pair["distance"]["value"])
            rows.append(
                [
                    concept,
                    prediction["group"],
                    *map(_mean_and_range, (full, first, others)),
                    f"{fmean(full) / fmean(first):.2f}",
                ]
            )
    return table(rows)


def _mean_and_range(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


PAGES = {STUDY: page}
