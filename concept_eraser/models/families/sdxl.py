"""Stable Diffusion XL: a UNet with two CLIP text encoders, also conditioned on the image's size.

The denoiser is conditioned on the last but one hidden states of both encoders, concatenated, and on
the second's pooled embedding. It is also conditioned on six numbers (micro-conditioning): original
height and width, crop from top and left, target height and width. Training uses the numbers of
diffusers' sampler: an uncropped image of the generated size. Epsilon- and v-prediction are as in
sd.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from concept_eraser.models.base import Condition, Weights
from concept_eraser.models.latent import (
    Guided,
    Variance,
    penultimate,
    require_text_to_image,
    tokens_of,
)
from concept_eraser.utils.errors import UserError


class StableDiffusionXL(Variance, Guided):
    """A `StableDiffusionXLPipeline` with the interface of `Model`.

    A condition is {"states": [n, tokens, width], "pooled": [n, width], "time_ids": [n, 6]}.
    """

    family = "sdxl"
    pipeline_class = "StableDiffusionXLPipeline"
    left_out = {"add_watermarker": False}  # noqa: RUF012 - no part of the model

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        require_text_to_image(pipeline, source)
        if getattr(pipeline.vae.config, "latents_mean", None) is not None:
            raise UserError(
                f"{source}: its VAE scales each channel of the latents by itself, which "
                "is not supported"
            )

    def _encoders(self) -> list[tuple[str, Any, Any]]:
        """Return (name of the ids, tokenizer, encoder) of the available encoders."""
        pipe = self.pipeline
        encoders = [
            ("ids", pipe.tokenizer, pipe.text_encoder),
            ("ids_2", pipe.tokenizer_2, pipe.text_encoder_2),
        ]
        return [
            (name, tokenizer, encoder)
            for name, tokenizer, encoder in encoders
            if encoder is not None
        ]

    def tokenize(self, prompts: Sequence[str]) -> Condition:
        return Condition(
            {
                name: tokens_of(tokenizer, prompts, tokenizer.model_max_length).input_ids.to(
                    self.device
                )
                for name, tokenizer, _ in self._encoders()
            }
        )

    def embed(
        self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None
    ) -> Condition:
        self._only_read(weights, rows)
        outputs = [
            penultimate(encoder, tokens.tensors[name]) for name, _, encoder in self._encoders()
        ]
        return self._condition(torch.cat([states for states, _ in outputs], dim=-1), outputs[-1][1])

    def _condition(self, states: Tensor, pooled_states: Tensor) -> Condition:
        size = torch.tensor(
            [[self.size, self.size, 0, 0, self.size, self.size]], dtype=states.dtype
        )
        return Condition(
            {
                "states": states,
                "pooled": pooled_states,
                "time_ids": size.expand(len(states), 6).to(states.device),
            }
        )

    def null(self) -> Condition:
        """Return zeros if the pipeline is configured so (SDXL base is); else the empty prompt."""
        empty = self.encode([""])
        if not self.pipeline.config.force_zeros_for_empty_prompt:
            return empty
        return self._condition(
            *(torch.zeros_like(empty.tensors[name]) for name in ("states", "pooled"))
        )

    def _inputs(self, noisy: Tensor, t: Tensor, condition: Condition) -> dict[str, Any]:
        tensors = condition.tensors
        extra_inputs = {"text_embeds": tensors["pooled"], "time_ids": tensors["time_ids"]}
        return {
            "sample": noisy,
            "timestep": t,
            "encoder_hidden_states": tensors["states"],
            "added_cond_kwargs": extra_inputs,
        }


PLUGIN = StableDiffusionXL
