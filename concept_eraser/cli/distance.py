"""concept-eraser distance"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from concept_eraser.utils import limits
from concept_eraser.utils.errors import UserError


def distance(
    after: Annotated[Path, typer.Argument(help="a folder of images")],
    reference: Annotated[
        Path,
        typer.Argument(
            help=(
                "a folder of the images they are compared with: real ones, or the original model's"
            )
        ),
    ],
    features: Annotated[
        str,
        typer.Option(help="what images are compared by: inception, clip, torchmetrics64, judge"),
    ] = "inception",
    mode: Annotated[
        Optional[str],
        typer.Option(
            help="of inception, clean-fid's resizing: clean, legacy_pytorch, legacy_tensorflow"
        ),
    ] = None,
    model: Annotated[
        Optional[str], typer.Option(help="of clip: open_clip's name, or local-dir:FOLDER")
    ] = None,
    weights: Annotated[
        Optional[str],
        typer.Option(help="of clip: a file, or open_clip's name of weights on this machine"),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=limits.SEED, help="of the subsets that KID draws")
    ] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder of distance.json")] = Path(
        "distance"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:
    """FID and KID of two folders of images, whoever made them, with all that such a number
    depends on.

    Folders are read with those inside them. Images that cannot be read are named and left out.
    Features are kept, so that a run that was interrupted, or another reference, does not look at an
    image again. Weights are never downloaded: if they are missing, the message says which file
    goes where.

    [bold]Examples[/bold]

      concept-eraser distance after/ before/ --features judge

      concept-eraser distance after/ coco/ --features inception --mode clean --output numbers

      concept-eraser distance after/ coco/ --features clip --model ViT-L-14 --weights
      ViT-L-14.safetensors
    """
    from concept_eraser.cli.progress_bars import bars
    from concept_eraser.data.images import image_files
    from concept_eraser.evaluation.metrics import fid
    from concept_eraser.storage import output_folder

    for folder in (after, reference):
        # an empty second folder is told before the first is looked at
        image_files(folder, deep=True)
    extractor = fid.features(features, mode=mode, model=model, weights=weights)
    with output_folder.results(output, "distance", ["distance.json"]):
        with bars(quiet) as progress:
            (a, after_summary), (b, reference_summary) = (
                extractor.of_folder(folder, progress=progress) for folder in (after, reference)
            )
        values, reasons = fid.distances(a, b, seed)
        settings = fid.distance_settings(
            features,
            extractor,
            len(a),
            len(b),
            f"folder {reference_summary['folder']} ({reference_summary['hash']})",
        )
        for key, value in settings.items():
            typer.echo(f"  {key:<12} {value}")
        for name, value in values.items():
            ends = f"  [{value.low:.4g}, {value.high:.4g}]" if value.low == value.low else ""
            typer.echo(f"{name}_{features}  {value.value:.4g}{ends}")
        for folder, one in ((after, after_summary), (reference, reference_summary)):
            if one["left_out"]:
                typer.echo(f"left out of {folder}: {len(one['left_out'])}", err=True)
                typer.echo("\n".join(f"  {reason}" for reason in one["left_out"]), err=True)
        output_folder.claim(output, "distance")
        _write(
            output,
            features,
            seed,
            settings,
            values,
            reasons,
            {"after": after_summary, "reference": reference_summary},
        )
        typer.echo(f"numbers: {output / 'distance.json'}")
        if reasons:
            raise UserError(
                "; ".join(f"no {name}_{features}: {why}" for name, why in reasons.items())
            )


def _write(
    output: Path,
    features: str,
    seed: int,
    settings: dict[str, Any],
    distances: dict,
    reasons: dict,
    folders: dict[str, Any],
) -> None:
    from concept_eraser.evaluation.base import Result
    from concept_eraser.evaluation.suite import dumps
    from concept_eraser.storage.writers import write_text
    from concept_eraser.utils import provenance

    results = [
        Result(f"{name}_{features}", "images", value, "lower", settings=settings).as_dict()
        for name, value in distances.items()
    ]
    protocol = {"seed": seed, **settings}
    content = {
        "protocol": protocol,
        "protocol_hash": provenance.fingerprint(protocol),
        "results": results,
        "refused": {f"{name}_{features}": why for name, why in reasons.items()},
        "folders": folders,
        "environment": provenance.describe(),
    }
    write_text(output / "distance.json", dumps(content))
