"""Output folders: what it means to claim, set aside, accept and remove them, and which files stay
untouched.
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


def test_a_mark_that_another_process_is_writing_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{MARK}.4711.partial").write_text("{")
    assert output_folder.is_empty(tmp_path) is True
    (tmp_path / "mine.partial").write_text("")
    assert output_folder.is_empty(tmp_path) is False
    (tmp_path / "mine.partial").unlink()
    look = output_folder.is_empty

    def after_the_other(folder: Path) -> bool:
        """The other process writes its mark and a file between the two checks of the folder."""
        manifest.write(folder, manifest.Manifest("table"))
        (folder / "row").mkdir()
        return look(folder)

    monkeypatch.setattr(output_folder, "is_empty", after_the_other)
    output_folder.claim(tmp_path, "table", alone=True)
    assert manifest.read(tmp_path).kind == "table"
    monkeypatch.setattr(output_folder, "is_empty", look)
    (tmp_path / MARK).unlink()
    with pytest.raises(UserError, match="concept_eraser did not make it"):
        output_folder.claim(tmp_path, "table", alone=True)


def test_the_check_of_a_claim_changes_nothing(tmp_path: Path) -> None:
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
def test_a_folder_that_cannot_be_created_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable
) -> None:
    mkdir, fail = Path.mkdir, failing(errno.EROFS)
    monkeypatch.setattr(
        Path, "mkdir", lambda p, *a, **k: fail() if p.name == "run" else mkdir(p, *a, **k)
    )
    with pytest.raises(UserError, match=r"read-only file system.*give another"):
        call(tmp_path / "run", "run")


def test_a_new_folder_in_the_place_of_a_removed_one_lists_its_files(tmp_path: Path) -> None:
    """This process remembers which files it has listed; a new mark lists none of them."""
    import shutil

    for claim in (output_folder.claim, output_folder.make):
        for _ in range(2):
            assert claim(tmp_path / "run", "run") in (None, True)
            writers.append_line(tmp_path / "run" / "log.jsonl", {"step": 1})
            assert set(manifest.read(tmp_path / "run").files) == {"log.jsonl"}
            shutil.rmtree(tmp_path / "run")


def test_of_two_claims_of_a_folder_one_succeeds(tmp_path: Path) -> None:
    assert output_folder.make(tmp_path / "deep" / "run", "attack") is True
    assert manifest.read(tmp_path / "deep" / "run") == manifest.Manifest("attack")
    assert output_folder.make(tmp_path / "deep" / "run", "attack") is False
    (tmp_path / "file").write_text("")
    assert output_folder.make(tmp_path / "file", "attack") is False


def test_results_hold_the_lock_and_name_existing_files(tmp_path: Path, run_folder: Path) -> None:
    with output_folder.results(tmp_path / "new", "evaluation", ["report.json"]):
        assert locks.holder_of(tmp_path / "new")["purpose"] == "write the evaluation"
    assert not (tmp_path / "new").exists()  # nothing was written
    writers.write_text(run_folder / "report.json", "{}")
    with output_folder.results(run_folder, "evaluation", ["report.json"], inside=run_folder):
        writers.write_text(run_folder / "report.json", "[]")
    (run_folder / "plot.png").write_text("mine")
    with (
        pytest.raises(UserError, match=r"plot\.png exists"),
        output_folder.results(run_folder, "evaluation", ["report.json", "plot.png"]),
    ):
        pytest.fail("no work is begun")
    assert locks.holder_of(run_folder) is None
    (run_folder / "out").symlink_to(tmp_path)
    with (
        pytest.raises(UserError, match="leads out of"),
        output_folder.results(run_folder / "out", "attack", inside=run_folder),
    ):
        pytest.fail("no work is begun")


def test_accepting_takes_what_is_there(run_folder: Path) -> None:
    for name in ("a", "b", "c", "d", "e/f", "g", "h"):
        writers.write_text(run_folder / name, "1")
    writers.write_growing(run_folder / "log", "1")
    outside = run_folder.parent / "outside"
    outside.write_text("mine")
    (run_folder / "a").write_text("2")
    (run_folder / "c").unlink()
    (run_folder / "d").unlink()
    (run_folder / "d").mkdir()  # a user's folder
    (run_folder / "e" / "f").write_text("3")
    (run_folder / "g").unlink()
    (run_folder / "g").symlink_to(outside)
    assert sorted(output_folder.accept(run_folder)) == ["a", "c", "d", "e/f"]
    states = {one.name: one.state for one in manifest.verify(run_folder)}
    assert states == {
        "a": "intact",
        "b": "intact",
        "e/f": "intact",
        "g": "link",
        "h": "intact",
        "log": "growing",
    }
    assert output_folder.accept(run_folder) == []


def test_sealing_ends_the_growth(run_folder: Path) -> None:
    writers.append_line(run_folder / "log", {})
    output_folder.seal(run_folder)
    assert manifest.read(run_folder).files["log"].sha256 is not None
    writers.append_line(run_folder / "log", {})
    assert manifest.read(run_folder).files["log"].sha256 is None


def test_discarding_removes_all_listed_files(run_folder: Path) -> None:
    for name in ("a", "deep/in/b", "gone"):
        writers.write_text(run_folder / name, "1")
    (output_folder.own_folder(run_folder, "tracking") / "events").write_text("x")
    (run_folder / "gone").unlink()
    output_folder.discard(run_folder)
    assert not run_folder.exists()
    output_folder.discard(run_folder)  # a second time


def test_discarding_leaves_a_users_own(run_folder: Path) -> None:
    outside = run_folder.parent / "outside"
    outside.mkdir()
    (outside / "w").write_text("mine")
    for name in ("a", "deep/b", "model/w", "log"):
        writers.write_text(run_folder / name, "1")
    (run_folder / "deep" / "mine").write_text("mine")
    (run_folder / "model" / "w").unlink()
    (run_folder / "model").rmdir()
    (run_folder / "model").symlink_to(outside)
    (run_folder / "log").unlink()
    (run_folder / "log").mkdir()
    (run_folder / "log" / "mine").write_text("mine")
    output_folder.discard(run_folder)
    assert everything(run_folder) == {"deep", "deep/mine", "model", "log", "log/mine"}
    assert (outside / "w").read_text() == "mine"
    (run_folder.parent / "unmarked").mkdir()
    (run_folder.parent / "unmarked" / "mine").write_text("mine")
    output_folder.discard(run_folder.parent / "unmarked")
    assert (run_folder.parent / "unmarked" / "mine").exists()


def test_a_folder_for_another_library_is_listed_if_we_created_it(
    tmp_path: Path, run_folder: Path
) -> None:
    place = output_folder.own_folder(run_folder, "tracking/deep")
    assert place == run_folder / "tracking" / "deep"
    assert place.is_dir()
    (place / "events").write_text("x")
    assert output_folder.own_folder(run_folder, "tracking/deep") == place
    assert manifest.read(run_folder).folders == ["tracking/deep"]
    assert manifest.unlisted_files(run_folder) == []
    (run_folder / "mine").mkdir()
    output_folder.own_folder(run_folder, "mine")
    assert manifest.read(run_folder).folders == ["tracking/deep"]
    assert output_folder.own_folder(tmp_path / "unmarked", "tracking").is_dir()
    (run_folder / "file").write_text("mine")
    (run_folder / "link").symlink_to(tmp_path)
    (run_folder / "broken").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "broken"):
        with pytest.raises(UserError, match="is no folder"):
            output_folder.own_folder(run_folder, name)


def test_set_aside_moves_a_whole_tree_and_leaves_no_empty_folder(run_folder: Path) -> None:
    for name in ("a", "deep/in/b", "deep/c", "gone", "keep/d", "z"):
        writers.write_text(run_folder / name, "1")
    (run_folder / "gone").unlink()
    inner = run_folder / "attacks" / "x"
    output_folder.claim(inner, "attack")
    writers.write_text(inner / "images" / "0.png", "1")
    output_folder.claim(run_folder / "attacks" / "empty", "attack")
    events = output_folder.own_folder(run_folder, "tracking") / "deep"
    events.mkdir()
    (events / "events").write_text("x")
    (events / "to").symlink_to(run_folder.parent)
    writers.write_text(run_folder / "tracking" / "listed", "1")  # listed, and below a listed folder
    aside = output_folder.set_aside(run_folder, keep=["keep/d"])
    assert aside == run_folder / ".replaced-1"
    assert everything(run_folder) - {f".replaced-1/{name}" for name in everything(aside)} == {
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
    assert output_folder.remove_set_aside(run_folder) == []
    assert everything(run_folder) == {MARK, "keep", "keep/d"}
    assert manifest.read(run_folder).kind == "run"
    assert [one.state for one in manifest.verify(run_folder)] == ["intact"]


def test_only_an_inner_result_is_set_aside_too(run_folder: Path) -> None:
    output_folder.claim(run_folder / "attacks" / "x", "attack")
    writers.write_text(run_folder / "attacks" / "x" / "a", "1")
    aside = output_folder.set_aside(run_folder)
    assert aside is not None
    assert (aside / "attacks" / "x" / "a").read_text() == "1"


def test_nothing_to_set_aside_creates_nothing(run_folder: Path) -> None:
    writers.write_text(run_folder / "keep", "1")
    assert output_folder.set_aside(run_folder, keep=["keep"]) is None
    assert everything(run_folder) == {MARK, "keep"}
    assert output_folder.remove_set_aside(run_folder) == []
    assert output_folder.places_set_aside(run_folder) == []


def test_a_new_log_after_set_aside_is_listed_again(run_folder: Path) -> None:
    writers.append_line(run_folder / "log", {})
    output_folder.set_aside(run_folder)
    writers.append_line(run_folder / "log", {})
    assert set(manifest.read(run_folder).files) == {"log"}


def test_a_failed_move_is_an_error_with_the_place_of_the_moved_files(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers.write_text(run_folder / "a", "1")
    monkeypatch.setattr(os, "rename", failing(errno.EACCES))
    with pytest.raises(UserError, match=r"cannot set aside.*The moved files are in .*replaced-1"):
        output_folder.set_aside(run_folder)
    assert (run_folder / "a").read_text() == "1"


def test_places_aside_have_the_first_free_number_and_are_folders(run_folder: Path) -> None:
    (run_folder / ".replaced-1").write_text("mine")
    (run_folder / ".replaced-2").symlink_to(run_folder.parent)
    for text in ("1", "2"):
        writers.write_text(run_folder / "a", text)
        output_folder.set_aside(run_folder)
    assert output_folder.places_set_aside(run_folder) == [
        run_folder / ".replaced-3",
        run_folder / ".replaced-4",
    ]
    assert output_folder.remove_set_aside(run_folder) == []
    assert everything(run_folder) == {MARK, ".replaced-1", ".replaced-2"}


def test_a_users_files_among_those_set_aside_stay(run_folder: Path) -> None:
    writers.write_text(run_folder / "deep" / "a", "1")
    writers.write_text(run_folder / "b", "1")
    writers.write_growing(run_folder / "log", "1")
    writers.write_text(run_folder / "gone", "1")
    output_folder.claim(run_folder / "attacks" / "x", "attack")
    writers.write_text(run_folder / "attacks" / "x" / "c", "1")
    aside = output_folder.set_aside(run_folder)
    (aside / "deep" / "mine").write_text("mine")
    (aside / "attacks" / "x" / "c").write_text("changed")
    (aside / "b").unlink()
    (aside / "b").symlink_to(run_folder.parent)  # a link is no file that we wrote
    (aside / "gone").unlink()
    (run_folder.parent / "precious").write_text("mine")
    paths = output_folder.remove_set_aside(run_folder)
    assert sorted(paths) == [aside / "attacks" / "x" / "c", aside / "deep" / "mine"]
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
    assert (run_folder.parent / "precious").exists()


def test_a_folder_set_aside_without_a_mark_is_not_removed(run_folder: Path) -> None:
    (run_folder / ".replaced-1").mkdir()
    (run_folder / ".replaced-1" / "mine").write_text("mine")
    (run_folder / ".replaced-2").mkdir()  # a kill has left it before anything was moved
    assert output_folder.remove_set_aside(run_folder) == [run_folder / ".replaced-1" / "mine"]
    assert not (run_folder / ".replaced-2").exists()


def test_a_large_file_that_was_set_aside_is_removed_by_size_and_time(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file is not read before it is removed."""
    writers.write_text(run_folder / "w", "x" * 100)
    output_folder.set_aside(run_folder)
    monkeypatch.setattr(manifest, "SMALL", 10)
    monkeypatch.setattr(manifest, "file_digest", lambda path: pytest.fail("it is not read"))
    assert output_folder.remove_set_aside(run_folder) == []
    assert everything(run_folder) == {MARK}


def test_a_listed_folder_that_became_a_link_is_not_emptied(run_folder: Path) -> None:
    outside = run_folder.parent / "outside"
    outside.mkdir()
    (outside / "w").write_text("mine")
    writers.write_text(run_folder / "a", "1")
    content = json.loads((run_folder / MARK).read_text())
    (run_folder / MARK).write_text(json.dumps(content | {"folders": ["tracking"]}))
    (run_folder / "tracking").symlink_to(outside)
    output_folder.set_aside(run_folder)
    output_folder.remove_set_aside(run_folder)
    assert (outside / "w").read_text() == "mine"
