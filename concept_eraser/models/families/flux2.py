"""Flux.2 Klein: a transformer with joint attention, whose text encoder is a Qwen 3.

It is trained by flow matching; the definition is diffusers' pipeline. The condition is three of
Qwen 3's hidden states (of layers 9, 18 and 27) side by side, at all 512 tokens: the denoiser also
attends to padding. The prompt is in the chat template, with an empty part for thinking.

Latents are the VAE's code with each 2 x 2 as one token, [b, 4c, h/2, w/2], normalised by the mean
and variance that the VAE holds in a layer of batch normalisation.

The shift of the pipeline's sigmas depends on the number of tokens and of steps. The training
schedule has that of 50 steps, the pipeline's default. A distilled Klein (`is_distilled`) is sampled
without guidance, whatever the setting, and so is it here.

The selection cross_attention is the text's part of the joint attention. The single blocks have one
set of weights for both, which counts as self-attention (see recipes/selections.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.models import chat
from concept_eraser.models.base import Condition, Weights
from concept_eraser.models.flow import Flow
from concept_eraser.models.latent import ids_and_mask, tokens_of
from concept_eraser.utils.errors import UserError

LENGTH = 512  # the number of tokens in diffusers' pipeline, or fewer if the tokenizer has fewer
LAYERS = (9, 18, 27)  # the hidden states of Qwen 3 that the pipeline takes
STEPS = 50  # the pipeline's default, of the training schedule's shift
PACKED = 2  # codes of the VAE in width and height that are one of the latents


class Flux2Klein(Flow):
    """A `Flux2KleinPipeline` with the interface of `Model`.

    A condition is {"states": [n, tokens, width]}.
    """

    family = "flux2"
    pipeline_class = "Flux2KleinPipeline"
    patch = 1

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        if not self.readers:
            raise UserError(
                f"{source} has no text encoder; Flux.2 Klein needs its Qwen (text_encoder)"
            )
        chat.use_own_template(pipeline.tokenizer)
        self.length = min(LENGTH, int(pipeline.tokenizer.model_max_length))

    def check_option(self, name: str, value: float) -> None:
        super().check_option(name, value)
        step = self.pipeline.vae_scale_factor * PACKED
        if name == "size" and (value < step or value % step):
            raise UserError(
                f"size: {self.source} draws images whose width is a multiple of {step}, "
                f"found {value:g}"
            )

    def latent_shape(self) -> tuple[int, int, int]:
        side = self.size // (self.pipeline.vae_scale_factor * PACKED)
        return self.channels, side, side

    def _mu(self, config: Any) -> float:
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        return float(compute_empirical_mu(self.latent_shape()[1] ** 2, STEPS))

    def tokenize(self, prompts: Sequence[str]) -> Condition:
        after = chat.AFTER + chat.NOT_THINKING
        tokens = tokens_of(
            self.pipeline.tokenizer, prompts, self.length, before=chat.BEFORE, after=after
        )
        return ids_and_mask(tokens, self.device)

    def embed(
        self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None
    ) -> Condition:
        self._only_read(weights, rows)
        output = self.pipeline.text_encoder(
            input_ids=tokens.tensors["ids"],
            attention_mask=tokens.tensors["mask"],
            output_hidden_states=True,
            use_cache=False,
        )
        return Condition({"states": torch.cat([output.hidden_states[k] for k in LAYERS], dim=-1)})

    def _normalisation(self) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of the latents' channels, [4c, 1, 1]."""
        vae = self.pipeline.vae
        mean, variance = (v.view(-1, 1, 1) for v in (vae.bn.running_mean, vae.bn.running_var))
        return mean, (variance + vae.config.batch_norm_eps).sqrt()

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        mean, deviation = self._normalisation()
        code = self.pipeline.vae.encode(images.to(self.device)).latent_dist.mean
        return (F.pixel_unshuffle(code, PACKED) - mean) / deviation

    def decode(self, latents: Tensor) -> Tensor:
        mean, deviation = self._normalisation()
        code = F.pixel_shuffle(latents * deviation + mean, PACKED)
        return self.pipeline.vae.decode(code).sample

    def _inputs(self, noisy: Tensor, t: Tensor, condition: Condition) -> dict[str, Any]:
        states, device = condition.tensors["states"], noisy.device
        one = torch.zeros(1, dtype=torch.long, device=device)
        rows, columns, text = (
            torch.arange(n, device=device) for n in (*noisy.shape[-2:], states.shape[1])
        )
        places = torch.cartesian_prod(one, rows, columns, one)
        text_places = torch.cartesian_prod(one, one, one, text)
        return {
            "hidden_states": noisy.flatten(2).transpose(1, 2),
            "timestep": self.sigma(t).expand(len(noisy)),
            "encoder_hidden_states": states,
            "txt_ids": text_places.expand(len(noisy), -1, -1),
            "img_ids": places.expand(len(noisy), -1, -1),
        }

    def denoise(
        self, noisy: Tensor, t: Tensor, condition: Condition, weights: Weights | None = None
    ) -> Tensor:
        tokens = super().denoise(noisy, t, condition, weights)
        return tokens.transpose(1, 2).unflatten(2, noisy.shape[-2:])

    @property
    def is_distilled(self) -> bool:
        return bool(self.pipeline.config.is_distilled)

    def guide(
        self,
        x: Tensor,
        t: Tensor,
        condition: Condition,
        null: Condition,
        guidance: float,
        weights: Weights | None,
    ) -> Tensor:
        """Return the prediction with classifier-free guidance, without it for a distilled model."""
        if self.is_distilled:
            return self.denoise(x, t.expand(len(x)), condition, weights)
        return super().guide(
            x, t, condition=condition, null=null, guidance=guidance, weights=weights
        )

    def branches(self, guidance: float) -> int:
        return 1 if self.is_distilled else super().branches(guidance)

    def readings(self, guidance: float) -> int:
        return 2 if guidance > 1 and not self.is_distilled else 1

    def _sampling_arguments(self, prompts: Sequence[str] | Condition) -> dict[str, Any]:
        size = {"height": self.size, "width": self.size, "max_sequence_length": self.length}
        if not isinstance(prompts, Condition):
            return {"prompt": list(prompts), **size}
        null = self.null().repeat(len(prompts)).tensors["states"]
        return {
            "prompt_embeds": prompts.tensors["states"],
            "negative_prompt_embeds": null,
            **size,
        }


PLUGIN = Flux2Klein
