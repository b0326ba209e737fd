"""The process of one long job.

It reads its task from the standard input, and writes one JSON line per report.

echo '{"kind": "erase", "recipe": ..., "folder": "runs/x"}' | python -m concept_eraser.demo.worker
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from concept_eraser.demo import safety
from concept_eraser.storage import output_folder
from concept_eraser.storage.readers import read_yaml
from concept_eraser.storage.writers import write_text
from concept_eraser.utils.collector import collect_less_often
from concept_eraser.utils.commands import erase_command
from concept_eraser.utils.errors import Interrupted, UserError

if TYPE_CHECKING:
    from concept_eraser.evaluation.suite import Suite


def say(**report: Any) -> None:
    """Write one report.

    Raises KeyboardInterrupt if the server has ended, so that the job can be resumed.
    """
    try:
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise KeyboardInterrupt from None


class Reporter:
    """A progress callback that reports at most three times a second.

    It always reports the first and the last progress of each kind of work.
    """

    def __init__(self) -> None:
        self.last, self.what = 0.0, ""

    def __call__(self, what: str, count: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        if what != self.what or count == total or now - self.last > 0.3:
            self.last, self.what = now, what
            say(what=what, count=count, total=total, note=note)


def erase(spec: dict[str, Any]) -> None:
    """Train into a run folder, or continue an unfinished run there."""
    from concept_eraser import api
    from concept_eraser.recipes import recipe as recipes

    folder = Path(spec["folder"])
    command = erase_command(folder)
    content = spec.get("recipe") or read_yaml(folder / "recipe.yaml", safety.RECIPE)
    if not isinstance(content, dict):
        raise UserError(
            f"{folder / 'recipe.yaml'} is damaged: expected a mapping, found "
            f"{type(content).__name__}; erase again"
        )
    recipe = recipes.load(content)
    safety.require_no_code(recipe)
    output_folder.claim(folder, "run", alone=True)
    # from now on the run can be resumed, even during the generation of its images
    if not (folder / "recipe.yaml").exists():
        write_text(folder / "recipe.yaml", recipes.dump(recipe, command))
    api.erase(recipe, output=folder, resume=True, command=command, progress=Reporter())


def measure(spec: dict[str, Any]) -> None:
    """Evaluate a run by its suite.

    evaluation.json and report.html go into its folder, or beside those of another suite. Raises
    UserError if another process works in that folder.
    """
    from concept_eraser import api
    from concept_eraser.evaluation import suite as suites
    from concept_eraser.reporting.run_results import place_for

    folder = Path(spec["folder"])
    _require_no_code(folder)
    protocol = suites.load(spec["suite"])
    name = Path(spec["suite"]).stem if isinstance(spec["suite"], str) else "own_prompts"
    if isinstance(spec["suite"], str) and Path(spec["suite"]).parent == folder:
        name = "_".join(protocol.concept.values())  # of the run's own suite
    place = place_for(folder, protocol, name)
    names = ("evaluation.json", "evaluation.csv.xz", "report.html")
    with output_folder.results(place, "evaluation", names, inside=folder):
        controls, left_out = _controls(spec.get("controls", ()), folder, protocol)
        evaluation = api.evaluate(
            str(folder), protocol, n=spec["n"], control=controls or None, progress=Reporter()
        )
        output_folder.claim(place, "evaluation", inside=folder)
        evaluation.save(place / "evaluation.json")
        evaluation.save_outcomes(place / "evaluation.csv.xz")
        api.report(evaluation, place / "report.html", run=folder)
    reasons = "; ".join(f"{metric}: {reason}" for metric, reason in evaluation.refused.items())[
        :1000
    ]
    if reasons and not evaluation.results:
        raise UserError(f"nothing could be measured; {reasons}")
    notes = [f"not measured: {reasons}"] if reasons else []
    # a page may have controls of several concepts
    notes += [] if controls else left_out
    say(note="; ".join(notes)[:1000])


def _controls(sources: Sequence[str], folder: Path, protocol: Suite) -> tuple[list[str], list[str]]:
    """Return the controls that can be compared with a run, and why the others cannot."""
    from concept_eraser import api
    from concept_eraser.demo.controls import load_fitting
    from concept_eraser.demo.state import recipe_in
    from concept_eraser.evaluation import suite as suites

    recipe = recipe_in(folder)
    if not sources or recipe is None:
        return [], []
    prompts = [
        text for group in protocol.groups for text in suites.group_prompts(protocol, group).texts
    ]
    fitting, left_out = load_fitting(
        sources, api.load(recipe.model), concept=protocol.concept, texts=prompts
    )
    return list(fitting), left_out


def attack(spec: dict[str, Any]) -> None:
    from concept_eraser.demo.attack_job import run_attack

    _require_no_code(Path(spec["run"]))
    if safety.names_code(spec["base"]):
        raise UserError(
            "the original model names code, and the page runs no code that a recipe names"
        )
    run_attack(spec, Reporter())


def _require_no_code(folder: Path) -> None:
    """Raise UserError if the recipe of a run folder names code. Other folders have no recipe."""
    from concept_eraser.demo.presets import read_recipe

    recipe = read_recipe(folder)
    if recipe is not None:
        safety.require_no_code(recipe)


def main() -> int:
    """Run the job. Returns 0 at its end, 130 after a stop, and 2 after an error of the input."""
    # children of a shell's & ignore Ctrl-C, but Cancel needs it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    collect_less_often()
    try:
        spec = json.loads(sys.stdin.read())
        say(what="starting", count=0, total=0)
        {"erase": erase, "measure": measure, "attack": attack}[spec["kind"]](spec)
    except UserError as error:
        say(error=str(error))
        return 2
    except (Interrupted, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
