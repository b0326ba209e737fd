"""SneakyPrompt: a small policy learns, from pictures alone, which sub-words to write for the concept's word.

Yang et al., "SneakyPrompt: Jailbreaking Text-to-image Generative Models", IEEE S&P 2024, arXiv 2305.12082, section IV:
an LSTM policy (Adam, lr 0.1) picks up to `words` sub-words for the sensitive word; the reward is the agreement of the
picture with the wanted prompt (CLIP score), learned by REINFORCE with the mean reward so far as its baseline; at most
`queries` pictures a prompt.

Differences: an erased model has no filter that could refuse, so that part of the reward is left out, and success is the
judge's word where the paper asks for a CLIP score of 0.26. The candidate sub-words are the `pool` usable tokens whose
embeddings are most like the concept's word without containing it; the paper searches a vocabulary of its own.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser.evaluation.attacks.base import Access, Attack, Round, Scene, require_positive, require_word


class Policy(nn.Module):
    """Which of the pool's sub-words comes next."""

    def __init__(self, pool: int, width: int = 16) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(width))
        self.words = nn.Embedding(pool, width)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, pool)

    def write(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """n sub-words, by position in the pool [n], and the log probability of having written them."""
        given, state, written, chance = self.start[None], None, [], torch.zeros(())
        for _ in range(n):
            state = self.cell(given, state)
            odds = self.head(state[0]).log_softmax(-1)[0]
            word = torch.multinomial(odds.detach().exp(), 1, generator=generator)
            chance = chance + odds[word[0]]
            written.append(word)
            given = self.words(word)
        return torch.cat(written), chance


@dataclass(frozen=True)
class SneakyPrompt(Attack):
    """words: sub-words for the concept's word (the paper: at most 3); pool: candidates; lr: of the policy."""

    title: ClassVar[str] = "SneakyPrompt"
    source: ClassVar[str] = "arXiv 2305.12082"
    access: ClassVar[Access] = "queries"
    needs_captions: ClassVar[bool] = True

    words: int = 3
    queries: int = 60
    pool: int = 500
    lr: float = 0.1

    def __post_init__(self) -> None:
        require_positive(words=self.words, queries=self.queries, pool=self.pool, lr=self.lr)

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        require_word(scene)
        model, words = scene.original, scene.original.words
        allowed = words.usable & ~words.like(scene.concept)
        table = model.table.detach().cpu()
        own = table[words.ids(scene.concept)].mean(0)
        likeness = F.cosine_similarity(table, own[None]).masked_fill(~allowed, -torch.inf)
        pool = likeness.topk(min(self.pool, int(allowed.sum()))).indices
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(scene.seed)  # nn.Linear draws from the global generator
            policies = [Policy(len(pool)) for _ in scene.prompts]
        optimizers = [torch.optim.Adam(policy.parameters(), self.lr) for policy in policies]
        generators = [scene.generator("sneaky", i) for i in range(len(scene.prompts))]
        means: list[list[float]] = [[] for _ in scene.prompts]
        for _ in range(self.queries):
            live = scene.live.tolist()
            written = [policies[i].write(self.words, generators[i]) for i in live]
            texts = [scene.wanted[i].replace(scene.concept, words.text(pool[w].tolist())) for i, (w, _) in zip(live, written, strict=True)]  # fmt: skip
            yield Round(scene.live, texts=texts, rewarded=True)
            assert scene.rewards is not None  # the round asked for them
            rewards = scene.rewards.tolist()
            for i, (_, chance), reward in zip(live, written, rewards, strict=True):
                baseline = sum(means[i]) / len(means[i]) if means[i] else reward
                means[i].append(reward)
                optimizers[i].zero_grad()
                ((baseline - reward) * chance).backward()
                optimizers[i].step()


PLUGIN = SneakyPrompt
