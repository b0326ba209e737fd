"""The second CLIP of the bundled data set, for the CLIP score only.

No part of it is a part of the bundled pipeline, whose text encoder belongs to the first CLIP. It
differs from the first CLIP in architecture, seed, captions and vocabulary. Its image tower is a
residual convolutional network. Its text tower reads in both directions and averages over the words.
It has an embedding for each token of the captions of the data set, and one for all other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser.tiny import painter
from concept_eraser.tiny.judge2 import Block

UNKNOWN = 0  # the row of the embedding table for tokens that no caption has
LENGTH = 77


def caption_words() -> list[str]:
    """Return texts that together have every token of the captions, in a fixed order."""
    tables = (
        painter.SYNONYMS,
        painter.COLOR_SYNONYMS,
        painter.STYLE_WORDS,
        painter.BACKGROUND_PHRASES,
    )
    phrases = [phrase for table in tables for values in table.values() for phrase in values]
    names = [*painter.SHAPES, *painter.COLORS, *painter.GENERIC_NOUNS, *painter.PREFIXES]
    return [*names, *phrases, "a", "an"]


class _Residual(nn.Module):
    """Two convolutions with a shortcut: [n, inputs, h, w] -> [n, outputs, h / 2, w / 2]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return y + self.shortcut(F.avg_pool2d(x, 2))


class SecondClipNet(nn.Module):
    """Images and token ids -> unit vectors [n, width] of one space.

    Args:
        tokens: the ids of the tokenizer that have an embedding of their own, [rows - 1].
        width: of the embeddings, and of the text tower. A multiple of `heads`.
        channels: of the first convolution. Each of three residual blocks doubles them once, and
            the last keeps them.
        depth: blocks of the text tower.
        heads: of its attention.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        width: int = 96,
        channels: int = 32,
        depth: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        c = channels
        self.image_tower = nn.Sequential(
            nn.Conv2d(3, c, 5, stride=2, padding=2),  # 32 x 32
            _Residual(c, 2 * c),  # 16 x 16
            _Residual(2 * c, 4 * c),  # 8 x 8
            _Residual(4 * c, 4 * c),  # 4 x 4
            nn.GroupNorm(8, 4 * c),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * c, width),
        )
        self.tokens = nn.Buffer(torch.tensor(sorted(tokens)))
        self.words = nn.Embedding(len(tokens) + 1, width)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.projection = nn.LayerNorm(width), nn.Linear(width, width)
        self.logit_scale = nn.Parameter(torch.tensor(2.66))  # the logarithm of 1 / 0.07

    def embed_images(self, images: Tensor) -> Tensor:
        """Return unit vectors [n, width] of images [n, 3, 64, 64] in [-1, 1]."""
        return F.normalize(self.image_tower(images).float(), dim=-1)

    def rows_of(self, ids: Tensor) -> Tensor:
        """Return the rows of the embedding table for ids of the tokenizer, of any shape."""
        places = torch.searchsorted(self.tokens, ids).clamp(max=len(self.tokens) - 1)
        return torch.where(self.tokens[places] == ids, places + 1, UNKNOWN)

    def embed_rows(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Return unit vectors [n, width] of rows of the embedding table.

        Args:
            rows: [n, length].
            mask: [n, length], true for tokens, false for padding.
        """
        x = self.words(rows) + self.positions[: rows.shape[1]]
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        shares = mask.float() / mask.sum(1, keepdim=True)
        pooled = (self.norm(x) * shares[:, :, None]).sum(1)
        return F.normalize(self.projection(pooled).float(), dim=-1)

    def embed_ids(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return unit vectors [n, width] of token ids [n, length]; mask as `embed_rows`."""
        return self.embed_rows(self.rows_of(ids), mask.bool())


def tokenize(tokenizer: Callable, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return token ids and their mask, each [n, length]. A text has at most 77 tokens."""
    batch = tokenizer(
        list(texts), padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
    )
    return batch.input_ids, batch.attention_mask.bool()


def load_clip2(folder: Path) -> SecondClipNet:
    """Load the second CLIP from a folder with `config.json` and `model.safetensors`.

    They are stored in half precision. The network computes in fp32.
    """
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    clip = SecondClipNet(
        tensors["tokens"].tolist(),
        width=config["width"],
        channels=config["channels"],
        depth=config["depth"],
        heads=config["heads"],
    )
    clip.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()})
    return clip.eval().requires_grad_(False)
