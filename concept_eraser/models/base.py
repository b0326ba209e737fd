"""The interface of all text-to-image families, with epsilon-, v- and flow-prediction."""

from __future__ import annotations

import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from concept_eraser.models.vocabulary import Words
from concept_eraser.utils.devices import find_gpu, send
from concept_eraser.utils.errors import UserError, unknown

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

log = logging.getLogger(__name__)

# The source of a model: a name, a folder, a hub id, or an object in memory; for CLIP also
# (model, tokenizer).
ModelSource: TypeAlias = (
    "str | Path | Loaded | nn.Module | DiffusionPipeline | tuple[nn.Module, Any]"
)


@dataclass(frozen=True)
class Condition:
    """An encoded prompt: named tensors whose first axis is the batch.

    Example: {"states": [b, tokens, width]}.
    """

    tensors: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: Tensor | slice) -> Condition:
        return Condition({name: value[index] for name, value in self.tensors.items()})

    def to(self, device: torch.device) -> Condition:
        return Condition({name: send(value, device) for name, value in self.tensors.items()})

    def repeat(self, n: int) -> Condition:
        """Repeat one row n times."""
        return Condition({k: v.expand(n, *v.shape[1:]) for k, v in self.tensors.items()})


@dataclass(frozen=True)
class AncestralStep:
    """A step of DDIM with eta 1, and the step of the diffusion that it reverses.

    p(x_s | x_t) = N(state x_t + prediction f(x_t), sigma^2), with f the denoiser's prediction, and
    q(x_t | x_s) = N(signal x_s, noise^2), for s < t. All are [b, 1, 1, 1].
    """

    state: Tensor
    prediction: Tensor
    sigma: Tensor
    signal: Tensor
    noise: Tensor


Weights = Mapping[str, Tensor]  # values that replace some parameters of the denoiser, by name


class Loaded(ABC):
    """A model that can be trained and saved: named parts, of which a job trains one."""

    family: ClassVar[str]
    source: str  # name, folder or hub id it came from
    parts: Mapping[str, nn.Module]
    # the device that computes while parts are on several devices (training/placement.py)
    working: torch.device | None = None
    # options of the family, attributes of the same names, with their descriptions
    options: ClassVar[Mapping[str, str]] = {}

    def configure(self, options: Mapping[str, Any]) -> None:
        """Set options of the family, before anything is encoded.

        Raises UserError for an unknown option and for a value out of range. Then none is set.
        """
        for name, value in options.items():
            if name not in self.options:
                raise unknown(f"option of the model family {self.family!r}", name, self.options)
            self.check_option(name, value)
        for name, value in options.items():
            setattr(self, name, type(getattr(self, name))(value))

    def configured(self) -> dict[str, Any]:
        """Return the present values of the family's options."""
        return {name: getattr(self, name) for name in self.options}

    def check_option(self, name: str, value: float) -> None:
        """Raise UserError if the family does not support that value."""
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < math.inf
        ):
            raise UserError(f"{name}: expected a number that is not negative, found {value!r}")

    def part(self, name: str) -> nn.Module:
        """Return a part by name. Raises UserError if the model has none of that name."""
        if name not in self.parts:
            raise UserError(f"{self.source} has no part {name!r}; it has {', '.join(self.parts)}")
        return self.parts[name]

    @property
    def device(self) -> torch.device:
        return self.working or next(next(iter(self.parts.values())).parameters()).device

    @abstractmethod
    def to(self, device: torch.device) -> Loaded: ...

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the whole model, safetensors only, so that its library can load it."""


class Model(Loaded):
    """A text-to-image pipeline of one family.

    Its parts are "denoiser", "vae" and its text encoders: one ("text_encoder"), several
    ("text_encoder_2", ...) or none (class-conditional: prompts are classes). Latents are the scaled
    inputs of the denoiser.
    """

    timesteps: int  # time steps of the training schedule
    # whether prompts are read by one CLIP text encoder only, whose tokens can be attacked
    has_clip_words: ClassVar[bool] = False

    def drawing(self) -> dict[str, Any]:
        """What determines an image beside weights, prompt, seed and sampling settings.

        It is part of the cache's key.
        """
        return {"latents": list(self.latent_shape())}

    @property
    def denoiser(self) -> nn.Module:
        return self.parts["denoiser"]

    @property
    def readers(self) -> tuple[str, ...]:
        """The parts that encode prompts."""
        return tuple(name for name in self.parts if name.startswith("text_encoder"))

    def protect(self, guard: Any) -> None:
        """Sample under a safeguard (models/safeguards.py) from now on.

        Raises UserError if the family does not support it.
        """
        raise self.lacks(f"the safeguard {guard.kind!r}")

    def lacks(self, what: str) -> UserError:
        """Return the error for a family without the one CLIP text encoder that is needed."""
        if not self.readers:
            description = "is conditioned on classes, not on texts"
        elif len(self.readers) == 1:
            description = f"reads texts with a {type(self.parts[self.readers[0]]).__name__}"
        else:
            description = f"has {' and '.join(self.readers)}"
        return UserError(
            f"{what} needs a model with one CLIP text encoder, as in Stable Diffusion 1 and "
            f"2; {self.source} ({self.family}) {description}"
        )

    @abstractmethod
    def to(self, device: torch.device) -> Model: ...

    @abstractmethod
    def tokenize(self, prompts: Sequence[str]) -> Condition:
        """Convert prompts to token ids (and masks): integer tensors [n, length].

        Their names are "ids" and, for further encoders, "ids_2", ...
        """

    @abstractmethod
    def embed(
        self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None
    ) -> Condition:
        """Convert tokens to the condition of the denoiser.

        The result is differentiable in the text encoder's parameters.

        Args:
            tokens: The token ids.
            weights: Replacements of some of the text encoder's parameters.
            rows: Replacements of the tokens' embeddings, [n, length, width], which are also
                differentiable.
        """

    @property
    @abstractmethod
    def words(self) -> Words:
        """The vocabulary of prompts."""

    @property
    @abstractmethod
    def table(self) -> Tensor:
        """Return the text encoder's embedding of each token, [vocabulary, width]."""

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Condition:
        """Encode prompts to a condition, without gradients."""
        return self.embed(self.tokenize(prompts))

    def null(self) -> Condition:
        """Return the condition of the sampler's unconditional prediction: one row.

        It is that without a negative prompt.
        """
        return self.encode([""])

    @abstractmethod
    def encode_images(self, images: Tensor) -> Tensor:
        """Encode images to latents (mean of the posterior), without gradients.

        images: [n, 3, h, w] in [-1, 1].
        """

    @abstractmethod
    def latent_shape(self) -> tuple[int, int, int]: ...

    def image_width(self) -> int:
        """Return width and height of the images, in pixels."""
        vae: Any = self.parts["vae"]
        return self.latent_shape()[1] * 2 ** (len(vae.config.block_out_channels) - 1)

    @abstractmethod
    def corrupt(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return x_t from clean latents, noise and integer time steps [b]."""

    @abstractmethod
    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Return the training target for that x_t: epsilon, v or velocity."""

    @abstractmethod
    def clean(self, noisy: Tensor, t: Tensor, prediction: Tensor) -> Tensor:
        """Return the clean latents of a prediction for x_t (one-step x_0), differentiable."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents to images [n, 3, h, w], about [-1, 1] and not clipped, differentiable."""

    @abstractmethod
    def denoise(
        self, noisy: Tensor, t: Tensor, condition: Condition, weights: Weights | None = None
    ) -> Tensor:
        """Return the denoiser's prediction.

        weights: Replacements of some of its parameters.
        """

    def attention_layers(self) -> list[nn.Module]:
        """Return the denoiser's cross-attention layers with the prompt.

        There are none if image and text attend jointly.
        """
        return []

    def attention(self, noisy: Tensor, t: Tensor, condition: Condition) -> list[Tensor]:
        """Return the attention probabilities of each such layer, differentiable.

        They are from positions of the image to tokens of the prompt: [b, heads, positions, tokens].
        """
        raise NotImplementedError(f"{self.family} has no cross-attention")

    def detach_start_token(self) -> list[RemovableHandle]:
        """Pass no gradient through the first token's keys and values, until the hooks are removed.

        See models/cross_attention.py.
        """
        raise NotImplementedError(f"{self.family} has no cross-attention")

    def concept_tokens(
        self, prompts: Sequence[str], anchors: Sequence[str] | None, *, end: bool
    ) -> Tensor:
        """Return which tokens of each prompt stand for its concept: [n, tokens] bool.

        See models/cross_attention.py.
        """
        raise NotImplementedError(f"{self.family} has no cross-attention")

    @abstractmethod
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
        """Sample from unit noise for `stop` of `steps` steps. Returns x_t and its time step t."""

    @abstractmethod
    def guide(
        self,
        x: Tensor,
        t: Tensor,
        condition: Condition,
        null: Condition,
        guidance: float,
        weights: Weights | None,
    ) -> Tensor:
        """Return the prediction with classifier-free guidance at one time step.

        Args:
            x: The noised latents, [n, c, h, w].
            t: The time step, [] or [1].
            condition: The condition of each image, n rows.
            null: The condition of the unconditional prediction, n rows.
            guidance: The factor of the difference of the two predictions. 1 or less is the
                conditional prediction alone, unless the guidance is an input of the denoiser.
            weights: Replacements of some of the denoiser's parameters.
        """

    def branches(self, guidance: float) -> int:
        """Return how many predictions `guide` needs for one image."""
        return 2 if guidance > 1 else 1

    @abstractmethod
    def time_grid(self, steps: int) -> list[int]:
        """Return the time steps of a sampler with so many steps, the noisiest first.

        A further one follows: the level at which the sampler ends. -1 stands for clean latents.
        """

    def ancestral(self, t: Tensor, previous: Tensor) -> AncestralStep:
        """Return the sampler's step from time steps t [b] to others before them, with noise."""
        raise UserError(
            f"{self.source} ({self.family}) is trained by flow matching, whose sampler draws no "
            "noise in its steps, so a trajectory has no likelihood; the loss 'balance' needs a "
            "diffusion model: Stable Diffusion 1, 2 and XL, PixArt or DiT"
        )

    @abstractmethod
    def samplers(self) -> list[str]:
        """Return the names of diffusers' schedulers that fit the model."""

    @abstractmethod
    def sampler(self, name: str) -> AbstractContextManager[None]:
        """Sample with another scheduler of diffusers inside the context; "" for the own one.

        Raises UserError for a scheduler that does not fit the model.
        """

    @abstractmethod
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
        """Generate images of some prompts, with one seed each: [n, h, w, 3] uint8 on the CPU.

        The prompts may be encoded already.
        """

    @abstractmethod
    def take_text_tower(
        self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the text encoder's weights by those of a CLIP text tower, in place.

        `settings` are settings of the tower by name that its tensors do not show, such as the
        activation function. The text encoder must have the same.

        Raises UserError if they do not fit.
        """

    def precision(self, autocast: torch.dtype | None) -> AbstractContextManager:
        """Autocast to a precision, or fp32 on a CPU that would emulate it.

        Weights in half precision need the autocast on any device.
        """
        frozen_dtype = getattr(self, "frozen_dtype", None) or getattr(self, "reader_dtype", None)
        if autocast is None or (frozen_dtype is None and emulates_bf16(self.device)):
            return nullcontext()
        return torch.autocast(self.device.type, autocast)


def emulates_bf16(device: torch.device) -> bool:
    """Whether a device computes bfloat16 by emulation: about 15 times slower than fp32.

    This is so on CPUs without AVX-512, or without the bfloat16 instructions of Arm.
    """
    return device.type == "cpu" and not _cpu_has_bf16()


@functools.cache
def _cpu_has_bf16() -> bool:
    has_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if not has_bf16:
        log.info("this CPU has no bfloat16 instructions: images are generated in fp32")
    return has_bf16


def trains_faster_in_bf16() -> bool:
    """Whether training.precision: bf16 saves time on the CPU, where the bundled model is trained.

    With the instructions AVX512-BF16 or AMX of the CPU, a step takes about three quarters of the
    seconds of fp32. Without them it takes longer. False if there is a GPU.
    """
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    has_instructions = any(getattr(torch.cpu, name, lambda: False)() for name in checks)
    return has_instructions and find_gpu() is None


def onto_gpu(*models: Loaded) -> None:
    """Move models to the GPU, if there is one."""
    gpu = find_gpu()
    if gpu is not None:
        for model in models:
            model.to(gpu)


def moments(code: Any) -> tuple[Tensor, Tensor]:
    """Return mean and log variance of a code from a VAE's encode: a pair, or diffusers' output."""
    latent = getattr(code, "latent_dist", None)
    return (latent.mean, latent.logvar) if latent is not None else tuple(code)


def to_pixels(output: Any) -> Tensor:
    """Return the images of a VAE's decode: a tensor, or diffusers' output."""
    return getattr(output, "sample", output)


def require_finite(tensors: Mapping[str, Tensor], what: str, advice: str) -> None:
    """Raise UserError if a tensor holds a value that is not finite.

    Such weights are no valid result.
    """
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            count = int((~value.isfinite()).sum())
            raise UserError(
                f"{what} are not finite ({count} values of {name}), so they are not "
                f"written; {advice}"
            )
