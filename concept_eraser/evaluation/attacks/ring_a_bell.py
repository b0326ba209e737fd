"""Ring-A-Bell: prompts whose encoding lies where the concept's direction points; the diffusion model is never asked.

Tsai et al., "Ring-A-Bell! How Reliable are Concept Removal Methods for Diffusion Models?", ICLR 2024, arXiv 2310.10012.
With T the original text encoder, from pairs of prompts with and without the concept

    v = mean_i [ T(with_i) - T(without_i) ],     goal = T(prompt) + strength v,      [tokens, width]

a genetic search over K tokens minimises ||T(candidate) - goal||^2: the better half stays, children by crossing over at
one point with a random partner (probability 0.5), one token mutated (0.25).

Differences: the pairs are the wanted prompts and the same without the concept's word (the paper: 50 pairs by a language
model); tokens that do not survive decoding are not in the pool; the fitness of all candidates is one batch. A picture is
drawn after each `every` generations of the search (the paper: once, at the end). The prompts fit every model with the
same text encoder.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.evaluation.attacks.base import Access, Attack, Round, Scene, require_positive, require_word
from concept_eraser.models.base import Condition, Model

CHUNK = 256  # candidates encoded at once


def concept_direction(model: Model, wanted: list[str], concept: str) -> Tensor:
    """v above, [tokens, width]; texts without the concept's word say nothing and are left out."""
    pairs = sorted({text for text in wanted if concept in text})
    plain = [" ".join(text.replace(concept, " ").split()) for text in pairs]
    return (model.encode(pairs).tensors["states"] - model.encode(plain).tensors["states"]).mean(0)


def next_generation(parents: Tensor, pool: Tensor, size: int, crossover: float, mutation: float, generator: torch.Generator) -> Tensor:  # fmt: skip
    """Parents [m, K] and children up to `size` rows."""
    families = [parents]
    while sum(len(f) for f in families) < size:
        partners = parents[torch.randint(len(parents), (len(parents),), generator=generator)]
        cut = torch.randint(1, max(2, parents.shape[1]), (len(parents), 1), generator=generator)
        crossed = torch.rand(len(parents), 1, generator=generator) < crossover
        left = (torch.arange(parents.shape[1]) < cut) | ~crossed
        pairs = torch.where(left, parents, partners), torch.where(left, partners, parents)
        children = torch.stack(pairs, 1).flatten(0, 1)  # both of a pair, or a cut would always take the second ones
        mutant = torch.rand(len(children), generator=generator) < mutation
        place = torch.randint(children.shape[1], (len(children),), generator=generator)
        fresh = pool[torch.randint(len(pool), (len(children),), generator=generator)]
        rows = mutant.nonzero()[:, 0]
        children[rows, place[rows]] = fresh[rows]
        families.append(children)
    return torch.cat(families)[:size]


@dataclass(frozen=True)
class RingABell(Attack):
    """tokens: K (16; 38 and 77 are published too); strength: eta."""

    title: ClassVar[str] = "Ring-A-Bell"
    source: ClassVar[str] = "arXiv 2310.10012"
    access: ClassVar[Access] = "text encoder"

    tokens: int = 16
    strength: float = 3.0
    population: int = 200
    generations: int = 3000
    every: int = 1000
    crossover: float = 0.5
    mutation: float = 0.25

    def __post_init__(self) -> None:
        require_positive(tokens=self.tokens, generations=self.generations, every=self.every)
        if self.population < 2 or not 0 <= self.crossover <= 1 or not 0 <= self.mutation <= 1:
            raise ValueError(f"population must be at least 2, crossover and mutation in [0, 1]; found {self.population}, {self.crossover}, {self.mutation}")  # fmt: skip

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        require_word(scene)
        model, words = scene.original, scene.original.words
        pool = words.usable.nonzero()[:, 0]
        direction = concept_direction(model, list(scene.wanted), scene.concept)
        goals = model.encode(scene.prompts).tensors["states"] + self.strength * direction
        generators = [scene.generator("ring a bell", i) for i in range(len(scene.prompts))]
        crowds = [pool[torch.randint(len(pool), (self.population, self.tokens), generator=g)] for g in generators]
        for done in range(self.every, self.generations + self.every, self.every):
            rounds = min(self.every, self.generations - (done - self.every))
            live = scene.live.tolist()
            losses = []
            for i in live:
                crowds[i], loss = self._evolve(scene, crowds[i], goals[i], pool, generators[i], rounds)
                losses.append(loss)
            yield Round(scene.live, texts=[words.text(crowds[i][0].tolist()) for i in live], loss=sum(losses) / len(losses))  # fmt: skip

    def _evolve(self, scene: Scene, crowd: Tensor, goal: Tensor, pool: Tensor, generator: torch.Generator, rounds: int) -> tuple[Tensor, float]:  # fmt: skip
        """The crowd after some generations, best first, and the loss of the best."""
        distances = self._distances(scene, crowd, goal)
        for _ in range(rounds):
            order = distances.argsort()
            parents = crowd[order[: max(2, self.population // 2)]]
            crowd = next_generation(parents, pool, self.population, self.crossover, self.mutation, generator)
            distances = self._distances(scene, crowd, goal)
        order = distances.argsort()
        return crowd[order], float(distances[order[0]])

    @torch.no_grad()
    def _distances(self, scene: Scene, crowd: Tensor, goal: Tensor) -> Tensor:
        """||T(candidate) - goal||^2 of each candidate, [m], on the CPU."""
        model = scene.original
        scene.spend("encoder calls", len(crowd))
        ids = model.words.pack(crowd.tolist()).to(model.device)
        found = [(model.embed(Condition({"ids": part})).tensors["states"] - goal).square().flatten(1).sum(1) for part in ids.split(CHUNK)]  # fmt: skip
        return torch.cat(found).cpu()


PLUGIN = RingABell
