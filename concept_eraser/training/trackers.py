"""Log the rows of log.jsonl and the recipe to TensorBoard and Weights & Biases.

Both are used through accelerate.
"""

from __future__ import annotations

import importlib.util
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from concept_eraser.storage.output_folder import own_folder
from concept_eraser.storage.readers import read_text
from concept_eraser.storage.writers import write_text
from concept_eraser.utils.errors import UserError, first_line

FOLDER = "tracking"  # in the run folder
PROJECT = "concept-eraser"
_NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb"}  # tracker: package


def require(names: Sequence[str]) -> None:
    """Raise UserError if a tracker's package is not installed.

    accelerate would silently leave the tracker out.
    """
    for name in names:
        if importlib.util.find_spec(_NEEDS[name]) is None:
            raise UserError(
                f"training.tracker {name} needs the package {_NEEDS[name]}, which is not "
                "installed; install it with: pip install 'concept-eraser[trackers]' (or "
                "leave the tracker out: log.jsonl has the same numbers)"
            )


@dataclass(frozen=True)
class Trackers:
    """Logs the steps of one run, in the main process.

    accelerator: made with `log_with` and the run folder's FOLDER as `project_dir`. config: the
    recipe.
    """

    accelerator: Accelerator
    folder: Path
    config: Mapping[str, Any]

    def start(self, steps_done: int) -> None:
        """Begin, or continue after `steps_done` steps.

        Rows that a killed process logged after these steps are dropped. Raises UserError if a
        service cannot be reached.
        """
        if not self.accelerator.is_main_process or not self.accelerator.log_with:
            return
        own_folder(self.folder, FOLDER)
        each = {
            "tensorboard": {"purge_step": steps_done + 1 if steps_done else None},
            "wandb": {
                "id": self._id(steps_done),
                "name": self.folder.name,
                "resume": "allow",
                "dir": str(self.folder / FOLDER),
            },
        }
        try:
            self.accelerator.init_trackers(PROJECT, config=flat(self.config), init_kwargs=each)
        except Exception as error:
            # wandb's own errors cannot be imported without it
            raise UserError(
                f"a tracker could not be started ({first_line(error)}); for wandb "
                "without network or login set WANDB_MODE=offline, or leave "
                "training.tracker out"
            ) from error

    def _id(self, steps_done: int) -> str:
        """Return the run's name for a service.

        It is new for a new run, and the same for a resumed one.
        """
        path = self.folder / FOLDER / "id"
        if not steps_done or not path.exists():
            write_text(path, secrets.token_hex(6) + "\n", overwrite=True)
        return read_text(path).strip()

    def log(self, row: Mapping[str, Any]) -> None:
        """Log the numbers of one step by dotted name.

        {"losses": {"forget": ...}} becomes losses/forget.
        """
        if self.accelerator.log_with:
            numbers = {
                k: v
                for k, v in flat(row, "/").items()
                if isinstance(v, int | float) and math.isfinite(v)
            }
            self.accelerator.log(
                {k: v for k, v in numbers.items() if k != "step"}, step=int(row["step"])
            )

    def finish(self) -> None:
        """Write the rows that are still in memory.

        `Accelerator.end_training` would also end the process group.
        """
        if self.accelerator.is_main_process:
            for tracker in getattr(self.accelerator, "trackers", []):
                with suppress(OSError):
                    tracker.finish()


def flat(content: Mapping[str, Any], between: str = ".") -> dict[str, Any]:
    """Return a nested mapping as one level of plain values; lists and others as text."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            values |= {f"{key}{between}{inner}": v for inner, v in flat(value, between).items()}
        else:
            values[str(key)] = value if isinstance(value, bool | int | float | str) else str(value)
    return values
