"""A linear probe on the mid-block of a UNet: can a line tell images of a concept from others?

The features of an image are the mid-block's activations for the noised image, averaged over its
positions. A logistic regression is fitted with cross-validation. Nothing is tuned: inputs are
standardised, and the penalty is scikit-learn's default.

A probe with many features can fit any labels. So the same probe is fitted to shuffled labels. And a
network without any training passes on much of its input. So a model with permuted weights is probed
too: only what a probe finds beyond it was learned.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concept_eraser.evaluation.statistics import wilson
from concept_eraser.models.base import Condition, Model
from concept_eraser.utils.errors import UserError
from concept_eraser.utils.provenance import derive_seed

BATCH = 64  # images per forward pass


@torch.no_grad()
def activations(
    model: Model, latents: Tensor, noise: Tensor, t: int, condition: Condition
) -> np.ndarray:
    """Return the activations of the mid-block, averaged over the positions: [n, channels] float32.

    Args:
        model: A model whose denoiser is a UNet.
        latents: The clean latents of images, [n, c, h, w].
        noise: Unit noise of the same shape.
        t: The time step to which the latents are noised.
        condition: One condition for all images, one row.

    Raises:
        UserError: The denoiser has no mid-block.
    """
    block = getattr(model.denoiser, "mid_block", None)
    if not isinstance(block, torch.nn.Module):
        raise UserError(f"the denoiser of {model.source} has no mid-block; probe a UNet")
    outputs: list[Tensor] = []

    def note(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        outputs.append(output.float().mean((2, 3)).cpu())

    hook = block.register_forward_hook(note)
    try:
        for start in range(0, len(latents), BATCH):
            part = slice(start, start + BATCH)
            times = torch.full((len(latents[part]),), t, device=latents.device)
            noisy = model.corrupt(latents[part], noise[part], times)
            model.denoise(noisy, times, condition.repeat(len(noisy)))
    finally:
        hook.remove()
    return torch.cat(outputs).numpy()


def correct_predictions(features: np.ndarray, labels: np.ndarray, *, folds: int, seed: int) -> int:
    """Return how many labels a logistic regression predicts that was not fitted to them.

    Args:
        features: [n, d].
        labels: [n] bool.
        folds: The parts of the cross-validation. Each is predicted from the others.
        seed: Of the split into parts.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    split = StratifiedKFold(folds, shuffle=True, random_state=seed)
    return int((cross_val_predict(classifier, features, labels, cv=split) == labels).sum())


def probe(
    features: np.ndarray, labels: np.ndarray, *, folds: int, shuffles: int, seed: int
) -> dict[str, Any]:
    """Return the accuracy of the probe, and that on shuffled labels.

    Args:
        features: [n, d].
        labels: [n] bool, with as many of each kind.
        folds: The parts of the cross-validation.
        shuffles: How often the labels are shuffled, each time with a new split.
        seed: Of splits and shuffles.

    Returns:
        `accuracy` with its Wilson interval over the n predictions, `shuffled`: one accuracy for
        each shuffle, and `p`: the p-value of the permutation test, (1 + shuffles that are at least
        as accurate) / (1 + shuffles).

    Raises:
        UserError: A kind of label has fewer images than there are folds.
    """
    if min(int(labels.sum()), int((~labels).sum())) < folds:
        raise UserError(
            f"the probe needs {folds} images with the concept and {folds} without it, found "
            f"{int(labels.sum())} and {int((~labels).sum())}; generate more images"
        )
    accuracy = wilson(correct_predictions(features, labels, folds=folds, seed=seed), len(labels))
    shuffled = []
    for number in range(shuffles):
        shuffle_seed = derive_seed(seed, "shuffle", number) % 2**32
        order = np.random.default_rng(shuffle_seed).permutation(len(labels))
        hits = correct_predictions(features, labels[order], folds=folds, seed=shuffle_seed)
        shuffled.append(hits / len(labels))
    return {
        "accuracy": asdict(accuracy),
        "shuffled": shuffled,
        "p": (1 + sum(value >= accuracy.value for value in shuffled)) / (1 + shuffles),
    }


@torch.no_grad()
def permute_weights(model: Model, seed: int) -> None:
    """Permute the entries of each tensor of a model's denoiser, in place.

    The denoiser then has the distribution of its weights and nothing of what it learned.
    """
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted(model.denoiser.named_parameters()):
        values = parameter.detach().cpu().flatten()
        order = torch.randperm(len(values), generator=generator)
        parameter.copy_(values[order].view_as(parameter).to(parameter.device))
