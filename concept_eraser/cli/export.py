"""concept-eraser export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from concept_eraser.cli.bounds import finite, weights_of
from concept_eraser.utils import limits


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help=(
                "a run folder; or a diffusers folder, a LoRA, tensors of a part, a "
                "single-file checkpoint"
            ),
        ),
    ],
    to: Annotated[
        str, typer.Option(help="diffusers, tensors, lora, kohya, musubi, comfyui or single-file")
    ],
    output: Annotated[
        Optional[Path],
        typer.Option(
            "--output",
            "-o",
            help=(
                "where to: a folder for diffusers, else a .safetensors file (default: in "
                "RUN/exports/, with a strength other than 1 in the name)"
            ),
        ),
    ] = None,
    before: Annotated[
        Optional[str],
        typer.Option(help="the original model (default: the one of the run's recipe)"),
    ] = None,
    strength: Annotated[
        float,
        typer.Option(
            min=-limits.PORTION,
            max=limits.PORTION,
            callback=finite,
            help="scale of the erasure: 0 is the original, 1 the run",
        ),
    ] = 1.0,
    rank: Annotated[
        Optional[int],
        typer.Option(
            min=1,
            max=limits.RANK,
            help=(
                "rank of a LoRA (default: the run's own, else the smallest within --max-error); "
                "a smaller one keeps the largest singular values"
            ),
        ),
    ] = None,
    max_error: Annotated[
        Optional[float],
        typer.Option(
            min=0.0,
            max=limits.PORTION,
            callback=finite,
            help=(
                "largest relative error of the change that the rank of a LoRA may cause (default: "
                "0.2)"
            ),
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="numbers of a LoRA file: fp32, fp16, bf16, or fp8 (kohya, musubi)")
    ] = "fp32",
    block_weights: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "with --to kohya: factors of the UNet's blocks, with commas, as in LoRA Block "
                "Weight: 17 or 26 for Stable Diffusion 1 and 2, 12 or 20 for XL"
            )
        ),
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="load pickled weights (they can execute code)")
    ] = False,
) -> None:
    """Write an erasure in the format that another program reads.

    diffusers: a folder for from_pretrained. tensors: the changed tensors of the denoiser or text
    encoder. lora: a file for diffusers' load_lora_weights. kohya: a LoRA for A1111, ComfyUI, Forge
    (Stable Diffusion 1, 2, XL, Flux, Flux.2 Klein, Qwen-Image, Z-Image). musubi: a LoRA for
    musubi-tuner, comfyui: one for ComfyUI in the names of AI Toolkit (Flux.2 Klein, Qwen-Image,
    Z-Image). single-file: the whole checkpoint for these programs (Stable Diffusion 1, 2, XL, 3;
    for Flux its transformer).

    [bold]Examples[/bold]

      concept-eraser export runs/tiny_star_munba --to single-file

      concept-eraser export runs/mine --to kohya --rank 32 --max-error 0.5 -o no_star.safetensors

      concept-eraser export runs/star --to kohya --rank 32 --dtype fp16

      concept-eraser export runs/xattn --to kohya --block-weights \
      1,1,1,1,1,1,1,1,0,0,0,0,0,0,0,0,0      (17: BASE, IN01, IN02, IN04, ...)

      concept-eraser export runs/mine --to diffusers --strength 0.5 -o half

      concept-eraser export model.safetensors --before ./stable-diffusion-v1-5 --to diffusers -o
      model
    """
    from concept_eraser import api

    result = api.export(
        source,
        to,
        before=before,
        output=output,
        strength=strength,
        rank=rank,
        max_error=max_error,
        dtype=dtype,
        block_weights=weights_of(block_weights, "--block-weights") or (),
        allow_pickle=allow_pickle,
    )
    if result.rank is None:
        typer.echo(f"written: {result.path}")
        if result.rounding:
            typer.echo(
                "rounding to the precision of the checkpoint: relative error "
                f"{result.rounding:.2g} of the change"
            )
        return
    error_text = (
        "its own factors"
        if result.error == 0
        else f"it leaves {result.error:.3f} of the change out"
    )
    typer.echo(f"written: {result.path} (rank {result.rank}; {error_text})")
    if result.layer_errors:
        errors = result.layer_errors
        typer.echo(
            f"relative error of a layer: mean {errors.mean:.3f}, worst {errors.worst:.3f} "
            f"({errors.worst_layer})"
        )
    if result.rounding:
        typer.echo(f"rounding to {dtype}: relative error {result.rounding:.2g}")
    for finding in result.ignored:
        typer.echo(f"warning: {finding.sentence()}")
