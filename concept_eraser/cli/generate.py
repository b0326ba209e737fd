"""concept-eraser generate"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from concept_eraser import limits
from concept_eraser.cli.bounds import finite
from concept_eraser.errors import UserError


def generate(
    model: Annotated[str, typer.Argument(help="tiny-sd, a diffusers folder, a run folder or a hub id")],
    prompt: Annotated[Optional[list[str]], typer.Option("--prompt", "-p", help="a prompt; may be given several times")] = None,
    prompts: Annotated[Optional[str], typer.Option(help="a prompt set by name or file")] = None,
    n: Annotated[int, typer.Option("-n", min=1, max=limits.IMAGES, help="pictures of each --prompt, or pictures of the set in all")] = 4,
    seed: Annotated[int, typer.Option(min=0, max=limits.SEED, help="pictures are numbered from this seed")] = 0,
    steps: Annotated[int, typer.Option(min=1, max=limits.SAMPLER_STEPS, help="denoising steps")] = 25,
    guidance: Annotated[float, typer.Option(min=0.0, max=limits.GUIDANCE, callback=finite, help="classifier-free guidance")] = 5.0,
    before: Annotated[Optional[str], typer.Option(help="the model that a LoRA, denoiser or text encoder was made for")] = None,
    guard: Annotated[Optional[str], typer.Option(help="sample under a safeguard, kind:text: negative:, sld-weak:, sld-medium:, sld-strong: or sld-max:")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder of the pictures")] = Path("pictures"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the images of an earlier call in --output")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:  # fmt: skip
    """Generate pictures from a model: PNG files, numbered, with the prompts in metadata.jsonl.

    [bold]Examples[/bold]

      concept-eraser generate tiny-sd -p "a red star" -p "a blue house" -n 8

      concept-eraser generate runs/tiny_star_munba --prompts tiny_star -n 64 --output after
    """
    if not prompt and not prompts:
        raise UserError("nothing to generate: give --prompt or --prompts")
    import json

    from concept_eraser import api
    from concept_eraser.cli.show_progress import bars
    from concept_eraser.data import generate as generation
    from concept_eraser.data.images import png
    from concept_eraser.data.prompts import Prompt, load
    from concept_eraser.storage import locks, output_folder
    from concept_eraser.storage.writers import write_bytes, write_text

    asked = [Prompt(text) for text in prompt or [] for _ in range(n)]
    asked += load(prompts).take(n, seed).prompts if prompts else ()
    seeds = [seed + i if own is None else own for i, own in enumerate(generation.own_seeds(asked))]
    with locks.locked(output, "generate images"):
        if output_folder.require_claimable(output, "images", alone=True) and not overwrite:
            raise UserError(f"{output} holds images of an earlier call; give another --output, or replace them with --overwrite")  # fmt: skip
        with bars(quiet) as progress:
            pictures = generation.generate(
                api.load(model, base=before, guard=guard),
                asked,
                seeds,
                generation.Sampling(steps, guidance),
                progress=progress,
            )
        output_folder.claim(output, "images", alone=True)
        output_folder.set_aside(output)
        rows = []
        for i, (row, picture) in enumerate(zip(asked, pictures, strict=True)):
            name = f"{i:05d}.png"
            write_bytes(output / name, png(picture))
            scale = guidance if row.guidance is None else row.guidance
            fields = {"file_name": name, "text": row.text, "seed": seeds[i], "steps": steps, "guidance": scale, "model": model}  # fmt: skip
            rows.append({**fields, **({"guard": guard} if guard else {})})
        write_text(output / "metadata.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        output_folder.remove_set_aside(output)
    typer.echo(f"{len(asked)} pictures in {output}")
