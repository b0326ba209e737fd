"""Several erasures of one concept under several attacks, one protocol for all.

    python -m tools.attack_table eval/studies/tiny_attacks.yaml [--victims munba,esd] [--attacks p4d-k] [--seeds 0] [--work runs/attacks]

Each victim is trained from its recipe (once: a finished run is taken again) and attacked; attacks that were interrupted go on
where they stopped. One JSON a victim, attack and training seed goes to eval/results/<study>/; `python -m tools.render_results` makes
the table.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import api
from concept_eraser import recipe as recipes
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacking import Protocol
from concept_eraser.evaluation.suite import dumps
from tools.runs import erased_model
from tools.tasks import listed

RESULTS = Path(__file__).parent.parent / "eval" / "results"


def victim(spec: dict[str, Any], seed: int, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The erased model, trained if it is not there yet, and what is to be told of it."""
    asked = {**spec.get("set", {}), "training.seed": seed}
    recipe = recipes.load(spec["recipe"], [f"{k}={json.dumps(v)}" for k, v in asked.items()])
    run = api.erase(recipe, output=folder, resume=True)
    model = run.model or erased_model(run)
    return model, {"label": spec["label"], "training_seed": seed, "recipe": recipe.resolved(), "trained": run.seconds}


def asked(study: dict[str, Any], attack: str) -> dict[str, Any]:
    """The protocol that a result of this study must have been made by."""
    protocol = Protocol(suites.load(study["suite"]), attack, study["attacks"][attack], study["group"], study["n"], seed=study["seed"])  # fmt: skip
    return {k: v for k, v in protocol.as_dict().items() if k not in ("n", "batch")}  # n is what was left of the asked


def require_asked(path: Path, protocol: dict[str, Any]) -> None:
    """Stop where a result that is there was made by another protocol: the table must not mix them."""
    known = json.loads(path.read_text())["protocol"]
    differ = [key for key, value in protocol.items() if known.get(key) != json.loads(dumps(value))]
    if differ:
        raise SystemExit(f"{path} was made by another protocol ({', '.join(differ)}); move it away to have it made again")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--victims", default="", help="only these, by name")
    parser.add_argument("--attacks", default="", help="only these, by name")
    parser.add_argument("--seeds", default="", help="only these training seeds")
    parser.add_argument("--work", type=Path, default=Path("runs/attacks"))
    args = parser.parse_args()
    study = yaml.safe_load(args.study.read_text())
    folder = RESULTS / args.study.stem
    folder.mkdir(parents=True, exist_ok=True)
    seeds = [int(s) for s in args.seeds.split(",")] if args.seeds else study["training_seeds"]
    attacks = listed(parser, "attacks", args.attacks, study["attacks"])
    for seed in seeds:
        for name in listed(parser, "victims", args.victims, study["victims"]):
            paths = {attack: folder / f"{name}_{attack}_seed{seed}.json" for attack in attacks}
            for attack in [a for a in attacks if paths[a].exists()]:
                require_asked(paths.pop(attack), asked(study, attack))
            if paths:
                under_attack(study, name, seed, args.work / args.study.stem / f"{name}_{seed}", paths)


def under_attack(study: dict[str, Any], name: str, seed: int, work: Path, paths: dict[str, Path]) -> None:
    """Train a victim, or find it again, and write what each attack does to it."""
    model, told = victim(study["victims"][name], seed, work / "run")
    for attack, path in paths.items():
        found = api.attack(model, attack, study["suite"], group=study["group"], before="tiny-sd", n=study["n"], seed=study["seed"], options=study["attacks"][attack], output=work / attack)  # fmt: skip
        path.write_text(dumps({"victim": name, **told, **found.as_dict()}))
        rates = {key: round(100 * rate["value"]) for key, rate in found.rates().items()}
        print(f"{name} (seed {seed}) under {attack}: {rates} % ({found.seconds:.0f} s)", flush=True)
    shutil.rmtree(work / "run" / "pipeline", ignore_errors=True)  # weights.safetensors is enough to make it again


if __name__ == "__main__":
    main()
