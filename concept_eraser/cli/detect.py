"""concept-eraser detect"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from concept_eraser.utils.errors import UserError


def detect(
    folder: Annotated[Path, typer.Argument(help="a folder of images")],
    before: Annotated[
        Optional[Path],
        typer.Option(help="a folder of equally many images of the original model, for comparison"),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="counting rule: mace, erasediff, rece, uda, strict, raw")
    ] = "mace",
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help=(
                "folder of detections.json and, with --before, nudenet.png; it must not hold the "
                "detections in other images or by another preset"
            ),
        ),
    ] = Path("nudenet"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:
    """Count the NudeNet detections in a folder of images from any model. Each preset is a
    published counting rule.

    The raw detections are cached. Another preset (with another --output), or the same command
    after an interruption, reuses them. Images that cannot be read are named and left out.

    [bold]Examples[/bold]

      concept-eraser detect after/

      concept-eraser detect after/ --before before/ --preset erasediff --output erasediff
    """
    from concept_eraser.cli.progress_bars import bars
    from concept_eraser.evaluation import nudity
    from concept_eraser.reporting import plots
    from concept_eraser.storage import output_folder

    rule = nudity.preset(preset)
    with output_folder.results(output, "detections", ["detections.json", "nudenet.png"]):
        folders = {**({"before": before} if before else {}), "after": folder}
        with bars(quiet) as progress:
            results = {when: _detect(path, nudity, progress) for when, path in folders.items()}
        counts = {
            when: rule.count(list(detections.values())) for when, (detections, _) in results.items()
        }
        sizes = {len(detections) for detections, _ in results.values()}
        if len(sizes) > 1:
            raise UserError(
                f"{before} has {len(results['before'][0])} readable images, {folder} has "
                f"{len(results['after'][0])}; counts of unequal sets are not compared"
            )
        raw = _raw(results)
        _require_same(output / "detections.json", preset, raw)
        typer.echo(
            f"{preset}: {len(rule.classes)} classes, score >= {rule.least}, counted once "
            f"per {rule.unit}; {sizes.pop()} images"
        )
        for label in rule.classes:
            values = [counts[when][label] for when in folders]
            if any(values):
                typer.echo(f"  {label.lower():<28}" + "  ".join(f"{value:>6}" for value in values))
        typer.echo(
            "  total                       "
            + "  ".join(f"{sum(c.values()):>6}" for c in counts.values())
        )
        for when, (detections, skipped) in results.items():
            nude = rule.nude(list(detections.values()))
            typer.echo(f"  nude images, {when}: {int(nude.sum())} of {len(nude)}")
            if skipped:
                typer.echo(f"  left out, {when}: {len(skipped)}, e.g. {skipped[0]}", err=True)
        output_folder.claim(output, "detections")
        left_out = {when: skipped for when, (_, skipped) in results.items()}
        _write(output, name=preset, rule=rule, raw=raw, left_out=left_out, counts=counts)
        if before:
            plots.save(plots.counts(counts, f"NudeNet, {preset}"), output / "nudenet.png")
        typer.echo(f"numbers: {output / 'detections.json'}")


def _detect(folder: Path, nudity: Any, progress: Any) -> tuple[dict[str, list], list[str]]:
    """Return the detections by file name, and the files that could not be read."""
    from concept_eraser.data.images import read_images

    detector, skipped = nudity.Detector(), list[str]()
    detections = {
        name: detector.detect(image)
        for name, image in read_images(folder, skipped, progress=progress)
    }
    return detections, skipped


def _raw(results: dict) -> dict[str, Any]:
    """Return the detections in the images of each folder, as in detections.json."""
    return {
        when: {
            file: [[d.label, round(d.score, 4), list(d.box)] for d in file_detections]
            for file, file_detections in detections.items()
        }
        for when, (detections, _) in results.items()
    }


def _require_same(path: Path, preset: str, raw: dict) -> None:
    """Raise UserError if a file has the detections in other images, or by another preset."""
    from concept_eraser.storage.readers import read_json

    content = read_json(path) if path.is_file() else None
    if content is not None and (
        content.get("preset") != preset
        or any(raw.get(when) != found for when, found in content.get("detections", {}).items())
    ):
        raise UserError(
            f"{path} is of other images or of another preset, and is not replaced; give another "
            "folder with --output"
        )


def _write(output: Path, *, name: str, rule: Any, raw: dict, left_out: dict, counts: dict) -> None:
    from concept_eraser.evaluation.nudity import Detector
    from concept_eraser.evaluation.suite import dumps
    from concept_eraser.storage.writers import write_text
    from concept_eraser.utils import provenance

    content = {
        "preset": name,
        "classes": rule.classes,
        "least": rule.least,
        "unit": rule.unit,
        "counts": counts,
        "left_out": left_out,
        "model": Detector().fingerprint,
        "detections": raw,
        "environment": provenance.describe(),
    }
    write_text(output / "detections.json", dumps(content))
