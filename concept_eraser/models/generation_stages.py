"""Image generation in three stages: encode the prompt, sample the latents, decode the image.

Each stage needs other parts of the model, so that the others may lie elsewhere
(training/placement.py). The stages are those of the pipeline's own call, cut before the denoiser's
first step and before the VAE. Together they give the same bits as the whole call. What passes from
one stage to the next lies on the CPU.
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
    """Ends the pipeline's call; nothing went wrong."""


@torch.no_grad()
def read(
    model: Any, prompts: Sequence[str], *, guidance: float, autocast: torch.dtype | None
) -> Any:
    """What the pipeline encodes the prompts of one call to, by the text encoders alone; None for
    one that reads no texts.

    Raises UserError for a guidance that the pipeline does not know, and for a model under a
    safeguard, which reads while it draws.
    """
    model.allow(guidance)
    if model.guard is not None:
        raise UserError(
            f"{model.source}: a safeguard asks text encoder and denoiser by turns; leave "
            "out training.offload, or the safeguard"
        )
    if not model.readers:
        return None
    pipeline, outputs = model.pipeline, []
    encode = pipeline.encode_prompt

    def cut(*given: Any, **told: Any) -> Any:
        outputs.append(encode(*given, **told))
        raise _CutError

    with (
        _instead(pipeline, "encode_prompt", cut),
        _at(pipeline, model.device),
        model.precision(autocast or model.frozen_dtype),
    ):
        _until_cut(
            lambda: pipeline(
                **model._sampling_arguments(prompts), guidance_scale=guidance, output_type="pt"
            )
        )
    return _move_to(outputs[0], CPU)


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
    """What the pipeline would give its VAE to decode [n, c, h, w], by the denoiser alone; known: of
    these prompts, from `read`."""
    pipeline, outputs = model.pipeline, []

    def cut(codes: Tensor, *given: Any, **told: Any) -> Any:
        outputs.append(codes)
        raise _CutError

    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    encoding = _move_to(encoding_on_cpu, model.device)
    with (
        _instead(pipeline, "encode_prompt", lambda *given, **told: encoding),
        _instead(pipeline.vae, "decode", cut),
        _at(pipeline, model.device),
        model.precision(autocast or model.frozen_dtype),
    ):
        _until_cut(
            lambda: pipeline(
                **model._sampling_arguments(prompts),
                generator=generators,
                num_inference_steps=steps,
                guidance_scale=guidance,
                output_type="pt",
            )
        )
    return outputs[0].to(CPU)


@torch.no_grad()
def show(model: Any, codes: Tensor, *, autocast: torch.dtype | None) -> Tensor:
    """The images [n, h, w, 3] uint8 of what was drawn, by the VAE alone."""
    with model.precision(autocast or model.frozen_dtype):
        pixels = model.pipeline.vae.decode(codes.to(model.device)).sample
        return to_bytes((pixels * 0.5 + 0.5).clamp(0, 1))  # as diffusers' VaeImageProcessor


def to_bytes(images: Tensor) -> Tensor:
    """[n, 3, h, w] in [0, 1] -> [n, h, w, 3] uint8 on the CPU."""
    return images.float().mul(255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu()


def _until_cut(call: Callable[[], Any]) -> None:
    try:
        call()
    except _CutError:
        return
    raise RuntimeError(
        "the pipeline drew an image without reading its prompt or asking its VAE; this "
        "version of diffusers is not known"
    )


def _move_to(value: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


@contextmanager
def _instead(thing: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, a method of one object is this function (of a pipeline without that method, nothing
    asks for it).
    """
    thing.__dict__[name] = function
    try:
        yield
    finally:
        del thing.__dict__[name]


@contextmanager
def _at(pipeline: Any, device: torch.device) -> Iterator[None]:
    """Inside, the pipeline computes on this device. By itself it goes by the parts it has, and
    which of them tells differs by diffusers' version; it has no setting for it."""
    own = type(pipeline)
    pipeline.__class__ = type(
        own.__name__, (own,), {"_execution_device": property(lambda self: device)}
    )
    try:
        yield
    finally:
        pipeline.__class__ = own
