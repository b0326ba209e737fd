"""A damaged cache file counts as missing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from concept_eraser.evaluation.features.base import Memory
from concept_eraser.storage import cache, output_folder
from concept_eraser.training import checkpoint
from concept_eraser.utils.errors import UserError


def flip_bit(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_every_flipped_bit_of_a_chunk_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "chunk.safetensors"
    images = torch.arange(48, dtype=torch.uint8).view(1, 4, 4, 3)
    cache.write_chunk(path, {"images": images})
    assert torch.equal(cache.read_chunk(path)["images"], images)
    whole = path.read_bytes()
    for place in range(len(whole)):
        flip_bit(path, place)
        chunk = cache.read_chunk(path)
        assert chunk is None or (
            list(chunk) == ["images"] and torch.equal(chunk["images"], images)
        ), place
        path.write_bytes(whole)
    for length in (0, 4, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert cache.read_chunk(path) is None


def test_a_chunk_without_a_digest_counts_as_missing(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"images": torch.zeros(1)}, tmp_path / "old.safetensors")
    assert cache.read_chunk(tmp_path / "old.safetensors") is None


def test_rows_that_are_not_what_was_written_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for i in range(3):
        cache.append_row(path, {"image": str(i), "found": [["FACE", 0.5, [1, 2, 3, 4]]]})
    with path.open("a") as file:
        file.write('{"row": {"image": "9"}, "sha256": "0"}\n{"row": 3}\n{"cut')
    cache.append_row(path, {"image": "4", "found": []})
    assert [row["image"] for row in cache.read_rows(path)] == ["0", "1", "2", "4"]
    path.write_text(path.read_text().replace("0.5", "0.6", 1))
    assert [row["image"] for row in cache.read_rows(path)] == ["1", "2", "4"]


def test_features_that_are_not_what_was_written_are_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "features"
    rows = {f"{i:032d}": np.full(3, i, np.float32) for i in range(4)}
    Memory(path, 3).add(rows)
    size = len(path.read_bytes()) // 4
    flip_bit(path, size + 33)
    rows_on_disk = Memory(path, 3).rows
    assert sorted(rows_on_disk) == [f"{i:032d}" for i in (0, 2, 3)]
    assert np.array_equal(rows_on_disk[f"{2:032d}"], rows[f"{2:032d}"])


def test_a_full_cache_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for call in (
        lambda p: cache.write_chunk(p, {"a": torch.zeros(1)}),
        lambda p: cache.append_row(p, {}),
    ):
        with pytest.raises(cache.CacheFull, match="CONCEPT_ERASER_CACHE"):
            call(tmp_path / "file" / "inside")


def state(step: int) -> dict:
    return {
        "step": step,
        "params": {"w": torch.full((5,), float(step))},
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0), "m": torch.rand(3)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99), "params": [0]}],
        },
        "method": {},
        "none": None,
        "empty": torch.empty(0),
    }


def test_a_damaged_state_falls_back_to_the_one_before(tmp_path: Path) -> None:
    output_folder.claim(tmp_path, "run")
    path = tmp_path / "state.ckpt"
    checkpoint.save(path, state(2))
    assert checkpoint.load(path)["step"] == 2
    checkpoint.save(path, state(4))
    whole = path.read_bytes()
    assert checkpoint.load(path)["step"] == 4
    rng = np.random.default_rng(0)
    fallbacks = 0
    for place in rng.integers(0, len(whole), 60):
        flip_bit(path, int(place))
        again = checkpoint.load(path)
        fallbacks += again["step"] == 2
        if again["step"] == 4:  # a bit without meaning: padding, a time
            assert torch.equal(again["params"]["w"], torch.full((5,), 4.0))
        path.write_bytes(whole)
    assert fallbacks
    for content in (b"", b"x", whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert checkpoint.load(path)["step"] == 2
    path.unlink()
    assert checkpoint.exists(path)
    assert checkpoint.load(path)["step"] == 2


def test_a_state_whose_tensor_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.ckpt"
    checkpoint.save(path, state(2))
    content = torch.load(path, weights_only=True)
    content["params"]["w"][0] = 9
    torch.save(content, path)
    with pytest.raises(UserError, match=r"not what was written.*--overwrite"):
        checkpoint.load(path)


def test_a_chunk_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "in" / "a.safetensors"
    cache.write_chunk(path, {"a": torch.zeros(2)})
    before = path.read_bytes()
    for error, exception in (
        (OSError(errno.EIO, "Input/output error"), cache.CacheFull),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fail)
            with pytest.raises(exception):
                cache.write_chunk(path, {"a": torch.ones(2)})
        assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]
        assert path.read_bytes() == before
    cache.remove_chunk(path)
    assert not path.exists()
    cache.remove_chunk(path)  # a second time
    cache.remove_chunk(tmp_path)  # never a folder
    assert tmp_path.is_dir()
    assert cache.read_chunk(path) is None


def test_a_chunk_that_cannot_be_begun_names_the_reason(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):  # a mistake of the caller is not reported as the disk's
        cache.write_chunk(tmp_path / "a.safetensors", {"a": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EACCES, "this user may not"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "input/output error"),
    ],
)
def test_each_write_error_of_the_cache_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(cache.CacheFull, match=rf"{text}.*CONCEPT_ERASER_CACHE"):
        cache.append_row(tmp_path / "rows.jsonl", {})


def test_a_new_file_of_the_cache_gets_its_folders_and_the_users_permissions(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "in" / "rows.jsonl"
    before = os.umask(0)
    try:
        cache.append_row(path, {"a": 1})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666
    assert cache.read_rows(path) == [{"a": 1}]


def test_a_row_follows_the_last_line_whether_that_was_cut_or_not(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for start, lines in (
        (b"", 1),
        (b"{}\n", 2),
        (b"{}\nx", 3),
        (b"\n", 2),
        (b"x", 2),
        (b"x\ny\n", 3),
    ):
        path.write_bytes(start)
        cache.append_row(path, {"b": 1, "a": 2})
        assert path.read_bytes().startswith(start)
        assert path.read_bytes().count(b"\n") == lines, start
        assert cache.read_rows(path) == [{"a": 2, "b": 1}]


def test_a_row_is_the_same_in_any_order_of_keys(tmp_path: Path) -> None:
    """The file stays valid after a tool has rewritten it with sorted keys."""
    path = tmp_path / "rows.jsonl"
    cache.append_row(path, {"b": 1, "a": 2})
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True) + "\n")
    assert cache.read_rows(path) == [{"a": 2, "b": 1}]


def test_rows_that_cannot_be_read_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.read_rows(tmp_path / "missing") == []
    path = tmp_path / "rows.jsonl"
    cache.append_row(path, {"a": 1})
    monkeypatch.setattr(cache, "LOG_BYTES", 5)  # larger than is read
    assert cache.read_rows(path) == []


def test_records_follow_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "records"
    cache.append_records(path, b"aaaabbbb", 4)
    cache.append_records(path, b"cccc", 4)
    assert path.read_bytes() == b"aaaabbbbcccc"
    for count in (1, 2, 3):
        path.write_bytes(b"aaaabbbb"[: 4 + count])
        cache.append_records(path, b"cccc", 4)
        assert path.read_bytes() == b"aaaacccc"


def test_bytes_are_taken_one_for_one_unless_a_size_is_given(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for text in (b"abc", b"abcd"):
        path.write_bytes(text)
        cache.append_row(path, {})
        assert path.read_bytes().startswith(text + b"\n")
