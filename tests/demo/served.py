"""`concept-eraser demo` whose jobs are forked by the tests' server of processes.

From Python 3.14 on that server has a key, and the jobs are started as the page does.
"""

from __future__ import annotations

import os
import sys

from concept_eraser.cli.main import main
from concept_eraser.demo import jobs
from tests import processes

if __name__ == "__main__":
    if sys.version_info < (3, 14):
        processes.use_server(os.environ["TEST_PROCESSES"])
        jobs._start_worker = processes.DemoWorker
    main()
