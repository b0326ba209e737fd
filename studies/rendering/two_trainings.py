"""The page of the study `two_trainings`: two trainings of the same data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concept_eraser.evaluation.statistics import Interval
from studies.rendering.common import notes, share, source, table
from studies.result_tables import Content, Results

STUDY = "two_trainings"
GROUPS = ("direct", "synonyms", "neighbours", "retained", "unseen")


def page() -> str:
    """Return eval/results/two_trainings.md."""
    contents = dict(Results(STUDY))
    environment = next(iter(contents.values()))["environment"]
    return "\n".join(
        [
            "# Two trainings of the same data",
            "",
            source(STUDY, "python -m studies.two_trainings studies/configs/two_trainings.yaml")
            + ".",
            "The second model was trained by `python -m concept_eraser.tiny.build --unet-only "
            "--seed 1`.",
            "",
            notes(STUDY).strip(),
            "",
            "## Images",
            "",
            "Rates in percent, with 95 % intervals over the images (Wilson).",
            "",
            _image_table(contents),
            "",
            "## Noise predictions",
            "",
            "The mean squared difference of two models' predictions, times 1000, with its 95 % "
            "interval over the images (Student).",
            "",
            _distance_table(contents),
            "",
            f"Commit {str(environment['commit'])[:12]}; torch {environment['versions']['torch']}.",
            "",
        ]
    )


def _image_table(contents: Mapping[str, Content]) -> str:
    rows = [["suite", "prompts", "metric", "first", "second", "difference, points"]]
    for concept, content in contents.items():
        for row in content["results"]:
            is_rate = row["metric"].endswith("_rate") or row["metric"].startswith("accuracy_")
            if row["group"] not in GROUPS or not is_rate or row["before"] is None:
                continue
            before, after = (Interval(**row[when]) for when in ("before", "after"))
            rows.append(
                [
                    concept,
                    row["group"],
                    row["metric"].replace("_", " "),
                    share(before),
                    share(after),
                    f"{100 * (after.value - before.value):+.1f}",
                ]
            )
    return table(rows)


def _distance_table(contents: Mapping[str, Content]) -> str:
    head = ["suite", "prompts", "first and second", "first and never learned"]
    rows = [[*head, "second and never learned", "first and second / first and never learned"]]
    for concept, content in contents.items():
        for prediction in content["predictions"]:
            by_pair: dict[Any, Interval] = {
                tuple(pair["models"]): Interval(**pair["distance"]) for pair in prediction["pairs"]
            }
            two = by_pair["first", "second"]
            never = [by_pair[name, "never learned"] for name in ("first", "second")]
            rows.append(
                [
                    concept,
                    prediction["group"],
                    *(_in_thousandths(one) for one in (two, *never)),
                    f"{two.value / never[0].value:.2f}",
                ]
            )
    return table(rows)


def _in_thousandths(one: Interval) -> str:
    if one.low is None:  # all values are equal
        return f"{1000 * one.value:.2f}"
    return f"{1000 * one.value:.2f} [{1000 * one.low:.2f}, {1000 * one.high:.2f}]"


PAGES = {STUDY: page}
