"""CLIP features by open_clip: image embeddings and their agreement with captions.

Sources: arXiv 2103.00020; CLIP score: arXiv 2104.08718. The weights are a file, or open_clip's name
of weights that a local cache already holds. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from concept_eraser.evaluation.features.base import Features, device, file_hash, places
from concept_eraser.storage.readers import read_json
from concept_eraser.utils import provenance
from concept_eraser.utils.errors import UserError, first_line, names_text, unknown

FOLDER = "local-dir:"
_PREPROCESSING = ("mean", "std", "interpolation", "resize_mode")


@dataclass(frozen=True)
class ClipFeatures(Features):
    """CLIP image embeddings.

    OpenAI's weights as a file need a model name that ends in -quickgelu. With open_clip's name of
    the weights, this class sets that option.

    Args:
        model: open_clip's name, or `local-dir:FOLDER` with its own weights.
        weights: a file, or open_clip's name of the weights.
    """

    title: ClassVar[str] = "CLIP features"
    backend: ClassVar[str] = "open_clip"
    model: str = "ViT-B-32"
    weights: str = "openai"

    @cached_property
    def _file(self) -> Path:
        """The file of the weights. Raises UserError for an unknown model or a missing file."""
        import open_clip

        if self.model.startswith(FOLDER):
            folder = Path(self.model.removeprefix(FOLDER))
            files = [p for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".pth")]
            if not (folder / "open_clip_config.json").is_file() or len(files) != 1:
                raise UserError(
                    f"{folder} is no CLIP model: it needs open_clip_config.json and one "
                    f"file of weights (.safetensors, .bin or .pth), found {len(files)}"
                )
            return files[0]
        if self.model not in open_clip.list_models():
            raise unknown(
                "open_clip model",
                self.model,
                open_clip.list_models(),
                hint=f"or give {FOLDER}FOLDER",
            )
        if Path(self.weights).is_file():
            return Path(self.weights)
        if path_on_disk := next((path for path in self._candidates() if path.is_file()), None):
            return path_on_disk
        tags = names_text(open_clip.list_pretrained_tags_by_model(self.model), 4)
        raise UserError(
            f"the CLIP weights {self.weights!r} of {self.model} are not on this machine, "
            "and nothing is downloaded: `concept-eraser doctor` says where they go; or give "
            f"`weights` the path of a file (open_clip's names of them: {tags}), or leave the "
            "judge's own in use (`features: judge`, clip_score without `model`)"
        )

    def _candidates(self) -> list[Path]:
        """The possible files of named weights: our folders, open_clip's cache, the hub's cache."""
        import huggingface_hub

        config = self._weight_settings
        repository, _, file = str(config.get("hf_hub", "")).rpartition("/")
        names = [file] if file else ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"]
        cache_paths = (
            [huggingface_hub.try_to_load_from_cache(repository, name) for name in names]
            if repository
            else []
        )
        url = Path(str(config.get("url", ""))).name
        local_paths = [
            place / name
            for name in (self.weights, url)
            if name
            for place in places(Path.home() / ".cache" / "clip")
        ]
        return [*local_paths, *(Path(path) for path in cache_paths if isinstance(path, str))]

    @cached_property
    def _weight_settings(self) -> dict[str, Any]:
        """open_clip's configuration of the weights of this name; {} for a file."""
        from open_clip.pretrained import get_pretrained_cfg

        return (
            {}
            if self.model.startswith(FOLDER)
            else get_pretrained_cfg(self.model, self.weights) or {}
        )

    @cached_property
    def fingerprint(self) -> str:
        return file_hash(self._file)

    @cached_property
    def design(self) -> str:
        """A short hash of what decides an embedding beside the weights.

        It is the architecture, and how images are prepared.
        """
        if self.model.startswith(FOLDER):
            config = Path(self.model.removeprefix(FOLDER)) / "open_clip_config.json"
            return provenance.fingerprint(read_json(config))[:8]
        keys = ("quick_gelu", *_PREPROCESSING)
        return provenance.fingerprint(
            [self.model, [self._weight_settings.get(key) for key in keys]]
        )[:8]

    @property
    def name(self) -> str:
        """The model's name, without the folders of the machine."""
        return Path(self.model).name if self.model.startswith(FOLDER) else self.model

    @property
    def protocol(self) -> dict[str, Any]:
        config = self._net.visual.preprocess_cfg
        weights = self.weights if self._weight_settings else self._file.name
        size = (
            config["size"]
            if isinstance(config["size"], int)
            else "x".join(map(str, config["size"]))
        )
        return {
            "model": f"{self.name}, {weights}",
            "resize": f"{config['interpolation']}, {config['resize_mode']}",
            "input_size": str(size),
            # the user may edit the configuration of a folder, whose name then stays the same
            **({"design": self.design} if self.model.startswith(FOLDER) else {}),
        }

    @cached_property
    def _net(self) -> Any:
        import open_clip

        file, options = self._file, {}
        if not self.model.startswith(
            FOLDER
        ):  # a file does not state its preprocessing: open_clip's default applies
            config = self._weight_settings
            options = {
                "pretrained": str(file),
                "force_quick_gelu": config.get("quick_gelu", False),
                "force_preprocess_cfg": {k: config[k] for k in _PREPROCESSING if k in config},
            }
        if self._text("hf_model_name"):
            raise UserError(
                f"the text tower of {self.model} is built from the hub, which is not "
                "used; choose another model"
            )
        try:
            return (
                open_clip.create_model(self.model, **options)
                .to(device())
                .eval()
                .requires_grad_(False)
            )
        except Exception as error:
            # open_clip does not catch the errors of torch, pickle, safetensors and json
            raise UserError(
                f"{file} cannot be read as weights of {self.model} ({first_line(error)})"
            ) from None

    def _text(self, option: str) -> Any:
        """An option of the text tower's configuration.

        Raises:
            UserError: the configuration cannot be read.
        """
        import open_clip

        try:
            return open_clip.get_model_config(self.model)["text_cfg"].get(option)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(
                f"the configuration of {self.model} cannot be read ({first_line(error)})"
            ) from None

    @cached_property
    def _transform(self) -> Any:
        import open_clip

        return open_clip.transform.image_transform_v2(
            open_clip.transform.PreprocessCfg(**self._net.visual.preprocess_cfg), is_train=False
        )

    def prepare(self, image: np.ndarray) -> Tensor:
        """[3, size, size] float32, resized and normalised by the model's own preprocessing."""
        from PIL import Image

        pixels: Tensor = self._transform(Image.fromarray(image))
        return pixels

    def embed(self, batch: Tensor) -> Tensor:
        features: Tensor = self._net.encode_image(batch)
        return features

    @torch.no_grad()
    def cosines(self, images: Tensor, captions: Sequence[str]) -> np.ndarray:
        """Cosine of each image [n, h, w, 3] uint8 with its caption, [n]."""
        import open_clip

        if self._text("hf_tokenizer_name"):
            raise UserError(
                f"the tokenizer of {self.model} is on the hub, which is not used; "
                "choose another model"
            )
        images = torch.from_numpy(self.extract(images))
        tokens = open_clip.get_tokenizer(self.model)(list(captions))
        texts = torch.cat(
            [self._net.encode_text(part.to(device())).float().cpu() for part in tokens.split(64)]
        )
        return torch.cosine_similarity(images, texts).numpy()


PLUGIN = ClipFeatures
