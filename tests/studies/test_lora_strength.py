"""The study of LoRAs at strengths, at lower ranks, and several at once."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from concept_eraser.concepts.plan import make_plan
from concept_eraser.models import lora_files
from concept_eraser.models.lora import Factors
from studies import lora_strength, style_lora

LAYER = "mid_block.attentions.0.transformer_blocks.0.attn2.to_v"


def factors(model: Any, seed: int) -> Factors:
    out, width = model.denoiser.get_parameter(f"{LAYER}.weight").shape
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(4, width, generator=generator)
    up = torch.randn(out, 4, generator=generator)
    return Factors("denoiser", {LAYER: (down * 0.01, up)}, 4, 4.0)


def test_changes_add_up_and_leave_no_trace(shared_tiny: Any) -> None:
    model = copy.deepcopy(shared_tiny)
    one, two = factors(model, 1), factors(model, 2)
    original = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
    weight = model.denoiser.get_parameter(f"{LAYER}.weight")
    lora_strength.set_change(model, original, [(one, -0.5), (two, 1.5)])
    expected = original[f"{LAYER}.weight"] - 0.5 * one.change(LAYER) + 1.5 * two.change(LAYER)
    torch.testing.assert_close(weight.detach(), expected)
    lora_strength.set_change(model, original, [(one, 0.0)])
    assert torch.equal(weight, original[f"{LAYER}.weight"])


def test_rows(shared_tiny: Any) -> None:
    loras = [factors(shared_tiny, seed) for seed in (1, 2)]
    rows = dict(lora_strength.changes(loras, [0.0, 1.5], [2]))
    names = list(rows)
    assert names[:2] == ["first, strength 0", "first, strength 1.5"]
    assert names[2].startswith("first, rank 2 (error 0.")
    assert names[3:] == ["first 2, strength 0.5", "first 2, strength 1", "number 2, strength 1"]
    ((reduced, strength),) = rows[names[2]]
    assert (reduced.rank, strength) == (2, 1.0)
    assert [strength for _, strength in rows["first 2, strength 0.5"]] == [0.5, 0.5]


def test_the_printed_table(
    shared_tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (suite,) = make_plan(["star"]).suites.values()
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(dict(suite)))
    lora = factors(shared_tiny, 1)
    lora_files.save(shared_tiny, [lora], tmp_path / lora_files.FOLDER / lora_files.FILE)
    lora_strength.main([str(tmp_path), "--strengths", "0", "--ranks", "", "-n", "2"])
    head, _, row = capsys.readouterr().out.strip().splitlines()
    assert head == f"| model | concept rate, {tmp_path.name} (%) | retain accuracy (%) |"
    assert row == "| first, strength 0 | 100.0 [34.2, 100.0] | 100.0 [34.2, 100.0] |"


def test_a_style_lora_is_trained_on_captions_without_the_style(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "striped"
    style_lora.main([str(run), "--style", "striped", "--rank", "2", "--steps", "1", "-n", "2"])
    rows = (tmp_path / "striped_images" / "metadata.jsonl").read_text().splitlines()
    captions = [json.loads(row)["text"] for row in rows]
    assert len(captions) == 2
    assert all(caption.startswith(("a ", "an ")) for caption in captions)
    assert not any("striped" in caption for caption in captions)
    step = json.loads((run / "log.jsonl").read_text().splitlines()[0])
    assert step["weights"] == {"forget": 0.0, "retain": 1.0}
    capsys.readouterr()
    lora_strength.main([str(run), "--strengths", "1", "--ranks", "", "-n", "2"])
    assert "| first, strength 1 | " in capsys.readouterr().out
