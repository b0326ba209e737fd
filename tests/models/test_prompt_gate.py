"""SPM's gate against loops by hand, and its limits: the original's images and the run's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import concept_eraser
from concept_eraser import UserError, api
from concept_eraser.cli.main import app
from concept_eraser.evaluation.attacks.fine_tuning import ADAPTED
from concept_eraser.models import lora_files, prompt_gate
from concept_eraser.models.loading import load
from concept_eraser.models.lora import Adapter
from concept_eraser.models.safeguards import GATE_KINDS, Guard, safeguard_in
from concept_eraser.utils import path_redaction
from tests.conftest import short
from tests.small_model import small_sd

STARS = ["a red star", "a drawing of a star"]
FAR = ["the blue house", "green moons"]
SAMPLING: dict[str, Any] = {"seeds": [1, 2], "steps": 3, "guidance": 5.0}


def erase(folder: Path, **changes: Any) -> concept_eraser.Run:
    """A run with a LoRA on linear layers and convolutions, with time embeddings among them."""
    lora = {"select": "all", "lora": {"rank": 2, "alpha": 4, "conv": True}}
    changes = {"trainable": lora, "training__steps": 2, "training__lr": 0.05, **changes}
    return concept_eraser.erase(short(**changes), output=folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return erase(tmp_path_factory.mktemp("run") / "run").folder


def small(spec: str = "", *, model: str | None = None) -> Any:
    """The small model, under a safeguard if one is named."""
    return api.load(model or small_sd(), guard=spec or None)


# --- the score -----------------------------------------------------------------------------------


def by_hand(states: Any, concepts: Any, prompts: list[set[int]], erased: list[set[int]]) -> Any:
    """The larger of the two for each prompt and text, then the largest over the texts."""
    result = []
    for s, own in zip(states, prompts, strict=True):
        scores = []
        for c, text in zip(concepts, erased, strict=True):
            a, b = s.ravel(), c.ravel()
            cosine = a @ b / np.sqrt((a @ a) * (b @ b))
            scores.append(max(cosine, len([t for t in text if t in own]) / len(text)))
        result.append(max(scores))
    return result


def test_the_two_scores_are_those_of_a_loop_in_numpy() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4, 5, 6, generator=generator, dtype=torch.float64)
    concepts = torch.cat([states[:1] + 0.1, torch.randn(1, 5, 6, generator=generator)]).double()
    prompts, erased = [{1, 2}, {3}, set[int](), {2, 3, 4}], [{2, 9}, {3, 4, 5}]
    result = torch.maximum(
        prompt_gate.similarity(states, concepts), prompt_gate.token_share(prompts, erased).double()
    )
    expected = by_hand(states.numpy(), concepts.numpy(), prompts, erased)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-6)
    assert prompt_gate.token_share(prompts, erased).tolist() == pytest.approx(
        [1 / 2, 1 / 3, 0, 2 / 3]
    )


def test_padding_counts_for_the_cosine_and_not_for_the_tokens(tiny: Any) -> None:
    texts, prompts = ["a star", "five points"], ["a red star", "five stars", "a", ""]
    states = tiny.encode([*prompts, *texts]).tensors["states"].double().numpy()
    words = tiny.words
    tokens = [set(words.ids(text)) for text in (*prompts, *texts)]
    expected = by_hand(states[:4], states[4:], tokens[:4], tokens[4:])
    both = prompt_gate.scores(tiny, texts, prompts, clip=True, tokens=True)
    np.testing.assert_allclose(both.numpy(), expected, atol=1e-5)
    shares = prompt_gate.scores(tiny, texts, prompts, clip=False, tokens=True)
    assert shares.tolist() == [1.0, 0.5, 0.5, 0.0]
    cosines = prompt_gate.scores(tiny, texts, prompts, clip=True, tokens=False)
    assert (cosines < 1).all()
    assert float(cosines[3]) > 0.5, "start and padding alone are most of the states"


# --- images --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"guidance": 1.0}, {"autocast": torch.bfloat16}], ids=["cfg", "plain", "bf16"]
)
def test_the_limits_are_the_original_and_the_run_bit_for_bit(
    run: Path, changes: dict[str, Any]
) -> None:
    sampling = {**SAMPLING, **changes}
    original, erased, gate = small(), load(run), small(f"spm-gate-tokens:star@{run}")
    for prompts, model, other in ((FAR, original, erased), (STARS, erased, original)):
        images = gate.sample(prompts, **sampling)
        assert torch.equal(images, model.sample(prompts, **sampling))
        assert not torch.equal(images, other.sample(prompts, **sampling))
    gate.guard = None
    assert torch.equal(gate.sample(STARS, **sampling), original.sample(STARS, **sampling))


def apart(one: Tensor, other: Tensor) -> int:
    return int((one.int() - other.int()).abs().max())


def test_between_them_the_lora_has_the_square_of_the_score(run: Path) -> None:
    """Both matrices are multiplied by the score, as in the authors' code. Each prompt of a batch
    has its own.
    """
    prompts = ["a red star", "a house", "the house"]  # shares 1, 1/2 and 0 of "a star"
    sampling = {**SAMPLING, "seeds": [1, 2, 3]}
    images = small(f"spm-gate-tokens:a star@{run}").sample(prompts, **sampling)
    factors = prompt_gate.factors_of(small(), f"a star@{run}")
    for row, score in enumerate((1.0, 0.5, 0.0)):
        model = small()
        with torch.no_grad():
            for name, (down, up) in factors.layers.items():
                weight = model.denoiser.get_parameter(f"{name}.weight")
                flat = (score * up).flatten(1) @ (score * down).flatten(1)
                weight += flat.view(weight.shape) * factors.alpha / factors.rank
        expected = model.sample([prompts[row]], **{**sampling, "seeds": [row + 1]})
        assert apart(images[row : row + 1], expected) <= 1
    alone = small(f"spm-gate-tokens:a star@{run}").sample(["a house"], **{**sampling, "seeds": [2]})
    assert apart(images[1:2], alone) <= 1
    for other in (small(), load(run)):
        assert apart(other.sample(["a house"], **{**sampling, "seeds": [2]}), alone) > 10


def test_the_cosine_opens_the_gate_for_prompts_without_a_token_of_the_concept(run: Path) -> None:
    original = small().sample(FAR, **SAMPLING)
    for kind in ("spm-gate", "spm-gate-clip"):
        assert apart(small(f"{kind}:star@{run}").sample(FAR, **SAMPLING), original) > 1
    assert (
        apart(
            small(f"spm-gate:star@{run}").sample(STARS, **SAMPLING),
            load(run).sample(STARS, **SAMPLING),
        )
        == 0
    )


@pytest.mark.parametrize("kind", GATE_KINDS)
def test_weights_and_layers_stay_as_they_were(run: Path, kind: str) -> None:
    model = small(f"{kind}:star@{run}")
    before = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
    model.sample(STARS, **SAMPLING)
    with pytest.raises(UserError, match="sample from texts"):
        model.sample(model.encode(STARS), **SAMPLING)
    assert all(torch.equal(v, before[k]) for k, v in model.denoiser.state_dict().items())
    assert not any(layer._forward_hooks for layer in model.denoiser.modules())


def test_the_cache_does_not_take_one_lora_for_another(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(run, place)
    spec = f"spm-gate:star@{place}"
    first = small(spec).drawing()
    assert first == small(spec).drawing()
    shutil.rmtree(place)
    erase(place, training__seed=1)
    assert small(spec).drawing() != first
    assert small(f"spm-gate-tokens:star@{place}").drawing() != small(spec).drawing()


def with_adapter(model: Any) -> Any:
    """The model with another LoRA on its attention, as an attack by relearning trains one."""
    attention = [name for name, _ in model.denoiser.named_modules() if name.endswith(ADAPTED)]
    adapter = Adapter(model.denoiser, attention, rank=2, alpha=2, seed=0)
    for name in adapter.tensors:
        model.denoiser.get_parameter(name).data.add_(0.3)
    return model


@pytest.mark.parametrize(("text", "prompts"), [("star", STARS), ("a star", ["a house", "a red"])])
def test_a_lora_in_training_changes_the_images_under_the_gate(
    run: Path, text: str, prompts: list[str]
) -> None:
    """Otherwise an attack that fine-tunes the model would have no effect on them."""
    spec = f"spm-gate-tokens:{text}@{run}"
    images = with_adapter(small(spec)).sample(prompts, **SAMPLING)
    assert apart(images, small(spec).sample(prompts, **SAMPLING)) > 10
    if prompts == STARS:  # a strength of 1
        assert torch.equal(images, with_adapter(load(run)).sample(prompts, **SAMPLING))


# --- which LoRA ----------------------------------------------------------------------------------


def test_a_lora_file_is_put_on_any_model_that_it_fits(run: Path, tmp_path: Path) -> None:
    folder = run / lora_files.FOLDER
    expected = load(run).sample(STARS, **SAMPLING)
    for place in (folder, folder / lora_files.FILE):
        assert torch.equal(small(f"spm-gate:star@{place}").sample(STARS, **SAMPLING), expected)
    other = small()
    with torch.no_grad():
        other.denoiser.get_parameter("conv_in.weight").add_(0.1)
    other.protect(Guard.read(f"spm-gate:star@{folder}"))
    with pytest.raises(UserError, match=r"has other weights in denoiser.* on this one: "):
        other.protect(Guard.read(f"spm-gate:star@{run}"))


def test_the_run_itself_is_refused_as_the_model(run: Path) -> None:
    """It has the LoRA already, and would have it twice."""
    with pytest.raises(UserError, match="the one without the erasure"):
        small(f"spm-gate:star@{run}", model=str(run))


@pytest.mark.parametrize("header", ["{", "[1]", '{"unet.lora_alpha": "x"}'])
def test_a_lora_with_a_damaged_header_is_an_error(run: Path, tmp_path: Path, header: str) -> None:
    tensors = load_file(run / lora_files.FOLDER / lora_files.FILE)
    file = tmp_path / "lora.safetensors"
    save_file(tensors, file, metadata={"lora_adapter_metadata": header})
    with pytest.raises(UserError, match=r"header of .*lora.safetensors is damaged: "):
        prompt_gate.factors_of(small(), f"star@{file}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("star", "write CONCEPT@RUN"),
        ("@runs/star", "write CONCEPT@RUN"),
        (" , @runs/star", "write CONCEPT@RUN"),
        ("star@", "write CONCEPT@RUN"),
        ("star@nowhere", "there is no run or LoRA 'nowhere'; check the path"),
        ("star@" + "x" * 5000, "file name too long; check the name"),
        ("star@tests", "holds no LoRA"),
        ("star@README.md", "README.md"),
        ("<|endoftext|>@nowhere", "has no tokens"),
    ],
)
def test_a_gate_that_cannot_be_read_is_an_error(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    for kind in GATE_KINDS:
        with pytest.raises(UserError, match=message):
            small(f"{kind}:{text}")


def test_runs_with_more_or_another_part_than_a_lora_of_the_denoiser_are_refused(
    run: Path, tmp_path: Path
) -> None:
    changed = erase(tmp_path / "changed", save="changed").folder
    with pytest.raises(UserError, match="holds more than its LoRA"):
        small(f"spm-gate:star@{changed}")
    small(f"spm-gate:star@{changed / 'lora'}")
    text = erase(
        tmp_path / "text",
        target="text_encoder",
        trainable={"select": "all", "lora": 2},
    ).folder
    with pytest.raises(UserError, match=r"LoRA of the denoiser alone.* has one of text_encoder"):
        small(f"spm-gate:star@{text}")
    with pytest.raises(UserError, match="has other weights in denoiser"):
        api.load("tiny-sd", guard=f"spm-gate:star@{run}")
    with pytest.raises(UserError, match=r"does not fit tiny-sd: it has matrices of "):
        api.load("tiny-sd", guard=f"spm-gate:star@{run / 'lora'}")


# --- the commands --------------------------------------------------------------------------------


def test_the_commands_sample_under_the_gate(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "star")
    spec = "spm-gate:star@star"
    command = ["generate", small_sd(), "-p", "a red star", "--steps", "2", "--guard", spec, "-q"]
    result = CliRunner().invoke(app, [*command, "-o", "images"])
    assert result.exit_code == 0, result.output
    row = Path("images/metadata.jsonl").read_text().splitlines()[0]
    assert json.loads(row)["guard"] == spec
    suite = {
        "concept": {"shape": "star"},
        "judge": "tiny",
        "sampling": {"steps": 2},
        "groups": {"direct": {"prompts": "tiny_star", "role": "forget", "n": 2}},
        "metrics": ["concept_rate"],
    }
    evaluation = api.evaluate(small_sd(), suite, before=small_sd(), guard=spec)
    name = evaluation.models["after"]
    assert safeguard_in(name) == spec
    assert not torch.equal(
        evaluation.groups["direct"].images["before"], evaluation.groups["direct"].images["after"]
    )
    absolute = f"tiny-sd under spm-gate:star@{tmp_path / 'star'} (0123456789)"
    assert path_redaction.shorten(absolute) == f"tiny-sd under {spec} (0123456789)"
