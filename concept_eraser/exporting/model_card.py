"""The model card of a run (README.md on the hub).

The card states what was erased and how, every number with its n, interval and protocol, the results
of attacks, and what was not measured. All statements come from the run's own files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from concept_eraser import registry
from concept_eraser.evaluation import result_schema
from concept_eraser.exporting import card_results
from concept_eraser.exporting.card_results import Findings
from concept_eraser.exporting.card_snippets import use
from concept_eraser.models import hub
from concept_eraser.recipes import recipe as recipes
from concept_eraser.recipes.recipe import Recipe
from concept_eraser.reporting import run_results
from concept_eraser.storage.readers import read_yaml
from concept_eraser.utils import rendering
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
    "optimizer",
    "weight_decay",
    "precision",
    "seed",
)


def card(run: str | Path, *, repository: str = "owner/name", license: str = "other") -> str:
    """The model card of a finished run: what was erased and how, what was measured and what was
    not.

    Args:
        run: the run folder.
        repository: the hub id that the card's code names.
        license: of the weights, as the hub spells it. The base model's licence is not known here,
            so the default is "other", and the card says what to fill in.

    Returns:
        The card as Markdown with its YAML header.

    Raises:
        UserError: the folder is no finished run.

    Example:
        >>> import concept_eraser
        >>> text = concept_eraser.card("runs/tiny_star_munba", license="openrail++")
    """
    folder = Path(run)
    recipe, summary = finished_run(folder)
    findings, environment = (
        card_results.read(folder, recipe),
        card_results.content(folder / "environment.json"),
    )
    result_schema.require(environment, result_schema.ENVIRONMENT, folder / "environment.json")
    content = {
        "header": yaml.safe_dump(header(recipe, license), sort_keys=False).strip(),
        "name": repository.rsplit("/", 1)[-1]
        if repository != "owner/name"
        else folder.resolve().name,
        "base": _named(recipe.model),
        "erased": ", ".join(map(_cell, findings.concepts)),
        "version": environment.get("concept_eraser") or version(),
        "warnings": [
            *_warnings(findings),
            *(
                [
                    (
                        "The licence is not stated. It is at least that of the base model, "
                        f"{_named(recipe.model)}: fill it in above."
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
            f"tensors were {'rewritten in one go' if is_edit(recipe) else 'trained'}, in "
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
            one for one in map(_evaluation_content, findings.evaluations) if one["metrics"]
        ],
        "unmeasured": ", ".join(map(_cell, findings.missing(findings.evaluations))),
        "several": findings.several,
        "attacks": list(_attack_rows(findings.attacks, findings.several)),
        "unattacked": ", ".join(map(_cell, findings.missing(list(findings.attacks.values()))))
        if recipe.target in recipes.PROMPTED
        else "",
        "limits": list(_limits(findings)),
        "commands": _commands(folder, recipe),
        "use": use(recipe, folder, repository),
        "fingerprint": recipe.fingerprint,
        "commit": f", commit `{environment['commit']}`" if environment.get("commit") else "",
        "recipe": recipe_text(folder),
    }
    return rendering.render("card.md", **content).rstrip() + "\n"


def _about(recipe: Recipe) -> str:
    """What the method is, in one sentence."""
    if registry.in_memory(recipe.method.name):
        return "An object of the author's own Python code."
    return registry.summary("method", recipe.method.name).rstrip(".") + "."


def is_edit(recipe: Recipe) -> bool:
    """Whether the method changes the model in one go: it hears no loss, no number of images and
    no setting of a training.
    """
    return recipe.method.edits


def finished_run(folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe and done.json of a run. Raises UserError where there is none, or it is not
    finished.
    """
    if not (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder} is no run folder (it has no recipe.yaml)")
    if not (folder / "done.json").is_file():
        raise UserError(
            f"{folder} is not finished; go on with: concept-eraser erase "
            f"{folder / 'recipe.yaml'} -o {folder} --resume"
        )
    summary = card_results.content(folder / "done.json")
    result_schema.require(summary, result_schema.DONE, folder / "done.json")
    return recipes.load(str(folder / "recipe.yaml")), summary


def warnings(folder: Path) -> list[str]:
    """What a reader must know before any number."""
    return _warnings(card_results.read(folder, recipes.load(str(folder / "recipe.yaml"))))


def _warnings(findings: Findings) -> list[str]:
    has_prompts = findings.recipe.target in recipes.PROMPTED
    sentences = []
    for activity, results in (
        ("evaluated", findings.evaluations),
        ("attacked", list(findings.attacks.values()) if has_prompts else None),
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


def header(recipe: Recipe, license: str) -> dict[str, Any]:
    """The YAML header, by the hub's keys."""
    fields: dict[str, Any] = {"license": license}
    if license == "other":
        fields["license_name"] = "see-base-model"
    if hub.is_id(recipe.model) and not _local(recipe.model):
        fields["base_model"] = hub.split(recipe.model)[0]
    if recipe.target in recipes.PROMPTED:
        fields["library_name"] = "diffusers"
    if recipe.target in _TASKS:
        fields["pipeline_tag"] = _TASKS[recipe.target]
    fields["tags"] = [
        "concept-erasure",
        "machine-unlearning",
        "concept-eraser",
        *(spec.name for spec in (recipe.method, recipe.finish) if spec),
    ]
    # a closed form after it writes whole weights
    if recipe.trainable.lora is not None and recipe.finish is None:
        fields["tags"].append("lora")
    return fields


def _local(model: str) -> bool:
    return is_place(model) or Path(model).exists()


def _named(model: str) -> str:
    """A model without the machine's own path."""
    return f"`{last(model)}` (a local copy)" if _local(model) else f"`{model}`"


def _place(folder: Path) -> str:
    return f"runs/{folder.resolve().name}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _list_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in options.items()) or "none"


def _commands(folder: Path, recipe: Recipe) -> dict[str, str]:
    """What to type for what was not measured; a suite measures one concept of several."""
    suite_option = " --suite SUITE" if len(recipe.forgotten) > 1 else ""
    return {
        "evaluate": f"concept-eraser evaluate {_place(folder)}{suite_option}",
        "attack": f"concept-eraser attack {_place(folder)} -a unlearn_diff{suite_option}",
    }


def _evaluation_content(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """One evaluation as the template shows it."""
    reasons = [
        _cell(f"{name}: {reason}") for name, reason in dict(evaluation.get("refused") or {}).items()
    ]
    return {
        "title": _cell(card_results.named(card_results.concept_of(evaluation))),
        "protocol": _protocol(evaluation),
        "metrics": list(_metrics(evaluation)),
        "refused": reasons,
    }


def _objective_rows(recipe: Recipe, environment: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row for each objective that is not kept: its name, source, rows, those used, hash, loss,
    what to show instead.
    """
    prompt_facts = environment.get("prompts", {})
    for name, objective in recipe.objective_specs.items():
        if name == "retain":
            continue
        rows = prompt_facts.get(name, {})
        instead = getattr(objective, "anchor", None)
        anchor_text = (
            _list_options(clean(instead)) if isinstance(instead, Mapping) else clean(instead) or "-"
        )
        count, loss = (
            (None, "-") if is_edit(recipe) else (getattr(objective, "n", None), str(objective.loss))
        )
        yield [
            name,
            f"`{_cell(card_results.source(objective))}`",
            str(rows.get("rows", "-")),
            "all" if count is None else str(count),
            f"`{rows['hash']}`" if "hash" in rows else "-",
            loss,
            _cell(anchor_text),
        ]


def _retain_data(recipe: Recipe, environment: Mapping[str, Any]) -> str:
    objective = recipe.objective_specs.get("retain")
    if objective is None:
        return "nothing was asked to be kept"
    rows = environment.get("prompts", {}).get("retain", {})
    row_text = f", {rows['rows']} rows, hash `{rows['hash']}`" if "hash" in rows else ""
    return f"`{_cell(card_results.source(objective))}`{row_text}" + (
        "" if is_edit(recipe) else f" (loss {objective.loss})"
    )


def _training_text(recipe: Recipe) -> str:
    selection = recipe.trainable
    how = (
        f"a LoRA of rank {selection.lora.rank}"
        if selection.lora is not None
        else "the weights themselves"
    )
    return f"`{selection.select}` of the {recipe.target.replace('_', ' ')}, {how}"


def _protocol(evaluation: Mapping[str, Any]) -> str:
    protocol = evaluation.get("protocol")
    if not protocol:
        return "Measured on labelled data, before and after."
    groups = "; ".join(
        f"{name}: {card_results.source(SimpleNamespace(**g))} ({g['role']})"
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
    """Metric, group, better, before, after, change, n: of a suite's results, or of a run on
    labelled data.
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
    """A row for each attack; with the concept that it looked for where a run has several."""
    for content in attacks.values():
        protocol, rates = content["protocol"], content["rates"]
        n = str((rates.get("asr") or {}).get("n", "-"))
        concept = (
            [_cell(card_results.named(card_results.concept_of(content)) or "-")] if several else []
        )
        yield [
            protocol["attack"],
            *concept,
            _cell(_list_options(protocol.get("options", {}))),
            _cell(protocol["group"]),
            _interval(rates.get("pre")),
            _interval(rates.get("asr")),
            n,
            f"`{content['protocol_hash']}`",
        ]


def _limits(findings: Findings) -> Iterator[str]:
    """What broke it, and what nobody looked at."""
    has_prompts = findings.recipe.target in recipes.PROMPTED
    if has_prompts:
        yield from _broken_by(findings)
    if findings.unlike:
        yield (
            "Left out, since they measured or attacked other weights than those evaluated: "
            f"{', '.join(findings.unlike)}."
        )
    concepts = ", ".join(map(_cell, findings.missing(findings.evaluations)))
    if not findings.evaluations and not findings.several:
        yield "Not measured: whether the concept is gone, and what was lost beside it."
    elif concepts:
        yield f"Not measured: whether these are gone, and what was lost beside them: {concepts}."
    for evaluation in findings.evaluations if has_prompts else ():
        yield from _unseen(evaluation, findings.several)
    if has_prompts:
        yield (
            "Prompts in other languages, other samplers, image-to-image and fine-tuned "
            "descendants were not measured."
        )


def _broken_by(findings: Findings) -> Iterator[str]:
    """What attacks brought back, concept by concept."""

    def what(content: Mapping[str, Any]) -> str:
        return (
            _cell(card_results.named(card_results.concept_of(content)) or "its concept")
            if findings.several
            else "the concept"
        )

    broke = {
        name: content
        for name, content in findings.attacks.items()
        if (content["rates"].get("asr") or {}).get("value")
    }
    for name, content in sorted(broke.items(), key=lambda item: -item[1]["rates"]["asr"]["value"]):
        rates = content["rates"]
        without = (
            f" ({rates['pre']['value']:.0%} without it)"
            if (rates.get("pre") or {}).get("value") is not None
            else ""
        )
        yield (
            f"Under the attack {name} {what(content)} shows for {rates['asr']['value']:.0%} "
            f"of the prompts{without}."
        )
    fell = {what(content) for content in broke.values()}
    for concept in dict.fromkeys(what(content) for content in findings.attacks.values()):
        attack_names = [
            name for name, content in findings.attacks.items() if what(content) == concept
        ]
        if concept not in fell:
            yield (
                f"None of the attacks tried ({', '.join(attack_names)}) brought {concept} back; "
                "others may."
            )
    missing_concepts = ", ".join(map(_cell, findings.missing(list(findings.attacks.values()))))
    if missing_concepts:
        suffix = f" on {missing_concepts}" if findings.several else ""
        yield (
            f"No attack was tried{suffix}. Erased concepts commonly come back under "
            "adversarial prompts or a few steps of training."
        )


def _unseen(evaluation: Mapping[str, Any], several: bool) -> Iterator[str]:
    """What one evaluation did not look at, or saw too few images of."""
    beside = (
        f" (beside {_cell(card_results.named(card_results.concept_of(evaluation)))})"
        if several
        else ""
    )
    roles = {group["role"] for group in evaluation.get("protocol", {}).get("groups", {}).values()}
    for role, description in (
        ("neighbour", "neighbouring concepts"),
        ("retain", "what was to be kept"),
    ):
        if role not in roles:
            yield f"Not measured: {description}{beside}."
    few = min((row["after"]["n"] for row in evaluation["results"] if row.get("after")), default=0)
    if 0 < few < 100:
        yield f"Some numbers rest on {few} images only{beside}; read their intervals."


def recipe_text(folder: Path) -> str:
    """The recipe as YAML without the command that opens it and with every path of this machine cut
    to its last component, which a comment tells."""
    content = read_yaml(folder / "recipe.yaml")
    places: list[str] = []
    text = yaml.safe_dump(
        name_paths(content, places), sort_keys=False, allow_unicode=True, width=math.inf
    )
    comment = (
        f"# local paths, cut to their names: {', '.join(dict.fromkeys(places))}\n" if places else ""
    )
    return comment + text.rstrip("\n")
