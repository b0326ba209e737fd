"""The mutants that are made of a small source, and the committed result of the campaign."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tests.campaigns.mutants import RESULT, ROOT, TESTS, mutants

SOURCE = '''
"""A docstring of 3 words."""
import math
from typing import Protocol

class Shape(Protocol):
    size: int = 3

class Square:
    title: str = "square"
    side: float = 2.0

    def area(self, scale: int = 1) -> float:
        """Its area, 4."""
        if scale < 0 and not self.side:
            raise ValueError(f"scale {scale + 1}")
        return self.side**2 * scale

    def __repr__(self) -> str:
        return "1" * 2
'''
EXPECTED = [
    "Square: side: float = 2.0 -> side: float = 3.0",
    "Square: side: float = 2.0 -> side: float = -2.0",
    "Square: def area(self, scale: int=1) -> float: -> def area(self, scale: int=2) -> float:",
    "Square: def area(self, scale: int=1) -> float: -> def area(self, scale: int=0) -> float:",
    "Square.area: if scale < 0 and (not self.side): -> if scale < 0 or not self.side:",
    "Square.area: if scale < 0 and (not self.side): -> if scale <= 0 and (not self.side):",
    "Square.area: if scale < 0 and (not self.side): -> if scale >= 0 and (not self.side):",
    "Square.area: if scale < 0 and (not self.side): -> if scale < 1 and (not self.side):",
    "Square.area: if scale < 0 and (not self.side): -> if scale < -1 and (not self.side):",
    "Square.area: if scale < 0 and (not self.side): -> if scale < 0 and self.side:",
    "Square.area: raise ValueError(f'scale {scale + 1}') -> pass",
    "Square.area: return self.side ** 2 * scale -> return None",
    "Square.area: return self.side ** 2 * scale -> return self.side ** 2 / scale",
    "Square.area: return self.side ** 2 * scale -> return self.side * 2 * scale",
    "Square.area: return self.side ** 2 * scale -> return self.side ** 3 * scale",
    "Square.area: return self.side ** 2 * scale -> return self.side ** 1 * scale",
]


def test_the_mutants_of_a_small_source() -> None:
    """Code is mutated; docstrings, messages, annotations, protocols and `__repr__` are not."""
    assert [one.key for one in mutants(ast.parse(SOURCE))] == EXPECTED


def test_every_method_has_its_tests_named() -> None:
    methods = {str(p.relative_to(ROOT)) for p in (ROOT / "concept_eraser" / "methods").glob("*.py")}
    assert methods - {"concept_eraser/methods/__init__.py"} <= set(TESTS)
    missing = {file for files in TESTS.values() for file in files if not (ROOT / file).exists()}
    assert not missing


def test_most_mutants_are_killed_and_the_others_have_reasons() -> None:
    result = json.loads(Path(RESULT).read_text())
    assert set(result["modules"]) == set(TESTS)
    assert result["killed"] >= 0.85 * result["mutants"]
    for path, module in result["modules"].items():
        assert module["killed"] >= 0.85 * module["mutants"], path
        assert module["killed"] + len(module["survivors"]) == module["mutants"], path
        assert all(one["reason"] for one in module["survivors"]), path
