"""Output folders: what claiming, setting aside, accepting and removing promise, and what they leave
alone.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from concept_eraser.storage import locks, manifest, output_folder, writers
from concept_eraser.storage.manifest import MARK
from concept_eraser.utils.errors import UserError
from tests.storage.test_writers import tree


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def everything(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*")}


def test_a_folder_is_empty_with_our_lock_and_not_with_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert output_folder.is_empty(tmp_path / "missing") is True
    assert output_folder.is_empty(tmp_path) is True
    (tmp_path / locks.LOCK).write_text("")
    assert output_folder.is_empty(tmp_path) is True
    (tmp_path / "mine").mkdir()
    assert output_folder.is_empty(tmp_path) is False
    (tmp_path / "mine").rmdir()
    output_folder.claim(tmp_path, "run")
    assert output_folder.is_empty(tmp_path) is False
    monkeypatch.setattr(Path, "iterdir", failing(errno.EACCES))
    with pytest.raises(UserError, match="cannot read"):
        output_folder.is_empty(tmp_path)


def test_whether_a_folder_can_be_claimed_is_said_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for place in ("file", "broken"):
        for alone in (False, True):
            with pytest.raises(UserError, match="is a file"):
                output_folder.require_claimable(tmp_path / place, "run", alone=alone)
    for alone in (False, True):
        assert output_folder.require_claimable(tmp_path / "new", "run", alone=alone) is False
    assert everything(tmp_path) == {"file", "broken"}
    # beside a user's own files
    assert output_folder.require_claimable(tmp_path, "evaluation") is False
    output_folder.claim(tmp_path / "run", "run")
    for alone in (False, True):
        assert output_folder.require_claimable(tmp_path / "run", "run", alone=alone) is True
    assert output_folder.require_claimable(tmp_path / "run", "evaluation") is True
    assert (
        output_folder.require_claimable(
            tmp_path / "run" / "attacks", "attack", inside=tmp_path / "run"
        )
        is False
    )


def test_claiming_makes_the_folder_and_a_second_time_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "in" / "run"
    output_folder.claim(folder, "run", alone=True)
    writers.write_text(folder / "a", "1")
    before = tree(folder)
    output_folder.claim(folder, "run", alone=True)
    output_folder.claim(folder, "evaluation")
    assert tree(folder) == before
    assert manifest.read(folder).kind == "run"


@pytest.mark.parametrize("call", [output_folder.claim, output_folder.make])
def test_a_folder_that_cannot_be_made_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable
) -> None:
    mkdir, fail = Path.mkdir, failing(errno.EROFS)
    monkeypatch.setattr(
        Path, "mkdir", lambda p, *a, **k: fail() if p.name == "run" else mkdir(p, *a, **k)
    )
    with pytest.raises(UserError, match=r"read-only file system.*give another"):
        call(tmp_path / "run", "run")


def test_a_new_folder_in_the_place_of_one_that_is_gone_lists_its_files(tmp_path: Path) -> None:
    """This process remembers which files it has listed; a new mark lists none of them."""
    import shutil

    for claim in (output_folder.claim, output_folder.make):
        for _ in range(2):
            assert claim(tmp_path / "run", "run") in (None, True)
            writers.append_line(tmp_path / "run" / "log.jsonl", {"step": 1})
            assert set(manifest.read(tmp_path / "run").files) == {"log.jsonl"}
            shutil.rmtree(tmp_path / "run")


def test_of_two_who_make_a_folder_one_gets_it(tmp_path: Path) -> None:
    assert output_folder.make(tmp_path / "deep" / "run", "attack") is True
    assert manifest.read(tmp_path / "deep" / "run") == manifest.Manifest("attack")
    assert output_folder.make(tmp_path / "deep" / "run", "attack") is False
    (tmp_path / "file").write_text("")
    assert output_folder.make(tmp_path / "file", "attack") is False


def test_results_hold_the_lock_and_say_what_is_in_the_way(tmp_path: Path, ours: Path) -> None:
    with output_folder.results(tmp_path / "new", "evaluation", ["report.json"]):
        assert locks.holder_of(tmp_path / "new")["purpose"] == "write the evaluation"
    assert not (tmp_path / "new").exists()  # nothing was written
    writers.write_text(ours / "report.json", "{}")
    with output_folder.results(ours, "evaluation", ["report.json"], inside=ours):
        writers.write_text(ours / "report.json", "[]")
    (ours / "plot.png").write_text("mine")
    with (
        pytest.raises(UserError, match=r"plot\.png exists"),
        output_folder.results(ours, "evaluation", ["report.json", "plot.png"]),
    ):
        pytest.fail("no work is begun")
    assert locks.holder_of(ours) is None
    (ours / "out").symlink_to(tmp_path)
    with (
        pytest.raises(UserError, match="leads out of"),
        output_folder.results(ours / "out", "attack", inside=ours),
    ):
        pytest.fail("no work is begun")


def test_accepting_takes_what_is_there(ours: Path) -> None:
    for name in ("a", "b", "c", "d", "e/f", "g", "h"):
        writers.write_text(ours / name, "1")
    writers.write_growing(ours / "log", "1")
    outside = ours.parent / "outside"
    outside.write_text("mine")
    (ours / "a").write_text("2")
    (ours / "c").unlink()
    (ours / "d").unlink()
    (ours / "d").mkdir()  # a user's folder
    (ours / "e" / "f").write_text("3")
    (ours / "g").unlink()
    (ours / "g").symlink_to(outside)
    assert sorted(output_folder.accept(ours)) == ["a", "c", "d", "e/f"]
    states = {one.name: one.state for one in manifest.verify(ours)}
    assert states == {
        "a": "intact",
        "b": "intact",
        "e/f": "intact",
        "g": "link",
        "h": "intact",
        "log": "growing",
    }
    assert output_folder.accept(ours) == []


def test_sealing_ends_the_growth(ours: Path) -> None:
    writers.append_line(ours / "log", {})
    output_folder.seal(ours)
    assert manifest.read(ours).files["log"].sha256 is not None
    writers.append_line(ours / "log", {})
    assert manifest.read(ours).files["log"].sha256 is None


def test_discarding_takes_all_that_is_ours(ours: Path) -> None:
    for name in ("a", "deep/in/b", "gone"):
        writers.write_text(ours / name, "1")
    (output_folder.own_folder(ours, "tracking") / "events").write_text("x")
    (ours / "gone").unlink()
    output_folder.discard(ours)
    assert not ours.exists()
    output_folder.discard(ours)  # as often as one likes


def test_discarding_leaves_a_users_own(ours: Path) -> None:
    outside = ours.parent / "outside"
    outside.mkdir()
    (outside / "w").write_text("mine")
    for name in ("a", "deep/b", "model/w", "log"):
        writers.write_text(ours / name, "1")
    (ours / "deep" / "mine").write_text("mine")
    (ours / "model" / "w").unlink()
    (ours / "model").rmdir()
    (ours / "model").symlink_to(outside)
    (ours / "log").unlink()
    (ours / "log").mkdir()
    (ours / "log" / "mine").write_text("mine")
    output_folder.discard(ours)
    assert everything(ours) == {"deep", "deep/mine", "model", "log", "log/mine"}
    assert (outside / "w").read_text() == "mine"
    (ours.parent / "unmarked").mkdir()
    (ours.parent / "unmarked" / "mine").write_text("mine")
    output_folder.discard(ours.parent / "unmarked")
    assert (ours.parent / "unmarked" / "mine").exists()


def test_a_folder_for_another_library_is_listed_where_we_made_it(
    tmp_path: Path, ours: Path
) -> None:
    place = output_folder.own_folder(ours, "tracking/deep")
    assert place == ours / "tracking" / "deep"
    assert place.is_dir()
    (place / "events").write_text("x")
    assert output_folder.own_folder(ours, "tracking/deep") == place
    assert manifest.read(ours).folders == ["tracking/deep"]
    assert manifest.unlisted_files(ours) == []
    (ours / "mine").mkdir()
    output_folder.own_folder(ours, "mine")
    assert manifest.read(ours).folders == ["tracking/deep"]
    assert output_folder.own_folder(tmp_path / "unmarked", "tracking").is_dir()
    (ours / "file").write_text("mine")
    (ours / "link").symlink_to(tmp_path)
    (ours / "broken").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "broken"):
        with pytest.raises(UserError, match="is no folder"):
            output_folder.own_folder(ours, name)


def test_set_aside_moves_a_whole_tree_and_leaves_no_empty_folder(ours: Path) -> None:
    for name in ("a", "deep/in/b", "deep/c", "gone", "keep/d", "z"):
        writers.write_text(ours / name, "1")
    (ours / "gone").unlink()
    inner = ours / "attacks" / "x"
    output_folder.claim(inner, "attack")
    writers.write_text(inner / "images" / "0.png", "1")
    output_folder.claim(ours / "attacks" / "empty", "attack")
    events = output_folder.own_folder(ours, "tracking") / "deep"
    events.mkdir()
    (events / "events").write_text("x")
    (events / "to").symlink_to(ours.parent)
    writers.write_text(ours / "tracking" / "listed", "1")  # listed, and below a listed folder
    aside = output_folder.set_aside(ours, keep=["keep/d"])
    assert aside == ours / ".replaced-1"
    assert everything(ours) - {f".replaced-1/{name}" for name in everything(aside)} == {
        MARK,
        ".replaced-1",
        "keep",
        "keep/d",
    }
    files = {
        "a",
        "z",
        "deep/in/b",
        "deep/c",
        "attacks/x/images/0.png",
        "tracking/deep/events",
        "tracking/listed",
        MARK,
        f"attacks/x/{MARK}",
    }
    assert set(tree(aside)) == files
    assert output_folder.remove_set_aside(ours) == []
    assert everything(ours) == {MARK, "keep", "keep/d"}
    assert manifest.read(ours).kind == "run"
    assert [one.state for one in manifest.verify(ours)] == ["intact"]


def test_only_an_inner_result_is_set_aside_too(ours: Path) -> None:
    output_folder.claim(ours / "attacks" / "x", "attack")
    writers.write_text(ours / "attacks" / "x" / "a", "1")
    aside = output_folder.set_aside(ours)
    assert aside is not None
    assert (aside / "attacks" / "x" / "a").read_text() == "1"


def test_nothing_to_set_aside_makes_nothing(ours: Path) -> None:
    writers.write_text(ours / "keep", "1")
    assert output_folder.set_aside(ours, keep=["keep"]) is None
    assert everything(ours) == {MARK, "keep"}
    assert output_folder.remove_set_aside(ours) == []
    assert output_folder.places_set_aside(ours) == []


def test_a_log_that_was_set_aside_is_listed_again_when_it_is_begun_anew(ours: Path) -> None:
    writers.append_line(ours / "log", {})
    output_folder.set_aside(ours)
    writers.append_line(ours / "log", {})
    assert set(manifest.read(ours).files) == {"log"}


def test_what_cannot_be_set_aside_is_said_with_where_the_rest_lies(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers.write_text(ours / "a", "1")
    monkeypatch.setattr(os, "rename", failing(errno.EACCES))
    with pytest.raises(UserError, match=r"cannot set aside.*What was moved lies in .*replaced-1"):
        output_folder.set_aside(ours)
    assert (ours / "a").read_text() == "1"


def test_places_aside_have_the_first_free_number_and_are_folders(ours: Path) -> None:
    (ours / ".replaced-1").write_text("mine")
    (ours / ".replaced-2").symlink_to(ours.parent)
    for text in ("1", "2"):
        writers.write_text(ours / "a", text)
        output_folder.set_aside(ours)
    assert output_folder.places_set_aside(ours) == [ours / ".replaced-3", ours / ".replaced-4"]
    assert output_folder.remove_set_aside(ours) == []
    assert everything(ours) == {MARK, ".replaced-1", ".replaced-2"}


def test_what_a_user_put_among_what_was_set_aside_stays(ours: Path) -> None:
    writers.write_text(ours / "deep" / "a", "1")
    writers.write_text(ours / "b", "1")
    writers.write_growing(ours / "log", "1")
    writers.write_text(ours / "gone", "1")
    output_folder.claim(ours / "attacks" / "x", "attack")
    writers.write_text(ours / "attacks" / "x" / "c", "1")
    aside = output_folder.set_aside(ours)
    (aside / "deep" / "mine").write_text("mine")
    (aside / "attacks" / "x" / "c").write_text("changed")
    (aside / "b").unlink()
    (aside / "b").symlink_to(ours.parent)  # a link is no file that we wrote
    (aside / "gone").unlink()
    (ours.parent / "precious").write_text("mine")
    left = output_folder.remove_set_aside(ours)
    assert sorted(left) == [aside / "attacks" / "x" / "c", aside / "deep" / "mine"]
    assert everything(aside) == {
        MARK,
        "b",
        "deep",
        "deep/mine",
        "attacks",
        "attacks/x",
        "attacks/x/c",
        f"attacks/x/{MARK}",
    }
    assert (ours.parent / "precious").exists()


def test_a_folder_set_aside_without_a_mark_is_not_removed(ours: Path) -> None:
    (ours / ".replaced-1").mkdir()
    (ours / ".replaced-1" / "mine").write_text("mine")
    (ours / ".replaced-2").mkdir()  # a kill has left it before anything was moved
    assert output_folder.remove_set_aside(ours) == [ours / ".replaced-1" / "mine"]
    assert not (ours / ".replaced-2").exists()


def test_a_large_file_that_was_set_aside_is_removed_by_size_and_time(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading gigabytes to remove them would be for nothing."""
    writers.write_text(ours / "w", "x" * 100)
    output_folder.set_aside(ours)
    monkeypatch.setattr(manifest, "SMALL", 10)
    monkeypatch.setattr(manifest, "file_digest", lambda path: pytest.fail("it is not read"))
    assert output_folder.remove_set_aside(ours) == []
    assert everything(ours) == {MARK}


def test_a_listed_folder_that_became_a_link_is_not_emptied(ours: Path) -> None:
    outside = ours.parent / "outside"
    outside.mkdir()
    (outside / "w").write_text("mine")
    writers.write_text(ours / "a", "1")
    content = json.loads((ours / MARK).read_text())
    (ours / MARK).write_text(json.dumps(content | {"folders": ["tracking"]}))
    (ours / "tracking").symlink_to(outside)
    output_folder.set_aside(ours)
    output_folder.remove_set_aside(ours)
    assert (outside / "w").read_text() == "mine"
