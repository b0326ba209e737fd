"""The second judge of the bundled data set, for reports only.

It differs from the first judge (`judge.py`) in architecture, seed, data and classes. It is a
transformer over an 8x8 grid of positions, behind three convolutions. Every head has the class
"none". It was trained on other drawings and on half-erased images (`half_erased.py`). No setting of
any method is selected by it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser.tiny.painter import BACKGROUNDS, COLORS, SHAPES, STYLES

CLASSES: dict[str, tuple[str, ...]] = {
    "shape": (*SHAPES, "none"),
    "color": (*COLORS, "none"),
    "style": (*STYLES, "none"),
    "background": (*BACKGROUNDS, "none"),
}
GRID = 8  # positions along each side


class Block(nn.Module):
    """A transformer block with normalisation before each part: [n, tokens, width] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the block.

        mask: [n, 1, 1, tokens], False for tokens that no other token may read.
        """
        n, tokens, width = x.shape
        parts = (n, tokens, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.norm1(x)).view(parts).permute((2, 0, 3, 1, 4))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(n, tokens, width))
        return x + self.mlp(self.norm2(x))


class SecondJudgeNet(nn.Module):
    """[n, 3, 64, 64] in [-1, 1] -> features [n, width] -> logits of four heads.

    Args:
        width: of the features, a multiple of `heads` and of 4.
        depth: transformer blocks.
        heads: of the attention.
    """

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width // 4, 5, stride=2, padding=2),  # 32 x 32
            nn.GELU(),
            nn.Conv2d(width // 4, width // 2, 3, stride=2, padding=1),  # 16 x 16
            nn.GELU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1),  # 8 x 8
        )
        self.positions = nn.Parameter(0.02 * torch.randn(GRID * GRID, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleDict(
            {name: nn.Linear(width, len(classes)) for name, classes in CLASSES.items()}
        )
        self.temperatures = nn.Buffer(torch.ones(len(CLASSES)))

    def features(self, images: Tensor) -> Tensor:
        """Return the mean over all positions, [n, width]."""
        x = self.stem(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the logits of each head, divided by its fitted temperature."""
        features = self.features(images)
        return {
            name: head(features) / temperature
            for (name, head), temperature in zip(self.heads.items(), self.temperatures, strict=True)
        }


def load_judge2(folder: Path) -> SecondJudgeNet:
    """Load the second judge from a folder with `config.json` and `model.safetensors`.

    They are stored in half precision. The network computes in fp32.
    """
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    judge = SecondJudgeNet(config["width"], config["depth"], config["heads"])
    tensors = load_file(folder / "model.safetensors")
    judge.load_state_dict({k: v.float() for k, v in tensors.items()})
    return judge.eval().requires_grad_(False)
