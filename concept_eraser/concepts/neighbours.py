"""Neighbours: the texts that are nearest to a concept by the model's own text encoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from concept_eraser.models.base import Model

BATCH = 64  # texts at once


@torch.no_grad()
def embed_texts(model: Model, texts: Sequence[str]) -> Tensor:
    """An embedding of each text by the model's text encoders, [texts, width].

    It is the pooled output of the CLIP text encoders (SDXL, SD 3, Flux). A family without one has
    the mean of the text encoder's outputs over the tokens of the text, by its mask if it has one.
    """
    rows = []
    for start in range(0, len(texts), BATCH):
        batch = list(texts[start : start + BATCH])
        tensors = model.encode(batch).tensors
        if "pooled" in tensors:
            vectors = tensors["pooled"].float().cpu()
        else:
            states = tensors["states"].float().cpu()
            if not model.has_clip_words:
                masks = tensors if "mask" in tensors else model.tokenize(batch).tensors
                inside = masks["mask"].cpu().bool()
            else:
                lengths = torch.tensor([len(model.words.ids(text)) + 2 for text in batch])
                inside = torch.arange(states.shape[1])[None] < lengths[:, None]
            vectors = (states * inside[..., None]).sum(1) / inside.sum(1, keepdim=True)
        rows.append(F.normalize(vectors, dim=-1))
    return torch.cat(rows)


def nearest(model: Model, texts: Sequence[str], candidates: Sequence[str], n: int) -> list[str]:
    """The `n` candidates that are most similar to some texts by the cosine of their embeddings.

    The mean over all candidates is subtracted first: embeddings of prompts share a large part.

    Returns:
        The candidates, the most similar first.
    """
    if not candidates or n < 1:
        return []
    embeddings = embed_texts(model, [*candidates, *texts])
    centred = embeddings - embeddings[: len(candidates)].mean(0)
    concept = centred[len(candidates) :].mean(0, keepdim=True)
    similarities = F.cosine_similarity(centred[: len(candidates)], concept)
    order = similarities.argsort(descending=True, stable=True)[:n].tolist()
    return [candidates[i] for i in order]
