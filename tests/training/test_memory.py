"""Settings that save memory change no result, and the memory estimate agrees with the measured
memory.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import concept_eraser
from concept_eraser import UserError
from concept_eraser.methods.munba import Munba
from concept_eraser.methods.surgery import Surgery
from concept_eraser.methods.weighted import Weighted
from concept_eraser.models.base import Condition
from concept_eraser.models.loading import load
from concept_eraser.recipes import memory_presets, recipe
from concept_eraser.runs import memory_estimate
from concept_eraser.tiny import families, published
from concept_eraser.training import memory
from concept_eraser.training.closure import LossClosure
from concept_eraser.training.engine import optimizer_class
from concept_eraser.training.memory import Peak, Trained
from concept_eraser.training.placement import Placement, narrowable
from tests.conftest import short

SAVING = {
    "training__checkpointing": True,
    "training__offload": True,
    "training__frozen": "bf16",
    "training__precision": "bf16",
    "generation__precision": "bf16",
}


@pytest.fixture(scope="module")
def get_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    root = tmp_path_factory.mktemp("families")

    def of(name: str) -> Any:
        model = load("tiny-sd" if name == "sd" else str(families.build(name, root / name)))
        model.configure(families.options(name))
        return model

    return of


def loss_of_denoiser(model: Any, name: str) -> Callable[[], torch.Tensor]:
    """A loss of the denoiser's weights."""
    generator = torch.Generator().manual_seed(0)
    condition = model.encode(["goldie", "281"] if name == "dit" else ["a red star", "a house"])
    condition = Condition({k: v.detach() for k, v in condition.tensors.items()})
    noisy, t = torch.randn(2, *model.latent_shape(), generator=generator), torch.tensor([3, 700])
    return lambda: model.denoise(noisy, t, condition).square().mean()


@pytest.mark.parametrize(
    "name", ["sd", "sdxl", "sd3", "flux", "dit", "pixart", "sana", "zimage", "qwenimage", "flux2"]
)
def test_checkpointing_gives_the_same_gradients_and_holds_less(name: str, get_model: Any) -> None:
    model = get_model(name)
    params = tuple(model.denoiser.requires_grad_(True).parameters())
    loss, gradients, sizes = loss_of_denoiser(model, name), [], []
    for on in (False, True):
        model.checkpoint(on)
        with Peak() as peak:
            value = loss()
        sizes.append(peak.now)
        gradients.append(
            torch.autograd.grad(value, params, allow_unused=True, materialize_grads=True)
        )
    assert any(g.any() for g in gradients[0])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*gradients, strict=True))
    assert sizes[1] < 0.8 * sizes[0]


def test_second_derivatives_pass_through_checkpointing(tiny: Any) -> None:
    names = [n for n, p in tiny.denoiser.named_parameters() if ".attn2.to_k" in n]
    params = tuple(tiny.denoiser.get_parameter(n).requires_grad_(True) for n in names)
    closure = LossClosure(params, {"forget": [loss_of_denoiser(tiny, "sd")]})
    v = tuple(torch.ones_like(p) for p in params)
    plain = closure.hvp("forget", v, how="exact")
    tiny.checkpoint(True)
    again = closure.hvp("forget", v, how="exact")
    assert any(h.any() for h in plain)
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(plain, again, strict=True)
    )


def test_checkpointing_and_offload_do_not_change_a_run(tmp_path: Path) -> None:
    plain = concept_eraser.erase(short(), output=tmp_path / "plain")
    saving = concept_eraser.erase(
        short(training__checkpointing=True, training__offload=True), output=tmp_path / "spared"
    )
    a, b = (load_file(run.folder / "weights.safetensors") for run in (plain, saving))
    assert all(torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-6) for name in a)
    assert not saving.model.denoiser.is_gradient_checkpointing


@pytest.mark.parametrize("lora", [False, True])
def test_frozen_weights_come_back_bit_by_bit(tiny: Any, tmp_path: Path, lora: bool) -> None:
    before = {k: v.clone() for part in tiny.parts.values() for k, v in part.state_dict().items()}
    extra = {"trainable": {"select": "cross_attention", "lora": 2}} if lora else {}
    run = concept_eraser.erase(short(**SAVING, **extra), model=tiny, output=tmp_path / "run")
    after = {k: v for part in tiny.parts.values() for k, v in part.state_dict().items()}
    names = {k for k in before if not torch.equal(before[k], after[k])}
    assert names
    assert names <= set(load_file(run.folder / "weights.safetensors"))
    assert {v.dtype for v in after.values() if v.is_floating_point()} == {torch.float32}
    assert tiny.frozen_dtype is None


def test_values_of_a_half_precision_checkpoint_wait_in_half_precision(tiny: Any) -> None:
    """The bundled checkpoint is in fp16. All values come back bit by bit."""
    weights = dict(narrowable(tiny.denoiser))
    rounded, full, *others = weights
    with torch.no_grad():
        weights[rounded].copy_(weights[rounded].to(torch.bfloat16))
        weights[full].fill_(torch.finfo(torch.float32).max)  # infinite in half precision
    before = {name: weight.clone() for name, weight in weights.items()}
    placement = Placement(tiny, frozen="bf16")
    try:
        placement.narrow([])
        waiting = {name: value.dtype for name, value in placement._originals["denoiser"].items()}
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    finally:
        placement.undo()
    assert (waiting[rounded], waiting[full]) == (torch.bfloat16, torch.float32)
    assert {waiting[name] for name in others} == {torch.float16}
    after = dict(narrowable(tiny.denoiser))
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {value.dtype for value in after.values()} == {torch.float32}


def test_a_failed_run_leaves_the_model_as_it_was(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {k: v.clone() for k, v in tiny.denoiser.state_dict().items()}
    original = Placement.begin

    def begin(self: Placement, parts: Any) -> None:
        original(self, parts)
        assert {p.dtype for p in tiny.denoiser.parameters()} == {torch.float32, torch.bfloat16}
        raise UserError("stopped by the test")

    monkeypatch.setattr(Placement, "begin", begin)
    with pytest.raises(UserError, match="stopped by the test"):
        concept_eraser.erase(short(**SAVING), model=tiny, output=tmp_path / "run")
    assert all(torch.equal(v, tiny.denoiser.state_dict()[k]) for k, v in before.items())
    assert not tiny.denoiser.is_gradient_checkpointing


def test_parts_that_are_away_are_not_called(tiny: Any, tmp_path: Path) -> None:
    """Training on the denoiser's loss never calls a text encoder or the VAE after the examples."""
    original = Placement.begin

    def begin(self: Placement, parts: Any) -> None:
        original(self, parts)
        assert set(self.away) == {"text_encoder", "vae"}
        for name in self.away:
            self.model.parts[name].register_forward_pre_hook(
                lambda *_: pytest.fail("asked while away")
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Placement, "begin", begin)
        concept_eraser.erase(short(training__offload=True), model=tiny, output=tmp_path / "run")


def test_adafactor_resumes_to_the_same_bits(tmp_path: Path) -> None:
    content = short(training__optimizer="adafactor", training__steps=6, training__lr=1e-2)
    whole = concept_eraser.erase(content, output=tmp_path / "whole").folder

    def stop(step: int, seconds: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(concept_eraser.utils.errors.Interrupted):
        concept_eraser.erase(content, output=tmp_path / "parts", on_step=stop)
    concept_eraser.erase(content, output=tmp_path / "parts", resume=True)
    a, b = (load_file(folder / "weights.safetensors") for folder in (whole, tmp_path / "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_error_of_a_missing_optimiser_says_how_to_get_it(tmp_path: Path) -> None:
    if importlib.util.find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is installed")
    with pytest.raises(UserError, match=r'pip install "concept-eraser\[memory\]"'):
        concept_eraser.erase(short(training__optimizer="adamw8bit"), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["adam", "sgd", "adafactor"])
def test_the_optimisers_state_is_as_large_as_counted(name: str) -> None:
    shapes = [(8, 4, 3, 3), (16, 8), (5,)]
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = optimizer_class(name)(params, lr=1e-3)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    state = sum(
        v.numel() * 4
        for s in optimizer.state.values()
        for k, v in s.items()
        if isinstance(v, torch.Tensor) and k != "step"
    )
    assert Trained(shapes, optimizer=name).state() == state


def test_the_state_of_momentum_and_average_is_counted(tiny: Any) -> None:
    shapes = [(16, 8), (5,)]
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    state = sum(s["momentum_buffer"].numel() * 4 for s in optimizer.state.values())
    assert Trained(shapes, optimizer="sgd", momentum=True).state() == state
    plain, averaged = (
        memory_estimate.estimate(recipe.load(short(training__ema=ema)), tiny, gpu=False)
        for ema in (None, 0.9)
    )
    assert averaged.training - plain.training == plain.always["their values before"]


@pytest.mark.parametrize("name", ["zimage", "qwenimage"])
def test_an_estimate_leaves_nothing_in_the_denoisers_caches(name: str, get_model: Any) -> None:
    """Their positions are stored, and their inputs depend on the lengths of the prompts."""
    model = get_model(name)
    shape = (1, *model.latent_shape())
    with memory.pretending(*model.parts.values()):
        condition = model.encode(["a star"])
        prediction = model.denoise(torch.empty(shape), torch.zeros(1).long(), condition)
        assert prediction.shape == shape
    with torch.no_grad():
        real = model.denoise(torch.zeros(shape), torch.zeros(1).long(), model.encode(["a star"]))
    assert float(real.std()) > 0


class Gradients(Peak):
    """Counts tensors in fp32 only: gradients and directions, without the sums in float64."""

    def _count(self, value: torch.Tensor, *, is_new: bool) -> None:
        super()._count(value, is_new=is_new and value.dtype == torch.float32)


def test_a_step_holds_one_gradient_more_than_fine_tuning() -> None:
    """The highest number of tensors of a parameter's size, counted exactly."""
    params = tuple(torch.zeros(1000, requires_grad=True) for _ in range(20))
    factors = torch.arange(1000.0)
    losses: dict[str, list[Callable[[], torch.Tensor]]] = {
        "retain": [lambda: torch.stack([p @ factors for p in params]).sum()],
        "forget": [lambda: torch.stack([p @ factors[::2].repeat(2) for p in params]).sum()],
    }
    counts = {}
    methods = {
        "fine-tuning": Weighted(forget=0.0),
        "plain sum": Weighted(),
        "munba": Munba(),
        "surgery": Surgery(),
    }
    for name, method in methods.items():
        with Gradients() as peak:
            vec = method.direction(LossClosure(params, losses)).vec
        assert all(part.any() for part in vec)
        counts[name] = peak.peak // (4 * 1000)
    copies = {name: count - counts["fine-tuning"] for name, count in counts.items()}
    assert copies == {"fine-tuning": 0, "plain sum": 20, "munba": 20, "surgery": 20}, counts


CASES: list[dict[str, Any]] = [
    {},
    {"trainable__select": "all", "training__batch_size": 2},
    {"training__checkpointing": True, "training__batch_size": 8},
    {
        "trainable__select": "all",
        "training__optimizer": "sgd",
        "training__momentum": 0.9,
        "training__clip": 0.1,
        "training__ema": 0.9,
    },
    {"trainable__lora": 4, "training__micro_batches": 2, "training__batch_size": 8},
    {"trainable__select": "all", "training__one_pass": "on"},
    {
        "method": {"name": "adversarial", "inner_steps": 1},
        "attack": {"n": 8, "both_branches": True},
        "training__batch_size": 8,
    },
]


@pytest.mark.parametrize("changes", CASES, ids=lambda c: ",".join(c) or "plain")
def test_the_estimate_agrees_with_the_peak(
    changes: dict[str, Any], tiny: Any, tmp_path: Path
) -> None:
    """The peak of all tensors in two real steps is within a tenth of the estimate."""
    job = recipe.load(short(training__steps=2, **changes))
    estimate = memory_estimate.estimate(job, tiny, gpu=False)
    weights = {k: v for k, v in estimate.always.items() if k.startswith("weights of")}
    sizes: dict[str, int] = {}
    original = Placement.begin

    def begin(self: Placement, parts: Any) -> None:  # the examples are made: count from here
        original(self, parts)
        sizes["before"], peak.peak = peak.now, peak.now

    with pytest.MonkeyPatch.context() as patch, Peak() as peak:
        patch.setattr(Placement, "begin", begin)
        concept_eraser.erase(job, model=tiny, output=tmp_path / "run", cache=tmp_path / "cache")
    originals = estimate.always[
        "their values before"
    ]  # made just before `begin`, beside the examples
    actual = peak.peak - sizes["before"] + originals + sum(weights.values())
    assert estimate.training == pytest.approx(actual, rel=0.1)


def test_the_estimate_of_writing_counts_the_part_in_its_checkpoints_precision(tiny: Any) -> None:
    """The bundled checkpoint is in fp16, so the trained part is there in both precisions."""
    job = recipe.load(short(save="pipeline"))
    estimate = memory_estimate.estimate(job, tiny, gpu=False, saved="pipeline")
    with Peak() as peak, tiny.stored["denoiser"].precision(tiny.denoiser):
        held = peak.now
    assert held > 0
    assert estimate.writing["the trained part as it is written"] == held
    size = sum(estimate.writing.values())
    assert size > held + sum(memory.weights_of(part) for part in tiny.parts.values())
    assert f"; while the model is written {size / memory.GB:.2f} GB" in estimate.lines()[0]
    offloading = recipe.load(short(training__offload=True, save="pipeline"))
    line = memory_estimate.estimate(offloading, tiny, saved="pipeline").lines()[0]
    assert line.count("GB of the CPU's memory") == 3  # written, loaded, and all of it on a CPU
    assert not memory_estimate.estimate(job, tiny, saved="changed").writing


def test_the_estimate_counts_the_elastic_weights(tiny: Any) -> None:
    plain, elastic = (
        memory_estimate.estimate(recipe.load(short(**changes)), tiny, gpu=False)
        for changes in ({}, {"retain__elastic": {"weight": 1.0, "n": 2}})
    )
    names = [name for name, _ in tiny.denoiser.named_parameters() if ".attn2." in name]
    trained = sum(tiny.denoiser.get_parameter(name).numel() * 4 for name in names)
    assert elastic.always["the elastic weights"] == trained
    assert sum(elastic.always.values()) == sum(plain.always.values()) + trained


def test_the_estimate_names_the_whole_model_where_the_training_holds_less(tiny: Any) -> None:
    """A model is loaded in fp32, and is in fp32 again at the end."""
    bf16 = {
        "training__precision": "bf16",
        "training__frozen": "bf16",
        "generation__precision": "bf16",
    }
    estimate = memory_estimate.estimate(recipe.load(short(**bf16)), tiny, gpu=False)
    assert estimate.whole == sum(memory.weights_of(part) for part in tiny.parts.values())
    held = sum(size for name, size in estimate.always.items() if name.startswith("weights of"))
    assert held < estimate.whole <= estimate.peak
    assert f"at the end, {estimate.whole / memory.GB:.2f} GB" in estimate.lines()[0]
    assert not memory_estimate.estimate(recipe.load(short()), tiny).whole


@pytest.mark.parametrize("trained", ["lora", "cross_attention"])
def test_the_estimate_of_a_training_on_the_cpu(trained: str, tiny: Any, tmp_path: Path) -> None:
    """Nothing can wait elsewhere: the peak has frozen weights in both precisions, and all parts."""
    how = {"trainable__lora": 4} if trained == "lora" else {"trainable__select": trained}
    changes = {"training__offload": True, "training__precision": "bf16", "training__frozen": "bf16"}
    job = recipe.load(short(training__steps=2, generation__precision="bf16", **how, **changes))
    estimate = memory_estimate.estimate(job, tiny)
    assert f"on the CPU takes {estimate.on_cpu / memory.GB:.2f} GB" in estimate.lines()[0]
    original, restore = Placement.begin, Placement.undo
    sizes: dict[str, int] = {}

    def begin(self: Placement, parts: Any) -> None:  # the examples are made: count from here
        original(self, parts)
        kept = [v for v in tensors() if v.untyped_storage().data_ptr() in places]
        sizes["since loading"] = sum(v.nbytes for v in kept)
        peak.peak = peak.now

    def undo(self: Placement) -> None:
        sizes["made since"] = peak.peak
        restore(self)

    def tensors() -> list[Any]:
        return [v for part in tiny.parts.values() for v in (*part.parameters(), *part.buffers())]

    places = {v.untyped_storage().data_ptr() for v in tensors()}

    with pytest.MonkeyPatch.context() as patch, Peak() as peak:
        patch.setattr(Placement, "begin", begin)
        patch.setattr(Placement, "undo", undo)
        concept_eraser.erase(job, model=tiny, output=tmp_path / "run", cache=tmp_path / "cache")
    peak_bytes = sizes["since loading"] + sizes["made since"]
    assert estimate.on_cpu == pytest.approx(peak_bytes, rel=0.1)
    assert estimate.training - memory.CONTEXT < 0.85 * peak_bytes


def test_pretending_leaves_a_model_as_it_was(tiny: Any) -> None:
    before = {k: (id(v), v.clone()) for k, v in tiny.denoiser.named_parameters()}
    with memory.pretending(tiny.denoiser, narrow=[w for _, w in narrowable(tiny.denoiser)]):
        assert tiny.denoiser.conv_in.weight.dtype == torch.bfloat16
        tiny.denoiser.conv_in.weight.sum()
    assert all(
        id(v) == before[k][0] and torch.equal(v, before[k][1])
        for k, v in tiny.denoiser.named_parameters()
    )


def test_published_architectures_have_the_size_their_cards_say() -> None:
    for name, exactly in {
        "sd14": 859_520_964,
        "sdxl": 2_567_463_684,
        "flux": 11_901_408_320,
    }.items():
        assert sum(p.numel() for p in published.hollow(name).denoiser.parameters()) == exactly
    sizes = {
        name: sum(v.numel() for v in published.hollow(name).denoiser.state_dict().values())
        for name in (
            "sd3",
            "sd35",
            "pixart",
            "sana",
            "sana-600m",
            "zimage",
            "qwenimage",
            "klein",
        )
    }
    assert sizes["sd3"] == pytest.approx(2.0e9, rel=0.05)
    assert sizes["sd35"] == pytest.approx(2.5e9, rel=0.05)
    assert sizes["pixart"] == pytest.approx(0.6e9, rel=0.05)
    assert sizes["sana"] == pytest.approx(1.6e9, rel=0.05)
    assert sizes["sana-600m"] == pytest.approx(0.6e9, rel=0.05)
    assert sizes["zimage"] == pytest.approx(6e9, rel=0.05)
    assert sizes["qwenimage"] == pytest.approx(20e9, rel=0.05)
    assert sizes["klein"] == pytest.approx(4e9, rel=0.05)


@pytest.mark.parametrize("name", memory_presets.PRESETS)
def test_a_preset_is_spelled_out_and_the_user_wins(name: str) -> None:
    plain, preset = (
        recipe.load("sd14_nudity_munba"),
        recipe.load("sd14_nudity_munba", [f"memory={name}"]),
    )
    one, other = plain.training, preset.training
    assert one.batch_size * one.micro_batches == other.batch_size * other.micro_batches
    assert other.batch_size <= memory_presets.PRESETS[name].at_once
    assert preset.resolved()["training"]["checkpointing"] is True
    assert "memory" not in preset.resolved()
    assert recipe.load(preset.resolved()).fingerprint == preset.fingerprint
    own = recipe.load(
        "sd14_nudity_munba", [f"memory={name}", "training.batch_size=4", "training.offload=false"]
    )
    assert (own.training.batch_size, own.training.micro_batches, own.training.offload) == (
        4,
        1,
        False,
    )
    assert own.generation.batch_size == preset.generation.batch_size  # which has no override
    few = recipe.load("sd14_nudity_munba", [f"memory={name}", "generation.batch_size=6"])
    assert (few.generation.batch_size, few.training.batch_size) == (6, other.batch_size)
    exact = recipe.load("sd14_nudity_munba", ["generation.precision=fp32", f"memory={name}"])
    assert (exact.generation.precision, exact.training.frozen) == ("fp32", "fp32")


def test_a_preset_leaves_alone_what_does_not_fit_the_recipe() -> None:
    exact = recipe.load("sd14_nudity_uno", ["memory=8gb"]).training  # differences of gradients
    assert (exact.precision, exact.frozen, exact.checkpointing) == ("fp32", "fp32", True)
    with_watch = recipe.load(short(watch={"suite": "tiny_star"}) | {"memory": "8gb"}).training
    assert (with_watch.offload, with_watch.frozen) == (False, "fp32")
    encoder = recipe.load("tiny_star_text_encoder", ["memory=8gb"]).training
    assert encoder.frozen == "fp32"
    with pytest.raises(UserError, match="unknown memory preset '9gb'"):
        recipe.load(short() | {"memory": "9gb"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__frozen": "bf16"}, "needs training.precision: bf16"),
        (
            {"training__frozen": "bf16", "training__precision": "bf16"},
            "needs generation.precision: bf16",
        ),
        (
            {"training__offload": True, "watch": {"suite": "tiny_star"}},
            "watch generates whole images",
        ),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe.load(short(**changes))


def test_recipes_without_these_settings_keep_their_fingerprint() -> None:
    assert not {"checkpointing", "offload", "frozen"} & set(
        recipe.load(short()).resolved()["training"]
    )


def test_the_page_shows_the_estimates_as_they_are() -> None:
    from benchmarks import estimates

    page, content = estimates.PAGE.read_text(), json.loads(estimates.FILE.read_text())
    assert content["label"] == estimates.LABEL
    assert estimates.LABEL in page
    assert estimates.render(page, content) == page
