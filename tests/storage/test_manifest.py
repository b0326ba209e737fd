"""Marks, manifests and files set aside: only a mark makes a folder one of concept_eraser, and only
listed files are changed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from concept_eraser.storage import manifest, output_folder, writers
from concept_eraser.storage.manifest import MARK
from concept_eraser.utils.errors import UserError
from tests.storage.test_locks import open_files
from tests.storage.test_writers import tree


def test_a_folder_with_a_users_files_is_never_claimed_alone(tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "keep.txt").write_text("mine")
    with pytest.raises(UserError, match="concept_eraser did not make it"):
        output_folder.claim(tmp_path, "run", alone=True)
    assert tree(tmp_path) == {"pipeline/keep.txt": b"mine"}
    output_folder.claim(tmp_path, "evaluation")  # beside them is allowed
    with pytest.raises(UserError, match="evaluation, not run"):
        output_folder.claim(tmp_path, "run", alone=True)


@pytest.mark.parametrize(
    "name",
    [
        "../up",
        "/etc/passwd",
        "a/../../b",
        "",
        ".",
        "a//b",
        "./a",
        "a\\..\\b",
        7,
        "a\0b",
        "x" * 256,
        "x/" * 600 + "x",
        "\ud800",
    ],
)
def test_a_strangers_manifest_names_nothing_outside(run_folder: Path, name: object) -> None:
    content = json.loads((run_folder / MARK).read_text())
    for bad_content in (
        {**content, "files": {str(name): {"size": 0, "mtime_ns": 0, "sha256": None}}},
        {**content, "folders": [name]},
    ):
        if bad_content["folders"] == [] and name == 7:
            continue
        (run_folder / MARK).write_text(json.dumps(bad_content))
        with pytest.raises(UserError, match="damaged"):
            manifest.read(run_folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "\xff\xfe",
        '{"made_by": "x", "format": 1, "kind": "run", "files": {}}',
        '{"made_by": "concept_eraser", "format": 2, "kind": "run", "files": {}}',
        (
            '{"made_by": "concept_eraser", "format": 1, "kind": "run", "files": {"a": '
            '{"size": "1", "mtime_ns": 0, "sha256": null}}}'
        ),
        '{"made_by": "concept_eraser", "format": 1, "kind": "run", "files": {"a": 1}}',
        "[" * 5000,
    ],
)
def test_a_damaged_mark_stops_everything(run_folder: Path, text: str) -> None:
    (run_folder / MARK).write_text(text, encoding="latin-1")
    for call in (
        lambda: manifest.read(run_folder),
        lambda: output_folder.set_aside(run_folder),
        lambda: writers.write_text(run_folder / "a", "x"),
    ):
        with pytest.raises(UserError):
            call()


def test_a_mark_that_is_a_link_is_not_followed(tmp_path: Path, run_folder: Path) -> None:
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / MARK).symlink_to(run_folder / MARK)
    with pytest.raises(UserError, match="is a link"):
        manifest.read(tmp_path / "stranger")


def test_set_aside_moves_listed_files_and_leaves_the_others(run_folder: Path) -> None:
    writers.write_text(run_folder / "done.json", "{}")
    writers.write_folder(run_folder / "pipeline", lambda p: (p / "w").write_text("1") and None)
    output_folder.claim(run_folder / "attacks" / "p4d", "attack")
    writers.write_text(run_folder / "attacks" / "p4d" / "attack.json", "{}")
    (run_folder / "notes.txt").write_text("mine")
    (run_folder / "pipeline" / "mine").write_text("mine")
    (run_folder / "attacks" / "mine").write_text("mine")
    aside = output_folder.set_aside(run_folder)
    assert aside == run_folder / ".replaced-1"
    names = {name for name in tree(run_folder) if not name.startswith(".replaced")}
    assert names == {MARK, "notes.txt", "pipeline/mine", "attacks/mine"}
    assert {
        "done.json",
        "pipeline/w",
        "attacks/p4d/attack.json",
        MARK,
        f"attacks/p4d/{MARK}",
    } == set(tree(aside))
    assert all(one.state == "intact" for one in manifest.verify(aside))  # still a whole result
    assert output_folder.remove_set_aside(run_folder) == []
    assert set(tree(run_folder)) == names
    assert not aside.exists()


def test_a_file_that_the_user_changed_survives_an_overwrite(run_folder: Path) -> None:
    writers.write_text(run_folder / "README.md", "card")
    writers.write_text(run_folder / "done.json", "{}")
    (run_folder / "README.md").write_text("card, with my notes")
    aside = output_folder.set_aside(run_folder)
    assert aside is not None
    assert output_folder.remove_set_aside(run_folder) == [aside / "README.md"]
    assert (aside / "README.md").read_text() == "card, with my notes"
    assert not (aside / "done.json").exists()


def test_what_is_set_aside_twice_has_two_places(run_folder: Path) -> None:
    for text in ("1", "2"):
        writers.write_text(run_folder / "a", text)
        output_folder.set_aside(run_folder)
    assert [(run_folder / f".replaced-{n}" / "a").read_text() for n in (1, 2)] == ["1", "2"]
    assert output_folder.set_aside(run_folder) is None  # nothing to move


def test_files_to_keep_stay_and_stay_listed(run_folder: Path) -> None:
    writers.write_text(run_folder / "forget.yaml", "x")
    writers.write_text(run_folder / "done.json", "{}")
    output_folder.set_aside(run_folder, keep={"forget.yaml"})
    assert (run_folder / "forget.yaml").read_text() == "x"
    assert list(manifest.read(run_folder).files) == ["forget.yaml"]


def test_a_folder_of_another_library_is_moved_only_if_we_created_it(run_folder: Path) -> None:
    (run_folder / "mine").mkdir()
    (run_folder / "mine" / "file").write_text("mine")
    output_folder.own_folder(run_folder, "mine")
    (output_folder.own_folder(run_folder, "tracking") / "events").write_text("x")
    output_folder.set_aside(run_folder)
    assert (run_folder / "mine" / "file").exists()
    assert not (run_folder / "tracking").exists()
    assert output_folder.remove_set_aside(run_folder) == []


def test_links_are_neither_followed_nor_removed_with_what_they_lead_to(
    tmp_path: Path, run_folder: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "w").write_text("mine")
    writers.write_folder(run_folder / "pipeline", lambda p: (p / "w").write_text("1") and None)
    shutil.rmtree(run_folder / "pipeline")
    (run_folder / "pipeline").symlink_to(outside)  # now the listed name leads out
    output_folder.set_aside(run_folder)
    output_folder.remove_set_aside(run_folder)
    assert (outside / "w").read_text() == "mine"
    with pytest.raises(UserError, match="leads out of"):
        output_folder.require_claimable(run_folder / "pipeline", "attack", inside=run_folder)


def test_reading_a_damaged_file_is_refused(run_folder: Path) -> None:
    writers.write_folder(
        run_folder / "pipeline",
        lambda p: (p / "w.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}" + bytes(100)) and None,
    )
    manifest.require_intact(run_folder / "pipeline")
    path = run_folder / "pipeline" / "w.safetensors"
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # a flipped bit changes no time
    with pytest.raises(UserError, match="is not what concept_eraser wrote"):
        manifest.require_intact(run_folder / "pipeline")
    assert output_folder.accept(run_folder) == ["pipeline/w.safetensors"]
    manifest.require_intact(run_folder / "pipeline")
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        manifest.require_intact(run_folder)
    assert [one.state for one in manifest.verify(run_folder)] == ["missing"]


def test_a_large_file_is_taken_for_intact_by_size_and_time_but_verify_reads_it(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "SMALL", 10)
    writers.write_text(run_folder / "w.txt", "x" * 100)
    path = run_folder / "w.txt"
    status = path.stat()
    path.write_text("y" * 100)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    manifest.require_intact(path)  # costs no reading
    assert manifest.verify(run_folder)[0].state == "changed"
    os.utime(path)
    with pytest.raises(UserError, match="is not what"):
        manifest.require_intact(path)


def test_a_copied_folder_is_intact(tmp_path: Path, run_folder: Path) -> None:
    writers.write_text(run_folder / "a", "1")
    shutil.copytree(run_folder, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy" / "a", (1, 1))
    manifest.require_intact(tmp_path / "copy" / "a")
    assert manifest.verify(tmp_path / "copy")[0].state == "intact"


def test_files_of_the_users_own_are_counted(run_folder: Path) -> None:
    writers.write_text(run_folder / "a", "1")
    output_folder.claim(run_folder / "attacks" / "x", "attack")
    writers.write_text(run_folder / "attacks" / "x" / "attack.json", "{}")
    (run_folder / "attacks" / "x" / "mine").write_text("")
    (run_folder / "notes.txt").write_text("")
    assert manifest.unlisted_files(run_folder) == ["attacks/x/mine", "notes.txt"]


def test_what_has_no_mark_is_not_checked_and_cannot_be_verified(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    manifest.require_intact(tmp_path / "a")
    with pytest.raises(UserError, match="has no manifest"):
        manifest.verify(tmp_path)
    with pytest.raises(UserError, match="has no mark"):
        output_folder.set_aside(tmp_path)


def test_results_inside_a_run_are_verified_with_it(run_folder: Path) -> None:
    output_folder.claim(run_folder / "attacks" / "x", "attack")
    writers.write_text(run_folder / "attacks" / "x" / "attack.json", "{}")
    (run_folder / "attacks" / "x" / "attack.json").write_text("[]")
    assert [(one.name, one.state) for one in manifest.verify(run_folder)] == [
        ("attacks/x/attack.json", "changed")
    ]
    assert output_folder.accept(run_folder) == ["attacks/x/attack.json"]
    assert [one.state for one in manifest.verify(run_folder)] == ["intact"]


def test_a_users_own_link_beside_results_is_followed(tmp_path: Path) -> None:
    """A project folder with an evaluation in it and a link to a model on another disk."""
    (tmp_path / "disk" / "model").mkdir(parents=True)
    project = tmp_path / "project"
    output_folder.claim(project, "evaluation")
    (project / "model").symlink_to(tmp_path / "disk" / "model")
    manifest.require_intact(project / "model")
    output_folder.claim(tmp_path / "run", "run")
    (tmp_path / "run" / "pipeline").symlink_to(tmp_path / "disk" / "model")
    with pytest.raises(UserError, match="leads out of"):
        manifest.require_intact(tmp_path / "run" / "pipeline")


def test_control_characters_of_a_mark_or_lock_reach_no_terminal(run_folder: Path) -> None:
    from concept_eraser.storage import locks

    content = json.loads((run_folder / MARK).read_text())
    (run_folder / MARK).write_text(json.dumps({**content, "kind": "\x1b[2Jrun"}))
    assert manifest.read(run_folder).kind == "[2Jrun"
    (run_folder / locks.LOCK).write_text(
        json.dumps({"pid": 1, "host": "a\x1b[2J", "purpose": "\x07", "started": ""})
    )
    with pytest.raises(UserError) as error, locks.hold_lock(run_folder, "erase"):
        pass
    assert "\x1b" not in str(error.value)
    assert "\x07" not in str(error.value)


def test_a_folder_belongs_to_the_nearest_mark(tmp_path: Path, run_folder: Path) -> None:
    assert manifest.folder_of(tmp_path) is None
    output_folder.claim(run_folder / "attacks" / "x", "attack")
    assert manifest.folder_of(run_folder) == run_folder
    assert manifest.folder_of(run_folder / "attacks") == run_folder
    assert (
        manifest.folder_of(run_folder / "attacks" / "x" / "deep" / "a")
        == run_folder / "attacks" / "x"
    )
    assert manifest.read(tmp_path) is None


def test_names_in_a_mark_are_as_long_as_names_of_files() -> None:
    """A part has at most 255 bytes, and a name at most 1000 characters."""
    long_name = "/".join(["a" * 200, *["a" * 199] * 4])
    assert len(long_name) == 1000
    for name in (long_name, "a" * 255, "b/" + "é" * 127 + "a"):
        assert manifest._name(name) == name
    for name in (long_name + "a", "a" * 256, "b/" + "a" * 256, "b/" + "é" * 128):
        with pytest.raises(ValueError, match="cannot be the name of a file"):
            manifest._name(name)


def test_a_mark_holds_what_was_put_into_it(tmp_path: Path) -> None:
    records = {"b": manifest.FileRecord(1, 2, "x"), "a/c": manifest.FileRecord(0, 0, None)}
    content = manifest.Manifest("run", records, ["z", "tracking"])
    manifest.write(tmp_path, content)
    assert manifest.read(tmp_path) == manifest.Manifest("run", records, ["tracking", "z"])
    mark = json.loads((tmp_path / MARK).read_text())
    assert (mark["made_by"], mark["format"]) == ("concept_eraser", 1)
    assert (tmp_path / MARK).read_text().endswith("}\n")
    mark["kind"] = "k" * 100
    del mark["folders"]  # may be left out
    (tmp_path / MARK).write_text(json.dumps(mark))
    assert manifest.read(tmp_path) == manifest.Manifest("k" * 40, records)


@pytest.mark.parametrize(
    "entry",
    [
        {"size": 1, "mtime_ns": "0", "sha256": None},
        {"size": None, "mtime_ns": 0, "sha256": None},
        {"size": 1, "mtime_ns": 0, "sha256": 5},
        {"size": 1, "mtime_ns": 0},
        {"size": 1, "mtime_ns": 0, "sha256": None, "more": 1},
        None,
        [],
    ],
)
def test_an_entry_of_another_type_is_damage(tmp_path: Path, entry: object) -> None:
    content = {"made_by": "concept_eraser", "format": 1, "kind": "run", "files": {"a": entry}}
    (tmp_path / MARK).write_text(json.dumps(content))
    with pytest.raises(UserError, match="is damaged"):
        manifest.read(tmp_path)


def test_a_mark_is_on_the_disk_before_it_replaces_the_old_one(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, order = (run_folder / MARK).read_bytes(), []
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        order.append(json.loads(path.read_text())["kind"])  # the whole text, no longer in a buffer
        fsync(descriptor)

    def fail(partial: Path, place: object, **_: object) -> None:
        order.append(place)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        manifest.write(run_folder, manifest.Manifest("attack"))
    assert order == ["attack", run_folder / MARK]
    assert [p.name for p in run_folder.iterdir()] == [MARK]  # nothing half-written is left
    assert (run_folder / MARK).read_bytes() == before
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(KeyboardInterrupt):  # the removal of the partial file does not hide it
        manifest.write(run_folder, manifest.Manifest("attack"))


def test_a_missing_mark_is_not_created_again_by_a_writer(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_folder / MARK).unlink()
    with pytest.raises(UserError, match="has lost its mark"), manifest.change(run_folder):
        pytest.fail("there is nothing to change")
    assert not (run_folder / MARK).exists()


def test_a_change_of_a_manifest_waits_for_another_one(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    other = os.open(run_folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            fcntl.flock(other, fcntl.LOCK_UN)

    monkeypatch.setattr(manifest.time, "sleep", sleep)
    with manifest.change(run_folder) as content:
        assert len(pauses) == 3
        assert 0 < sum(pauses) < 1  # soon enough when it is free
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        content.kind = "attack"
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free again
    assert manifest.read(run_folder).kind == "attack"
    os.close(other)
    monkeypatch.setattr(manifest.locks, "fcntl", None)  # a system without such locks
    with manifest.change(run_folder) as content:
        content.kind = "run"
    assert manifest.read(run_folder).kind == "run"


def test_a_change_that_fails_is_not_written_and_holds_nothing(run_folder: Path) -> None:
    before = open_files(run_folder)

    def change() -> None:
        with manifest.change(run_folder) as content:
            content.kind = "attack"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        change()
    assert manifest.read(run_folder).kind == "run"
    assert open_files(run_folder) == before


def test_files_are_listed_in_the_nearest_marked_folder_and_forgotten(
    tmp_path: Path, run_folder: Path
) -> None:
    inner = run_folder / "attacks" / "x"
    output_folder.claim(inner, "attack")
    for name in ("a", "deep/b", "deep/c", "deeper"):
        (run_folder / name).parent.mkdir(exist_ok=True)
        (run_folder / name).write_text(name)
    (inner / "d").write_text("d")
    (tmp_path / "mine").write_text("")
    paths = [
        run_folder / "a",
        run_folder / "deep" / "b",
        run_folder / "deep" / "c",
        run_folder / "deeper",
        inner / "d",
        tmp_path / "mine",
    ]
    manifest.expect(paths)
    assert {one.state for one in manifest.verify(run_folder)} == {"growing"}
    # nothing is known of it yet
    assert manifest.read(run_folder).files["a"] == manifest.FileRecord(0, 0, None)
    manifest.record(paths)
    assert [one.name for one in manifest.verify(run_folder)] == [
        "a",
        "deep/b",
        "deep/c",
        "deeper",
        "attacks/x/d",
    ]
    assert {one.state for one in manifest.verify(run_folder)} == {"intact"}
    assert manifest.read(run_folder).files["deep/b"] == manifest.FileRecord.of(
        run_folder / "deep" / "b"
    )
    output_folder.own_folder(run_folder, "tracking")
    output_folder.own_folder(run_folder, "logs")
    for path in (run_folder / "deep", run_folder / "logs", inner / "d", tmp_path / "mine"):
        manifest.forget(path)
    assert set(manifest.read(run_folder).files) == {"a", "deeper"}
    assert manifest.read(run_folder).folders == ["tracking"]
    assert manifest.read(inner).files == {}
    assert not (tmp_path / MARK).exists()


def test_sealing_records_what_grew_and_is_there(run_folder: Path) -> None:
    writers.write_text(run_folder / "done", "1")
    (run_folder.parent / "outside").write_text("mine")
    for name in ("log", "gone", "link"):
        writers.write_growing(run_folder / name, "x")
    (run_folder / "done").write_text("2")
    (run_folder / "gone").unlink()
    (run_folder / "link").unlink()
    (run_folder / "link").symlink_to(run_folder.parent / "outside")
    manifest.seal(run_folder)
    states = {one.name: one.state for one in manifest.verify(run_folder)}
    assert states == {"done": "changed", "log": "intact", "gone": "missing", "link": "link"}
    assert manifest.read(run_folder).files["gone"].sha256 is None
    assert manifest.read(run_folder).files["link"].sha256 is None


def test_a_path_is_plain_where_no_part_of_it_is_a_link(run_folder: Path) -> None:
    (run_folder / "a").mkdir()
    (run_folder / "b").symlink_to(run_folder / "a")
    assert manifest.is_plain(run_folder, "a/x/y") is True
    for name in ("b", "b/x", "b/x/y"):
        assert manifest.is_plain(run_folder, name) is False


def test_the_state_of_a_file(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_folder / "a"
    writers.write_text(path, "x" * 10)
    entry = manifest.read(run_folder).files["a"]
    monkeypatch.setattr(manifest, "SMALL", 10)
    status = path.stat()
    path.write_text("y" * 10)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for with_hash in (False, True):
        # SMALL itself is still hashed
        assert manifest.state_of(run_folder, "a", entry, with_hash=with_hash) == "changed"
    monkeypatch.setattr(manifest, "SMALL", 9)
    assert manifest.state_of(run_folder, "a", entry, with_hash=False) == "intact"
    assert manifest.state_of(run_folder, "a", entry) == "changed"  # the default is to hash
    path.write_text("y" * 11)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert manifest.state_of(run_folder, "a", entry, with_hash=False) == "changed"
    path.unlink()
    assert manifest.state_of(run_folder, "a", entry) == "missing"
    path.mkdir()
    assert manifest.state_of(run_folder, "a", entry) == "changed"
    path.rmdir()
    path.symlink_to(run_folder)
    assert manifest.state_of(run_folder, "a", entry) == "link"


def test_no_file_of_some_megabytes_is_taken_for_intact_unread() -> None:
    assert 2**20 <= manifest.SMALL <= 2**30


def test_marked_folders_inside_are_named_outermost_first(run_folder: Path) -> None:
    assert manifest.marked_inside(run_folder) == []
    places = [run_folder / "a", run_folder / "a" / "x" / "y", run_folder / "b"]
    for place in (*places, run_folder / "a" / ".replaced-1", run_folder / ".replaced-1" / "b"):
        output_folder.claim(place, "attack")
    output_folder.claim(run_folder.parent / "outside", "attack")
    (run_folder / "c").symlink_to(run_folder.parent / "outside")
    assert manifest.marked_inside(run_folder) == places


def test_a_users_own_files_are_listed(run_folder: Path) -> None:
    writers.write_text(run_folder / "b", "1")
    (output_folder.own_folder(run_folder, "tracking") / "events").write_text("")
    (output_folder.own_folder(run_folder, "logs") / "log").write_text("")
    inner = run_folder / "attacks" / "x"
    output_folder.claim(inner, "attack")
    writers.write_text(inner / "deep" / "a", "1")
    output_folder.claim(inner / "deepest", "attack")
    assert manifest.unlisted_files(run_folder) == []
    own = [
        "attacks/x/deep/mine",
        "attacks/x/deepest/mine",
        "attacks/x/mine",
        "notes.partial",
        ".hidden",
        "z/mine",
    ]
    (run_folder / "z").mkdir()
    for name in own:
        (run_folder / name).write_text("mine")
    for folder in (run_folder, inner):
        (folder / ".b.12-01234567.partial").write_text("half")  # of a killed process
        (folder / ".concept_eraser.lock").write_text("")
    assert manifest.unlisted_files(run_folder) == sorted(own)
    assert manifest.unlisted_files(run_folder.parent) == [
        f"{run_folder.name}/{name}" for name in sorted(own)
    ]


def test_reading_checks_only_the_files_that_are_read(run_folder: Path) -> None:
    for name in ("a/x", "a/y", "ab", "b.safetensors", "log"):
        writers.write_text(run_folder / name, "1") if "." not in name else writers.write_tensors(
            run_folder / name, {}, {"a": "1"}
        )
    (run_folder / "a" / "y").write_text("2")
    for name in ("ab", "a/x", "b.safetensors", "nothing"):
        manifest.require_intact(run_folder / name)
    for name in ("a/y", "a", ""):
        with pytest.raises(UserError, match=r"y is not what concept_eraser wrote"):
            manifest.require_intact(run_folder / name)
    (run_folder / "a" / "y").unlink()
    manifest.require_intact(run_folder)  # a missing report is no error
    (run_folder / "b.safetensors").unlink()
    for name in ("b.safetensors", ""):
        with pytest.raises(UserError, match=r"b\.safetensors is missing"):
            manifest.require_intact(run_folder / name)
    manifest.require_intact(run_folder / "a")
    (run_folder / "ab").unlink()
    (run_folder / "ab").symlink_to(run_folder / "a" / "x")
    with pytest.raises(UserError, match="ab is a link where a file was written"):
        manifest.require_intact(run_folder / "ab")


def test_a_link_within_a_run_is_followed_and_one_out_of_it_is_not(
    tmp_path: Path, run_folder: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "w").write_text("mine")
    (run_folder / "a" / "deep").mkdir(parents=True)
    (run_folder / "a" / "b").symlink_to(run_folder / "a" / "deep")
    (run_folder / "latest").symlink_to(run_folder / "a")
    for name in ("a", "latest", "a/b", ""):
        manifest.require_intact(run_folder / name)
    (run_folder / "a" / "deep" / "c").symlink_to(tmp_path / "outside" / "w")
    for name in ("a/deep/c", "a/deep", "a", ""):
        with pytest.raises(UserError, match="a link that leads out of"):
            manifest.require_intact(run_folder / name)


def test_no_detour_over_links_leads_out_of_a_run(tmp_path: Path, run_folder: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "w").write_text("mine")
    (run_folder / "inner").mkdir()
    (run_folder / "inner" / "w").symlink_to(tmp_path / "outside" / "w")
    (run_folder / "pipeline").symlink_to(run_folder / "inner")  # this one leads to a place within
    (run_folder / "deep").mkdir()
    (run_folder / "deep" / "to").symlink_to(run_folder / "pipeline")
    (run_folder / "out").symlink_to(tmp_path / "outside")
    (run_folder / "plain").mkdir()
    (run_folder / "plain" / "back").symlink_to(run_folder / "plain")
    (run_folder / "plain" / "loop").symlink_to(run_folder / "plain" / "loop")
    for name in ("pipeline", "deep", "out/w", "inner", "deep/to/w"):
        with pytest.raises(UserError, match="leads out of"):
            manifest.require_intact(run_folder / name)
    manifest.require_intact(run_folder / "plain")  # a circle does not lead out of the run
    manifest.require_intact(run_folder / ".." / "outside" / "w")  # the user names a place outside


def test_writing_beside_a_link_is_no_fault(run_folder: Path) -> None:
    (run_folder / "a").mkdir()
    (run_folder / "b").symlink_to(run_folder / "a")
    manifest.require_inside(run_folder / "b" / "x")  # within the folder
    manifest.require_inside(run_folder.parent / "x")  # in none
    (run_folder / "c").symlink_to(run_folder.parent)
    with pytest.raises(UserError, match="leads out of"):
        manifest.require_inside(run_folder / "c" / "x")


def test_a_manifest_that_another_process_holds_is_an_error_after_a_wait(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(manifest, "PATIENCE", 0.2)
    descriptor = os.open(run_folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="is being changed by another process"):
        writers.write_text(run_folder / "a", "1")
    os.close(descriptor)
    writers.write_text(run_folder / "a", "1")
    assert manifest.verify(run_folder)[0].state == "intact"


def test_an_earlier_model_is_recognised(tmp_path: Path) -> None:
    writers.write_folder(
        tmp_path / "model", lambda p: (p / "w").write_text("1") and None, kind="model"
    )
    with pytest.raises(UserError, match="holds another result of concept_eraser"):
        writers.write_folder(
            tmp_path / "model", lambda p: (p / "w").write_text("2") and None, kind="model"
        )
    assert (tmp_path / "model" / "w").read_text() == "1"
