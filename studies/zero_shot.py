"""The zero-shot accuracy of a CLIP run on labels that its training never used, as in MUNBa's
Table 2.

    python -m studies.zero_shot runs/pets_clip_munba imagenet --set root=data/imagenet
    python -m studies.zero_shot runs/pets_clip_munba oxford_pets --template "A photo of a {}, a type
    of pet"

Both models are measured: the original of the run's recipe, if it is a folder or a name, and the
erased one. The images are those of the data set's test split. The text embeddings are computed
once. With several templates a class has the mean of their embeddings.

The default template is that of the authors' CLIP/test.py. The paper's number is without the classes
of pets. That file means to leave out the images of the dogs and cats, cougar and lynx included.
They are ImageNet's classes 151 to 268 and 281 to 287: `--without 151-268 281-287`. As published it
compares numbers with names, so it leaves out none. The names of these classes stay possible
answers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser import registry
from concept_eraser.data.labelled import Labelled
from concept_eraser.evaluation.labelled.classification import intervals
from concept_eraser.evaluation.suite import dumps
from concept_eraser.models.base import onto_gpu
from concept_eraser.models.families.clip import Clip, ZeroShot
from concept_eraser.models.loading import load_part
from concept_eraser.recipes import recipe as recipes
from concept_eraser.storage.writers import write_text
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from studies.train_classifier import options

TEMPLATE = "A photo of a {}"


class FixedTexts(nn.Module):
    """A zero-shot classifier whose text embeddings are computed once."""

    def __init__(self, classifier: ZeroShot) -> None:
        super().__init__()
        self.classifier = classifier
        with torch.no_grad():
            self.texts = classifier.text_embeddings()

    def forward(self, images: Tensor) -> Tensor:
        scale = self.classifier.inner.logit_scale.exp()
        logits: Tensor = scale * self.classifier.image_embeddings(images) @ self.texts.T
        return logits


def accuracy(
    clip: Clip, data: Labelled, templates: list[str], without: Collection[int] = ()
) -> dict[str, float]:
    """Return the zero-shot accuracy of a CLIP model with its 95 % interval and n.

    Args:
        clip: The model.
        data: Images in [-1, 1] with labels.
        templates: Prompts of the classes; {} stands for the name.
        without: Numbers of classes whose images are left out. Their names stay possible answers.

    Raises:
        UserError: The data have no such class, or no image of another one.
    """
    unknown_classes = [number for number in without if not 0 <= number < len(data.names)]
    if unknown_classes:
        raise UserError(
            f"{data.about} has classes 0 to {len(data.names) - 1}, found {unknown_classes[0]}"
        )
    rows = torch.arange(len(data))[~torch.isin(data.labels, torch.tensor(sorted(without)))]
    if not len(rows):
        raise UserError(f"{data.about}: all images are of the classes that are left out")
    onto_gpu(clip)
    clip.check_images(data.inputs([0]), data.about)
    classifier = FixedTexts(clip.zero_shot(data.names, templates))
    return intervals(classifier, {"images": (data, rows)})["images"]


def class_numbers(ranges: list[str]) -> list[int]:
    """Return the numbers of ranges such as 151-268 or 7.

    Raises:
        UserError: A range cannot be read.
    """
    numbers: set[int] = set()
    for text in ranges:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise UserError(f"cannot read the classes {text!r}; write 7 or 151-268")
        numbers |= set(range(first, last + 1))
    return sorted(numbers)


def models_of(run: Path) -> dict[str, Clip]:
    """Return the original and the erased model of a run on CLIP, by "before" and "after".

    The original is left out if it was an object in memory.

    Raises:
        UserError: The folder holds no such run.
    """
    recipe = recipes.load_run(run)
    if recipe.target != "clip":
        raise UserError(f"{run} is a run on target {recipe.target}; expected a run on target clip")
    names = {} if recipe.model.endswith("in memory") else {"before": recipe.model}
    models: dict[str, Clip] = {}
    for when, name in {**names, "after": str(run)}.items():
        model = load_part(name, "clip")
        assert isinstance(model, Clip)
        models[when] = model
    return models


def measure(
    run: Path, data_name: str, settings: dict[str, Any], *, templates: list[str], without: list[int]
) -> dict:
    """Return the accuracies of both models of a run, and how they were measured."""
    data = registry.build("dataset", data_name, settings).load("test")
    return {
        "data": data_name,
        "templates": templates,
        "without": without,
        "accuracy": {
            when: accuracy(clip, data, templates, without) for when, clip in models_of(run).items()
        },
        "environment": provenance.describe(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a run on target clip")
    parser.add_argument("data", choices=registry.names("dataset"))
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="options of the data set"
    )
    parser.add_argument(
        "--template", action="append", help=f"{{}} stands for the class; default {TEMPLATE!r}"
    )
    parser.add_argument(
        "--without",
        nargs="*",
        default=[],
        metavar="classes",
        help="numbers of classes whose images are left out, such as 151-268 281",
    )
    parser.add_argument("--output", "-o", type=Path, help="a new file for the numbers, as JSON")
    args = parser.parse_args()
    try:
        if args.output and args.output.exists():
            raise UserError(f"{args.output} exists; give a new file")
        result = measure(
            args.run,
            args.data,
            options(args.set),
            templates=args.template or [TEMPLATE],
            without=class_numbers(args.without),
        )
        if args.output:
            write_text(args.output, dumps(result))
    except UserError as error:
        parser.error(str(error))
    for when, value in result["accuracy"].items():
        low, mean, high = (100 * value[key] for key in ("low", "value", "high"))
        print(f"{when}: {mean:.1f} % [{low:.1f}, {high:.1f}], n = {value['n']}")


if __name__ == "__main__":
    main()
