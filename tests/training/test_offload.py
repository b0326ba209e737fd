"""With training.offload the examples are made in phases, each with its own parts of the model, to
the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

import concept_eraser
from concept_eraser import UserError
from concept_eraser.data import generate
from concept_eraser.models import generation_stages
from concept_eraser.models.base import Model
from concept_eraser.models.loading import load
from concept_eraser.models.safeguards import Guard
from concept_eraser.recipes import recipe
from concept_eraser.runs import job, memory_estimate
from concept_eraser.targets import latents
from concept_eraser.targets.encode import encode_missing
from concept_eraser.targets.plan import missing_chunks
from concept_eraser.tiny import families
from concept_eraser.training.memory import Peak
from concept_eraser.training.placement import Placement, narrowable
from tests.conftest import short

FAMILIES = ("sd", "sdxl", "sd3", "sd3-no-t5", "flux", "dit")
BF16 = {
    "training__frozen": "bf16",
    "training__precision": "bf16",
    "generation__precision": "bf16",
}


def open_model(name: str, folder: Path) -> Any:
    model = load("tiny-sd" if name == "sd" else str(families.build(name, folder / name)))
    model.configure(families.options(name))
    return model


class Elsewhere(Placement):
    """The real placement, but a part that is away is on the meta device and has no content. A call
    of it fails, as it would if the part were on another device.
    """

    phases: list[tuple[str, ...]] = []  # noqa: RUF012 - set anew by each test

    def arrive(self, device: torch.device) -> None:
        super().arrive(device)
        # all are there until the first phase: their weights are hashed
        self.contents: list[tuple[dict, dict]] = []
        self.hooks: list[Any] = []

    def only(self, parts: Sequence[str]) -> None:
        self._come()
        super().only(parts)
        self.phases.append(tuple(parts))
        self._leave(name for name in self.model.parts if name not in parts)

    def undo(self) -> None:
        self._come()
        super().undo()

    def _leave(self, parts: Any) -> None:
        # diffusers sends latents to the device of this parameter, which is really the CPU
        first = next(self.model.parts["vae"].parameters())
        for layer in (layer for name in parts for layer in self.model.parts[name].modules()):
            self.hooks.append(
                layer.register_forward_pre_hook(lambda *_: pytest.fail("asked while away"))
            )
            for values in (layer._parameters, layer._buffers):
                self.contents.append((values, dict(values)))
                values.update(
                    {k: _nowhere(v) for k, v in values.items() if v is not None and v is not first}
                )

    def _come(self) -> None:
        for values, before in self.contents:
            values.update(before)
        for hook in self.hooks:
            hook.remove()
        self.contents, self.hooks = [], []


def _nowhere(value: Tensor) -> Tensor:
    empty = torch.empty_like(value, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(value, nn.Parameter) else empty


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Offloaded runs use `Elsewhere`; the list of the parts of each phase."""
    phases: list[tuple[str, ...]] = []
    monkeypatch.setattr(Elsewhere, "phases", phases)
    monkeypatch.setattr(
        job,
        "Placement",
        lambda model, **options: (Elsewhere if options["offload"] else Placement)(model, **options),
    )
    return phases


def run_both(
    content: dict[str, Any], folder: Path, model: Any = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The erased weights without and with offload, each with a cache of its own."""
    weights = []
    for name, offload in (("plain", False), ("phases", True)):
        settings = {**content, "training": {**content["training"], "offload": offload}}
        before = (
            {part: copy.deepcopy(module.state_dict()) for part, module in model.parts.items()}
            if model
            else {}
        )
        run = concept_eraser.erase(
            settings, model=model, output=folder / name, cache=folder / f"{name}-cache"
        )
        weights.append(load_file(run.folder / "weights.safetensors"))
        for part, state in before.items():
            model.parts[part].load_state_dict(state)
    return weights[0], weights[1]


def cache_content(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_parts_leave_before_others_come(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test records the moves, so that it can name a device that this machine lacks."""
    moves: list[tuple[str, str]] = []
    for name, part in tiny.parts.items():
        monkeypatch.setattr(part, "to", lambda device, name=name: moves.append((name, str(device))))
    placement = Placement(tiny, offload=True)
    placement.arrive(torch.device("cuda"))
    assert not moves  # the device may be too small for the whole model
    assert tiny.device == torch.device("cuda")
    placement.only(("text_encoder",))
    assert moves == [("denoiser", "cpu"), ("vae", "cpu"), ("text_encoder", "cuda")]
    assert placement.away == ["denoiser", "vae"]
    moves.clear()
    placement.begin(("denoiser", "vae"))
    assert moves == [("text_encoder", "cpu"), ("denoiser", "cuda"), ("vae", "cuda")]


@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        *((name, dtype) for name in FAMILIES for dtype in (None, torch.bfloat16)),
        *((name, None) for name in ("pixart", "sana", "zimage", "qwenimage")),
        pytest.param("flux2", None, marks=pytest.mark.slow),
    ],
)
def test_an_image_in_stages_is_the_whole_one(name: str, autocast: Any, tmp_path: Path) -> None:
    model = open_model(name, tmp_path)
    prompts = ["goldie", "281"] if name == "dit" else ["a red star", "a house"]
    for guidance in (1.0, 3.0):
        whole = model.sample(prompts, seeds=[1, 2], steps=3, guidance=guidance, autocast=autocast)
        states = generation_stages.read(model, prompts, guidance=guidance, autocast=autocast)
        codes = generation_stages.draw(
            model, prompts, states, seeds=[1, 2], steps=3, guidance=guidance, autocast=autocast
        )
        assert torch.equal(generation_stages.show(model, codes, autocast=autocast), whole)
        other = generation_stages.draw(
            model, prompts, states, seeds=[3, 2], steps=3, guidance=guidance, autocast=autocast
        )
        assert not torch.equal(other[0], codes[0])
        assert torch.equal(
            model.sample(prompts, seeds=[1, 2], steps=3, guidance=guidance, autocast=autocast),
            whole,
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_each_phase_has_its_parts_alone_and_the_bits_are_the_same(
    name: str, tmp_path: Path, phases: Any
) -> None:
    model = open_model(name, tmp_path)
    texts = (
        (["goldie", "cock"], ["tabby"], "281")
        if name == "dit"
        else (["a red star", "a blue star"], ["a house"], "a circle")
    )
    forget = {"prompts": texts[0], "loss": "anchor", "anchor": texts[2], "n": 3}
    content = short(
        forget=forget,
        retain={"prompts": texts[1], "n": 3},
        training__steps=2,
        generation__batch_size=2,
    )
    if name == "dit":
        content["generation"]["guidance"] = 1.0
    if name != "sd":
        content["trainable"]["select"] = "all"
    plain, in_phases = run_both(content, tmp_path, model)
    assert all(torch.equal(plain[k], in_phases[k]) for k in plain)
    assert any(
        not torch.equal(plain[k], v) for k, v in model.denoiser.state_dict().items() if k in plain
    )
    readers = [tuple(model.readers)] if model.readers else [()]
    assert phases == [*readers, ("denoiser",), ("vae",), ("denoiser",), ("denoiser",)]
    one, other = (cache_content(tmp_path / f"{which}-cache") for which in ("plain", "phases"))
    assert len(one) == 4
    assert one == other


ASIDE: dict[str, dict[str, Any]] = {
    "elastic": {"retain__elastic": {"weight": 1.0, "n": 2}, "forget__noised": "anchor"},
    "an adversary": {"method": {"name": "adversarial"}, "attack": {"n": 4}},
    "a judge": {"method": {"name": "uno-hat"}, "histogram": {"concept": {"shape": "star"}}},
    "text encoder": {"target": "text_encoder", "trainable": {"select": "all"}},
    "frozen": BF16,
}


@pytest.mark.parametrize("changes", ASIDE.values(), ids=ASIDE)
def test_whatever_is_trained_the_bits_are_the_same(
    changes: dict[str, Any], tmp_path: Path, phases: Any
) -> None:
    plain, in_phases = run_both(
        short(training__steps=1, forget__n=4, retain__n=4, **changes), tmp_path
    )
    assert plain.keys() == in_phases.keys()
    assert all(torch.equal(plain[k], in_phases[k]) for k in plain)
    assert phases[0] == ("text_encoder",)


def test_a_folder_of_images_is_encoded_by_the_vae_alone(tmp_path: Path, phases: Any) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(2):
        Image.new("RGB", (32, 32), (100 * i, 50, 200)).save(folder / f"{i}.png")
    forget = {
        "prompts": ["a red star"],
        "loss": "anchor",
        "anchor": "a circle",
        "images": str(folder),
    }
    retain = {"prompts": ["a house"], "loss": "distill", "images": "free"}
    plain, in_phases = run_both(short(forget=forget, retain=retain, training__steps=1), tmp_path)
    assert all(torch.equal(plain[k], in_phases[k]) for k in plain)
    assert phases[:2] == [("text_encoder",), ("vae",)]


def test_finished_latents_are_not_generated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stops before it decodes continues with its latents, and ends with the images of an
    uninterrupted run.
    """
    content, cache = (
        short(training__offload=True, training__steps=1, generation__batch_size=3),
        tmp_path / "cache",
    )
    decode, draw = latents.decode_missing, generation_stages.draw

    def stop(*_: Any) -> None:
        raise UserError("stopped by the test")

    monkeypatch.setattr(latents, "decode_missing", stop)
    with pytest.raises(UserError, match="stopped by the test"):
        concept_eraser.erase(content, output=tmp_path / "run", cache=cache)
    waiting = sorted(cache.rglob("*.codes"))
    assert len(waiting) == len(list(cache.rglob("*.*"))) == 6
    waiting[0].write_bytes(waiting[0].read_bytes()[:50])  # a crash while it was written
    monkeypatch.setattr(latents, "decode_missing", decode)
    count: list[int] = []
    monkeypatch.setattr(
        generation_stages,
        "draw",
        lambda *arguments, **options: count.append(1) or draw(*arguments, **options),
    )
    concept_eraser.erase(content, output=tmp_path / "run", cache=cache, resume=True)
    assert len(count) == 1
    whole = tmp_path / "whole"
    concept_eraser.erase(
        {**content, "training": {**content["training"], "offload": False}},
        output=tmp_path / "other",
        cache=whole,
    )
    assert cache_content(cache) == cache_content(whole)


@pytest.mark.parametrize("are_lost", [False, True])
def test_another_run_with_the_same_cache_decodes_the_latents_first(
    are_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes them when their images are written. Then this run reads the images."""
    content = short(training__offload=True, training__steps=1)
    decode, cache, began = latents.decode_missing, tmp_path / "cache", []

    def after_the_other(*arguments: Any) -> None:
        if not began:
            began.append(True)
            concept_eraser.erase(content, output=tmp_path / "other", cache=cache)
            if are_lost:
                next(path for path in cache.rglob("*.*") if path.suffix != ".codes").unlink()
        decode(*arguments)

    monkeypatch.setattr(latents, "decode_missing", after_the_other)
    if are_lost:
        with pytest.raises(UserError, match=r"removed from the cache .* --resume"):
            concept_eraser.erase(content, output=tmp_path / "run", cache=cache)
        return
    run = concept_eraser.erase(content, output=tmp_path / "run", cache=cache)
    assert run.folder.is_dir()
    assert not list(cache.rglob("*.codes"))


def test_cached_images_are_not_generated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phases: Any
) -> None:
    concept_eraser.erase(
        short(training__steps=1), output=tmp_path / "plain", cache=tmp_path / "cache"
    )
    monkeypatch.setattr(
        generation_stages, "draw", lambda *arguments, **options: pytest.fail("drawn again")
    )
    concept_eraser.erase(
        short(training__steps=1, training__offload=True),
        output=tmp_path / "run",
        cache=tmp_path / "cache",
    )
    assert phases == [("text_encoder",), ("vae",), ("denoiser",), ("denoiser",)]


def test_prompts_with_a_guidance_of_their_own_use_it(tiny: Any, tmp_path: Path) -> None:
    from concept_eraser.data.prompts import Prompt

    prompts = [Prompt("a red star", guidance=g) for g in (2.0, 5.0, 2.0)]
    sampling = generate.Sampling(2, 5.0, 4)
    plain = generate.generate(tiny, prompts, [1, 2, 3], sampling, cache=tmp_path / "plain")
    request = generate.request_images(tiny, prompts, [1, 2, 3], sampling, cache=tmp_path / "phases")
    missing = missing_chunks([request])
    latents.draw_missing(tiny, missing, encode_missing(tiny, missing))
    latents.decode_missing(tiny, missing)
    assert torch.equal(generate.read(request.path(0)), plain)
    assert not missing_chunks([request])


def test_a_safeguard_cannot_be_cut_in_pieces(tiny: Any) -> None:
    tiny.protect(Guard.read("negative:a star"))
    with pytest.raises(UserError, match=r"leave out training\.offload"):
        generation_stages.read(tiny, ["a star"], guidance=3.0, autocast=None)


@pytest.mark.parametrize("name", ["sd", "sd3", "flux"])
def test_frozen_text_encoders_are_in_bf16_while_they_read_and_come_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images are the same, since autocast uses bf16 anyway; the embeddings differ by the
    rounding of bf16.
    """
    model = open_model(name, tmp_path)
    before = {
        (part, k): v.clone()
        for part in model.parts
        for k, v in model.parts[part].state_dict().items()
    }
    texts, dtypes = ["a red star", "a house"], []
    exact = model.encode(texts).tensors["states"]
    stages = generation_stages.read, generation_stages.show

    def read(*arguments: Any, **options: Any) -> Any:
        dtypes.append(
            [
                {w.dtype for _, w in narrowable(model.parts[part])}
                for part in (*model.readers, "denoiser", "vae")
            ]
        )
        bf16_states = model.encode(texts).tensors["states"]
        assert bf16_states.dtype == torch.float32
        assert 0 < (bf16_states - exact).norm() / exact.norm() < 0.02
        return stages[0](*arguments, **options)

    monkeypatch.setattr(generation_stages, "read", read)
    images = {}
    for precision in ("fp32", "bf16"):
        arguments = {
            "forget": {"prompts": texts[:1], "loss": "anchor", "anchor": "a circle", "n": 2},
            "retain": {"prompts": texts[1:], "n": 2},
        }
        content = short(
            **arguments,
            **{**BF16, "training__frozen": precision},
            training__offload=True,
            training__steps=1,
            trainable={"select": "cross_attention", "lora": 2},
        )
        if precision == "fp32":
            monkeypatch.setattr(generation_stages, "read", stages[0])
        else:
            monkeypatch.setattr(generation_stages, "read", read)
        concept_eraser.erase(
            content, model=model, output=tmp_path / precision, cache=tmp_path / f"{precision}-cache"
        )
        images[precision] = sorted(
            load_file(p)["images"].numpy().tobytes()
            for p in (tmp_path / f"{precision}-cache").rglob("*.safetensors")
        )
        undo = {k: v for (part, k), v in before.items() if part == "denoiser"}
        model.denoiser.load_state_dict(undo)  # a LoRA is folded into the weights at the end
    assert dtypes[0] == [
        *[{torch.bfloat16}] * len(model.readers),
        {torch.bfloat16},
        {torch.float32},
    ]
    assert images["fp32"] == images["bf16"]
    assert all(
        torch.equal(before[part, k], v)
        for part in model.parts
        for k, v in model.parts[part].state_dict().items()
    )
    assert (model.frozen_dtype, model.reader_dtype, model.working) == (None, None, None)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_estimate_follows_the_phases(is_frozen: bool, tiny: Model, tmp_path: Path) -> None:
    """Each phase needs its parts and its working memory; the estimate of the largest is within a
    tenth of the measured peak.
    """
    changes = BF16 if is_frozen else {}
    settings = recipe.load(
        short(training__offload=True, training__steps=1, forget__n=16, retain__n=16, **changes)
    )
    estimate = memory_estimate.estimate(settings, tiny, gpu=False)
    at_once = memory_estimate.estimate(
        recipe.load(short(training__steps=1, forget__n=16, retain__n=16, **changes)),
        tiny,
        gpu=False,
    )
    assert estimate.examples < 0.8 * at_once.examples
    only, sizes = Placement.only, []

    def count_peak(self: Placement, parts: Sequence[str]) -> None:
        if sizes and len(sizes) < 4:
            sizes[-1] += peak.peak
        only(self, parts)
        size = sum(
            v.nbytes
            for part in parts
            for v in (*self.model.parts[part].parameters(), *self.model.parts[part].buffers())
        )
        sizes.append(size - peak.now)
        peak.peak = peak.now

    with pytest.MonkeyPatch.context() as patch, Peak() as peak:
        patch.setattr(Placement, "only", count_peak)
        concept_eraser.erase(
            settings, model=tiny, output=tmp_path / "run", cache=tmp_path / "cache"
        )
    assert estimate.examples == pytest.approx(max(sizes[:3]), rel=0.1)
