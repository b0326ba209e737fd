"""Whatever stands in a file, its reader gives a result or a UserError: no other error, no hang,
nothing written.

The strategies and the property are in campaigns/targets.py. `make fuzz` runs many more examples of
the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from concept_eraser.utils.errors import UserError
from tests.campaigns.targets import TARGETS, Defect, guarded

EXAMPLES = {
    "selection": 60,
    "plug-in options": 300,
    "recipe": 200,
    "overrides": 200,
    "prompts yaml": 200,
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


def test_the_property_sees_what_it_forbids(tmp_path: Path) -> None:
    """A control: each kind of defect is raised where a reader has it."""

    def long() -> None:
        raise UserError("x" * 5000)

    def loud() -> None:
        raise KeyError("x")

    def busy() -> None:
        import time

        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass

    guarded(lambda: None, tmp_path)
    with pytest.raises(Defect, match="5000 characters"):
        guarded(long, tmp_path)
    with pytest.raises(KeyError):
        guarded(loud, tmp_path)
    with pytest.raises(Defect, match="has changed"):
        guarded(lambda: (tmp_path / "left").write_text("x"), tmp_path)
    with pytest.raises(Defect, match="took"):
        guarded(busy, tmp_path, seconds=0.2)
