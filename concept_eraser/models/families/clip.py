"""CLIP models (transformers' CLIPModel and open_clip's) as zero-shot classifiers of named classes.

One or more templates turn class names into prompts. The logits of an image are its cosines with the
(mean) text embeddings times the model's own scale, which is 100 for the published models. Both
towers are differentiable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser.models.completeness import require_all_weights
from concept_eraser.models.folder_check import check_part
from concept_eraser.models.module import Module
from concept_eraser.storage.readers import read_json, read_tensors
from concept_eraser.utils.errors import UserError, first_line


class ZeroShot(nn.Module):
    """A CLIP model as a classifier: [n, 3, h, w] in [-1, 1] -> logits [n, classes].

    `tokens` [classes, templates, length] are the prompts of the classes. `inner` is the CLIP model;
    its tensors have their own names behind "inner.".
    """

    inner: Any

    def __init__(
        self, inner: nn.Module, tokens: Tensor, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)

    def image_embeddings(self, images: Tensor) -> Tensor:
        """Return unit vectors [n, width].

        Images of another size are resized bicubically and clipped, as in CLIP's own preprocessing.
        """
        size = image_size(self.inner)
        if images.shape[-2:] != (size, size):
            images = F.interpolate(images, (size, size), mode="bicubic", antialias=True)
            images = images.clamp(-1, 1)  # the filter overshoots at edges
        pixels = ((images + 1) / 2 - self.mean) / self.std  # type: ignore[operator]
        if is_open_clip(self.inner):
            return F.normalize(self.inner.encode_image(pixels), dim=-1)
        pooled = self.inner.vision_model(pixels).pooler_output
        return F.normalize(self.inner.visual_projection(pooled), dim=-1)

    def text_embeddings(self) -> Tensor:
        """Return unit vectors [classes, width]: the mean of unit embeddings over the templates."""
        ids: Tensor = self.tokens  # type: ignore[assignment]
        flat = ids.flatten(0, 1)
        if is_open_clip(self.inner):
            embeddings = self.inner.encode_text(flat)
        else:
            embeddings = self.inner.text_projection(self.inner.text_model(flat).pooler_output)
        return F.normalize(
            F.normalize(embeddings, dim=-1).unflatten(0, ids.shape[:2]).mean(1), dim=-1
        )

    def forward(self, images: Tensor) -> Tensor:
        return (
            self.inner.logit_scale.exp() * self.image_embeddings(images) @ self.text_embeddings().T
        )


def is_open_clip(model: nn.Module) -> bool:
    return hasattr(model, "encode_image") and hasattr(model, "encode_text")


def image_size(model: Any) -> int:
    size = model.visual.image_size if is_open_clip(model) else model.config.vision_config.image_size
    return int(size[0] if isinstance(size, tuple | list) else size)


class Clip(Module):
    """A CLIP model with its tokenizer: [texts] -> token ids [n, length]."""

    family = "clip"

    def __init__(
        self,
        module: nn.Module,
        tokenize: Callable[[Sequence[str]], Tensor],
        source: str,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__(module, "clip", source)
        self.tokenize, self.mean, self.std = tokenize, mean, std

    def zero_shot(self, names: Sequence[str], templates: Sequence[str]) -> ZeroShot:
        """Return the model as a classifier of some names.

        Raises UserError for a template without a place for the name.
        """
        wrong = [t for t in templates if "{}" not in t]
        if wrong or not templates:
            raise UserError(
                "a template needs {} where the class name goes, found "
                f"{wrong[0] if wrong else 'none'!r}; e.g. 'a photo of a {{}}'"
            )
        texts = [template.replace("{}", name) for name in names for template in templates]
        tokens = self.tokenize(texts).unflatten(0, (len(names), len(templates)))
        return ZeroShot(self.module, tokens, self.mean, self.std).to(self.device)

    @classmethod
    def from_object(
        cls, model: nn.Module, tokenizer: Any = None, source: str = "a CLIP model in memory"
    ) -> Clip:
        """Wrap a transformers CLIPModel or an open_clip model.

        `tokenizer` is that library's. For open_clip it has a default.
        """
        if is_open_clip(model):
            from open_clip import SimpleTokenizer
            from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

            clip: Any = model
            tokenizer = tokenizer or SimpleTokenizer(context_length=int(clip.context_length))
            preprocessing = getattr(clip.visual, "preprocess_cfg", {})
            mean, std = (
                preprocessing.get("mean", OPENAI_DATASET_MEAN),
                preprocessing.get("std", OPENAI_DATASET_STD),
            )
            return cls(
                module=model,
                tokenize=lambda texts: tokenizer(list(texts)),
                source=source,
                mean=mean,
                std=std,
            )
        if tokenizer is None:
            raise UserError(
                "a CLIPModel needs its tokenizer: pass (model, CLIPTokenizer), or give "
                "the folder they were saved to"
            )
        from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

        return cls(
            module=model,
            tokenize=_padding_tokenizer(tokenizer),
            source=source,
            mean=OPENAI_CLIP_MEAN,
            std=OPENAI_CLIP_STD,
        )

    @classmethod
    def from_folder(cls, folder: Path, source: str) -> Clip:
        """Load a folder of transformers' CLIPModel with its tokenizer, safetensors only."""
        from transformers import CLIPModel, CLIPTokenizer
        from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

        check_part(folder)
        try:
            model = CLIPModel.from_pretrained(folder, use_safetensors=True)
            tokenizer = CLIPTokenizer.from_pretrained(folder)
        except Exception as error:
            raise UserError(
                f"{folder} holds no CLIP model that can be loaded ({first_line(error)})"
            ) from error
        require_all_weights(model, folder)
        config_path = folder / "preprocessor_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        mean, std = (
            config.get("image_mean", OPENAI_CLIP_MEAN),
            config.get("image_std", OPENAI_CLIP_STD),
        )
        clip = cls(
            module=model, tokenize=_padding_tokenizer(tokenizer), source=source, mean=mean, std=std
        )
        # written beside the weights, so that the folder can be opened again
        clip.keep = [tokenizer]
        if config_path.exists():
            clip.preprocessing = config
        return clip

    def text_tower(self) -> dict[str, Tensor]:
        """Return the tensors of a transformers text tower.

        Their names begin at its root ("encoder.layers.0..."). Raises UserError for an open_clip
        model, whose tensors have other shapes and names.
        """
        if is_open_clip(self.module):
            raise UserError(
                "an open_clip text tower has other tensors than a pipeline's "
                "CLIPTextModel; convert the model to transformers' CLIPModel first"
            )
        tower: nn.Module = self.module.text_model  # type: ignore[assignment]
        return dict(tower.state_dict())

    keep: Sequence[Any] = ()
    preprocessing: dict[str, Any] | None = None

    def save(self, folder: Path) -> None:
        """Save the model.

        For transformers it is a folder for CLIPModel.from_pretrained, for open_clip a state dict.
        """
        if is_open_clip(self.module):
            from safetensors.torch import save_file

            folder.mkdir(parents=True, exist_ok=True)
            tensors = {
                k: v.detach().cpu().contiguous().clone()
                for k, v in self.module.state_dict().items()
            }
            save_file(tensors, folder / "open_clip_model.safetensors", metadata={"format": "pt"})
            return
        super().save(folder)
        for extra in self.keep:
            extra.save_pretrained(folder)
        if self.preprocessing is not None:
            (folder / "preprocessor_config.json").write_text(
                json.dumps(self.preprocessing, indent=1)
            )


def load_bundled_clip(weights: Path) -> Any:
    """Load the bundled `CLIPModel` in fp32.

    Args:
        weights: The folder of the bundled weights. `clip/` holds the image tower and the
            projections. The text tower is the pipeline's text encoder and is stored only there.
    """
    from transformers import CLIPConfig, CLIPModel

    clip = CLIPModel(CLIPConfig.from_pretrained(weights / "clip"))
    tensors = read_tensors(weights / "clip" / "model.safetensors")
    text = read_tensors(weights / "tiny-sd" / "text_encoder" / "model.safetensors")
    tensors |= {k if k.startswith("text_model.") else f"text_model.{k}": v for k, v in text.items()}
    clip.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()})
    return clip.eval().requires_grad_(False)


def _padding_tokenizer(tokenizer: Any) -> Callable[[Sequence[str]], Tensor]:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # the file of a CLIPProcessor
    length = min(int(tokenizer.model_max_length), 77)
    return lambda texts: (
        tokenizer(
            list(texts),
            padding="max_length",
            max_length=length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
    )


PLUGIN = Clip
