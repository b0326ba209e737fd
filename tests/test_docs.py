"""The code in the documentation runs as it is written, one page after the other in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```python\n(.*?)```", re.S)


def test_the_page_on_targets_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((DOCS / "targets.md").read_text())
    assert len(blocks) == 5
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)
    done = sorted(path.parent.name for path in tmp_path.glob("runs/*/done.json"))
    assert done == ["classifier", "clip", "denoiser", "text_encoder", "vae"]
