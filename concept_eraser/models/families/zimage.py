"""Z-Image: a transformer on one sequence of image and text, whose text encoder is a Qwen 3.

It is trained by flow matching (arXiv 2511.22699; its text was not read here, the definition is
diffusers' pipeline). The denoiser takes 1 - sigma as its time and predicts x_0 - noise, so its
output is negated here. The states are the last but one of Qwen 3, at the tokens of the prompt in
its chat template.

The pipeline's `guidance_scale` is 0 without guidance: it adds a multiple of the difference to the
prediction for the prompt. Here guidance is 1 without guidance as in all families, so that the
pipeline gets one less. Z-Image-Turbo is sampled with guidance 1.

Image and text share all weights after the refiners. So there is no cross-attention: the selection
self_attention selects the attention of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from concept_eraser.models import chat
from concept_eraser.models.base import Condition, Weights
from concept_eraser.models.flow import Flow
from concept_eraser.models.latent import ids_and_mask, is_hollow, tokens_of
from concept_eraser.utils.errors import UserError

LENGTH = 512  # the number of tokens in diffusers' pipeline
SIZE = 1024  # the width of the pipeline's images in pixels, unless another is given


class ZImage(Flow):
    """A `ZImagePipeline` with the interface of `Model`.

    A condition is {"states": [n, tokens, width], "mask": [n, tokens]}.
    """

    family = "zimage"
    pipeline_class = "ZImagePipeline"

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        if not self.readers:
            raise UserError(f"{source} has no text encoder; Z-Image needs its Qwen (text_encoder)")
        if pipeline.transformer.config.siglip_feat_dim is not None:
            raise UserError(
                f"{source} also takes images as inputs (Z-Image-Omni), which is not supported"
            )
        chat.use_own_template(pipeline.tokenizer)

    def _default_size(self) -> int:
        return SIZE

    def tokenize(self, prompts: Sequence[str]) -> Condition:
        tokens = tokens_of(
            self.pipeline.tokenizer, prompts, LENGTH, before=chat.BEFORE, after=chat.AFTER
        )
        return ids_and_mask(tokens, self.device)

    def embed(
        self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None
    ) -> Condition:
        self._only_read(weights, rows)
        ids, mask = tokens.tensors["ids"], tokens.tensors["mask"]
        output = self.pipeline.text_encoder(
            input_ids=ids, attention_mask=mask.bool(), output_hidden_states=True
        )
        return Condition({"states": output.hidden_states[-2], "mask": mask})

    def _captions(self, condition: Condition) -> list[Tensor]:
        """Return the states of each prompt's own tokens: [tokens of the prompt, width]."""
        states, masks = condition.tensors["states"], condition.tensors["mask"].bool()
        if is_hollow(masks):  # a memory estimate counts all tokens
            return list(states)
        return [one[mask] for one, mask in zip(states, masks, strict=True)]

    def _inputs(self, noisy: Tensor, t: Tensor, condition: Condition) -> dict[str, Any]:
        return {
            "x": list(noisy[:, :, None]),  # [c, 1, h, w] each
            "t": (1 - self.sigma(t)).expand(len(noisy)),
            "cap_feats": self._captions(condition),
        }

    def denoise(
        self, noisy: Tensor, t: Tensor, condition: Condition, weights: Weights | None = None
    ) -> Tensor:
        with self._own_positions() if is_hollow(noisy) else nullcontext():
            predictions: Any = super().denoise(noisy, t, condition, weights)  # a list
        return -torch.stack(list(predictions))[:, :, 0]

    @contextmanager
    def _own_positions(self) -> Iterator[None]:
        """Keep the denoiser's stored positions away from a memory estimate's tensors."""
        rope: Any = self.pipeline.transformer.rope_embedder
        before, rope.freqs_cis = rope.freqs_cis, None
        try:
            yield
        finally:
            rope.freqs_cis = before

    def _guidance_arguments(self, guidance: float) -> dict[str, Any]:
        return {"guidance_scale": guidance - 1}

    def _sampling_arguments(self, prompts: Sequence[str] | Condition) -> dict[str, Any]:
        size = {"height": self.size, "width": self.size}
        if not isinstance(prompts, Condition):
            return {"prompt": list(prompts), **size}
        null = self.null().repeat(len(prompts))
        return {
            "prompt_embeds": self._captions(prompts),
            "negative_prompt_embeds": self._captions(null),
            **size,
        }


PLUGIN = ZImage
