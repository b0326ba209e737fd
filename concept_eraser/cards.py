"""The model card of a run (README.md on the hub): what was erased and how, every number with its n, interval and protocol,
what attacks brought back, and what was not measured, said so. Nothing stands there that the run's own files do not say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from concept_eraser import recipe as recipes
from concept_eraser import registry
from concept_eraser.environment import version
from concept_eraser.errors import UserError
from concept_eraser.evaluation import entries
from concept_eraser.models import hub
from concept_eraser.recipe import Recipe

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
    evaluation, environment = _json(folder / "evaluation.json"), _json(folder / "environment.json")
    attacks, unlike = _attacks(folder, evaluation)
    content = {
        "header": yaml.safe_dump(header(recipe, license), sort_keys=False).strip(),
        "name": repository.rsplit("/", 1)[-1] if repository != "owner/name" else folder.resolve().name,
        "base": _named(recipe.model),
        "erased": _concept(recipe, evaluation),
        "version": environment.get("concept_eraser") or version(),
        "warnings": [*warnings(folder), *([f"The licence is not stated. It is at least that of the base model, {_named(recipe.model)}: fill it in above."] if license == "other" else [])],
        "concepts": list(_sides(recipe, environment)),
        "kept": _retained(recipe, environment),
        "method": {"name": recipe.method.name, "about": registry.summary("method", recipe.method.name).rstrip(".") + ".", "options": _listed(recipe.method.options)},
        "trained": _trained(recipe),
        "counted": f"{done['trained_parameters']:,} parameters in {done['trained_tensors']:,} tensors were trained, in {done['seconds']:g} s." if "trained_parameters" in done else "",
        "settings": [(key, value) for key, value in recipe.training.model_dump().items() if key in _SETTINGS],
        "protocol": _protocol(evaluation),
        "metrics": list(_metrics(evaluation)),
        "refused": [_cell(f"{name}: {reason}") for name, reason in dict(evaluation.get("refused") or {}).items()],
        "attacks": list(_attack_rows(attacks)),
        "limits": list(_limits(recipe, evaluation, attacks, unlike)),
        "commands": {"evaluate": f"concept-eraser evaluate {_place(folder)}", "attack": f"concept-eraser attack {_place(folder)} -a unlearn_diff"},
        "use": _use(recipe, folder, repository),
        "fingerprint": recipe.fingerprint,
        "commit": f", commit `{environment['commit']}`" if environment.get("commit") else "",
        "recipe": recipe_text(folder),
    }  # fmt: skip
    loader = jinja2.FileSystemLoader(TEMPLATES)
    world = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return world.get_template("card.md").render(**content).rstrip() + "\n"


def finished(folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe and done.json of a run. Raises UserError where there is none, or it is not finished."""
    if not (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder} is no run folder (it has no recipe.yaml)")
    if not (folder / "done.json").is_file():
        raise UserError(f"{folder} is not finished; go on with: concept-eraser erase {folder / 'recipe.yaml'} -o {folder} --resume")  # fmt: skip
    return recipes.load(str(folder / "recipe.yaml")), _json(folder / "done.json")


def warnings(folder: Path) -> list[str]:
    """What a reader must know before any number."""
    evaluation = _json(folder / "evaluation.json")
    found = [] if evaluation else ["This erasure was not evaluated."]
    attacks, _ = _attacks(folder, evaluation)
    prompted = recipes.load(str(folder / "recipe.yaml")).target in recipes.PROMPTED
    return found + (["This erasure was not attacked."] if prompted and not attacks else [])


def header(recipe: Recipe, license: str) -> dict[str, Any]:
    """The YAML header, by the hub's keys."""
    found: dict[str, Any] = {"license": license}
    if license == "other":
        found["license_name"] = "see-base-model"
    if hub.is_id(recipe.model) and not Path(recipe.model).exists():
        found["base_model"] = hub.split(recipe.model)[0]
    if recipe.target in recipes.PROMPTED:
        found["library_name"] = "diffusers"
    if recipe.target in _TASKS:
        found["pipeline_tag"] = _TASKS[recipe.target]
    found["tags"] = ["concept-erasure", "machine-unlearning", "concept-eraser", recipe.method.name]
    if recipe.trainable.lora is not None:
        found["tags"].append("lora")
    return found


def _json(path: Path) -> dict[str, Any]:
    """The content of a file that a run may have; nothing where it has not."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path} is damaged; run the command that wrote it again") from None
    return content if isinstance(content, dict) else {}


def _attacks(folder: Path, evaluation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The attacks on the weights that were evaluated (all, where nothing was), and the names of others."""
    victim = evaluation.get("models", {}).get("after") if evaluation else None
    if victim is not None:
        return entries.attacks_of(folder, entries.weights_of(victim), [])
    return {path.name: content for path, content in entries.read_attacks(folder / "attacks")}, []


def _named(model: str) -> str:
    """A model without the machine's own path."""
    return f"`{Path(model).name}` (a local copy)" if Path(model).is_absolute() or Path(model).exists() else f"`{model}`"


def _place(folder: Path) -> str:
    return f"runs/{folder.resolve().name}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in options.items()) or "none"


def _concept(recipe: Recipe, evaluation: Mapping[str, Any]) -> str:
    """By the evaluation's concept, else by the names of what was to be forgotten."""
    asked = evaluation.get("protocol", {}).get("concept") if evaluation else None
    if asked:
        return ", ".join(f"{value} ({key})" for key, value in asked.items())
    return ", ".join(_source(side) for side in recipe.forgotten)


def _source(side: Any) -> str:
    """The prompts or data of a side, without a machine's path."""
    found = getattr(side, "prompts", None) or getattr(side, "data", None)
    if isinstance(found, list | tuple):
        return f"{len(found)} prompts"
    text = str(found)
    return _cell(Path(text).name if Path(text).is_absolute() else text)


def _sides(recipe: Recipe, environment: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row for each side that is not kept: its name, source, rows, those used, hash, loss, what to show instead."""
    told = environment.get("prompts", {})
    for name, side in recipe.sides.items():
        if name == "retain":
            continue
        rows = told.get(name, {})
        instead = getattr(side, "anchor", None)
        shown = _listed(instead) if isinstance(instead, Mapping) else instead or "-"
        used = getattr(side, "n", None)
        yield [name, f"`{_source(side)}`", str(rows.get("rows", "-")), "all" if used is None else str(used), f"`{rows['hash']}`" if "hash" in rows else "-", side.loss, _cell(shown)]  # fmt: skip


def _retained(recipe: Recipe, environment: Mapping[str, Any]) -> str:
    side = recipe.sides.get("retain")
    if side is None:
        return "nothing was trained to be kept"
    rows = environment.get("prompts", {}).get("retain", {})
    counted = f", {rows['rows']} rows, hash `{rows['hash']}`" if "hash" in rows else ""
    return f"`{_source(side)}`{counted} (loss {side.loss})"


def _trained(recipe: Recipe) -> str:
    chosen = recipe.trainable
    how = f"a LoRA of rank {chosen.lora.rank}" if chosen.lora is not None else "the weights themselves"
    return f"`{chosen.select}` of the {recipe.target.replace('_', ' ')}, {how}"


def _protocol(evaluation: Mapping[str, Any]) -> str:
    asked = evaluation.get("protocol")
    if not asked:
        return "Measured on labelled data, before and after."
    groups = "; ".join(f"{name}: {g['prompts']} ({g['role']})" for name, g in asked["groups"].items())
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


def _attack_rows(attacks: Mapping[str, Any]) -> Iterator[list[str]]:
    for content in attacks.values():
        asked, rates = content["protocol"], content["rates"]
        n = str((rates.get("asr") or {}).get("n", "-"))
        yield [asked["attack"], _cell(_listed(asked.get("options", {}))), _cell(asked["group"]), _interval(rates.get("pre")), _interval(rates.get("asr")), n, f"`{content['protocol_hash']}`"]  # fmt: skip


def _limits(recipe: Recipe, evaluation: Mapping[str, Any], attacks: Mapping[str, Any], unlike: list[str]) -> Iterator[str]:  # fmt: skip
    """What broke it, and what nobody looked at."""
    prompted = recipe.target in recipes.PROMPTED
    broke = {name: content["rates"] for name, content in attacks.items() if (content["rates"].get("asr") or {}).get("value")}  # fmt: skip
    for name, rates in sorted(broke.items(), key=lambda item: -item[1]["asr"]["value"]):
        without = f" ({rates['pre']['value']:.0%} without it)" if (rates.get("pre") or {}).get("value") is not None else ""  # fmt: skip
        yield f"Under the attack {name} the concept shows for {rates['asr']['value']:.0%} of the prompts{without}."
    if attacks and not broke:
        yield f"None of the attacks tried ({', '.join(attacks)}) brought the concept back; others may."
    if prompted and not attacks:
        yield "No attack was tried. Erased concepts commonly come back under adversarial prompts or a few steps of training."  # fmt: skip
    if unlike:
        yield f"Left out, since they attacked other weights than those evaluated: {', '.join(unlike)}."
    if not evaluation:
        yield "Not measured: whether the concept is gone, and what was lost beside it."
    elif prompted:
        roles = {group["role"] for group in evaluation.get("protocol", {}).get("groups", {}).values()}
        for role, said in (("neighbour", "neighbouring concepts"), ("retain", "what was to be kept")):
            if role not in roles:
                yield f"Not measured: {said}."
        few = min((row["after"]["n"] for row in evaluation["results"] if row.get("after")), default=0)
        if 0 < few < 100:
            yield f"Some numbers rest on {few} pictures only; read their intervals."
    if prompted:
        yield "Prompts in other languages, other samplers, image-to-image and fine-tuned descendants were not measured."


def _use(recipe: Recipe, folder: Path, repository: str) -> str:
    if recipe.target not in recipes.PROMPTED:
        return f'```python\nimport concept_eraser\n\nmodel = concept_eraser.measure("{_place(folder)}")  # the run folder describes itself\n```'  # fmt: skip
    whole = f'```python\nfrom diffusers import DiffusionPipeline\n\npipe = DiffusionPipeline.from_pretrained("{repository}")\nimage = pipe("a prompt").images[0]\n```'  # fmt: skip
    if not (folder / "lora").is_dir():
        return whole
    base = recipe.model if hub.is_id(recipe.model) and not Path(recipe.model).exists() else "path/of/the/base/model"
    name, revision = hub.split(base) if hub.is_id(base) else (base, None)
    pinned = f', revision="{revision}"' if revision else ""
    return f'The whole pipeline:\n\n{whole}\n\nor its LoRA on the base model, with a strength from 0 to 1:\n\n```python\nfrom diffusers import DiffusionPipeline\n\npipe = DiffusionPipeline.from_pretrained("{name}"{pinned})\npipe.load_lora_weights("{repository}", adapter_name="erase")\npipe.set_adapters("erase", 1.0)\n```'  # fmt: skip


def recipe_text(folder: Path) -> str:
    """The recipe without its first line (a command with a path of this machine) and without paths in its values."""
    lines = (folder / "recipe.yaml").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith("# concept-eraser")]
    found = []
    for line in kept:
        key, _, value = line.partition(": ")
        found.append(f"{key}: {Path(value).name}  # a local path" if value.startswith("/") else line)
    return "\n".join(found)
