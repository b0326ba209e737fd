"""Numbers are put side by side only where they were measured alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from concept_eraser.reporting import compare
from concept_eraser.utils.errors import UserError


def measured(folder: Path, share: float, **protocol: Any) -> Path:
    """An evaluation as evaluate writes it, cut to what is compared."""
    from concept_eraser.utils.provenance import fingerprint

    whole = {"sampling": {"steps": 8}, "seed": 1, **protocol}
    after = {"value": share, "low": share / 2, "high": 2 * share, "n": 100}
    folder.mkdir(parents=True)
    path = folder / "evaluation.json"
    path.write_text(
        json.dumps(
            {
                "protocol": whole,
                "protocol_hash": fingerprint(whole),
                "judge": "j",
                "prompt_hashes": {"direct": "p"},
                "results": [{"metric": "concept_rate", "group": "direct", "after": after}],
            }
        )
    )
    return path


def test_alike_numbers_stand_side_by_side(tmp_path: Path, cli) -> None:
    one, other = measured(tmp_path / "one", 0.02), measured(tmp_path / "other", 0.3)
    shown = cli("compare", str(one), str(other.parent))
    assert shown.returncode == 0, shown.stderr
    assert "concept_rate, direct" in shown.stdout
    assert "2 [1, 4]" in shown.stdout
    assert "30 [15, 60]" in shown.stdout


def test_unlike_protocols_are_refused_with_what_differs(tmp_path: Path, cli) -> None:
    one = measured(tmp_path / "one", 0.02)
    other = measured(tmp_path / "other", 0.02, sampling={"steps": 25}, judge="another")
    refused = cli("compare", str(one), str(other))
    assert refused.returncode == 2
    assert "differ in protocol.judge, protocol.sampling.steps" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_files_that_are_no_measurements(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no evaluation\.json or attack\.json"):
        compare.read(tmp_path)
    (tmp_path / "attack.json").write_text("[1, 2")
    with pytest.raises(UserError, match="is no JSON"):
        compare.read(tmp_path)
    (tmp_path / "attack.json").write_text("{}")
    with pytest.raises(UserError, match="names no protocol"):
        compare.read(tmp_path)


def test_attacks_are_compared_too(tmp_path: Path) -> None:
    rate = {"value": 0.5, "low": 0.25, "high": 0.75, "n": 10}
    content = {"protocol": {"attack": "p4d"}, "protocol_hash": "h", "rates": {"asr": rate}}
    assert compare.table({"a": content, "b": {**content, "rates": {"pre": rate}}}) == [
        ["asr", "50 [25, 75]", "-"],
        ["pre", "-", "50 [25, 75]"],
    ]
