"""Measure what else changes when a concept of the bundled model is erased.

    python -m studies.side_effects studies/configs/side_effects.yaml [--parts matrix,at_once]
    [--methods default,uce] [--concepts star,blue] [--work runs/side_effects]
    python -m studies.side_effects studies/configs/side_effects.yaml --cells

The study has three parts:

    matrix      Each concept is erased alone. The accuracy of every value of the bundled world (its
                shapes, colours and styles) is measured before and after.
    sequence    The concepts of `sequence` are erased one after the other. Each run begins with the
                pipeline of the run before. After each run the same values are measured.
    at_once     The concepts of `sequence` are erased by one run. The prompts are those of the
                sequence.

The composition of two attributes needs no run of its own. The prompts of an erased value state the
two other attributes, and the matrix has their accuracy.

Every run has the settings of `concept-eraser erase CONCEPT`, with the method of the configuration.
In the sequence, a run is the same recipe on another model. Its retain set has prompts of concepts
that were erased before. Their targets are the predictions of the model that it begins with.

Prompts have templates of the test split of protocol 2 (studies/protocol2.py), and background
phrases that no training prompt has. All prompts state a shape, a colour and a style. The
combinations of the other two attributes occur equally often, up to one prompt. In the sequence, the
other two attributes have values that are never erased.

A result has the judge's labels of every image, so that every summary can be computed again. Each
model is one result (studies/result_tables.py), and finished results are not measured again. An
interrupted run continues from its checkpoint, and its images from a cache in the work folder.
`python -m studies.render_results` renders the page. `--cells` writes nothing: it prints the matrix
with all intervals, as CSV.

A full study takes about 5 hours on one core. With one process for each part, on one thread each, it
takes about 3.3 hours on two cores. Both are estimates, from small runs on one busy core: 193 s for
a training of the default, 2 s for UCE, and 33 s for 352 images. The study has 34 trainings of each
method, and 70 measurements of 1,760 images each.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from concept_eraser import api, registry
from concept_eraser.concepts import bundled
from concept_eraser.concepts.plan import BUNDLED, make_plan
from concept_eraser.data import generate, prompts
from concept_eraser.data.prompts import Prompt
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs import concept_job
from concept_eraser.tiny import painter
from concept_eraser.utils import provenance
from studies import protocol2
from studies.rendering import side_effects as rendering
from studies.result_tables import Results
from studies.runs import clear, model_of
from studies.tasks import parse_names

PARTS = ("matrix", "sequence", "at_once")
VALUES = {value: name for name, values in bundled.VALUES.items() for value in values}
TEMPLATES = protocol2.split_of("star", "test").templates
# The second phrase of each background, which no training of `concept-eraser erase CONCEPT` has.
BACKGROUNDS = {name: phrases[1] for name, phrases in painter.BACKGROUND_PHRASES.items()}
LEAST = 2  # values of an attribute that a sequence must leave
LAST = "the pipeline of the run before"  # the model of a stored recipe of a sequence


def draw_prompts(value: str, n: int, seed: int, without: Sequence[str] = ()) -> list[Prompt]:
    """Draw prompts that state a value, in combination with the two other attributes.

    Args:
        value: A shape, a colour or a style of the bundled world.
        n: How many prompts.
        seed: The seed of the draw.
        without: Values that the two other attributes do not have.

    Returns:
        The prompts, [n]. Their fields are shape, color and style, and background where the template
        has one. The numbers of two combinations differ by at most one.
    """
    rng = np.random.default_rng([seed, provenance.derive_seed("side effects", value) % 2**32])
    others = {
        name: [one for one in values if one not in without]
        for name, values in bundled.VALUES.items()
        if name != VALUES[value]
    }
    pairs = list(itertools.product(*others.values()))
    rounds = [rng.permutation(len(pairs)) for _ in range(-(-n // len(pairs)))]
    drawn_prompts = []
    for place in np.concatenate(rounds)[:n]:
        template = TEMPLATES[rng.integers(len(TEMPLATES))]
        fields = {VALUES[value]: value, **dict(zip(others, pairs[place], strict=True))}
        words = dict(fields)
        if "{background}" in template:
            fields["background"] = list(BACKGROUNDS)[rng.integers(len(BACKGROUNDS))]
            words["background"] = BACKGROUNDS[fields["background"]]
        text = prompts.render(template, words)
        drawn_prompts.append(Prompt(text, fields=fields, words=words, template=template))
    return drawn_prompts


def recipe_of(
    study: Mapping[str, Any], way: str, *concepts: str, model: str = BUNDLED
) -> recipes.Recipe:
    """Return the recipe of `concept-eraser erase CONCEPT ...` with a method of the study.

    Args:
        study: The configuration.
        way: The name of one of its `methods`. `method` replaces the default, `set` has overrides.
        concepts: The concepts.
        model: The model. The settings are those of the bundled model for every model.

    Raises:
        UserError: The concept is unknown, or the settings are no recipe.
    """
    entry = study["methods"][way]
    keys = {"method": entry["method"]} if "method" in entry else {}
    settings = {**entry.get("set", {}), "training.seed": study["seed"]}
    changes = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    content = concept_job.recipe_content(make_plan(list(concepts)), keys, changes)
    return recipes.load({**content, "model": model})


def predict(
    model: Model,
    groups: Mapping[str, Sequence[Prompt]],
    study: Mapping[str, Any],
    *,
    seed: int,
    cache: Path | None = None,
) -> dict[str, dict[str, list[str]]]:
    """Generate the images of some groups of prompts, and return the judge's labels.

    Args:
        model: The model.
        groups: The prompts of each group.
        study: The configuration, with `sampling` and `judge`.
        seed: The seed of the images.
        cache: A folder for the images.

    Returns:
        By group and attribute, the label of each image, [images].
    """
    rows = [prompt for group in groups.values() for prompt in group]
    images = generate.generate(
        model,
        rows,
        generate.seeds_for(rows, seed),
        generate.Sampling(**study["sampling"]),
        cache=cache,
    )
    labels = registry.read("judge", study["judge"]).build().classify(images)
    predicted: dict[str, dict[str, list[str]]] = {}
    start = 0
    for name, group in groups.items():
        here = slice(start, start := start + len(group))
        predicted[name] = {one: labels[one][here].tolist() for one in bundled.VALUES}
    return predicted


@dataclass(frozen=True)
class Bench:
    """One study, its work folder and its results."""

    study: Mapping[str, Any]
    work: Path
    results: Results

    def groups(self, part: str) -> dict[str, list[Prompt]]:
        """Return the prompts of every value, by value."""
        n, seed, without = self.study["images"], self.study["image_seed"], self.without(part)
        return {value: draw_prompts(value, n, seed, without) for value in VALUES}

    def without(self, part: str) -> list[str]:
        """Return the values that a prompt of a part states only if they are its group's value."""
        return [] if part == "matrix" else list(self.study["sequence"])

    def settings(self, part: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return what determines a result: the study's settings, the prompts and `content`."""
        texts = {value: [one.text for one in rows] for value, rows in self.groups(part).items()}
        return {
            **{key: self.study[key] for key in ("seed", "image_seed", "sampling")},
            "judge": self.study["judge"],
            "prompts_hash": provenance.fingerprint(texts),
            **content,
        }

    def is_current(self, key: str, settings: Mapping[str, Any]) -> bool:
        """Whether there is a result with these settings."""
        return key in self.results and provenance.fingerprint(
            self.results[key]["settings"]
        ) == provenance.fingerprint(settings)

    def predict(self, model: Model, part: str, cache: Path) -> dict[str, dict[str, list[str]]]:
        """Generate the images of every value, and return the judge's labels.

        Args:
            model: The model.
            part: "matrix" or "sequence".
            cache: A folder for the images.

        Returns:
            By value and attribute, the label of each image, [images].
        """
        seed = provenance.derive_seed(self.study["image_seed"], part)
        return predict(model, self.groups(part), self.study, seed=seed, cache=cache)

    def store(
        self,
        key: str,
        model: Model,
        *,
        part: str,
        settings: Mapping[str, Any],
        content: Mapping[str, Any],
    ) -> None:
        """Measure a model, and store its result."""
        start, cache = time.monotonic(), self.work / "images" / key
        onto_gpu(model)
        predicted = self.predict(model, part, cache)
        seconds = time.monotonic() - start
        self.results[key] = {
            "part": part,
            **content,
            "predicted": predicted,
            "measurement_seconds": round(seconds, 1),
            "settings": dict(settings),
            "environment": provenance.describe(),
        }
        shutil.rmtree(cache, ignore_errors=True)
        print(f"{key}: measured in {seconds:.0f} s", flush=True)

    def measure_original(self, part: str) -> None:
        """Measure the untouched model. Its result also has the prompts."""
        key, settings = rendering.original_key(part), self.settings(part, {})
        if self.is_current(key, settings):
            return
        texts = {
            value: [{"text": one.text, **one.fields} for one in group]
            for value, group in self.groups(part).items()
        }
        model = api.load(BUNDLED)
        content = {
            "prompts": texts,
            "without": self.without(part),
            "weights": {"end": generate.model_fingerprint(model)},
        }
        self.store(key, model, part=part, settings=settings, content=content)

    def measure_matrix(self, way: str, concepts: Sequence[str]) -> None:
        """Erase each concept alone, and measure all values."""
        for concept in concepts:
            key, recipe = rendering.matrix_key(way, concept), recipe_of(self.study, way, concept)
            settings = self.settings("matrix", {"recipe": recipe.resolved()})
            if self.is_current(key, settings):
                continue
            folder = self.work / "matrix" / f"{way}_{concept}"
            clear(folder, recipe)
            run = api.erase(recipe, output=folder, resume=True)
            model: Any = model_of(run)
            content = {
                "method": way,
                "concept": concept,
                "seconds": round(run.seconds, 1),
                "weights": {"end": generate.model_fingerprint(model)},
            }
            self.store(key, model, part="matrix", settings=settings, content=content)
            # weights.safetensors is enough to load it again
            shutil.rmtree(folder / "pipeline", ignore_errors=True)

    def measure_at_once(self, way: str) -> None:
        """Erase the concepts of the sequence by one run, and measure on the sequence's prompts."""
        recipe = recipe_of(self.study, way, *self.study["sequence"])
        key, folder = rendering.at_once_key(way), self.work / "at_once" / way
        settings = self.settings("sequence", {"recipe": recipe.resolved()})
        if self.is_current(key, settings):
            return
        clear(folder, recipe)
        run = api.erase(recipe, output=folder, resume=True)
        model: Any = model_of(run)
        content = {
            "method": way,
            "seconds": round(run.seconds, 1),
            "weights": {"end": generate.model_fingerprint(model)},
        }
        self.store(key, model, part="sequence", settings=settings, content=content)

    def runs_of_sequence(self, way: str) -> Iterator[tuple[int, str, recipes.Recipe, Path]]:
        """Yield the number, concept, recipe and folder of each run of a sequence.

        The folder's name has a hash of the recipe, which names the folder before. So a run never
        begins with a model of other settings.
        """
        model = BUNDLED
        for number, concept in enumerate(self.study["sequence"], 1):
            recipe = recipe_of(self.study, way, concept, model=model)
            name = f"{number:02d}_{concept}_{recipe.fingerprint[:8]}"
            folder = self.work / "sequence" / way / name
            yield number, concept, recipe, folder
            model = str(folder)

    def measure_sequence(self, way: str) -> None:
        """Erase the concepts of the sequence one after the other, and measure after each."""
        chain: list[dict[str, Any]] = []
        for number, concept, recipe, folder in self.runs_of_sequence(way):
            content = recipe.resolved() | ({"model": LAST} if chain else {})
            chain.append(content)
            details = {"recipe": content, "chain": provenance.fingerprint(chain)}
            settings = self.settings("sequence", details)
            key = rendering.sequence_key(way, number, concept)
            if self.is_current(key, settings):
                continue
            self.train_before(way, number)
            start = generate.model_fingerprint(api.load(recipe.model))
            run = api.erase(recipe, output=folder, resume=True)
            model: Any = run.load()
            result = {
                "method": way,
                "concept": concept,
                "number": number,
                "seconds": round(run.seconds, 1),
                "weights": {"start": start, "end": generate.model_fingerprint(model)},
            }
            self.store(key, model, part="sequence", settings=settings, content=result)

    def train_before(self, way: str, number: int) -> None:
        """Train the runs of a sequence before one of them, where their folders are not there."""
        for _, _, recipe, folder in itertools.islice(self.runs_of_sequence(way), number - 1):
            api.erase(recipe, output=folder, resume=True)


def require_sequence(study: Mapping[str, Any]) -> None:
    """Check the sequence of a configuration.

    Raises:
        ValueError: A concept is unknown or named twice, an attribute has too few values left, or
            the default anchor concept of a run is in the sequence.
    """
    sequence = list(study["sequence"])
    if unknown := [one for one in sequence if one not in VALUES]:
        raise ValueError(f"sequence: the bundled world has no {unknown[0]!r}")
    if len(set(sequence)) < len(sequence):
        raise ValueError("sequence: each concept can be erased once")
    for name, values in bundled.VALUES.items():
        left = [one for one in values if one not in sequence]
        if len(left) < LEAST:
            raise ValueError(
                f"sequence: it leaves {len(left)} values of {name}, {LEAST} are needed"
            )
    for concept in sequence:
        if (anchor := make_plan([concept]).concepts[0].anchor) in sequence:
            raise ValueError(f"sequence: {anchor!r} is the anchor concept of {concept!r}")


def print_cells(study: Mapping[str, Any], results: Results) -> None:
    """Print the matrix as CSV. Accuracies are shares, with 95 % intervals."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    names = [f"{kind}_{end}" for kind in ("before", "after", "change") for end in rendering.ENDS]
    table.writerow(["method", "erased", "measured", "n", *names, "p"])
    for way in study["methods"]:
        for cell in rendering.matrix(results, way):
            numbers = [
                f"{getattr(interval, end):.4f}"
                for interval in (cell.before, cell.after, cell.change)
                for end in rendering.ENDS
            ]
            table.writerow([way, cell.erased, cell.measured, cell.change.n, *numbers, cell.p])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--parts", default="", help="only these: matrix, sequence, at_once")
    parser.add_argument("--methods", default="", help="only these, by name, in this order")
    parser.add_argument("--concepts", default="", help="only these rows of the matrix")
    parser.add_argument("--work", type=Path, default=Path("runs/side_effects"))
    parser.add_argument("--cells", action="store_true", help="print the matrix as CSV")
    args = parser.parse_args()
    study = yaml.safe_load(args.config.read_text())
    results = Results(args.config.stem)
    if args.cells:
        print_cells(study, results)
        return
    chosen = {
        key: parse_names(parser, key, getattr(args, key), all_names)
        for key, all_names in (
            ("parts", PARTS),
            ("methods", study["methods"]),
            ("concepts", study["concepts"]),
        )
    }
    try:
        require_sequence(study)
    except ValueError as error:
        parser.error(str(error))
    bench = Bench(study, args.work, results)
    for part in chosen["parts"]:
        bench.measure_original("matrix" if part == "matrix" else "sequence")
        for way in chosen["methods"]:
            if part not in study["methods"][way].get("parts", PARTS):
                continue
            if part == "matrix":
                bench.measure_matrix(way, chosen["concepts"])
            elif part == "sequence":
                bench.measure_sequence(way)
            else:
                bench.measure_at_once(way)


if __name__ == "__main__":
    main()
