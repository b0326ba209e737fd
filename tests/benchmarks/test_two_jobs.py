"""The benchmark of two jobs at once: two real ones train at the same time."""

from __future__ import annotations

import json

import pytest

from benchmarks import two_jobs
from benchmarks.scale import ALL, EXAMPLES, TRAINING
from studies.rendering.common import fill_blocks


def test_only_steps_while_both_train_count() -> None:
    first = [0.0, 1.0, 2.0, 3.0, 5.0, 7.0, 9.0, 10.0]  # alone until 3, and after 9
    second = [2.5, 2.6, 3.0, 6.0, 9.0]
    assert two_jobs.common_seconds([first, second]) == [2.0, 3.0]
    assert two_jobs.common_seconds([first]) == [2.0]


def test_jobs_one_after_the_other_are_refused() -> None:
    with pytest.raises(SystemExit, match="did not train at the same time"):
        two_jobs.common_seconds([[0.0, 1.0, 2.0, 3.0], [3.0, 4.0, 5.0, 6.0]])


def test_two_real_jobs_train_at_the_same_time() -> None:
    words = [*TRAINING, *ALL, "training.steps=30", "training.batch_size=2", *EXAMPLES, "-q"]
    assert 0 < two_jobs.run("started together", words, {"OMP_NUM_THREADS": "1"}) < 60


def test_a_failed_job_shows_its_error() -> None:
    with pytest.raises(SystemExit, match="does not know 'nothing'"):
        two_jobs.run("second started later", ["erase", "nothing"], {"OMP_NUM_THREADS": "1"})


def test_the_page_has_the_stored_numbers() -> None:
    content = json.loads(two_jobs.FILE.read_text())
    page = two_jobs.PAGE.read_text()
    assert fill_blocks(page, {"two-jobs": lambda: two_jobs.block(content)}) == page
    assert [row["environment"] for row in content["rows"]] == list(two_jobs.ENVIRONMENTS)
    assert all(row["ratios"][case][1] > 1 for row in content["rows"] for case in two_jobs.CASES[1:])
