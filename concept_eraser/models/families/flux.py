"""Flux.1: a transformer with a CLIP and a T5 as text encoders, trained by flow matching.

States are T5's, pooled is CLIP's. The denoiser takes the latents packed, each 2 x 2 as one token.
In the interface they are an image [b, c, h, w].

dev is guidance-distilled: it takes the guidance as a number, which is a part of the condition, and
its sampling has no empty prompt. schnell takes no guidance. In training this number is the option
`guidance`, by default 1.0. There the distilled model is nearest to the conditional velocity of the
data, which is the target of the losses. diffusers' script for a LoRA has 3.5 by default
(examples/dreambooth/train_dreambooth_lora_flux.py, lines 497-501). In sampling it is the guidance
of the sampler. The loss
`esd` guides away from the prediction for the empty prompt, at the same `guidance`.

The selection cross_attention is the text's part of the joint attention (see recipes/selections.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.models.base import Condition, Weights
from concept_eraser.models.flow import Flow
from concept_eraser.models.latent import Sized, tokens_of
from concept_eraser.utils.errors import UserError

T5_LENGTH = 512  # the number of T5's tokens in diffusers' pipeline


class Flux(Flow):
    """A `FluxPipeline` with the interface of `Model`.

    A condition is {"states": [n, tokens, width], "pooled": [n, width], "guidance": [n]}.
    """

    family = "flux"
    pipeline_class = "FluxPipeline"
    options: ClassVar[Mapping[str, str]] = {
        **Sized.options,
        "guidance": "the guidance input of a guidance-distilled denoiser in training (default 1.0)",
    }

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        if len(self.readers) != 2:
            raise UserError(
                f"{source} has {', '.join(self.readers) or 'no text encoder'}; Flux "
                "needs a CLIP (text_encoder) and a T5 (text_encoder_2)"
            )
        self.guidance = 1.0

    @property
    def channels(self) -> int:
        return super().channels // self.patch**2

    def tokenize(self, prompts: Sequence[str]) -> Condition:
        pipe = self.pipeline
        encodings = {
            "ids": tokens_of(pipe.tokenizer, prompts, pipe.tokenizer_max_length),
            "ids_2": tokens_of(pipe.tokenizer_2, prompts, T5_LENGTH),
        }
        return Condition(
            {name: tokens.input_ids.to(self.device) for name, tokens in encodings.items()}
        )

    def embed(
        self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None
    ) -> Condition:
        self._only_read(weights, rows)
        pooled = self.pipeline.text_encoder(tokens.tensors["ids"]).pooler_output
        states = self.pipeline.text_encoder_2(tokens.tensors["ids_2"])[0]
        return Condition(
            {
                "states": states,
                "pooled": pooled,
                "guidance": pooled.new_full((len(pooled),), self.guidance),
            }
        )

    def denoise(
        self, noisy: Tensor, t: Tensor, condition: Condition, weights: Weights | None = None
    ) -> Tensor:
        patches = super().denoise(noisy, t, condition, weights)
        grid = [side // self.patch for side in noisy.shape[-2:]]
        return F.pixel_shuffle(patches.transpose(1, 2).unflatten(2, grid), self.patch)

    def _inputs(self, noisy: Tensor, t: Tensor, condition: Condition) -> dict[str, Any]:
        tensors, device = condition.tensors, noisy.device
        tokens = F.pixel_unshuffle(noisy, self.patch)  # [b, 4c, h/2, w/2]
        rows, columns = (torch.arange(side, device=device) for side in tokens.shape[-2:])
        places = torch.cartesian_prod(
            torch.zeros(1, dtype=rows.dtype, device=device), rows, columns
        )
        return {
            "hidden_states": tokens.flatten(2).transpose(1, 2),
            "timestep": self.sigma(t).expand(len(noisy)),
            "guidance": tensors["guidance"]
            if self.pipeline.transformer.config.guidance_embeds
            else None,
            "encoder_hidden_states": tensors["states"],
            "pooled_projections": tensors["pooled"],
            "txt_ids": torch.zeros(tensors["states"].shape[1], 3, device=device),
            "img_ids": places.to(noisy.dtype),
        }

    def guide(
        self,
        x: Tensor,
        t: Tensor,
        condition: Condition,
        null: Condition,
        guidance: float,
        weights: Weights | None,
    ) -> Tensor:
        """Return the prediction with the guidance as input, as in its own sampler.

        There is no unconditional prediction.
        """
        guidance_input = torch.full_like(condition.tensors["guidance"], guidance)
        return self.denoise(
            x, t, Condition({**condition.tensors, "guidance": guidance_input}), weights
        )

    def branches(self, guidance: float) -> int:
        return 1


PLUGIN = Flux
