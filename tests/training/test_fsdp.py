"""Frozen weights in pieces (training.shard: weights): two real processes, gloo on the CPU, give the
result of two processes with whole weights.

test_two_processes.py compares two processes with whole weights with one process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import nn

import concept_eraser
from concept_eraser import UserError
from concept_eraser.tiny import families
from concept_eraser.training.distributed import fsdp
from tests import processes
from tests.conftest import short
from tests.small_model import small_sd
from tests.training.test_two_processes import (
    LIMIT,
    count_steps,
    difference,
    kill,
    launch,
    losses,
    relative_change,
    wait_for,
    wait_for_end,
    workers,
)

LORA = {"select": "cross_attention", "lora": 2}
UNDER_ATTACK = {
    "method": {"name": "forum", "inner_steps": 2, "outer_lr": 1.0},
    "attack": {"n": 8},
    "retain__loss": "distill",
}
FREE = {"forget__images": "free", "retain__images": "free", "retain__loss": "distill"}
ESD = {"prompts": "tiny_star", "loss": "esd", "images": "free"}
BF16 = {
    "training__checkpointing": True,
    "training__offload": True,
    "training__precision": "bf16",
    "training__frozen": "bf16",
    "generation__precision": "bf16",
}

USE_FSDP = "--use_fsdp --fsdp_version 2"

# Runs recipes by name one after the other. After each step it records the bytes of the denoiser's
# pieces and of all tensors of the process.
RUNNER = """
import gc, json, os
from pathlib import Path
import torch
from torch.distributed.tensor import DTensor
from concept_eraser import erase
from concept_eraser.training.engine import Engine

step, sizes = Engine._step, {}

def alive():
    gc.collect()
    storages = [
        t.untyped_storage()
        for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor) and not isinstance(t, DTensor)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

def measure(self, number):
    row = step(self, number)
    parameters = list(self.eraser.model.denoiser.parameters())
    sizes[self.folder.name] = {
        "pieces": sum(
            p.to_local().untyped_storage().nbytes() for p in parameters if isinstance(p, DTensor)
        ),
        "alive": alive(),
        "whole": sum(p.numel() * 4 for p in parameters),
    }
    return row

Engine._step = measure
for name, recipe in json.loads(Path("recipes.json").read_text()).items():
    run = erase(recipe, output=name)
    assert not any(isinstance(p, DTensor) for p in run.model.denoiser.parameters())
    del run
Path(f"sizes_{os.environ['RANK']}.json").write_text(json.dumps(sizes))
"""


def recipe(**changes: Any) -> dict[str, Any]:
    """A short recipe with a LoRA that changes enough for a comparison, without keys
    that are None.
    """
    content = short(
        **{
            "training__steps": 3,
            "training__batch_size": 2,
            "training__lr": 1e-3,
            "trainable": LORA,
            "save": "pipeline",
            **changes,
        }
    )
    return {key: value for key, value in content.items() if value is not None}


def run_both(tmp_path: Path, menu: dict[str, dict[str, Any]]) -> list[dict[str, dict[str, int]]]:
    """Two processes run each recipe with whole and with split weights, into NAME_none and
    NAME_weights; the sizes that each of the two processes recorded."""
    recipes = {
        f"{name}_{shard}": {**one, "training": {**one["training"], "shard": shard}}
        for name, one in menu.items()
        for shard in ("none", "weights")
    }
    (tmp_path / "recipes.json").write_text(json.dumps(recipes))
    (tmp_path / "run.py").write_text(RUNNER)
    ranks = processes.Ranks(folder=tmp_path, script=tmp_path / "run.py")
    ranks.wait(400)
    assert all("FSDP2-wrapped module" not in command.stderr for command in ranks.commands)
    return [json.loads((tmp_path / f"sizes_{rank}.json").read_text()) for rank in range(2)]


def require_same(one: Path, two: Path, limit: float = LIMIT) -> None:
    assert json.loads((two / "done.json").read_text())["processes"] == 2
    assert difference(one, two) <= limit
    for mine, theirs in zip(losses(one), losses(two), strict=True):
        assert mine == pytest.approx(theirs, rel=100 * limit, abs=1e-6)


def test_split_weights_end_where_whole_ones_do(tmp_path: Path) -> None:
    """Also with a teacher and an adversary (FORUM)."""
    menu = {"munba": recipe(training__steps=2), "forum": recipe(training__steps=2, **UNDER_ATTACK)}
    for sizes in run_both(tmp_path, menu):
        for name in menu:
            split, whole = sizes[f"{name}_weights"], sizes[f"{name}_none"]
            factors = split["whole"] - whole_bytes()
            assert whole["pieces"] == 0
            assert 0.49 < split["pieces"] / whole_bytes() < 0.52, "each process holds half"
            assert 0.45 < (whole["alive"] - split["alive"]) / whole_bytes() < 0.55, (
                "and nothing else of the other half"
            )
            assert 0 < factors < 0.1 * whole_bytes()
    for name in menu:
        require_same(tmp_path / f"{name}_none", tmp_path / f"{name}_weights")
        assert relative_change(tmp_path / f"{name}_weights") > 1e-3
    state = concept_eraser.load(tmp_path / "munba_weights").denoiser.state_dict()
    before = concept_eraser.load(small_sd()).denoiser.state_dict()
    weights = load_file(tmp_path / "munba_weights" / "weights.safetensors")
    for name, value in before.items():
        assert torch.equal(state[name], weights.get(name, value)), (
            "frozen weights are written as they were"
        )
    diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "munba_weights" / "pipeline")


def whole_bytes() -> int:
    return sum(p.numel() * 4 for p in concept_eraser.load(small_sd()).denoiser.parameters())


@pytest.mark.slow
def test_other_settings(tmp_path: Path) -> None:
    """UNO's differences of gradients, sampling for another number of steps in each process (ESD,
    free), a mask, a LoRA of convolutions, a LoRA in the last blocks only, more than one
    micro-batch, negation.
    """
    menu = {
        "esd": recipe(forget=ESD, retain=None, method={"name": "weighted", "retain": 0}),
        "uno": recipe(method={"name": "uno"}),
        "masked": recipe(trainable={**LORA, "saliency": 0.5}, training__checkpointing=True),
        "conv": recipe(trainable={"select": "all", "lora": {"rank": 2, "conv": True}}),
        "late": recipe(
            trainable={"select": "re:up_blocks.*attn2", "lora": 2}, training__micro_batches=2
        ),
        "free": recipe(**FREE),
        "negated": recipe(
            forget={"prompts": "tiny_star"},
            retain=None,
            method={"name": "weighted", "retain": 0},
            trainable={**LORA, "negate": 1.0},
        ),
    }
    run_both(tmp_path, menu)
    for name in menu:
        require_same(tmp_path / f"{name}_none", tmp_path / f"{name}_weights")


@pytest.mark.slow
def test_together_with_settings_that_save_memory(tmp_path: Path) -> None:
    """Pieces of bf16, checkpoints and parts on the CPU. The order of sums differs, which changes
    digits of bf16.
    """
    processes = run_both(tmp_path, {"memory": recipe(**BF16)})
    for one in processes:
        assert one["memory_weights"]["pieces"] < 0.3 * whole_bytes(), (
            "half of half: the wide weights are bf16"
        )
    require_same(tmp_path / "memory_none", tmp_path / "memory_weights", limit=2e-3)
    before = concept_eraser.load(small_sd()).denoiser.state_dict()
    after = concept_eraser.load(tmp_path / "memory_weights").denoiser.state_dict()
    weights = load_file(tmp_path / "memory_weights" / "weights.safetensors")
    assert all(
        torch.equal(after[name], value) for name, value in before.items() if name not in weights
    ), "in fp32"


@pytest.mark.slow
def test_large_families(tmp_path: Path) -> None:
    """Stable Diffusion XL, 3.5 and Flux, tiny; plain diffusers reads the written pipelines."""
    menu = {}
    for name in ("sdxl", "sd3", "flux"):
        families.build(name, tmp_path / f"tiny-{name}")
        menu[name] = recipe(
            model=str(tmp_path / f"tiny-{name}"),
            model_options=families.options(name),
            training__checkpointing=name == "flux",
        )
    processes = run_both(tmp_path, menu)
    for name in menu:
        require_same(tmp_path / f"{name}_none", tmp_path / f"{name}_weights")
        pipe = diffusers.DiffusionPipeline.from_pretrained(
            tmp_path / f"{name}_weights" / "pipeline"
        )
        network = getattr(pipe, "unet", None) or pipe.transformer
        whole = sum(p.numel() * 4 for p in network.parameters())
        assert 0.49 < processes[0][f"{name}_weights"]["pieces"] / whole < 0.56, (
            "odd rows are filled up"
        )
        weights = load_file(tmp_path / f"{name}_weights" / "weights.safetensors")
        before = concept_eraser.load(tmp_path / f"tiny-{name}").denoiser.state_dict()
        assert all(torch.equal(network.state_dict()[key], value) for key, value in weights.items())
        assert (
            max(
                float((value - before[key]).norm() / value.norm()) for key, value in weights.items()
            )
            > 1e-3
        ), "moved"


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path) -> None:
    """SIGKILL of the whole launch with --use_fsdp and version 2: the resumed run has the weights of
    an uninterrupted run with whole weights.
    """
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(recipe(training__steps=20, training__save_every=3))
    )
    command = [
        "-m",
        "concept_eraser",
        "erase",
        "recipe.yaml",
        "training.shard=weights",
        "-o",
        "two",
        "-q",
        "--resume",
    ]
    process = launch(tmp_path, *command, how=USE_FSDP)
    wait_for(process, tmp_path / "two", 5)
    assert len(workers(process)) == 2
    kill(process)
    assert 3 <= torch.load(tmp_path / "two" / "state.ckpt", weights_only=True)["step"] < 20
    process = launch(tmp_path, *command, how=USE_FSDP)
    _, errors = wait_for_end(process)
    assert process.returncode == 0, errors[-3000:]
    wait_for_end(
        launch(tmp_path, "-m", "concept_eraser", "erase", "recipe.yaml", "-o", "one", "-q")
    )
    require_same(tmp_path / "one", tmp_path / "two")
    assert count_steps(tmp_path / "two") == 20


INTERRUPT_RUNNER = """
import json, os, signal
from pathlib import Path
import torch
from concept_eraser import erase, load
from concept_eraser.utils.errors import Interrupted
from concept_eraser.training.engine import Engine

step = Engine._step
def interrupt(self, number):
    if number == 2 and os.environ["RANK"] == "1" and not self.checkpoint.exists():
        os.kill(os.getpid(), signal.SIGINT)
    return step(self, number)
Engine._step = interrupt

recipe = json.loads(Path("recipes.json").read_text())
model = load("tiny-sd")
before = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
try:
    erase(recipe, model=model.pipeline, output="two")
    raise SystemExit("was not interrupted")
except Interrupted:
    pass
after = model.denoiser.state_dict()
assert after.keys() == before.keys()
assert all(torch.equal(after[name], before[name]) for name in before)
erase(recipe, model=model.pipeline, output="two", resume=True)
"""


@pytest.mark.slow
def test_a_model_in_memory_is_whole_after_ctrl_c_and_can_be_split_again(tmp_path: Path) -> None:
    """Ctrl-C to the second process only."""
    content = recipe(training__steps=6, training__save_every=50, training__shard="weights")
    content.pop("model")
    (tmp_path / "recipes.json").write_text(json.dumps(content))
    (tmp_path / "run.py").write_text(INTERRUPT_RUNNER)
    process = launch(tmp_path, "run.py")
    _, errors = wait_for_end(process)
    assert process.returncode == 0, errors[-3000:]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": "tiny-sd", **content}))
    wait_for_end(
        launch(
            tmp_path,
            "-m",
            "concept_eraser",
            "erase",
            "recipe.yaml",
            "training.shard=none",
            "-o",
            "one",
            "-q",
        )
    )
    require_same(tmp_path / "one", tmp_path / "two")


FAILING = """
import json, os
from pathlib import Path
from concept_eraser import erase, load
from concept_eraser.erasers.denoiser import Denoiser

original, calls = Denoiser.loss, 0
def loss(self, objective, draw):
    global calls
    calls += os.environ["RANK"] == "1"
    if calls == 3:
        raise MemoryError("the second process is out of memory")
    return original(self, objective, draw)
Denoiser.loss = loss
erase(json.loads(Path("recipes.json").read_text()), output="two")
"""


@pytest.mark.slow
def test_no_process_waits_for_the_pieces_of_a_failed_one(tmp_path: Path) -> None:
    (tmp_path / "recipes.json").write_text(
        json.dumps(recipe(**{**BF16, "training__shard": "weights"}))
    )
    (tmp_path / "run.py").write_text(FAILING)
    process = launch(tmp_path, "run.py")
    _, errors = wait_for_end(process, 100)
    assert process.returncode != 0
    assert "the second process is out of memory" in errors


def test_one_process_keeps_its_weights_whole(tmp_path: Path) -> None:
    one = concept_eraser.erase(recipe(training__shard="weights"), output=tmp_path / "split")
    two = concept_eraser.erase(recipe(), output=tmp_path / "whole")
    assert difference(one.folder, two.folder) == 0
    assert one.recipe.fingerprint == two.recipe.fingerprint


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"trainable": "cross_attention"},
            r"needs target: denoiser and a LoRA to train.*found no trainable\.lora.*"
            r"use training\.shard: optimizer",
        ),
        (
            {"target": "text_encoder", "trainable": {"select": "all", "lora": 2}},
            r"needs target: denoiser.*found target: text_encoder",
        ),
        ({"method": {"name": "uno", "hvp": "exact"}}, r"second derivative; use hvp: difference"),
        ({"watch": {"suite": "tiny_star"}}, r"watch generates images in one process"),
        (
            {"forget__loss": "resteer"},
            r"forget: the loss 'resteer' calls attention layers outside of their blocks",
        ),
        (
            {"trainable": {"select": "cross_attention", "lora": 2, "start_token": "frozen"}},
            r"start_token: frozen changes the layers",
        ),
        ({"training__shard": "gradients"}, r"training\.shard.*'none', 'optimizer' or 'weights'"),
    ],
)
def test_what_cannot_be_split_is_refused(changes: dict[str, Any], why: str) -> None:
    from concept_eraser.recipes import recipe as recipes

    with pytest.raises(UserError, match=why):
        recipes.load(recipe(**{"training__shard": "weights", **changes}))


def test_on_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"on_step is called between steps.*training\.shard: weights"
    ):
        concept_eraser.erase(
            recipe(training__shard="weights"),
            output=tmp_path / "run",
            on_step=lambda step, seconds: None,
        )


def test_an_old_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fsdp.require()
    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", lambda module, *, mesh: module)
    with pytest.raises(UserError, match=r"training\.shard: weights needs a newer torch"):
        fsdp.require()


def test_blocks_are_put_together_one_at_a_time(tmp_path: Path) -> None:
    """Inner blocks first; if a network names no blocks, the entries of its lists."""
    unet = concept_eraser.load("tiny-sd").denoiser
    kinds = [type(block).__name__ for block in fsdp.blocks(unet)]
    assert kinds.count("BasicTransformerBlock") == 4
    assert kinds.index("CrossAttnUpBlock2D") > kinds.index("BasicTransformerBlock")
    dit = concept_eraser.load(families.build("dit", tmp_path / "dit")).denoiser
    assert [type(block).__name__ for block in fsdp.blocks(dit)] == ["BasicTransformerBlock"] * 2
    assert fsdp.blocks(nn.Linear(2, 2)) == []
