"""Sana: a linear transformer on the latents of a DC-AE, with cross-attention to a Gemma 2.

It is trained by flow matching (arXiv 2410.10629; its text was not read here, the definition is
diffusers' pipeline). Half of a denoiser's output that has a variance is ignored.

A prompt follows an instruction to the language model, `complex_human_instruction` of the pipeline.
The condition is the states of the first token and of the last 299. The empty prompt of the
unconditional prediction has no instruction, as in the pipeline.

The published pipelines sample with DPM-Solver on flow's sigmas. Their training schedule here is
that scheduler's with 1,000 steps: its largest sigma is just below 1. It gives the denoiser whole
numbers for time steps, and so does the training. With a FlowMatchEulerDiscreteScheduler sigma and
time steps are those of models/flow.py. The pipeline multiplies time steps by the denoiser's
`timestep_scale`, and so does the training here. diffusers' script for a LoRA does not
(examples/dreambooth/train_dreambooth_lora_sana.py, line 1423).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from concept_eraser.models.base import Condition, Weights
from concept_eraser.models.captioned import Captioned
from concept_eraser.models.flow import Flow
from concept_eraser.models.latent import ids_and_mask, tokens_of
from concept_eraser.utils.devices import send
from concept_eraser.utils.errors import UserError

LENGTH = 300  # the number of the prompt's tokens in diffusers' pipeline
STEP = 32  # the pipeline's images have a width that this divides


class Sana(Captioned, Flow):
    """A `SanaPipeline` with the interface of `Model`."""

    family = "sana"
    pipeline_class = "SanaPipeline"
    patch = 1

    def __init__(self, pipeline: Any, source: str) -> None:
        self._times: Tensor | None = None  # of the training schedule, if they are whole numbers
        super().__init__(pipeline, source)
        if not self.readers:
            raise UserError(f"{source} has no text encoder; Sana needs its Gemma (text_encoder)")
        if pipeline.transformer.config.guidance_embeds:
            raise UserError(
                f"{source} is distilled with its guidance as an input (Sana-Sprint), which is not "
                "supported for Sana"
            )
        pipeline.tokenizer.padding_side = "right"  # as the pipeline does before it encodes
        options = inspect.signature(type(pipeline).__call__).parameters
        self.instruction = "\n".join(options["complex_human_instruction"].default)

    def check_option(self, name: str, value: float) -> None:
        super().check_option(name, value)
        if name == "size" and value % STEP:
            raise UserError(
                f"size: {self.source} draws images whose width is a multiple of {STEP}, "
                f"found {value:g}"
            )

    def _is_flow(self, scheduler: Any) -> bool:
        config = scheduler.config
        return super()._is_flow(scheduler) or bool(
            config.get("use_flow_sigmas") and config.get("prediction_type") == "flow_prediction"
        )

    def samplers(self) -> list[str]:
        """Return the schedulers of the pipeline's kind: with flow's sigmas if it has them."""
        import diffusers

        if self._times is None:
            return super().samplers()
        return [
            name
            for name in super().samplers()
            if "use_flow_sigmas" in inspect.signature(getattr(diffusers, name).__init__).parameters
        ]

    def _schedule(self) -> Tensor:
        own = self.pipeline.scheduler
        if not own.config.get("use_flow_sigmas"):
            self._times = None
            return super()._schedule()
        scheduler = type(own).from_config(own.config)
        scheduler.set_timesteps(self.timesteps)
        self._times = scheduler.timesteps.flip(0)
        return scheduler.sigmas[: self.timesteps].flip(0)

    def tokenize(self, prompts: Sequence[str]) -> Condition:
        instruction = len(self.pipeline.tokenizer.encode(self.instruction))
        return self._tokens(prompts, instruction + LENGTH - 2, before=self.instruction)

    def _tokens(self, prompts: Sequence[str], length: int, *, before: str) -> Condition:
        tokens = tokens_of(self.pipeline.tokenizer, self._lower(prompts), length, before=before)
        return ids_and_mask(tokens, self.device)

    def embed(
        self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None
    ) -> Condition:
        self._only_read(weights, rows)
        ids, mask = tokens.tensors["ids"], tokens.tensors["mask"]
        states = self.pipeline.text_encoder(ids, attention_mask=mask)[0]
        return Condition({"states": self._read_tokens(states), "mask": self._read_tokens(mask)})

    def _read_tokens(self, values: Tensor) -> Tensor:
        """Return the first and the last 299 of all tokens: the instruction is left out."""
        places = [0, *range(values.shape[1] - LENGTH + 1, values.shape[1])]
        return values[:, places]

    def null(self) -> Condition:
        """Return the condition of the empty prompt without the instruction."""
        return self._encode_tokens(self._tokens([""], LENGTH, before=""))

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        factor, _ = self._vae_scale()
        return self.pipeline.vae.encode(images.to(self.device)).latent * factor

    def _inputs(self, noisy: Tensor, t: Tensor, condition: Condition) -> dict[str, Any]:
        if self._times is None:
            times = self.sigma(t) * self.timesteps
        else:
            self._times = send(self._times, t.device)  # once, and not in each step
            times = self._times[t]
        scale = self.pipeline.transformer.config.timestep_scale
        return {
            "hidden_states": noisy,
            "timestep": times.expand(len(noisy)) * scale,
            **self._text_inputs(condition),
        }

    def denoise(
        self, noisy: Tensor, t: Tensor, condition: Condition, weights: Weights | None = None
    ) -> Tensor:
        return super().denoise(noisy, t, condition, weights)[:, : noisy.shape[1]]


PLUGIN = Sana
