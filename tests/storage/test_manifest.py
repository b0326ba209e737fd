"""Marks, manifests and what is set aside: a folder is ours only by its mark, and only listed files are touched."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from concept_eraser.errors import UserError
from concept_eraser.storage import manifest, output_folder, writers
from concept_eraser.storage.manifest import MARK
from tests.storage.test_writers import ours, tree  # noqa: F401


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
def test_a_strangers_manifest_names_nothing_outside(ours: Path, name: object) -> None:  # noqa: F811
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
    "text", ["", "[]", "{}", "\xff\xfe", '{"made_by": "x", "format": 1, "kind": "run", "files": {}}', '{"made_by": "concept_eraser", "format": 2, "kind": "run", "files": {}}', '{"made_by": "concept_eraser", "format": 1, "kind": "run", "files": {"a": {"size": "1", "mtime_ns": 0, "sha256": null}}}', '{"made_by": "concept_eraser", "format": 1, "kind": "run", "files": {"a": 1}}', "[" * 5000]
)  # fmt: skip
def test_a_damaged_mark_stops_everything(ours: Path, text: str) -> None:  # noqa: F811
    (ours / MARK).write_text(text, encoding="latin-1")
    for call in (lambda: manifest.read(ours), lambda: output_folder.set_aside(ours), lambda: writers.write_text(ours / "a", "x")):  # fmt: skip
        with pytest.raises(UserError):
            call()


def test_a_mark_that_is_a_link_is_not_followed(tmp_path: Path, ours: Path) -> None:  # noqa: F811
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / MARK).symlink_to(ours / MARK)
    with pytest.raises(UserError, match="is a link"):
        manifest.read(tmp_path / "stranger")


def test_set_aside_moves_what_is_listed_and_leaves_the_rest(ours: Path) -> None:  # noqa: F811
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
    assert {"done.json", "pipeline/w", "attacks/p4d/attack.json", MARK, f"attacks/p4d/{MARK}"} == set(tree(aside))
    assert all(one.state == "intact" for one in manifest.verify(aside))  # a whole result still
    assert output_folder.remove_set_aside(ours) == []
    assert set(tree(ours)) == left
    assert not aside.exists()


def test_a_file_that_the_user_changed_survives_an_overwrite(ours: Path) -> None:  # noqa: F811
    writers.write_text(ours / "README.md", "card")
    writers.write_text(ours / "done.json", "{}")
    (ours / "README.md").write_text("card, with my notes")
    aside = output_folder.set_aside(ours)
    assert aside is not None
    assert output_folder.remove_set_aside(ours) == [aside / "README.md"]
    assert (aside / "README.md").read_text() == "card, with my notes"
    assert not (aside / "done.json").exists()


def test_what_is_set_aside_twice_has_two_places(ours: Path) -> None:  # noqa: F811
    for text in ("1", "2"):
        writers.write_text(ours / "a", text)
        output_folder.set_aside(ours)
    assert [(ours / f".replaced-{n}" / "a").read_text() for n in (1, 2)] == ["1", "2"]
    assert output_folder.set_aside(ours) is None  # nothing to move


def test_files_to_keep_stay_and_stay_listed(ours: Path) -> None:  # noqa: F811
    writers.write_text(ours / "forget.yaml", "x")
    writers.write_text(ours / "done.json", "{}")
    output_folder.set_aside(ours, keep={"forget.yaml"})
    assert (ours / "forget.yaml").read_text() == "x"
    assert list(manifest.read(ours).files) == ["forget.yaml"]


def test_a_folder_that_another_library_fills_is_ours_only_if_we_made_it(ours: Path) -> None:  # noqa: F811
    (ours / "mine").mkdir()
    (ours / "mine" / "file").write_text("mine")
    output_folder.own_folder(ours, "mine")
    (output_folder.own_folder(ours, "tracking") / "events").write_text("x")
    output_folder.set_aside(ours)
    assert (ours / "mine" / "file").exists()
    assert not (ours / "tracking").exists()
    assert output_folder.remove_set_aside(ours) == []


def test_links_are_neither_followed_nor_removed_with_what_they_lead_to(tmp_path: Path, ours: Path) -> None:  # noqa: F811
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


def test_reading_a_damaged_file_is_refused(ours: Path) -> None:  # noqa: F811
    writers.write_folder(ours / "pipeline", lambda p: (p / "w.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}" + bytes(100)) and None)  # fmt: skip
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


def test_a_large_file_is_taken_for_intact_by_size_and_time_but_verify_reads_it(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811  # fmt: skip
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


def test_a_copied_folder_is_intact(tmp_path: Path, ours: Path) -> None:  # noqa: F811
    writers.write_text(ours / "a", "1")
    shutil.copytree(ours, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy" / "a", (1, 1))
    manifest.require_intact(tmp_path / "copy" / "a")
    assert manifest.verify(tmp_path / "copy")[0].state == "intact"


def test_files_of_the_users_own_are_counted(ours: Path) -> None:  # noqa: F811
    writers.write_text(ours / "a", "1")
    output_folder.claim(ours / "attacks" / "x", "attack")
    writers.write_text(ours / "attacks" / "x" / "attack.json", "{}")
    (ours / "attacks" / "x" / "mine").write_text("")
    (ours / "notes.txt").write_text("")
    assert manifest.unlisted(ours) == ["attacks/x/mine", "notes.txt"]


def test_what_has_no_mark_is_not_checked_and_cannot_be_verified(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    manifest.require_intact(tmp_path / "a")
    with pytest.raises(UserError, match="has no manifest"):
        manifest.verify(tmp_path)
    with pytest.raises(UserError, match="has no mark"):
        output_folder.set_aside(tmp_path)


def test_results_inside_a_run_are_verified_with_it(ours: Path) -> None:  # noqa: F811
    output_folder.claim(ours / "attacks" / "x", "attack")
    writers.write_text(ours / "attacks" / "x" / "attack.json", "{}")
    (ours / "attacks" / "x" / "attack.json").write_text("[]")
    assert [(one.name, one.state) for one in manifest.verify(ours)] == [("attacks/x/attack.json", "changed")]
    assert output_folder.accept(ours) == ["attacks/x/attack.json"]
    assert [one.state for one in manifest.verify(ours)] == ["intact"]


def test_a_users_own_link_beside_results_is_followed(tmp_path: Path) -> None:
    """A project folder into which an evaluation was written, with a link to a model on another disk."""
    (tmp_path / "disk" / "model").mkdir(parents=True)
    project = tmp_path / "project"
    output_folder.claim(project, "evaluation")
    (project / "model").symlink_to(tmp_path / "disk" / "model")
    manifest.require_intact(project / "model")
    output_folder.claim(tmp_path / "run", "run")
    (tmp_path / "run" / "pipeline").symlink_to(tmp_path / "disk" / "model")
    with pytest.raises(UserError, match="leads out of"):
        manifest.require_intact(tmp_path / "run" / "pipeline")


def test_what_a_stranger_wrote_into_a_mark_or_lock_reaches_no_terminal(ours: Path) -> None:  # noqa: F811
    from concept_eraser.storage import locks

    content = json.loads((ours / MARK).read_text())
    (ours / MARK).write_text(json.dumps({**content, "kind": "\x1b[2Jrun"}))
    assert manifest.read(ours).kind == "[2Jrun"
    (ours / locks.LOCK).write_text(json.dumps({"pid": 1, "host": "a\x1b[2J", "purpose": "\x07", "started": ""}))
    with pytest.raises(UserError) as caught, locks.locked(ours, "erase"):
        pass
    assert "\x1b" not in str(caught.value)
    assert "\x07" not in str(caught.value)
