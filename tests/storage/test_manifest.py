"""Marks, manifests and what is set aside: a folder is ours only by its mark, and only listed files
are touched.
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
def test_a_strangers_manifest_names_nothing_outside(ours: Path, name: object) -> None:
    content = json.loads((ours / MARK).read_text())
    for broken in (
        {**content, "files": {str(name): {"size": 0, "mtime_ns": 0, "sha256": None}}},
        {**content, "folders": [name]},
    ):
        if broken["folders"] == [] and name == 7:
            continue
        (ours / MARK).write_text(json.dumps(broken))
        with pytest.raises(UserError, match="damaged"):
            manifest.read(ours)


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
def test_a_damaged_mark_stops_everything(ours: Path, text: str) -> None:
    (ours / MARK).write_text(text, encoding="latin-1")
    for call in (
        lambda: manifest.read(ours),
        lambda: output_folder.set_aside(ours),
        lambda: writers.write_text(ours / "a", "x"),
    ):
        with pytest.raises(UserError):
            call()


def test_a_mark_that_is_a_link_is_not_followed(tmp_path: Path, ours: Path) -> None:
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / MARK).symlink_to(ours / MARK)
    with pytest.raises(UserError, match="is a link"):
        manifest.read(tmp_path / "stranger")


def test_set_aside_moves_what_is_listed_and_leaves_the_rest(ours: Path) -> None:
    writers.write_text(ours / "done.json", "{}")
    writers.write_folder(ours / "pipeline", lambda p: (p / "w").write_text("1") and None)
    output_folder.claim(ours / "attacks" / "p4d", "attack")
    writers.write_text(ours / "attacks" / "p4d" / "attack.json", "{}")
    (ours / "notes.txt").write_text("mine")
    (ours / "pipeline" / "mine").write_text("mine")
    (ours / "attacks" / "mine").write_text("mine")
    aside = output_folder.set_aside(ours)
    assert aside == ours / ".replaced-1"
    left = {name for name in tree(ours) if not name.startswith(".replaced")}
    assert left == {MARK, "notes.txt", "pipeline/mine", "attacks/mine"}
    assert {
        "done.json",
        "pipeline/w",
        "attacks/p4d/attack.json",
        MARK,
        f"attacks/p4d/{MARK}",
    } == set(tree(aside))
    assert all(one.state == "intact" for one in manifest.verify(aside))  # a whole result still
    assert output_folder.remove_set_aside(ours) == []
    assert set(tree(ours)) == left
    assert not aside.exists()


def test_a_file_that_the_user_changed_survives_an_overwrite(ours: Path) -> None:
    writers.write_text(ours / "README.md", "card")
    writers.write_text(ours / "done.json", "{}")
    (ours / "README.md").write_text("card, with my notes")
    aside = output_folder.set_aside(ours)
    assert aside is not None
    assert output_folder.remove_set_aside(ours) == [aside / "README.md"]
    assert (aside / "README.md").read_text() == "card, with my notes"
    assert not (aside / "done.json").exists()


def test_what_is_set_aside_twice_has_two_places(ours: Path) -> None:
    for text in ("1", "2"):
        writers.write_text(ours / "a", text)
        output_folder.set_aside(ours)
    assert [(ours / f".replaced-{n}" / "a").read_text() for n in (1, 2)] == ["1", "2"]
    assert output_folder.set_aside(ours) is None  # nothing to move


def test_files_to_keep_stay_and_stay_listed(ours: Path) -> None:
    writers.write_text(ours / "forget.yaml", "x")
    writers.write_text(ours / "done.json", "{}")
    output_folder.set_aside(ours, keep={"forget.yaml"})
    assert (ours / "forget.yaml").read_text() == "x"
    assert list(manifest.read(ours).files) == ["forget.yaml"]


def test_a_folder_that_another_library_fills_is_ours_only_if_we_made_it(ours: Path) -> None:
    (ours / "mine").mkdir()
    (ours / "mine" / "file").write_text("mine")
    output_folder.own_folder(ours, "mine")
    (output_folder.own_folder(ours, "tracking") / "events").write_text("x")
    output_folder.set_aside(ours)
    assert (ours / "mine" / "file").exists()
    assert not (ours / "tracking").exists()
    assert output_folder.remove_set_aside(ours) == []


def test_links_are_neither_followed_nor_removed_with_what_they_lead_to(
    tmp_path: Path, ours: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "w").write_text("mine")
    writers.write_folder(ours / "pipeline", lambda p: (p / "w").write_text("1") and None)
    shutil.rmtree(ours / "pipeline")
    (ours / "pipeline").symlink_to(outside)  # now the listed name leads out
    output_folder.set_aside(ours)
    output_folder.remove_set_aside(ours)
    assert (outside / "w").read_text() == "mine"
    with pytest.raises(UserError, match="leads out of"):
        output_folder.require_claimable(ours / "pipeline", "attack", inside=ours)


def test_reading_a_damaged_file_is_refused(ours: Path) -> None:
    writers.write_folder(
        ours / "pipeline",
        lambda p: (p / "w.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}" + bytes(100)) and None,
    )
    manifest.require_intact(ours / "pipeline")
    path = ours / "pipeline" / "w.safetensors"
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # a flipped bit changes no time
    with pytest.raises(UserError, match="is not what concept_eraser wrote"):
        manifest.require_intact(ours / "pipeline")
    assert output_folder.accept(ours) == ["pipeline/w.safetensors"]
    manifest.require_intact(ours / "pipeline")
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        manifest.require_intact(ours)
    assert [one.state for one in manifest.verify(ours)] == ["missing"]


def test_a_large_file_is_taken_for_intact_by_size_and_time_but_verify_reads_it(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "SMALL", 10)
    writers.write_text(ours / "w.txt", "x" * 100)
    path = ours / "w.txt"
    status = path.stat()
    path.write_text("y" * 100)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    manifest.require_intact(path)  # costs no reading
    assert manifest.verify(ours)[0].state == "changed"
    os.utime(path)
    with pytest.raises(UserError, match="is not what"):
        manifest.require_intact(path)


def test_a_copied_folder_is_intact(tmp_path: Path, ours: Path) -> None:
    writers.write_text(ours / "a", "1")
    shutil.copytree(ours, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy" / "a", (1, 1))
    manifest.require_intact(tmp_path / "copy" / "a")
    assert manifest.verify(tmp_path / "copy")[0].state == "intact"


def test_files_of_the_users_own_are_counted(ours: Path) -> None:
    writers.write_text(ours / "a", "1")
    output_folder.claim(ours / "attacks" / "x", "attack")
    writers.write_text(ours / "attacks" / "x" / "attack.json", "{}")
    (ours / "attacks" / "x" / "mine").write_text("")
    (ours / "notes.txt").write_text("")
    assert manifest.unlisted_files(ours) == ["attacks/x/mine", "notes.txt"]


def test_what_has_no_mark_is_not_checked_and_cannot_be_verified(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    manifest.require_intact(tmp_path / "a")
    with pytest.raises(UserError, match="has no manifest"):
        manifest.verify(tmp_path)
    with pytest.raises(UserError, match="has no mark"):
        output_folder.set_aside(tmp_path)


def test_results_inside_a_run_are_verified_with_it(ours: Path) -> None:
    output_folder.claim(ours / "attacks" / "x", "attack")
    writers.write_text(ours / "attacks" / "x" / "attack.json", "{}")
    (ours / "attacks" / "x" / "attack.json").write_text("[]")
    assert [(one.name, one.state) for one in manifest.verify(ours)] == [
        ("attacks/x/attack.json", "changed")
    ]
    assert output_folder.accept(ours) == ["attacks/x/attack.json"]
    assert [one.state for one in manifest.verify(ours)] == ["intact"]


def test_a_users_own_link_beside_results_is_followed(tmp_path: Path) -> None:
    """A project folder into which an evaluation was written, with a link to a model on another
    disk.
    """
    (tmp_path / "disk" / "model").mkdir(parents=True)
    project = tmp_path / "project"
    output_folder.claim(project, "evaluation")
    (project / "model").symlink_to(tmp_path / "disk" / "model")
    manifest.require_intact(project / "model")
    output_folder.claim(tmp_path / "run", "run")
    (tmp_path / "run" / "pipeline").symlink_to(tmp_path / "disk" / "model")
    with pytest.raises(UserError, match="leads out of"):
        manifest.require_intact(tmp_path / "run" / "pipeline")


def test_what_a_stranger_wrote_into_a_mark_or_lock_reaches_no_terminal(ours: Path) -> None:
    from concept_eraser.storage import locks

    content = json.loads((ours / MARK).read_text())
    (ours / MARK).write_text(json.dumps({**content, "kind": "\x1b[2Jrun"}))
    assert manifest.read(ours).kind == "[2Jrun"
    (ours / locks.LOCK).write_text(
        json.dumps({"pid": 1, "host": "a\x1b[2J", "purpose": "\x07", "started": ""})
    )
    with pytest.raises(UserError) as caught, locks.hold_lock(ours, "erase"):
        pass
    assert "\x1b" not in str(caught.value)
    assert "\x07" not in str(caught.value)


def test_a_folder_is_ours_by_the_nearest_mark(tmp_path: Path, ours: Path) -> None:
    assert manifest.folder_of(tmp_path) is None
    output_folder.claim(ours / "attacks" / "x", "attack")
    assert manifest.folder_of(ours) == ours
    assert manifest.folder_of(ours / "attacks") == ours
    assert manifest.folder_of(ours / "attacks" / "x" / "deep" / "a") == ours / "attacks" / "x"
    assert manifest.read(tmp_path) is None


def test_a_mark_holds_what_was_put_into_it(tmp_path: Path) -> None:
    records = {"b": manifest.FileRecord(1, 2, "x"), "a/c": manifest.FileRecord(0, 0, None)}
    content = manifest.Manifest("run", records, ["z", "tracking"])
    manifest.write(tmp_path, content)
    assert manifest.read(tmp_path) == manifest.Manifest("run", records, ["tracking", "z"])
    stored = json.loads((tmp_path / MARK).read_text())
    assert (stored["made_by"], stored["format"]) == ("concept_eraser", 1)
    assert (tmp_path / MARK).read_text().endswith("}\n")
    stored["kind"] = "k" * 100
    del stored["folders"]  # may be left out
    (tmp_path / MARK).write_text(json.dumps(stored))
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
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, order = (ours / MARK).read_bytes(), []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        order.append(json.loads(path.read_text())["kind"])  # the whole text, no longer in a buffer
        fsync(descriptor)

    def fail(partial: Path, place: object, **_: object) -> None:
        order.append(place)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        manifest.write(ours, manifest.Manifest("attack"))
    assert order == ["attack", ours / MARK]
    assert [p.name for p in ours.iterdir()] == [MARK]  # nothing half-written is left
    assert (ours / MARK).read_bytes() == before
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(KeyboardInterrupt):  # not hidden by the clearing away
        manifest.write(ours, manifest.Manifest("attack"))


def test_a_mark_that_is_gone_is_not_made_again_by_a_writer(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ours / MARK).unlink()
    with pytest.raises(UserError, match="has lost its mark"), manifest.change(ours):
        pytest.fail("there is nothing to change")
    assert not (ours / MARK).exists()


def test_who_changes_a_manifest_waits_for_the_one_who_does(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    other = os.open(ours, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            fcntl.flock(other, fcntl.LOCK_UN)

    monkeypatch.setattr(manifest.time, "sleep", sleep)
    with manifest.change(ours) as content:
        assert len(pauses) == 3
        assert 0 < sum(pauses) < 1  # soon enough when it is free
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        content.kind = "attack"
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free again
    assert manifest.read(ours).kind == "attack"
    os.close(other)
    monkeypatch.setattr(manifest.locks, "fcntl", None)  # a system without such locks
    with manifest.change(ours) as content:
        content.kind = "run"
    assert manifest.read(ours).kind == "run"


def test_a_change_that_fails_is_not_written_and_holds_nothing(ours: Path) -> None:
    before = open_files(ours)

    def change() -> None:
        with manifest.change(ours) as content:
            content.kind = "attack"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        change()
    assert manifest.read(ours).kind == "run"
    assert open_files(ours) == before


def test_files_are_listed_in_the_nearest_marked_folder_and_forgotten(
    tmp_path: Path, ours: Path
) -> None:
    inner = ours / "attacks" / "x"
    output_folder.claim(inner, "attack")
    for name in ("a", "deep/b", "deep/c", "deeper"):
        (ours / name).parent.mkdir(exist_ok=True)
        (ours / name).write_text(name)
    (inner / "d").write_text("d")
    (tmp_path / "mine").write_text("")
    paths = [
        ours / "a",
        ours / "deep" / "b",
        ours / "deep" / "c",
        ours / "deeper",
        inner / "d",
        tmp_path / "mine",
    ]
    manifest.expect(paths)
    assert {one.state for one in manifest.verify(ours)} == {"growing"}
    # nothing is known of it yet
    assert manifest.read(ours).files["a"] == manifest.FileRecord(0, 0, None)
    manifest.record(paths)
    assert [one.name for one in manifest.verify(ours)] == [
        "a",
        "deep/b",
        "deep/c",
        "deeper",
        "attacks/x/d",
    ]
    assert {one.state for one in manifest.verify(ours)} == {"intact"}
    assert manifest.read(ours).files["deep/b"] == manifest.FileRecord.of(ours / "deep" / "b")
    output_folder.own_folder(ours, "tracking")
    output_folder.own_folder(ours, "logs")
    for path in (ours / "deep", ours / "logs", inner / "d", tmp_path / "mine"):
        manifest.forget(path)
    assert set(manifest.read(ours).files) == {"a", "deeper"}
    assert manifest.read(ours).folders == ["tracking"]
    assert manifest.read(inner).files == {}
    assert not (tmp_path / MARK).exists()


def test_sealing_records_what_grew_and_is_there(ours: Path) -> None:
    writers.write_text(ours / "done", "1")
    (ours.parent / "outside").write_text("mine")
    for name in ("log", "gone", "link"):
        writers.write_growing(ours / name, "x")
    (ours / "done").write_text("2")
    (ours / "gone").unlink()
    (ours / "link").unlink()
    (ours / "link").symlink_to(ours.parent / "outside")
    manifest.seal(ours)
    states = {one.name: one.state for one in manifest.verify(ours)}
    assert states == {"done": "changed", "log": "intact", "gone": "missing", "link": "link"}
    assert manifest.read(ours).files["gone"].sha256 is None
    assert manifest.read(ours).files["link"].sha256 is None


def test_a_path_is_plain_where_no_part_of_it_is_a_link(ours: Path) -> None:
    (ours / "a").mkdir()
    (ours / "b").symlink_to(ours / "a")
    assert manifest.is_plain(ours, "a/x/y") is True
    for name in ("b", "b/x", "b/x/y"):
        assert manifest.is_plain(ours, name) is False


def test_the_state_of_a_file(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ours / "a"
    writers.write_text(path, "x" * 10)
    entry = manifest.read(ours).files["a"]
    monkeypatch.setattr(manifest, "SMALL", 10)
    status = path.stat()
    path.write_text("y" * 10)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for hashed in (False, True):
        # SMALL itself is still hashed
        assert manifest.state_of(ours, "a", entry, with_hash=hashed) == "changed"
    monkeypatch.setattr(manifest, "SMALL", 9)
    assert manifest.state_of(ours, "a", entry, with_hash=False) == "intact"
    assert manifest.state_of(ours, "a", entry) == "changed"  # hashed unless told otherwise
    path.write_text("y" * 11)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert manifest.state_of(ours, "a", entry, with_hash=False) == "changed"
    path.unlink()
    assert manifest.state_of(ours, "a", entry) == "missing"
    path.mkdir()
    assert manifest.state_of(ours, "a", entry) == "changed"
    path.rmdir()
    path.symlink_to(ours)
    assert manifest.state_of(ours, "a", entry) == "link"


def test_no_file_of_some_megabytes_is_taken_for_intact_unread() -> None:
    assert 2**20 <= manifest.SMALL <= 2**30


def test_marked_folders_inside_are_named_outermost_first(ours: Path) -> None:
    assert manifest.marked_inside(ours) == []
    places = [ours / "a", ours / "a" / "x" / "y", ours / "b"]
    for place in (*places, ours / "a" / ".replaced-1", ours / ".replaced-1" / "b"):
        output_folder.claim(place, "attack")
    output_folder.claim(ours.parent / "outside", "attack")
    (ours / "c").symlink_to(ours.parent / "outside")
    assert manifest.marked_inside(ours) == places


def test_what_a_user_has_put_beside_ours_is_named(ours: Path) -> None:
    writers.write_text(ours / "b", "1")
    (output_folder.own_folder(ours, "tracking") / "events").write_text("")
    (output_folder.own_folder(ours, "logs") / "log").write_text("")
    inner = ours / "attacks" / "x"
    output_folder.claim(inner, "attack")
    writers.write_text(inner / "deep" / "a", "1")
    output_folder.claim(inner / "deepest", "attack")
    assert manifest.unlisted_files(ours) == []
    own = [
        "attacks/x/deep/mine",
        "attacks/x/deepest/mine",
        "attacks/x/mine",
        "notes.partial",
        ".hidden",
        "z/mine",
    ]
    (ours / "z").mkdir()
    for name in own:
        (ours / name).write_text("mine")
    for folder in (ours, inner):
        (folder / ".b.12-01234567.partial").write_text("half")  # ours, of a process that was killed
        (folder / ".concept_eraser.lock").write_text("")
    assert manifest.unlisted_files(ours) == sorted(own)
    assert manifest.unlisted_files(ours.parent) == [f"{ours.name}/{name}" for name in sorted(own)]


def test_reading_asks_only_for_what_is_read(ours: Path) -> None:
    for name in ("a/x", "a/y", "ab", "b.safetensors", "log"):
        writers.write_text(ours / name, "1") if "." not in name else writers.write_tensors(
            ours / name, {}, {"a": "1"}
        )
    (ours / "a" / "y").write_text("2")
    for name in ("ab", "a/x", "b.safetensors", "nothing"):
        manifest.require_intact(ours / name)
    for name in ("a/y", "a", ""):
        with pytest.raises(UserError, match=r"y is not what concept_eraser wrote"):
            manifest.require_intact(ours / name)
    (ours / "a" / "y").unlink()
    manifest.require_intact(ours)  # a report that is gone stops nobody
    (ours / "b.safetensors").unlink()
    for name in ("b.safetensors", ""):
        with pytest.raises(UserError, match=r"b\.safetensors is missing"):
            manifest.require_intact(ours / name)
    manifest.require_intact(ours / "a")
    (ours / "ab").unlink()
    (ours / "ab").symlink_to(ours / "a" / "x")
    with pytest.raises(UserError, match="ab is a link where a file was written"):
        manifest.require_intact(ours / "ab")


def test_a_link_within_a_run_is_followed_and_one_out_of_it_is_not(
    tmp_path: Path, ours: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "w").write_text("mine")
    (ours / "a" / "deep").mkdir(parents=True)
    (ours / "a" / "b").symlink_to(ours / "a" / "deep")
    (ours / "latest").symlink_to(ours / "a")
    for name in ("a", "latest", "a/b", ""):
        manifest.require_intact(ours / name)
    (ours / "a" / "deep" / "c").symlink_to(tmp_path / "outside" / "w")
    for name in ("a/deep/c", "a/deep", "a", ""):
        with pytest.raises(UserError, match="a link that leads out of"):
            manifest.require_intact(ours / name)


def test_no_detour_over_links_leads_out_of_a_run(tmp_path: Path, ours: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "w").write_text("mine")
    (ours / "inner").mkdir()
    (ours / "inner" / "w").symlink_to(tmp_path / "outside" / "w")
    (ours / "pipeline").symlink_to(ours / "inner")  # this one leads to a place within
    (ours / "deep").mkdir()
    (ours / "deep" / "to").symlink_to(ours / "pipeline")
    (ours / "out").symlink_to(tmp_path / "outside")
    (ours / "plain").mkdir()
    (ours / "plain" / "back").symlink_to(ours / "plain")
    (ours / "plain" / "loop").symlink_to(ours / "plain" / "loop")
    for name in ("pipeline", "deep", "out/w", "inner", "deep/to/w"):
        with pytest.raises(UserError, match="leads out of"):
            manifest.require_intact(ours / name)
    manifest.require_intact(ours / "plain")  # round and round is not out
    manifest.require_intact(ours / ".." / "outside" / "w")  # the user names a place outside


def test_writing_beside_a_link_is_no_fault(ours: Path) -> None:
    (ours / "a").mkdir()
    (ours / "b").symlink_to(ours / "a")
    manifest.require_inside(ours / "b" / "x")  # within the folder
    manifest.require_inside(ours.parent / "x")  # in none
    (ours / "c").symlink_to(ours.parent)
    with pytest.raises(UserError, match="leads out of"):
        manifest.require_inside(ours / "c" / "x")


def test_a_manifest_that_another_process_holds_is_waited_for_and_then_said(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(manifest, "PATIENCE", 0.2)
    descriptor = os.open(ours, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="is being changed by another process"):
        writers.write_text(ours / "a", "1")
    os.close(descriptor)
    writers.write_text(ours / "a", "1")
    assert manifest.verify(ours)[0].state == "intact"


def test_a_model_that_was_written_before_is_called_ours(tmp_path: Path) -> None:
    writers.write_folder(
        tmp_path / "model", lambda p: (p / "w").write_text("1") and None, kind="model"
    )
    with pytest.raises(UserError, match="holds a result of ours"):
        writers.write_folder(
            tmp_path / "model", lambda p: (p / "w").write_text("2") and None, kind="model"
        )
    assert (tmp_path / "model" / "w").read_text() == "1"
