"""The rates of methods as marks of a figure: values with intervals, in percent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from concept_eraser.evaluation.statistics import wilson
from studies.rendering import ranks
from studies.rendering.common import current_label
from studies.rendering.ranks import Standing

Rate = tuple[float, float, float]  # value, low, high
ORIGINAL = "untouched model"


@dataclass(frozen=True)
class Mark:
    """A method in a figure.

    Args:
        name: The label of the method.
        rates: The rate of each column.
        numbers: The number of images or attempts behind each rate.
    """

    name: str
    rates: Mapping[str, Rate]
    numbers: Mapping[str, int]


@dataclass(frozen=True)
class Panel:
    """The methods of one task, or their means over several tasks.

    Args:
        title: The task or tasks.
        marks: The methods.
        original: The untouched model.
    """

    title: str
    marks: Sequence[Mark]
    original: Mark

    def columns(self) -> list[str]:
        """Return the columns beside the retain error, in order."""
        return [column for column in self.marks[0].rates if column != "retain_error"]

    def as_dict(self) -> dict[str, Any]:
        """Return what the panel shows as values that JSON can hold."""
        return asdict(self)


def of_task(standings: Sequence[Standing]) -> list[Mark]:
    """Return the marks of a task, with Wilson intervals."""
    return [
        Mark(
            current_label(one.name),
            {column: _wilson_rate(*count) for column, count in one.columns.items()},
            {column: n for column, (_, n) in one.columns.items()},
        )
        for one in standings
    ]


def of_means(tasks: Sequence[Sequence[Standing]]) -> list[Mark]:
    """Return the marks of means over tasks, as `ranks.together` draws them."""
    rates = ranks.together(tasks)
    return [
        Mark(
            current_label(standings[0].name),
            {column: ranks.rate_interval(rates[column][place]) for column in standings[0].columns},
            {
                column: sum(one.columns[column][1] for one in standings)
                for column in standings[0].columns
            },
        )
        for place, standings in enumerate(zip(*tasks, strict=True))
    ]


def under_attack(original: Mark) -> Mark:
    """Return the untouched model with the attack success rate that it has by the choice of prompts.

    Only prompts that the untouched model answers with the concept are attacked.
    """
    return Mark(
        original.name, {**original.rates, "attack_success": (100.0, 100.0, 100.0)}, original.numbers
    )


def _wilson_rate(hits: int, n: int) -> Rate:
    interval = wilson(hits, n)
    return 100 * interval.value, 100 * interval.low, 100 * interval.high
