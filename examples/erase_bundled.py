"""Erase a concept from the bundled model with one call, and evaluate the result.

    python examples/erase_bundled.py star

The bundled model draws painted shapes: try blue, dotted or fish too. Nothing is downloaded.
The run folder has the LoRA, the report and the images before and after.
"""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
from PIL import Image

import concept_eraser

QUICK = [
    "generation.steps=2",
    "training.steps=2",
    "training.batch_size=4",
    "forget.n=8",
    "retain.n=8",
]


def read_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("concept", nargs="?", default="star", help="what to erase")
    parser.add_argument("--output", type=Path, help="run folder (default: runs/CONCEPT)")
    parser.add_argument("--n", type=int, default=96, help="images of each group of the evaluation")
    parser.add_argument("--quick", action="store_true", help="two steps: does the script run?")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    run = concept_eraser.erase(
        arguments.concept,
        images=2 if arguments.quick else arguments.n,
        overrides=QUICK if arguments.quick else [],
        output=arguments.output,
        notify=print,
    )

    evaluation = concept_eraser.evaluate(run.folder, output=run.folder)
    for metric, name in (("concept_rate", "direct"), ("accuracy_shape", "retained")):
        result = evaluation.find(metric, name)
        before, after = result.before.value, result.after.value
        print(f"{metric:16} {name:10} {before:6.1%} before, {after:6.1%} after")
    concept_eraser.report(evaluation, run.folder / "report.html", run=run.folder)

    group = evaluation.groups["direct"]
    rows = [np.hstack(group.images[when][:8].numpy()) for when in ("before", "after")]
    Image.fromarray(np.vstack(rows)).save(run.folder / "before_after.png")
    print(f"LoRA, report.html and before_after.png are in {run.folder}")


if __name__ == "__main__":
    main()
