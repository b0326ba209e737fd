"""Base classes of the families that denoise the latents of a VAE by a pipeline of diffusers.

Also epsilon- and v-prediction. Sampling is diffusers' own pipeline. Training always uses the
schedule's alphas: the forward process is the same for every sampler.

Latents of an image are the mean of the VAE's posterior, so that they depend on the image alone. The
training scripts of diffusers for Stable Diffusion, SDXL, SD 3, Flux and Qwen-Image draw from the
posterior (examples/text_to_image/train_text_to_image.py, line 968); those for Z-Image and Flux.2
Klein take its mode, which is the mean.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from concept_eraser.models import cross_attention, generation_stages, residual_gate
from concept_eraser.models.base import AncestralStep, Condition, Model, Weights
from concept_eraser.models.safeguards import Guard, protected_name
from concept_eraser.models.stored_parts import StoredPart
from concept_eraser.models.vocabulary import Words
from concept_eraser.storage.readers import read_json
from concept_eraser.utils.devices import send
from concept_eraser.utils.errors import UserError, unknown

log = logging.getLogger(__name__)
SENTENCE = "A photo of the naïve étoile, 12 red stars & co!"
READERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
# entries of a configuration that say where weights came from, beside those that begin with _
NOT_COMPUTED = ("architectures", "dtype", "torch_dtype", "transformers_version")
ENDS = 2  # tokens that a tokenizer adds to a text: its begin and its end


def quiet_libraries() -> None:
    """Suppress the progress bars of diffusers and transformers inside the context.

    They draw one for every shard that they read or write. The package reports the progress of the
    whole.
    """
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def tokens_of(
    tokenizer: Any, prompts: Sequence[str], length: int, *, before: str = "", after: str = ""
) -> Any:
    """Return ids and mask of some prompts, padded to `length`.

    Longer prompts are cut off and named in a warning.

    Args:
        tokenizer: A tokenizer of transformers.
        prompts: The prompts.
        length: The number of tokens.
        before: A text that precedes each prompt.
        after: A text that follows each prompt.
    """
    texts = {prompt: before + prompt + after for prompt in prompts}
    tokens = tokenizer(
        [texts[prompt] for prompt in prompts],
        padding="max_length",
        max_length=length,
        truncation=True,
        return_tensors="pt",
    )
    # a text has at most one token for each byte, and those of its begin and end
    long_prompts = [
        p
        for p in prompts
        if len(texts[p].encode(errors="replace")) + ENDS > length
        and len(tokenizer(texts[p]).input_ids) > length
    ]
    if long_prompts:
        examples = "; ".join(f"{p[:60]!r}" for p in list(dict.fromkeys(long_prompts))[:5]) + (
            "; ..." if len(set(long_prompts)) > 5 else ""
        )
        log.warning(
            "%d of %d prompts are longer than the model's %d tokens and were cut: %s",
            len(long_prompts),
            len(prompts),
            length,
            examples,
        )
    return tokens


def ids_and_mask(tokens: Any, device: torch.device) -> Condition:
    """Return ids and mask of `tokens_of`: {"ids": [n, tokens], "mask": [n, tokens]}."""
    return Condition({"ids": tokens.input_ids.to(device), "mask": tokens.attention_mask.to(device)})


def is_hollow(value: Tensor) -> bool:
    """Whether a tensor has a shape and no content, as in a memory estimate."""
    from torch._subclasses.fake_tensor import FakeTensor

    return value.is_meta or isinstance(value, FakeTensor)


def penultimate(encoder: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return a CLIP text encoder's last but one hidden states, and its first output.

    The states are [n, length, width]. For an encoder with a projection the first output is [n,
    width], projected from the end token.
    """
    output = encoder(ids, output_hidden_states=True)
    return output.hidden_states[-2], output[0]


def require_text_to_image(pipeline: Any, source: str) -> None:
    """Raise UserError for a UNet that takes more than noised latents, time steps and texts."""
    config, channels = pipeline.unet.config, pipeline.vae.config.latent_channels
    if config.in_channels != channels:
        raise UserError(
            f"{source}: its UNet takes {config.in_channels} channels and its VAE has latents of "
            f"{channels}, as in models for inpainting or editing, which are not supported; use a "
            "checkpoint for text to image"
        )
    if config.time_cond_proj_dim is not None:
        raise UserError(
            f"{source} is distilled with its guidance as an input (a latent consistency model), "
            "which is not supported; use the checkpoint that it was distilled from"
        )


def _settings(config: Any) -> dict[str, str]:
    """Return the entries of a configuration that change what is computed, as texts."""
    entries = config.items() if isinstance(config, Mapping) else config.to_dict().items()
    return {
        key: str(value)
        for key, value in sorted(entries)
        if not key.startswith("_") and key not in NOT_COMPUTED
    }


class Latent(Model):
    """A pipeline with an AutoencoderKL, with the interface of `Model`.

    A family defines the inputs of its denoiser (`_inputs`) and the arguments of its pipeline
    (`_sampling_arguments`).
    """

    pipeline_class: ClassVar[str]
    other_classes: ClassVar[Sequence[str]] = ()  # further pipeline classes of the family
    network: ClassVar[str] = "unet"  # the pipeline's name of its denoiser
    left_out: ClassVar[Mapping[str, Any]] = {}  # components that the pipeline is loaded without
    # precision of frozen weights if it is not fp32 (training/placement.py): the denoiser's, the
    # text encoders'
    frozen_dtype: torch.dtype | None = None
    reader_dtype: torch.dtype | None = None
    guard: Guard | None = None  # a safeguard during sampling

    def drawing(self) -> dict[str, Any]:
        """The latents' shape, the configurations of sampler and parts, and a sentence's tokens."""
        scheduler = self.pipeline.scheduler
        tokenizers = [
            getattr(self.pipeline, name, None)
            for name in ("tokenizer", "tokenizer_2", "tokenizer_3")
        ]
        encodings = [
            [*t(SENTENCE).input_ids, t.pad_token_id, int(t.model_max_length)]
            for t in tokenizers
            if t is not None
        ]
        settings = {
            "pipeline": type(self.pipeline).__name__,
            "scheduler": [
                type(scheduler).__name__,
                _settings(scheduler.config),
            ],
            # such as SDXL's force_zeros_for_empty_prompt; other entries name classes and paths
            "switches": {
                key: value
                for key, value in _settings(self.pipeline.config).items()
                if value in ("True", "False") and key != "requires_safety_checker"
            },
            "parts": {
                name: _settings(part.config)
                for name, part in sorted(self.parts.items())
                if hasattr(part, "config")
            },
        }
        guard = self.guard.drawing(self) if self.guard else {}
        return {**super().drawing(), **settings, "tokens": encodings, **guard}

    def __init__(self, pipeline: Any, source: str) -> None:
        self.pipeline, self.source = pipeline, source
        readers = [name for name in READERS if getattr(pipeline, name, None) is not None]
        names = {"denoiser": self.network, **{name: name for name in readers}, "vae": "vae"}
        self.parts = {part: getattr(pipeline, name) for part, name in names.items()}
        self.stored = {name: StoredPart.of_module(part) for name, part in self.parts.items()}
        for part in self.parts.values():
            # weights are trained in fp32, even if they are stored in half precision
            part.float().eval().requires_grad_(False)
        self.timesteps = int(pipeline.scheduler.config.num_train_timesteps)
        pipeline.set_progress_bar_config(disable=True)

    @classmethod
    def _class_of(cls, folder: Path) -> str:
        """Return the pipeline class of a diffusers folder."""
        named = read_json(folder / "model_index.json").get("_class_name")
        return str(named) if named in cls.other_classes else cls.pipeline_class

    @classmethod
    def from_folder(cls, folder: str, *, source: str, **options: Any) -> Self:
        import diffusers

        quiet_libraries()
        family: Any = getattr(diffusers, cls._class_of(Path(folder)))
        # a part saved as absent ([null, null], SD 3 without T5) must be passed as None, or
        # diffusers requires it
        absent = {
            name: None
            for name, entry in family.load_config(folder).items()
            if entry in ([None, None], (None, None))
        }
        model = cls(family.from_pretrained(folder, **{**absent, **cls.left_out}, **options), source)
        model.remember_files(Path(folder))
        return model

    @classmethod
    def outline(cls, folder: Path, *, source: str) -> Self:
        """Return the model of a diffusers folder without its weights.

        They are on the meta device, which has names and shapes only. No file of weights is opened.

        Args:
            folder: The folder, checked by `folder_check.check_pipeline`.
            source: The model's name.
        """
        import diffusers
        import transformers

        quiet_libraries()
        family: Any = getattr(diffusers, cls._class_of(folder))
        components: dict[str, Any] = {}
        for name, entry in family.load_config(folder).items():
            if name in cls.left_out or not isinstance(entry, list | tuple):
                continue
            if tuple(entry) == (None, None):
                components[name] = None
            elif name in (cls.network, "vae", *READERS):
                library, kind = entry
                with torch.device("meta"):
                    if library == "diffusers":
                        kind = getattr(diffusers, kind)
                        components[name] = kind.from_config(kind.load_config(folder / name))
                    else:
                        kind = getattr(transformers, kind)
                        config = kind.config_class.from_pretrained(folder / name)
                        components[name] = kind(config)
        return cls(family.from_pretrained(folder, **{**components, **cls.left_out}), source)

    def remember_files(self, folder: Path) -> None:
        """Remember that the parts came from a diffusers folder: their files and their precision."""
        for part, name in self._component_names().items():
            if (folder / name).is_dir():
                self.stored[part] = StoredPart.of_folder(self.parts[part], folder / name)

    def remember_file(self, file: Path) -> None:
        """Remember that all parts came from a single file: its precision."""
        for part, module in self.parts.items():
            self.stored[part] = StoredPart.of_file(module, file)

    def _component_names(self) -> dict[str, str]:
        """Return the pipeline's name of each part."""
        return {part: self.network if part == "denoiser" else part for part in self.parts}

    def to(self, device: torch.device) -> Self:
        self.pipeline.to(device)
        return self

    def save(self, folder: Path) -> None:
        """Write a diffusers folder in the precision of the checkpoint.

        Parts that are as in the checkpoint are copies of its files (see `stored_parts`). Raises
        UserError if the denoiser has a gate.
        """
        residual_gate.refuse(self, "write a pipeline of diffusers")
        folder.mkdir(parents=True, exist_ok=True)
        stored = {
            name: (self.parts[part], self.stored[part])
            for part, name in self._component_names().items()
        }
        for name, component in self.pipeline.components.items():
            if name in stored:
                module, stored_part = stored[name]
                stored_part.save(module, folder / name)
            elif hasattr(component, "save_pretrained"):
                component.save_pretrained(folder / name)
        self.pipeline.save_config(folder)

    @property
    def words(self) -> Words:
        raise self.lacks("an attack on tokens")

    @property
    def table(self) -> Tensor:
        raise self.lacks("an attack on token embeddings")

    def take_text_tower(
        self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None
    ) -> None:
        raise self.lacks("putting in a CLIP text tower")

    def protect(self, guard: Guard) -> None:
        """Sample under a safeguard from now on.

        Raises UserError if the family has no single text encoder for it, or if it needs a LoRA
        that is not there or does not fit.
        """
        if not self.has_clip_words:
            raise self.lacks(f"the safeguard {guard.kind!r}")
        guard.check(self)
        self.guard, self.source = guard, protected_name(self.source, guard)

    def _only_read(self, weights: Weights | None, rows: Tensor | None) -> None:
        """Raise UserError if an encoder's weights or its tokens' embeddings are to be replaced."""
        if weights is not None:
            raise self.lacks("training the text encoder")
        if rows is not None:
            raise self.lacks("an attack on token embeddings")

    def _vae_scale(self) -> tuple[float, float]:
        """Return (factor, shift) of the VAE's codes: latents = (code - shift) x factor."""
        config = self.pipeline.vae.config
        return float(config.scaling_factor), float(getattr(config, "shift_factor", None) or 0.0)

    def encode(self, prompts: Sequence[str]) -> Condition:
        return self._encode_tokens(self.tokenize(prompts))

    @torch.no_grad()
    def _encode_tokens(self, tokens: Condition) -> Condition:
        """Convert tokens to a condition in fp32, without gradients."""
        if self.reader_dtype is None:
            return self.embed(tokens)
        with self.precision(self.reader_dtype):
            condition = self.embed(tokens)
        return Condition(
            {k: v.float() if v.is_floating_point() else v for k, v in condition.tensors.items()}
        )

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        factor, shift = self._vae_scale()
        return (self.pipeline.vae.encode(images.to(self.device)).latent_dist.mean - shift) * factor

    def decode(self, latents: Tensor) -> Tensor:
        factor, shift = self._vae_scale()
        return self.pipeline.vae.decode(latents / factor + shift).sample

    def _inputs(self, noisy: Tensor, t: Tensor, condition: Condition) -> dict[str, Any]:
        """Return the inputs of the denoiser, by its own names."""
        raise NotImplementedError

    def denoise(
        self, noisy: Tensor, t: Tensor, condition: Condition, weights: Weights | None = None
    ) -> Tensor:
        network: nn.Module = self.denoiser
        inputs = self._inputs(noisy, t, condition)
        with self.precision(self.frozen_dtype):
            if weights is None:
                return network(**inputs).sample
            return torch.func.functional_call(
                network, dict(weights), (), inputs, tie_weights=self._has_ties
            ).sample

    @cached_property
    def _has_ties(self) -> bool:
        """Whether a tensor of the denoiser has several names. Each call would look for them."""
        both = (
            self.denoiser.named_parameters(remove_duplicate=False),
            self.denoiser.named_buffers(remove_duplicate=False),
        )
        return any(
            len(ids) > len(set(ids)) for ids in ([id(t) for _, t in named] for named in both)
        )

    def attention_layers(self) -> list[nn.Module]:
        return cross_attention.layers(self.denoiser)

    def attention(self, noisy: Tensor, t: Tensor, condition: Condition) -> list[Tensor]:
        # the maps are computed from the layers' inputs after the run
        with self.precision(self.frozen_dtype):
            return cross_attention.maps(
                self.attention_layers(), lambda: self.denoise(noisy, t, condition)
            )

    def detach_start_token(self) -> list[RemovableHandle]:
        return cross_attention.detach_start_token(self.attention_layers())

    def concept_tokens(
        self, prompts: Sequence[str], anchors: Sequence[str] | None, *, end: bool
    ) -> Tensor:
        words = Words(self.pipeline.tokenizer)
        ids = [
            tokens_of(words.tokenizer, some, words.length).input_ids
            for some in (prompts, anchors)
            if some is not None
        ]
        return cross_attention.concept_tokens(
            ids[0], ids[1] if anchors is not None else None, words, end=end
        )

    def checkpoint(self, on: bool) -> None:
        """Store the denoiser's activations between its blocks only, and recompute the others.

        They are recomputed in the backward pass. diffusers' checkpointing is non-reentrant, so that
        `torch.autograd.grad` and second derivatives work. It depends on whether gradients are
        needed, not on the training mode, so that teachers are not slowed down. Blocks are
        recomputed with the module's own weights: never differentiate through `denoise` with
        `weights` while it is on.
        """
        network: Any = self.denoiser
        network.enable_gradient_checkpointing() if on else network.disable_gradient_checkpointing()

    def guide(
        self,
        x: Tensor,
        t: Tensor,
        condition: Condition,
        null: Condition,
        guidance: float,
        weights: Weights | None,
    ) -> Tensor:
        """Return the prediction with classifier-free guidance at one time step t [1].

        With guidance 1 or less it is that for the prompt alone, as in diffusers' pipelines.
        """
        n = len(condition)
        if guidance <= 1:
            return self.denoise(x, t.expand(n), condition, weights)
        conditions = Condition(
            {k: torch.cat([null.tensors[k], v]) for k, v in condition.tensors.items()}
        )
        unconditional, conditional = self.denoise(
            x.repeat(2, 1, 1, 1), t.expand(2 * n), conditions, weights
        ).chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    def _sampling_arguments(self, prompts: Sequence[str] | Condition) -> dict[str, Any]:
        """Return the arguments of the pipeline for images of some prompts."""
        raise NotImplementedError

    def _guidance_arguments(self, guidance: float) -> dict[str, Any]:
        """Return the arguments of the pipeline for guidance, where 1 is without it.

        They come after those of `_sampling_arguments`, and replace them.
        """
        return {"guidance_scale": guidance}

    def pipeline_arguments(
        self, prompts: Sequence[str] | Condition, guidance: float
    ) -> dict[str, Any]:
        """Return the arguments of the pipeline's call for prompts and guidance."""
        return {**self._sampling_arguments(prompts), **self._guidance_arguments(guidance)}

    def readings(self, guidance: float) -> int:
        """Return how often the pipeline's call encodes prompts (see `generation_stages`)."""
        return 1

    def calling(self, steps: int) -> AbstractContextManager[None]:
        """Return the context of a call of the pipeline with so many steps."""
        return nullcontext()

    def _reporting(self, progress: Callable[[int], None] | None) -> dict[str, Any]:
        """Return the arguments of the pipeline that report its steps."""

        def report(pipe: Any, step: int, t: Any, values: dict) -> dict:
            if progress:
                progress(step + 1)
            return values

        return {"callback_on_step_end": report}

    def allow(self, guidance: float) -> None:
        """Raise UserError if the pipeline cannot sample with that guidance."""

    def samplers(self) -> list[str]:
        """Return the names of diffusers' schedulers that fit the model."""
        own = self.pipeline.scheduler
        return sorted({one.__name__ for one in (type(own), *own.compatibles)})

    @contextmanager
    def sampler(self, name: str) -> Iterator[None]:
        """Sample with another scheduler of diffusers inside the context.

        Args:
            name: The name of its class, "" for the pipeline's own.

        Raises:
            UserError: The scheduler does not fit the model.
        """
        import diffusers

        if not name:
            yield
            return
        if name not in self.samplers():
            raise unknown(f"sampler of {self.source}", name, self.samplers())
        own, scheduler = self.pipeline.scheduler, getattr(diffusers, name)
        settings = {}
        if "clip_sample" in inspect.signature(scheduler.__init__).parameters:
            # the default clips x_0 to [-1, 1], which latents exceed
            settings["clip_sample"] = own.config.get("clip_sample", False)
        self.pipeline.scheduler = scheduler.from_config(own.config, **settings)
        try:
            yield
        finally:
            self.pipeline.scheduler = own

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[str] | Condition,
        *,
        seeds: Sequence[int],
        steps: int,
        guidance: float,
        autocast: torch.dtype | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Tensor:
        if len(prompts) != len(seeds):
            raise ValueError(
                f"one seed per prompt is needed, found {len(prompts)} prompts and "
                f"{len(seeds)} seeds"
            )
        # noise is drawn on the CPU, with one generator for each image, so that an image depends on
        # its own seed and not on its batch
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        safeguard = self.guard.around(self, prompts) if self.guard else nullcontext()
        with self.precision(autocast or self.frozen_dtype), safeguard, self.calling(steps):
            images = self.pipeline(
                **self.pipeline_arguments(prompts, guidance),
                generator=generators,
                num_inference_steps=steps,
                output_type="pt",
                **self._reporting(progress),
            ).images
        return generation_stages.to_bytes(images)


class Sized(Latent):
    """Families for images of any size.

    They have the option `size` in pixels, by default the pipeline's own.
    """

    options: ClassVar[Mapping[str, str]] = {
        "size": "width and height of the images in pixels (default: the pipeline's)"
    }
    patch: ClassVar[int] = 1  # latents in width and height that are one token of the denoiser

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        self.size = self._default_size()

    def _default_size(self) -> int:
        """Return the width in pixels of the pipeline's images, unless another is given."""
        return int(self.pipeline.default_sample_size * self.pipeline.vae_scale_factor)

    def check_option(self, name: str, value: float) -> None:
        super().check_option(name, value)
        step = self.pipeline.vae_scale_factor * self.patch
        if name == "size" and (value < step or value % step):
            raise UserError(
                f"size: {self.source} draws images whose width is a multiple of {step}, "
                f"found {value:g}"
            )

    def image_width(self) -> int:
        return self.size

    def latent_shape(self) -> tuple[int, int, int]:
        side = self.size // self.pipeline.vae_scale_factor
        return self.channels, side, side

    @property
    def channels(self) -> int:
        return int(self.denoiser.config.in_channels)  # type: ignore[union-attr, arg-type]

    def _sampling_arguments(self, prompts: Sequence[str] | Condition) -> dict[str, Any]:
        size = {"height": self.size, "width": self.size}
        if not isinstance(prompts, Condition):
            return {"prompt": list(prompts), **size}
        return {
            "prompt_embeds": prompts.tensors["states"],
            "pooled_prompt_embeds": prompts.tensors["pooled"],
            **size,
        }


class Variance(Latent):
    """Variance-preserving diffusion: x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) noise.

    The prediction is the noise (epsilon) or v = sqrt(a_t) noise - sqrt(1 - a_t) x_0, by the
    scheduler's configuration.
    """

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        self.prediction = pipeline.scheduler.config.get("prediction_type")
        if self.prediction not in ("epsilon", "v_prediction"):
            raise UserError(
                f"{source}: prediction type {self.prediction!r} is not supported; "
                "epsilon, v_prediction are"
            )
        if not hasattr(pipeline.scheduler, "alphas_cumprod"):
            raise UserError(
                f"{source}: its {type(pipeline.scheduler).__name__} is of another "
                "diffusion than DDPM's, which is not supported"
            )
        self._alphas: Tensor = pipeline.scheduler.alphas_cumprod.float()

    def samplers(self) -> list[str]:
        """Return the schedulers with the betas of the model's own, whose noise a seed determines.

        diffusers also counts as compatible an EDM scheduler, which is of another diffusion. Some
        schedulers have no rescaled betas (`rescale_betas_zero_snr`).
        """
        import diffusers

        needed = {"beta_start"}
        if self.pipeline.scheduler.config.get("rescale_betas_zero_snr"):
            needed.add("rescale_betas_zero_snr")
        names = []
        for name in super().samplers():
            options = set(inspect.signature(getattr(diffusers, name).__init__).parameters)
            # DPMSolverSDEScheduler takes the seed of its noise from the global generator
            if needed <= options and "noise_sampler_seed" not in options:
                names.append(name)
        return names

    def _signal(self, t: Tensor) -> tuple[Tensor, Tensor]:
        self._alphas = send(self._alphas, t.device)  # once, and not in each step
        alpha = self._alphas[t].view(-1, 1, 1, 1)
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

    def _noise(self, noisy: Tensor, t: Tensor, prediction: Tensor) -> Tensor:
        """Return the noise in x_t by a prediction for it."""
        if self.prediction == "epsilon":
            return prediction
        signal, sigma = self._signal(t)
        return signal * prediction + sigma * noisy

    def ancestral(self, t: Tensor, previous: Tensor) -> AncestralStep:
        """Return DDIM's step with eta 1 (arXiv 2010.02502, Eqs. 12 and 16), and its reverse.

        x_0 is not clipped, also where a scheduler's configuration says so.
        """
        self._alphas = send(self._alphas, t.device)
        now, before = (self._alphas[one].view(-1, 1, 1, 1) for one in (t, previous))
        ratio, noise = (now / before).sqrt(), (1 - now).sqrt()
        gained = (before - now) / before  # the variance that the diffusion adds
        sigma = ((1 - before) / (1 - now) * gained).sqrt()
        # x_0 and the noise in x_t are linear in the prediction; with eta 1 both formulas are short
        if self.prediction == "epsilon":
            state, factor = 1 / ratio, -gained / (noise * ratio)
        else:
            state, factor = ratio, -gained * before.sqrt() / noise
        return AncestralStep(state, factor, sigma, signal=ratio, noise=gained.sqrt())

    def _ddim(self, steps: int) -> Any:
        """Return diffusers' DDIM with the schedule of the pipeline's own scheduler."""
        from diffusers import DDIMScheduler

        config = self.pipeline.scheduler.config
        # DDIM's default clips x_0 to [-1, 1], which latents exceed, and the configurations of other
        # schedulers do not change it
        scheduler = DDIMScheduler.from_config(config, clip_sample=config.get("clip_sample", False))
        # on the CPU, where a time step is a number that a GPU need not send
        scheduler.set_timesteps(steps)
        return scheduler

    def time_grid(self, steps: int) -> list[int]:
        """Return DDIM's time steps. It ends at time step 0, unless its last alpha is 1."""
        scheduler = self._ddim(steps)
        end = -1 if float(scheduler.final_alpha_cumprod) == 1 else 0
        return [*scheduler.timesteps.tolist(), end]

    @torch.no_grad()
    def partial(
        self,
        noise: Tensor,
        condition: Condition,
        null: Condition,
        *,
        stop: int,
        steps: int,
        guidance: float,
        weights: Weights | None = None,
    ) -> tuple[Tensor, int]:
        scheduler = self._ddim(steps)
        times = send(scheduler.timesteps, noise.device)
        x = noise * scheduler.init_noise_sigma
        for place, number in enumerate(scheduler.timesteps[:stop]):
            prediction = self.guide(
                x,
                times[place],
                condition=condition,
                null=null,
                guidance=guidance,
                weights=weights,
            )
            # diffusers' own step ends at t - timesteps // steps, which is the next time step for
            # the spacing "leading" only
            clean = scheduler.step(prediction, number, x).pred_original_sample
            noise_in_x = self._noise(x, times[place : place + 1], prediction)
            x = self.corrupt(clean, noise_in_x, times[place + 1 : place + 2])
        return x, int(scheduler.timesteps[stop])


class Guided(Sized):
    """Families whose pipeline takes the condition of the empty prompt as an argument."""

    def _sampling_arguments(self, prompts: Sequence[str] | Condition) -> dict[str, Any]:
        arguments = super()._sampling_arguments(prompts)
        if isinstance(prompts, Condition):
            null = self.null().repeat(len(prompts)).tensors
            arguments |= {
                "negative_prompt_embeds": null["states"],
                "negative_pooled_prompt_embeds": null["pooled"],
            }
        return arguments
