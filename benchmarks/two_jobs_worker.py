"""Run a command of the package, and write when each training step begins.

    python -m benchmarks.two_jobs_worker FILE erase RECIPE -o RUN

`benchmarks.two_jobs` starts it. FILE gets one line for each step, by a clock that all processes of
the machine share.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any
from unittest import mock

# as cli/main.py does, which is too late here: torch reads it when it is loaded
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from concept_eraser.cli.main import main as run_command
from concept_eraser.training.engine import Engine


def main() -> None:
    file, *words = sys.argv[1:]
    sys.argv = ["concept-eraser", *words]
    step = Engine.do_step

    def timed(engine: Engine, *args: Any, **options: Any) -> Any:
        with open(file, "a") as output:
            output.write(f"{time.monotonic()}\n")
        return step(engine, *args, **options)

    with mock.patch.object(Engine, "do_step", timed):
        run_command()


if __name__ == "__main__":
    main()
