"""Two values have the same digest only if they are equal in type, order, shape and every bit."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest
import torch

from concept_eraser.storage.digests import file_digest, value_digest

DIFFERENT = [
    None,
    0,
    1,
    1.0,
    True,
    "1",
    b"1",
    [],
    (),
    {},
    [1],
    (1,),
    [1, 2],
    [2, 1],
    [[1], 2],
    [[1, 2]],
    ["1"],
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {"a": {}, "b": 1},
    {"a": {"b": 1}},
    {"b": 2, "a": 1},
    {"a": 1, "b": 2},
    torch.zeros(4),
    torch.zeros(2, 2),
    torch.zeros(4, dtype=torch.int32),
    torch.tensor([0.0, 0.0, 0.0, -0.0]),
    torch.ones(4),
    torch.empty(0),
    [torch.zeros(2), torch.zeros(2)],
    [torch.zeros(4)],
]


def test_values_that_differ_have_different_digests() -> None:
    for (i, a), (j, b) in itertools.combinations(enumerate(DIFFERENT), 2):
        assert value_digest(a) != value_digest(b), (i, j)


def test_equal_values_have_one_digest_however_they_lie_in_memory() -> None:
    plain = torch.arange(6.0).view(2, 3)
    transpose = torch.arange(6.0).view(2, 3).T.contiguous().T
    assert not transpose.is_contiguous()
    assert value_digest({"w": plain}) == value_digest({"w": transpose.requires_grad_()})


def test_another_type_has_no_digest() -> None:
    for value in ({1, 2}, [object()], {"a": Path("x")}):
        with pytest.raises(TypeError, match="has no digest"):
            value_digest(value)


def test_a_files_digest_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_digest(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()
    with pytest.raises(OSError, match="missing"):
        file_digest(tmp_path / "missing")
