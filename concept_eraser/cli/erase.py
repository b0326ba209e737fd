"""concept-eraser erase"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from concept_eraser.errors import Interrupted, UserError

_EXAMPLES = """Erase a concept and write a run folder.

RECIPE is a name from `concept-eraser list recipes`, or a YAML file; or leave it out and use the flags.
Any setting can be changed by key.path=value.

[bold]Examples[/bold]

  concept-eraser erase tiny_star_munba

  concept-eraser erase tiny_star_munba training.lr=5e-5 trainable=cross_attention --output runs/xattn

  concept-eraser erase --model ./my-sd15 --forget my_forget.txt --anchor "a person" --retain my_retain.txt

  concept-eraser erase tiny_star_munba --resume      (go on after Ctrl-C or a crash)
"""

_FLAGS = {"forget": "forget.prompts", "retain": "retain.prompts", "anchor": "forget.anchor", "loss": "forget.loss", "method": "method.name", "select": "trainable.select", "lora": "trainable.lora.rank", "steps": "training.steps", "lr": "training.lr", "seed": "training.seed"}  # fmt: skip


def erase(
    items: Annotated[Optional[list[str]], typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="a recipe, then changes to it")] = None,
    model: Annotated[Optional[str], typer.Option(help="tiny-sd, a diffusers folder, a run folder or a hub id")] = None,
    forget: Annotated[Optional[str], typer.Option(help="prompt set to forget: a name or a file")] = None,
    retain: Annotated[Optional[str], typer.Option(help="prompt set to preserve: a name or a file")] = None,
    anchor: Annotated[Optional[str], typer.Option(help="what to show instead: 'a person', 'a {color} circle', or shape=circle")] = None,
    loss: Annotated[Optional[str], typer.Option(help="forget loss: anchor, esd, ascent, relabel, distill")] = None,
    method: Annotated[Optional[str], typer.Option(help="see `concept-eraser list methods`")] = None,
    select: Annotated[Optional[str], typer.Option(help="which weights may move, e.g. all, cross_attention")] = None,
    lora: Annotated[Optional[int], typer.Option(metavar="RANK", help="train a LoRA of this rank on them instead")] = None,
    steps: Annotated[Optional[int], typer.Option(help="training steps")] = None,
    lr: Annotated[Optional[float], typer.Option(help="learning rate")] = None,
    seed: Annotated[Optional[int], typer.Option(help="training seed")] = None,
    output: Annotated[Optional[Path], typer.Option("--output", "-o", help="run folder (default: runs/<recipe name or fingerprint>)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an unfinished run")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace what the run folder holds")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything, print the resolved recipe, train nothing")] = False,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="load pickled weights (they can execute code)")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:  # fmt: skip
    given: dict[str, Any] = {"forget": forget, "retain": retain, "anchor": anchor, "loss": loss, "method": method, "select": select, "lora": lora, "steps": steps, "lr": lr, "seed": seed}  # fmt: skip
    names = [item for item in items or [] if "=" not in item]
    overrides = [f"model={model}"] if model else []
    if anchor and (
        replaced := re.fullmatch(r"(\w+)=(.+)", anchor)
    ):  # --anchor shape=circle: the prompt with another shape
        given["anchor"] = {replaced[1]: replaced[2]}
    overrides += [f"{_FLAGS[key]}={_quoted(value)}" for key, value in given.items() if value is not None]
    overrides += [item for item in items or [] if "=" in item]
    if len(names) > 1:
        raise UserError(f"one recipe at a time, found {', '.join(names)}; changes are written key.path=value")
    if not names and not forget:
        raise UserError("nothing to erase: give a recipe (see `concept-eraser list recipes`) or --forget with a prompt set")  # fmt: skip
    if not names and anchor and not loss:
        overrides.insert(0, "forget.loss=anchor")
    if not names and not anchor and not loss:
        overrides.insert(0, "forget.loss=esd")
    run(names[0] if names else {}, overrides, output, resume, overwrite, dry_run, allow_pickle, quiet)


erase.__doc__ = _EXAMPLES


def _quoted(value: Any) -> str:
    import json

    return json.dumps(value) if isinstance(value, str | dict) else str(value)


def run(recipe: Any, overrides: list[str], output: Path | None, resume: bool, overwrite: bool, dry_run: bool, allow_pickle: bool, quiet: bool) -> None:  # fmt: skip
    """Resolve, check, train, and say where the result is and what to do next."""
    from concept_eraser import recipe as recipes
    from concept_eraser.cli.show_progress import bars

    resolved = recipes.load(recipe, overrides)
    folder = output or Path("runs") / _default_name(recipe, overrides, resolved)
    resume_command = f"concept-eraser erase {folder / 'recipe.yaml'} --output {folder} --resume"
    if dry_run:
        _dry_run(resolved, folder, allow_pickle)
        return
    from concept_eraser import api

    with bars(quiet) as progress:
        try:
            done = api.erase(resolved, output=folder, resume=resume, overwrite=overwrite, allow_pickle=allow_pickle, command=f"concept-eraser erase {folder / 'recipe.yaml'} --output {folder}", progress=progress)  # fmt: skip
        except Interrupted as stop:
            raise Interrupted(f"{stop}\ncontinue with: {resume_command}") from None
    again = "" if done.model else " (finished before; --overwrite does it again)"
    typer.echo(f"erased in {done.seconds:.0f} s of training{again}; run folder: {folder}")
    loads = f"    (or load it: StableDiffusionPipeline.from_pretrained('{folder / 'pipeline'}'))"
    whole = loads if (folder / "pipeline").is_dir() else f"    (the whole model: {folder / 'model'})"
    typer.echo(f"next: concept-eraser evaluate {folder}{whole}")


def _default_name(recipe: Any, overrides: list[str], resolved: Any) -> str:
    if isinstance(recipe, str) and Path(recipe).name == "recipe.yaml":
        return Path(recipe).parent.name
    if isinstance(recipe, str) and not overrides:
        return Path(recipe).stem
    stem = Path(recipe).stem + "-" if isinstance(recipe, str) else ""
    return stem + resolved.fingerprint[:8]


def _dry_run(resolved: Any, folder: Path, allow_pickle: bool) -> None:
    """Load the model and the data, select the weights, and stop before anything is generated or trained."""
    from concept_eraser import recipe as recipes

    lines = (_about_prompts if resolved.target in recipes.PROMPTED else _about_labels)(resolved, allow_pickle)
    typer.echo(recipes.dump(resolved, f"concept-eraser erase <this file> --output {folder}"))
    typer.echo("\n".join(lines) + f"\nwould write {folder}; nothing was trained")


def _about_labels(resolved: Any, allow_pickle: bool) -> list[str]:
    """How many examples each side has, and how many weights would move."""
    from concept_eraser.models.loading import load_part
    from concept_eraser.targets import labelled
    from concept_eraser.targets.base import Request

    request = Request(resolved, load_part(resolved.model, resolved.target, allow_pickle=allow_pickle))
    lines = [f"{name}: {len(rows)} of {len(data)} examples of {data.about}" for name, (data, rows) in labelled.rows(request).items()]  # fmt: skip
    eraser = labelled.build(request)
    counts = sum(p.numel() for p in eraser.trainable().values()), sum(p.numel() for p in eraser.module.parameters())
    return [*lines, f"trains {counts[0]:,} of {counts[1]:,} weights in {len(eraser.trainable())} tensors"]


def _about_prompts(resolved: Any, allow_pickle: bool) -> list[str]:
    from concept_eraser import api
    from concept_eraser.data import prompts
    from concept_eraser.targets import prompted
    from concept_eraser.targets.base import Request
    from concept_eraser.training.parameters import select

    forget = prompts.load(resolved.forget.prompts)
    lines = [f"forget: {len(forget)} prompts, e.g. {forget.texts[0]!r}"]
    if resolved.forget.anchor:
        lines.append(f"  shown instead: {forget.prompts[0].anchored(resolved.forget.anchor)!r}")
    if resolved.retain is not None:
        retain = prompts.load(resolved.retain.prompts)
        prompts.require_disjoint(forget, retain)
        lines.append(f"retain: {len(retain)} prompts, e.g. {retain.texts[0]!r}")
    model = api.load(resolved.model, allow_pickle=allow_pickle)
    parameters = dict(model.parts[resolved.target].named_parameters())
    chosen = select(parameters, resolved.trainable.select)
    count, of = sum(parameters[name].numel() for name in chosen), sum(p.numel() for p in parameters.values())
    adapter = prompted.adapted(Request(resolved, model), model.parts[resolved.target], chosen)
    if adapter is not None:
        own = sum(model.parts[resolved.target].get_parameter(name).numel() for name in adapter.tensors)
        return [*lines, f"trains a LoRA of {own:,} numbers on {len(adapter.layers)} layers, beside {of:,} weights"]
    return [*lines, f"trains {count:,} of {of:,} weights in {len(chosen)} tensors"]
