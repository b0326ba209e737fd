"""Flow matching (rectified flow), by which SD 3, Flux and Sana are trained.

x_t = (1 - sigma) x_0 + sigma noise, and the denoiser predicts the velocity noise - x_0.

The integer time step t of the interface counts the scheduler's training schedule from the clean
end. So sigma ascends with t, as in diffusion, and the last t is pure noise. The schedule's shift
towards noise is applied: the constant one, or that of the image's size if the scheduler depends on
it. Training draws t uniformly, so sigma by that shifted schedule. SD 3's own training drew it from
a logit-normal (arXiv 2403.03206, by summaries of it; its text was not read here). The training
scripts of diffusers for Flux, Qwen-Image and Flux.2 Klein have no shift by the image's size: there
sigma is uniform (examples/dreambooth/train_dreambooth_lora_flux.py, lines 1766-1779,
train_dreambooth_lora_qwen_image.py, lines 1746-1759, train_dreambooth_lora_flux2_klein.py, lines
1838-1851).

Losses are squared errors of the velocity, with weight 1 at every sigma. The training script of
diffusers for SD 3 (examples/dreambooth/train_dreambooth_sd3.py) takes the error of x_t - sigma
times the velocity against x_0 with `--precondition_outputs`. This is the error of the velocity
times sigma^2, so it weights the clean end less. Its scheme `sigma_sqrt` divides by sigma^2 and
gives weight 1 again; its other schemes have 1 or cosmap (compute_loss_weighting_for_sd3). That
weighting is not offered; `timesteps` of an objective restricts its range of t.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from concept_eraser.models.base import Condition, Weights
from concept_eraser.models.latent import Sized
from concept_eraser.utils.devices import send
from concept_eraser.utils.errors import UserError


class Flow(Sized):
    """The schedule of a `FlowMatchEulerDiscreteScheduler`."""

    network = "transformer"
    patch = 2

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        if not self._is_flow(pipeline.scheduler):
            raise UserError(
                f"{source}: the scheduler {type(pipeline.scheduler).__name__} is not one of flow "
                "matching from noise (FlowMatchEulerDiscreteScheduler)"
            )
        config, kind = pipeline.scheduler.config, type(pipeline.scheduler).__name__
        draws_noise = kind == "FlowMatchLCMScheduler" or config.get("stochastic_sampling")
        # pipelines without this method give the scheduler no generator
        if draws_noise and not hasattr(pipeline, "prepare_extra_step_kwargs"):
            raise UserError(
                f"{source}: diffusers' {type(pipeline).__name__} lets this {kind} draw from the "
                "global generator, so that a seed names no image; give it a "
                "FlowMatchEulerDiscreteScheduler without stochastic_sampling"
            )
        self._sigmas = self._schedule()

    def _is_flow(self, scheduler: Any) -> bool:
        """Whether the family supports this scheduler."""
        is_named_so = type(scheduler).__name__.startswith("FlowMatch")
        return is_named_so and not scheduler.config.get("invert_sigmas")

    def configure(self, options: Mapping[str, Any]) -> None:
        super().configure(options)
        self._sigmas = self._schedule()  # which may depend on the size

    def _schedule(self) -> Tensor:
        """Return sigma of each time step of the training schedule, ascending, [timesteps]."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        # a new one: sampling overwrites the sigmas of the pipeline's own
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self.pipeline.scheduler.config)
        sigmas = scheduler.sigmas
        # the scheduler applies it only when it has the image's size
        if scheduler.config.use_dynamic_shifting:
            sigmas = scheduler.time_shift(self._mu(scheduler.config), 1.0, sigmas)
        return sigmas.flip(0)

    def _mu(self, config: Any) -> float:
        """Return the shift for an image of this size.

        It is linear in the number of tokens, from the scheduler's base to its maximum.
        """
        tokens = (self.latent_shape()[1] // self.patch) ** 2
        slope = (config.max_shift - config.base_shift) / (
            config.max_image_seq_len - config.base_image_seq_len
        )
        return float(config.base_shift + slope * (tokens - config.base_image_seq_len))

    def sigma(self, t: Tensor) -> Tensor:
        """Return sigma of integer time steps, in their shape."""
        self._sigmas = send(self._sigmas, t.device)  # once, and not in each step
        return self._sigmas[t]

    def corrupt(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        sigma = self.sigma(t).view(-1, 1, 1, 1)
        return (1 - sigma) * latents + sigma * noise

    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return noise - latents

    def clean(self, noisy: Tensor, t: Tensor, prediction: Tensor) -> Tensor:
        return noisy - self.sigma(t).view(-1, 1, 1, 1) * prediction

    def time_grid(self, steps: int) -> list[int]:
        """Return evenly spaced time steps of the training schedule, and the clean end."""
        places = torch.linspace(self.timesteps - 1, 0, steps + 1).round().long()
        return [*places[:-1].tolist(), -1]

    @torch.no_grad()
    def partial(
        self,
        noise: Tensor,
        condition: Condition,
        null: Condition,
        *,
        stop: int,
        steps: int,
        guidance: float,
        weights: Weights | None = None,
    ) -> tuple[Tensor, int]:
        """Sample by Euler's method along `steps` time steps of the training schedule.

        They are evenly spaced, so that x_t is at one of them.
        """
        grid = torch.tensor([*self.time_grid(steps)[:-1], 0])
        times, x = send(grid, noise.device), noise
        sigmas = self.sigma(times)
        for place in range(stop):
            velocity = self.guide(
                x, times[place], condition=condition, null=null, guidance=guidance, weights=weights
            )
            x = x + (sigmas[place + 1] - sigmas[place]) * velocity
        return x, int(grid[stop])
