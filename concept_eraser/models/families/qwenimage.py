"""Qwen-Image: an MMDiT whose text encoder is Qwen 2.5 VL, on the latents of a VAE for videos.

It is trained by flow matching (arXiv 2508.02324; its text was not read here, the definition is
diffusers' pipeline). The states are the last of Qwen 2.5 VL at the tokens after the system's part
of the pipeline's template. The denoiser takes the latents packed, each 2 x 2 as one token. In the
interface they are an image [b, c, h, w]; the VAE gets them as a video of one frame. Each channel of
its code has a mean and a deviation of its own.

With guidance the pipeline scales the guided prediction of each token to the length of the
prediction for the prompt. So does `guide`. The empty prompt of the unconditional prediction is one
space, as the model's authors sample.

A scheduler with `shift_terminal` stretches its sigmas by their number, which is a matter of
sampling: the training schedule has the shift by the image's size only. The selection
cross_attention is the text's part of the joint attention (see recipes/selections.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.models.base import Condition, Weights
from concept_eraser.models.flow import Flow
from concept_eraser.models.latent import ids_and_mask, is_hollow, tokens_of
from concept_eraser.utils.errors import UserError

LENGTH = 512  # the number of the prompt's tokens in diffusers' pipeline
EMPTY = " "


class QwenImage(Flow):
    """A `QwenImagePipeline` with the interface of `Model`.

    A condition is {"states": [n, tokens, width], "mask": [n, tokens]}.
    """

    family = "qwenimage"
    pipeline_class = "QwenImagePipeline"

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        if not self.readers:
            raise UserError(
                f"{source} has no text encoder; Qwen-Image needs its Qwen 2.5 VL (text_encoder)"
            )
        config = pipeline.transformer.config
        if config.guidance_embeds or config.zero_cond_t or config.use_additional_t_cond:
            raise UserError(
                f"{source} has a denoiser with further inputs (guidance, images or layers), which "
                "is not supported; use a Qwen-Image for text to image"
            )
        pipeline.tokenizer.padding_side = "right"

    @property
    def channels(self) -> int:
        return super().channels // self.patch**2

    def tokenize(self, prompts: Sequence[str]) -> Condition:
        before, after = self.pipeline.prompt_template_encode.split("{}")
        length = self.pipeline.prompt_template_encode_start_idx + LENGTH
        tokens = tokens_of(self.pipeline.tokenizer, prompts, length, before=before, after=after)
        return ids_and_mask(tokens, self.device)

    def embed(
        self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None
    ) -> Condition:
        self._only_read(weights, rows)
        start = self.pipeline.prompt_template_encode_start_idx
        ids, mask = tokens.tensors["ids"], tokens.tensors["mask"]
        states = self.pipeline.text_encoder(
            input_ids=ids, attention_mask=mask, output_hidden_states=True
        ).hidden_states[-1]
        own = mask[:, start:]
        return Condition({"states": states[:, start:] * own[..., None], "mask": own})

    def null(self) -> Condition:
        return self.encode([EMPTY])

    def _vae_scales(self) -> tuple[Tensor, Tensor]:
        """Return deviation and mean of the VAE's codes, [c, 1, 1]."""
        config = self.pipeline.vae.config
        values = [
            torch.tensor(v, device=self.device).view(-1, 1, 1)
            for v in (config.latents_std, config.latents_mean)
        ]
        return values[0], values[1]

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        deviation, mean = self._vae_scales()
        code = self.pipeline.vae.encode(images.to(self.device)[:, :, None]).latent_dist.mean
        return (code[:, :, 0] - mean) / deviation

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to images. This VAE clips them to [-1, 1]."""
        deviation, mean = self._vae_scales()
        return self.pipeline.vae.decode((latents * deviation + mean)[:, :, None]).sample[:, :, 0]

    def _trim(self, condition: Condition) -> tuple[Tensor, Tensor, bool]:
        """Return states and mask up to the longest prompt, and whether all are as long.

        The pipeline pads a batch in the same way.
        """
        states, mask = condition.tensors["states"], condition.tensors["mask"]
        if is_hollow(mask):  # a memory estimate counts all tokens
            return states, mask, False
        lengths = mask.sum(1).tolist()
        longest = max(lengths)
        return states[:, :longest], mask[:, :longest], min(lengths) == longest

    def _inputs(self, noisy: Tensor, t: Tensor, condition: Condition) -> dict[str, Any]:
        tokens = F.pixel_unshuffle(noisy, self.patch)  # [b, 4c, h/2, w/2]
        states, mask, is_full = self._trim(condition)
        return {
            "hidden_states": tokens.flatten(2).transpose(1, 2),
            "timestep": self.sigma(t).expand(len(noisy)),
            "img_shapes": [[(1, *tokens.shape[-2:])]] * len(noisy),
            "encoder_hidden_states": states,
            "encoder_hidden_states_mask": None if is_full else mask,
        }

    def denoise(
        self, noisy: Tensor, t: Tensor, condition: Condition, weights: Weights | None = None
    ) -> Tensor:
        with self._own_positions() if is_hollow(noisy) else nullcontext():
            patches = super().denoise(noisy, t, condition, weights)
        grid = [side // self.patch for side in noisy.shape[-2:]]
        return F.pixel_shuffle(patches.transpose(1, 2).unflatten(2, grid), self.patch)

    @contextmanager
    def _own_positions(self) -> Iterator[None]:
        """Keep diffusers' cache of positions away from a memory estimate's tensors."""
        network: Any = self.pipeline.transformer
        before = network.pos_embed
        network.pos_embed = type(before)(before.theta, before.axes_dim, before.scale_rope)
        try:
            yield
        finally:
            network.pos_embed = before

    def guide(
        self,
        x: Tensor,
        t: Tensor,
        condition: Condition,
        null: Condition,
        guidance: float,
        weights: Weights | None,
    ) -> Tensor:
        """Return the guided prediction, each token as long as the prediction for the prompt."""
        times = t.expand(len(x))
        conditional = self.denoise(x, times, condition, weights)
        if guidance <= 1:
            return conditional
        unconditional = self.denoise(x, times, null, weights)
        guided = unconditional + guidance * (conditional - unconditional)
        own, other = (
            F.pixel_unshuffle(one, self.patch).norm(dim=1, keepdim=True)
            for one in (conditional, guided)
        )
        return guided * (own / other).repeat_interleave(self.patch, 2).repeat_interleave(
            self.patch, 3
        )

    def readings(self, guidance: float) -> int:
        return 2 if guidance > 1 else 1

    def _guidance_arguments(self, guidance: float) -> dict[str, Any]:
        if guidance > 1:
            return {"true_cfg_scale": guidance}
        unused = ("negative_prompt", "negative_prompt_embeds", "negative_prompt_embeds_mask")
        return {"true_cfg_scale": 1.0, **dict.fromkeys(unused)}

    def _sampling_arguments(self, prompts: Sequence[str] | Condition) -> dict[str, Any]:
        size = {"height": self.size, "width": self.size}
        if not isinstance(prompts, Condition):
            return {"prompt": list(prompts), "negative_prompt": [EMPTY] * len(prompts), **size}
        states, mask, _ = self._trim(prompts)
        null_states, null_mask, _ = self._trim(self.null().repeat(len(prompts)))
        return {
            "prompt_embeds": states,
            "prompt_embeds_mask": mask,
            "negative_prompt_embeds": null_states,
            "negative_prompt_embeds_mask": null_mask,
            **size,
        }


PLUGIN = QwenImage
