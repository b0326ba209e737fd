"""Names of others, such as folders, groups and concepts, are printed as they are."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from concept_eraser.cli.main import app
from concept_eraser.cli.progress_bars import bars
from tests.reporting.test_compare import write_evaluation

NAMES = ("x[/b]", "[red]x", "a :star: b")


class Terminal(io.StringIO):
    """A text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_progress_line_has_the_name(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    output = stream()
    monkeypatch.setattr(sys, "stderr", output)
    with bars() as progress:
        for name in NAMES:
            progress(f"looking at {name}", 1, 1, f"note {name}")
    for name in NAMES:
        assert f"looking at {name}" in output.getvalue()
        assert f"note {name}" in output.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_table_has_the_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one, other = (write_evaluation(tmp_path / folder, 0.02) for folder in ("one", "two"))
    for path in (one, other):
        content = json.loads(path.read_text())
        content["results"][0]["group"] = name
        path.write_text(json.dumps(content))
    result = CliRunner().invoke(app, ["compare", str(one), str(other)])
    assert result.exit_code == 0, result.output
    assert f"concept_rate, {name}" in result.output
