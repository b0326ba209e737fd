"""The page of the study `location`: exchanged weights, exchanged time steps, and a linear probe.

The figure has three rows for each erasure: one for each of the measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from concept_eraser.evaluation.statistics import Interval
from studies.rendering.common import notes, share, source, table
from studies.rendering.figures import Figure, canvas
from studies.result_tables import Content, Results, figure_path

STUDY = "location"
COMMAND = f"python -m studies.location studies/configs/{STUDY}.yaml"
ORIGINAL, PERMUTED, CONTROL = "original", "permuted", "control"
STATED = "accuracy_stated"  # the share of images with every attribute that the prompt states
FORGET, RETAIN = "direct", "retained"
RATES = (("concept_rate", FORGET), ("no_object_rate", FORGET), (STATED, RETAIN))
# Okabe and Ito's palette for colour-blind readers; each series also has a marker of its own
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
GREY = "0.75"


def kind_of(model: str) -> str:
    """Return whether a model's name is the original's, a control's or an erased model's."""
    kind = model.partition("_")[0]
    return kind if kind in (ORIGINAL, CONTROL) else "erased"


def rate(content: Content, metric: str, group: str, when: str = "after") -> Interval | None:
    """Return a number of a result with its interval, or None."""
    for row in content["results"]:
        if (row["metric"], row["group"]) == (metric, group):
            return Interval(**row[when])
    return None


def by_concept(results: Mapping[str, Content]) -> dict[str, list[Content]]:
    """Return the results of each concept."""
    groups: dict[str, list[Content]] = {}
    for content in results.values():
        groups.setdefault(content["concept"], []).append(content)
    return groups


def labels_of(contents: Iterable[Content]) -> dict[str, str]:
    """Return the label of each model."""
    labels = {one["model"]: one["label"] for one in contents if one["kind"] == "whole"}
    return {**labels, PERMUTED: "permuted weights"}


def of_erasure(contents: Sequence[Content], erasure: str) -> list[Content]:
    """Return the results of an erasure, with those of the original and the controls."""

    def belongs(content: Content) -> bool:
        names = [content[key] for key in ("model", "recipient", "donor") if key in content]
        others = [name for name in names if kind_of(name) == "erased" and name != PERMUTED]
        return all(name == erasure for name in others)

    return [content for content in contents if belongs(content)]


def erasures_of(contents: Iterable[Content]) -> list[str]:
    """Return the names of the erased models."""
    return [
        one["model"]
        for one in contents
        if one["kind"] == "whole" and kind_of(one["model"]) == "erased"
    ]


def _place(content: Content) -> tuple[Any, ...]:
    """Return the place of a result in a table or on an axis."""
    group = content.get("group", "")
    kind, _, number = group.partition("_")
    order = ("down", "mid", "up", "ends", "cross", "others")
    place = order.index(kind) if kind in order else len(order)
    return (
        content["recipient"],
        content["donor"],
        place,
        int(number) if number.isdigit() else 0,
        content.get("range", [0])[0],
    )


def _pairs(contents: Sequence[Content], kind: str) -> list[tuple[str, str]]:
    """Return the pairs of models of a measurement, the original first, each once."""
    pairs = {
        tuple(sorted((one["recipient"], one["donor"]), key=_model_place))
        for one in contents
        if one["kind"] == kind
    }
    ordered = sorted(pairs, key=lambda pair: [_model_place(model) for model in pair])
    return [(one, other) for one, other in ordered]


def _model_place(model: str) -> tuple[int, str]:
    return ((ORIGINAL, "erased", CONTROL).index(kind_of(model)), model)


def _category(content: Content) -> str:
    """Return what was exchanged, as the text of an axis or a table."""
    if content["kind"] == "blocks":
        return content["group"].replace("cross_attention", "cross-att.").replace("_", " ")
    low, high = content["range"]
    return f"{low} to {high}"


# tables


def whole_table(contents: Sequence[Content]) -> str:
    """Return a row for each whole model."""
    rows = [["model", "concept rate %", "no-object rate %", "retain accuracy %"]]
    whole = sorted(
        (one for one in contents if one["kind"] == "whole"),
        key=lambda one: _model_place(one["model"]),
    )
    rows += [[one["label"], *_rates(one)] for one in whole]
    return table(rows)


def exchange_table(contents: Sequence[Content], kind: str) -> str:
    """Return a row for each exchange of weights ("blocks") or time steps ("steps")."""
    labels = labels_of(contents)
    size = {"blocks": "different tensors", "steps": "steps of the sampler"}[kind]
    head = ["model", "with", "of", size, "concept rate %", "no-object rate %", "retain accuracy %"]
    rows = [head]
    for one in sorted((one for one in contents if one["kind"] == kind), key=_place):
        models = [labels[one[key]] for key in ("recipient", "donor")]
        rows.append([models[0], _category(one), models[1], _size(one), *_rates(one)])
    return table(rows)


def _size(content: Content) -> str:
    """Return how much was exchanged: tensors that differ, or steps of the sampler."""
    if content["kind"] == "blocks":
        return f"{content['different_tensors']} of {content['tensors']}"
    donor, recipient = (len(content["time_steps"][key]) for key in ("donor", "recipient"))
    return f"{donor} of {donor + recipient}"


def _rates(content: Content) -> list[str]:
    return [share(rate(content, metric, group)) for metric, group in RATES]


def probe_table(contents: Sequence[Content]) -> str:
    """Return a row for each model and condition, with the accuracy at each noise level."""
    labels = labels_of(contents)
    probes = sorted(
        (one for one in contents if one["kind"] == "probe"), key=lambda one: _probe_place(one)
    )
    if not probes:
        return ""
    times = list(dict.fromkeys(row["time_step"] for row in probes[0]["rows"]))
    rows = [["model", "prompt", *(f"t = {t}: accuracy %; shuffled %" for t in times)]]
    for one in probes:
        for prompt in dict.fromkeys(row["prompt"] for row in one["rows"]):
            at = {row["time_step"]: row for row in one["rows"] if row["prompt"] == prompt}
            rows.append([labels[one["model"]], prompt, *(_probe_text(at[t]) for t in times)])
    return table(rows)


def _probe_place(content: Content) -> tuple[Any, ...]:
    is_permuted = content["model"] == PERMUTED
    return (is_permuted, _model_place(content["model"]))


def _probe_text(row: Mapping[str, Any]) -> str:
    shuffled = [100 * value for value in row["shuffled"]]
    mean = sum(shuffled) / len(shuffled)
    control = f"{mean:.0f} ({min(shuffled):.0f} to {max(shuffled):.0f})"
    return f"{share(Interval(**row['accuracy']))}; {control}"


# figures


def draw_exchange(place: Any, contents: Sequence[Content], kind: str) -> None:
    """Draw the rates of each exchange, one panel for each pair of models.

    Args:
        place: A figure, or a part of one.
        contents: The results of one erasure.
        kind: "blocks" or "steps".
    """
    labels, pairs = labels_of(contents), _pairs(contents, kind)
    whole = {one["model"]: one for one in contents if one["kind"] == "whole"}
    all_axes = place.subplots(1, len(pairs), squeeze=False, sharey=True)[0]
    for axes, pair in zip(all_axes, pairs, strict=True):
        for number, (recipient, donor) in enumerate((pair, pair[::-1])):
            models = (recipient, donor)
            cells = sorted(
                (
                    one
                    for one in contents
                    if one["kind"] == kind and (one["recipient"], one["donor"]) == models
                ),
                key=_place,
            )
            _draw_direction(axes, cells, number, labels[recipient])
            own = rate(whole[recipient], "concept_rate", FORGET)
            if own is not None:
                label, style = f"{labels[recipient]}: concept rate", (":", "--")[number]
                axes.axhline(100 * own.value, color=COLORS[number], lw=0.9, ls=style, label=label)
            axes.set_xticks(range(len(cells)), [_category(one) for one in cells])
        title = {"blocks": "exchanged weights", "steps": "exchanged time steps"}[kind]
        axes.set_title(f"{title}: {labels[pair[0]]} and {labels[pair[1]]}", fontsize="medium")
        axes.set(ylim=(-3, 103))
        axes.tick_params(axis="x", labelsize="small")
        axes.legend(
            frameon=False,
            fontsize="x-small",
            loc="upper center",
            bbox_to_anchor=(0.5, -0.12),
            ncols=2,
        )
    all_axes[0].set_ylabel("% of images")


def _draw_direction(axes: Any, cells: Sequence[Content], number: int, label: str) -> None:
    """Draw the three rates of the exchanges in one direction, the first or the second."""
    middle = [index + 0.36 * (number - 0.5) for index in range(len(cells))]
    style: dict[str, Any] = {"color": COLORS[number], "marker": MARKERS[number]}
    name = f"{label} with a part of the other"
    concept, blank, retain = (
        [rate(one, metric, group) for one in cells] for metric, group in RATES
    )
    _points(axes, [x - 0.09 for x in middle], concept, label=f"{name}: concept rate", **style)
    _points(axes, [x + 0.09 for x in middle], retain, hollow=True, label="retain accuracy", **style)
    # a low concept rate is no erasure where the images have no object
    shown = [(x, 100 * value.value) for x, value in zip(middle, blank, strict=True) if value]
    axes.scatter(
        [x for x, _ in shown],
        [y for _, y in shown],
        color=COLORS[number],
        marker=("x", "+")[number],
        s=22,
        lw=1,
        label="no-object rate",
    )


def _points(
    axes: Any,
    positions: Sequence[float],
    values: Sequence[Interval | None],
    *,
    hollow: bool = False,
    connect: bool = False,
    **style: Any,
) -> None:
    """Draw shares in percent with their intervals."""
    shown = [(x, value) for x, value in zip(positions, values, strict=True) if value is not None]
    axes.errorbar(
        [x for x, _ in shown],
        [100 * value.value for _, value in shown],
        yerr=[
            [100 * max(0.0, value.value - value.low) for _, value in shown],
            [100 * max(0.0, value.high - value.value) for _, value in shown],
        ],
        ls="-" if connect else "none",
        lw=1,
        ms=4.5,
        mfc="white" if hollow else style["color"],
        capsize=2,
        **style,
    )


def draw_probe(place: Any, contents: Sequence[Content]) -> None:
    """Draw the accuracy of the probe by noise level, one panel for each condition.

    The grey band has all accuracies on shuffled labels, of all models.
    """
    labels = labels_of(contents)
    probes = sorted((one for one in contents if one["kind"] == "probe"), key=_probe_place)
    prompts = list(dict.fromkeys(row["prompt"] for one in probes for row in one["rows"]))
    all_axes = place.subplots(1, max(1, len(prompts)), squeeze=False, sharey=True)[0]
    for axes, prompt in zip(all_axes, prompts, strict=False):
        rows = {
            one["model"]: [row for row in one["rows"] if row["prompt"] == prompt] for one in probes
        }
        times = [row["time_step"] for row in next(iter(rows.values()))]
        shuffled = [
            [v for model_rows in rows.values() for v in model_rows[index]["shuffled"]]
            for index in range(len(times))
        ]
        axes.fill_between(
            times,
            [100 * min(v) for v in shuffled],
            [100 * max(v) for v in shuffled],
            color=GREY,
            lw=0,
            label="shuffled labels, all",
        )
        width = 0.012 * (max(times) - min(times))
        for number, (model, model_rows) in enumerate(rows.items()):
            _points(
                axes,
                [t + width * (number - len(rows) / 2) for t in times],
                [Interval(**row["accuracy"]) for row in model_rows],
                connect=True,
                color=COLORS[number % len(COLORS)],
                marker=MARKERS[number % len(MARKERS)],
                label=labels[model],
            )
        axes.set_title(f"probe of the mid-block, {prompt} prediction", fontsize="medium")
        axes.set(xlabel="time step of the noise", ylim=(20, 103))
        axes.legend(frameon=False, fontsize="x-small", loc="lower left")
    all_axes[0].set_ylabel("accuracy, %")


def draw_erasure(place: Any, concept: str, contents: Sequence[Content], erasure: str) -> None:
    """Draw the three rows of an erasure on a figure or a part of one."""
    place.suptitle(f"{concept}, erased by {labels_of(contents)[erasure]}")
    rows = place.subfigures(3, 1)
    draw_exchange(rows[0], contents, "blocks")
    draw_exchange(rows[1], contents, "steps")
    draw_probe(rows[2], contents)


def plot(erasures: Sequence[tuple[str, list[Content], str]]) -> Any:
    """Draw erasures below each other: concept, results and name of each."""
    panels = max(len(_pairs(contents, "blocks")) for _, contents, _ in erasures)
    figure = canvas(max(10.0, 6.4 * panels), 10.5 * len(erasures))
    places = figure.subfigures(len(erasures), 1, squeeze=False)[:, 0]
    for place, (concept, contents, erasure) in zip(places, erasures, strict=True):
        draw_erasure(place, concept, contents, erasure)
    return figure


def complete_erasures(results: Mapping[str, Content]) -> list[tuple[str, list[Content], str]]:
    """Return the erasures that have results of all three measurements, with their results."""
    erasures = []
    for concept, contents in by_concept(results).items():
        for erasure in erasures_of(contents):
            own = of_erasure(contents, erasure)
            if {one["kind"] for one in own} == {"whole", "blocks", "steps", "probe"}:
                erasures.append((concept, own, erasure))
    return erasures


def _figure(erasures: Sequence[tuple[str, list[Content], str]]) -> Figure:
    shown = [
        [
            concept,
            erasure,
            [{k: v for k, v in one.items() if k not in ("settings", "environment")} for one in own],
        ]
        for concept, own, erasure in erasures
    ]
    return Figure(shown, partial(plot, erasures))


def figures_by_erasure(results: Mapping[str, Content]) -> dict[str, Figure]:
    """Return one figure for each erasure, by concept and name of the erased model."""
    return {f"{one[0]}_{one[2]}": _figure([one]) for one in complete_erasures(dict(results))}


def figures() -> dict[Path, Figure]:
    """Return the figure of location.md, with all erasures."""
    erasures = complete_erasures(dict(Results(STUDY)))
    return {figure_path(STUDY, "plots.svg"): _figure(erasures)} if erasures else {}


# the page


def page() -> str:
    """Return the page."""
    results = dict(Results(STUDY))
    parts = []
    for concept, contents in by_concept(results).items():
        parts.append(f"## {concept}\n\n{whole_table(contents)}")
        for kind, title in (("blocks", "Exchanged weights"), ("steps", "Exchanged time steps")):
            parts.append(f"### {title}: {concept}\n\n{exchange_table(contents, kind)}")
        parts.append(f"### Linear probe: {concept}\n\n{probe_table(contents)}")
    environments = [content["environment"] for content in results.values()]
    commits = sorted({str(one["commit"])[:12] for one in environments})
    devices = sorted({str(one["device"]) for one in environments})
    figure = "![exchanges and probe](location.plots.svg)" if figures() else ""
    return (
        "\n\n".join(
            part
            for part in (
                "# Where a concept is after an erasure",
                f"{source(STUDY, COMMAND)}.",
                notes(STUDY),
                EXPLANATION,
                figure,
                *parts,
                f"Commits {', '.join(commits)}; {', '.join(devices)}.",
            )
            if part
        )
        + "\n"
    )


EXPLANATION = """* Concept rate and no-object rate: of the prompts that state the concept.
* Retain accuracy: the share of retain images with every attribute that their prompt states.
* Exchanged weights: the model has the weights of the other in one group. A block's group includes
  its cross-attention. `ends` are the first and last layers and the embedding of the time step.
* Exchanged time steps: the other model predicts the noise in that range of time steps.
* Linear probe: a logistic regression on the mid-block's activations, averaged over positions, tells
  noised images with the concept from others. Each image is predicted by a probe that was not fitted
  to it. Chance is 50 %. "Shuffled" is the mean (least to largest) of probes on shuffled labels.
  "Permuted weights" is a network with the original's weights in random order.

Brackets are 95 % Wilson intervals over images. The training of each model is one seed, so the
intervals say nothing about other trainings. Predictions of a cross-validation are not independent,
so the intervals of the probe are approximate."""

PAGES = {STUDY: page}
