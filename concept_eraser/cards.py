"""The model card of a run (README.md on the hub): what was erased and how, every number with its n, interval and protocol,
what attacks brought back, and what was not measured, said so. Nothing stands there that the run's own files do not say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from concept_eraser import findings, registry
from concept_eraser import recipe as recipes
from concept_eraser.card_use import use
from concept_eraser.environment import version
from concept_eraser.errors import UserError
from concept_eraser.evaluation import entries, shapes
from concept_eraser.findings import Findings
from concept_eraser.models import hub
from concept_eraser.places import cleaned, is_place, last, named
from concept_eraser.recipe import Recipe
from concept_eraser.storage.readers import read_yaml

TEMPLATES = Path(__file__).parent / "templates"
_TASKS = {"denoiser": "text-to-image", "text_encoder": "text-to-image", "classifier": "image-classification", "clip": "zero-shot-image-classification"}  # fmt: skip
_SETTINGS = ("steps", "batch_size", "micro_batches", "lr", "warmup", "decay", "optimizer", "weight_decay", "precision", "seed")  # fmt: skip


def card(run: str | Path, *, repository: str = "owner/name", license: str = "other") -> str:
    """The card of a finished run as Markdown with its YAML header.

    repository: the hub id that its code names; license: of the weights, as the hub spells it. The base model's is not
    known here, so the default is "other" and the card says what to fill in.

    Raises UserError where the folder is no finished run.
    """
    import jinja2

    folder = Path(run)
    recipe, done = finished(folder)
    found, environment = findings.read(folder, recipe), findings.content(folder / "environment.json")
    shapes.require(environment, shapes.ENVIRONMENT, folder / "environment.json")
    content = {
        "header": yaml.safe_dump(header(recipe, license), sort_keys=False).strip(),
        "name": repository.rsplit("/", 1)[-1] if repository != "owner/name" else folder.resolve().name,
        "base": _named(recipe.model),
        "erased": ", ".join(map(_cell, found.concepts)),
        "version": environment.get("concept_eraser") or version(),
        "warnings": [*_warnings(found), *([f"The licence is not stated. It is at least that of the base model, {_named(recipe.model)}: fill it in above."] if license == "other" else [])],
        "concepts": list(_sides(recipe, environment)),
        "kept": _retained(recipe, environment),
        "method": {"name": recipe.method.name, "about": registry.summary("method", recipe.method.name).rstrip(".") + ".", "options": _listed(cleaned(recipe.method.options))},
        "finish": {"name": recipe.finish.name, "about": registry.summary("method", registry.resolve("method", recipe.finish.name, {})[0]).rstrip(".") + "."} if recipe.finish else None,
        "trained": _trained(recipe),
        "counted": f"{done['trained_parameters']:,} parameters in {done['trained_tensors']:,} tensors were {'rewritten in one go' if edited(recipe) else 'trained'}, in {done['seconds']:g} s." if {"trained_parameters", "trained_tensors"} <= done.keys() else "",
        "settings": [] if edited(recipe) else [(key, value) for key, value in recipe.training.model_dump().items() if key in _SETTINGS],
        "evaluations": [one for one in map(_evaluated, found.evaluations) if one["metrics"]],
        "unmeasured": ", ".join(map(_cell, found.missing(found.evaluations))),
        "several": found.several,
        "attacks": list(_attack_rows(found.attacks, found.several)),
        "unattacked": ", ".join(map(_cell, found.missing(list(found.attacks.values())))) if recipe.target in recipes.PROMPTED else "",
        "limits": list(_limits(found)),
        "commands": _commands(folder, recipe),
        "use": use(recipe, folder, repository),
        "fingerprint": recipe.fingerprint,
        "commit": f", commit `{environment['commit']}`" if environment.get("commit") else "",
        "recipe": recipe_text(folder),
    }  # fmt: skip
    loader = jinja2.FileSystemLoader(TEMPLATES)
    world = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return world.get_template("card.md").render(**content).rstrip() + "\n"


def edited(recipe: Recipe) -> bool:
    """Whether the method changes the model in one go: it hears no loss, no number of pictures and no setting of a training."""
    return hasattr(registry.load("method", recipe.method.name), "edit")


def finished(folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe and done.json of a run. Raises UserError where there is none, or it is not finished."""
    if not (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder} is no run folder (it has no recipe.yaml)")
    if not (folder / "done.json").is_file():
        raise UserError(f"{folder} is not finished; go on with: concept-eraser erase {folder / 'recipe.yaml'} -o {folder} --resume")  # fmt: skip
    done = findings.content(folder / "done.json")
    shapes.require(done, shapes.DONE, folder / "done.json")
    return recipes.load(str(folder / "recipe.yaml")), done


def warnings(folder: Path) -> list[str]:
    """What a reader must know before any number."""
    return _warnings(findings.read(folder, recipes.load(str(folder / "recipe.yaml"))))


def _warnings(found: Findings) -> list[str]:
    prompted = found.recipe.target in recipes.PROMPTED
    said = []
    for what, measured in (("evaluated", found.evaluations), ("attacked", list(found.attacks.values()) if prompted else None)):  # fmt: skip
        if measured is None:
            continue
        missing = found.missing(measured)
        if not measured:
            said.append(f"This erasure was not {what}.")
        elif missing:
            said.append(f"{'Of what it forgot' if len(found.recipe.forgotten) > 1 else 'What it forgot'} was not {what}: {', '.join(map(_cell, missing))}.")  # fmt: skip
    return said


def header(recipe: Recipe, license: str) -> dict[str, Any]:
    """The YAML header, by the hub's keys."""
    found: dict[str, Any] = {"license": license}
    if license == "other":
        found["license_name"] = "see-base-model"
    if hub.is_id(recipe.model) and not _local(recipe.model):
        found["base_model"] = hub.split(recipe.model)[0]
    if recipe.target in recipes.PROMPTED:
        found["library_name"] = "diffusers"
    if recipe.target in _TASKS:
        found["pipeline_tag"] = _TASKS[recipe.target]
    found["tags"] = [
        "concept-erasure",
        "machine-unlearning",
        "concept-eraser",
        *(spec.name for spec in (recipe.method, recipe.finish) if spec),
    ]
    if recipe.trainable.lora is not None and recipe.finish is None:  # a closed form after it writes whole weights
        found["tags"].append("lora")
    return found


def _local(model: str) -> bool:
    return is_place(model) or Path(model).exists()


def _named(model: str) -> str:
    """A model without the machine's own path."""
    return f"`{last(model)}` (a local copy)" if _local(model) else f"`{model}`"


def _place(folder: Path) -> str:
    return f"runs/{folder.resolve().name}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in options.items()) or "none"


def _commands(folder: Path, recipe: Recipe) -> dict[str, str]:
    """What to type for what was not measured; a suite measures one concept of several."""
    more = " --suite SUITE" if len(recipe.forgotten) > 1 else ""
    return {"evaluate": f"concept-eraser evaluate {_place(folder)}{more}", "attack": f"concept-eraser attack {_place(folder)} -a unlearn_diff{more}"}  # fmt: skip


def _evaluated(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """One evaluation as the template shows it."""
    refused = [_cell(f"{name}: {reason}") for name, reason in dict(evaluation.get("refused") or {}).items()]
    return {"title": _cell(findings.named(findings.concept_of(evaluation))), "protocol": _protocol(evaluation), "metrics": list(_metrics(evaluation)), "refused": refused}  # fmt: skip


def _sides(recipe: Recipe, environment: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row for each side that is not kept: its name, source, rows, those used, hash, loss, what to show instead."""
    told = environment.get("prompts", {})
    for name, side in recipe.sides.items():
        if name == "retain":
            continue
        rows = told.get(name, {})
        instead = getattr(side, "anchor", None)
        shown = _listed(cleaned(instead)) if isinstance(instead, Mapping) else cleaned(instead) or "-"
        used, loss = (None, "-") if edited(recipe) else (getattr(side, "n", None), side.loss)
        yield [name, f"`{_cell(findings.source(side))}`", str(rows.get("rows", "-")), "all" if used is None else str(used), f"`{rows['hash']}`" if "hash" in rows else "-", loss, _cell(shown)]  # fmt: skip


def _retained(recipe: Recipe, environment: Mapping[str, Any]) -> str:
    side = recipe.sides.get("retain")
    if side is None:
        return "nothing was asked to be kept"
    rows = environment.get("prompts", {}).get("retain", {})
    counted = f", {rows['rows']} rows, hash `{rows['hash']}`" if "hash" in rows else ""
    return f"`{_cell(findings.source(side))}`{counted}" + ("" if edited(recipe) else f" (loss {side.loss})")


def _trained(recipe: Recipe) -> str:
    chosen = recipe.trainable
    how = f"a LoRA of rank {chosen.lora.rank}" if chosen.lora is not None else "the weights themselves"
    return f"`{chosen.select}` of the {recipe.target.replace('_', ' ')}, {how}"


def _protocol(evaluation: Mapping[str, Any]) -> str:
    asked = evaluation.get("protocol")
    if not asked:
        return "Measured on labelled data, before and after."
    groups = "; ".join(
        f"{name}: {findings.source(SimpleNamespace(**g))} ({g['role']})" for name, g in asked["groups"].items()
    )
    sampling = _listed(asked.get("sampling", {}))
    return f"Judge `{asked['judge']}` ({evaluation.get('judge')}), first seed {asked['seed']}, sampling {sampling}. Groups: {groups}. Protocol hash `{evaluation['protocol_hash']}`."  # fmt: skip


def _interval(found: Mapping[str, Any] | None) -> str:
    known = entries.interval(found)
    if known is None or not math.isfinite(known.value):
        return "-"
    bounds = f" [{known.low:.3f}, {known.high:.3f}]" if math.isfinite(known.low) else ""
    return f"{known.value:.3f}{bounds}"


def _metrics(evaluation: Mapping[str, Any]) -> Iterator[list[str]]:
    """Metric, group, better, before, after, change, n: of a suite's results, or of a run on labelled data."""
    results = evaluation.get("results", [])
    if isinstance(results, list):
        for row in results:
            settings = f" ({_listed(row['settings'])})" if row.get("settings") else ""
            yield [_cell(row["metric"] + settings), _cell(row["group"]), row["better"], *(_interval(row.get(k)) for k in ("before", "after", "difference")), str((row.get("after") or {}).get("n", "-"))]  # fmt: skip
        return
    after = results.get("after", {})
    for metric, groups in after.items():
        for group, value in groups.items() if isinstance(groups, Mapping) else ():
            if not isinstance(value, Mapping) or "value" in value:
                earlier = results.get("before", {}).get(metric, {}).get(group)
                yield [metric, _cell(group), "-", _plain(earlier), _plain(value), "-", str(value.get("n", "-") if isinstance(value, Mapping) else "-")]  # fmt: skip


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return _interval(value)
    return f"{value:.3f}" if isinstance(value, int | float) else "-"


def _attack_rows(attacks: Mapping[str, Any], several: bool) -> Iterator[list[str]]:
    """A row for each attack; with the concept that it looked for where a run has several."""
    for content in attacks.values():
        asked, rates = content["protocol"], content["rates"]
        n = str((rates.get("asr") or {}).get("n", "-"))
        concept = [_cell(findings.named(findings.concept_of(content)) or "-")] if several else []
        yield [asked["attack"], *concept, _cell(_listed(asked.get("options", {}))), _cell(asked["group"]), _interval(rates.get("pre")), _interval(rates.get("asr")), n, f"`{content['protocol_hash']}`"]  # fmt: skip


def _limits(found: Findings) -> Iterator[str]:
    """What broke it, and what nobody looked at."""
    prompted = found.recipe.target in recipes.PROMPTED
    if prompted:
        yield from _broken(found)
    if found.unlike:
        yield f"Left out, since they measured or attacked other weights than those evaluated: {', '.join(found.unlike)}."
    missing = ", ".join(map(_cell, found.missing(found.evaluations)))
    if not found.evaluations and not found.several:
        yield "Not measured: whether the concept is gone, and what was lost beside it."
    elif missing:
        yield f"Not measured: whether these are gone, and what was lost beside them: {missing}."
    for evaluation in found.evaluations if prompted else ():
        yield from _unseen(evaluation, found.several)
    if prompted:
        yield "Prompts in other languages, other samplers, image-to-image and fine-tuned descendants were not measured."


def _broken(found: Findings) -> Iterator[str]:
    """What attacks brought back, concept by concept."""

    def what(content: Mapping[str, Any]) -> str:
        return _cell(findings.named(findings.concept_of(content)) or "its concept") if found.several else "the concept"

    broke = {name: content for name, content in found.attacks.items() if (content["rates"].get("asr") or {}).get("value")}  # fmt: skip
    for name, content in sorted(broke.items(), key=lambda item: -item[1]["rates"]["asr"]["value"]):
        rates = content["rates"]
        without = f" ({rates['pre']['value']:.0%} without it)" if (rates.get("pre") or {}).get("value") is not None else ""  # fmt: skip
        yield f"Under the attack {name} {what(content)} shows for {rates['asr']['value']:.0%} of the prompts{without}."
    fell = {what(content) for content in broke.values()}
    for concept in dict.fromkeys(what(content) for content in found.attacks.values()):
        tried = [name for name, content in found.attacks.items() if what(content) == concept]
        if concept not in fell:
            yield f"None of the attacks tried ({', '.join(tried)}) brought {concept} back; others may."
    missing = ", ".join(map(_cell, found.missing(list(found.attacks.values()))))
    if missing:
        told = f" on {missing}" if found.several else ""
        yield f"No attack was tried{told}. Erased concepts commonly come back under adversarial prompts or a few steps of training."  # fmt: skip


def _unseen(evaluation: Mapping[str, Any], several: bool) -> Iterator[str]:
    """What one evaluation did not look at, or saw too few pictures of."""
    beside = f" (beside {_cell(findings.named(findings.concept_of(evaluation)))})" if several else ""
    roles = {group["role"] for group in evaluation.get("protocol", {}).get("groups", {}).values()}
    for role, said in (("neighbour", "neighbouring concepts"), ("retain", "what was to be kept")):
        if role not in roles:
            yield f"Not measured: {said}{beside}."
    few = min((row["after"]["n"] for row in evaluation["results"] if row.get("after")), default=0)
    if 0 < few < 100:
        yield f"Some numbers rest on {few} pictures only{beside}; read their intervals."


def recipe_text(folder: Path) -> str:
    """The recipe as YAML without the command that opens it and with every path of this machine cut to its last component,
    which a comment tells."""
    content = read_yaml(folder / "recipe.yaml")
    places: list[str] = []
    text = yaml.safe_dump(named(content, places), sort_keys=False, allow_unicode=True, width=math.inf)
    told = f"# local paths, cut to their names: {', '.join(dict.fromkeys(places))}\n" if places else ""
    return told + text.rstrip("\n")
