"""Limits of the numbers that a user gives in recipes, suites, prompt sets and on the command line.

A limit excludes impossible values: a number that no tensor can have as its size, or that overflows
in fp32. It does not depend on what is useful. Every setting of a shipped recipe, suite or study is
within its limit, which a test checks.
"""

from __future__ import annotations

import math
import typing
from typing import Any

from concept_eraser.utils.errors import quote

# numpy's legacy generators and torch accept it; the seeds of I2P are 32-bit numbers
SEED = 2**32 - 1
SAMPLER_STEPS = 1000  # the number of time steps in the training of models
GUIDANCE = 1000.0
IMAGES = 1_000_000  # generated for one objective or one group
BATCH = 65_536  # examples or images at once
TRAINING_STEPS = 10_000_000
MILESTONES = 1_000  # changes of a learning rate by steps
RANK = 65_536  # of a LoRA: no layer is wider
LEARNING_RATE = 1e6
FACTOR = 1e12  # of a loss or a penalty; its product with a gradient fits into fp32
MODEL_OPTION = 65_536.0  # size of an image in pixels, guidance
PORTION = 1e4  # factor of a change: strength of an export, weight of a merge, negation
POSITION = 100_000_000  # of an example in labelled data
CLASSES = 1_000_000
CONCEPTS = 1_000  # in one recipe
GROUPS = 1_000  # of a suite
METRICS = 100  # of a suite
SIDE = 16_384  # of an image that is read, in pixels, after it is resized
PIXELS = 178_956_970  # of an image file, where Pillow refuses
TEXT = 10_000  # characters of a prompt, template or caption
FIELD = 200  # characters of the name of a field
WORDS = 1_000  # that a prompt set leaves out, and names of sets that it includes
ROWS = 200_000  # that `expand` of a prompt set may give
PRODUCTS = 100  # of templates and fields, in the `expand` of a prompt set
TABLE_ROWS = 5_000_000  # of a table of prompts
COUNT = 10_000_000  # any other whole number, e.g. an option of a method

# Options of plug-ins by name; all others that are whole numbers are bounded by COUNT
_OPTIONS = {
    "seed": SEED,
    "rank": RANK,
    "batch": BATCH,
    "size": SIDE,
    "images": IMAGES,
    "tokens": BATCH,
    "k": BATCH,
    "classes": CLASSES,
}


def require_option(name: str, value: Any) -> None:
    """Raise ValueError for a whole number that exceeds the limit of its option of a plug-in."""
    most = _OPTIONS.get(name, COUNT)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > most:
        raise ValueError(f"expected a whole number up to {most:,}, found {quote(value)}")


def whole(value: Any, low: int, high: int) -> int:
    """Return a whole number in [low, high], from a number or a text such as "17" or "17.0".

    Raises ValueError for others.
    """
    result = number(value, low, high)
    if result != int(result):
        raise ValueError(f"expected a whole number, found {quote(value)}")
    return int(result)


def number(value: Any, low: float, high: float) -> float:
    """Return a finite number in [low, high], from a number or a text.

    Raises ValueError for others.
    """
    try:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float | str)
            or (isinstance(value, str) and len(value) > 100)
        ):
            raise ValueError
        result = float(value)
    except (ValueError, OverflowError):
        raise ValueError(
            f"expected a number from {low:,} to {high:,}, found {quote(value)}"
        ) from None
    if not math.isfinite(result) or not low <= result <= high:
        raise ValueError(f"expected a number from {low:,} to {high:,}, found {quote(value)}")
    return result


def require_no_switch(annotation: Any, value: Any) -> None:
    """Raise ValueError for true or false, alone or in a list, where only a number is expected."""
    values = value if isinstance(value, list | tuple) else [value]
    found = next((one for one in values if isinstance(one, bool)), None)
    types = set(_types_in(annotation)) if found is not None else set()
    if types & {int, float} and bool not in types:
        raise ValueError(
            f"expected a number, found {str(found).lower()}, as YAML also reads yes, no, on and off"
        )


def _types_in(annotation: Any) -> typing.Iterator[Any]:
    yield annotation
    for inner in typing.get_args(annotation):
        if not isinstance(inner, bool | int | float):  # a value of a Literal
            yield from _types_in(inner)
