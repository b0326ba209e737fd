"""Compare a concept that is given by its name with hand-written prompts, on the bundled model.

    python -m studies.one_line studies/configs/one_line.yaml [--concepts star,blue] [--work FOLDER]

Each concept is erased twice by the default recipe: once by its name, once with the prompts of the
configuration. Both runs are measured by the suite that the first one wrote. An interrupted study
continues where it stopped. `python -m studies.render_results` renders the page.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import api
from concept_eraser.recipes import defaults, overrides
from studies.result_tables import Results

SUITE = "suite.yaml"


def hand_written_recipe(content: dict[str, Any]) -> dict[str, Any]:
    """Return the default recipe with the prompts of the configuration."""
    objective = {"prompts": content["prompts"], "anchor": content["anchor"]}
    lines = [
        f"forget={_flow(objective)}",
        f"retain={_flow({'prompts': content['retain']})}",
    ]
    recipe: dict[str, Any] = {}
    for line in defaults.complete(lines):
        overrides.apply(recipe, line)
    return recipe


def _flow(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()


def measure(study: dict[str, Any], concept: str, way: str, work: Path, steps: int | None) -> Any:
    """Erase a concept in one way, and return the numbers of the run."""
    few = [] if steps is None else [f"training.steps={steps}", "forget.n=4", "retain.n=4"]
    changes = [f"training.seed={study['seed']}", *few]
    suite_file = work / concept / "by_name" / SUITE
    if way == "by_name":
        source: Any = concept
    else:
        source = hand_written_recipe(study["concepts"][concept]["hand_written"])
    run = api.erase(source, overrides=changes, output=work / concept / way, resume=True)
    evaluation = api.evaluate(run.folder, suite_file, n=study["images"])
    return {
        "concept": concept,
        "way": way,
        "seconds": run.seconds,
        "recipe": run.recipe.resolved(),
        "evaluation": evaluation.as_dict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--concepts", default="")
    parser.add_argument("--work", type=Path, default=Path("runs/one_line"))
    parser.add_argument("--steps", type=int, help="a short run, which records nothing")
    arguments = parser.parse_args()
    study = yaml.safe_load(arguments.config.read_text())
    results = Results(arguments.config.stem)
    chosen = [name for name in arguments.concepts.split(",") if name] or list(study["concepts"])
    for concept in chosen:
        for way in ("by_name", "hand_written"):
            key = f"{concept}_{way}"
            if key in results and arguments.steps is None:
                continue
            content = measure(study, concept, way=way, work=arguments.work, steps=arguments.steps)
            if arguments.steps is None:
                results[key] = content
            print(key, f"{content['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
