"""What attacks recover from erased models beyond what they get from models that never learned.

    python -m studies.excess_recovery studies/configs/excess_recovery.yaml [--concepts heart]
    [--entries munba_uce,uce] [--attacks completion] [--seeds 0] [--only controls]
    [--work runs/excess_recovery]

Each erasure is trained on the training split of protocol 2. Its suite measures it on the test
split, beside the controls: models that never learned the concept, trained by `python -m
concept_eraser.tiny.build --without shape=heart`. Then each attack runs on the erased model and on
the controls, with the same prompts, seeds and budget.

Each pair of a model and an attack is a result of the study (studies/result_tables.py). Results of
the same weights and the same protocol are not made again, and an interrupted attack continues.
With several processes, `--only controls` attacks the controls and `--only erasures` the others.

An entry with a `grid` has its setting chosen first, on another concept: that of `select`
(studies/selection.py). studies/configs/combination_rules.yaml does this for combination rules.

A result of an evaluation has the judge's label of each image (studies/image_labels.py), and one of
an attack the outcome of each prompt.

`metrics` in the configuration are measured beside those of the suite.

`unprotected` names attacks that run on the model before the erasure too, where a neutral word
replaces the concept's. `worst_cases` names groups of attacks whose worst case the page shows.

With `second_judge` in the configuration, that judge labels the images of each evaluation too
(studies/second_judge.py), and those that decide a new attack. It changes no other result. An attack
that was made without it is not made again. `figures` in the configuration names attacks by the key
of their result. The page shows their images on which the judges differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from concept_eraser import api, registry
from concept_eraser.data import generate
from concept_eraser.evaluation import suite as suites
from concept_eraser.evaluation.attacks import runner
from concept_eraser.evaluation.never_learned import NeverLearned, read_record
from concept_eraser.models.base import Model, onto_gpu
from concept_eraser.recipes import recipe as recipes
from concept_eraser.runs import job as jobs
from concept_eraser.utils import provenance
from studies import image_labels, second_judge, selection
from studies.rendering.excess_recovery import attack_key, model_key, selection_key
from studies.rendering.second_judge import KIND, second_judge_key
from studies.result_tables import Content, Results, figure_path
from studies.runs import clear, erased_model, recipe_of
from studies.tasks import parse_names


@dataclass(frozen=True)
class Case:
    """One concept with the models that its erasures are compared with.

    Attributes:
        name: The concept.
        suite: Its suite of the test split.
        original: The model before the erasures.
        controls: Models that never learned the concept.
        sources: The names or folders of the controls.
    """

    name: str
    suite: suites.Suite
    original: Model
    controls: Sequence[NeverLearned]
    sources: Sequence[str]


def load_case(study: Mapping[str, Any], name: str) -> Case:
    """Load the original and the controls of a concept.

    Raises:
        UserError: A control is missing, was trained on the concept, or has another text encoder,
            VAE or tokenizer than the original.
    """
    concept = study["concepts"][name]
    suite = suites.load(concept["suite"])
    original = api.load(study.get("model", "tiny-sd"))
    texts = [text for group in suite.groups for text in suites.group_prompts(suite, group).texts]
    sources: Sequence[str] = concept["controls"]
    controls = [NeverLearned(api.load(source), read_record(source)) for source in sources]
    for control in controls:
        control.require_comparable(original, suite.concept, texts)
    onto_gpu(original, *(control.model for control in controls))
    return Case(name, suite, original=original, controls=controls, sources=sources)


def erasure_of(study: Mapping[str, Any], entry: str, concept: str) -> Content:
    """Return an entry for a concept, in the form of studies/study.py.

    A recipe without a retain objective keeps none. An entry with settings of `replace` has that
    objective on the prompts of the concept too.
    """
    values = study["entries"][entry]
    own = study["concepts"].get(concept, {}).get("set", {})
    prompts = {"forget.prompts": f"protocol2_{concept}"}
    if recipes.load(values["recipe"]).retain is not None:
        prompts["retain.prompts"] = f"protocol2_{concept}_retain"
    if any(name.startswith("replace.") for name in values.get("set", {})):
        prompts["replace.prompts"] = prompts["forget.prompts"]
    return {**values, "set": {**prompts, **own, **values.get("set", {})}}


def choose(results: Results, study: Mapping[str, Any], entry: str, *, work: Path) -> Content:
    """Return the setting of an entry with a grid, chosen on the concept of `select`.

    The scored grid is a result of the study. It is made again if the recipe, the settings or the
    attack that scores them changed. An entry without a grid has the setting {}.
    """
    if "grid" not in study["entries"][entry]:
        return {}
    select = study["select"]
    erasure = {**erasure_of(study, entry, select["concept"]), "suite": select["suite"]}
    judge = registry.read("judge", suites.load(select["suite"]).judge).build().fingerprint
    settings = {
        "recipe": recipe_of(erasure, {}, select["seeds"][0]).fingerprint,
        "points": study["grids"][erasure["grid"]],
        "scorer": selection.scorer(dict(study), judge),
    }
    key = selection_key(entry)
    if not (_is_done(results, key, settings) and results[key]["seeds"] == select["seeds"]):
        scores = selection.select(dict(study), key, entry=erasure, work=work, judge=judge)
        results[key] = {
            "kind": "selection",
            "model": entry,
            "label": erasure["label"],
            "concept": select["concept"],
            "seeds": select["seeds"],
            "grid": scores,
            "point": max(scores, key=lambda row: row["score"])["point"],
            "settings": settings,
            "environment": provenance.describe(),
        }
    return cast(Content, results[key]["point"])


def train(
    study: Mapping[str, Any], case: Case, entry: str, *, point: Content, seed: int, work: Path
) -> Model:
    """Return an erased model. A finished run is loaded."""
    recipe = recipe_of(erasure_of(study, entry, case.name), point, seed)
    folder = _run_folder(case, entry, seed, work)
    clear(folder, recipe)
    if recipe.has_objects and (folder / "done.json").exists():
        # `erase` reads no finished run with an object; this one is of the same study
        run = api.Run(folder, recipe, jobs.read_done(folder)["seconds"])
    else:
        run = api.erase(recipe, output=folder, resume=True)
    # from the stored tensors, so that a finished run has the same weights in every call
    model = cast(Model, erased_model(run))
    onto_gpu(model)
    return model


def _run_folder(case: Case, entry: str, seed: int, work: Path) -> Path:
    return work / model_key(case.name, entry, seed)


def evaluate(
    results: Results,
    case: Case,
    key: str,
    *,
    model: Model,
    about: Content,
    metrics: Sequence[Any] = (),
) -> None:
    """Measure a model by the suite and against the controls, if this was not done before.

    metrics: Metrics beside those of the suite, by name or with options.
    """
    suite = case.suite.using(metrics=[*case.suite.metrics, *metrics]) if metrics else case.suite
    settings = {
        "model": generate.model_fingerprint(model),
        "controls": [generate.model_fingerprint(control.model) for control in case.controls],
        "suite": provenance.fingerprint(suite.model_dump(mode="json")),
    }
    if _is_done(results, key, settings) and _is_beside(results[key]["evaluation"], case):
        return
    evaluation = api.evaluate(model, suite, before=case.original, control=list(case.sources))
    content = {
        "evaluation": evaluation.as_dict(),
        "labels": image_labels.encode(evaluation.outcomes),
        "settings": settings,
    }
    results[key] = {**about, **content, "environment": provenance.describe()}


def judge_again(
    results: Results, case: Case, key: str, *, model: Model, about: Content, judge: Any
) -> None:
    """Label the images of an evaluation by a second judge, if this was not done before.

    judge: The second judge, by name or with options, as in a suite.
    """
    suite = case.suite.using(second_judge=judge)
    settings = second_judge.settings_of(suite, case.original, model)
    if _is_done(results, key, settings):
        return
    content = second_judge.compare(suite, case.original, model)
    (attribute,) = case.suite.concept
    results[key] = {
        **about,
        "kind": KIND,
        "attribute": attribute,
        **content,
        "settings": settings,
        "environment": provenance.describe(),
    }


def attack(
    results: Results,
    study: Mapping[str, Any],
    case: Case,
    key: str,
    *,
    victim: Model,
    about: Content,
    work: Path,
) -> None:
    """Attack a model, if this was not done before."""
    suite = case.suite.using(second_judge=study.get("second_judge"))
    hide = study["unprotected"]["hide"] if about["kind"] == "unprotected" else None
    protocol = protocol_of(study, suite, study["attacks"][about["attack"]], hide=hide)
    settings = {
        "victim": generate.model_fingerprint(victim),
        "original": generate.model_fingerprint(case.original),
        "protocol": provenance.fingerprint(protocol.as_dict()),
    }
    judge = suite.build_judge().fingerprint
    if _is_done(results, key, settings) and results[key]["campaign"]["protocol"]["judge"] == judge:
        return
    campaign = runner.run(protocol, victim, case.original, folder=work / "attacks" / key)
    content = {**about, "campaign": campaign.as_dict(), "settings": settings}
    if suite.second_judge is not None:
        content["second_judge"] = second_judge.count_attacked(campaign.outcomes)
        if key in study.get("figures", ()):
            second_judge.draw_differing(campaign, figure_path(results.study, f"{key}.webp"))
    results[key] = content


def protocol_of(
    study: Mapping[str, Any],
    suite: str | suites.Suite,
    entry: Mapping[str, Any],
    *,
    hide: str | None = None,
) -> runner.Protocol:
    """Return the protocol of an attack of the configuration.

    An attack with its own `seed` is a restart. It has the same prompts, initial noises and budget,
    and other draws of the search.

    hide: A word that replaces the concept's in the prompts.
    """
    return runner.Protocol(
        suite=suites.load(suite),
        attack=entry["name"],
        options=entry.get("options", {}),
        n=study["n"],
        batch=study["batch"],
        seed=entry.get("seed", study["seed"]),
        hide=hide,
    )


def _is_beside(evaluation: Content, case: Case) -> bool:
    """Return whether an evaluation has this original and the present weights of the judge."""
    original = generate.model_fingerprint(case.original)
    return bool(
        evaluation["judge"] == case.suite.build_judge().fingerprint
        and evaluation["models"]["before"].endswith(f"({original})")
    )


def _is_done(results: Results, key: str, settings: Content) -> bool:
    previous = results.get(key)
    return previous is not None and previous["settings"] == settings


def run(
    study: Mapping[str, Any],
    results: Results,
    *,
    concepts: Sequence[str],
    entries: Sequence[str],
    attacks: Sequence[str],
    seeds: Sequence[int],
    work: Path,
    only: str = "",
    report: Callable[[str], None] = print,
) -> None:
    """Train, evaluate and attack, and store each result.

    The settings are chosen first, and then the controls are attacked. One erasure follows the
    other.

    only: "controls", with the model before the erasure, or "erasures", or both if empty.
    """

    def attack_with_all(case: Case, name: str, victim: Model, about: Content) -> None:
        for one in attacks:
            key = attack_key(case.name, name, one)
            whole = {**about, "attack": one}
            attack(results, study, case, key, victim=victim, about=whole, work=work)
            report(key)

    def attack_unprotected(case: Case) -> None:
        """Show that attacks work at all: on the model before the erasure."""
        for one in study.get("unprotected", {}).get("attacks", ()):
            if one in attacks:
                key = f"{case.name}_{one}"
                about = {"concept": case.name, "kind": "unprotected", "model": "original"}
                about |= {"label": "before the erasure", "attack": one}
                folder = results.folder("unprotected")
                attack(folder, study, case, key, victim=case.original, about=about, work=work)
                report(f"unprotected/{key}")

    entries = [] if only == "controls" else entries
    points = {entry: choose(results, study, entry, work=work) for entry in entries}
    for name in concepts:
        case = load_case(study, name)
        controls = [] if only == "erasures" else case.controls
        for number, control in enumerate(controls, 1):
            model_name = f"control_{number}"
            about: Content = {"concept": name, "kind": "control", "model": model_name}
            about |= {"label": "never learned", "record": dict(control.record)}
            attack_with_all(case, model_name, control.model, about)
        if only != "erasures":
            attack_unprotected(case)
        for seed in seeds:
            for entry in entries:
                if seed not in study["entries"][entry].get("seeds", seeds):
                    continue
                model = train(study, case, entry, point=points[entry], seed=seed, work=work)
                about = {"concept": name, "kind": "erased", "model": entry, "seed": seed}
                about |= {"label": study["entries"][entry]["label"]}
                key = model_key(name, entry, seed)
                seconds = jobs.read_done(_run_folder(case, entry, seed, work))["seconds"]
                trained = {**about, "training_seconds": seconds}
                metrics = study.get("metrics", ())
                evaluate(results, case, key, model=model, about=trained, metrics=metrics)
                report(key)
                if "second_judge" in study:
                    key, judge = second_judge_key(key), study["second_judge"]
                    judge_again(results, case, key, model=model, about=about, judge=judge)
                    report(key)
                attack_with_all(case, f"{entry}_seed{seed}", model, about)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path)
    parser.add_argument("--concepts", default="", help="only these")
    parser.add_argument("--entries", default="", help="only these erasures")
    parser.add_argument("--attacks", default="", help="only these")
    parser.add_argument("--seeds", default="", help="only these training seeds")
    parser.add_argument("--only", default="", choices=["controls", "erasures"])
    parser.add_argument("--work", type=Path, default=Path("runs/excess_recovery"))
    args = parser.parse_args()
    study = yaml.safe_load(args.study.read_text())
    run(
        study,
        Results(args.study.stem),
        concepts=parse_names(parser, "concepts", args.concepts, study["concepts"]),
        entries=parse_names(parser, "entries", args.entries, study["entries"]),
        attacks=parse_names(parser, "attacks", args.attacks, study["attacks"]),
        seeds=[int(text) for text in args.seeds.split(",") if text] or study["seeds"],
        work=args.work,
        only=args.only,
    )


if __name__ == "__main__":
    main()
