"""Losses of a denoiser's prediction, all to be minimised.

With eps(x_t, t, c) the prediction of the model in training, eps* that of the teacher (the model
before training by default), x_t a noised latent of an example, c its prompt, a its anchor prompt:

* data ||eps(x_t, c) - target||^2: the training loss of the model
* ascent -||eps(x_t, c) - target||^2: gradient ascent
* anchor ||eps(x_t, c) - eps*(x_t, a)||^2: MUNBa (arXiv 2411.15537) section 4.1; concept ablation
  (arXiv 2303.13516, Eq. 5; nupurkmr9/concept-ablation, diffusers/train.py, lines 1094-1149); with
  `teacher: current` SalUn and EraseDiff, see below
* esd ||eps(x_t, c) - (eps*(x_t, "") - eta (eps*(x_t, c) - eps*(x_t, "")))||^2: ESD (arXiv
  2303.07345, Eq. 6)
* distill ||eps(x_t, c) - eps*(x_t, c)||^2: preserve the model's predictions
* relabel ||eps(x_t^a, c) - target||^2, x_t^a from images of the anchor: UNO's L_1, the surrogate of
  Selective Amnesia (arXiv 2305.10120)
* histogram d_KL(p || 1 - alpha), p the mean probability, by a judge, that x_0 decoded from
  eps(x_t, c) does not show the concept: UNO's hat versions (arXiv 2506.04712)
* npo (2 / beta) mean softplus(-beta (L_i - L*_i)), L_i `data` of one example: NPO (arXiv
  2404.05868, Eq. 3)
* slider ||eps(x_t, c) - sum_k w_k eps*(x_t, b_k)||^2, b_k any prompts and w_k factors whose sum is
  1 (`mixture`): with weights 1, g, -g LECO's target, neutral + g (positive - unconditional)
  (p1atdev/LECO, prompt_util.py, lines 106-138), and with b_1 = c that of Concept Sliders (arXiv
  2311.12092)
* stereo ||eps(x_t, c_k) - (n + (s - 1) (eps*(x_t, a) - n) - (s + 1) m)||^2, n = eps*(x_t, ""), c_k
  the prompt under attack k of K (0: none), s = `eta`, and m the mean of eps*(x_t, c_j) - n over all
  K + 1; while the attacks are searched for, the target is n: STEREO (arXiv 2408.16807;
  koushiksrivats/robust-concept-erasing, utils/apg.py, normalized_compositional_guidance)
* balance mean (log Z + sum_k (log p(x_{k+1} | x_k, c) - log q(x_k | x_{k+1})) - log beta)^2,
  x_k along a trajectory that DDIM sampled for the anchor, p a step of DDIM by the model in
  training, q one of the diffusion, log Z a trained scalar: EraseFlow (arXiv 2511.00804;
  Abhiramkns/EraseFlow, utils/train_step.py), see trajectory.py beside this module
* resteer mean A^2, A the cross-attention to the concept's tokens: Forget-Me-Not (arXiv 2303.17591;
  SHI-Labs/Forget-Me-Not, src/train_attn.py, lines 272-285)

SalUn (arXiv 2310.12508) and EraseDiff (arXiv 2401.05779) have the forget loss

    ||eps(x_t, c) - sg(eps(x_t, a))||^2,    x_t from images of the concept, sg: a constant,

with one model in both places, the one in training. This is `anchor` with `teacher: current` and the
default `noised: own`. The authors' code has it in OPTML-Group/Unlearn-Saliency,
SD/train-scripts/random_label.py, lines 93-125, and nsfw_removal.py, lines 114-146; and in
JingWu321/EraseDiff, sd/train_scripts/erasediff.py, lines 188-224, and erasediff_nsfw.py, lines
205-238. In EraseDiff's code the prompt a is "a photo of a pokemon" for every concept. In the text
of MUNBa's paper eps* is the model before the training.

No single paper defines data, ascent and distill: the training loss, its negative (called GA, or A
in UNO's paper, arXiv 2506.04712), and distillation from the model before the training.

Settings of `esd`: `neutral: anchor` puts the anchor in the place of the empty prompt (SPM, arXiv
2312.16145, Eq. 4). For a model that predicts v or a flow, "eps" is that prediction.

Differences from the papers:
* ESD makes x_t by partial sampling of the model in training. Data-free training samples here too,
  by the teacher: the model before the training by default. With images, x_t is a noised image.
* NPO is about likelihoods (licong-lin/negative-preference-optimization, TOFU/dataloader.py, lines
  255-270). log p_theta(x | c) - log p*(x | c) becomes -(L_i - L*_i), a denoiser's
  bound on it. The bound's weights are left out and the mean is over the example's numbers, so beta
  is in units of 1 / loss.
* SalUn's and EraseDiff's code encode each image twice, so the two x_t have different samples of the
  VAE's posterior. Here both predictions have the same x_t.
* EraseDiff's code has a second target that is commented out, uniform noise in place of eps(x_t, a)
  (ddpm/runners/diffusion.py, lines 768-770 and 819-821). It is not offered here.
* LECO makes x_t by partial sampling of the model in training, with `unconditional` as the negative
  prompt. Data-free training samples by the teacher here, and the negative prompt is empty.
* Forget-Me-Not's code takes the norm of all the maps, which has the same minimum. There a layer
  counts by its positions. Here all layers count alike. The mean over a prompt's tokens of the
  concept comes first, then that over examples.

Sampling uses eps(x_t, "") + s (eps(x_t, c) - eps(x_t, "")), but these losses train eps(x_t, c)
only. On noised images of the concept the unconditional prediction can learn the same change. The
difference of the two, which is multiplied by s, then does not change: eval/results/guidance.md.
`empty_prompts` replaces the prompts of some examples by the empty prompt. There anchor, distill and
esd have the teacher's unconditional prediction as their target. The training for guidance (arXiv
2207.12598) drops prompts for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from concept_eraser.losses.base import (
    ConditionName,
    Formula,
    Loss,
    LossSettings,
    Teacher,
    bernoulli_divergence,
    each,
    preference,
)
from concept_eraser.losses.trajectory import TrajectorySteps, squared_balance
from concept_eraser.models.base import Condition


@dataclass(frozen=True)
class DenoiserDraw:
    """One micro-batch with everything random already drawn.

    All gradients of a step use the same draw.
    """

    noisy: Tensor  # [b, c, h, w]
    t: Tensor  # [b]
    condition: Condition
    anchor: Condition | None
    null: Condition
    target: Tensor | None  # None when there are no clean latents (data-free)
    positions: Tensor | None = (
        None  # [b, tokens] bool: the tokens of the prompt that stand for the concept
    )
    # of the loss slider: factors, and the prompts whose predictions they multiply
    mixture: tuple[tuple[float, Condition], ...] = ()
    # whether an adversary's offset is added to the prompt, for the model in training only
    is_attacked: bool = False
    # [b]: where there are several offsets, the number of each example's, 0 for none
    attacks: Tensor | None = None
    # of the loss balance: the steps of each example's trajectory; `noisy` is its first state
    trajectory: TrajectorySteps | None = None

    @property
    def terms(self) -> int:
        """The number of terms in the mean of a loss on this draw."""
        return self.noisy.numel() if self.trajectory is None else len(self.noisy)


class Predictor(Protocol):
    def predict(
        self,
        draw: DenoiserDraw,
        condition: Condition | None = None,
        *,
        teacher: Teacher | None = None,
    ) -> Tensor: ...
    def image(self, draw: DenoiserDraw) -> Tensor: ...
    def attention(self, draw: DenoiserDraw) -> Sequence[Tensor]: ...
    def attacked_conditions(self, draw: DenoiserDraw) -> Sequence[Condition]: ...


def _mse(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction.float() - target.float()).square().mean()


def data(model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
    assert draw.target is not None  # data-free training refuses this loss beforehand
    return _mse(model.predict(draw), draw.target)


def ascent(model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
    return -data(model, draw, settings)


# Teachers predict first, so that they work while no activations of the model in training are
# stored.
def anchor(model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
    target = model.predict(draw, draw.anchor, teacher=settings.teacher)
    return _mse(model.predict(draw), target)


def esd(model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
    free = model.predict(
        draw, draw.anchor if settings.neutral == "anchor" else draw.null, teacher=settings.teacher
    )
    conditional = model.predict(draw, teacher=settings.teacher)
    return _mse(model.predict(draw), free - settings.eta * (conditional - free))


def distill(model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
    target = model.predict(draw, teacher=settings.teacher)
    return _mse(model.predict(draw), target)


def npo(model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
    assert draw.target is not None  # data-free training refuses this loss beforehand
    before = each(model.predict(draw, teacher=settings.teacher), draw.target)
    return preference(each(model.predict(draw), draw.target), before, settings.beta)


def resteer(model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
    assert draw.positions is not None  # made for this loss
    concept_mask = draw.positions.float()
    shares = [  # of each example: its own tokens alone count, whatever is beside it in a batch
        (maps.float().square().mean((1, 2)) * concept_mask).sum(1) / concept_mask.sum(1)
        for maps in model.attention(draw)
    ]
    return torch.stack(shares).mean()


def slider(model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
    assert draw.mixture  # an objective without one is refused beforehand
    terms = [
        factor * model.predict(draw, condition, teacher=settings.teacher).float()
        for factor, condition in draw.mixture
    ]
    return _mse(model.predict(draw), torch.stack(terms).sum(0))


def stereo(model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
    free = model.predict(draw, draw.null, teacher=settings.teacher).float()
    conditions = model.attacked_conditions(draw)
    if not conditions:  # during the search
        return _mse(model.predict(draw), free)
    away = [model.predict(draw, c, teacher=settings.teacher).float() - free for c in conditions]
    towards = model.predict(draw, draw.anchor, teacher=settings.teacher).float() - free
    strength = settings.eta
    target = free + (strength - 1) * towards - (strength + 1) * torch.stack(away).mean(0)
    return _mse(model.predict(draw), target)


def balance(model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
    assert draw.trajectory is not None  # drawn for this loss
    assert settings.log_z is not None  # the eraser has it
    terms = settings.trajectory

    def predict(noisy: Tensor, t: Tensor) -> Tensor:
        place = replace(draw, noisy=noisy, t=t, trajectory=None)
        own = model.predict(place).float()
        if terms.guidance <= 1:  # as in the sampler
            return own
        free = model.predict(place, place.null).float()
        return free + terms.guidance * (own - free)

    return squared_balance(draw.trajectory, predict, log_z=settings.log_z, log_beta=terms.log_beta)


def histogram(model: Predictor, draw: DenoiserDraw, settings: LossSettings) -> Tensor:
    assert settings.shows is not None  # the recipe's section of this name brings a judge
    absence = 1 - settings.shows(model.image(draw)).mean()
    return bernoulli_divergence(absence.float(), settings.alpha)


def _neutral_and_own(settings: LossSettings) -> tuple[ConditionName, ...]:
    return settings.neutral, "own"


def _own(settings: LossSettings) -> tuple[ConditionName, ...]:
    return ("own",)


def _mixture(settings: LossSettings) -> tuple[ConditionName, ...]:
    return ("mixture",)


def _anchor(settings: LossSettings) -> tuple[ConditionName, ...]:
    return ("anchor",)


LOSSES: dict[str, Loss] = {
    "data": Formula(data, needs_images=True),
    "ascent": Formula(ascent, needs_images=True),
    "anchor": Formula(anchor, needs_anchor=True, holds_empty=True, teachers=_anchor),
    "balance": Formula(balance, needs_anchor=True),
    "esd": Formula(esd, holds_empty=True, teachers=_neutral_and_own),
    "distill": Formula(distill, holds_empty=True, teachers=_own),
    "relabel": Formula(data, images="anchor", needs_anchor=True, needs_images=True),
    "histogram": Formula(histogram),
    "npo": Formula(npo, needs_images=True, teachers=_own),
    "resteer": Formula(resteer),
    "slider": Formula(slider, teachers=_mixture),
    "stereo": Formula(stereo, needs_anchor=True),
}


def no_grad_prediction(predict: Callable[[], Tensor]) -> Tensor:
    """Wrap a prediction so that it is a constant of the loss, as a teacher's must be."""
    with torch.no_grad():
        return predict()
