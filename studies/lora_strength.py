"""Measure LoRAs of the bundled model at strengths, at lower ranks, and several at once.

    python -m studies.lora_strength runs/star runs/moon [--strengths -1,0,0.5,1,1.5]
    [--ranks 32,16,8] [-n 48]

The runs are those of `concept-eraser erase CONCEPT`. Each row of the printed table is one model:
the bundled one with the changes of the LoRAs, times their strengths, added to its weights. It has
the concept rate of each run's concept, over its group "direct", and the retain accuracy, over the
group "retained" of the first run. Both are of the runs' own suites, with the judge that the suite
names. Intervals are Wilson's, 95 %, over images of one training seed.

The script writes no file. The numbers are for one choice of runs on the bundled model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from concept_eraser import api, registry
from concept_eraser.concepts.plan import BUNDLED
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.statistics import Interval, interval_text, wilson
from concept_eraser.exporting.low_rank import approximate, spectra_of_factors
from concept_eraser.models import lora_files
from concept_eraser.models.lora import Factors
from concept_eraser.storage.readers import read_tensor_header, read_tensors

STRENGTHS = "-1,-0.5,0,0.25,0.5,0.75,1,1.25,1.5"
Change = Sequence[tuple[Factors, float]]  # LoRAs with their strengths


def read_lora(model: Any, run: Path) -> list[Factors]:
    """Read the LoRA of a run, one entry for each part."""
    file = run / lora_files.FOLDER / lora_files.FILE
    return lora_files.read(model, read_tensors(file), read_tensor_header(file)[0], str(file))


@torch.no_grad()
def set_change(model: Any, original: Mapping[str, torch.Tensor], change: Change) -> None:
    """Set the denoiser to its original weights plus the changes times their strengths."""
    model.denoiser.load_state_dict(original)
    for factors, strength in change:
        for layer in factors.layers:
            weight = model.denoiser.get_parameter(f"{layer}.weight")
            weight += strength * factors.change(layer).to(weight)


class Measurement:
    """The images of some prompts, judged.

    Args:
        runs: The runs whose suites are used.
        n: How many images a group has.
    """

    def __init__(self, runs: Sequence[Path], n: int) -> None:
        self.suites = [self._small_suite(run, n) for run in runs]
        self.judge = registry.read("judge", self.suites[0].judge).build()

    @staticmethod
    def _small_suite(run: Path, n: int) -> suites.Suite:
        suite = suites.load(run / "suite.yaml")
        groups = {name: group.model_copy(update={"n": n}) for name, group in suite.groups.items()}
        return suite.model_copy(update={"groups": groups})

    def concept_rates(self, model: Any) -> Iterator[Interval]:
        """Yield the concept rate of each run's concept."""
        for suite in self.suites:
            ((attribute, value),) = suite.concept.items()
            labels = self._labels(model, suite, "direct")[attribute]
            yield wilson(int((labels == value).sum()), len(labels))

    def retain_accuracy(self, model: Any) -> Interval:
        """Return the share of retain-prompt images whose shape is the prompt's."""
        suite = self.suites[0]
        rows = suites.group_prompts(suite, "retained").prompts
        labels = self._labels(model, suite, "retained")["shape"]
        expected = np.array([row.fields["shape"] for row in rows])
        return wilson(int((labels == expected).sum()), len(labels))

    def _labels(self, model: Any, suite: suites.Suite, group: str) -> dict[str, np.ndarray]:
        return self.judge.classify(suites.generate_group(model, suite, group, "after"))


def changes(
    loras: Sequence[Factors], strengths: Sequence[float], ranks: Sequence[int]
) -> Iterator[tuple[str, Change]]:
    """Yield the name and the change of each row: strengths and ranks of the first, then all."""
    first = loras[0]
    for strength in strengths:
        yield f"first, strength {strength:g}", [(first, strength)]
    for rank in ranks:
        reduced = approximate(spectra_of_factors([first]), 0.0, rank, max_error=1.0)
        yield f"first, rank {rank} (error {reduced.error:.3f})", [(reduced.factors[0], 1.0)]
    for count in range(2, len(loras) + 1):
        for strength in (0.5, 1.0):
            yield (
                f"first {count}, strength {strength:g}",
                [(one, strength) for one in loras[:count]],
            )
    for index, one in enumerate(loras[1:], start=2):
        yield f"number {index}, strength 1", [(one, 1.0)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--strengths", default=STRENGTHS)
    parser.add_argument("--ranks", default="32,16,8,4")
    parser.add_argument("-n", type=int, default=48)
    options = parser.parse_args(arguments)
    model: Any = api.load(BUNDLED)
    loras = [read_lora(model, run)[0] for run in options.runs]
    original = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
    measurement = Measurement(options.runs, options.n)
    names = [f"concept rate, {run.name} (%)" for run in options.runs]
    print("| model | " + " | ".join([*names, "retain accuracy (%)"]) + " |")
    print("| --- |" + " --- |" * (len(names) + 1))
    strengths = [float(text) for text in options.strengths.split(",")]
    ranks = [int(text) for text in options.ranks.split(",") if text]
    for name, change in changes(loras, strengths, ranks):
        set_change(model, original, change)
        values = [*measurement.concept_rates(model), measurement.retain_accuracy(model)]
        print(f"| {name} | " + " | ".join(interval_text(one, True) for one in values) + " |")


if __name__ == "__main__":
    main()
