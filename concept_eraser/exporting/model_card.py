"""The model card of a run (README.md on the hub).

The card states what was erased and how, every number with its n, interval and protocol, the results
of attacks, and what was not measured. All statements come from the run's own files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from concept_eraser import registry
from concept_eraser.evaluation import result_schema
from concept_eraser.exporting import card_results
from concept_eraser.exporting.card_results import Measurements
from concept_eraser.exporting.card_snippets import loads_lora, use
from concept_eraser.models import hub
from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.reporting import run_results
from concept_eraser.storage.readers import read_yaml
from concept_eraser.utils import rendering
from concept_eraser.utils.commands import erase_command, shell_command
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.path_redaction import clean, is_place, last, name_paths
from concept_eraser.utils.provenance import version

_TASKS = {
    "denoiser": "text-to-image",
    "text_encoder": "text-to-image",
    "classifier": "image-classification",
    "clip": "zero-shot-image-classification",
}
_SETTINGS = (
    "steps",
    "batch_size",
    "micro_batches",
    "lr",
    "warmup",
    "decay",
    "cycles",
    "milestones",
    "decay_factor",
    "optimizer",
    "weight_decay",
    "momentum",
    "nesterov",
    "betas",
    "clip",
    "clip_each",
    "ema",
    "precision",
    "seed",
)


def card(
    run: str | Path,
    *,
    repository: str = "owner/name",
    license: str = "other",
    kind: str | None = None,
    gap: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    revision: str | None = None,
) -> str:
    """Return the text of the model card of a finished run.

    `run`, `repository`, `license` and `kind` are those of `api.card`.

    gap: the gap to retraining of the run's evaluation, as an evaluation.json has it, in place of
        the stored one.
    allow_pickle: whether the commands for missing measurements load pickled weights.
    revision: the branch of the repository with the weights (default: its main branch).

    Raises UserError if the folder is not a finished run.
    """
    folder = Path(run)
    recipe, summary = finished_run(folder)
    findings, environment = (
        card_results.read(folder, recipe),
        card_results.content(folder / "environment.json"),
    )
    result_schema.require(environment, result_schema.ENVIRONMENT, folder / "environment.json")
    if gap is not None:
        findings = findings.with_gap(gap)
    content = {
        "header": yaml.safe_dump(header(recipe, license, kind), sort_keys=False).strip(),
        "name": repository.rsplit("/", 1)[-1]
        if repository != "owner/name"
        else folder.resolve().name,
        "base": _model_text(recipe.model),
        "erased": ", ".join(map(_cell, findings.concepts)),
        "version": environment.get("concept_eraser") or version(),
        "warnings": [
            *_warnings(findings),
            *(
                [
                    (
                        "The licence is not stated. It is at least that of the base model, "
                        f"{_model_text(recipe.model)}: fill it in above."
                    )
                ]
                if license == "other"
                else []
            ),
        ],
        "concepts": list(_objective_rows(recipe, environment)),
        "kept": _retain_data(recipe, environment),
        "method": {
            "name": recipe.method.name,
            "about": _about(recipe),
            "options": _list_options(clean(recipe.method.options)),
        },
        "finish": {
            "name": recipe.finish.name,
            "about": registry.summary(
                "method", registry.resolve("method", recipe.finish.name, {})[0]
            ).rstrip(".")
            + ".",
        }
        if recipe.finish
        else None,
        "trained": _training_text(recipe),
        "counted": (
            f"{summary['trained_parameters']:,} parameters in {summary['trained_tensors']:,} "
            f"tensors were {_activity(recipe)}, in "
            f"{summary['seconds']:g} s."
        )
        if {"trained_parameters", "trained_tensors"} <= summary.keys()
        else "",
        "settings": []
        if is_edit(recipe)
        else [
            (key, value) for key, value in recipe.training.model_dump().items() if key in _SETTINGS
        ],
        "evaluations": [
            evaluation
            for evaluation in map(_evaluation_content, findings.evaluations)
            if evaluation["metrics"]
        ],
        "unmeasured": ", ".join(map(_cell, findings.missing(findings.evaluations))),
        "several": findings.several,
        "has_prompts": recipe.target in recipes.PROMPTED,
        "unknown": _unknown_results(recipe, several=bool(findings.several)),
        "attacks": list(_attack_rows(findings.attacks, findings.several)),
        "excess": list(_excess_rows(findings.attacks)),
        "unattacked": ", ".join(map(_cell, findings.missing(findings.attacks_proper)))
        if recipe.target in recipes.PROMPTED
        else "",
        "limits": list(_limits(findings)),
        "commands": _commands(folder, allow_pickle),
        "use": use(recipe, folder, repository, kind=kind, revision=revision),
        "fingerprint": recipe.fingerprint,
        "commit": f", commit `{environment['commit']}`" if environment.get("commit") else "",
        "recipe": recipe_text(folder),
    }
    return rendering.render("card.md", **content).rstrip() + "\n"


def _about(recipe: Recipe) -> str:
    """Describe the method in one sentence."""
    if registry.in_memory(recipe.method.name):
        return "An object of the author's own Python code."
    return registry.summary("method", recipe.method.name).rstrip(".") + "."


def is_edit(recipe: Recipe) -> bool:
    """Whether the method is an edit, without images and settings of a training."""
    return recipe.method.edits


def _activity(recipe: Recipe) -> str:
    """Say how the counted tensors got their values."""
    if recipe.method.adds_gate:
        return "fitted to the texts' states"
    return "edited in closed form" if is_edit(recipe) else "trained"


def finished_run(folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """Read the recipe and done.json of a run. Raises UserError if it is no run or not finished."""
    if not (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder} is no run folder (it has no recipe.yaml)")
    if not (folder / "done.json").is_file():
        raise UserError(
            f"{folder} is not finished; continue with: {erase_command(folder, '--resume')}"
        )
    summary = card_results.content(folder / "done.json")
    result_schema.require(summary, result_schema.DONE, folder / "done.json")
    return recipes.load_run(folder), summary


def warnings(folder: Path) -> list[str]:
    """List what a reader must know before any number."""
    return _warnings(card_results.read(folder, recipes.load_run(folder)))


def _warnings(findings: Measurements) -> list[str]:
    has_prompts = findings.recipe.target in recipes.PROMPTED
    sentences = []
    for activity, results in (
        ("evaluated", findings.evaluations),
        ("attacked", findings.attacks_proper if has_prompts else None),
    ):
        if results is None:
            continue
        missing_concepts = findings.missing(results)
        if not results:
            sentences.append(f"This erasure was not {activity}.")
        elif missing_concepts:
            sentences.append(
                f"{'Of what it forgot' if len(findings.recipe.forgotten) > 1 else 'What it forgot'}"
                f" was not {activity}: {', '.join(map(_cell, missing_concepts))}."
            )
    return sentences


def header(recipe: Recipe, license: str, kind: str | None = None) -> dict[str, Any]:
    """Return the YAML header, by the hub's keys. `kind` is as in `card`."""
    fields: dict[str, Any] = {"license": license}
    if license == "other":
        fields["license_name"] = "see-base-model"
    if hub.is_id(recipe.model) and not _local(recipe.model):
        fields["base_model"] = hub.split(recipe.model)[0]
    is_readable = kind != "lora" or loads_lora(recipe)
    if recipe.target in recipes.PROMPTED and not recipe.method.adds_gate and is_readable:
        fields["library_name"] = "diffusers"
    if recipe.target in _TASKS:
        fields["pipeline_tag"] = _TASKS[recipe.target]
    fields["tags"] = [
        "concept-erasure",
        "machine-unlearning",
        "concept-eraser",
        *(spec.name for spec in (recipe.method, recipe.finish) if spec),
    ]
    # with a closed form after the training, whole weights are written
    if recipe.trainable.lora is not None and recipe.finish is None and kind != "pipeline":
        fields["tags"].append("lora")
    return fields


def _local(model: str) -> bool:
    return is_place(model) or Path(model).exists()


def _model_text(model: str) -> str:
    """Name a model without paths of this machine."""
    return f"`{last(model)}` (a local copy)" if _local(model) else f"`{model}`"


def _place(folder: Path) -> str:
    return f"runs/{folder.resolve().name}"


def _cell(value: Any) -> str:
    """Return a value as plain text of Markdown, also in a table."""
    return re.sub(r"([|<*`])", r"\\\1", str(value).replace("\n", " "))


def _code(value: Any) -> str:
    """Return a value as code of Markdown, also in a table, where only | has a meaning."""
    text = str(value).replace("|", "\\|").replace("\n", " ").replace("`", "'")
    return f"`{text}`"


def _list_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in options.items()) or "none"


def _unknown_results(recipe: Recipe, *, several: bool) -> str:
    """Return what an evaluation would measure."""
    if recipe.target not in recipes.PROMPTED:
        return "results on the forgotten and on the retained data"
    return f"concept {'rates' if several else 'rate'} and the retain accuracy"


def _commands(folder: Path, allow_pickle: bool) -> dict[str, str]:
    """Return the commands for missing measurements. A suite measures one concept."""
    options = run_results.suite_option(folder)
    if allow_pickle:
        options.append("--allow-pickle")
    return {
        "evaluate": shell_command("evaluate", _place(folder), *options),
        "attack": shell_command("attack", _place(folder), "-a", "unlearn_diff", *options),
    }


def _evaluation_content(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of one evaluation for the template."""
    reasons = [
        _cell(f"{name}: {reason}") for name, reason in dict(evaluation.get("refused") or {}).items()
    ]
    return {
        "title": _cell(card_results.concept_text(card_results.concept_of(evaluation))),
        "protocol": _protocol(evaluation),
        "metrics": list(_metrics(evaluation)),
        "gap": list(_gap_rows(evaluation)),
        "refused": reasons,
    }


def _objective_rows(recipe: Recipe, environment: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each objective except the retain objective.

    Its cells are name, source, rows, used rows, hash, loss and anchor concept.
    """
    prompt_facts = environment.get("prompts", {})
    for name, objective in recipe.objective_specs.items():
        if name == "retain":
            continue
        rows = prompt_facts.get(name, {})
        anchor = getattr(objective, "anchor", None)
        anchor_text = (
            _list_options(clean(anchor)) if isinstance(anchor, Mapping) else clean(anchor) or "-"
        )
        has_count = "n" not in recipe.unused_settings
        count = getattr(objective, "n", None) if has_count and not is_edit(recipe) else None
        loss = "-" if is_edit(recipe) else str(objective.loss)
        yield [
            name,
            _code(card_results.source(objective)),
            str(rows.get("rows", "-")),
            "all" if count is None else str(count),
            f"`{rows['hash']}`" if "hash" in rows else "-",
            loss,
            _cell(anchor_text),
        ]


def _retain_data(recipe: Recipe, environment: Mapping[str, Any]) -> str:
    objective = recipe.objective_specs.get("retain")
    if objective is None:
        return "none"
    rows = environment.get("prompts", {}).get("retain", {})
    row_text = f", {rows['rows']} rows, hash `{rows['hash']}`" if "hash" in rows else ""
    return f"{_code(card_results.source(objective))}{row_text}" + (
        "" if is_edit(recipe) else f" (loss {objective.loss})"
    )


def _training_text(recipe: Recipe) -> str:
    selection = recipe.trainable
    kind = "the weights themselves"
    if selection.lora is not None:
        kind = f"a LoRA of rank {selection.lora.rank}"
    if recipe.method.adds_gate:
        kind = "a gate beside the weights, which stay"
    return f"`{selection.select}` of the {recipe.target.replace('_', ' ')}, {kind}"


def _protocol(evaluation: Mapping[str, Any]) -> str:
    protocol = evaluation.get("protocol")
    if not protocol:
        return "Measured on labelled data, before and after."
    groups = "; ".join(
        _cell(f"{name}: {card_results.source(SimpleNamespace(**g))} ({g['role']})")
        for name, g in protocol["groups"].items()
    )
    sampling = _list_options(protocol.get("sampling", {}))
    return (
        f"Judge `{protocol['judge']}` ({evaluation.get('judge')}), first seed {protocol['seed']}, "
        f"sampling {sampling}. Groups: {groups}. Protocol hash "
        f"`{evaluation['protocol_hash']}`."
    )


def _interval(values: Mapping[str, Any] | None) -> str:
    interval = run_results.interval(values)
    if interval is None or not math.isfinite(interval.value):
        return "-"
    bounds = f" [{interval.low:.3f}, {interval.high:.3f}]" if math.isfinite(interval.low) else ""
    return f"{interval.value:.3f}{bounds}"


def _metrics(evaluation: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the rows of the results of a suite, or of a run on labelled data.

    The cells are metric, group, better, before, after, change and n.
    """
    results = evaluation.get("results", [])
    if isinstance(results, list):
        for row in results:
            settings = f" ({_list_options(row['settings'])})" if row.get("settings") else ""
            yield [
                _cell(row["metric"] + settings),
                _cell(row["group"]),
                row["better"],
                *(_interval(row.get(k)) for k in ("before", "after", "difference")),
                str((row.get("after") or {}).get("n", "-")),
            ]
        return
    after = results.get("after", {})
    for metric, groups in after.items():
        for group, value in groups.items() if isinstance(groups, Mapping) else ():
            if not isinstance(value, Mapping) or "value" in value:
                earlier = results.get("before", {}).get(metric, {}).get(group)
                yield [
                    metric,
                    _cell(group),
                    "-",
                    _plain(earlier),
                    _plain(value),
                    "-",
                    str(value.get("n", "-") if isinstance(value, Mapping) else "-"),
                ]


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return _interval(value)
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def _attack_rows(attacks: Mapping[str, Any], several: bool) -> Iterator[list[str]]:
    """Yield a row for each attack, with its concept if the run has several."""
    for content in attacks.values():
        protocol, rates = content["protocol"], content["rates"]
        n = str((rates.get("asr") or {}).get("n", "-"))
        concept = (
            [_cell(card_results.concept_text(card_results.concept_of(content)) or "-")]
            if several
            else []
        )
        yield [
            protocol["attack"],
            *concept,
            _cell(run_results.family_of(content)),
            _cell(_list_options(protocol.get("options", {}))),
            _cell(protocol["group"]),
            _interval(rates.get("pre")),
            _interval(rates.get("asr")),
            n,
            f"`{content['protocol_hash']}`",
        ]


def _excess_rows(attacks: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the excess recovery of each attack with a control.

    The cells are attack, control, what is compared, both rates, excess, n, and relearning savings.
    """
    for content in attacks.values():
        for control in content.get("control", {}).get("models", ()):
            compared = {"all attempts": control["excess"].get("asr"), **control.get("families", {})}
            savings = "; ".join(
                f"{_interval(one['mean'])} (n = {one['broken_on_both']}, censored: "
                f"{one['n'] - one['broken_on_both']})"
                for one in control.get("savings", {}).values()
            )
            for name, excess in compared.items():
                if excess is not None:
                    yield [
                        content["protocol"]["attack"],
                        _cell(control["model"]),
                        name,
                        *(_interval(excess[key]) for key in ("victim", "control", "difference")),
                        str(excess["difference"]["n"]),
                        savings if name == "all attempts" and savings else "-",
                    ]


def _gap_rows(evaluation: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the relative distance of noise predictions from the never-learned model.

    The cells are prompts, its ratio to the original's distance, that to the distance between
    controls, and n.
    """
    for row in (evaluation.get("control") or {}).get("predictions", ()):
        yield [
            _cell(f"{row['group']} ({row['role']})"),
            _interval(row["relative_to_original"]),
            _interval(row["relative_to_controls"]),
            str(row["erased"]["n"]),
        ]


def _limits(findings: Measurements) -> Iterator[str]:
    """Yield the successful attacks, and what was not measured."""
    has_prompts = findings.recipe.target in recipes.PROMPTED
    if has_prompts:
        yield from _attack_limits(findings)
    if findings.unlike:
        yield (
            "Left out, because they were under a safeguard, or measured or attacked other weights "
            f"than those evaluated: {', '.join(map(_cell, findings.unlike))}."
        )
    concepts = ", ".join(map(_cell, findings.missing(findings.evaluations)))
    if not findings.evaluations and not has_prompts:
        yield "Not measured: the results on the forgotten and on the retained data."
    elif not findings.evaluations and not findings.several:
        yield "Not measured: the concept rate and the retain accuracy."
    elif concepts:
        yield f"Not measured: the concept rate and the retain accuracy of {concepts}."
    for evaluation in findings.evaluations if has_prompts else ():
        yield from _evaluation_limits(evaluation, findings.several)
    if has_prompts:
        yield (
            "Prompts in other languages, other samplers, image-to-image and fine-tuned "
            "descendants were not measured."
        )


def _attack_limits(findings: Measurements) -> Iterator[str]:
    """Yield the results of attacks, by concept. A control is no attack."""
    attacks, controls = run_results.attacks_and_controls(findings.attacks)

    def concept_text(content: Mapping[str, Any]) -> str:
        return (
            _cell(card_results.concept_text(card_results.concept_of(content)) or "its concept")
            if findings.several
            else "the concept"
        )

    successful_attacks = {
        name: content
        for name, content in attacks.items()
        if (content["rates"].get("asr") or {}).get("value")
    }
    for name, content in sorted(
        successful_attacks.items(), key=lambda item: -item[1]["rates"]["asr"]["value"]
    ):
        rates = content["rates"]
        without = (
            f" ({rates['pre']['value']:.0%} without it)"
            if (rates.get("pre") or {}).get("value") is not None
            else ""
        )
        yield (
            f"Under the attack {name}, {concept_text(content)} returns for "
            f"{rates['asr']['value']:.0%} of the prompts{without}."
        )
    returned_concepts = {concept_text(content) for content in successful_attacks.values()}
    for concept in dict.fromkeys(concept_text(content) for content in attacks.values()):
        attack_names = [
            name for name, content in attacks.items() if concept_text(content) == concept
        ]
        if concept not in returned_concepts:
            yield (
                f"None of the attacks ({', '.join(attack_names)}) recovered {concept}; others may."
            )
    missing_concepts = ", ".join(map(_cell, findings.missing(list(attacks.values()))))
    if missing_concepts:
        suffix = f" on {missing_concepts}" if findings.several else ""
        names = ", ".join(map(_cell, controls))
        without_attack = f" The controls ({names}) are no attacks." if controls else ""
        yield (
            f"No attack was run{suffix}.{without_attack} Erased concepts commonly return under "
            "adversarial prompts or a few steps of training."
        )


def _evaluation_limits(evaluation: Mapping[str, Any], several: bool) -> Iterator[str]:
    """Yield what one evaluation did not measure, or measured on few images."""
    concept_note = (
        f" (for {_cell(card_results.concept_text(card_results.concept_of(evaluation)))})"
        if several
        else ""
    )
    roles = {group["role"] for group in evaluation.get("protocol", {}).get("groups", {}).values()}
    for role, description in (
        ("neighbour", "neighbouring concepts"),
        ("retain", "the retain accuracy"),
    ):
        if role not in roles:
            yield f"Not measured: {description}{concept_note}."
    few = min((row["after"]["n"] for row in evaluation["results"] if row.get("after")), default=0)
    if 0 < few < 100:
        yield f"Some numbers are from only {few} images{concept_note}; read their intervals."


def recipe_text(folder: Path) -> str:
    """Return the recipe as YAML without its comment with the command.

    Paths of this machine are cut to their last component, and a comment lists them.
    """
    content = read_yaml(folder / "recipe.yaml")
    places: list[str] = []
    text = yaml.safe_dump(
        name_paths(content, places), sort_keys=False, allow_unicode=True, width=math.inf
    )
    comment = (
        f"# local paths, cut to their names: {', '.join(dict.fromkeys(places))}\n" if places else ""
    )
    return comment + text.rstrip("\n")
