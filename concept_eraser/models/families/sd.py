"""Stable Diffusion 1.x and 2.x: UNet2DConditionModel, AutoencoderKL, one CLIP text encoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from concept_eraser.models.base import Condition, Weights
from concept_eraser.models.latent import Variance, require_text_to_image, tokens_of
from concept_eraser.models.vocabulary import Words
from concept_eraser.utils.errors import UserError


@contextmanager
def _in_place_of(encoder: Any, rows: Tensor) -> Iterator[None]:
    """Replace the embeddings of the encoder's tokens inside the context.

    Positions, masks and pooling still depend on the ids.
    """
    hook = encoder.get_input_embeddings().register_forward_hook(lambda layer, inputs, output: rows)
    try:
        yield
    finally:
        hook.remove()


class StableDiffusion(Variance):
    """A `StableDiffusionPipeline` with the interface of `Model`."""

    family = "sd"
    pipeline_class = "StableDiffusionPipeline"
    has_clip_words = True
    # A safety checker would replace images by black ones, unnoticed by the evaluation. It is not
    # part of the model.
    left_out = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}  # noqa: RUF012

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        require_text_to_image(pipeline, source)

    def tokenize(self, prompts: Sequence[str]) -> Condition:
        tokens = tokens_of(
            self.pipeline.tokenizer, prompts, self.pipeline.tokenizer.model_max_length
        )
        tensors = {"ids": tokens.input_ids.to(self.device)}
        if self._masked:
            tensors["mask"] = tokens.attention_mask.to(self.device)
        return Condition(tensors)

    def embed(
        self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None
    ) -> Condition:
        encoder: nn.Module = self.pipeline.text_encoder
        mask = tokens.tensors.get("mask")
        # tokens that do not come from a text: all up to the first end count
        if mask is None and self._masked:
            is_end = (tokens.tensors["ids"] == self.words.end).long()
            mask = (is_end.cumsum(1) - is_end == 0).long()
        options = {"attention_mask": mask}
        with _in_place_of(encoder, rows) if rows is not None else nullcontext():
            if weights is None:
                return Condition({"states": encoder(tokens.tensors["ids"], **options)[0]})
            return Condition(
                {
                    "states": torch.func.functional_call(
                        encoder, dict(weights), (tokens.tensors["ids"],), options
                    )[0]
                }
            )

    @property
    def _masked(self) -> bool:
        return bool(getattr(self.pipeline.text_encoder.config, "use_attention_mask", False))

    @cached_property
    def words(self) -> Words:
        return Words(self.pipeline.tokenizer)

    @property
    def table(self) -> Tensor:
        return self.pipeline.text_encoder.get_input_embeddings().weight

    def latent_shape(self) -> tuple[int, int, int]:
        size = self.pipeline.unet.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        return int(self.pipeline.unet.config.in_channels), int(height), int(width)

    def _inputs(self, noisy: Tensor, t: Tensor, condition: Condition) -> dict[str, Any]:
        return {
            "sample": noisy,
            "timestep": t,
            "encoder_hidden_states": condition.tensors["states"],
        }

    def _sampling_arguments(self, prompts: Sequence[str] | Condition) -> dict[str, Any]:
        if not isinstance(prompts, Condition):
            return {"prompt": list(prompts)}
        null = self.null().repeat(len(prompts)).tensors["states"]
        return {"prompt_embeds": prompts.tensors["states"], "negative_prompt_embeds": null}

    def take_text_tower(
        self, tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the text encoder's weights by those of a CLIP text tower, in place.

        Args:
            tensors: The tower's tensors. Their names begin at its root.
            settings: Settings of the tower by name that its tensors do not show, which must be the
                text encoder's own, such as the activation function.

        Raises:
            UserError: The tower is of another architecture. Nothing is changed then.
        """
        config = self.pipeline.text_encoder.config
        for name, value in (settings or {}).items():
            if getattr(config, name) != value:
                raise UserError(
                    f"the text tower does not fit the text encoder of {self.source}: its {name} is "
                    f"{value}, and {getattr(config, name)} is needed; plug in one of the same model"
                )
        own = self.pipeline.text_encoder.state_dict()
        new_weights = {name: tensors.get(name.removeprefix("text_model.")) for name in own}
        wrong = [k for k, v in new_weights.items() if v is None or v.shape != own[k].shape]
        wrong += [
            k
            for k in tensors
            if k.startswith("encoder.layers.")
            and k not in {n.removeprefix("text_model.") for n in own}
        ]
        if wrong:
            raise UserError(
                f"the text tower does not fit the text encoder of {self.source}, e.g. {wrong[0]}"
                + (
                    f": {list(own[wrong[0]].shape)} is needed"
                    if wrong[0] in own
                    else " has no place there"
                )
            )
        self.pipeline.text_encoder.load_state_dict(new_weights)


PLUGIN = StableDiffusion
