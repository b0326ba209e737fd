"""Run several attacks on several models without one concept, under one protocol.

    python -m studies.attack_table studies/configs/tiny_attacks.yaml [--victims munba,esd]
    [--attacks p4d-k] [--seeds 0] [--work runs/attacks]

Each model is trained once from its recipe and attacked. Interrupted attacks continue where they
stopped. Each model, attack and training seed is a result of the study (studies/result_tables.py).
`python -m studies.render_results` renders the page.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import api
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks.runner import Protocol
from concept_eraser.evaluation.suite import dumps
from concept_eraser.recipes.recipe import Recipe
from studies.result_tables import Content, Results
from studies.runs import clear, model_of, recipe_of, same
from studies.tasks import parse_names


def victim(spec: dict[str, Any], seed: int, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the erased model, trained if necessary, and its description for the result."""
    recipe = recipe_of(spec, {}, seed)
    clear(folder, recipe)
    run = api.erase(recipe, output=folder, resume=True)
    model = model_of(run)
    return model, {
        "label": spec["label"],
        "training_seed": seed,
        "recipe": recipe.resolved(),
        "trained": run.seconds,
    }


def protocol_of(study: dict[str, Any], attack: str) -> dict[str, Any]:
    """Return the protocol that a result of this study must have."""
    protocol = Protocol(
        suite=suites.load(study["suite"]),
        attack=attack,
        options=study["attacks"][attack],
        group=study["group"],
        n=study["n"],
        seed=study["seed"],
    )
    # a result has fewer prompts where the original does not show the concept
    return {k: v for k, v in protocol.as_dict().items() if k not in ("n", "batch")}


def require_asked(results: Results, key: str, protocol: dict[str, Any]) -> None:
    """Raise SystemExit if a result has another protocol. A table has one protocol."""
    stored_protocol = results[key]["protocol"]
    differ = [
        name
        for name, value in protocol.items()
        if stored_protocol.get(name) != json.loads(dumps(value))
    ]
    if differ:
        raise SystemExit(_has_another(results, key, f"protocol ({', '.join(differ)})"))


def require_recipe(results: Results, key: str, recipe: Recipe) -> None:
    """Raise SystemExit if a result is of a model with another recipe."""
    if not same({**results[key], "entry": key}, recipe):
        raise SystemExit(_has_another(results, key, "recipe"))


def _has_another(results: Results, key: str, what: str) -> str:
    return (
        f"{results.name}/{key} has another {what}; to make it again, call python -m "
        f"studies.result_tables {results.name} --remove {key}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--victims", default="", help="only these, by name")
    parser.add_argument("--attacks", default="", help="only these, by name")
    parser.add_argument("--seeds", default="", help="only these training seeds")
    parser.add_argument("--work", type=Path, default=Path("runs/attacks"))
    args = parser.parse_args()
    study = yaml.safe_load(args.study.read_text())
    results = Results(args.study.stem)
    seeds = [int(s) for s in args.seeds.split(",")] if args.seeds else study["training_seeds"]
    attacks = parse_names(parser, "attacks", args.attacks, study["attacks"])
    for seed in seeds:
        for name in parse_names(parser, "victims", args.victims, study["victims"]):
            keys = {attack: f"{name}_{attack}_seed{seed}" for attack in attacks}
            recipe = recipe_of(study["victims"][name], {}, seed)
            for attack in [a for a in attacks if keys[a] in results]:
                require_recipe(results, keys[attack], recipe)
                require_asked(results, keys.pop(attack), protocol_of(study, attack))
            if keys:
                under_attack(
                    study,
                    name,
                    seed=seed,
                    work=args.work / args.study.stem / f"{name}_{seed}",
                    keys=keys,
                    results=results,
                )


def under_attack(
    study: dict[str, Any],
    name: str,
    seed: int,
    work: Path,
    keys: dict[str, str],
    results: MutableMapping[str, Content],
) -> None:
    """Train or load a model, and write the result of each attack under its key."""
    model, facts = victim(study["victims"][name], seed, work / "run")
    for attack, key in keys.items():
        result = api.attack(
            model,
            attack,
            study["suite"],
            group=study["group"],
            before="tiny-sd",
            n=study["n"],
            seed=study["seed"],
            options=study["attacks"][attack],
            output=work / attack,
        )
        results[key] = {"victim": name, **facts, **result.as_dict()}
        rates = {key: round(100 * rate["value"]) for key, rate in result.rates().items()}
        print(
            f"{name} (seed {seed}) under {attack}: {rates} % ({result.seconds:.0f} s)", flush=True
        )
    # weights.safetensors is enough to load it again
    shutil.rmtree(work / "run" / "pipeline", ignore_errors=True)


if __name__ == "__main__":
    main()
