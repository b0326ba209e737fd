"""DiT: a class-conditional transformer (DiT-XL/2 of ImageNet). Its "prompts" are names of classes
or their numbers.

A recipe for it has e.g. `forget: {prompts: [golden retriever], loss: anchor, anchor: "281"}`. The
empty prompt is the class that stands for none. There are no words, token embeddings or text
encoders. If the model also predicts a variance, that half of the output is ignored: no loss uses
it, and neither does diffusers' sampler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from concept_eraser.models.base import Condition, Weights
from concept_eraser.models.latent import Variance
from concept_eraser.storage.readers import read_json
from concept_eraser.utils.errors import UserError, unknown

NULL_OF_PIPELINE = 1000  # the class for none in diffusers' DiTPipeline, whatever the model
# schedulers that begin with unit noise and draw no other
SAMPLERS = (
    "DDIMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
)


class DiT(Variance):
    """A `DiTPipeline` with the interface of `Model`.

    Tokens and conditions are class numbers: {"ids": [n, 1]}, {"classes": [n]}.
    """

    family = "dit"
    pipeline_class = "DiTPipeline"
    network = "transformer"

    def __init__(self, pipeline: Any, source: str) -> None:
        super().__init__(pipeline, source)
        scheduler = pipeline.scheduler
        kind = type(scheduler).__name__
        if kind not in SAMPLERS or "sde" in str(scheduler.config.get("algorithm_type")):
            raise UserError(
                f"{source}: diffusers' DiTPipeline does not scale its first noise and gives the "
                f"scheduler no generator, so that with the {kind} images are wrong or a seed "
                "names no image; give it a DDIMScheduler"
            )
        self.classes = int(pipeline.transformer.config.num_embeds_ada_norm)

    def _class(self, prompt: str) -> int:
        """Return a class's number from its name or number.

        The number of classes stands for none.
        """
        labels: dict[str, int] = self.pipeline.labels
        if not prompt:
            return self.classes
        if prompt.isdecimal() and int(prompt) < self.classes:
            return int(prompt)
        if prompt not in labels:
            raise unknown(
                "class", prompt, labels, hint=f"a number from 0 to {self.classes - 1} works too"
            )
        return labels[prompt]

    def tokenize(self, prompts: Sequence[str]) -> Condition:
        return Condition(
            {"ids": torch.tensor([[self._class(prompt)] for prompt in prompts], device=self.device)}
        )

    def embed(
        self, tokens: Condition, weights: Weights | None = None, rows: Tensor | None = None
    ) -> Condition:
        self._only_read(weights, rows)
        return Condition({"classes": tokens.tensors["ids"][:, 0]})

    def latent_shape(self) -> tuple[int, int, int]:
        config = self.pipeline.transformer.config
        return int(config.in_channels), int(config.sample_size), int(config.sample_size)

    def _inputs(self, noisy: Tensor, t: Tensor, condition: Condition) -> dict[str, Any]:
        return {
            "hidden_states": noisy,
            "timestep": t.expand(len(noisy)),
            "class_labels": condition.tensors["classes"],
        }

    def denoise(
        self, noisy: Tensor, t: Tensor, condition: Condition, weights: Weights | None = None
    ) -> Tensor:
        return super().denoise(noisy, t, condition, weights)[:, : noisy.shape[1]]

    def _sampling_arguments(self, prompts: Sequence[str] | Condition) -> dict[str, Any]:
        condition = prompts if isinstance(prompts, Condition) else self.encode(prompts)
        return {"class_labels": condition.tensors["classes"].tolist()}

    def _reporting(self, progress: Callable[[int], None] | None) -> dict[str, Any]:
        return {}  # this pipeline reports nothing

    def samplers(self) -> list[str]:
        return [name for name in super().samplers() if name in SAMPLERS]

    def allow(self, guidance: float) -> None:
        if guidance > 1 and self.classes != NULL_OF_PIPELINE:
            raise UserError(
                f"{self.source} has {self.classes} classes; diffusers' DiTPipeline "
                f"guides models of {NULL_OF_PIPELINE} classes only. Sample with guidance "
                "1 or less"
            )

    def sample(
        self, prompts: Sequence[str] | Condition, *, guidance: float, **settings: Any
    ) -> Tensor:
        self.allow(guidance)
        return super().sample(prompts, guidance=guidance, **settings)

    def save(self, folder: Path) -> None:
        """As diffusers does, and the names of the classes, which it would leave out."""
        super().save(folder)
        index = folder / "model_index.json"
        names: dict[int, list[str]] = {}
        for name, number in self.pipeline.labels.items():
            names.setdefault(number, []).append(name)
        if names:
            label_names = {str(number): ", ".join(names[number]) for number in sorted(names)}
            index.write_text(
                json.dumps({**read_json(index), "id2label": label_names}, indent=2) + "\n"
            )


PLUGIN = DiT
