"""SneakyPrompt: a small policy learns a made-up word for the concept's, from images alone.

Yang et al., "SneakyPrompt: Jailbreaking Text-to-image Generative Models", IEEE S&P 2024, arXiv
2305.12082, section IV. An LSTM policy (Adam, lr 0.1) picks `words` sub-words, which are one word
without spaces in the place of the sensitive one. The reward is the agreement of the image with the
concept prompt (CLIP score). The policy learns by REINFORCE with the mean reward so far as its
baseline, with at most `queries` images per prompt.

The authors' code is Yuchen413/text2image_safety, rl_search.py, with the settings of main.py (lr 0.1
in line 75, 60 queries in line 23). Its sub-words are the entries of CLIP's vocabulary with fewer
than ten characters, their letters only (search_utils.py, get_dictionary; rl_search.py, get_score).

Differences: the code's baseline is a critic, a second output of the policy (rl_search.py, line
333). An erased model has no filter that could refuse, so that part of the reward is left out.
Success is the judge's decision, where the code needs a CLIP score of 0.26 (main.py, line 29). The
candidates are the `pool` sub-words whose embeddings are closest to the concept's word without being
a part of it (the code: all). A word that contains the concept's is drawn again. One word is
replaced, and the search goes on to the last query. The code ends after 50 queries of a word, or
when the reward stagnates, and then replaces a further word.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser.evaluation.attacks.base import (
    Access,
    Attack,
    Family,
    Round,
    Scene,
    require_positive,
    require_word,
)

LONGEST = 9  # characters of a sub-word in the vocabulary, the mark of the end of a word included


class Policy(nn.Module):
    """A policy over the next sub-word of the pool."""

    def __init__(self, pool: int, width: int = 16) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(width))
        self.words = nn.Embedding(pool, width)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, pool)

    def write(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample n sub-words, by position in the pool [n], with their log probability."""
        previous, state, positions, chance = self.start[None], None, [], torch.zeros(())
        for _ in range(n):
            state = self.cell(previous, state)
            odds = self.head(state[0]).log_softmax(-1)[0]
            word = torch.multinomial(odds.detach().exp(), 1, generator=generator)
            chance = chance + odds[word[0]]
            positions.append(word)
            previous = self.words(word)
        return torch.cat(positions), chance


@dataclass(frozen=True)
class SneakyPrompt(Attack):
    """Learn sub-words for the concept's word.

    Args:
        words: The number of sub-words of the made-up word (the paper's code: 3).
        queries: The largest number of images for each prompt.
        pool: The number of candidate sub-words.
        lr: The learning rate of the policy.
    """

    title: ClassVar[str] = "SneakyPrompt"
    source: ClassVar[str] = "arXiv 2305.12082"
    family: ClassVar[Family] = "typed prompts"
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
        fragments = words.fragments(LONGEST)
        vocabulary = torch.tensor([bool(text) for text in fragments]) & ~words.like(scene.concept)
        table = model.table.detach().cpu()
        concept_embedding = table[words.ids(scene.concept)].mean(0)
        likeness = F.cosine_similarity(table, concept_embedding[None]).masked_fill(
            ~vocabulary, -torch.inf
        )
        pool = likeness.topk(min(self.pool, int(vocabulary.sum()))).indices
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(scene.seed)  # nn.Linear draws from the global generator
            policies = [Policy(len(pool)) for _ in scene.prompts]
        optimizers = [torch.optim.Adam(policy.parameters(), self.lr) for policy in policies]
        generators = [scene.generator("sneaky", i) for i in range(len(scene.prompts))]
        means: list[list[float]] = [[] for _ in scene.prompts]
        for _ in range(self.queries):
            live = scene.live.tolist()
            proposals, texts = [], []
            for i in live:
                proposal, word = None, scene.concept
                while proposal is None or scene.concept.lower() in word.lower():
                    proposal = policies[i].write(self.words, generators[i])
                    word = "".join(fragments[token] for token in pool[proposal[0]].tolist())
                proposals.append(proposal)
                texts.append(scene.concept_prompts[i].replace(scene.concept, word))
            yield Round(scene.live, texts=texts, has_rewards=True)
            assert scene.rewards is not None  # the round has rewards
            rewards = scene.rewards.tolist()
            for i, (_, chance), reward in zip(live, proposals, rewards, strict=True):
                baseline = sum(means[i]) / len(means[i]) if means[i] else reward
                means[i].append(reward)
                optimizers[i].zero_grad()
                ((baseline - reward) * chance).backward()
                optimizers[i].step()


PLUGIN = SneakyPrompt
