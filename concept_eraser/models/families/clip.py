"""CLIP models (transformers' CLIPModel and open_clip's) as zero-shot classifiers of named classes.

One or more templates turn class names into prompts. The logits of an image are its cosines with the
(mean) text embeddings times the model's own scale, which is 100 for the published models. Both
towers are differentiable.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from concept_eraser.models.completeness import require_all_weights, require_vocabulary
from concept_eraser.models.folder_check import check_part
from concept_eraser.models.latent import tokens_of
from concept_eraser.models.module import Module
from concept_eraser.storage.readers import read_json, read_tensors
from concept_eraser.utils.errors import UserError, first_line

log = logging.getLogger(__name__)
# settings of a text tower that the shapes of its tensors do not determine
TEXT_SETTINGS = ("hidden_act", "num_attention_heads", "layer_norm_eps")


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


def vocabulary_size(model: Any) -> int:
    """Return the number of tokens that the text tower of a CLIP model has embeddings of."""
    if is_open_clip(model):
        return int(getattr(model, "vocab_size", None) or model.text.vocab_size)  # CoCa: the latter
    return int(model.config.text_config.vocab_size)


def _require_clip_model(model: Any) -> None:
    """Raise UserError for a module that is no CLIP model of transformers or open_clip."""
    towers = ("text_model", "vision_model", "text_projection", "visual_projection")
    is_clip = (
        hasattr(model.visual, "image_size")
        if is_open_clip(model) and hasattr(model, "visual")
        else all(hasattr(model, name) for name in towers)
    )
    if not is_clip:
        raise UserError(
            f"a {type(model).__name__} is no CLIPModel of transformers and no model of open_clip; "
            "give (CLIPModel, tokenizer) or an open_clip model"
        )


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

        Prompts that are longer than the text tower's length are cut off, with a warning.

        Raises UserError for a template without a place for the name, and for a tokenizer with more
        tokens than the text tower.
        """
        wrong = [t for t in templates if "{}" not in t]
        if wrong or not templates:
            raise UserError(
                "a template needs {} where the class name goes, found "
                f"{wrong[0] if wrong else 'none'!r}; e.g. 'a photo of a {{}}'"
            )
        texts = [template.replace("{}", name) for name in names for template in templates]
        ids = self.tokenize(texts)
        size = vocabulary_size(self.module)
        if int(ids.max()) >= size:
            raise UserError(
                f"{self.source}: its tokenizer gives the token {int(ids.max()):,}, and its text "
                f"tower has {size:,} tokens; give the tokenizer that it was trained with"
            )
        tokens = ids.unflatten(0, (len(names), len(templates)))
        return ZeroShot(self.module, tokens, self.mean, self.std).to(self.device)

    def check_images(self, images: Tensor, about: str) -> None:
        """Check examples of some data, and warn of those with fewer pixels than the model reads.

        Args:
            images: Some examples. Only images [n, channels, h, w] are checked.
            about: A description of the data.

        Raises:
            UserError: The pixels are not in [-1, 1].
        """
        if images.ndim != 4:
            return
        low, high = float(images.min()), float(images.max())
        if low < -1.01 or high > 1.01:
            raise UserError(
                f"{about}: a CLIP model reads images in [-1, 1] here, found pixels from {low:.3g} "
                f"to {high:.3g}; scale them, and leave out the model's own normalisation, which "
                "is applied to them"
            )
        size, width = image_size(self.module), max(images.shape[-2:])
        if width < size:
            log.warning(
                "The images of %s are %d pixels wide and are enlarged to the %d of the CLIP "
                "model. A folder or named set of larger ones has the option size: %d.",
                about,
                width,
                size,
                size,
            )

    @classmethod
    def from_object(
        cls, model: nn.Module, tokenizer: Any = None, source: str = "a CLIP model in memory"
    ) -> Clip:
        """Wrap a transformers CLIPModel or an open_clip model.

        Args:
            model: The model.
            tokenizer: That library's. For transformers also a CLIPProcessor, whose mean and
                standard deviation of the pixels are then used. For open_clip it has a default.
            source: The model's name.

        Raises:
            UserError: The model is of another kind, or it needs a tokenizer.
        """
        _require_clip_model(model)
        if is_open_clip(model):
            from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

            clip: Any = model
            tokenizer = tokenizer or _default_tokenizer(clip)
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
        image_processor = getattr(tokenizer, "image_processor", None)
        preprocessing = {
            key: getattr(image_processor, key, None) for key in ("image_mean", "image_std")
        }
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # that of a CLIPProcessor
        wrapped = cls._of_transformers(model, tokenizer, source, preprocessing)
        if image_processor is not None:
            wrapped.keep = [tokenizer, image_processor]
        return wrapped

    @classmethod
    def from_folder(cls, folder: Path, source: str) -> Clip:
        """Load a folder of transformers' CLIPModel with its tokenizer, safetensors only."""
        from transformers import CLIPModel, CLIPTokenizer

        check_part(folder)
        require_vocabulary(folder)
        try:
            model = CLIPModel.from_pretrained(folder, use_safetensors=True)
            tokenizer = CLIPTokenizer.from_pretrained(folder)
        except Exception as error:
            raise UserError(
                f"{folder} holds no CLIP model that can be loaded ({first_line(error)})"
            ) from error
        require_all_weights(model, folder)
        preprocessing = _read_preprocessing(folder)
        clip = cls._of_transformers(model, tokenizer, source, preprocessing or {})
        clip.preprocessing = preprocessing
        return clip

    @classmethod
    def _of_transformers(
        cls, model: nn.Module, tokenizer: Any, source: str, preprocessing: Mapping[str, Any]
    ) -> Clip:
        """Wrap a CLIPModel, with the settings of its image processor."""
        from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

        config: Any = model.config
        clip = cls(
            module=model,
            tokenize=_padding_tokenizer(tokenizer, config.text_config.max_position_embeddings),
            source=source,
            mean=preprocessing.get("image_mean") or OPENAI_CLIP_MEAN,
            std=preprocessing.get("image_std") or OPENAI_CLIP_STD,
        )
        # written beside the weights, so that the folder can be opened again
        clip.keep = [tokenizer]
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

    def text_settings(self) -> dict[str, Any]:
        """Return the settings of a transformers text tower that its tensors do not show."""
        config: Any = self.module.config
        return {name: getattr(config.text_config, name) for name in TEXT_SETTINGS}

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


def _read_preprocessing(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a folder's image processor; None if it has none.

    A CLIPProcessor of transformers 5 writes them into a file of its own.
    """
    path = folder / "preprocessor_config.json"
    if path.exists():
        return dict(read_json(path))
    path = folder / "processor_config.json"
    settings = read_json(path).get("image_processor") if path.exists() else None
    return settings if isinstance(settings, dict) else None


def _default_tokenizer(model: Any) -> Any:
    """Return open_clip's default tokenizer for a model. Raises UserError if it is not its own."""
    from open_clip import SimpleTokenizer

    tokenizer = SimpleTokenizer(context_length=int(model.context_length))
    size = vocabulary_size(model)
    if size != tokenizer.vocab_size:
        raise UserError(
            f"an open_clip model of {size:,} tokens does not read those of open_clip's default "
            f"tokenizer ({tokenizer.vocab_size:,}); pass (model, open_clip.get_tokenizer(name))"
        )
    return tokenizer


def _padding_tokenizer(tokenizer: Any, positions: int) -> Callable[[Sequence[str]], Tensor]:
    length = min(int(tokenizer.model_max_length), int(positions))
    return lambda texts: tokens_of(tokenizer, texts, length).input_ids


PLUGIN = Clip
