"""Safeguards at inference, for comparison. They do not change the weights.

So anybody with the weights can leave them out. eps_u, eps_c, eps_s are the denoiser's predictions
for the empty prompt, the prompt, and the text to avoid. A sampler of guidance g follows eps_u + g
(eps_c - eps_u).

* negative    eps_s replaces eps_u: the negative prompt.
* sld-*       Safe latent diffusion (Schramowski et al., arXiv 2211.05105): eps_c - gamma replaces
              eps_c, with (element by element)

      gamma = mu (eps_s - eps_u) + s_m nu,      nu <- b nu + (1 - b) gamma,
      mu = min(1, s_S |eps_c - eps_s|) where eps_c - eps_s < lambda, else 0

  In the first steps gamma is left out, while nu is computed. The four settings are the paper's.

* adavd, adavd-adaptive, safree, safree-validated and semantic-surgery change what the denoiser
  reads of a prompt (see state_safeguards.py).

* spm-gate, spm-gate-clip and spm-gate-tokens add a LoRA to the denoiser, with a strength that
  depends on the prompt (see prompt_gate.py). Their text is TEXTS@PLACE.

Differences from SLD: its text prints max(1, .), its code and this one have min. Its warm-up is a
number of 50 steps; here it is the same share of any number of steps. diffusers' configuration of
`weak` had s_S = 20, the paper's is 200. As in the code, the prompt's gradient through
`Model.denoise`, which an attacker uses, does not include a safeguard; the image does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from concept_eraser.models import prompt_gate, state_safeguards
from concept_eraser.utils.errors import UserError, quote, unknown

STEPS = 50  # steps of the paper's sampler, to which the warm-ups refer


@dataclass(frozen=True)
class Strength:
    """A strength of safe latent diffusion.

    Attributes:
        warmup: steps of 50.
        scale: s_S.
        threshold: lambda.
        momentum: s_m.
        keep: b.
    """

    warmup: int
    scale: float
    threshold: float
    momentum: float
    keep: float


SLD = {
    "sld-weak": Strength(warmup=15, scale=200.0, threshold=0.0, momentum=0.0, keep=0.0),
    "sld-medium": Strength(warmup=10, scale=1000.0, threshold=0.01, momentum=0.3, keep=0.4),
    "sld-strong": Strength(warmup=7, scale=2000.0, threshold=0.025, momentum=0.5, keep=0.7),
    "sld-max": Strength(warmup=0, scale=5000.0, threshold=1.0, momentum=0.5, keep=0.7),
}


STATE_KINDS: dict[str, Callable[[Any, str, Any], AbstractContextManager[None]]] = {
    "adavd": state_safeguards.values,
    "adavd-adaptive": partial(state_safeguards.values, adaptive=True),
    "safree": state_safeguards.filtered,
    "safree-validated": partial(state_safeguards.filtered, validated=True),
    "semantic-surgery": state_safeguards.subtracted,
}
GATE_KINDS: dict[str, Callable[[Any, str, Any], AbstractContextManager[None]]] = {
    "spm-gate": prompt_gate.gated,
    "spm-gate-clip": partial(prompt_gate.gated, tokens=False),
    "spm-gate-tokens": partial(prompt_gate.gated, clip=False),
}
KINDS = ("negative", *SLD, *STATE_KINDS, *GATE_KINDS)
# in the name of a model that samples under a safeguard, see `protected_name`
_IN_NAME = re.compile(rf" under ((?:{'|'.join(map(re.escape, KINDS))}):.+)", re.DOTALL)


@dataclass(frozen=True)
class Guard:
    """A safeguard: its kind and the text to avoid, of a gate the text and the place of a LoRA."""

    kind: str
    text: str

    @classmethod
    def read(cls, spec: str) -> Guard:
        """Read a safeguard from `kind:text`.

        Raises UserError for another form, an unknown kind or no text to avoid. No file is read.
        """
        kind, colon, text = spec.partition(":")
        if not colon or not text.strip():
            raise UserError(
                f"cannot read the safeguard {quote(spec)}; write kind:text, e.g. "
                "'negative:a star' or 'sld-medium:a star'"
            )
        if kind not in KINDS:
            raise unknown("safeguard", kind[:200], KINDS)
        if kind in GATE_KINDS:
            prompt_gate.split(text)
        if kind.startswith("safree"):
            state_safeguards.texts_to_avoid(text)
        return cls(kind, text.strip())

    def __str__(self) -> str:
        return f"{self.kind}:{self.text}"

    def check(self, model: Any) -> None:
        """Raise UserError if a model cannot be sampled under this safeguard, before the work."""
        if self.kind in GATE_KINDS:
            prompt_gate.factors_of(model, self.text)

    def drawing(self, model: Any) -> dict[str, Any]:
        """What determines an image under this safeguard, for the cache's key."""
        lora = {"lora": prompt_gate.digest(model, self.text)} if self.kind in GATE_KINDS else {}
        return {"guard": str(self), **lora}

    @contextmanager
    def around(self, model: Any, prompts: Any) -> Iterator[None]:
        """Sample images of these prompts under this safeguard inside the context.

        The prompts are texts, or states [n, tokens, width] as a Condition. Raises UserError if the
        sampler has no guidance, through which all safeguards but the gates work.
        """
        n = len(prompts)
        if make_context := {**STATE_KINDS, **GATE_KINDS}.get(self.kind):
            with make_context(model, self.text, prompts):
                yield
            return
        states = model.encode([self.text]).repeat(n).tensors["states"]
        change = _Change(SLD.get(self.kind), states)
        handle = model.denoiser.register_forward_hook(change, with_kwargs=True)
        try:
            change.steps = lambda: state_safeguards.count_steps(model)
            yield
        finally:
            handle.remove()


def protected_name(source: str, guard: Guard) -> str:
    """Return the name of a model that samples under a safeguard, as results have it."""
    return f"{source} under {guard}"


def safeguard_in(model: str) -> str:
    """Return the safeguard in "source (fingerprint)" as kind:text, or "" if there is none."""
    found = _IN_NAME.search(model.rsplit(" (", 1)[0])
    return found.group(1) if found else ""


class _Change:
    """The change of one call of the denoiser by a safeguard.

    Its rows are those without the prompt, then those with the prompt.
    """

    def __init__(self, sld: Strength | None, states: Tensor) -> None:
        self.sld, self.states = sld, states
        self.steps: Any = None
        self.nu: Tensor | float = 0.0
        self.timesteps: list[float] = []  # in order; some samplers have two calls at one

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        n = len(self.states)
        sample, t = (
            (args[0] if args else kwargs["sample"]),
            (args[1] if len(args) > 1 else kwargs["timestep"]),
        )
        if len(sample) != 2 * n:
            raise UserError(
                "a safeguard works through classifier-free guidance; sample with a guidance above 1"
            )
        unconditional, conditional = output[0].chunk(2)
        with torch.no_grad():
            avoided_prediction = module.forward(
                sample[:n], t, encoder_hidden_states=self.states.to(sample.dtype), return_dict=False
            )[0]
        if self.sld is None:
            unconditional = avoided_prediction
        else:
            conditional = conditional - self._gamma(
                self.sld,
                unconditional,
                conditional=conditional,
                avoided_prediction=avoided_prediction,
                t=float(torch.as_tensor(t).flatten()[0]),
            )
        return (torch.cat([unconditional, conditional]), *output[1:])

    def _gamma(
        self,
        sld: Strength,
        unconditional: Tensor,
        conditional: Tensor,
        avoided_prediction: Tensor,
        t: float,
    ) -> Tensor:
        if not self.timesteps or self.timesteps[-1] != t:
            self.timesteps.append(t)
        towards = conditional - avoided_prediction
        mu = (sld.scale * towards.abs()).clamp(max=1.0)
        mu = torch.where(towards >= sld.threshold, torch.zeros_like(mu), mu)
        gamma = mu * (avoided_prediction - unconditional) + sld.momentum * self.nu
        self.nu = sld.keep * self.nu + (1 - sld.keep) * gamma
        is_warm = (len(self.timesteps) - 1) * STEPS >= sld.warmup * self.steps()
        return gamma if is_warm else torch.zeros_like(gamma)
