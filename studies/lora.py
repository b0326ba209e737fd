"""Measure erasing LoRAs as people use them: at strengths, in smaller files, and several at once.

    python -m studies.lora studies/configs/lora.yaml [--seeds 0] [--rows star,star_rank_8]
    [--stage images] [--work runs/lora]

Each concept of the configuration is erased alone, with the settings of `concept-eraser erase
CONCEPT`, and a style LoRA is trained beside them (studies/style_lora.py). A row is one or several
files of these LoRAs, written as `concept-eraser export --to kohya` writes them and read back: at a
strength, at a lower rank, in another precision, or with block weights. Their changes are added to
the weights of the bundled model.

Each row has the images of the same prompts: some for each concept, some whose prompts name no
erased concept, and some whose prompts name no style. Templates and background phrases are those of
no training (studies/side_effects.py). A result has the judge's labels of every image. Each row of a
training seed is one result (studies/result_tables.py). Finished results are not measured again.

Some rows are also attacked, on the prompts of a suite. Each attack on a row of a training seed is a
result in the folder `attacks`.

`python -m studies.render_results` renders the page.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from concept_eraser import api
from concept_eraser.concepts import bundled
from concept_eraser.concepts.plan import BUNDLED
from concept_eraser.data import prompts
from concept_eraser.data.prompts import Prompt
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import runner
from concept_eraser.exporting import lora_export
from concept_eraser.models import lora_files
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.models.lora import Factors
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.storage.readers import read_tensor_header, read_tensors
from concept_eraser.utils import provenance
from studies import style_lora
from studies.result_tables import Results
from studies.runs import clear
from studies.side_effects import draw_prompts, predict, recipe_of

CONTROL = "never_learned"  # the name of the control in the results of attacks
STYLE = "style"  # the name of the style LoRA in a row
RETAINED, PLAIN = "retained", "plain"  # the groups beside one for each concept
ALL_RANKS = 1.0  # the largest relative error: every rank is written


@dataclass(frozen=True)
class Row:
    """One model: the bundled one with the changes of some LoRA files.

    Attributes:
        name: Its name in the results.
        loras: The names of the LoRAs, concepts or STYLE, with their strengths.
        export: Settings of `lora_export.LoraRequest` for each file.
    """

    name: str
    loras: Mapping[str, float]
    export: Mapping[str, Any] = field(default_factory=dict)


def rows_of(study: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of a configuration. The first concept is used alone."""
    first, *others = study["concepts"]
    yield Row("original", {})
    for strength in study["strengths"]:
        yield Row(f"{first}_strength_{strength:g}", {first: float(strength)})
    for rank in study["ranks"]:
        yield Row(f"{first}_rank_{rank}", {first: 1.0}, {"rank": rank})
    for dtype in study["precisions"]:
        yield Row(f"{first}_{dtype}", {first: 1.0}, {"dtype": dtype})
    for name, weights in study["block_weights"].items():
        yield Row(f"{first}_{name}", {first: 1.0}, {"block_weights": tuple(weights)})
    for name in [*others, STYLE]:
        yield Row(name, {name: 1.0})
    for names in study["together"]:
        for strength in study["strengths_together"]:
            loras = {name: 1.0 if name == STYLE else float(strength) for name in names}
            yield Row(f"{'_'.join(names)}_strength_{strength:g}", loras)


@dataclass(frozen=True)
class Bench:
    """One study, its work folder and its results."""

    study: Mapping[str, Any]
    work: Path
    results: Results

    def groups(self) -> dict[str, list[Prompt]]:
        """Return the prompts of each group: the concepts, RETAINED and PLAIN."""
        n, seed = self.study["images"], self.study["image_seed"]
        concepts = self.study["concepts"]
        groups = {one: draw_prompts(one, n, seed, concepts) for one in concepts}
        kept = [one for one in bundled.VALUES["shape"] if one not in concepts]
        each = [draw_prompts(shape, -(-n // len(kept)), seed, concepts) for shape in kept]
        groups[RETAINED] = [rows[i] for i in range(len(each[0])) for rows in each][:n]
        plain = prompts.load({"expand": {"templates": [style_lora.PLAIN], **style_lora.WORDS}})
        free = [row for row in plain.prompts if not set(concepts) & set(row.fields.values())]
        groups[PLAIN] = [free[i * len(free) // n] for i in range(n)]
        return groups

    def recipe(self, concept: str, seed: int) -> Recipe:
        """Return the recipe of an erasure."""
        way = {"set": self.study.get("set", {})}  # none of them for the default
        return recipe_of({"methods": {"": way}, "seed": seed}, "", concept)

    def recipes(self, loras: Iterable[str], seed: int) -> dict[str, str]:
        """Return the fingerprints of the recipes of some erasures, without the style LoRA's."""
        return {name: self.recipe(name, seed).fingerprint for name in loras if name != STYLE}

    def has_recipes(self, result: Mapping[str, Any], recipes: Mapping[str, str]) -> bool:
        """Whether a result is of erasures with these recipes.

        Older results do not state them. They are of the default.
        """
        if "recipes" not in result:
            return not self.study.get("set")
        return bool(result["recipes"] == recipes)

    def train(self, name: str, seed: int) -> Path:
        """Return the run folder of a LoRA, trained where it is not there."""
        folder = self.work / f"{name}_seed{seed}"
        if name == STYLE:
            style = self.study["style"]
            images = self.work / f"style_images_{style['value']}_{style['images']}"
            if not (images / "metadata.jsonl").exists():
                shutil.rmtree(images, ignore_errors=True)
                style_lora.write_images(images, style["value"], style["images"])
            recipe = style_lora.recipe(images, style["rank"], style["steps"], seed)
        else:
            recipe = self.recipe(name, seed)
        clear(folder, recipe)
        api.erase(recipe, output=folder, resume=True)
        return folder

    def write(self, model: Model, run: Path, row: Row, folder: Path) -> tuple[Factors, Any]:
        """Write the file of a run's LoRA as `export` does. Return what is read from it."""
        settings = {"rank": None, "strength": 1.0, "max_error": ALL_RANKS, **row.export}
        place = folder / f"{run.name}.safetensors"
        written = lora_export.write(
            run,
            model=model,
            changes=None,
            place=place,
            request=lora_export.LoraRequest("kohya", **settings),
        )
        header = read_tensor_header(place)[0]
        (factors,) = lora_files.read(model, read_tensors(place), header, str(place))
        sizes = {"file_bytes": place.stat().st_size, "rank": written.rank}
        errors = {"error": round(written.error, 4), "rounding": round(written.rounding, 6)}
        return factors, {**sizes, **errors}

    def build(self, row: Row, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return the model of a row, and the size and errors of each file."""
        model: Any = api.load(BUNDLED)
        original = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
        files, change = {}, []
        with tempfile.TemporaryDirectory() as folder:
            for name, strength in row.loras.items():
                run = self.train(name, seed)
                factors, files[name] = self.write(model, run, row, Path(folder))
                change.append((factors, strength))
        set_change(model, original, change)
        onto_gpu(model)
        return model, files

    def attack(self, row: Row, seed: int) -> None:
        """Attack a row, if the configuration names it, and store the results."""
        if row.name in self.study["attacked"]["rows"]:
            recipes = self.recipes(row.loras, seed)
            self._attack(row.name, seed, lambda: self.build(row, seed)[0], recipes)

    def attack_control(self) -> None:
        """Attack the model that never learned the first concept."""
        control = self.study["attacked"]["control"]
        self._attack(CONTROL, 0, lambda: api.load(control), {"control": control})

    def _attack(
        self, name: str, seed: int, victim_of: Callable[[], Model], recipes: Mapping[str, str]
    ) -> None:
        """Run each attack of the configuration that has no result on a model yet."""
        plan, results = self.study["attacked"], self.results.folder("attacks")
        suite = suites.load(plan["suite"])
        for attack, options in plan["attacks"].items():
            protocol = runner.Protocol(
                suite, attack, options, n=plan["n"], batch=plan["n"], seed=plan["seed"]
            )
            key = f"{name}_{attack}_seed{seed}"
            previous = results.get(key)
            if (
                previous is not None
                and self.has_recipes(previous, recipes)
                and _has_protocol(previous, protocol.as_dict())
            ):
                continue
            victim, original = victim_of(), api.load(BUNDLED)
            onto_gpu(victim, original)
            campaign = runner.run(protocol, victim, original)
            content = {"row": name, "seed": seed, "recipes": dict(recipes)}
            results[key] = {**content, **campaign.as_dict()}
            print(f"{key}: {100 * campaign.rates()['asr']['value']:.0f} %", flush=True)

    def measure(self, row: Row, seed: int) -> None:
        """Measure a row, and store its result."""
        key = f"{row.name}_seed{seed}"
        groups = self.groups()
        texts = {name: [one.text for one in rows] for name, rows in groups.items()}
        settings = {
            **{name: self.study[name] for name in ("image_seed", "sampling", "judge", "style")},
            "prompts_hash": provenance.fingerprint(texts),
            "loras": dict(row.loras),
            "export": {name: _plain(value) for name, value in row.export.items()},
        }
        recipes, previous = self.recipes(row.loras, seed), self.results.get(key)
        if (
            previous is not None
            and previous["settings"] == settings
            and self.has_recipes(previous, recipes)
        ):
            return
        model, files = self.build(row, seed)
        self.results[key] = {
            "row": row.name,
            "seed": seed,
            "files": files,
            "prompts": {name: [one.fields for one in rows] for name, rows in groups.items()}
            if row.name == "original"
            else {},
            "predicted": predict(model, groups, self.study, seed=self.study["image_seed"]),
            "settings": settings,
            "recipes": recipes,
            "environment": provenance.describe(),
        }
        print(f"{key}: measured", flush=True)


def _has_protocol(result: Mapping[str, Any], protocol: Mapping[str, Any]) -> bool:
    """Whether a result has this protocol. Its number of prompts may be smaller.

    Prompts whose image by the original lacks the concept are left out.
    """
    plain: dict[str, Any] = json.loads(suites.dumps(protocol))
    stored = result["protocol"]
    return all(stored.get(key) == plain[key] for key in plain.keys() - {"n", "batch"})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@torch.no_grad()
def set_change(
    model: Any,
    original: Mapping[str, torch.Tensor],
    change: Sequence[tuple[Factors, float]],
) -> None:
    """Set the denoiser to its original weights plus the changes times their strengths."""
    model.denoiser.load_state_dict(original)
    for factors, strength in change:
        for layer in factors.layers:
            weight = model.denoiser.get_parameter(f"{layer}.weight")
            weight += strength * factors.change(layer).to(weight)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", default="", help="only these training seeds")
    parser.add_argument("--rows", default="", help="only these rows, by name")
    parser.add_argument("--stage", choices=["images", "attacks"], help="only this one")
    parser.add_argument("--work", type=Path, default=Path("runs/lora"))
    options = parser.parse_args(arguments)
    study = yaml.safe_load(options.config.read_text())
    bench = Bench(study, options.work, Results(options.config.stem))
    rows = {row.name: row for row in rows_of(study)}
    names = [name for name in options.rows.split(",") if name] or list(rows)
    if unknown := [name for name in names if name not in rows]:
        parser.error(f"--rows: there is no {unknown[0]!r}; it has {', '.join(rows)}")
    if options.stage != "images":
        bench.attack_control()
    for seed in [int(one) for one in options.seeds.split(",") if one] or study["seeds"]:
        for name in names:
            if options.stage != "attacks":
                bench.measure(rows[name], seed)
            if options.stage != "images":
                bench.attack(rows[name], seed)


if __name__ == "__main__":
    main()
