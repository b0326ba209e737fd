"""concept-eraser erase"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from concept_eraser.cli import erase_concepts, erase_leco
from concept_eraser.cli.bounds import finite
from concept_eraser.cli.erase_concepts import ConceptRequest
from concept_eraser.cli.next_step import loading_call, permissions, with_next_step
from concept_eraser.utils import limits, resources
from concept_eraser.utils.commands import erase_command, shell_command
from concept_eraser.utils.errors import UserError

_EXAMPLES = """Erase a concept and write a run folder.

Give the concept itself: prompts, anchor concept and retain set are chosen and written down. Several
concepts are erased together. Or give a RECIPE: a name from `concept-eraser list recipes`, or a YAML
file. Or describe the job by flags, or by a configuration of LECO or of a slider. Any setting can be
changed by key.path=value.

[bold]Examples[/bold]

  concept-eraser erase star      (from the bundled model)

  concept-eraser erase "Van Gogh" --kind style --model ./my-sd15

  concept-eraser erase "English Springer" church --model ./my-sd15 --dry-run

  concept-eraser erase tiny_star_munba

  concept-eraser erase tiny_star_munba training.lr=5e-5 trainable=cross_attention -o runs/xattn

  concept-eraser erase --model ./my-sd15 --forget my_forget.txt --anchor "a person" \
--retain my_retain.txt

  concept-eraser erase --forget tiny_star --anchor shape=circle --retain tiny_rest \
--select all      (all weights, then a closed form)

  concept-eraser erase --forget tiny_star --anchor shape=circle --forget tiny_moon \
--anchor shape=cross --retain tiny_five_rest

  concept-eraser erase --leco prompts.yaml --model ./my-sd15

  concept-eraser erase tiny_star_munba --resume      (continue after Ctrl-C or a crash)
"""

_FLAGS = {
    "retain": "retain.prompts",
    "loss": "forget.loss",
    "method": "method.name",
    "select": "trainable.select",
    "lora": "trainable.lora.rank",
    "steps": "training.steps",
    "lr": "training.lr",
    "seed": "training.seed",
    "memory": "memory",
    "save": "save",
}


def erase(
    items: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[CONCEPT]...|[RECIPE] [KEY=VALUE]...",
            help="concepts or one recipe, then overrides",
        ),
    ] = None,
    kind: Annotated[
        Optional[str],
        typer.Option(
            help=("with concepts: object, style, person, character or content (default: guessed)")
        ),
    ] = None,
    images: Annotated[
        Optional[int],
        typer.Option(
            min=2,
            max=limits.IMAGES,
            help=(
                "with concepts: images of each group of the evaluation (default: 96 of the "
                "bundled model, 64 of others)"
            ),
        ),
    ] = None,
    model: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "tiny-sd, a diffusers folder, a run folder or a hub id; with --base a "
                ".safetensors file (default: the recipe's, or tiny-sd)"
            )
        ),
    ] = None,
    base: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "for a single-file checkpoint: a diffusers folder or hub id of its architecture "
                "(the folder needs no weights)"
            )
        ),
    ] = None,
    forget: Annotated[
        Optional[list[str]],
        typer.Option(help="prompt set to forget: a name or a file; one --forget per concept"),
    ] = None,
    retain: Annotated[
        Optional[str], typer.Option(help="prompt set to preserve: a name or a file")
    ] = None,
    anchor: Annotated[
        Optional[list[str]],
        typer.Option(
            help=(
                "anchor concept, generated instead: 'a person', 'a {color} circle', or "
                "shape=circle; for several concepts one for all, or one each (default with "
                "concepts: chosen)"
            )
        ),
    ] = None,
    leco: Annotated[
        Optional[Path],
        typer.Option(
            help=(
                "a configuration of LECO or of a slider: prompts.yaml, config.yaml, or "
                "prompts.toml of sd-scripts"
            )
        ),
    ] = None,
    loss: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "forget loss, see `concept-eraser list losses` (default without a recipe: anchor "
                "with --anchor, else esd)"
            )
        ),
    ] = None,
    method: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "see `concept-eraser list methods` (default without a recipe: munba, which needs "
                "--retain)"
            )
        ),
    ] = None,
    select: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "trainable parameters, see `concept-eraser list selections`; with --lora, the "
                "adapter is on their layers (default without a recipe: blocks with the default "
                "LoRA, else all)"
            )
        ),
    ] = None,
    lora: Annotated[
        Optional[int],
        typer.Option(
            metavar="RANK",
            min=1,
            max=limits.RANK,
            help=(
                "train a LoRA of this rank (default without a recipe, if every concept has an "
                "anchor: 64)"
            ),
        ),
    ] = None,
    steps: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            max=limits.TRAINING_STEPS,
            help=(
                "training steps (default without a recipe: 100 of the bundled model, 200 of others)"
            ),
        ),
    ] = None,
    lr: Annotated[
        Optional[float],
        typer.Option(
            min=0.0,
            max=limits.LEARNING_RATE,
            callback=finite,
            help=(
                "learning rate (default without a recipe: by the model and the trainable "
                "parameters; --dry-run prints it)"
            ),
        ),
    ] = None,
    seed: Annotated[
        Optional[int],
        typer.Option(min=0, max=limits.SEED, help="training seed (default: the recipe's, or 0)"),
    ] = None,
    output: Annotated[
        Optional[Path],
        typer.Option(
            "--output",
            "-o",
            help="run folder (default: runs/<concept, recipe name or fingerprint>)",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue an unfinished run")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the run in the run folder")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help=(
                "check everything, print the resolved recipe, estimate memory, disk space and "
                "time; nothing is trained or downloaded"
            ),
        ),
    ] = False,
    two_steps: Annotated[
        Optional[bool],
        typer.Option(
            "--two-steps/--no-two-steps",
            help=(
                "with --dry-run: make two steps in a temporary folder (default: only if they "
                "take seconds)"
            ),
        ),
    ] = None,
    memory: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "settings for a GPU with this memory: 8gb, 12gb, 16gb, 24gb, 32gb or 48gb (see "
                "`concept-eraser list presets`)"
            )
        ),
    ] = None,
    save: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "what the run folder holds of the weights: lora, changed (tensors) or pipeline "
                "(default: lora if a LoRA is trained, else pipeline)"
            )
        ),
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="load pickled weights (they can execute code)")
    ] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help=(
                "call a model that a recipe names as package.module:function (it runs code; a "
                "model that --model names is called without this)"
            ),
        ),
    ] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--evaluate/--no-evaluate",
            help="with concepts: evaluate the run afterwards, and write a report",
        ),
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:
    if two_steps is not None and not dry_run:
        raise UserError("--two-steps and --no-two-steps go with --dry-run; add it, or leave it out")
    flags: dict[str, Any] = {
        "retain": retain,
        "loss": loss,
        "method": method,
        "select": select,
        "lora": lora,
        "steps": steps,
        "lr": lr,
        "seed": seed,
        "memory": memory,
        "save": save,
    }
    names = [item for item in items or [] if "=" not in item or Path(item).is_file()]
    settings = [
        f"{_FLAGS[key]}={_quote(value)}" for key, value in flags.items() if value is not None
    ]
    settings += [item for item in items or [] if item not in names]
    if leco is None and (concepts := erase_concepts.concepts_among(names)):
        if forget:
            raise UserError(
                f"give concepts ({', '.join(concepts)}) or --forget with a prompt set, not both"
            )
        request = ConceptRequest(
            names=concepts,
            model=_on_base(model, base) if model or base else None,
            kind=kind,
            anchors=[erase_concepts.anchor_word(text) for text in anchor or []],
            images=images,
            overrides=settings,
        )
        options = {"allow_pickle": allow_pickle, "resume": resume, "overwrite": overwrite}
        if dry_run:
            erase_concepts.dry_run(request, output, allow_pickle=allow_pickle, two_steps=two_steps)
        else:
            erase_concepts.run(request, output, measure=measure, quiet=quiet, **options)
        return
    start: str | dict[str, Any]
    name: str | None = None
    if leco is not None:
        flag_values = {"--forget": forget, "--anchor": anchor, "--kind": kind, "--images": images}
        others = [*names, *(flag for flag, value in flag_values.items() if value)]
        overrides = [*_model_setting(model, base), *settings]
        described = erase_leco.recipe_of(leco, overrides, others)
        start, name = described.content, described.name
    else:
        for flag, value in (("--kind", kind), ("--images", images)):
            if value is not None:
                if names:  # a concept with / or an ending is read as a path
                    resources.find("pipelines", names[0])
                raise UserError(f"{flag} goes with concepts, e.g. concept-eraser erase 'Van Gogh'")
        from concept_eraser.recipes import overrides as changes

        anchors = [changes.anchor(text) for text in anchor or []]
        objectives = _objectives(forget or [], anchors, bool(names))
        overrides = [*_model_setting(model, base), *objectives, *settings]
        start, overrides = _recipe_or_default(names, overrides, has_forget=bool(forget))
    run(
        start,
        overrides,
        output=output,
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
        allow_pickle=allow_pickle,
        quiet=quiet,
        two_steps=two_steps,
        allow_code=allow_code or any(override.startswith("model=") for override in overrides),
        name=name,
    )


erase.__doc__ = _EXAMPLES


def _recipe_or_default(
    names: Sequence[str], overrides: list[str], *, has_forget: bool
) -> tuple[str | dict[str, Any], list[str]]:
    """Return the recipe that is named, or an empty one with the default settings, and overrides.

    Raises UserError for several recipes, and for nothing to erase.
    """
    if len(names) > 1:
        raise UserError(
            f"one recipe at a time, found {', '.join(names)}; overrides are written key.path=value"
        )
    if names:
        return names[0], overrides
    if not has_forget:
        raise UserError(
            "nothing to erase: give a concept (concept-eraser erase star), a recipe (see "
            "`concept-eraser list recipes`) or --forget with a prompt set"
        )
    from concept_eraser.recipes import defaults

    return {}, defaults.complete(overrides)


def _model_setting(model: str | None, base: str | None) -> list[str]:
    """Return the override for the flags --model and --base, or none."""
    return [f"model={_quote(_on_base(model, base))}"] if model or base else []


def _on_base(model: str | None, base: str | None) -> str:
    if base is None:
        return str(model)
    if model is None:
        raise UserError(
            "--base belongs to --model FILE.safetensors; give both, or write it in the "
            "recipe as model: FILE@BASE"
        )
    from concept_eraser.models import loading

    return loading.on_base(model, base)


def _objectives(forget: list[str], anchors: list[Any], of_recipe: bool) -> list[str]:
    """Return the overrides for --forget and --anchor. Raises UserError if the numbers differ."""
    if len(forget) < 2:
        if len(anchors) > 1:
            raise UserError(
                f"found {len(anchors)} anchors for {len(forget) or 'no'} --forget; give "
                "one --anchor a concept"
            )
        return [
            f"forget.{key}={_quote(value)}"
            for key, values in (("prompts", forget), ("anchor", anchors))
            for value in values
        ]
    if of_recipe:
        raise UserError(
            "several --forget describe an erasure without a recipe; in a recipe several "
            "concepts are a list under forget: (see `concept-eraser show "
            "tiny_five_munba`)"
        )
    if len(anchors) not in (0, 1, len(forget)):
        raise UserError(
            f"found {len(anchors)} anchors for {len(forget)} concepts; give one --anchor "
            "for all, or one each in the same order"
        )
    all_anchors = anchors * len(forget) if len(anchors) == 1 else anchors or [None] * len(forget)
    objectives = [
        {"prompts": name, **({"anchor": anchor_text} if anchor_text else {})}
        for name, anchor_text in zip(forget, all_anchors, strict=True)
    ]
    return [f"forget={_quote(objectives)}"]


def _quote(value: Any) -> str:
    from concept_eraser.recipes import overrides

    return overrides.as_text(value) if isinstance(value, str | dict | list) else str(value)


def run(
    recipe: Any,
    overrides: list[str],
    output: Path | None,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    allow_pickle: bool,
    quiet: bool,
    two_steps: bool | None = None,
    *,
    allow_code: bool = False,
    name: str | None = None,
) -> None:
    """Resolve and check a recipe, train, and print the run folder and the next command."""
    from concept_eraser.cli import dry_run as dry_run_report
    from concept_eraser.cli.progress_bars import bars
    from concept_eraser.cli.threads import use_idle_cores
    from concept_eraser.recipes import recipe as recipes
    from concept_eraser.utils import distributed

    recipe_content = recipes.load(recipe, overrides)
    default_name = _default_name(recipe, overrides, recipe_content)
    folder = output or Path("runs") / (f"{name}-{default_name}" if name else default_name)
    if dry_run and not distributed.alone():
        raise UserError("a dry run is made by one process; run it without `accelerate launch`")
    if dry_run:
        dry_run_report.show(
            recipe_content,
            folder,
            allow_pickle=allow_pickle,
            two_steps=two_steps,
            allow_code=allow_code,
        )
        return
    from concept_eraser import api
    from concept_eraser.models import loading
    from concept_eraser.runs import suite_matching

    names_code = allow_code and loading.names_code(recipe_content.model)
    options = permissions(allow_pickle=allow_pickle, allow_code=names_code)
    use_idle_cores()
    with bars(quiet) as progress, with_next_step(folder, options):
        finished_run = api.erase(
            recipe if isinstance(recipe, str) else recipe_content,
            overrides=overrides if isinstance(recipe, str) else (),
            output=folder,
            resume=resume,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            allow_code=allow_code,
            command=erase_command(folder),
            progress=progress,
        )
    if not distributed.is_first():
        return
    note = "" if finished_run.model else " (finished before; --overwrite repeats it)"
    typer.echo(f"erased in {finished_run.seconds:.0f} s of training{note}; run folder: {folder}")
    evaluate_command = shell_command(
        "evaluate", folder, *suite_matching.suite_option(folder), *options
    )
    if recipe_content.method.adds_gate:  # no other program could load it
        note = f"the gate: {folder / 'weights.safetensors'}"
    else:
        note = _weights_note(folder, allow_pickle)
    typer.echo(f"next: {evaluate_command}    ({note})")


def _weights_note(folder: Path, allow_pickle: bool) -> str:
    """Say which files of a run hold its weights, and how to get the pipeline of a LoRA run."""
    lora, pipeline, model = folder / "lora", folder / "pipeline", folder / "model"
    if pipeline.is_dir():
        lora_note = f"; the LoRA alone: {lora}" if lora.is_dir() else ""
        return f"or load it: {loading_call(pipeline)}{lora_note}"
    if model.is_dir():
        return f"the whole model: {model}"
    change = lora if lora.is_dir() else folder / "weights.safetensors"
    name = "the LoRA" if lora.is_dir() else "the changed tensors"
    export_command = shell_command(
        "export", folder, "--to", "diffusers", *permissions(allow_pickle=allow_pickle)
    )
    return f"{name}: {change}; the pipeline: {export_command}"


def _default_name(recipe: Any, overrides: list[str], recipe_content: Any) -> str:
    """Return the default name of a run folder.

    It is the recipe's own name, or the name of the run folder that holds the recipe. With overrides
    it ends with a part of the fingerprint.
    """
    if not isinstance(recipe, str):
        return str(recipe_content.fingerprint[:8])
    path = Path(recipe)
    stem = path.resolve().parent.name if path.name == "recipe.yaml" else path.stem
    changes = [override for override in overrides if not override.startswith("save=")]
    return f"{stem}-{recipe_content.fingerprint[:8]}" if changes else stem
