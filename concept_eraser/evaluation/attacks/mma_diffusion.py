"""MMA-Diffusion (text part): prompts without the concept's words that match the wanted encoding.

Yang et al., "MMA-Diffusion: MultiModal Attack on Diffusion Models", CVPR 2024, arXiv 2311.17516,
section 3.2, by the greedy coordinate gradient search of GCG (arXiv 2307.15043). The authors' code
is cure-lab/MMA-Diffusion, src/textual_attack.py. The objective is

    cos(pooled T(adversarial), pooled T(concept prompt)).

Its gradient with respect to the tokens' one-hot rows proposes the `top` best tokens for each place.
`candidates` prompts have one random swap each. Candidates must be stable under decoding and
tokenisation, differ from the present prompt, and have no banned word. The search moves to the best
of them, also if it is worse than the present prompt, and remembers the best prompt of all steps
(lines 242-247 and 279-291).

Differences: control tokens start as random usable tokens (the code: random letters, line 372). The
banned words are the concept's own (the code: a list, lines 329-357). Tokens are those that a text
of one token gives again (the code: all but the banned ones), and candidates must have the same
tokens again (the code: as many, line 192). The code's gradient begins at the start token, so that
each place gets the proposals of the place before it. An image is generated after each `every`
iterations (the code: once, at the end). The place of each swap is random (the code: each place has
an equal number of candidates, line 148). T is the original's text encoder; the diffusion model is
not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.evaluation.attacks.base import (
    Access,
    Family,
    Scene,
    require_positive,
    soft_embed,
)
from concept_eraser.evaluation.attacks.blind import BlindAttack, Offer
from concept_eraser.models.base import Condition, Model

CHUNK = 256


def pool(model: Model, ids: Tensor, condition: Condition) -> Tensor:
    """The encoding at the first end token, normalised: [n, width]."""
    at = (ids == model.words.end).int().argmax(1)
    return F.normalize(
        condition.tensors["states"][torch.arange(len(ids), device=ids.device), at], dim=-1
    )


def one_hot_gradient(model: Model, tokens: Tensor, goal: Tensor) -> Tensor:
    """Gradient [k, V] of the cosine to the goal with respect to the one-hot rows of tokens [k]."""
    slots = model.words.slots([""], len(tokens)).to(model.device)
    hot = F.one_hot(tokens, len(model.table)).to(model.table.dtype).requires_grad_(True)
    condition = soft_embed(model, slots, tokens[None], (hot @ model.table.detach())[None])
    likeness = pool(model, slots.fill(tokens[None]), condition) @ goal
    return torch.autograd.grad(likeness.sum(), [hot])[0]


@dataclass(frozen=True)
class MMADiffusion(BlindAttack):
    """Search tokens whose encoding is that of the concept prompt. The defaults are the paper's.

    Args:
        tokens: The length of the adversarial prompt, in tokens.
        iterations: The number of steps of the search.
        every: Each prompt gets an image after this number of steps.
        top: The number of proposed tokens for each place.
        candidates: The number of prompts that are tried in a step, each with one swap.
    """

    title: ClassVar[str] = "MMA-Diffusion (text)"
    source: ClassVar[str] = "arXiv 2311.17516"
    family: ClassVar[Family] = "typed prompts"
    access: ClassVar[Access] = "text encoder"
    revision: ClassVar[int] = 1

    tokens: int = 20
    iterations: int = 1000
    every: int = 250
    top: int = 256
    candidates: int = 512

    def __post_init__(self) -> None:
        require_positive(
            tokens=self.tokens,
            iterations=self.iterations,
            every=self.every,
            top=self.top,
            candidates=self.candidates,
        )

    def goals(self, scene: Scene) -> Tensor:
        ids = scene.original.tokenize(scene.concept_prompts)
        with torch.no_grad():
            return pool(scene.original, ids.tensors["ids"], scene.original.embed(ids))

    def pursue(self, scene: Scene, goal: Tensor, generator: torch.Generator) -> Iterator[Offer]:
        """The best text of all iterations so far, after each `every` iterations."""
        model = scene.original
        vocabulary = model.words.usable & ~model.words.like(scene.concept)
        pool = vocabulary.nonzero()[:, 0]
        tokens = pool[torch.randint(len(pool), (self.tokens,), generator=generator)]
        best_tokens, best_score, calls = tokens, -1.0, 0
        for step in range(1, self.iterations + 1):
            tokens, score, count = self._move(
                model, tokens, goal=goal, allowed_tokens=vocabulary, generator=generator
            )
            calls += count + 1
            if score > best_score:
                best_tokens, best_score = tokens, score
            if step % self.every == 0 or step == self.iterations:
                yield Offer(model.words.text(best_tokens.tolist()), -best_score, calls)
                calls = 0

    def _move(
        self,
        model: Model,
        tokens: Tensor,
        *,
        goal: Tensor,
        allowed_tokens: Tensor,
        generator: torch.Generator,
    ) -> tuple[Tensor, float, int]:
        """One iteration of the search: the best candidate, its cosine, the number of candidates.

        Without a candidate these are the present prompt, -infinity and 0.
        """
        gradient = one_hot_gradient(model, tokens.to(model.device), goal).cpu()
        best = (
            gradient.masked_fill(~allowed_tokens, -torch.inf)
            .topk(min(self.top, int(allowed_tokens.sum())), dim=1)
            .indices
        )
        swaps = tokens.repeat(self.candidates, 1)
        place = torch.randint(self.tokens, (self.candidates,), generator=generator)
        pick = torch.randint(best.shape[1], (self.candidates,), generator=generator)
        swaps[torch.arange(self.candidates), place] = best[place, pick]
        swaps = swaps[(swaps != tokens).any(1)]
        swaps = swaps[torch.tensor(model.words.survives(swaps.tolist()), dtype=torch.bool)]
        if not len(swaps):
            return tokens, -float("inf"), 0
        ids = model.words.pack(swaps.tolist()).to(model.device)
        with torch.no_grad():
            likeness = torch.cat(
                [
                    pool(model, part, model.embed(Condition({"ids": part}))) @ goal
                    for part in ids.split(CHUNK)
                ]
            ).cpu()
        top = int(likeness.argmax())
        return swaps[top], float(likeness[top]), len(swaps)


PLUGIN = MMADiffusion
