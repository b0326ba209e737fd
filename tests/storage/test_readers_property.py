"""For any content of a file, its reader gives a result or a UserError: no other error, no hang, no
written file.

The strategies and the property are in campaigns/targets.py. `make fuzz` runs many more examples of
them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from concept_eraser.utils.errors import UserError
from tests.campaigns.targets import TARGETS, Defect, check_reader

EXAMPLES = {
    "selection": 60,
    "plug-in options": 300,
    "recipe": 200,
    "overrides": 200,
    "prompts yaml": 200,
    "leco yaml": 50,
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_gives_a_result_or_a_user_error(name: str) -> None:
    target = TARGETS[name]

    @settings(
        max_examples=EXAMPLES.get(name, 120),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.strategy)
    def holds(example: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            target.run(example, Path(folder))

    holds()


def test_the_property_detects_each_defect(tmp_path: Path) -> None:
    """A control: the property raises an error for each kind of defect."""

    def long() -> None:
        raise UserError("x" * 5000)

    def loud() -> None:
        raise KeyError("x")

    def busy() -> None:
        import time

        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass

    check_reader(lambda: None, tmp_path)
    with pytest.raises(Defect, match="5000 characters"):
        check_reader(long, tmp_path)
    with pytest.raises(KeyError):
        check_reader(loud, tmp_path)
    with pytest.raises(Defect, match="has changed"):
        check_reader(lambda: (tmp_path / "left").write_text("x"), tmp_path)
    with pytest.raises(Defect, match="took"):
        check_reader(busy, tmp_path, seconds=0.2)
