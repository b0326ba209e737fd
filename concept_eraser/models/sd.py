"""Stable Diffusion 1.x and 2.x: UNet2DConditionModel, AutoencoderKL, one CLIP text encoder.

Epsilon- and v-prediction are told apart by the scheduler's configuration. Training always uses the schedule's
alphas (the forward process is the same for every sampler); sampling is diffusers' own pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.errors import UserError
from concept_eraser.models.base import Condition, Model, Weights
from concept_eraser.models.words import Words

log = logging.getLogger(__name__)


def quiet_libraries() -> None:
    """diffusers and transformers draw a bar for every shard they read or write; ours report the whole."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def _in_place_of(encoder: Any, rows: Tensor) -> Iterator[None]:
    """Inside, the encoder's tokens have these embeddings; positions, masks and pooling go by the ids it is given."""
    hook = encoder.get_input_embeddings().register_forward_hook(lambda layer, inputs, output: rows)
    try:
        yield
    finally:
        hook.remove()


class StableDiffusion(Model):
    """A `StableDiffusionPipeline` behind the family's face."""

    family = "sd"

    def __init__(self, pipeline: Any, source: str) -> None:
        self.pipeline = pipeline
        self.source = source
        self.parts = {"denoiser": pipeline.unet, "text_encoder": pipeline.text_encoder, "vae": pipeline.vae}
        for part in self.parts.values():
            part.float().eval().requires_grad_(False)  # stored in half precision or not, weights are trained in fp32
        schedule = pipeline.scheduler.config
        self.timesteps = int(schedule.num_train_timesteps)
        self.prediction = schedule.prediction_type
        if self.prediction not in ("epsilon", "v_prediction"):
            raise UserError(
                f"{source}: prediction type {self.prediction!r} is not supported; epsilon, v_prediction are"
            )
        self._alphas: Tensor = pipeline.scheduler.alphas_cumprod.float()
        pipeline.set_progress_bar_config(disable=True)

    @classmethod
    def from_folder(cls, folder: str, *, source: str, **options: Any) -> StableDiffusion:
        from diffusers import StableDiffusionPipeline

        quiet_libraries()
        # A safety checker would black out pictures behind the evaluation's back; it is not part of the model.
        pipeline = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None, feature_extractor=None, requires_safety_checker=False, **options)  # fmt: skip
        return cls(pipeline, source)

    def to(self, device: torch.device) -> StableDiffusion:
        self.pipeline.to(device)
        return self

    def tokenize(self, prompts: Sequence[str]) -> Condition:
        tokenizer = self.pipeline.tokenizer
        length = tokenizer.model_max_length
        tokens = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        over = [p for p in prompts if len(p) > length and len(tokenizer(p).input_ids) > length]
        if over:
            named = "; ".join(f"{p[:60]!r}" for p in list(dict.fromkeys(over))[:5]) + ("; ..." if len(set(over)) > 5 else "")  # fmt: skip
            log.warning("%d of %d prompts are longer than the model's %d tokens and were cut: %s", len(over), len(prompts), length, named)  # fmt: skip
        found = {"ids": tokens.input_ids.to(self.device)}
        if self._masked:
            found["mask"] = tokens.attention_mask.to(self.device)
        return Condition(found)

    def embed(self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None) -> Condition:
        encoder: nn.Module = self.pipeline.text_encoder
        mask = tokens.tensors.get("mask")
        if mask is None and self._masked:  # tokens that did not come from a text: all up to the first end count
            ended = (tokens.tensors["ids"] == self.words.end).long()
            mask = (ended.cumsum(1) - ended == 0).long()
        given = {"attention_mask": mask}
        with _in_place_of(encoder, rows) if rows is not None else nullcontext():
            if weights is None:
                return Condition({"states": encoder(tokens.tensors["ids"], **given)[0]})
            return Condition({"states": torch.func.functional_call(encoder, dict(weights), (tokens.tensors["ids"],), given)[0]})  # fmt: skip

    @property
    def _masked(self) -> bool:
        return bool(getattr(self.pipeline.text_encoder.config, "use_attention_mask", False))

    @cached_property
    def words(self) -> Words:
        return Words(self.pipeline.tokenizer)

    @property
    def table(self) -> Tensor:
        return self.pipeline.text_encoder.get_input_embeddings().weight

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return vae.encode(images.to(self.device)).latent_dist.mean * vae.config.scaling_factor

    def latent_shape(self) -> tuple[int, int, int]:
        size = self.pipeline.unet.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        return int(self.pipeline.unet.config.in_channels), int(height), int(width)

    def _signal(self, t: Tensor) -> tuple[Tensor, Tensor]:
        alpha = self._alphas.to(t.device)[t].view(-1, 1, 1, 1)
        return alpha.sqrt(), (1 - alpha).sqrt()

    def corrupt(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        signal, sigma = self._signal(t)
        return signal * latents + sigma * noise

    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        if self.prediction == "epsilon":
            return noise
        signal, sigma = self._signal(t)
        return signal * noise - sigma * latents

    def clean(self, noisy: Tensor, t: Tensor, prediction: Tensor) -> Tensor:
        signal, sigma = self._signal(t)
        if self.prediction == "epsilon":
            return (noisy - sigma * prediction) / signal
        return signal * noisy - sigma * prediction

    def decode(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return vae.decode(latents / vae.config.scaling_factor).sample

    def denoise(self, noisy: Tensor, t: Tensor, condition: Condition, weights: Weights | None = None) -> Tensor:
        unet: nn.Module = self.pipeline.unet
        inputs = (noisy, t, condition.tensors["states"])
        if weights is None:
            return unet(*inputs).sample
        return torch.func.functional_call(unet, dict(weights), inputs).sample

    @torch.no_grad()
    def partial(self, noise: Tensor, condition: Condition, null: Condition, *, stop: int, steps: int, guidance: float, weights: Weights | None = None) -> tuple[Tensor, int]:  # fmt: skip
        from diffusers import DDIMScheduler

        scheduler = DDIMScheduler.from_config(self.pipeline.scheduler.config)
        scheduler.set_timesteps(steps, device=self.device)
        n = len(condition)
        x = noise * scheduler.init_noise_sigma
        both = Condition({k: torch.cat([null.tensors[k], v]) for k, v in condition.tensors.items()})
        for t in scheduler.timesteps[:stop]:
            free, given = self.denoise(x.repeat(2, 1, 1, 1), t.expand(2 * n), both, weights).chunk(2)
            x = scheduler.step(free + guidance * (given - free), t, x).prev_sample
        return x, int(scheduler.timesteps[stop])

    @torch.no_grad()
    def sample(self, prompts: Sequence[str] | Condition, *, seeds: Sequence[int], steps: int, guidance: float, autocast: torch.dtype | None = None, progress: Callable[[int], None] | None = None) -> Tensor:  # fmt: skip
        if len(prompts) != len(seeds):
            raise ValueError(f"one seed per prompt is needed, found {len(prompts)} prompts and {len(seeds)} seeds")
        # noise is drawn on the CPU, one generator an image: a picture depends on its own seed, not on its batch
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]

        def report(pipe: Any, step: int, t: Any, values: dict) -> dict:
            if progress:
                progress(step + 1)
            return values

        asked: dict[str, Any] = {"prompt": list(prompts)} if not isinstance(prompts, Condition) else {"prompt_embeds": prompts.tensors["states"], "negative_prompt_embeds": self.encode([""]).repeat(len(prompts)).tensors["states"]}  # fmt: skip
        with self.precision(autocast):
            images = self.pipeline(**asked, generator=generators, num_inference_steps=steps, guidance_scale=guidance, output_type="pt", callback_on_step_end=report).images  # fmt: skip
        return images.float().mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu()

    def take_text_tower(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the text encoder's weights by those of a CLIP text tower, named from its root, in place.

        Raises UserError where the two are not the same architecture; then nothing was changed.
        """
        own = self.pipeline.text_encoder.state_dict()
        given = {name: tensors.get(name.removeprefix("text_model.")) for name in own}
        wrong = [k for k, v in given.items() if v is None or v.shape != own[k].shape]
        wrong += [k for k in tensors if k.startswith("encoder.layers.") and k not in {n.removeprefix("text_model.") for n in own}]  # fmt: skip
        if wrong:
            raise UserError(f"the text tower does not fit the text encoder of {self.source}, e.g. {wrong[0]}" + (f": {list(own[wrong[0]].shape)} is needed" if wrong[0] in own else " has no place there"))  # fmt: skip
        self.pipeline.text_encoder.load_state_dict(given)

    def save(self, folder: Path) -> None:
        self.pipeline.save_pretrained(folder, safe_serialization=True)


PLUGIN = StableDiffusion
