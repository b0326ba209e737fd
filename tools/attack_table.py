"""Several erasures of one concept under several attacks, one protocol for all.

    python -m tools.attack_table eval/studies/tiny_attacks.yaml [--victims munba,esd] [--attacks p4d-k] [--work runs/attacks]

Each victim is trained from its recipe (once: a finished run is taken again) and attacked; attacks that were interrupted go on
where they stopped. One JSON a victim and attack goes to eval/results/<study>/; `python -m tools.render_results` makes
the table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import api
from concept_eraser import recipe as recipes
from concept_eraser.evaluation.suite import dumps
from tools.study import erased_model
from tools.tasks import listed

RESULTS = Path(__file__).parent.parent / "eval" / "results"


def victim(spec: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Any]]:
    """The erased model, trained if it is not there yet, and what is to be told of it."""
    recipe = recipes.load(spec["recipe"], [f"{k}={json.dumps(v)}" for k, v in spec.get("set", {}).items()])
    run = api.erase(recipe, output=folder, resume=True)
    model = run.model or erased_model(run)
    return model, {"label": spec["label"], "recipe": recipe.resolved(), "seconds": run.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--victims", default="", help="only these, by name")
    parser.add_argument("--attacks", default="", help="only these, by name")
    parser.add_argument("--work", type=Path, default=Path("runs/attacks"))
    args = parser.parse_args()
    study = yaml.safe_load(args.study.read_text())
    folder = RESULTS / args.study.stem
    folder.mkdir(parents=True, exist_ok=True)
    for name in listed(parser, "victims", args.victims, study["victims"]):
        work = args.work / args.study.stem / name
        model, told = victim(study["victims"][name], work / "run")
        for attack in listed(parser, "attacks", args.attacks, study["attacks"]):
            path = folder / f"{name}_{attack}.json"
            if path.exists():
                continue
            found = api.attack(model, attack, study["suite"], group=study["group"], before="tiny-sd", n=study["n"], seed=study["seed"], options=study["attacks"][attack], output=work / attack)  # fmt: skip
            path.write_text(dumps({"victim": name, **told, **found.as_dict()}))
            rates = {key: round(100 * rate["value"]) for key, rate in found.rates().items()}
            print(f"{name} under {attack}: {rates} % ({found.seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
