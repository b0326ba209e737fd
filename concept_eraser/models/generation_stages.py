"""Image generation in three stages: encode the prompt, sample the latents, decode the image.

Each stage needs other parts of the model, so that the others may be on another device
(training/placement.py). The stages are those of the pipeline's own call, which is interrupted
before the denoiser's first step and before the VAE. Together they give the same bits as the whole
call. The results of a stage for the next are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from concept_eraser.utils.errors import UserError

CPU = torch.device("cpu")


class _CutError(Exception):
    """Ends the pipeline's call. It is no failure."""


@torch.no_grad()
def read(
    model: Any, prompts: Sequence[str], *, guidance: float, autocast: torch.dtype | None
) -> Any:
    """Encode the prompts of one call as the pipeline does, by the text encoders alone.

    Returns the results of the pipeline's calls; None for a pipeline that reads no texts. Raises
    UserError for a guidance that the pipeline does not support, and for a model under a safeguard,
    which encodes texts during sampling.
    """
    model.allow(guidance)
    if model.guard is not None:
        raise UserError(
            f"{model.source}: a safeguard needs text encoder and denoiser in turn; leave "
            "out training.offload, or the safeguard"
        )
    if not model.readers:
        return None
    pipeline, outputs = model.pipeline, []
    encode, calls = pipeline.encode_prompt, model.readings(guidance)

    def cut(*inputs: Any, **options: Any) -> Any:
        outputs.append(encode(*inputs, **options))
        if len(outputs) == calls:
            raise _CutError
        return outputs[-1]

    with (
        instead(pipeline, "encode_prompt", cut),
        _at(pipeline, model.device),
        model.precision(autocast or model.frozen_dtype),
    ):
        _until_cut(
            lambda: pipeline(**model.pipeline_arguments(prompts, guidance), output_type="pt")
        )
    return _move_to(outputs, CPU)


@torch.no_grad()
def draw(
    model: Any,
    prompts: Sequence[str],
    encoding_on_cpu: Any,
    *,
    seeds: Sequence[int],
    steps: int,
    guidance: float,
    autocast: torch.dtype | None,
) -> Tensor:
    """Sample the latents [n, c, h, w] that the pipeline would decode, by the denoiser alone.

    encoding_on_cpu: of these prompts, from `read`.
    """
    pipeline, outputs = model.pipeline, []

    def cut(codes: Tensor, *inputs: Any, **options: Any) -> Any:
        outputs.append(codes)
        raise _CutError

    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    encodings = iter(_move_to(encoding_on_cpu or [], model.device))
    with (
        instead(pipeline, "encode_prompt", lambda *inputs, **options: next(encodings)),
        instead(pipeline.vae, "decode", cut),
        _at(pipeline, model.device),
        model.precision(autocast or model.frozen_dtype),
        model.calling(steps),
    ):
        _until_cut(
            lambda: pipeline(
                **model.pipeline_arguments(prompts, guidance),
                generator=generators,
                num_inference_steps=steps,
                output_type="pt",
            )
        )
    return outputs[0].to(CPU)


@torch.no_grad()
def show(model: Any, codes: Tensor, *, autocast: torch.dtype | None) -> Tensor:
    """Decode latents to images [n, h, w, 3] uint8, by the VAE alone."""
    with model.precision(autocast or model.frozen_dtype):
        pixels = model.pipeline.vae.decode(codes.to(model.device)).sample
        if pixels.ndim == 5:  # a video of one frame
            pixels = pixels[:, :, 0]
        return to_bytes((pixels * 0.5 + 0.5).clamp(0, 1))  # like diffusers' VaeImageProcessor


def to_bytes(images: Tensor) -> Tensor:
    """Convert images [n, 3, h, w] in [0, 1] to [n, h, w, 3] uint8 on the CPU."""
    return images.float().mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu()


def _until_cut(call: Callable[[], Any]) -> None:
    try:
        call()
    except _CutError:
        return
    raise RuntimeError(
        "the pipeline drew an image without its text encoder or its VAE; this "
        "version of diffusers is not known"
    )


def _move_to(value: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


@contextmanager
def instead(thing: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object by this function inside the context.

    A pipeline without that method does not need it.
    """
    thing.__dict__[name] = function
    try:
        yield
    finally:
        del thing.__dict__[name]


@contextmanager
def _at(pipeline: Any, device: torch.device) -> Iterator[None]:
    """Make the pipeline compute on this device inside the context.

    By default it uses the device of one of its parts, which depends on the version of diffusers. It
    has no setting for it.
    """
    own = type(pipeline)
    pipeline.__class__ = type(
        own.__name__, (own,), {"_execution_device": property(lambda self: device)}
    )
    try:
        yield
    finally:
        pipeline.__class__ = own
