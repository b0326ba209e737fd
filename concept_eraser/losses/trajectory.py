"""The loss `balance` of EraseFlow: trajectory balance along whole trajectories of the sampler.

EraseFlow (arXiv 2511.00804) trains a denoiser to follow, for the concept's prompt c, the
trajectories that its sampler takes for an anchor prompt. A trajectory x_0, x_1, ..., x_T goes from
noise to the latents of an image, by DDIM with eta 1 and guidance s for the anchor. With

    f(x_k) = eps(x_k, "") + s (eps(x_k, c) - eps(x_k, ""))     the model in training,
    p(x_{k+1} | x_k)                                           the density of DDIM's step by f,
    q(x_k | x_{k+1})                                           the density of the diffusion's step,

    L = mean over trajectories of (log Z + sum_k (log p(x_{k+1} | x_k) - log q(x_k | x_{k+1}))
                                   - log beta)^2.

k goes over `early` random steps and the `late` last ones. A logarithm is the mean over the numbers
of x, not their sum. log Z is a scalar that is trained beside the weights. It starts at -0.1953, and
log beta is 2.5.

log p is a weighted squared error of f, since the mean of DDIM's step is linear in f:

    log p(x_{k+1} | x_k) = -w_k mean (f(x_k) - f*_k)^2 + constant,

with f*_k the prediction whose step ends at x_{k+1}. So a trajectory is stored as x_k, f*_k, w_k and
the rest of the k-th term. In expectation over the sampler's noise f*_k is the prediction for the
anchor.

Memory: the square couples all terms, so autograd on L would store the activations of 40 passes.
Each term is computed under `torch.utils.checkpoint`. The first pass stores no activations. In the
backward pass each term is computed again, and its activations are freed before the next term. The
gradient is that of L.

The paper's text was not read here. The authors' code is Abhiramkns/EraseFlow. The loss is
utils/train_step.py, lines 21-72, and the densities are the functions _get_variance and
ddim_step_with_logprob of utils/diffusers_patch/ddim_with_logprob.py. The trajectories are
sample_epoch of utils/sampling.py, and log Z is in setup_optimizer_and_scaler of
utils/model_setup.py. The defaults are those of utils/get_args.py.

Deliberate differences from the code:
* The trajectories are sampled by the model before the training, and each step has new ones. The
  code samples them by the model in training (`teacher: current`) up to the step --switch_epoch, and
  then has the last one in all steps. Of the 20 steps of its commands this is 20 for nudity, 10 for
  an object, and 0 for a style, where all steps have one trajectory of the original model.
* Each example has its own random steps. The code draws them for the whole batch, of one example.
* Any number of sampling steps is possible. In the code 10 of the first 40 and the last 10 of 50 are
  fixed numbers. A last step of the sampler that would end where it starts is left out.
* The trained prediction always has the guidance of the sampler, as with --cfg in the commands.
* log Z has the learning rate of the weights, as in the commands. `training.clip` is the norm of the
  gradient of both together; the code clips each to 1.
* x_0 is not clipped; in the code a scheduler's configuration may ask for it.
* The code has a second script for flow matching, trainsd3.py. It was not read, and such families
  are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from concept_eraser.losses.base import each
from concept_eraser.models.base import AncestralStep


@dataclass(frozen=True)
class TrajectorySteps:
    """K steps of the trajectory of each of b examples.

    log p - log q of step k is `offset` - `weight` x the mean squared error of the prediction.
    """

    noisy: Tensor  # [K, b, c, h, w]: where the steps start
    t: Tensor  # [K, b]: the time steps there
    target: Tensor  # [K, b, c, h, w]: the predictions by which the steps end where they did
    weight: Tensor  # [K, b]
    offset: Tensor  # [K, b]


def step_terms(
    step: AncestralStep, noisy: Tensor, following: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return target, weight and offset (see `TrajectorySteps`) of a step from x_t to x_s.

    Args:
        step: The step, [b, 1, 1, 1].
        noisy: x_t, [b, c, h, w].
        following: x_s, [b, c, h, w].
    """
    target = (following - step.state * noisy) / step.prediction
    weight = 0.5 * (step.prediction / step.sigma).square().flatten()
    backward = 0.5 * each(noisy, step.signal * following) / step.noise.square().flatten()
    return target, weight, backward + (step.noise / step.sigma).log().flatten()


def squared_balance(
    path: TrajectorySteps,
    predict: Callable[[Tensor, Tensor], Tensor],
    *,
    log_z: Tensor,
    log_beta: float,
) -> Tensor:
    """Return the mean of the squared balance of trajectories, whose terms are stored one at a time.

    Args:
        path: The trajectories.
        predict: Returns the prediction in training for states [b, c, h, w] at time steps [b].
        log_z: The scalar in training.
        log_beta: The logarithm of beta.
    """

    def log_ratio(k: int) -> Tensor:
        error = each(predict(path.noisy[k], path.t[k]), path.target[k])
        return path.offset[k] - path.weight[k] * error

    total = torch.zeros_like(path.offset[0])
    for k in range(len(path.offset)):
        total = total + checkpoint(log_ratio, k, use_reentrant=False, preserve_rng_state=False)
    return (total + log_z - log_beta).square().mean()
