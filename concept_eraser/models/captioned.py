"""Families whose one text encoder is no CLIP, and whose text has a mask (PixArt, Sana).

A condition is {"states": [n, tokens, width], "mask": [n, tokens]}. The mask is 1 for the tokens of
the prompt and 0 for padding, which the denoiser does not attend to.

diffusers' pipelines for them generate images of a fixed list of sizes and resize them, unless
`use_resolution_binning` is off. Here it is off: an image is generated at the size of the model. At
the pipeline's own size this makes no difference. `clean_caption` is off too: it changes prompts
only if two further packages are installed, so that images would depend on these. Prompts are
written in lower case, as the pipelines do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.models.base import Condition
from concept_eraser.models.latent import Sized


class Captioned(Sized):
    """A pipeline with `prompt_attention_mask`, with the interface of `Model`."""

    network = "transformer"

    def _default_size(self) -> int:
        return int(self.pipeline.transformer.config.sample_size * self.pipeline.vae_scale_factor)

    def _lower(self, prompts: Sequence[str]) -> list[str]:
        """Return prompts as the pipeline's tokenizer gets them."""
        return list(self.pipeline._text_preprocessing(list(prompts), clean_caption=False))

    @torch.no_grad()
    def attended_text(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the keys and values of the cross-attention read of prompts.

        The denoiser projects the text's states, each token by itself, before its first block. The
        empty prompt is that of the unconditional prediction.

        Returns:
            Token ids [n, tokens]; mask [n, tokens], 1 for the prompt's own tokens; projected states
            [n, tokens, width].
        """
        tokens = self.tokenize(prompts)
        condition = self._encode_tokens(tokens).tensors
        states, mask = condition["states"].clone(), condition["mask"].clone()
        null = self.null().tensors
        for i, prompt in enumerate(prompts):
            if not prompt:
                states[i], mask[i] = null["states"][0], null["mask"][0]
        network: Any = self.pipeline.transformer
        states = network.caption_projection(states)
        if hasattr(network, "caption_norm"):
            states = network.caption_norm(states)
        return self._read_tokens(tokens.tensors["ids"]), mask, states

    def _read_tokens(self, values: Tensor) -> Tensor:
        """Return those of all tokens [n, tokens] whose states the denoiser gets."""
        return values

    def attention_layers(self) -> list[nn.Module]:
        """Return none: `models/cross_attention.py` has no masks, and tokens of CLIP only."""
        return []

    def _sampling_arguments(self, prompts: Sequence[str] | Condition) -> dict[str, Any]:
        size = {"height": self.size, "width": self.size, "use_resolution_binning": False}
        if not isinstance(prompts, Condition):
            return {"prompt": list(prompts), "clean_caption": False, **size}
        null = self.null().repeat(len(prompts)).tensors
        return {
            "prompt_embeds": prompts.tensors["states"],
            "prompt_attention_mask": prompts.tensors["mask"],
            "negative_prompt": None,
            "negative_prompt_embeds": null["states"],
            "negative_prompt_attention_mask": null["mask"],
            **size,
        }

    def _text_inputs(self, condition: Condition) -> dict[str, Tensor]:
        """Return the denoiser's inputs that a condition holds."""
        return {
            "encoder_hidden_states": condition.tensors["states"],
            "encoder_attention_mask": condition.tensors["mask"],
        }
