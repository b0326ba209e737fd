"""PixArt-alpha and PixArt-Sigma: a transformer with cross-attention to the states of a T5.

The prediction is the noise (epsilon) on the schedule of DDPM (arXiv 2310.00426, 2403.04692; their
text was not read here, the definition is diffusers' pipeline). Half of the denoiser's output is a
variance, which is ignored: no loss uses it, and neither does diffusers' sampler.

PixArt-alpha of 1,024 pixels is also conditioned on the image's height and width in pixels, and on
their ratio. Training uses the numbers of the pipeline's sampler. diffusers reads no LoRA into these
pipelines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from concept_eraser.models import generation_stages
from concept_eraser.models.base import Condition, Weights
from concept_eraser.models.captioned import Captioned
from concept_eraser.models.latent import Variance, ids_and_mask, tokens_of
from concept_eraser.utils.errors import UserError

LENGTHS = {"PixArtAlphaPipeline": 120, "PixArtSigmaPipeline": 300}  # the pipelines' tokens of T5
CONDITIONED = 128  # sample_size of the PixArt-alpha that is conditioned on the image's size


class PixArt(Variance, Captioned):
    """A `PixArtAlphaPipeline` or `PixArtSigmaPipeline` with the interface of `Model`."""

    family = "pixart"
    pipeline_class = "PixArtAlphaPipeline"
    other_classes = ("PixArtSigmaPipeline",)
    patch = 2

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        if not self.readers:
            raise UserError(f"{source} has no text encoder; PixArt needs its T5 (text_encoder)")
        kind = type(pipeline).__name__
        self.length = LENGTHS[kind]
        self.takes_size = (
            kind == "PixArtAlphaPipeline" and pipeline.transformer.config.sample_size == CONDITIONED
        )
        if pipeline.transformer.use_additional_conditions and not self.takes_size:
            raise UserError(
                f"{source}: its transformer takes the image's size as an input "
                "(use_additional_conditions), which diffusers gives only to a PixArt-alpha with "
                f"sample_size {CONDITIONED}; found a {kind} with sample_size "
                f"{pipeline.transformer.config.sample_size}"
            )

    def tokenize(self, prompts: Sequence[str]) -> Condition:
        tokens = tokens_of(self.pipeline.tokenizer, self._lower(prompts), self.length)
        return ids_and_mask(tokens, self.device)

    def embed(
        self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None
    ) -> Condition:
        self._only_read(weights, rows)
        ids, mask = tokens.tensors["ids"], tokens.tensors["mask"]
        return Condition(
            {"states": self.pipeline.text_encoder(ids, attention_mask=mask)[0], "mask": mask}
        )

    def _inputs(self, noisy: Tensor, t: Tensor, condition: Condition) -> dict[str, Any]:
        sizes: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
        if self.takes_size:
            height, width = (side * self.pipeline.vae_scale_factor for side in noisy.shape[-2:])
            pixels = torch.tensor([[height, width]], dtype=noisy.dtype, device=noisy.device)
            sizes = {
                "resolution": pixels.expand(len(noisy), 2),
                "aspect_ratio": (pixels[:, :1] / pixels[:, 1:]).expand(len(noisy), 1),
            }
        return {
            "hidden_states": noisy,
            "timestep": t.expand(len(noisy)),
            "added_cond_kwargs": sizes,
            **self._text_inputs(condition),
        }

    def denoise(
        self, noisy: Tensor, t: Tensor, condition: Condition, weights: Weights | None = None
    ) -> Tensor:
        return super().denoise(noisy, t, condition, weights)[:, : noisy.shape[1]]

    @contextmanager
    def calling(self, steps: int) -> Iterator[None]:
        """Let `PixArtAlphaPipeline` sample in a single step inside the context.

        It takes the scheduler's second result then, the clean latents. DPM-Solver has none, and its
        single step leads there.
        """
        scheduler = self.pipeline.scheduler
        if steps != 1 or type(self.pipeline).__name__ != self.pipeline_class:
            yield
            return
        step = scheduler.step

        @functools.wraps(step)
        def with_second(*inputs: Any, **options: Any) -> Any:
            results = step(*inputs, **options)
            return (*results, results[0]) if len(results) == 1 else results

        with generation_stages.instead(scheduler, "step", with_second):
            yield

    def _reporting(self, progress: Callable[[int], None] | None) -> dict[str, Any]:
        if progress is None:
            return {}
        return {"callback": lambda step, t, latents: progress(step + 1)}


PLUGIN = PixArt
