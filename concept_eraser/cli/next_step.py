"""What the user can do after `concept-eraser erase`: load the result, or continue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from concept_eraser.utils.errors import Interrupted, ReportedElsewhere, UserError


def loading_call(pipeline: Path) -> str:
    """Return the call of plain diffusers that loads a pipeline on any device.

    Without the type, transformers reads a text encoder in half precision as it is, and the CPU
    refuses the mixture.
    """
    return f"DiffusionPipeline.from_pretrained('{pipeline}', torch_dtype=torch.float32)"


@contextmanager
def with_next_step(folder: Path) -> Iterator[None]:
    """Add to an interruption how to continue, and to an error where a previous run is."""
    from concept_eraser.utils import distributed

    resume_command = f"concept-eraser erase {folder / 'recipe.yaml'} --output {folder} --resume"
    try:
        yield
    except Interrupted as interruption:
        launch = (
            ""
            if distributed.alone()
            else (
                " (under the same launch: accelerate launch ... -m "
                f"{resume_command.replace('-', '_', 1)})"
            )
        )
        raise Interrupted(
            f"{interruption}\ncontinue with: {resume_command}{launch}{_set_aside(folder)}"
        ) from None
    except ReportedElsewhere:
        raise
    except UserError as error:
        raise UserError(f"{error}{_set_aside(folder)}") from None


def _set_aside(folder: Path) -> str:
    """Say where the previous run is that an unfinished run will replace."""
    from concept_eraser.storage import output_folder

    places = output_folder.places_set_aside(folder) if folder.is_dir() else []
    return f"\nthe previous run is in {places[0]} until the new one is finished" if places else ""
