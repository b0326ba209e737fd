"""concept-eraser distance"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from concept_eraser import limits
from concept_eraser.errors import UserError


def distance(
    after: Annotated[Path, typer.Argument(help="a folder of pictures")],
    reference: Annotated[Path, typer.Argument(help="a folder of the pictures they are compared with: real ones, or the original model's")],
    features: Annotated[str, typer.Option(help="what pictures are compared by: inception, clip, torchmetrics64, judge")] = "inception",
    mode: Annotated[Optional[str], typer.Option(help="of inception, clean-fid's resizing: clean, legacy_pytorch, legacy_tensorflow")] = None,
    model: Annotated[Optional[str], typer.Option(help="of clip: open_clip's name, or local-dir:FOLDER")] = None,
    weights: Annotated[Optional[str], typer.Option(help="of clip: a file, or open_clip's name of weights on this machine")] = None,
    seed: Annotated[int, typer.Option(min=0, max=limits.SEED, help="of the subsets that KID draws")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder of distance.json")] = Path("distance"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:  # fmt: skip
    """FID and KID of two folders of pictures, whoever made them, with all that such a number depends on.

    Folders are read with those inside them. Pictures that cannot be read are named and left out. Features are kept, so that
    a run that was interrupted, or another reference, does not look at a picture again. Weights are never downloaded: if they
    are missing, the message says which file goes where.

    [bold]Examples[/bold]

      concept-eraser distance after/ before/ --features judge

      concept-eraser distance after/ coco/ --features inception --mode clean --output numbers

      concept-eraser distance after/ coco/ --features clip --model ViT-L-14 --weights ViT-L-14.safetensors
    """
    from concept_eraser.cli.show_progress import bars
    from concept_eraser.data.images import picture_files
    from concept_eraser.evaluation.metrics import fid
    from concept_eraser.storage import output_folder

    for folder in (after, reference):
        picture_files(folder, deep=True)  # an empty second folder is told before the first is looked at
    used = fid.features(features, mode=mode, model=model, weights=weights)
    with output_folder.results(output, "distance", ["distance.json"]):
        with bars(quiet) as progress:
            (a, told), (b, real) = (used.of_folder(folder, progress=progress) for folder in (after, reference))
        found, refused = fid.distances(a, b, seed)
        settings = fid.described(features, used, len(a), len(b), f"folder {real['folder']} ({real['hash']})")
        for key, value in settings.items():
            typer.echo(f"  {key:<12} {value}")
        for name, value in found.items():
            ends = f"  [{value.low:.4g}, {value.high:.4g}]" if value.low == value.low else ""
            typer.echo(f"{name}_{features}  {value.value:.4g}{ends}")
        for folder, one in ((after, told), (reference, real)):
            if one["left_out"]:
                typer.echo(f"left out of {folder}: {len(one['left_out'])}", err=True)
                typer.echo("\n".join(f"  {reason}" for reason in one["left_out"]), err=True)
        output_folder.claim(output, "distance")
        _write(output, features, seed, settings, found, refused, {"after": told, "reference": real})
        typer.echo(f"numbers: {output / 'distance.json'}")
        if refused:
            raise UserError("; ".join(f"no {name}_{features}: {why}" for name, why in refused.items()))


def _write(output: Path, features: str, seed: int, settings: dict[str, Any], found: dict, refused: dict, folders: dict[str, Any]) -> None:  # fmt: skip
    from concept_eraser import environment
    from concept_eraser.evaluation.base import Result
    from concept_eraser.evaluation.suite import dumps
    from concept_eraser.storage.writers import write_text

    results = [Result(f"{name}_{features}", "pictures", value, "lower", settings=settings).as_dict() for name, value in found.items()]  # fmt: skip
    protocol = {"seed": seed, **settings}
    content = {"protocol": protocol, "protocol_hash": environment.fingerprint(protocol), "results": results, "refused": {f"{name}_{features}": why for name, why in refused.items()}, "folders": folders, "environment": environment.describe()}  # fmt: skip
    write_text(output / "distance.json", dumps(content))
