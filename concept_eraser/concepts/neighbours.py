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
    """The mean of the text encoder's outputs over the tokens of each text, [texts, width].

    A pooled output, where the family has one, is appended.
    """
    rows = []
    for start in range(0, len(texts), BATCH):
        batch = list(texts[start : start + BATCH])
        lengths = torch.tensor([len(model.words.ids(text)) + 2 for text in batch])
        vectors = []
        for tensor in model.encode(batch).tensors.values():
            values = tensor.float().cpu()
            if values.dim() == 3:
                inside = torch.arange(values.shape[1])[None] < lengths[:, None]
                counts = inside.sum(1, keepdim=True)
                values = (values * inside[..., None]).sum(1) / counts
            if values.dim() == 2:
                vectors.append(F.normalize(values, dim=-1))
        rows.append(torch.cat(vectors, dim=-1))
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
