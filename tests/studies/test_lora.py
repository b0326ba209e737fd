"""The study of LoRAs at strengths, in smaller files, and several at once."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from concept_eraser.concepts import bundled
from concept_eraser.models.lora import Factors
from studies import lora, render_results, style_lora
from studies.rendering import lora as rendering
from studies.result_tables import Results

ROOT = Path(__file__).parent.parent.parent
STUDY = yaml.safe_load((ROOT / "studies" / "configs" / "lora.yaml").read_text())
LAYER = "mid_block.attentions.0.transformer_blocks.0.attn2.to_v"
SHORT = {
    "images": 2,
    "sampling": {"steps": 1, "guidance": 5.0, "batch_size": 64},
    "style": {"value": "dotted", "rank": 2, "steps": 1, "images": 2},
    "set": {"training.steps": 1, "forget.n": 2, "retain.n": 2, "generation.steps": 1},
}


def factors(model: Any, seed: int) -> Factors:
    out, width = model.denoiser.get_parameter(f"{LAYER}.weight").shape
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(4, width, generator=generator)
    up = torch.randn(out, 4, generator=generator)
    return Factors("denoiser", {LAYER: (down * 0.01, up)}, 4, 4.0)


def bench(work: Path, **changes: Any) -> lora.Bench:
    return lora.Bench({**STUDY, **SHORT, **changes}, work, Results("lora"))


def test_changes_add_up_and_leave_no_trace(shared_tiny: Any) -> None:
    model = copy.deepcopy(shared_tiny)
    one, two = factors(model, 1), factors(model, 2)
    original = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
    weight = model.denoiser.get_parameter(f"{LAYER}.weight")
    lora.set_change(model, original, [(one, -0.5), (two, 1.5)])
    expected = original[f"{LAYER}.weight"] - 0.5 * one.change(LAYER) + 1.5 * two.change(LAYER)
    torch.testing.assert_close(weight.detach(), expected)
    lora.set_change(model, original, [(one, 0.0)])
    assert torch.equal(weight, original[f"{LAYER}.weight"])


def test_the_rows_of_the_configuration() -> None:
    rows = {row.name: row for row in lora.rows_of(STUDY)}
    assert len(rows) == len(list(lora.rows_of(STUDY))), "each name once"
    assert rows["original"].loras == {}
    assert rows["star_strength_-0.5"].loras == {"star": -0.5}
    assert rows["star_rank_8"].export == {"rank": 8}
    assert len(rows["star_without_out"].export["block_weights"]) == 26
    together = rows["star_moon_blue_style_strength_0.5"].loras
    assert together == {"star": 0.5, "moon": 0.5, "blue": 0.5, "style": 1.0}, "a look stays whole"


def test_no_other_group_states_an_erased_concept(tmp_path: Path) -> None:
    groups = bench(tmp_path, images=48).groups()
    assert {len(rows) for rows in groups.values()} == {48}
    erased = set(STUDY["concepts"])
    for concept in erased:
        assert all(erased & set(row.fields.values()) == {concept} for row in groups[concept])
    for name in (lora.RETAINED, lora.PLAIN):
        assert not any(erased & set(row.fields.values()) for row in groups[name])
    counts = Counter(row.fields["shape"] for row in groups[lora.RETAINED])
    assert set(counts.values()) == {6}, "each of the eight other shapes is stated as often"
    assert not any("style" in row.fields for row in groups[lora.PLAIN])


def test_a_row_is_measured_once_and_rendered(
    no_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are those of `export`: of a lower rank, in fp8, with block weights."""
    del no_results
    here = bench(tmp_path)
    rows = {row.name: row for row in lora.rows_of(here.study)}
    names = ["original", "star_strength_1", "star_rank_2", "star_fp8", "star_without_out", "style"]
    for name in names:
        here.measure(rows[name], 0)
    results = Results("lora")
    assert set(results) == {f"{name}_seed0" for name in names}
    whole, small, rounded, blocks = (
        results[f"{name}_seed0"]["files"]["star"] for name in names[1:5]
    )
    assert (whole["rank"], whole["error"], whole["rounding"]) == (64, 0.0, 0.0)
    assert small["rank"] == 2
    assert small["error"] > 0.05
    assert 0.01 < rounded["rounding"] < 0.1
    assert (
        max(small["file_bytes"], blocks["file_bytes"], rounded["file_bytes"]) < whole["file_bytes"]
    )
    labels = results["star_strength_1_seed0"]["predicted"]
    assert set(labels) == {*STUDY["concepts"], "retained", "plain"}
    assert all(len(one[name]) == 2 for one in labels.values() for name in bundled.VALUES)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(lora, "predict", refuse)
    here.measure(rows["star_rank_2"], 0)
    page = next(text for path, text in render_results.pages().items() if path.name == "lora.md")
    assert "| rank 2 |" in page
    assert "| style |" in page
    with pytest.raises(AssertionError, match="measured again"):
        bench(tmp_path, image_seed=1).measure(rows["star_rank_2"], 0)
    other = {**SHORT["set"], "training.lr": 9e-9}
    with pytest.raises(AssertionError, match="measured again"):
        bench(tmp_path, set=other).measure(rows["star_rank_2"], 0)
    bench(tmp_path, set=other).measure(rows["original"], 0)  # it has no LoRA


def test_files_and_the_control_are_attacked_once(
    no_results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del no_results
    plan = {**STUDY["attacked"], "n": 2, "rows": ["star_rank_2"], "attacks": {"seed_search": {}}}
    plan["attacks"]["seed_search"] = {"tries": 1}
    here = bench(tmp_path, attacked=plan)
    rows = {row.name: row for row in lora.rows_of(here.study)}
    for _ in range(2):
        here.attack_control()
        here.attack(rows["star_rank_2"], 0)
        here.attack(rows["star_rank_4"], 0)
        # the second time reads the results
        monkeypatch.setattr(lora.runner, "run", lambda *_, **__: pytest.fail("attacked again"))
    with pytest.raises(pytest.fail.Exception, match="attacked again"):
        bench(tmp_path, attacked=plan, set={**SHORT["set"], "training.lr": 9e-9}).attack(
            rows["star_rank_2"], 0
        )
    other = {**plan, "control": "tiny-sd-without-heart"}
    with pytest.raises(pytest.fail.Exception, match="attacked again"):
        bench(tmp_path, attacked=other).attack_control()
    results = Results("lora").folder("attacks")
    assert set(results) == {"never_learned_seed_search_seed0", "star_rank_2_seed_search_seed0"}
    table = rendering.attacked({"attacked": plan}, results)
    assert table.splitlines()[0] == "| file | seed_search % |"
    assert "| a model that never learned the concept | " in table
    assert "| star rank 2 | " in table


def result(labels: Mapping[str, list[str]], name: str = "x", seed: int = 0) -> dict[str, Any]:
    return {"row": name, "seed": seed, "predicted": {"star": dict(labels)}}


def test_a_result_that_states_no_recipe_is_of_the_default(tmp_path: Path) -> None:
    """The results of older versions are."""
    assert bench(tmp_path, set={}).has_recipes({}, {"star": "a"})
    assert not bench(tmp_path).has_recipes({}, {"star": "a"})


def test_the_images_of_another_style_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def write_images(folder: Path, style: str, n: int) -> None:
        drawn.append((style, n))
        folder.mkdir(parents=True)
        (folder / "metadata.jsonl").write_text("")

    monkeypatch.setattr(style_lora, "write_images", write_images)
    monkeypatch.setattr(lora.api, "erase", lambda *_, **__: None)
    for value in ("dotted", "dotted", "striped"):
        bench(tmp_path, style={**SHORT["style"], "value": value}).train(lora.STYLE, 0)
    assert drawn == [("dotted", 2), ("striped", 2)]


def test_rates_pool_the_seeds() -> None:
    """Two seeds with one and two stars of two images are three of four."""
    runs = [result({"shape": ["star", "moon"]}), result({"shape": ["star", "star"]}, seed=1)]
    rate = rendering.concept_rate(runs, "star")
    assert rate is not None
    assert (rate.value, rate.n) == (0.75, 4)


def test_a_style_lora_is_trained_on_captions_without_the_style(tmp_path: Path) -> None:
    run = tmp_path / "striped"
    style_lora.main([str(run), "--style", "striped", "--rank", "2", "--steps", "1", "-n", "2"])
    rows = (tmp_path / "striped_images" / "metadata.jsonl").read_text().splitlines()
    captions = [json.loads(row)["text"] for row in rows]
    assert len(captions) == 2
    assert all(caption.startswith(("a ", "an ")) for caption in captions)
    assert not any("striped" in caption for caption in captions)
    step = json.loads((run / "log.jsonl").read_text().splitlines()[0])
    assert step["weights"] == {"forget": 0.0, "retain": 1.0}


def test_an_unknown_row_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(ROOT / "studies" / "configs" / "lora.yaml")
    with pytest.raises(SystemExit):
        lora.main([path, "--rows", "sun", "--work", str(tmp_path)])
    assert "there is no 'sun'" in capsys.readouterr().err
