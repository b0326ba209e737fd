"""Ring-A-Bell: prompts whose encoding follows the concept's direction in the text encoder.

Tsai et al., "Ring-A-Bell! How Reliable are Concept Removal Methods for Diffusion Models?", ICLR
2024, arXiv 2310.10012. With T the original text encoder, from pairs of prompts with and without the
concept

    v = mean_i [ T(with_i) - T(without_i) ],     goal = T(prompt) + strength v,      [tokens, width]

A genetic search over K tokens minimises ||T(candidate) - goal||^2. The better half stays. Children
come from crossover at one point with a random partner (probability 0.5). One token mutates (0.25).

The authors' code is chiayi-hsu/Ring-A-Bell, Get_Concept_Vector.ipynb and InversePrompt.ipynb.

Differences: the pairs are the concept prompts and the same without the concept's word (the code: 50
rows of its own for nudity, 30 for violence). Only children mutate (the code: parents too). A pair
without crossover has two children that are its copies, and the number of candidates is constant, so
that the best half of the parents breed. In the code it has none, all parents breed, and the number
varies around `population`. On two prompts and 150 generations neither was nearer to both goals. The
pool leaves out tokens that change under decoding. The fitness of all candidates is one batch. An
image is generated after each `every` generations of the search (the code: once, at the end). The
prompts apply to every model with the same text encoder, so they are stored for the next one. The
diffusion model is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from concept_eraser.evaluation.attacks.base import (
    Access,
    Family,
    Scene,
    require_positive,
    require_word,
)
from concept_eraser.evaluation.attacks.blind import BlindAttack, Offer
from concept_eraser.models.base import Condition, Model

CHUNK = 256  # candidates per forward pass


def concept_direction(model: Model, concept_texts: list[str], concept: str) -> Tensor:
    """The direction v above, [tokens, width]. Texts without the concept's word are left out."""
    pairs = sorted({text for text in concept_texts if concept in text})
    plain = [" ".join(text.replace(concept, " ").split()) for text in pairs]
    return (model.encode(pairs).tensors["states"] - model.encode(plain).tensors["states"]).mean(0)


def next_generation(
    parents: Tensor,
    pool: Tensor,
    size: int,
    crossover: float,
    mutation: float,
    generator: torch.Generator,
) -> Tensor:
    """Parents [m, K] and children up to `size` rows."""
    families = [parents]
    while sum(len(f) for f in families) < size:
        partners = parents[torch.randint(len(parents), (len(parents),), generator=generator)]
        cut_point = torch.randint(
            1, max(2, parents.shape[1]), (len(parents), 1), generator=generator
        )
        crossover_mask = torch.rand(len(parents), 1, generator=generator) < crossover
        first_part = (torch.arange(parents.shape[1]) < cut_point) | ~crossover_mask
        pairs = (
            torch.where(first_part, parents, partners),
            torch.where(first_part, partners, parents),
        )
        # interleave both children of a pair, or the cut at `size` would drop the second ones only
        children = torch.stack(pairs, 1).flatten(0, 1)
        mutant = torch.rand(len(children), generator=generator) < mutation
        place = torch.randint(children.shape[1], (len(children),), generator=generator)
        new_tokens = pool[torch.randint(len(pool), (len(children),), generator=generator)]
        rows = mutant.nonzero()[:, 0]
        children[rows, place[rows]] = new_tokens[rows]
        families.append(children)
    return torch.cat(families)[:size]


@dataclass(frozen=True)
class RingABell(BlindAttack):
    """Search tokens whose encoding is the prompt's, moved along the concept's direction.

    Args:
        tokens: K, the number of tokens. The paper has 16, 38 and 77; its code takes 75 for 77.
        strength: The factor of the concept's direction.
        population: The number of candidates in a generation.
        generations: The number of generations.
        every: Each prompt gets an image after this number of generations.
        crossover: The probability that a pair exchanges its ends.
        mutation: The probability that one token of a child is drawn anew.
    """

    title: ClassVar[str] = "Ring-A-Bell"
    source: ClassVar[str] = "arXiv 2310.10012"
    family: ClassVar[Family] = "typed prompts"
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
            raise ValueError(
                "population must be at least 2, crossover and mutation in [0, 1]; found "
                f"{self.population}, {self.crossover}, {self.mutation}"
            )

    def goals(self, scene: Scene) -> Tensor:
        require_word(scene)
        direction = concept_direction(
            scene.original, list(scene.corpus or scene.concept_prompts), scene.concept
        )
        return scene.original.encode(scene.prompts).tensors["states"] + self.strength * direction

    def pursue(self, scene: Scene, goal: Tensor, generator: torch.Generator) -> Iterator[Offer]:
        """The best text after each `every` generations."""
        model = scene.original
        pool = model.words.usable.nonzero()[:, 0]
        crowd = pool[torch.randint(len(pool), (self.population, self.tokens), generator=generator)]
        distances, calls = distances_to(model, crowd, goal), len(crowd)
        for generation in range(1, self.generations + 1):
            parents = crowd[distances.argsort()[: max(2, self.population // 2)]]
            crowd = next_generation(
                parents,
                pool,
                size=self.population,
                crossover=self.crossover,
                mutation=self.mutation,
                generator=generator,
            )
            distances = distances_to(model, crowd, goal)
            calls += len(crowd)
            if generation % self.every == 0 or generation == self.generations:
                best = int(distances.argmin())
                yield Offer(model.words.text(crowd[best].tolist()), float(distances[best]), calls)
                calls = 0


@torch.no_grad()
def distances_to(model: Model, crowd: Tensor, goal: Tensor) -> Tensor:
    """||T(candidate) - goal||^2 of each candidate, [m], on the CPU."""
    ids = model.words.pack(crowd.tolist()).to(model.device)
    parts = [
        (model.embed(Condition({"ids": part})).tensors["states"] - goal).square().flatten(1).sum(1)
        for part in ids.split(CHUNK)
    ]
    return torch.cat(parts).cpu()


PLUGIN = RingABell
