"""What the user can do after `concept-eraser erase`: load the result, or continue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from concept_eraser.utils.commands import erase_command
from concept_eraser.utils.errors import Interrupted, ReportedElsewhere, UserError


def loading_call(pipeline: Path) -> str:
    """Return the call of plain diffusers that loads a pipeline on any device.

    Without the type, transformers reads a text encoder in half precision as it is, and the CPU
    refuses the mixture.
    """
    return f"DiffusionPipeline.from_pretrained({str(pipeline)!r}, torch_dtype=torch.float32)"


@contextmanager
def with_next_step(folder: Path, options: Sequence[str] = ()) -> Iterator[None]:
    """Add to an interruption how to continue, and to an error where a previous run is.

    Args:
        folder: the run folder.
        options: the options of the command that a continued run needs too, see `permissions`.

    Raises:
        Interrupted: the work was interrupted.
        UserError: the work raised one. For a full disk it also says how to continue.
    """
    from concept_eraser.storage.writers import is_full
    from concept_eraser.utils import distributed

    resume_command = erase_command(folder, *options, "--resume")
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
        cause, how = error.__cause__, ""
        if cause is not None and is_full(cause) and (folder / "recipe.yaml").is_file():
            how = f"\ncontinue with: {resume_command}"
        raise UserError(f"{error}{how}{_set_aside(folder)}") from None


def permissions(*, allow_pickle: bool, allow_code: bool = False) -> list[str]:
    """Return the options that permit a command what an earlier one was permitted."""
    options = {"--allow-pickle": allow_pickle, "--allow-code": allow_code}
    return [option for option, is_given in options.items() if is_given]


def _set_aside(folder: Path) -> str:
    """Say where the previous run is that an unfinished run will replace."""
    from concept_eraser.storage import output_folder

    places = output_folder.places_set_aside(folder) if folder.is_dir() else []
    return f"\nthe previous run is in {places[0]} until the new one is finished" if places else ""
