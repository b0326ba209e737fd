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
            help=("a folder of reference images: real ones, or images of the original model")
        ),
    ],
    features: Annotated[
        str,
        typer.Option(help="feature extractor: inception, clip, torchmetrics64, judge"),
    ] = "inception",
    mode: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "for inception, the resizing: clean, legacy_pytorch, legacy_tensorflow (default: "
                "clean)"
            )
        ),
    ] = None,
    model: Annotated[
        Optional[str],
        typer.Option(
            help="for clip, the name in open_clip, or local-dir:FOLDER (default: ViT-B-32)"
        ),
    ] = None,
    weights: Annotated[
        Optional[str],
        typer.Option(
            help=(
                "for clip, a file, or open_clip's name of weights on this machine (default: openai)"
            )
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=limits.SEED, help="seed of the subsets that KID draws")
    ] = 0,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help=(
                "folder of distance.json; it must not hold that of other images or of other "
                "settings"
            ),
        ),
    ] = Path("distance"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:
    """Compute FID and KID of two folders of images from any model. All settings that such a number
    depends on are written beside it.

    Subfolders are read as well. Images that cannot be read are named and left out. Features are
    cached and reused after an interruption or for another reference. Weights are never downloaded.
    If they are missing, the message says which file goes where.

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
        # raise the error for an empty second folder before the work on the first
        image_files(folder, deep=True)
    extractor = fid.features(features, mode=mode, model=model, weights=weights)
    with output_folder.results(output, "distance", ["distance.json"]):
        with bars(quiet) as progress:
            (a, after_summary), (b, reference_summary) = (
                extractor.of_folder(folder, progress=progress) for folder in (after, reference)
            )
        values, reasons = fid.distances(a, b, seed)
        settings = fid.distance_settings(
            name=features,
            features=extractor,
            n=len(a),
            m=len(b),
            reference=f"folder {reference_summary['folder']} ({reference_summary['hash']})",
        )
        summaries = {"after": after_summary, "reference": reference_summary}
        _require_same(output / "distance.json", {"seed": seed, **settings}, summaries)
        for key, value in settings.items():
            typer.echo(f"  {key:<12} {value}")
        for name, value in values.items():
            interval = f"  [{value.low:.4g}, {value.high:.4g}]" if value.low == value.low else ""
            typer.echo(f"{name}_{features}  {value.value:.4g}{interval}")
        for folder, summary in ((after, after_summary), (reference, reference_summary)):
            if summary["left_out"]:
                typer.echo(f"left out of {folder}: {len(summary['left_out'])}", err=True)
                typer.echo("\n".join(f"  {reason}" for reason in summary["left_out"]), err=True)
        output_folder.claim(output, "distance")
        _write(
            output,
            features,
            seed=seed,
            settings=settings,
            distances=values,
            reasons=reasons,
            folders=summaries,
        )
        typer.echo(f"numbers: {output / 'distance.json'}")
        if reasons:
            raise UserError(
                "; ".join(f"no {name}_{features}: {reason}" for name, reason in reasons.items())
            )


def _require_same(path: Path, protocol: dict[str, Any], folders: dict[str, Any]) -> None:
    """Raise UserError if a file has the distance of other images, or by other settings."""
    from concept_eraser.storage.readers import read_json
    from concept_eraser.utils import provenance

    content = read_json(path) if path.is_file() else None
    if content is not None and (
        content.get("protocol_hash") != provenance.fingerprint(protocol)
        or content.get("folders", {}).get("after", {}).get("hash") != folders["after"]["hash"]
    ):
        raise UserError(
            f"{path} is of other images or of other settings, and is not replaced; give another "
            "folder with --output"
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
        "refused": {f"{name}_{features}": reason for name, reason in reasons.items()},
        "folders": folders,
        "environment": provenance.describe(),
    }
    write_text(output / "distance.json", dumps(content))
