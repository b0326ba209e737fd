"""Models that never learned a concept, as controls of an evaluation or an attack.

`python -m concept_eraser.tiny.build --without shape=heart` trains one. It shares tokenizer, text
encoder and VAE with the original, and only its denoiser was trained anew. So its predictions and
images can be compared with those of an erased model.

An erasure may have trained the text encoder of the erased model. So the parts of a control are
compared with those of the original.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from concept_eraser.data.generate import model_fingerprint
from concept_eraser.models.base import Model
from concept_eraser.storage.base_model import CONTROLS
from concept_eraser.storage.readers import read_json
from concept_eraser.utils import resources
from concept_eraser.utils.errors import UserError

RECORD = "control.json"
# what a record states about a training; versions and scores stay in the file
_OF_THE_RECORD = ("without", "seed", "steps", "unet_sha256")


@dataclass(frozen=True)
class NeverLearned:
    """A control: a model that never learned the concept.

    Attributes:
        model: the loaded model.
        record: excluded values, seed, steps and hash of its training, from `control.json`. Empty
            for a model without this file.
    """

    model: Model
    record: Mapping[str, Any]

    def require_comparable(
        self, original: Model, concept: Mapping[str, str], prompts: Sequence[str]
    ) -> None:
        """Check that the control can be compared with models erased from an original.

        Args:
            original: the model before the erasure.
            concept: attribute and value of the concept.
            prompts: the prompts, which both must tokenise alike.

        Raises:
            UserError: as `require_equal_parts` and `require_without`.
        """
        self.require_equal_parts(original, prompts)
        ((attribute, value),) = concept.items()
        self.require_without(attribute, value)

    def require_equal_parts(self, original: Model, prompts: Sequence[str]) -> None:
        """Check that all parts except the denoiser are those of the original.

        Args:
            original: the model before an erasure.
            prompts: the prompts, which both must tokenise alike.

        Raises:
            UserError: tokens, text encoder, latents or predictions of the two differ.
        """
        differences = _differences(self.model, original, prompts)
        if differences:
            raise UserError(
                f"the control {self.model.source} differs from {original.source} in "
                f"{', '.join(differences)}; give a control that was trained with the tokenizer, "
                "text encoder and VAE of the original"
            )

    def require_without(self, attribute: str, value: str) -> None:
        """Raise UserError if the record says that the control was trained on a concept."""
        if self.record and value not in self.record.get("without", {}).get(attribute, ()):
            raise UserError(
                f"the control {self.model.source} was trained on images of {attribute}={value} "
                f"(its {RECORD} says so); give one that was trained without them"
            )


@dataclass(frozen=True)
class RetrainingGap:
    """How far an erased model is from models that were trained without the concept.

    All values are plain numbers, lists and mappings, as in evaluation.json.

    Attributes:
        models: the controls, each as "source (fingerprint of its weights)".
        records: what `control.json` of each control states.
        predictions: for each group of prompts the distances of noise predictions.
        results: the suite's numbers of the erased model ("after") against those of a control
            ("before"), with the paired difference; `control` is the control's position.
        distances: FID and KID between the images of two models, by `control`, metric and group.
        refused: the numbers that could not be measured, with the reason.
    """

    models: list[str]
    records: list[dict[str, Any]]
    predictions: list[dict[str, Any]]
    results: list[dict[str, Any]]
    distances: list[dict[str, Any]]
    refused: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_record(source: object) -> dict[str, Any]:
    """Return what `control.json` in a model's folder states, or {} if there is none.

    source: a model as `load` takes it. A bundled control is named.

    Raises UserError for a damaged file.
    """
    if not isinstance(source, str | Path):
        return {}
    name = str(source)
    path = (resources.tiny_control(name) if name in CONTROLS else Path(name)) / RECORD
    if not path.is_file():
        return {}
    content = read_json(path)
    without = content.get("without", {}) if isinstance(content, dict) else None
    if not isinstance(without, dict) or not all(isinstance(v, list) for v in without.values()):
        raise UserError(f"{path} is damaged, or of another version; train the control again")
    return {key: content[key] for key in _OF_THE_RECORD if key in content}


def _differences(control: Model, original: Model, prompts: Sequence[str]) -> list[str]:
    """Name the parts in which a control differs from the original."""
    if control.family != original.family or control.readers != original.readers:
        return [f"the family ({control.family}, not {original.family})"]
    names = []
    if not _have_equal_tokens(control, original, prompts):
        names.append("the tokenizer")
    names += [
        "the text encoder" if part == "text_encoder" else part
        for part in original.readers
        if not _have_equal_weights(control, original, part)
    ]
    if control.latent_shape() != original.latent_shape():
        names.append(f"the latents ({control.latent_shape()}, not {original.latent_shape()})")
    elif not _have_equal_weights(control, original, "vae"):
        names.append("the VAE of the latents")
    predictions = [
        (getattr(model, "prediction", None), model.timesteps) for model in (control, original)
    ]
    if predictions[0] != predictions[1]:
        names.append("the kind of prediction")
    return names


def _have_equal_tokens(one: Model, other: Model, prompts: Sequence[str]) -> bool:
    tokens = [model.tokenize(prompts).tensors for model in (one, other)]
    return tokens[0].keys() == tokens[1].keys() and all(
        torch.equal(value.cpu(), tokens[1][name].cpu()) for name, value in tokens[0].items()
    )


def _have_equal_weights(one: Model, other: Model, part: str) -> bool:
    """Whether a part has equal weights in half precision, in which models are stored."""
    weights = [
        model.parts[part].state_dict() if part in model.parts else {} for model in (one, other)
    ]
    if weights[0].keys() != weights[1].keys():
        return False
    for name, value in weights[0].items():
        pair = [tensor.detach().cpu() for tensor in (value, weights[1][name])]
        if pair[0].is_floating_point():
            pair = [tensor.half() for tensor in pair]
        if not torch.equal(*pair):
            return False
    return True


def require_different(controls: Sequence[NeverLearned]) -> None:
    """Raise UserError if two controls have the same weights: they would count as two trainings."""
    if len(controls) < 2:  # a fingerprint reads every weight
        return
    sources: dict[str, str] = {}
    for control in controls:
        weights = model_fingerprint(control.model)
        if weights in sources:
            raise UserError(
                f"the controls {sources[weights]} and {control.model.source} have the same "
                "weights, so they are one training; give each control once"
            )
        sources[weights] = control.model.source
