"""Numbers are compared only where they were measured by one protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from concept_eraser.cli.main import app
from concept_eraser.reporting import compare, run_results
from concept_eraser.runs.labelled_measurement import LabelledEvaluation
from concept_eraser.utils.errors import UserError


def write_evaluation(folder: Path, rate: float, **protocol: Any) -> Path:
    """Write an evaluation file that has only what is compared."""
    from concept_eraser.utils.provenance import fingerprint

    whole = {"sampling": {"steps": 8}, "seed": 1, **protocol}
    after = {"value": rate, "low": rate / 2, "high": 2 * rate, "n": 100}
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


def test_numbers_of_one_protocol_are_compared(tmp_path: Path, cli) -> None:
    one, other = write_evaluation(tmp_path / "one", 0.02), write_evaluation(tmp_path / "other", 0.3)
    result = cli("compare", str(one), str(other.parent))
    assert result.returncode == 0, result.stderr
    assert "concept_rate, direct" in result.stdout
    assert "2 [1, 4]" in result.stdout
    assert "30 [15, 60]" in result.stdout


def test_folders_of_one_name_have_distinct_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place, rate in (("a/run", 0.02), ("b/run", 0.3)):
        write_evaluation(Path(place), rate)
    result = CliRunner().invoke(app, ["compare", "a/run", "b/run/evaluation.json"])
    assert result.exit_code == 0, result.output
    assert result.output.split()[:2] == ["a/run", "b/run"]
    twice = CliRunner().invoke(app, ["compare", "a/run", "../" + tmp_path.name + "/a/run"])
    assert "is given twice" in str(twice.exception)


def test_unlike_protocols_are_refused_with_what_differs(tmp_path: Path, cli) -> None:
    one = write_evaluation(tmp_path / "one", 0.02)
    other = write_evaluation(tmp_path / "other", 0.02, sampling={"steps": 25}, judge="another")
    result = cli("compare", str(one), str(other))
    assert result.returncode == 2
    assert "differ in protocol.judge, protocol.sampling.steps" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_place_of_the_original_is_no_difference() -> None:
    """Attacks name the original by its place and by its weights."""

    def content(original: str) -> dict[str, Any]:
        return {"protocol": {"seed": 1, "original": original}, "protocol_hash": original}

    compare.require_alike({"a": content("tiny-sd (ab)"), "b": content("weights/tiny-sd (ab)")})
    with pytest.raises(UserError, match=r"differ in protocol\.original"):
        compare.require_alike({"a": content("tiny-sd (ab)"), "b": content("tiny-sd (cd)")})


def test_files_that_are_no_measurements(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no evaluation\.json or attack\.json"):
        compare.read(tmp_path)
    (tmp_path / "attack.json").write_text("[1, 2")
    with pytest.raises(UserError, match="is no JSON"):
        compare.read(tmp_path)
    (tmp_path / "attack.json").write_text("{}")
    with pytest.raises(UserError, match="names no protocol"):
        compare.read(tmp_path)


def test_an_evaluation_on_labelled_data_is_named_as_such(tmp_path: Path) -> None:
    content = LabelledEvaluation([], {}, "0a1b", "classifier", {"after": {}}, [])
    content.save(tmp_path / "evaluation.json")
    for read in (compare.read, run_results.read_evaluation):
        with pytest.raises(UserError, match=r"on labelled data.* evaluate` on its run prints"):
            read(tmp_path)


def test_attacks_are_compared_too(tmp_path: Path) -> None:
    rate = {"value": 0.5, "low": 0.25, "high": 0.75, "n": 10}
    content = {"protocol": {"attack": "p4d"}, "protocol_hash": "h", "rates": {"asr": rate}}
    assert compare.table({"a": content, "b": {**content, "rates": {"pre": rate}}}) == [
        ["asr", "50 [25, 75]", "-"],
        ["pre", "-", "50 [25, 75]"],
    ]


def test_attacks_with_and_without_a_safeguard_are_not_compared() -> None:
    rate = {"value": 0.5, "low": 0.25, "high": 0.75, "n": 10}
    content = {"protocol": {"attack": "p4d"}, "protocol_hash": "h", "rates": {"asr": rate}}
    bare, negative, strong = (
        {**content, "models": {"victim": f"runs/star{safeguard} (0123456789)"}}
        for safeguard in ("", " under negative:a star (5 points)", " under sld-max:a star")
    )
    for contents in ({"a": bare, "b": negative}, {"b": negative, "c": strong, "a": bare}):
        with pytest.raises(
            UserError, match=r"b was .* 'negative:a star \(5 points\)' and a without one"
        ):
            compare.table(contents)
    assert len(compare.table({"b": negative, "c": strong})) == 1
