"""Safeguards at inference that change what the denoiser reads of a prompt.

They change no weights. c is the text to avoid; for SAFREE it may be several texts with commas
between them. The equations of the three papers were not read here. The definitions are those of the
authors' code.

* adavd: AdaVD (Wang, Li, Mu, Hao, Liu, Wang & He, arXiv 2412.06143; src/main.py, lines 52-75 and
  90-119, of WYuan1001/AdaVD at commit c2d2962). In each cross-attention layer a token has the
  values v: those of the empty prompt and those of the prompt, joined to one vector. t are the
  joined values of the empty prompt and of c. The last token of c stands at each place but the first
  (src/utils.py, line 45). For all tokens but the first, v becomes

      v - (v . t / t . t) t

  So the values of the empty prompt change too. `adavd-adaptive` has the paper's shift factor, the
  code's option `token_sim`: the subtracted part is multiplied by 2 / (1 + exp(-100 (cos(v, t) -
  0.93))).

* safree: SAFREE (Yoon, Yu, Patil, Yao & Bansal, arXiv 2410.12761; lines 16-100 and 440-525 of
  models/modified_stable_diffusion_pipeline.py of jaehong31/SAFREE at commit b8b2c3f). P_C projects
  on the span of the pooled states of the texts c. p_i is the pooled state of the prompt with the
  token i of its words replaced by token 0, and P_I projects on the span of all p_i. With d_i = |(I
  - P_C) p_i|, token i triggers if d_i >= 1.01 times the mean of the other d_j. The state s of a
  token that triggers becomes (I - P_C) P_I s. `safree-validated` is the code's option `svf`, which
  all its commands have: only the first steps have these states. With b = 1 - mean over tokens of
  cos(s, (I - P_C) P_I s) they are the first 1 + round(10 sigmoid(5 (10 b - 5.333))) of 50.

* semantic-surgery: Semantic Surgery (Xiong, Liu, Ye, Liu & Xu, arXiv 2510.22851; src/utils.py,
  lines 19-58 and `get_multi_erased_embedding`, of Lexiang-Xiong/Semantic-Surgery at commit
  009dbf6). s, e and n are the states of the prompt, of c and of the empty prompt. With

      alpha = sigmoid((mean over tokens of cos(e - n, s) - 0.12) / 0.02)

  s becomes s - alpha (e - n) if alpha >= 0.5. The bias is that of its object commands.

Left out: several concepts in AdaVD (an orthogonal basis) and in Semantic Surgery (the joined text
of the concepts that it detects), SAFREE's re-attention in Fourier space, and Semantic Surgery's
second pass with an object detector. In SAFREE's code a prompt of one token triggers, since its mean
over no other token is no number; here it does not. AdaVD's code does not change a step at time 0;
here all steps change. The steps of `safree-validated` are the same share of any number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from concept_eraser.models import cross_attention
from concept_eraser.models.base import Condition
from concept_eraser.utils.errors import UserError, quote

SHIFT = (100.0, 0.93, 2.0)  # AdaVD: slope, centre and limit of the shift
TRIGGER = 0.01  # SAFREE: how much a token's distance exceeds the mean of the others'
STEPS = 50  # steps of the samplers to which the steps of SAFREE refer
SAFREE_STEPS, SAFREE_SLOPE, SAFREE_CENTRE = 10, 2.5, 5.333  # its settings for unsafe concepts
SURGERY = (-0.12, 0.02, 0.5)  # Semantic Surgery: bias, width and threshold of alpha
NEEDS_GUIDANCE = (
    "a safeguard works through classifier-free guidance; sample with a guidance above 1"
)


@contextmanager
def values(model: Any, text: str, prompts: Any, *, adaptive: bool = False) -> Iterator[None]:
    """Sample images of these prompts under AdaVD inside the context."""
    states = model.encode([text]).tensors["states"]
    last = _end(model, text) - 1
    target = torch.cat([states[:, :1], states[:, last : last + 1].expand_as(states[:, 1:])], dim=1)
    empty = model.encode([""]).tensors["states"]
    handles = []
    try:
        for layer in cross_attention.layers(model.denoiser):
            project: Any = layer.to_v
            with torch.no_grad():
                joined = torch.cat([project(empty), project(target)], dim=-1)
            hook = _value_hook(joined, len(prompts), adaptive=adaptive)
            handles.append(project.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _value_hook(target: Tensor, n: int, *, adaptive: bool) -> Callable[..., Tensor]:
    def replace(module: Any, inputs: Any, output: Tensor) -> Tensor:
        if len(output) != 2 * n:
            raise UserError(NEEDS_GUIDANCE)
        joined = torch.cat(output.chunk(2), dim=-1).float()  # the shift is too steep for bf16
        changed = orthogonal_values(joined, target.to(joined), adaptive=adaptive)
        return torch.cat(changed.chunk(2, dim=-1)).to(output)

    return replace


def orthogonal_values(value: Tensor, target: Tensor, *, adaptive: bool) -> Tensor:
    """Return v - shift (v . t / t . t) t for each token but the first.

    Args:
        value: v [n, tokens, width].
        target: t [1, tokens, width].
        adaptive: Whether the shift depends on the cosine of v and t; otherwise it is 1.
    """
    squares = target.square().sum(-1)
    weight = torch.where(squares > 0, (value * target).sum(-1) / squares, 0.0)
    if adaptive:
        slope, centre, limit = SHIFT
        cosine = cosine_similarity(value, target, dim=-1)
        weight = weight * limit * torch.sigmoid(slope * (cosine - centre))
    weight[:, 0] = 0.0
    return value - weight[..., None] * target


def projector(vectors: Tensor) -> Tensor:
    """Return the orthogonal projector [width, width] on the span of the rows [k, width]."""
    _, sizes, rows = torch.linalg.svd(vectors.double(), full_matrices=False)
    basis = rows[sizes > 1e-6 * sizes.max()]
    return basis.T @ basis


def safree_states(
    states: Tensor, masked: Tensor, concepts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return SAFREE's states of one prompt.

    Args:
        states: s [tokens, width].
        masked: The pooled states p_i of the prompt without word i [words, width].
        concepts: The pooled states of the texts to avoid [texts, width].

    Returns:
        The changed states [tokens, width], which words trigger [words] bool, and
        (I - P_C) P_I s for all tokens [tokens, width].
    """
    away = torch.eye(states.shape[1], dtype=torch.float64).to(states.device) - projector(concepts)
    distances = (masked.double() @ away).norm(dim=1)
    count = len(distances)
    others = (distances.sum() - distances) / max(count - 1, 1)
    triggers = (distances >= (1 + TRIGGER) * others) & (count > 1)
    projected = (states.double() @ projector(masked) @ away).to(states)
    changed = states.clone()
    places = 1 + triggers.nonzero().flatten()
    changed[places] = projected[places]
    return changed, triggers, projected


def safree_steps(states: Tensor, projected: Tensor, steps: int) -> int:
    """Return the number of steps in which SAFREE uses the changed states of one prompt.

    Args:
        states: s of the start token, the words and the end token [tokens, width].
        projected: (I - P_C) P_I s of these tokens [tokens, width].
        steps: The number of steps of the sampler.

    With b = 1 - mean cos(s, (I - P_C) P_I s) they are the first 1 + round(10 sigmoid(2 k (10 b -
    t))) of 50, k = 2.5 and t = 5.333 (lines 19-36 of the code, for unsafe concepts).
    """
    b = 1 - float(cosine_similarity(projected, states, dim=-1).mean())
    share = 1 / (1 + math.exp(-2 * SAFREE_SLOPE * (10 * b - SAFREE_CENTRE)))
    return math.ceil((1 + round(SAFREE_STEPS * share)) * steps / STEPS)


def texts_to_avoid(text: str) -> list[str]:
    """Return the texts to avoid of SAFREE, which have commas between them.

    Raises UserError if there is none.
    """
    texts = [part.strip() for part in text.split(",") if part.strip()]
    if not texts:
        raise UserError(
            f"the safeguard 'safree' has no text to avoid in {quote(text)}; write the texts with "
            "commas between them, e.g. 'safree:star,moon'"
        )
    return texts


@contextmanager
def filtered(model: Any, text: str, prompts: Any, *, validated: bool = False) -> Iterator[None]:
    """Sample images of these prompts under SAFREE inside the context.

    Raises UserError if the prompts are states instead of texts, or `text` names nothing.
    """
    if not isinstance(prompts, Sequence):
        raise UserError("the safeguard 'safree' reads the words of a prompt; sample from texts")
    concepts = _pooled(model, texts_to_avoid(text))
    changed, steps = [], []
    for prompt in prompts:
        tokens = model.tokenize([prompt])
        end = _end(model, prompt)
        states = model.embed(tokens).tensors["states"][0]
        if end < 2:  # the empty prompt has no words
            changed.append(states)
            steps.append((states, states))
            continue
        ids = tokens.tensors["ids"].repeat(end - 1, 1)
        rows = torch.arange(end - 1, device=ids.device)
        ids[rows, rows + 1] = 0
        masked = Condition({**tokens.repeat(end - 1).tensors, "ids": ids})
        pooled = model.embed(masked).tensors["states"][:, end]
        one, _, projected = safree_states(states, pooled, concepts)
        changed.append(one)
        steps.append((states[: end + 1], projected[: end + 1]))
    replaced = torch.stack(changed)

    def change(states: Tensor, step: int, total: int) -> Tensor:
        if not validated:
            return replaced.to(states)
        counts = torch.tensor([safree_steps(s, p, total) for s, p in steps], device=states.device)
        return torch.where((step < counts)[:, None, None], replaced.to(states), states)

    with _conditional(model, len(replaced), change):
        yield


@contextmanager
def subtracted(model: Any, text: str, prompts: Any) -> Iterator[None]:
    """Sample images of these prompts under Semantic Surgery inside the context."""
    concept, empty = model.encode([text, ""]).tensors["states"]

    def change(states: Tensor, step: int, total: int) -> Tensor:
        return surgery(states, (concept - empty).to(states))

    with _conditional(model, len(prompts), change):
        yield


def surgery(states: Tensor, direction: Tensor) -> Tensor:
    """Return s - alpha (e - n), or s where alpha is below 0.5.

    Args:
        states: s [n, tokens, width].
        direction: e - n [tokens, width].
    """
    bias, width, threshold = SURGERY
    similarity = cosine_similarity(direction[None], states, dim=-1).mean(1)
    alpha = torch.sigmoid((similarity + bias) / width)
    alpha = torch.where(alpha >= threshold, alpha, torch.zeros_like(alpha))
    return states - alpha[:, None, None] * direction


@contextmanager
def _conditional(
    model: Any, n: int, change: Callable[[Tensor, int, int], Tensor]
) -> Iterator[None]:
    """Replace the states of the prompts that the denoiser reads, inside the context.

    Args:
        model: A model whose denoiser gets the rows of the empty prompt, then those of the prompts.
        n: The number of prompts.
        change: From states [n, tokens, width], the step from 0 and the number of steps to states.
    """
    times: list[float] = []  # in order; some samplers have two calls at one

    def replace(module: Any, args: Any, kwargs: Any) -> Any:
        states = kwargs["encoder_hidden_states"]
        if len(states) != 2 * n:
            raise UserError(NEEDS_GUIDANCE)
        t = float(torch.as_tensor(args[1] if len(args) > 1 else kwargs["timestep"]).flatten()[0])
        if not times or times[-1] != t:
            times.append(t)
        empty, prompt = states.chunk(2)
        total = count_steps(model)
        with torch.no_grad():
            prompt = change(prompt, len(times) - 1, total)
        return args, {**kwargs, "encoder_hidden_states": torch.cat([empty, prompt])}

    handle = model.denoiser.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def count_steps(model: Any) -> int:
    """Return the number of the sampler's time steps. Some samplers list a time step twice."""
    return len(set(model.pipeline.scheduler.timesteps.tolist()))


def _end(model: Any, text: str) -> int:
    """Return the place of the first end token."""
    ids = model.tokenize([text]).tensors["ids"][0].tolist()
    return int(ids.index(model.words.end))


def _pooled(model: Any, texts: Sequence[str]) -> Tensor:
    """Return the state of the first end token of each text [texts, width]."""
    states = model.encode(texts).tensors["states"]
    return torch.stack([states[i, _end(model, text)] for i, text in enumerate(texts)])
