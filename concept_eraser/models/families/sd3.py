"""Stable Diffusion 3 and 3.5: an MMDiT with two CLIP text encoders and a T5.

It is trained by flow matching. The states are the last but one of both CLIPs concatenated, filled
with zeros to T5's width, and then T5's. Pooled are both CLIPs' projected embeddings. Without T5
(text_encoder_3 = None) its states are zeros, as in diffusers. Image and text attend jointly: the
selection cross_attention is the text's part of it (see recipes/selections.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.models.base import Condition, Weights
from concept_eraser.models.flow import Flow
from concept_eraser.models.latent import Guided, penultimate, tokens_of
from concept_eraser.utils.errors import UserError

T5_LENGTH = 256  # the number of T5's tokens in diffusers' pipeline


class StableDiffusion3(Guided, Flow):
    """A `StableDiffusion3Pipeline` with the interface of `Model`.

    A condition is {"states": [n, tokens, width], "pooled": [n, width]}.
    """

    family = "sd3"
    pipeline_class = "StableDiffusion3Pipeline"

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        if pipeline.text_encoder is None or pipeline.text_encoder_2 is None:
            raise UserError(
                f"{source} has {', '.join(self.readers) or 'no text encoder'}; Stable "
                "Diffusion 3 needs both of its CLIP text encoders (T5, text_encoder_3, "
                "may be left out)"
            )

    def check_option(self, name: str, value: float) -> None:
        super().check_option(name, value)
        largest = (
            self.pipeline.transformer.config.pos_embed_max_size
            * self.patch
            * self.pipeline.vae_scale_factor
        )
        if name == "size" and value > largest:
            raise UserError(
                f"size: {self.source} has positions for a width of at most {largest} pixels, "
                f"found {value:g}"
            )

    def tokenize(self, prompts: Sequence[str]) -> Condition:
        pipe, length = self.pipeline, self.pipeline.tokenizer_max_length
        encodings = {
            "ids": tokens_of(pipe.tokenizer, prompts, length),
            "ids_2": tokens_of(pipe.tokenizer_2, prompts, length),
        }
        if pipe.text_encoder_3 is not None:
            encodings["ids_3"] = tokens_of(pipe.tokenizer_3, prompts, T5_LENGTH)
        return Condition(
            {name: tokens.input_ids.to(self.device) for name, tokens in encodings.items()}
        )

    def embed(
        self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None
    ) -> Condition:
        self._only_read(weights, rows)
        pipe, ids = self.pipeline, tokens.tensors
        first, second = (
            penultimate(pipe.text_encoder, ids["ids"]),
            penultimate(pipe.text_encoder_2, ids["ids_2"]),
        )
        clip = torch.cat([first[0], second[0]], dim=-1)
        width = pipe.transformer.config.joint_attention_dim
        if pipe.text_encoder_3 is not None:
            t5_states = pipe.text_encoder_3(ids["ids_3"])[0]
        else:
            t5_states = clip.new_zeros(len(clip), T5_LENGTH, width)
        states = torch.cat([F.pad(clip, (0, width - clip.shape[-1])), t5_states], dim=1)
        return Condition({"states": states, "pooled": torch.cat([first[1], second[1]], dim=-1)})

    def _inputs(self, noisy: Tensor, t: Tensor, condition: Condition) -> dict[str, Any]:
        tensors, time = condition.tensors, self.sigma(t) * self.timesteps
        return {
            "hidden_states": noisy,
            "timestep": time,
            "encoder_hidden_states": tensors["states"],
            "pooled_projections": tensors["pooled"],
        }


PLUGIN = StableDiffusion3
