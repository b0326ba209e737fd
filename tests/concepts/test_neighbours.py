"""Neighbours by the text encoders of every family."""

from __future__ import annotations

from pathlib import Path

import pytest

import concept_eraser
from concept_eraser.concepts.neighbours import embed_texts, nearest
from concept_eraser.models.loading import load
from concept_eraser.utils.errors import UserError
from tests import families

WORDS = ["a red star", "a blue house", "a green tree"]


@pytest.mark.parametrize("name", ["sdxl", "sd3", "sd3-no-t5", "flux", "pixart", "flux2"])
def test_a_text_is_its_own_nearest_neighbour(name: str, tmp_path: Path) -> None:
    """Also in families with several text encoders, whose outputs are of different lengths."""
    model = load(families.build(name, tmp_path / name))
    embeddings = embed_texts(model, WORDS)
    assert len(embeddings) == 3
    assert embeddings.norm(dim=-1).tolist() == pytest.approx([1.0] * 3)
    for word in WORDS:
        assert nearest(model, [word], WORDS, 1) == [word]


def test_a_model_that_is_conditioned_on_classes_is_refused(tmp_path: Path) -> None:
    folder = families.build("dit", tmp_path / "dit")
    with pytest.raises(UserError, match=r"is conditioned on classes, not on prompts.*--forget"):
        concept_eraser.erase("goldfish", kind="object", model=folder, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
