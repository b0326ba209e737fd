"""MMA-Diffusion, the text part: prompts without the concept's words whose pooled encoding is that of the wanted prompt.

Yang et al., "MMA-Diffusion: MultiModal Attack on Diffusion Models", CVPR 2024, arXiv 2311.17516, section 3.2, by the
greedy coordinate gradient search of GCG (arXiv 2307.15043): the gradient of

    cos(pooled T(adversarial), pooled T(wanted))

with respect to the tokens' one-hot rows proposes the `top` best tokens for each place; of `candidates` prompts with one
random swap each, the best that survives being decoded and tokenised again, and has no banned word, is kept.

Differences: control tokens start as random usable tokens (the paper: random letters); the banned words are the
concept's own (the paper: a list of its own). T is the original's text encoder; the diffusion model is never asked.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.evaluation.attacks.base import Access, Attack, Round, Scene, require_positive, soft_embed
from concept_eraser.models.base import Condition, Model

CHUNK = 256


def pooled(model: Model, ids: Tensor, condition: Condition) -> Tensor:
    """The encoding at the first end token, normalised: [n, width]."""
    at = (ids == model.words.end).int().argmax(1)
    return F.normalize(condition.tensors["states"][torch.arange(len(ids), device=ids.device), at], dim=-1)


def one_hot_gradient(model: Model, tokens: Tensor, goal: Tensor) -> Tensor:
    """Of the cosine to the goal with respect to the one-hot rows of some tokens [k]: [k, V]."""
    slots = model.words.slots([""], len(tokens)).to(model.device)
    hot = F.one_hot(tokens, len(model.table)).to(model.table.dtype).requires_grad_(True)
    condition = soft_embed(model, slots, tokens[None], (hot @ model.table.detach())[None])
    likeness = pooled(model, slots.filled(tokens[None]), condition) @ goal
    return torch.autograd.grad(likeness.sum(), [hot])[0]


@dataclass(frozen=True)
class MMADiffusion(Attack):
    """tokens: the length of the adversarial prompt. The other numbers are the paper's."""

    title: ClassVar[str] = "MMA-Diffusion (text)"
    source: ClassVar[str] = "arXiv 2311.17516"
    access: ClassVar[Access] = "text encoder"

    tokens: int = 20
    iterations: int = 1000
    every: int = 250
    top: int = 256
    candidates: int = 512

    def __post_init__(self) -> None:
        require_positive(tokens=self.tokens, iterations=self.iterations, every=self.every, top=self.top, candidates=self.candidates)  # fmt: skip

    def search(self, scene: Scene) -> Generator[Round, None, None]:
        model, words = scene.original, scene.original.words
        allowed = words.usable & ~words.like(scene.concept)
        pool = allowed.nonzero()[:, 0]
        ids = model.tokenize(scene.wanted)
        with torch.no_grad():
            goals = pooled(model, ids.tensors["ids"], model.embed(ids))
        generators = [scene.generator("mma", i) for i in range(len(scene.prompts))]
        found = [pool[torch.randint(len(pool), (self.tokens,), generator=g)] for g in generators]
        scores = [-1.0] * len(found)
        for step in range(1, self.iterations + 1):
            for i in scene.live.tolist():
                found[i], scores[i] = self._improve(scene, found[i], scores[i], goals[i], allowed, generators[i])
            if step % self.every == 0 or step == self.iterations:
                live = scene.live.tolist()
                yield Round(scene.live, texts=[words.text(found[i].tolist()) for i in live], loss=-sum(scores[i] for i in live) / len(live))  # fmt: skip

    def _improve(self, scene: Scene, tokens: Tensor, score: float, goal: Tensor, allowed: Tensor, generator: torch.Generator) -> tuple[Tensor, float]:  # fmt: skip
        """One iteration of the coordinate search: the best prompt so far and its cosine."""
        model = scene.original
        gradient = one_hot_gradient(model, tokens.to(model.device), goal).cpu()
        best = gradient.masked_fill(~allowed, -torch.inf).topk(min(self.top, int(allowed.sum())), dim=1).indices
        tried = tokens.repeat(self.candidates, 1)
        place = torch.randint(self.tokens, (self.candidates,), generator=generator)
        pick = torch.randint(best.shape[1], (self.candidates,), generator=generator)
        tried[torch.arange(self.candidates), place] = best[place, pick]
        tried = tried[torch.tensor(model.words.survives(tried.tolist()))]
        scene.spend("encoder calls", len(tried) + 1)
        if not len(tried):
            return tokens, score
        ids = model.words.pack(tried.tolist()).to(model.device)
        with torch.no_grad():
            likeness = torch.cat([pooled(model, part, model.embed(Condition({"ids": part}))) @ goal for part in ids.split(CHUNK)]).cpu()  # fmt: skip
        top = int(likeness.argmax())
        return (tried[top], float(likeness[top])) if float(likeness[top]) > score else (tokens, score)


PLUGIN = MMADiffusion
