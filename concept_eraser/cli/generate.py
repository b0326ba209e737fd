"""concept-eraser generate"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from concept_eraser.cli.bounds import finite
from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError


def generate(
    model: Annotated[
        str, typer.Argument(help="tiny-sd, a diffusers folder, a run folder or a hub id")
    ],
    prompt: Annotated[
        Optional[list[str]],
        typer.Option("--prompt", "-p", help="a prompt; may be given several times"),
    ] = None,
    prompts: Annotated[Optional[str], typer.Option(help="a prompt set by name or file")] = None,
    n: Annotated[
        int,
        typer.Option(
            "-n",
            min=1,
            max=limits.IMAGES,
            help="images of each --prompt, or all images of the prompt set",
        ),
    ] = 4,
    seed: Annotated[int, typer.Option(min=0, max=limits.SEED, help="seed of the first image")] = 0,
    steps: Annotated[
        int, typer.Option(min=1, max=limits.SAMPLER_STEPS, help="denoising steps")
    ] = 25,
    guidance: Annotated[
        float,
        typer.Option(
            min=0.0, max=limits.GUIDANCE, callback=finite, help="classifier-free guidance"
        ),
    ] = 5.0,
    before: Annotated[
        Optional[str],
        typer.Option(help="the original model of a LoRA, denoiser or text encoder"),
    ] = None,
    guard: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "sample under a safeguard, kind:text: negative:, sld-weak:, sld-medium:, "
                "sld-strong:, sld-max:, adavd:, adavd-adaptive:, safree:, safree-validated:, "
                "semantic-surgery:, or spm-gate:, spm-gate-clip: and spm-gate-tokens: with "
                "CONCEPT@RUN"
            )
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder of the images")] = Path(
        "images"
    ),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace the images of an earlier call in --output")
    ] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle", help="also load weights stored as pickles, which can execute code"
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:
    """Generate images from a model: PNG files, numbered, with the prompts in metadata.jsonl.

    [bold]Examples[/bold]

      concept-eraser generate tiny-sd -p "a red star" -p "a blue house" -n 8

      concept-eraser generate runs/tiny_star_munba --prompts tiny_star -n 64 --output after
    """
    if not prompt and not prompts:
        raise UserError("nothing to generate: give --prompt or --prompts")
    import json

    from concept_eraser import api
    from concept_eraser.cli.progress_bars import bars
    from concept_eraser.cli.threads import use_idle_cores
    from concept_eraser.data import generate as generation
    from concept_eraser.data.images import png
    from concept_eraser.data.prompts import Prompt, load
    from concept_eraser.storage import locks, output_folder
    from concept_eraser.storage.writers import write_files, write_text

    all_prompts = [Prompt(text) for text in prompt or [] for _ in range(n)]
    all_prompts += load(prompts).take(n, seed).prompts if prompts else ()
    seeds = [
        seed + i if own_seed is None else own_seed
        for i, own_seed in enumerate(generation.own_seeds(all_prompts))
    ]
    use_idle_cores()
    with locks.hold_lock(output, "generate images"):
        if output_folder.require_claimable(output, "images", alone=True) and not overwrite:
            raise UserError(
                f"{output} holds images of an earlier call; give another --output, or "
                "replace them with --overwrite"
            )
        with bars(quiet) as progress:
            images = generation.generate(
                api.load(model, allow_pickle=allow_pickle, base=before, guard=guard),
                all_prompts,
                seeds,
                generation.Sampling(steps, guidance),
                progress=progress,
            )
        output_folder.claim(output, "images", alone=True)
        output_folder.set_aside(output)
        rows, files = [], {}
        for i, (row, image) in enumerate(zip(all_prompts, images, strict=True)):
            name = f"{i:05d}.png"
            files[name] = partial(png, image)
            scale = guidance if row.guidance is None else row.guidance
            fields = {
                "file_name": name,
                "text": row.text,
                "seed": seeds[i],
                "steps": steps,
                "guidance": scale,
                "model": model,
            }
            rows.append({**fields, **({"guard": guard} if guard else {})})
        write_files(output, files)
        write_text(output / "metadata.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        output_folder.remove_set_aside(output)
    typer.echo(f"{len(all_prompts)} images in {output}")
