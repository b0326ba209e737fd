"""`concept-eraser demo` whose jobs are forked by the tests' server of processes."""

from __future__ import annotations

import os

from concept_eraser.cli.main import main
from concept_eraser.demo import jobs
from tests import processes

if __name__ == "__main__":
    processes.use_server(os.environ["TEST_PROCESSES"])
    jobs._start_worker = processes.DemoWorker
    main()
