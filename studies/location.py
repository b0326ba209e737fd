"""Where a concept is after an erasure: in which weights, at which time steps, in the mid-block.

    python -m studies.location studies/configs/location.yaml [--concepts star] [--controls A,B]
    [--erased RUN_FOLDER,...] [--work runs/location] [--figures FOLDER]

Three measurements compare the original, an erased model, and models that never learned the concept
(`--controls`, made by `python -m concept_eraser.tiny.build --without shape=star`):

    blocks  A model gets another's weights in one group of the UNet: a block, the cross-attention,
            or all other layers (studies/exchange.py).
    steps   Another model predicts the noise in one range of time steps.
    probe   A logistic regression on the activations of the mid-block tells noised images with the
            concept from others (studies/probe.py).

Each configuration is a result of the study `location` (studies/result_tables.py). Existing results
of the same models, prompts and sizes are not made again. The study trains the erasures of its
configuration. `--erased` measures run folders in their place. A control whose `control.json` names
other concepts is left out for a concept. `--figures` writes one figure for each erasure from the
stored results, and measures nothing.

Two trainings from other initial weights may compute the same by other weights. So the exchange of
weights with a control tests whether weights fit, and not only where the concept is. Its retain
accuracy shows that. The exchange of time steps has no such limit.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from torch import Tensor

from concept_eraser import api
from concept_eraser.data import generate
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.base import Evidence, Group
from concept_eraser.evaluation.metrics.accuracy import Accuracy
from concept_eraser.evaluation.metrics.concept_rate import ConceptRate, share_result
from concept_eraser.evaluation.never_learned import NeverLearned, read_record
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError
from studies import exchange
from studies import probe as probes
from studies.rendering import figures as figure_files
from studies.rendering import location as rendering
from studies.result_tables import Content, Results
from studies.runs import clear, erased_model, recipe_of
from studies.tasks import parse_names

STUDY = rendering.STUDY
ORIGINAL, PERMUTED = rendering.ORIGINAL, rendering.PERMUTED
STATED = rendering.STATED
PROMPTS = ("unconditional", "concept")  # the conditions of the probe


@dataclass
class Bench:
    """The models of one concept, and the prompts and the judge that measure them.

    Attributes:
        suite: the protocol, with the measured groups only.
        models: the original, the erased models and the controls, by name. All have the tokenizer,
            text encoder and VAE of the original.
        origins: what made a model: its recipe, or the record of a control.
        labels: the label of a model on the page.
    """

    suite: suites.Suite
    models: Mapping[str, Model]
    origins: Mapping[str, dict[str, Any]]
    labels: Mapping[str, str]
    _images: dict[str, dict[str, Tensor]] = field(default_factory=dict, init=False)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """The hash of the weights of each model."""
        return {name: generate.model_fingerprint(model) for name, model in self.models.items()}

    @cached_property
    def judge(self) -> Any:
        return self.suite.build_judge()

    @cached_property
    def protocol(self) -> dict[str, Any]:
        """What decides the numbers beside the models, with a hash of the prompts."""
        hashes = {name: suites.group_prompts(self.suite, name).hash for name in self.suite.groups}
        content = self.suite.model_dump(mode="json")
        return {
            "suite_hash": provenance.fingerprint([content, hashes, self.judge.fingerprint]),
            "images": {name: group.n for name, group in self.suite.groups.items()},
            "seed": self.suite.seed,
        }

    def images_of(self, name: str) -> dict[str, Tensor]:
        """Return the images of a whole model by group, [n, h, w, 3] uint8."""
        if name not in self._images:
            self._images[name] = self.generate(self.models[name])
        return self._images[name]

    def generate(self, model: Model, cache: Path | None = None) -> dict[str, Tensor]:
        """Generate the images of all groups. The cache's key is the model's weights."""
        return {
            name: suites.generate_group(model, self.suite, name, "after", cache=cache)
            for name in self.suite.groups
        }

    def compare(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[Content]:
        """Return concept rate, no-object rate and accuracy of images, with Wilson intervals.

        The paired difference is that from the images `before`, by the same prompts and seeds.
        """
        groups = {}
        for name in self.suite.groups:
            images = {"before": before[name], "after": after[name]}
            groups[name] = Group(
                name,
                self.suite.groups[name].role,
                prompts=suites.group_prompts(self.suite, name).prompts,
                images=images,
                labels={when: self.judge.classify(some) for when, some in images.items()},
            )
        ((attribute, value),) = self.suite.concept.items()
        evidence = Evidence(groups, (attribute, value), self.judge, self.suite.seed)
        results = [*ConceptRate().measure(evidence), *Accuracy().measure(evidence)]
        results += [self._stated(group) for group in groups.values() if group.role == "retain"]
        return [result.as_dict() for result in results if ":" not in result.group]

    def _stated(self, group: Group) -> Any:
        """Return the share of images with every attribute that their prompts state."""
        correct = {
            when: np.array(
                [
                    all(
                        labels[attribute][row] == prompt.fields[attribute]
                        for attribute, classes in self.judge.classes.items()
                        if prompt.fields.get(attribute) in classes
                    )
                    for row, prompt in enumerate(group.prompts)
                ]
            )
            for when, labels in group.labels.items()
        }
        return share_result(
            STATED,
            group=group.name,
            before=correct["before"],
            after=correct["after"],
            better="higher",
        )


def pairs(names: list[str], erasures: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of models that exchange parts, in both orders: recipient, donor.

    Two erased models, and two controls, exchange nothing.
    """
    kinds = {name: "erased" if name in erasures else name.partition("_")[0] for name in names}
    return [(one, other) for one, other in permutations(names, 2) if kinds[one] != kinds[other]]


def cells(bench: Bench, study: Mapping[str, Any], erasures: list[str]) -> dict[str, Content]:
    """Return the configurations of a concept by key: kind, models, and group or range."""
    names = list(bench.models)
    groups = exchange.weight_groups(bench.models[ORIGINAL].denoiser)
    parts, timesteps = study["ranges"], bench.models[ORIGINAL].timesteps
    content: dict[str, Content] = {}
    for name in names:
        content[f"whole_{name}"] = {"kind": "whole", "model": name}
    for one, other in pairs(names, erasures):
        pair = {"recipient": one, "donor": other}
        for group in groups:
            content[f"blocks_{one}_{other}_{group}"] = {"kind": "blocks", **pair, "group": group}
        for part in range(parts):
            low, high = (round(timesteps * edge / parts) for edge in (part, part + 1))
            content[f"steps_{one}_{other}_{low}"] = {"kind": "steps", **pair, "range": [low, high]}
    for name in (*names, PERMUTED):
        content[f"probe_{name}"] = {"kind": "probe", "model": name}
    return content


def settings_of(
    bench: Bench, study: Mapping[str, Any], concept: Mapping[str, Any], cell: Content
) -> dict[str, Any]:
    """Return what decides the numbers of a configuration."""
    names = [cell[key] for key in ("model", "recipient", "donor") if key in cell]
    if cell["kind"] in ("whole", "probe"):  # both depend on the images of the original
        names = list(dict.fromkeys([ORIGINAL, *(name for name in names if name != PERMUTED)]))
    settings = {**bench.protocol, "models": {name: bench.fingerprints[name] for name in names}}
    if cell["kind"] == "probe":
        settings["probe"] = {**study["probe"], "prompt": concept["prompt"]}
    return settings


def measure_whole(bench: Bench, cell: Content) -> Content:
    """Return the numbers of a model, compared with the original's."""
    name = cell["model"]
    return {
        "label": bench.labels[name],
        "origin": bench.origins[name],
        "results": bench.compare(bench.images_of(ORIGINAL), bench.images_of(name)),
    }


def measure_blocks(bench: Bench, cell: Content) -> Content:
    """Return the numbers of a model with another's weights in a group."""
    recipient, donor = (bench.models[cell[key]] for key in ("recipient", "donor"))
    before = bench.images_of(cell["recipient"])
    names = exchange.weight_groups(recipient.denoiser)[cell["group"]]
    own, other = (model.denoiser.state_dict() for model in (recipient, donor))
    different = [name for name in names if not torch.equal(own[name], other[name])]
    with exchange.exchange_weights(recipient, donor, names):
        after = bench.generate(recipient)
    return {
        "tensors": len(names),
        "different_tensors": len(different),
        "results": bench.compare(before, after),
    }


def measure_steps(bench: Bench, cell: Content) -> Content:
    """Return the numbers of a model whose noise another predicts in a range of time steps."""
    recipient, donor = (bench.models[cell[key]] for key in ("recipient", "donor"))
    before = bench.images_of(cell["recipient"])
    # no weights change, so the shared cache would return the recipient's own images
    with (
        tempfile.TemporaryDirectory() as folder,
        exchange.exchange_time_steps(recipient, donor, *cell["range"]) as calls,
    ):
        after = bench.generate(recipient, cache=Path(folder))
    return {
        "time_steps": {
            "recipient": sorted(set(calls.recipient)),
            "donor": sorted(set(calls.donor)),
        },
        "results": bench.compare(before, after),
    }


def measure_probe(
    bench: Bench, cell: Content, study: Mapping[str, Any], concept: Mapping[str, Any]
) -> Content:
    """Return the accuracy of the probe on a model, by condition and noise level.

    The images are the original's: those of forget groups in which the judge detects the concept,
    and as many of retain groups in which it does not.
    """
    original, how = bench.models[ORIGINAL], study["probe"]
    if cell["model"] == PERMUTED:
        model = api.load(original.source)
        onto_gpu(model)
        probes.permute_weights(model, how["seed"])
    else:
        model = bench.models[cell["model"]]
    latents, labels = probe_images(bench)
    rows = []
    for level in how["levels"]:
        t = round(level * original.timesteps)
        generator = torch.Generator().manual_seed(provenance.derive_seed(how["seed"], "noise", t))
        noise = torch.randn(latents.shape, generator=generator).to(latents.device)
        for name, text in zip(PROMPTS, ("", concept["prompt"]), strict=True):
            condition = model.null() if not text else model.encode([text])
            features = probes.activations(model, latents, noise, t=t, condition=condition)
            result = probes.probe(
                features, labels, folds=how["folds"], shuffles=how["shuffles"], seed=how["seed"]
            )
            rows.append({"prompt": name, "time_step": t, **result})
    return {"images": len(labels), "features": features.shape[1], "rows": rows}


def probe_images(bench: Bench) -> tuple[Tensor, np.ndarray]:
    """Return latents [n, c, h, w] of the original's images, and which show the concept, [n] bool.

    There are as many images with the concept as without it.

    Raises:
        UserError: No image of a kind was generated.
    """
    ((attribute, value),) = bench.suite.concept.items()
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, images in bench.images_of(ORIGINAL).items():
        is_forget = bench.suite.groups[name].role == "forget"
        shows = torch.from_numpy(bench.judge.classify(images)[attribute] == value)
        kinds[is_forget].append(images[shows == is_forget])
    with_concept, without = (torch.cat(kinds[is_forget]) for is_forget in (True, False))
    n = min(len(with_concept), len(without))
    if n == 0:
        raise UserError("the original generates no image with the concept; generate more images")
    pixels = torch.cat([with_concept[:n], without[:n]]).permute(0, 3, 1, 2).float() / 127.5 - 1
    original = bench.models[ORIGINAL]
    batches = [original.encode_images(part) for part in pixels.split(probes.BATCH)]
    return torch.cat(batches), np.arange(2 * n) < n


def measure(
    bench: Bench,
    study: Mapping[str, Any],
    name: str,
    erasures: list[str],
    report: Callable[[str], None] = print,
) -> None:
    """Measure the configurations of a concept that have no result yet, and store each."""
    results, concept = Results(STUDY), study["concepts"][name]
    for key, cell in cells(bench, study, erasures).items():
        settings = settings_of(bench, study, concept, cell)
        previous = results.get(f"{name}_{key}")
        if previous is not None and previous["settings"] == settings:
            continue
        match cell["kind"]:
            case "whole":
                content = measure_whole(bench, cell)
            case "blocks":
                content = measure_blocks(bench, cell)
            case "steps":
                content = measure_steps(bench, cell)
            case _:
                content = measure_probe(bench, cell, study, concept)
        results[f"{name}_{key}"] = {
            "concept": name,
            **cell,
            **content,
            "settings": settings,
            "environment": provenance.describe(),
        }
        report(f"{name}_{key}")


def bench_of(
    study: Mapping[str, Any],
    name: str,
    *,
    work: Path,
    run_folders: Sequence[Path] = (),
    controls: Sequence[Path] = (),
) -> tuple[Bench, list[str]]:
    """Load the models of a concept, and train the erasures that are not trained yet.

    Args:
        study: The configuration.
        name: The concept.
        work: The folder of the runs.
        run_folders: Erased models in place of the configuration's erasures.
        controls: Folders of controls. Those of other concepts are left out.

    Returns:
        The bench, and the names of the erased models.

    Raises:
        UserError: A model has another text encoder, VAE or tokenizer than the original, or the
            suite lacks a group.
    """
    concept = study["concepts"][name]
    suite = suite_with(suites.load(concept["suite"]), study["images"])
    models: dict[str, Model] = {}
    origins: dict[str, dict[str, Any]] = {ORIGINAL: {}}
    labels = {ORIGINAL: "original"}
    for folder in run_folders:
        key = _name_of(folder)
        models[key] = api.load(str(folder))
        origins[key], labels[key] = {"run": folder.name}, folder.name
    for key, entry in {} if run_folders else concept["erasures"].items():
        recipe, folder = recipe_of(entry, {}, study["seed"]), work / f"{name}_{key}"
        clear(folder, recipe)
        run = api.erase(recipe, output=folder, resume=True)
        # from the stored tensors, so that a finished run has the same weights in every call
        models[key] = cast(Model, erased_model(run))
        origins[key], labels[key] = {"recipe": recipe.resolved()}, entry["label"]
    erasures = list(models)
    if wrong := [key for key in erasures if key == ORIGINAL or key.startswith("control")]:
        raise UserError(f"an erasure has the name {wrong[0]!r} of another model; rename it")
    original = api.load(study.get("model", "tiny-sd"))
    texts = [text for group in suite.groups for text in suites.group_prompts(suite, group).texts]
    for key, model in models.items():
        _require_same_parts(model, original, labels[key])
    for folder in controls:
        control = NeverLearned(api.load(str(folder)), read_record(folder))
        ((attribute, value),) = suite.concept.items()
        if control.record and value not in control.record.get("without", {}).get(attribute, ()):
            continue
        control.require_comparable(original, suite.concept, texts)
        key = f"control_{len(models) - len(erasures) + 1}"
        models[key], origins[key] = control.model, dict(control.record)
        labels[key] = f"never learned {name}, {len(models) - len(erasures)}"
    everything = {ORIGINAL: original, **models}
    onto_gpu(*everything.values())
    bench = Bench(suite, everything, {ORIGINAL: {}, **origins}, {ORIGINAL: "original", **labels})
    return bench, erasures


def suite_with(suite: suites.Suite, images: Mapping[str, int]) -> suites.Suite:
    """Return a suite with some of its groups, and the numbers of their images.

    Raises UserError if the suite lacks a group.
    """
    if missing := [name for name in images if name not in suite.groups]:
        raise UserError(
            f"images: the suite has no group {missing[0]!r}; it has {', '.join(suite.groups)}"
        )
    groups = {name: suite.groups[name].model_copy(update={"n": n}) for name, n in images.items()}
    return suite.model_copy(update={"groups": groups})


def _name_of(folder: Path) -> str:
    """Return the name of a run folder as a part of a key."""
    return "".join(letter if letter.isalnum() else "_" for letter in folder.name)


def _require_same_parts(model: Model, original: Model, label: str) -> None:
    """Raise UserError if another part than the denoiser differs, in half precision."""
    for part in original.parts:
        if part == "denoiser":
            continue
        own, other = (one.part(part).state_dict() for one in (model, original))
        if own.keys() != other.keys() or not all(
            torch.equal(own[key].half(), other[key].half()) for key in own
        ):
            raise UserError(
                f"{label}: its {part} differs from the original's; only erasures of the denoiser "
                "can exchange parts of it"
            )


def write_figures(folder: Path) -> list[Path]:
    """Write one figure for each erasure from the stored results, as SVG. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in rendering.figures_by_erasure(Results(STUDY)).items():
        paths.append(folder / f"{name}.svg")
        figure_files.write(paths[-1], figure)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--concepts", default="", help="only these")
    parser.add_argument("--erased", default="", help="run folders of one concept")
    parser.add_argument("--controls", default="", help="folders of models that never learned it")
    parser.add_argument("--work", type=Path, default=Path("runs/location"))
    parser.add_argument("--figures", type=Path, help="write the figures here, and measure nothing")
    args = parser.parse_args()
    if args.figures:
        for path in write_figures(args.figures):
            print(path)
        return
    study = yaml.safe_load(args.study.read_text())
    concepts = parse_names(parser, "concepts", args.concepts, study["concepts"])
    run_folders, controls = (
        [Path(name) for name in text.split(",") if name] for text in (args.erased, args.controls)
    )
    if run_folders and len(concepts) != 1:
        parser.error("--erased: name the one concept of these runs with --concepts")
    for name in concepts:
        try:
            bench, erasures = bench_of(
                study, name, work=args.work, run_folders=run_folders, controls=controls
            )
            measure(bench, study, name, erasures, report=lambda key: print(key, flush=True))
        except UserError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
