"""Pages of classifiers, CLIP and VAEs: eval/results/classification.md, clip.md, vae.md."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from studies import grids
from studies.rendering.common import notes, setting, source, table
from studies.rendering.figures import Figure, canvas
from studies.result_tables import STUDIES, Results, figure_path


def spread(values: list[float], digits: int = 1) -> str:
    """Return the mean and the standard deviation over seeds as text."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if not finite:
        return "-"
    mean = sum(finite) / len(finite)
    deviation = (
        (sum((v - mean) ** 2 for v in finite) / (len(finite) - 1)) ** 0.5
        if len(finite) > 1
        else float("nan")
    )
    return (
        f"{mean:.{digits}f} ± {deviation:.{digits}f}" if len(finite) > 1 else f"{mean:.{digits}f}"
    )


def _foot(content: dict[str, Any]) -> str:
    environment = content["environment"]
    rows = content.get("rows") or [*content.get("algorithms", {}).values(), content]
    commits = sorted({str(row.get("environment", environment)["commit"])[:12] for row in rows})
    return (
        f"Commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}; torch "
        f"{environment['versions']['torch']}; {environment['device']}, "
        f"{environment['threads']} thread(s)."
    )


def _choice(row: dict[str, Any]) -> list[str]:
    """Return the cells of a chosen setting, with the marks of edges, and of the settings tried."""
    point = grids.point_of(row)
    return [
        setting(point, grids.of_row(row)),
        str(len(row.get("grid") or [point]) if point else ""),
    ]


def _earlier_grids(study: str, rows: Iterable[dict[str, Any]]) -> str:
    """Return the sentence on rows whose grid is not that of the configuration, or ""."""
    methods = yaml.safe_load((STUDIES / f"{study}.yaml").read_text())["methods"]
    selected = [row for row in rows if row.get("grid") and row["method"] in methods]
    labels = [
        row["label"]
        for row in selected
        if [grids.point_of(one) for one in row["grid"]]
        != [grids.named(point) for point in grids.points(methods[row["method"]].get("grid", [{}]))]
    ]
    if not labels:
        return ""
    which = "all" if len(labels) == len(selected) else ", ".join(labels)
    return f"Settings chosen from an earlier grid than that of the configuration: {which}.\n"


def _notes(study: str) -> str:
    return f"{text}\n\n" if (text := notes(study)) else ""


COLUMNS = """The cells are means ± standard deviations over the seeds, in percent.

* MIA: the share of forgotten examples that a membership attack calls non-members. The attack is a
  logistic regression on the confidence.
* Attack: the balanced accuracy of this attack. 50 is chance.
* AUC: forgotten examples against test examples of the same classes, by the loss. 0.5 is no trace.
* LiRA: the share of forgotten examples that a likelihood ratio over shadow models calls trained on.
* Gap: the mean absolute difference of the first four columns from Retrain of the same seed. The gap
  without MIA is that of the three accuracies.
* RTE: the time relative to that of Retrain."""


def gap_of_accuracies(run: dict[str, Any], retrained: dict[str, Any]) -> float:
    """Return the mean absolute difference of the three accuracies from Retrain of the seed."""
    return sum(abs(run[k] - retrained[k]) for k in ("forget", "retain", "test")) / 3


def classification(
    study: str = "classification", what: str = "a classifier of handwritten digits"
) -> str:
    """Return the page: a table for each task."""
    parts = [
        f"# Forgetting from {what}",
        "",
        source(study, f"python -m studies.classifiers studies/configs/{study}.yaml") + ".",
        COLUMNS,
        "",
    ]
    order = {"class": 0, "half": 1, "random_10": 2, "random_50": 3}
    for content in sorted(Results(study).values(), key=lambda c: order.get(c["task"], 9)):
        n = content["n"]
        rows = [
            [
                "method",
                "Acc_Df",
                "Acc_Dr",
                "Acc_Dt",
                "MIA",
                "avg. gap",
                "gap without MIA",
                "attack",
                "AUC",
                "LiRA",
                "RTE",
                "setting",
                "settings tried",
            ]
        ]
        retrained = {
            run["seed"]: run
            for row in content["rows"]
            if row["method"] == "retrain"
            for run in row["runs"]
        }
        for row in content["rows"]:
            column = {k: [run[k] for run in row["runs"]] for k in row["runs"][0]}
            accuracy_gaps = [gap_of_accuracies(run, retrained[run["seed"]]) for run in row["runs"]]
            rows.append(
                [
                    row["label"],
                    *(spread(column[k]) for k in ("forget", "retain", "test", "mia")),
                    spread(column["gap"], 2),
                    spread(accuracy_gaps, 2),
                    spread(column["attack"]),
                    spread(column["auc"], 2),
                    spread(column["lira"], 0),
                    spread(column["rte"], 2),
                    *_choice(row),
                ]
            )
        seeds = content["seeds"]
        parts += [
            f"## {content['label']}",
            "",
            (
                f"{n['forget']} forgotten, {n['retain']} retained, {n['test']} test "
                f"examples; {len(seeds)} seeds; {content['shadows']} shadow models with and "
                "without the forgotten examples."
            ),
            "",
            grids.with_note(table(rows)),
            "",
            *filter(None, [_earlier_grids(study, content["rows"])]),
        ]
        parts += [
            f"{label} failed: {reason}" for label, reason in content.get("failed", {}).items()
        ]
        parts += [_foot(content), ""]
    return "\n".join(parts) + "\n" + _notes(study)


def classification_painted() -> str:
    """Return the page of the painted shapes."""
    return classification("classification_painted", "a ResNet of painted shapes")


def clip() -> str:
    """Return the page: zero-shot accuracies, and images with the erased text tower."""
    parts = [
        "# Erasing shapes from the small CLIP",
        "",
        source("clip", "python -m studies.clip studies/configs/clip.yaml") + ".",
        (
            "Accuracies are zero-shot, in percent, as means ± standard deviations over the seeds. "
            "The training never used the labels for colour and style."
        ),
        (
            "Generated: images of tiny-sd with the erased text tower, and the rate of the shape "
            "that the prompt states. FID is to the original's images."
        ),
        "",
    ]
    for content in Results("clip").values():
        rows = [
            [
                "method",
                "setting",
                "settings tried",
                "Acc_Df",
                "Acc_Dr",
                "Acc_Dt",
                "colour",
                "style",
                "generated: forgotten %",
                "generated: others %",
                "FID to the original's",
                "training s",
            ]
        ]
        for row in content["rows"]:
            accuracy = [
                [100 * run["accuracy"][k]["value"] for run in row["runs"]]
                for k in ("forget", "retain", "test", "color", "style")
            ]
            rates = [run["drawn"] for run in row["runs"] if "drawn" in run]
            forget_rates = [
                100 * sum(d[c]["shown"] for c in content["classes"]) / len(content["classes"])
                for d in rates
            ]
            retain_rates = [
                100
                * sum(v["shown"] for k, v in d.items() if k not in content["classes"])
                / (len(d) - len(content["classes"]))
                for d in rates
            ]
            rows.append(
                [
                    row["label"],
                    *_choice(row),
                    *(spread(a) for a in accuracy),
                    spread(forget_rates),
                    spread(retain_rates),
                    spread([run.get("fid_to_original") for run in row["runs"]]),
                    spread([run.get("seconds") for run in row["runs"]], 0),
                ]
            )
        n = content["rows"][0]["runs"][0]["accuracy"]
        parts += [
            (
                f"## {content['label'][0].upper()}{content['label'][1:]}: "
                f"{', '.join(content['classes'])}"
            ),
            "",
            (
                f"{n['forget']['n']} forgotten, {n['retain']['n']} retained, "
                f"{n['test']['n']} test images; {content['settings']['images']} generated "
                f"images of each shape; seeds {content['seeds']}."
            ),
            "",
            grids.with_note(table(rows)),
            "",
            *filter(None, [_earlier_grids("clip", content["rows"])]),
            _foot(content),
            "",
        ]
    return "\n".join(parts) + "\n" + _notes("clip")


def vae() -> str:
    """Return the page: Tables 1 and 2 of UNO on other data sets."""
    parts = [
        "# Unlearning a class in a VAE: UNO's benchmark",
        "",
        source("vae", "python -m studies.vae --data fonts")
        + " (and `digits`; `mnist` and `celeba` from folders that the user has).",
        (
            "Time to unlearn: the training time until the rate of the class among prior samples "
            "is first below 2 %, interpolated, without the evaluations."
        ),
        (
            "The cells are means ± standard deviations over the runs. FID uses the features of the "
            "classifier, against images of the other classes."
        ),
        "",
    ]
    for key, content in Results("vae").items():
        settings, original = content["settings"], content["original"]
        fid_samples = settings["fid_samples"]
        rows = [
            [
                "algorithm",
                "reached",
                "steps to < 2 %",
                "seconds to < 2 %",
                "rate after 5 steps %",
                "FID there",
                "FID at the end",
                "rate at the end %",
                "ms per step",
                "peak memory over the start, MB",
            ]
        ]
        for name, result in content["algorithms"].items():
            column = {
                k: [run[k] for run in result["runs"]]
                for k in result["runs"][0]
                if k != "measurements"
            }
            count = sum(s is not None for s in column["steps"])
            rows.append(
                [
                    name.replace("^", "\\^"),
                    f"{count} of {len(result['runs'])}",
                    spread(column["steps"]),
                    spread(column["seconds"], 3),
                    early_rate(result["runs"]),
                    spread(column["fid_at_bound"]),
                    spread(column["fid"]),
                    spread([100 * s for s in column["concept_rate"]]),
                    spread([1000 * s for s in column["per_step"]]),
                    f"{result['memory_mb'] - result['memory_before_mb']:.0f}",
                ]
            )
        parts += [
            f"## {content['data']}: class {settings['class']}"
            + (", running statistics frozen" if settings["batchnorm"] == "frozen" else "")
            + (f", FID on {fid_samples:,} samples" if fid_samples != 5000 else ""),
            "",
            (
                f"Original: {100 * original['concept_rate']:.1f} % of prior samples are of the "
                f"class, FID {original['fid']:.1f}; the accuracy of the classifier is "
                f"{100 * original['judge_accuracy']:.1f} % on test images."
            ),
            "",
            table(rows),
            "",
            *_class_rates(content),
            f"![trajectories]({figure_path('vae', key).name}.svg)",
            "",
            _foot(content),
            "",
        ]
    return "\n".join(parts) + "\n" + _notes("vae")


def early_rate(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the rate after five steps; earlier results have it for the first run only."""
    if "early_rate" in runs[0]:
        return spread([100 * run["early_rate"] for run in runs if run["early_rate"] is not None])
    measurements = runs[0].get("measurements", [])
    rates = [row["concept_rate"] for row in measurements if row["step"] == 5]
    return f"{100 * rates[0]:.1f} (one run)" if rates else "-"


def class_rates(content: dict[str, Any]) -> dict[str, list[float]]:
    """Return the rate of each class among prior samples, in percent, by algorithm.

    The numbers are means over the runs. The original comes first. Algorithms that were measured
    without these rates are left out; the result is {} if there are no others.
    """
    rates = {}
    for name, result in content["algorithms"].items():
        if all("class_rates" in run for run in result["runs"]):
            runs = [run["class_rates"] for run in result["runs"]]
            rates[name] = [100 * sum(column) / len(runs) for column in zip(*runs, strict=True)]
    if not rates:
        return {}
    return {"original": [100 * rate for rate in content["original"]["class_rates"]], **rates}


def _class_rates(content: dict[str, Any]) -> list[str]:
    """Return the table of the rates of classes, with its sentence, or [] without them."""
    rates = class_rates(content)
    if not rates:
        return []
    rows = [["algorithm", *(f"class {c}" for c in range(len(rates["original"])))]]
    rows += [
        [name.replace("^", "\\^"), *(f"{rate:.1f}" for rate in row)] for name, row in rates.items()
    ]
    others = [name for name in content["algorithms"] if name not in rates]
    sentence = (
        "Rate of each class among prior samples at the end, in percent, by the same classifier: "
        "means over the runs."
    )
    if others:
        sentence += f" Measured without these rates: {', '.join(others)}.".replace("^", "\\^")
    return [sentence, "", table(rows), ""]


def sample_rows(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the stored samples of the original and of each algorithm, as PNGs in base64."""
    rows = {
        name: result["runs"][0].get("samples", "") for name, result in content["algorithms"].items()
    }
    rows = {"original": content.get("original", {}).get("samples", ""), **rows}
    return {name: samples for name, samples in rows.items() if samples}


def draw_samples(figure: Any, rows: Mapping[str, str]) -> None:
    """Draw a row of samples for the original and for the first run of each algorithm.

    figure: An empty part of a figure. rows: The samples as `sample_rows` returns them.
    """
    from PIL import Image

    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axes, (name, samples) in zip(panels, rows.items(), strict=True):
        with Image.open(io.BytesIO(base64.b64decode(samples))) as image:
            grays = np.asarray(image) // 32  # enough to see, and a fraction of the file
            axes.imshow(grays, cmap="gray", vmin=0, vmax=7, aspect="equal", interpolation="none")
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=7)


def trajectories(content: dict[str, Any]) -> Any:
    """Draw the rate of the class and the FID of the first runs, over steps and seconds.

    Where the rates of all classes are known, bars show those of the original and of each algorithm.
    Stored samples are below them.
    """
    rates, samples = class_rates(content), sample_rows(content)
    heights = [7.0, *([3.0] if rates else []), *([0.45 * len(samples)] if samples else [])]
    figure = canvas(11, sum(heights))
    parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    axes = parts.pop(0).subplots(2, 2)
    if rates:
        _draw_class_rates(parts.pop(0).subplots(), rates)
    if samples:
        draw_samples(parts.pop(0), samples)
    for name, result in content["algorithms"].items():
        rows = result["runs"][0]["measurements"]
        for column, key in enumerate(("step", "seconds")):
            axes[0, column].plot(
                [max(r[key], 1e-3) for r in rows],
                [100 * r["concept_rate"] for r in rows],
                label=name,
            )
            rows_with_fid = [r for r in rows if "fid" in r]
            axes[1, column].plot(
                [max(r[key], 1e-3) for r in rows_with_fid],
                [r["fid"] for r in rows_with_fid],
                marker=".",
                label=name,
            )
    for column, key in enumerate(("steps", "seconds of training")):
        axes[0, column].set(
            xscale="symlog" if column == 0 else "log", ylabel="rate of the class, %"
        )
        axes[0, column].axhline(100 * content["settings"]["below"], color="0.7", lw=0.8)
        axes[1, column].set(
            xscale="symlog" if column == 0 else "log",
            yscale="log",
            xlabel=key,
            ylabel="FID (classifier features)",
        )
    axes[0, 0].legend(fontsize=8, ncol=2)
    return figure


def _draw_class_rates(axes: Any, rates: dict[str, list[float]]) -> None:
    """Draw a bar for each class and algorithm. The original has black bars."""
    width = 0.85 / len(rates)
    for i, (name, row) in enumerate(rates.items()):
        places = [c + (i - (len(rates) - 1) / 2) * width for c in range(len(row))]
        color = {"color": "black"} if name == "original" else {}
        axes.bar(places, row, width, label=name, **color)
    axes.set(
        xticks=range(len(rates["original"])),
        xlabel="class",
        ylabel="rate at the end, %",
        title="classes of samples",
    )
    axes.legend(fontsize=7, ncol=2)


def figures() -> dict[Path, Figure]:
    """Return the figures of the VAE page."""
    return {
        figure_path("vae", f"{name}.svg"): Figure(content, partial(trajectories, content))
        for name, content in Results("vae").items()
    }


PAGES = {
    "classification": classification,
    "classification_painted": classification_painted,
    "clip": clip,
    "vae": vae,
}
