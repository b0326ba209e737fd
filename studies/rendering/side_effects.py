"""The page of the study `side_effects`: its summaries, computed from the stored labels, and its
figures.

All intervals are 95 %. Shares have Wilson intervals. Differences are paired: the images before and
after have the same prompts and seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from concept_eraser.concepts.bundled import VALUES as BY_ATTRIBUTE
from concept_eraser.evaluation.seed_statistics import holm
from concept_eraser.evaluation.statistics import (
    Interval,
    mcnemar,
    mean_interval,
    paired_difference,
    wilson,
)
from studies.rendering.common import notes, share, source, table
from studies.rendering.figures import Figure, canvas
from studies.result_tables import STUDIES, Content, Results, figure_path

STUDY = "side_effects"
COMMAND = f"python -m studies.side_effects studies/configs/{STUDY}.yaml"
ATTRIBUTE = {value: name for name, values in BY_ATTRIBUTE.items() for value in values}
ENDS = ("value", "low", "high")
LEVEL = 0.05  # of a p-value after Holm's correction
# UnlearnCanvas's styles and objects, and here the other of the two for each
CROSS_DOMAINS = {"style": "shape", "shape": "style"}
# A loss has less blue than red and green, a gain has more. So red-green colour blindness keeps the
# difference, and each cell has its number with a sign.
DIVERGING, SEQUENTIAL = "PuOr", "cividis"
LIMIT = 30  # points at the ends of the diverging palette


@dataclass(frozen=True)
class Cell:
    """The accuracy of one value before and after one concept was erased.

    Attributes:
        erased: The erased concept.
        measured: The value. Its images are those whose prompts do not state the erased concept. If
            it is the erased concept itself, they are all images of its prompts.
        before: The accuracy of the untouched model, a share with its interval.
        after: The accuracy after the erasure.
        change: The paired difference, after minus before.
        p: The p-value of "no change", by McNemar's exact test, without a correction.
    """

    erased: str
    measured: str
    before: Interval
    after: Interval
    change: Interval
    p: float


def original_key(part: str) -> str:
    """Return the key of the untouched model's result."""
    return f"original_{part}"


def matrix_key(way: str, concept: str) -> str:
    """Return the key of a concept that a method erased alone."""
    return f"matrix_{way}_{concept}"


def sequence_key(way: str, number: int, concept: str) -> str:
    """Return the key of a run of a sequence."""
    return f"sequence_{way}_{number:02d}_{concept}"


def at_once_key(way: str) -> str:
    """Return the key of a run that erased the concepts of the sequence at once."""
    return f"at_once_{way}"


def hits(
    original: Content,
    result: Content,
    value: str,
    *,
    attribute: str | None = None,
    without: Sequence[str] = (),
    with_value: str | None = None,
) -> np.ndarray:
    """Return which images of a value match their prompts.

    Args:
        original: The result of the untouched model, which has the prompts.
        result: The result of a model on these prompts.
        value: The value whose images are counted.
        attribute: The attribute that is compared. Default: that of the value.
        without: Values that no counted prompt states.
        with_value: A value that every counted prompt states.

    Returns:
        Whether the judge's label is the prompt's value, [images] bool.

    Raises:
        ValueError: The two results have other prompts, images or judges.
    """
    for key in ("prompts_hash", "image_seed", "sampling", "judge"):
        if original["settings"][key] != result["settings"][key]:
            raise ValueError(f"the two results differ in {key}; measure the older one again")
    name = attribute or ATTRIBUTE[value]
    return np.array(
        [
            label == prompt[name]
            for prompt, label in zip(
                original["prompts"][value], result["predicted"][value][name], strict=True
            )
            if not {prompt[one] for one in BY_ATTRIBUTE} & set(without)
            and (with_value is None or with_value in (prompt[one] for one in BY_ATTRIBUTE))
        ],
        bool,
    )


def rate(correct: np.ndarray) -> Interval:
    """Return the share of a boolean array with its Wilson interval."""
    return wilson(int(correct.sum()), len(correct))


def cell(original: Content, result: Content, measured: str) -> Cell | None:
    """Return the cell of an erased concept and a measured value.

    Args:
        original: The result of the untouched model.
        result: The result of `matrix_key`.
        measured: The value.

    Returns:
        The cell; None where fewer than two images count.

    Raises:
        ValueError: As `hits`.
    """
    erased = result["concept"]
    without = () if measured == erased else (erased,)
    before = hits(original, original, measured, without=without)
    after = hits(original, result, measured, without=without)
    if len(before) < 2:
        return None
    return Cell(
        erased,
        measured,
        before=rate(before),
        after=rate(after),
        change=paired_difference(before, after),
        p=mcnemar(before, after),
    )


def matrix(results: Mapping[str, Content], way: str) -> list[Cell]:
    """Return the cells of a method, by erased concept and measured value.

    Erased concepts without a result are left out, and cells with fewer than two images.
    """
    cells = [
        cell(results[original_key("matrix")], results[key], measured)
        for erased in ATTRIBUTE
        if (key := matrix_key(way, erased)) in results
        for measured in ATTRIBUTE
    ]
    return [one for one in cells if one is not None]


def significant(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of other values with a change, with Holm's correction for all of them."""
    others = [one for one in cells if one.measured != one.erased]
    corrected = holm([one.p for one in others])
    return [one for one, p in zip(others, corrected, strict=True) if p < LEVEL]


def composition(
    original: Content, result: Content, *, with_value: str | None = None
) -> dict[str, tuple[Interval, Interval, Interval]]:
    """Return the accuracy of the other two attributes on the prompts of the erased concept.

    Args:
        original: The result of the untouched model.
        result: The result of `matrix_key`.
        with_value: Count only prompts with this value, e.g. red for an erased star.

    Returns:
        By attribute: before, after, and their paired difference.

    Raises:
        ValueError: As `hits`.
        UserError: There are fewer than two such prompts.
    """
    erased = result["concept"]
    rows = {}
    for name in BY_ATTRIBUTE:
        if name == ATTRIBUTE[erased]:
            continue
        before, after = (
            hits(original, one, erased, attribute=name, with_value=with_value)
            for one in (original, result)
        )
        rows[name] = (rate(before), rate(after), paired_difference(before, after))
    return rows


def lowest(original: Content, result: Content, name: str) -> tuple[str, Interval]:
    """Return the value of an attribute that is worst kept on the erased concept's prompts.

    Values with fewer than two prompts are left out.
    """
    prompts = original["prompts"][result["concept"]]
    values = [one for one in BY_ATTRIBUTE[name] if sum(p[name] == one for p in prompts) > 1]
    rows = {one: composition(original, result, with_value=one)[name][1] for one in values}
    worst = min(rows, key=lambda one: rows[one].value)
    return worst, rows[worst]


def canvas_numbers(original: Content, result: Content) -> tuple[float, float, float]:
    """Return UA, IRA and CRA of UnlearnCanvas (arXiv 2402.11846) for one erased style or shape.

    UA is the share of the concept's images without it. IRA and CRA count images whose prompts do
    not state the concept: IRA the other values of its attribute, CRA all values of the other
    attribute, see `CROSS_DOMAINS`.

    Args:
        original: The result of the untouched model, which has the prompts.
        result: The result of `matrix_key`, or the original with a `concept`.

    Raises:
        KeyError: The concept is a colour.
        ValueError: As `hits`.
    """
    erased = result["concept"]
    cross = CROSS_DOMAINS[ATTRIBUTE[erased]]
    retained = [
        np.concatenate(
            [
                hits(original, result, value, without=(erased,))
                for value in BY_ATTRIBUTE[name]
                if value != erased
            ]
        )
        for name in (ATTRIBUTE[erased], cross)
    ]
    ua = 1 - hits(original, result, erased).mean()
    return float(ua), float(retained[0].mean()), float(retained[1].mean())


def sequence(results: Mapping[str, Content], way: str) -> list[Content]:
    """Return the results of a method's sequence in its order, without those after a gap.

    Raises:
        ValueError: A run did not begin with the weights at the end of the run before.
    """
    runs = {
        run["number"]: run
        for run in results.values()
        if run["part"] == "sequence" and run.get("method") == way and "number" in run
    }
    rows: list[Content] = []
    while (number := len(rows) + 1) in runs:
        run = runs[number]
        if rows and run["weights"]["start"] != rows[-1]["weights"]["end"]:
            raise ValueError(
                f"run {number} of the sequence {way!r} did not begin with the weights of run "
                f"{number - 1}; remove its result and run the study again"
            )
        rows.append(run)
    return rows


def concept_rates(original: Content, runs: Sequence[Content]) -> list[list[Interval]]:
    """Return the concept rates of a sequence.

    The row of a run has the rates after it, of all concepts that were erased up to it, in order.
    """
    return [
        [rate(hits(original, run, one["concept"])) for one in runs[: place + 1]]
        for place, run in enumerate(runs)
    ]


def returns(original: Content, runs: Sequence[Content]) -> list[tuple[str, int, Interval]]:
    """Return the concepts that a later run brought back.

    Each concept's images after a later run are compared with those after its own run. The test is
    McNemar's, with Holm's correction for all pairs of runs.

    Returns:
        The concept, the number of the later run, and the paired difference of the concept rates.
    """
    rows, p_values = [], []
    for place, own in enumerate(runs):
        concept = own["concept"]
        first = hits(original, own, concept)
        for later in runs[place + 1 :]:
            now = hits(original, later, concept)
            rows.append((concept, later["number"], paired_difference(first, now)))
            p_values.append(mcnemar(first, now))
    corrected = holm(p_values)
    return [row for row, p in zip(rows, corrected, strict=True) if p < LEVEL and row[2].value > 0]


def never_erased(original: Content, run: Content) -> dict[str, np.ndarray]:
    """Return which images of the values that a sequence never erases match their prompts.

    Args:
        original: The result of the untouched model on the sequence's prompts, which states the
            concepts of the sequence as `without`.
        run: A result of the sequence, or the original.

    Returns:
        By attribute, [images] bool: the images of the attribute's values.
    """
    return {
        name: np.concatenate(
            [hits(original, run, value) for value in values if value not in original["without"]]
        )
        for name, values in BY_ATTRIBUTE.items()
    }


def _points(interval: Interval) -> str:
    """Return a difference and its interval as text, in points."""
    value, low, high = (100 * getattr(interval, end) for end in ENDS)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _cell_table(cells: Sequence[Cell], labels: Mapping[str, str], ways: Sequence[str]) -> str:
    rows = [["method", "erased", "measured", "n", "before, %", "after, %", "change, points"]]
    for one, way in zip(cells, ways, strict=True):
        numbers = [share(one.before), share(one.after), _points(one.change)]
        rows.append([labels[way], one.erased, one.measured, str(one.change.n), *numbers])
    return table(rows)


def _summary_table(cells: Mapping[str, list[Cell]], labels: Mapping[str, str]) -> str:
    """Return the mean change of a method: of the erased concept, its attribute and the others."""
    head = ["method", "concepts", "the concept itself", "its attribute", "other attributes"]
    rows = [[*head, "largest loss", "significant changes"]]
    for way, all_cells in cells.items():
        others = [one for one in all_cells if one.measured != one.erased]
        same = {
            is_same: [
                one.change.value
                for one in others
                if (ATTRIBUTE[one.measured] == ATTRIBUTE[one.erased]) is is_same
            ]
            for is_same in (True, False)
        }
        own = [one.change.value for one in all_cells if one.measured == one.erased]
        worst = min(others, key=lambda one: one.change.value)
        means = [f"{100 * float(np.mean(group)):+.1f}" for group in (own, same[True], same[False])]
        loss = f"{worst.measured}, erased {worst.erased}: {_points(worst.change)}"
        count = f"{len(significant(all_cells))} of {len(others)}"
        rows.append([labels[way], str(len(own)), *means, loss, count])
    return table(rows)


def _composition_table(results: Mapping[str, Content], labels: Mapping[str, str]) -> str:
    head = ["method", "erased", "attribute", "n", "before, %", "after, %", "change, points"]
    rows = [[*head, "lowest value after, %"]]
    original = results[original_key("matrix")]
    for way, label in labels.items():
        for erased in ATTRIBUTE:
            if (key := matrix_key(way, erased)) not in results:
                continue
            for name, (before, after, change) in composition(original, results[key]).items():
                value, interval = lowest(original, results[key], name)
                numbers = [share(before), share(after), _points(change)]
                worst = f"{value}: {share(interval)}"
                rows.append([label, erased, name, str(change.n), *numbers, worst])
    return table(rows)


def _canvas_table(results: Mapping[str, Content], labels: Mapping[str, str]) -> str:
    """Return UA, IRA and CRA of each method, as means over its erased styles and shapes."""
    original = results[original_key("matrix")]
    rows = [["method", "erased", "concepts", "UA, %", "IRA, %", "CRA, %"]]
    for domain in CROSS_DOMAINS:
        untouched = [{**original, "concept": value} for value in BY_ATTRIBUTE[domain]]
        models = {
            "not erased": untouched,
            **{
                label: [
                    results[key]
                    for one in BY_ATTRIBUTE[domain]
                    if (key := matrix_key(way, one)) in results
                ]
                for way, label in labels.items()
            },
        }
        for label, contents in models.items():
            if len(contents) < 2:
                continue
            numbers = np.array([canvas_numbers(original, one) for one in contents])
            cells = [share(mean_interval(column, 0, 1)) for column in numbers.T]
            rows.append([label, f"one {domain}", str(len(contents)), *cells])
    return table(rows) if len(rows) > 1 else ""


def _sequence_table(original: Content, runs: Sequence[Content]) -> str:
    head = ["run", "erased", "s", "its concept rate, %", "all erased so far, %", "highest, %"]
    rows = [[*head, *(f"{name}, never erased, %" for name in BY_ATTRIBUTE)]]
    first = [share(rate(one)) for one in never_erased(original, original).values()]
    rows.append(["0", "none", "", "", "", "", *first])
    for run, rates in zip(runs, concept_rates(original, runs), strict=True):
        correct = [hits(original, run, one["concept"]) for one in runs[: run["number"]]]
        worst = max(range(len(rates)), key=lambda place: rates[place].value)
        highest = f"{runs[worst]['concept']}: {share(rates[worst])}"
        others = [share(rate(one)) for one in never_erased(original, run).values()]
        numbers = [share(rates[-1]), share(rate(np.concatenate(correct))), highest]
        rows.append(
            [str(run["number"]), run["concept"], f"{run['seconds']:.0f}", *numbers, *others]
        )
    return table(rows)


def _return_lines(original: Content, runs: Sequence[Content]) -> str:
    rows = returns(original, runs)
    if not rows:
        return "No earlier concept returned significantly."
    listing = "; ".join(f"{name} after run {number}: {_points(d)}" for name, number, d in rows)
    return f"These concept rates rose significantly after the concept's own run: {listing}."


def _matrix_part(results: Mapping[str, Content], labels: Mapping[str, str]) -> Iterator[str]:
    """Yield the paragraphs about concepts that are erased alone."""
    cells = {way: rows for way in labels if (rows := matrix(results, way))}
    if not cells:
        return
    yield "## Each concept alone"
    yield """The accuracy of a value is the share of its images with the judge's label equal to the
value. Prompts that state the erased concept are left out. Changes are in points. The mean changes
are those of the erased concept itself, of other values of its attribute, and of the values of other
attributes."""
    yield _summary_table(cells, labels)
    yield f"![erased by measured]({STUDY}.matrix.svg)"
    pairs = [(way, one) for way, rows in cells.items() for one in significant(rows)]
    if pairs:
        yield (
            "Significant changes of other values: McNemar's exact test, with Holm's correction for "
            "the cells of a method. The figure has a frame around them."
        )
        yield _cell_table([one for _, one in pairs], labels, [way for way, _ in pairs])
    else:
        yield "No other value changes significantly (McNemar's exact test, Holm's correction)."
    yield f"All cells with their intervals: `{COMMAND} --cells`."
    yield "## Composition of two attributes"
    yield """The prompts state the erased concept. The table has the accuracy of the other two
attributes on them, and the value of the attribute that is kept worst."""
    yield _composition_table(results, labels)
    yield "## UnlearnCanvas's numbers"
    yield """Shapes take the place of UnlearnCanvas's objects (arXiv 2402.11846); colours are left
out. UA is the share of the concept's images without the concept. IRA is the accuracy of the other
values of its attribute, and CRA that of the other attribute, both on prompts without the concept.
Each is a mean over erased concepts; its interval, Student's, takes the concept as the unit.
Values that are all alike have no interval."""
    yield _canvas_table(results, labels)


def _sequence_part(results: Mapping[str, Content], labels: Mapping[str, str]) -> Iterator[str]:
    """Yield the paragraphs about concepts that are erased one after the other."""
    rows = {way: runs for way in labels if (runs := sequence(results, way))}
    if not rows:
        return
    original = results[original_key("sequence")]
    yield "## One after the other"
    yield """Each run begins with the pipeline of the run before. A concept rate is the share of
images with the concept on prompts that name it; 100 minus it is UnlearnCanvas's UA. The last
columns have the accuracy of the values that are never erased. The column s has the seconds of the
run's training."""
    for way, runs in rows.items():
        yield f"### {labels[way]}"
        yield _sequence_table(original, runs)
        yield _return_lines(original, runs)
    yield f"![concept rates]({STUDY}.sequence.svg)"


def _at_once_part(
    results: Mapping[str, Content], labels: Mapping[str, str], concepts: Sequence[str]
) -> Iterator[str]:
    """Yield the paragraphs about concepts that are erased by one run."""
    runs = {way: run for way in labels if (run := results.get(at_once_key(way)))}
    if not runs:
        return
    original = results[original_key("sequence")]
    yield f"## {len(concepts)} concepts at once"
    yield """One run erases the concepts of the sequence. The prompts are those of the sequence, so
the rows can be compared with its last ones."""
    head = ["method", "s", "concept rate of all, %", "highest, %"]
    rows = [[*head, *(f"{name}, never erased, %" for name in BY_ATTRIBUTE)]]
    models = [("the original", "", original)]
    models += [(labels[way], f"{run['seconds']:.0f}", run) for way, run in runs.items()]
    for label, seconds, run in models:
        correct = {one: hits(original, run, one) for one in concepts}
        worst = max(correct, key=lambda one: correct[one].mean())
        highest = f"{worst}: {share(rate(correct[worst]))}"
        erased = share(rate(np.concatenate(list(correct.values()))))
        others = [share(rate(one)) for one in never_erased(original, run).values()]
        rows.append([label, seconds, erased, highest, *others])
    yield table(rows)


def page() -> str:
    """Return eval/results/side_effects.md."""
    study = yaml.safe_load((STUDIES / f"{STUDY}.yaml").read_text())
    results = dict(Results(STUDY))
    labels = {way: entry["label"] for way, entry in study["methods"].items()}
    parts = [
        *_matrix_part(results, labels),
        *_sequence_part(results, labels),
        *_at_once_part(results, labels, study["sequence"]),
    ]
    environments = [content["environment"] for content in results.values()]
    commits = sorted({str(environment["commit"])[:12] for environment in environments})
    versions = sorted({str(environment["versions"]["torch"]) for environment in environments})
    devices = sorted({str(environment["device"]) for environment in environments})
    settings = next(iter(results.values()))["settings"]
    body = "\n\n".join(parts)
    return f"""# {study["title"]}

{source(STUDY, COMMAND)}. {study["about"].strip()}
The judge is {settings["judge"]}. Each run has the training seed {settings["seed"]}. Intervals are
95 %: Wilson's for shares, paired for differences. They do not cover the choice of the training
seed.

{notes(STUDY)}

{body}

Commits {", ".join(commits)}; torch {", ".join(versions)}; {", ".join(devices)}.
"""


def plot_matrix(cells: Mapping[str, Sequence[Cell]]) -> Any:
    """Draw the changes as heat maps, one for each label: rows are erased, columns are measured.

    Args:
        cells: The cells of each method, by its label.
    """
    heights = [1.6 + 0.42 * len({one.erased for one in rows}) for rows in cells.values()]
    figure = canvas(13, sum(heights))
    all_axes = figure.subplots(
        len(cells), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axes, (label, rows) in zip(all_axes, cells.items(), strict=True):
        erased = list(dict.fromkeys(one.erased for one in rows))
        measured = list(dict.fromkeys(one.measured for one in rows))
        changes = np.full((len(erased), len(measured)), np.nan)
        framed = {(one.erased, one.measured) for one in significant(rows)}
        for one in rows:
            changes[erased.index(one.erased), measured.index(one.measured)] = 100 * one.change.value
        image = axes.imshow(changes, cmap=DIVERGING, vmin=-LIMIT, vmax=LIMIT, aspect="auto")
        for row, column in np.ndindex(*changes.shape):
            value = float(changes[row, column])
            if np.isnan(value):  # fewer than two images
                continue
            is_dark = abs(value) > 0.6 * LIMIT
            is_framed = (erased[row], measured[column]) in framed
            axes.text(
                column,
                row,
                f"{value:+.0f}" if round(value) else "0",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if is_dark else "black",
                bbox={"fill": False, "lw": 0.9, "pad": 1.5} if is_framed else None,
            )
        axes.set_xticks(range(len(measured)), measured, rotation=60, ha="right")
        axes.set_yticks(range(len(erased)), erased)
        axes.set(xlabel="measured", ylabel="erased", title=label)
        for column in range(1, len(measured)):
            if ATTRIBUTE[measured[column]] != ATTRIBUTE[measured[column - 1]]:
                axes.axvline(column - 0.5, color="0.3", lw=1)
        for row in range(1, len(erased)):
            if ATTRIBUTE[erased[row]] != ATTRIBUTE[erased[row - 1]]:
                axes.axhline(row - 0.5, color="0.3", lw=1)
        figure.colorbar(image, ax=axes, extend="both", label="change of accuracy, points")
    return figure


def plot_sequence(rates: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Interval]]]]) -> Any:
    """Draw the concept rates of sequences as heat maps: rows are concepts, columns are runs.

    Args:
        rates: By label, the concepts in their order and the rows of `concept_rates`.
    """
    figure = canvas(13, sum(1.2 + 0.3 * len(concepts) for concepts, _ in rates.values()))
    all_axes = figure.subplots(len(rates), 1, squeeze=False)[:, 0]
    for axes, (label, (concepts, rows)) in zip(all_axes, rates.items(), strict=True):
        values = np.full((len(concepts), len(rows)), np.nan)
        for column, row in enumerate(rows):
            values[: len(row), column] = [100 * one.value for one in row]
        image = axes.imshow(values, cmap=SEQUENTIAL, vmin=0, vmax=100, aspect="auto")
        for place, column in zip(*np.nonzero(~np.isnan(values)), strict=True):
            value = values[place, column]
            color = "black" if value > 45 else "white"
            axes.text(
                column, place, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color
            )
        axes.set_xticks(range(len(rows)), [f"{i + 1}: {concepts[i]}" for i in range(len(rows))])
        axes.tick_params(axis="x", rotation=30)
        axes.set_yticks(range(len(concepts)), concepts)
        axes.set(xlabel="after run", ylabel="concept rate, %", title=label)
        figure.colorbar(image, ax=axes)
    return figure


def figures() -> dict[Path, Figure]:
    """Return the figures of side_effects.md."""
    results = dict(Results(STUDY))
    if not results:
        return {}
    study = yaml.safe_load((STUDIES / f"{STUDY}.yaml").read_text())
    all_figures: dict[Path, Figure] = {}
    labels = {way: entry["label"] for way, entry in study["methods"].items()}
    cells = {label: rows for way, label in labels.items() if (rows := matrix(results, way))}
    if cells:
        shown = {
            label: [[one.erased, one.measured, one.change.value, one.p] for one in rows]
            for label, rows in cells.items()
        }
        all_figures[figure_path(STUDY, "matrix.svg")] = Figure(shown, partial(plot_matrix, cells))
    rates = {
        label: (
            [run["concept"] for run in runs],
            concept_rates(results[original_key("sequence")], runs),
        )
        for way, label in labels.items()
        if (runs := sequence(results, way))
    }
    if rates:
        content = {
            label: [concepts, [[one.value for one in row] for row in rows]]
            for label, (concepts, rows) in rates.items()
        }
        all_figures[figure_path(STUDY, "sequence.svg")] = Figure(
            content, partial(plot_sequence, rates)
        )
    return all_figures


PAGES = {STUDY: page}
