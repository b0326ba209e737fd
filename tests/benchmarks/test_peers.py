"""The comparison with other algorithms: their steps have the directions of our methods."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import peers
from benchmarks import vision_unlearning_worker as worker
from concept_eraser.methods.checks import flat
from concept_eraser.methods.munba import Munba
from concept_eraser.methods.uno import Uno
from concept_eraser.training.closure import of_step
from tests.small_model import small_sd


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> peers.Bench:
    folder = tmp_path_factory.mktemp("peers")
    return peers.Bench("LoRA, rank 32", 1, images=2, folder=folder, source=small_sd())


@pytest.mark.parametrize("name", [peers.PEER, peers.UNO_PEER])
def test_the_authors_algorithm_has_the_direction_of_the_method(
    name: str, bench: peers.Bench
) -> None:
    """Before the optimizer, on the same batches; the LoRA is away from its start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in bench.params:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    step: Any = peers.make(name, bench)
    step.draw(0)
    step.backward()
    actual = flat(tuple(parameter.grad for parameter in bench.params))
    draws = {objective: [draw] for objective, draw in step.drawn.items()}
    closure = of_step(bench.erasers[step.losses], tuple(bench.params), draws)
    method = Munba() if name == peers.PEER else Uno(hvp="exact", strength=peers.STRENGTH)
    expected = flat(method.direction(closure).vec)
    cosine = float(actual @ expected / actual.norm() / expected.norm())
    # the solver stops early; the gradients themselves have a cosine far below that
    assert cosine > 0.9999
    if name == peers.PEER:
        assert step.fallbacks == 0
        assert float(actual.norm()) == pytest.approx(1, abs=1e-4), "clipped"
    for parameter in bench.params:
        parameter.grad = None
    bench.reset()
    assert all(
        torch.equal(value, bench.erasers["munba"].originals[key])
        for key, value in bench.erasers["munba"].trainable().items()
    )


def test_measurements_are_written_one_by_one(
    tmp_path: Path, bench: peers.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "peers.json"
    words = "peers --parts time concept --repetitions 1 --steps 1 --judged 2 --state idle"
    command = [*words.split(), "--trained", bench.trained, "--names", peers.BASELINE, peers.OURS]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(output)])
    monkeypatch.setattr(peers, "Bench", lambda *_: bench)
    peers.main()
    content = json.loads(output.read_text())
    for row in content["rows"]:
        assert row["time"]["cpu_seconds"] > 0
        assert row["concept"]["n"] == 2
        assert 0 <= row["concept"]["rate"][0] <= 1
    assert [row["name"] for row in content["rows"]] == [peers.BASELINE, peers.OURS]
    middle, smallest, largest = content["rows"][0]["time"]["ratio"]  # fine-tuning to MUNBa
    assert 0 < smallest <= middle <= largest
    assert "ratio" not in content["rows"][1]["time"]
    lines = peers.table(content).splitlines()
    assert (
        f"| {bench.trained} | {peers.OURS} | {content['rows'][1]['time']['cpu_seconds']:.3f}"
        in (lines[3])
    )
    assert "state of the machine: idle" in lines[-1]


def test_memory_is_that_of_a_few_steps(bench: peers.Bench) -> None:
    """The authors' algorithm needs more tensors at once than fine-tuning on the same batches."""
    memory = {name: peers.memory_of(name, bench) for name in (peers.BASELINE, peers.PEER)}
    gradient = sum(parameter.numel() for parameter in bench.params) * 4 / 2**20
    extra = memory[peers.PEER]["tensors_mb"] - memory[peers.BASELINE]["tensors_mb"]
    assert extra > 2 * gradient
    bench.reset()


def test_the_worker_reads_what_the_comparison_writes(bench: peers.Bench, tmp_path: Path) -> None:
    """The step itself needs the other package. Its inputs and the answer do not."""
    expected = peers.export(bench, tmp_path)
    examples = worker.load_file(tmp_path / "examples.safetensors")
    assert {key: len(value) for key, value in examples.items()} == dict.fromkeys(
        ("forget.pixels", "forget.tokens", "retain.pixels", "retain.tokens"), 2
    )
    encoder = bench.model.pipeline.text_encoder
    plain: Any = peers.load(bench.source)
    worker.predict(tmp_path, plain.denoiser, encoder)
    actual = worker.load_file(tmp_path / "prediction.safetensors")["prediction"]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    batches: list[Any] = []
    unlearner = SimpleNamespace(_train_one_batch=lambda *batch: batches.extend(batch))
    assert worker.step(unlearner, examples, "1,0,1") >= 0
    assert torch.equal(batches[1]["input_ids"], examples["retain.tokens"][[1, 0, 1]])


def test_the_page_shows_the_measurements_as_they_are() -> None:
    page, content = peers.PAGE.read_text(), json.loads(peers.FILE.read_text())
    assert peers.render(page, content) == page
    rows = {(row["trained"], row["name"]): row for row in content["rows"]}
    assert {name for trained, name in rows if trained == "cross-attention"} >= set(peers.NAMES) - {
        peers.PACKAGE
    }
    assert all(row["time"]["n"] >= 7 for row in rows.values() if "time" in row)
