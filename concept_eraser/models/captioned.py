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
