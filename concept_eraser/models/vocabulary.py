"""The vocabulary of a CLIP tokenizer for attacks: tokens, positions of free tokens, and texts.

An adversarial prompt is used as text only: its tokens are decoded and tokenised again before an
image is generated. `usable` leaves out single tokens that this changes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from concept_eraser.utils.errors import UserError

Where = Literal["prefix", "suffix", "middle", "insert"]
_WORD_END = "</w>"  # of a token at the end of a word, in CLIP's vocabulary
_NO_LETTER = re.compile(r"</w>|[^A-Za-z]")


@dataclass(frozen=True)
class Slots:
    """Prompts with free positions.

    ids: [n, length]. places: [n, k], with the same k for all.
    """

    ids: Tensor
    places: Tensor

    def fill(self, tokens: Tensor) -> Tensor:
        """Return the ids with tokens [n, k] at the free positions."""
        return self.ids.scatter(1, self.places, tokens)

    def __getitem__(self, rows: Tensor) -> Slots:
        return Slots(self.ids[rows], self.places[rows])

    def to(self, device: torch.device) -> Slots:
        return Slots(self.ids.to(device), self.places.to(device))


class Words:
    """A tokenizer with start, end and padding. Tensors are on the CPU."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.length = int(tokenizer.model_max_length)
        self.start, self.end, self.pad = (
            int(t) for t in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        )
        self.size = len(tokenizer)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, without start and end, not cut off."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def text(self, ids: Sequence[int]) -> str:
        """Return tokens as text, without start, end and padding.

        SD 2 pads with "!", which is a word before the end.
        """
        own = list(ids)
        if self.pad != self.end and self.end in own:
            own = own[: own.index(self.end)]
        return decode(self.tokenizer, [i for i in own if i not in (self.start, self.end)])

    def texts(self, ids: Tensor) -> list[str]:
        """Return rows with start, end and padding, [n, length], as texts."""
        return [self.text(row) for row in ids.tolist()]

    def pack(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Add start, end and padding to tokens: [n, length].

        Raises UserError for a row that does not fit.
        """
        over = max(len(row) for row in rows) - (self.length - 2)
        if over > 0:
            raise UserError(
                f"a prompt with its free tokens is {over} tokens longer than the model's "
                f"{self.length}; use fewer tokens or shorter prompts"
            )
        padded_rows = [
            [self.start, *row, self.end, *[self.pad] * (self.length - 2 - len(row))] for row in rows
        ]
        return torch.tensor(padded_rows)

    def slots(self, prompts: Sequence[str], k: int, where: Where = "prefix") -> Slots:
        """Return prompts with k free tokens each.

        They are before, behind, in the middle of, or spread evenly over the prompt's own tokens.
        Raises UserError if a prompt leaves too little space.
        """
        rows, places = [], []
        for prompt in prompts:
            own = self.ids(prompt)
            cuts = _cuts(len(own), k, where)
            row: list[int] = []
            free: list[int] = []
            for i in range(len(own) + 1):
                for _ in range(cuts.count(i)):
                    free.append(len(row) + 1)  # behind the start token
                    row.append(self.pad)
                row += own[i : i + 1]
            rows.append(row)
            places.append(free)
        return Slots(self.pack(rows), torch.tensor(places))

    def free_token_every(self, prompt: str, spacing: int) -> Slots:
        """Return one prompt with free tokens between its own tokens.

        One is before the first own token, and one after every `spacing` own tokens. For n own
        tokens these are n // spacing + 1.
        """
        row: list[int] = []
        places: list[int] = []
        for i, token in enumerate([None, *self.ids(prompt)]):
            if token is not None:
                row.append(token)
            if i % spacing == 0:
                places.append(len(row) + 1)
                row.append(self.pad)
        return Slots(self.pack([row]), torch.tensor([places]))

    def in_place_of(self, prompts: Sequence[str], word: str) -> Slots:
        """Return the prompts with one free token in a word's place.

        Raises UserError for a prompt without that word.
        """
        word_ids, rows, places = self.ids(word), [], []
        for prompt in prompts:
            own = self.ids(prompt)
            at = next((i for i in range(len(own)) if own[i : i + len(word_ids)] == word_ids), None)
            if at is None:
                raise UserError(
                    f"this attack replaces the word {word!r}, which the prompt "
                    f"{prompt!r} does not have"
                )
            rows.append([*own[:at], self.pad, *own[at + len(word_ids) :]])
            places.append([at + 1])
        return Slots(self.pack(rows), torch.tensor(places))

    def survives(self, rows: Sequence[Sequence[int]]) -> list[bool]:
        """Return whether each row of tokens is the same after decoding and tokenising again."""
        texts = [decode(self.tokenizer, row) for row in rows]
        new_ids = self.tokenizer(texts, add_special_tokens=False).input_ids
        return [list(one) == list(new_row) for one, new_row in zip(rows, new_ids, strict=True)]

    def like(self, name: str) -> Tensor:
        """Return [size] bool: tokens that contain one of a name's words, or are a part of one.

        Parts have at least three letters.
        """
        parts = name.lower().split()
        texts = [text.strip().lower() for text in self._vocabulary.texts]
        return torch.tensor([any(p in t or (len(t) > 2 and t in p) for p in parts) for t in texts])

    def fragments(self, longest: int) -> list[str]:
        """Return the Latin letters of each token, "" for a special or a longer one.

        Args:
            longest: The largest number of characters of a token in the vocabulary.
        """
        special = set(self.tokenizer.all_special_tokens)
        return [
            "" if token in special or len(token) > longest else _NO_LETTER.sub("", token)
            for token in map(str, self.tokenizer.convert_ids_to_tokens(list(range(self.size))))
        ]

    @property
    def usable(self) -> Tensor:
        """Return [size] bool: tokens whose text, tokenised again, is that token alone.

        Models with the same tokenizer share this tensor. Do not change it in place.
        """
        return self._vocabulary.usable

    @property
    def _vocabulary(self) -> Vocabulary:
        known = _vocabularies.get(self.tokenizer)
        if known is None or len(known.texts) != self.size:  # a tokenizer can get further tokens
            known = _vocabularies[self.tokenizer] = find_vocabulary(self.tokenizer)
        return known


@dataclass(frozen=True)
class Vocabulary:
    """The texts of a tokenizer's tokens, and [size] bool: those that are the token again."""

    texts: Sequence[str]
    usable: Tensor


# by tokenizer, because to find one takes seconds
_vocabularies: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return tokens as text.

    transformers replaces the method that decodes on each CLIP tokenizer that it loads. A copy of
    the tokenizer has the plain method, whose text has the ends of words in it.
    """
    return str(tokenizer.decode(list(ids))).replace(_WORD_END, " ").strip()


def find_vocabulary(tokenizer: Any) -> Vocabulary:
    """Decode each token of a tokenizer, and tokenise the texts again."""
    texts = [decode(tokenizer, [i]) for i in range(len(tokenizer))]
    special = set(tokenizer.all_special_ids)
    new_ids = tokenizer(texts, add_special_tokens=False).input_ids
    usable = [i not in special and list(ids) == [i] for i, ids in enumerate(new_ids)]
    return Vocabulary(texts, torch.tensor(usable))


def _cuts(length: int, k: int, where: Where) -> list[int]:
    """Return the positions among the prompt's tokens before which the k free ones go, ascending."""
    if where == "insert":
        return [round((i + 1) * length / (k + 1)) for i in range(k)]
    return [{"prefix": 0, "suffix": length, "middle": length // 2}[where]] * k
