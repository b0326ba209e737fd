"""Every loss names the published definition that it follows and its differences, or says that no
single paper defines it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType

import pytest

from concept_eraser.losses import denoiser, labelled, text_encoder
from concept_eraser.losses.base import Loss

TABLES = [
    (denoiser, "", denoiser.LOSSES),
    (text_encoder, "", text_encoder.LOSSES),
    (labelled, "For a classifier", labelled.CLASSIFIER_LOSSES),
    (labelled, "For a VAE", labelled.VAE_LOSSES),
]
ARXIV = re.compile(r"arXiv\s+\d{4}\.\d{5}")


def part(module: ModuleType, start: str) -> str:
    """Return the docstring from the line that starts so to the next kind of target."""
    text = (module.__doc__ or "").partition("\nDifferences from the papers")[0]
    text = text[text.index(start) :]
    return re.split(r"\nFor a (?!classifier)", text)[0] if start == "For a classifier" else text


def unsourced(text: str, names: Mapping[str, object]) -> list[str]:
    """Return the losses of a docstring without a source.

    A source is an arXiv number in the loss's item, or the loss's place in the sentence on those
    that no paper defines.
    """
    sentence = re.search(r"No single paper defines ([^:.]*)", text)
    without_paper = re.findall(r"\w+", sentence[1]) if sentence else []
    wrong = []
    for name in names:
        item = re.search(rf"^\* {name} (.*?)(?=^\* |\n\n|\Z)", text, re.M | re.S)
        if item is None or not (ARXIV.search(item[1]) or name in without_paper):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize(("module", "start", "losses"), TABLES)
def test_every_loss_names_its_published_definition(
    module: ModuleType, start: str, losses: dict[str, Loss]
) -> None:
    assert unsourced(part(module, start), losses) == []


@pytest.mark.parametrize("module", [denoiser, text_encoder, labelled])
def test_every_module_of_losses_names_its_differences_and_the_authors_code(
    module: ModuleType,
) -> None:
    text = module.__doc__ or ""
    assert re.search(r"^Differences from the papers", text, re.M)
    assert re.search(r"\b[\w-]+/[\w-]+,\s+[\w/.-]+\.py, lines? \d+", text)


def test_a_loss_without_a_source_is_noticed() -> None:
    text = "* one (arXiv 2101.00001)\n* two it\n* three it\n\nNo single paper defines two."
    assert unsourced(text, dict.fromkeys(["one", "two", "three", "four"])) == ["three", "four"]
