"""concept-eraser detect"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from concept_eraser.errors import UserError


def detect(
    folder: Annotated[Path, typer.Argument(help="a folder of pictures")],
    before: Annotated[Optional[Path], typer.Option(help="a folder of as many pictures by the model before, to compare with")] = None,
    preset: Annotated[str, typer.Option(help="what is counted: mace, erasediff, rece, uda, strict, raw")] = "mace",
    output: Annotated[Path, typer.Option("--output", "-o", help="folder of detections.json and, with --before, nudenet.png")] = Path("nudenet"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bars")] = False,
) -> None:  # fmt: skip
    """Count what NudeNet sees in a folder of pictures, whoever made them; every published way of counting has a name.

    The raw detections are kept, so that another preset, or a run that was interrupted, does not look again. Pictures that
    cannot be read are named and left out.

    [bold]Examples[/bold]

      concept-eraser detect after/

      concept-eraser detect after/ --before before/ --preset erasediff
    """
    from concept_eraser.cli.show_progress import bars
    from concept_eraser.evaluation import nudity, plots
    from concept_eraser.storage import output_folder

    rule = nudity.preset(preset)
    with output_folder.results(output, "detections", ["detections.json", "nudenet.png"]):
        folders = {**({"before": before} if before else {}), "after": folder}
        with bars(quiet) as progress:
            found = {when: _look(path, nudity, progress) for when, path in folders.items()}
        counts = {when: rule.count(list(seen.values())) for when, (seen, _) in found.items()}
        sizes = {len(seen) for seen, _ in found.values()}
        if len(sizes) > 1:
            raise UserError(f"{before} has {len(found['before'][0])} readable pictures, {folder} has {len(found['after'][0])}; counts of unequal sets are not compared")  # fmt: skip
        typer.echo(f"{preset}: {len(rule.classes)} classes, score >= {rule.least}, counted once per {rule.unit}; {sizes.pop()} pictures")  # fmt: skip
        for label in rule.classes:
            values = [counts[when][label] for when in folders]
            if any(values):
                typer.echo(f"  {label.lower():<28}" + "  ".join(f"{value:>6}" for value in values))
        typer.echo("  total                       " + "  ".join(f"{sum(c.values()):>6}" for c in counts.values()))
        for when, (seen, skipped) in found.items():
            nude = rule.nude(list(seen.values()))
            typer.echo(f"  nude pictures, {when}: {int(nude.sum())} of {len(nude)}")
            if skipped:
                typer.echo(f"  left out, {when}: {len(skipped)}, e.g. {skipped[0]}", err=True)
        output_folder.claim(output, "detections")
        _write(output, preset, rule, found, counts)
        if before:
            plots.save(plots.counts(counts, f"NudeNet, {preset}"), output / "nudenet.png")
        typer.echo(f"numbers: {output / 'detections.json'}")


def _look(folder: Path, nudity: Any, progress: Any) -> tuple[dict[str, list], list[str]]:
    """Detections by file name, and what could not be read."""
    from concept_eraser.data.images import read_pictures

    detector, skipped = nudity.Detector(), list[str]()
    seen = {name: detector.look(picture) for name, picture in read_pictures(folder, skipped, progress=progress)}
    return seen, skipped


def _write(output: Path, name: str, rule: Any, found: dict, counts: dict) -> None:
    from concept_eraser import environment
    from concept_eraser.evaluation.nudity import Detector
    from concept_eraser.evaluation.suite import dumps
    from concept_eraser.storage.writers import write_text

    raw = {when: {file: [[d.label, round(d.score, 4), list(d.box)] for d in some] for file, some in seen.items()} for when, (seen, _) in found.items()}  # fmt: skip
    content = {"preset": name, "classes": rule.classes, "least": rule.least, "unit": rule.unit, "counts": counts, "left_out": {when: skipped for when, (_, skipped) in found.items()}, "model": Detector().fingerprint, "detections": raw, "environment": environment.describe()}  # fmt: skip
    write_text(output / "detections.json", dumps(content))
