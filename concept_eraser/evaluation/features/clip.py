"""CLIP features by open_clip: image embeddings, and their agreement with captions (arXiv 2103.00020; CLIP score: 2104.08718).

Weights are a file, or the name that open_clip knows them by if they lie in a cache on disk already; nothing is fetched.
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

from concept_eraser.errors import UserError, first_line, unknown
from concept_eraser.evaluation.features.base import Features, device, file_hash, places

FOLDER = "local-dir:"


@dataclass(frozen=True)
class Clip(Features):
    """model: open_clip's name, or `local-dir:FOLDER` with its own weights; weights: a file, or open_clip's name of them.

    OpenAI's weights given as a file want the model's name that ends in -quickgelu; by their name this is seen to.
    """

    title: ClassVar[str] = "CLIP features"
    backend: ClassVar[str] = "open_clip"
    model: str = "ViT-B-32"
    weights: str = "openai"

    @cached_property
    def _file(self) -> Path:
        """Of the weights. Raises UserError for an unknown model, or with where the file should lie."""
        import open_clip

        if self.model.startswith(FOLDER):
            folder = Path(self.model.removeprefix(FOLDER))
            files = [p for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".pth")]
            if not (folder / "open_clip_config.json").is_file() or len(files) != 1:
                raise UserError(f"{folder} is no CLIP model: it needs open_clip_config.json and one file of weights (.safetensors, .bin or .pth), found {len(files)}")  # fmt: skip
            return files[0]
        if self.model not in open_clip.list_models():
            raise unknown("open_clip model", self.model, open_clip.list_models(), hint=f"or give {FOLDER}FOLDER")
        if Path(self.weights).is_file():
            return Path(self.weights)
        if found := next((path for path in self._candidates() if path.is_file()), None):
            return found
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(self.model))
        raise UserError(f"the CLIP weights {self.weights!r} of {self.model} are not on this machine, and nothing is downloaded: give `weights` the path of a file (open_clip's names of them: {tags}), or leave the judge's own in use (`features: judge`, clip_score without `model`)")  # fmt: skip

    def _candidates(self) -> list[Path]:
        """Where a named set of weights may lie: our folders, open_clip's cache, the hub's cache."""
        import huggingface_hub

        known = self._pretrained
        repository, _, file = str(known.get("hf_hub", "")).rpartition("/")
        names = [file] if file else ["open_clip_model.safetensors", "open_clip_pytorch_model.bin"]
        cached = [huggingface_hub.try_to_load_from_cache(repository, name) for name in names] if repository else []
        url = Path(str(known.get("url", ""))).name
        own = [place / name for name in (self.weights, url) if name for place in places(Path.home() / ".cache" / "clip")]  # fmt: skip
        return [*own, *(Path(path) for path in cached if isinstance(path, str))]

    @cached_property
    def _pretrained(self) -> dict[str, Any]:
        """What open_clip knows of weights by this name; {} for a file."""
        from open_clip.pretrained import get_pretrained_cfg

        return {} if self.model.startswith(FOLDER) else get_pretrained_cfg(self.model, self.weights) or {}

    @cached_property
    def fingerprint(self) -> str:
        return file_hash(self._file)

    @property
    def name(self) -> str:
        """Of the model, without the folders of the machine."""
        return Path(self.model).name if self.model.startswith(FOLDER) else self.model

    @property
    def protocol(self) -> dict[str, Any]:
        how = self._net.visual.preprocess_cfg
        weights = self.weights if self._pretrained else self._file.name
        side = how["size"] if isinstance(how["size"], int) else "x".join(map(str, how["size"]))
        return {"model": f"{self.name}, {weights}", "resize": f"{how['interpolation']}, {how['resize_mode']}", "input_size": str(side)}  # fmt: skip

    @cached_property
    def _net(self) -> Any:
        import open_clip

        file, how = self._file, {}
        if not self.model.startswith(
            FOLDER
        ):  # a file says nothing of its preprocessing: then it is open_clip's default
            known = self._pretrained
            how = {"pretrained": str(file), "force_quick_gelu": known.get("quick_gelu", False), "force_preprocess_cfg": {k: known[k] for k in ("mean", "std", "interpolation", "resize_mode") if k in known}}  # fmt: skip
        if self._text("hf_model_name"):
            raise UserError(f"the text tower of {self.model} is built from the hub, which is not asked; choose another model")  # fmt: skip
        try:
            return open_clip.create_model(self.model, **how).to(device()).eval().requires_grad_(False)
        except Exception as error:  # open_clip lets through what torch, pickle, safetensors and json raise
            raise UserError(f"{file} cannot be read as weights of {self.model} ({first_line(error)})") from None

    def _text(self, option: str) -> Any:
        """An option of the text tower's configuration. Raises UserError where that cannot be read."""
        import open_clip

        try:
            return open_clip.get_model_config(self.model)["text_cfg"].get(option)
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(f"the configuration of {self.model} cannot be read ({first_line(error)})") from None

    @cached_property
    def _transform(self) -> Any:
        import open_clip

        return open_clip.transform.image_transform_v2(open_clip.transform.PreprocessCfg(**self._net.visual.preprocess_cfg), is_train=False)  # fmt: skip

    def prepare(self, picture: np.ndarray) -> Tensor:
        """[3, size, size] float32, resized and normalised as the model's own preprocessing says."""
        from PIL import Image

        return self._transform(Image.fromarray(picture))

    def embed(self, batch: Tensor) -> Tensor:
        return self._net.encode_image(batch)

    @torch.no_grad()
    def cosines(self, pictures: Tensor, captions: Sequence[str]) -> np.ndarray:
        """Cosine of each picture [n, h, w, 3] uint8 with its caption, [n]."""
        import open_clip

        if self._text("hf_tokenizer_name"):
            raise UserError(f"the tokenizer of {self.model} lies on the hub, which is not asked; choose another model")
        images = torch.from_numpy(self.extract(pictures))
        tokens = open_clip.get_tokenizer(self.model)(list(captions))
        texts = torch.cat([self._net.encode_text(part.to(device())).float().cpu() for part in tokens.split(64)])
        return torch.cosine_similarity(images, texts).numpy()


PLUGIN = Clip
