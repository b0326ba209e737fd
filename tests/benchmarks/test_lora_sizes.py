"""Check the counted sizes of LoRAs against PEFT and against the page."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from benchmarks import lora_sizes


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_in = torch.nn.Conv2d(3, 8, 3)
        self.down_blocks = torch.nn.ModuleList(
            [torch.nn.Linear(8, 5), torch.nn.Conv2d(5, 4, 1), torch.nn.LayerNorm(4)]
        )


@pytest.mark.parametrize(
    ("selection", "targets"),
    [
        ("all", ["conv_in", "down_blocks.0", "down_blocks.1"]),
        ("blocks", ["down_blocks.0", "down_blocks.1"]),
    ],
)
def test_the_parameters_are_those_of_peft(selection: str, targets: list[str]) -> None:
    sizes = lora_sizes.count(Layers(), selection)
    lora = get_peft_model(Layers(), LoraConfig(r=3, target_modules=targets))
    trained = sum(one.numel() for one in lora.parameters() if one.requires_grad)
    assert sizes.layers == len(targets)
    assert 3 * sizes.per_rank == trained
    assert sizes.parameters == sum(one.numel() for one in Layers().parameters())
    assert sizes.rank_of(sizes.share(7)) == 7


def test_the_page_shows_the_counts() -> None:
    page = lora_sizes.PAGE.read_text()
    rows = lora_sizes.table([lora_sizes.BUNDLED]).splitlines()
    assert len(rows) == 4
    assert all(row in page for row in rows)
