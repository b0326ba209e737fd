"""The rehearsal device keeps the rules of a GPU, computes the numbers of the CPU, and counts."""

from __future__ import annotations

import copy
import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import concept_eraser
from benchmarks import rehearsal_device
from benchmarks.device_counts import Counts
from benchmarks.rehearsal_device import count
from concept_eraser.erasers.denoiser import Denoiser
from concept_eraser.methods.stereo import Stereo
from concept_eraser.training.closure import LossClosure
from concept_eraser.utils import devices
from tests.conftest import short

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the rehearsal device is for machines without a GPU"
)


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


def test_numbers_are_those_of_the_cpu(device: torch.device) -> None:
    network, x = small_network(), torch.randn(2, 3, 8, 8)
    params = list(network.parameters())
    expected = torch.autograd.grad(network(x).square().mean(), params)
    network.to(device)
    assert all(one is other for one, other in zip(network.parameters(), params, strict=True))
    loss = network(x.to(device)).square().mean()
    gradients = torch.autograd.grad(loss, params)
    assert {gradient.device for gradient in gradients} == {device}
    for gradient, other in zip(gradients, expected, strict=True):
        assert torch.allclose(gradient.cpu(), other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "mix",
    [
        lambda there, here: there + here,
        lambda there, here: here * there,
        lambda there, here: torch.cat([there, here]),
        lambda there, here: torch.cat([there.sum()[None], here.sum()[None]]),
        lambda there, here: here.add_(there),
        lambda there, here: here.sum().add_(there.sum()),
        lambda there, here: here[there.long()],
        lambda there, here: torch.nn.functional.linear(there, here),
        lambda there, here: there.copy_(here).add_(here),
    ],
)
def test_two_devices_in_one_operator(device: torch.device, mix: Any) -> None:
    with pytest.raises(RuntimeError, match=r"aten::.* same device"):
        mix(torch.ones(3, 3, device=device), torch.ones(3, 3))


def test_what_may_be_on_the_cpu(device: torch.device) -> None:
    """Numbers, copies and indices, as with CUDA. Random numbers need a generator of the device."""
    there = torch.ones(3, 3, device=device)
    assert (there + torch.tensor(2.0)).device == device
    assert there[torch.tensor([0, 2])].shape == (2, 3)
    there.copy_(torch.zeros(3, 3))
    assert there.sum().item() == 0
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=device, generator=torch.Generator())
    with pytest.raises(TypeError):
        there.numpy()


def test_a_graph_of_a_graph(device: torch.device) -> None:
    """Second derivatives, with operators that change a shape in place."""
    network, products = small_network(), []
    x = torch.ones(2, 3, 8, 8)
    for where in ("cpu", device):
        network.to(where)
        params = list(network.parameters())
        with sdpa_kernel(SDPBackend.MATH):
            loss = network(x.to(where)).square().mean()
            first = torch.autograd.grad(loss, params, create_graph=True)
            slope = torch.stack([gradient.sum() for gradient in first]).sum()
            products.append([part.cpu() for part in torch.autograd.grad(slope, params)])
    for one, other in zip(*products, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


class Mixing(torch.autograd.Function):
    """Its backward pass adds a tensor of the CPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope + torch.ones(slope.shape)


def test_two_devices_in_the_backward_pass(device: torch.device) -> None:
    there = torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"aten::add.* same device"):
        torch.autograd.grad(Mixing.apply(there).sum(), [there])


def test_counts(device: torch.device) -> None:
    with count(places=True) as counts:
        there = torch.zeros(10, 10).to(device)
        made = torch.arange(4, device=device) + 1
        float(there.sum())
        there.cpu()
        there[there > 0]
        assert made.tolist() == [1, 2, 3, 4]
        torch.zeros(10, 10).to(device, non_blocking=True)  # nobody waits for this
    assert counts.syncs == 5
    assert counts.places.total() == 5
    assert all("test_device.py" in place for place in counts.places)
    assert (counts.copies_to_device, counts.bytes_to_device) == (2, 800)
    assert counts.bytes_to_host == 4 + 400 + 4 + 32


def test_memory_is_that_of_the_tensors_in_use(device: torch.device) -> None:
    gc.collect()
    before = rehearsal_device.occupied()
    with count() as counts:
        first = torch.zeros(1024, device=device)
        view = first[:10]
        second = first + 1
        assert rehearsal_device.occupied() == before + 2 * 4096
        del first, second
        assert rehearsal_device.occupied() == before + 4096, "the view holds it"
        del view
    assert counts.peak_bytes == before + 2 * 4096
    assert rehearsal_device.occupied() == before


def test_attention_is_fused_unless_the_flags_forbid_it(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    here = torch.randn(2, 2, 64, 8, generator=generator)
    there = here.to(device).requires_grad_()
    attend = nn.functional.scaled_dot_product_attention
    peaks = []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel), count() as counts:
            output = attend(there, there, there)
        peaks.append(counts.peak_bytes - rehearsal_device.occupied())
        assert torch.allclose(output.detach().cpu(), attend(here, here, here), atol=1e-5)
    assert peaks[1] > peaks[0]


def test_autocast_computes_in_half_precision(device: torch.device) -> None:
    network = small_network().to(device)
    x = torch.ones(1, 3, 8, 8, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert network(x).dtype == torch.bfloat16
        assert network[1](network[0](x)).dtype == torch.float32
    assert network(x).dtype == torch.float32


def test_weights_are_replaced_copied_and_written(device: torch.device) -> None:
    network = small_network().to(device)
    weight = network[0].weight
    weight.data = weight.data.to(torch.bfloat16)
    assert weight.dtype == weight.data.cpu().dtype == torch.bfloat16
    other = copy.deepcopy(network)
    assert other[0].weight.device == device
    assert isinstance(other[0].weight, nn.Parameter)
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["4.bias"].device.type == "cpu"
    assert type(network.cpu()[0].weight) is nn.Parameter


def test_the_package_finds_it_inside_only(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert devices.find_gpu() == torch.device("rehearsal")
    assert devices.gpu_module().get_device_name() == "rehearsal"
    with monkeypatch.context() as patch:  # the fixture turns it off after that
        patch.setitem(rehearsal_device._state, "is_on", False)
        assert devices.find_gpu() is None or torch.cuda.is_available()


def test_a_tensor_that_was_left_behind_stops_the_training(
    steps: list[Counts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without it, no other test of this folder would mean anything."""
    recipe = short(training={"steps": 2, "batch_size": 2})
    concept_eraser.erase(recipe, output=tmp_path / "whole")
    assert len(steps) == 2
    assert all(step.operators > 100 for step in steps)
    draw = Denoiser.draw

    def forgetful(*arguments: Any) -> Any:
        made = draw(*arguments)
        object.__setattr__(made, "noisy", made.noisy.cpu())
        return made

    monkeypatch.setattr(Denoiser, "draw", forgetful)
    with pytest.raises(RuntimeError, match=r"aten::convolution.*rehearsal:0 and cpu"):
        concept_eraser.erase(recipe, output=tmp_path / "left_behind")


def test_an_attack_of_stereo_goes_on_with_a_state_from_a_file(device: torch.device) -> None:
    """A state is loaded to the CPU."""
    weight = torch.ones(3).to(device).requires_grad_()
    attack = torch.ones(2).to(device).requires_grad_()
    losses = {
        name: [lambda: (weight.sum() * attack.sum()).square()]
        for name in ("retain", "forget", "attack")
    }
    method = Stereo(rounds=1, erase_steps=1, inner_steps=3)
    method.direction(LossClosure((weight, attack), losses, inner=[1], step=1))
    state = {name: part.cpu() for name, part in method.state_dict().items()}
    method.load_state_dict(state)
    step = method.direction(LossClosure((weight, attack), losses, inner=[1], step=2)).vec[1]
    assert step.device == device
    assert bool(step.cpu().isfinite().all())
