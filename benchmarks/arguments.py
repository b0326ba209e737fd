"""Values of the benchmarks' options, with an error before anything is measured."""

from __future__ import annotations

import argparse

import torch


def positive(text: str) -> int:
    """Read a whole number from 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


def device(text: str) -> torch.device:
    """Read `cpu`, or `cuda` where there is such a GPU, for argparse."""
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, found {text!r}")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("there is no GPU here; leave --device out")
    return torch.device(text)
