"""Tables of an evaluation or an attack against models that never learned the concept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concept_eraser.evaluation.attacks.excess import describe_savings
from concept_eraser.evaluation.base import is_share
from concept_eraser.evaluation.statistics import interval_text
from concept_eraser.reporting.run_results import interval

EXCESS_COLUMNS = ("control", "compared", "erased %", "never learned %", "excess, points", "n")


@dataclass(frozen=True)
class ControlTable:
    """A table of texts."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]]


def gap_tables(gap: Mapping[str, Any]) -> list[ControlTable]:
    """Return the tables of the gap to retraining, from `control` of an evaluation.json.

    They are the distances of noise predictions, the numbers of the suite against each control, and
    the distances of images. A table without rows is left out.
    """
    tables = [
        ControlTable(
            "Distance of noise predictions from the never-learned model",
            (
                "prompts",
                "erased",
                "original",
                "between controls",
                "erased / original",
                "erased / between controls",
            ),
            [
                [
                    f"{row['group']} ({row['role']})",
                    *(_distance(row[key]) for key in ("erased", "original", "between_controls")),
                    *(_ratio(row[f"relative_to_{key}"]) for key in ("original", "controls")),
                ]
                for row in gap["predictions"]
            ],
        ),
        ControlTable(
            "Erased against never learned",
            ("metric", "prompts", "control", "never learned", "erased", "difference", "n"),
            [
                [
                    row["metric"].replace("_", " ") + (" %" if is_share(row["metric"]) else ""),
                    row["group"],
                    str(row["control"] + 1),
                    *(
                        interval_text(interval(row.get(key)), is_share(row["metric"]))
                        for key in ("before", "after", "difference")
                    ),
                    str(row["after"]["n"]),
                ]
                for row in gap["results"]
                if ":" not in row["group"]
            ],
        ),
        ControlTable(
            "Distance of images from those of the never-learned model",
            ("distance", "prompts", "control", "erased", "original", "between controls"),
            [
                [
                    row["metric"].replace("_", " "),
                    row["group"],
                    str(row["control"] + 1),
                    *(
                        interval_text(interval(row[key]), False)
                        for key in ("erased", "original", "between_controls")
                    ),
                ]
                for row in gap["distances"]
            ],
        ),
    ]
    return [table for table in tables if table.rows]


def _distance(values: Mapping[str, Any] | None) -> str:
    value = interval(values)
    if value is None:
        return "-"
    text = f"{value.value:.3g}"
    return text if value.low != value.low else f"{text} [{value.low:.3g}, {value.high:.3g}]"


def _ratio(values: Mapping[str, Any] | None) -> str:
    value = interval(values)
    if value is None:
        return "-"
    text = f"{value.value:.2f}"
    return text if value.low != value.low else f"{text} [{value.low:.2f}, {value.high:.2f}]"


def points_text(values: Mapping[str, Any]) -> str:
    """Write a difference of rates in percentage points with its interval."""
    text = f"{100 * values['value']:+.1f}"
    if values.get("low") is not None:
        text += f" [{100 * values['low']:+.1f}, {100 * values['high']:+.1f}]"
    return text


def excess_rows(attack: Mapping[str, Any]) -> list[list[str]]:
    """Return the excess recovery of an attack, from an attack.json. Empty without a control.

    The cells are those of EXCESS_COLUMNS. What is compared is "attack success", or "worst case" and
    the families of a cascade.
    """
    rows = []
    for control in attack.get("control", {}).get("models", ()):
        title = "worst case" if "families" in attack else "attack success"
        comparisons = {title: control["excess"].get("asr"), **control.get("families", {})}
        for name, values in comparisons.items():
            if values is not None:
                difference = values["difference"]
                rates = [
                    interval_text(interval(values[key]), True) for key in ("victim", "control")
                ]
                excess = points_text(difference)
                rows.append([control_name(control), name, *rates, excess, str(difference["n"])])
    if mean := attack.get("control", {}).get("excess_over_controls"):
        seeds = f"{mean['seeds']} controls"
        rows.append([seeds, "mean over controls", "-", "-", points_text(mean), str(mean["n"])])
    return rows


def savings_rows(attack: Mapping[str, Any]) -> list[list[str]]:
    """Return the relearning savings of an attack, from an attack.json. Empty without a control.

    The cells are the control's name, and the ratio with the censored prompts. In a cascade the
    attack stands before the ratio.
    """
    return [
        [
            control_name(control),
            f"{name}: {describe_savings(savings)}"
            if "stages" in attack
            else describe_savings(savings),
        ]
        for control in attack.get("control", {}).get("models", ())
        for name, savings in control.get("savings", {}).items()
    ]


def control_name(control: Mapping[str, Any]) -> str:
    """Return the name of a control without the fingerprint of its weights."""
    return Path(str(control["model"]).rsplit(" (", 1)[0]).name
