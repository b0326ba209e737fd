"""The mark of a folder of this package, with the SHA-256 of every file that it wrote there.

Only its mark makes a folder one of this package. Only files that the mark lists are ever replaced,
set aside or removed, and only if their content is still the same. A user's own files in the same
folder never change.

The mark is `.concept_eraser.json`:

    {"made_by": "concept_eraser", "format": 1, "kind": "run",
     "files": {"weights.safetensors": {"size": 123, "mtime_ns": 1, "sha256": "..."}},
     "folders": ["tracking"]}

`sha256` is null while a file grows (a log). `folders` are folders of other libraries' files, whose
whole content belongs to the result. The mark may come from a stranger, so its names are checked:
none leads out of its folder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from concept_eraser.storage import locks
from concept_eraser.storage.digests import file_digest
from concept_eraser.storage.readers import read_json
from concept_eraser.utils.commands import shell_command
from concept_eraser.utils.errors import UserError

MARK = ".concept_eraser.json"
PATIENCE = 60.0  # seconds that a process waits while another one changes a manifest
ASIDE = ".replaced-"  # prefix of the folders for earlier results
CLOSED = ("run", "model")  # kinds of folders in which a user's own link is not expected
OURS = (MARK, locks.LOCK)  # files of this package that a manifest does not list
SMALL = 32 * 2**20  # bytes up to which a file is hashed on every read, whatever its time
_HALF_WRITTEN = ".partial"


@dataclass(frozen=True)
class FileRecord:
    """The state of a file when it was written. sha256: None while it grows."""

    size: int
    mtime_ns: int
    sha256: str | None

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Return the record of a file in its present state."""
        digest, status = file_digest(path), path.stat()
        return cls(status.st_size, status.st_mtime_ns, digest)


@dataclass
class Manifest:
    """The content of a mark. files: by the path below the folder, with slashes."""

    kind: str
    files: dict[str, FileRecord] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)


State = Literal["intact", "growing", "changed", "missing", "link"]


@dataclass(frozen=True)
class FileState:
    """The state of a listed file."""

    name: str
    state: State


def read(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; None without a mark.

    Raises UserError if the mark is damaged, or names a file outside the folder.
    """
    path = folder / MARK
    if not os.path.lexists(path):
        return None
    if path.is_symlink():
        raise UserError(
            f"{path} is a link, which concept_eraser does not make; the folder is not "
            "used. Remove the link if the folder is yours"
        )
    content = read_json(path)
    try:
        if content["made_by"] != "concept_eraser" or content["format"] != 1:
            raise ValueError("another program or version wrote it")
        files = {_name(name): _record(entry) for name, entry in dict(content["files"]).items()}
        folders = [_name(name) for name in list(content.get("folders", []))]
        kind = "".join(letter for letter in str(content["kind"])[:40] if letter.isprintable())
        return Manifest(kind, files, folders)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({str(error)[:100]}); nothing in {folder} is changed. "
            "Remove the mark if the folder is yours"
        ) from None


def _name(name: Any) -> str:
    path = PurePosixPath(name)
    if (
        not isinstance(name, str)
        or not name
        or path.is_absolute()
        or ".." in path.parts
        or "\0" in name
        or "\\" in name
    ):
        raise ValueError("a name in it leads out of the folder")
    # an invalid name raises too
    if len(name) > 1000 or any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise ValueError("a name in it cannot be the name of a file")
    if path.as_posix() != name or name == ".":
        raise ValueError("a name in it is not in its plain form")
    return name


def _record(entry: Any) -> FileRecord:
    record = FileRecord(**entry)
    has_numbers = isinstance(record.size, int) and isinstance(record.mtime_ns, int)
    if not has_numbers or not (record.sha256 is None or isinstance(record.sha256, str)):
        raise ValueError("an entry of it is of the wrong type")
    return record


def write(folder: Path, manifest: Manifest) -> None:
    """Write the mark into a folder, whole or not at all."""
    content = {
        "made_by": "concept_eraser",
        "format": 1,
        "kind": manifest.kind,
        "files": {name: asdict(record) for name, record in sorted(manifest.files.items())},
        "folders": sorted(manifest.folders),
    }
    partial = folder / f"{MARK}.{os.getpid()}{_HALF_WRITTEN}"
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / MARK)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def is_half_written(name: str) -> bool:
    """Whether a file name is that of a mark that a process writes, or was writing when it ended."""
    return name.startswith(f"{MARK}.") and name.endswith(_HALF_WRITTEN)


def folder_of(path: Path) -> Path | None:
    """Return the nearest marked folder at or above a path, or None."""
    for folder in (path, *path.parents):
        if os.path.lexists(folder / MARK):
            return folder
    return None


def require_inside(path: Path) -> None:
    """Raise UserError if a link on the way to a path leads out of its marked folder."""
    for folder in path.parents:
        if os.path.lexists(folder / MARK) and not path.parent.resolve().is_relative_to(
            folder.resolve()
        ):
            raise UserError(
                f"{path.parent} is, or lies behind, a link that leads out of {folder}; "
                "remove the link, or give another place with --output"
            )


@contextmanager
def change(folder: Path) -> Iterator[Manifest]:
    """Yield the manifest of a marked folder for changes, and write it afterwards.

    One process changes it at a time.
    """
    with hold(folder):
        manifest = read(folder)
        if manifest is None:
            raise UserError(
                f"{folder} has lost its mark ({MARK}) while it was written to; run the "
                "command again with a new --output"
            )
        yield manifest
        write(folder, manifest)


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Exclude other processes that change a manifest, by a lock on the folder itself.

    Raises UserError if another process does not release it within `PATIENCE` seconds.
    """
    if locks.fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        began = time.monotonic()
        while locks._take(descriptor) is False:
            if time.monotonic() - began > PATIENCE:
                raise UserError(
                    f"the list of files in {folder / MARK} is being changed by another "
                    f"process for {PATIENCE:g} s; wait until it has ended, and give the "
                    "command again"
                )
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def record(paths: Iterable[Path]) -> None:
    """List files with their digests in the manifest of the nearest marked folder.

    Files outside of marked folders are not listed.
    """
    for folder, some in _by_folder(paths).items():
        records = {path.relative_to(folder).as_posix(): FileRecord.of(path) for path in some}
        with change(folder) as manifest:
            manifest.files |= records


def expect(paths: Iterable[Path]) -> None:
    """List files that are about to be written, without a digest."""
    for folder, some in _by_folder(paths).items():
        names = [path.relative_to(folder).as_posix() for path in some]
        with change(folder) as manifest:
            manifest.files |= dict.fromkeys(names, FileRecord(0, 0, None))


def _by_folder(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """Return paths by the nearest marked folder above them."""
    paths_by_folder: dict[Path, list[Path]] = {}
    for path in paths:
        folder = folder_of(path.parent)
        if folder is not None:
            paths_by_folder.setdefault(folder, []).append(path)
    return paths_by_folder


def forget(path: Path, keep: Iterable[Path] = ()) -> None:
    """Remove a file, or all files below a folder, from the manifest of the nearest marked folder.

    keep: files that stay listed.
    """
    folder = folder_of(path.parent)
    if folder is None:
        return
    name = path.relative_to(folder).as_posix()
    kept_names = {one.relative_to(folder).as_posix() for one in keep}
    with change(folder) as manifest:
        for one in [one for one in manifest.files if one == name or one.startswith(f"{name}/")]:
            if one not in kept_names:
                del manifest.files[one]
        manifest.folders = [one for one in manifest.folders if one != name]


def seal(folder: Path) -> None:
    """Record the digests of files that no longer grow."""
    records_by_name = (read(folder) or Manifest("")).files
    names = [
        name
        for name, entry in records_by_name.items()
        if entry.sha256 is None and is_plain(folder, name) and (folder / name).is_file()
    ]
    # hashed before the manifest is locked
    records = {name: FileRecord.of(folder / name) for name in names}
    with change(folder) as manifest:
        manifest.files |= {
            name: record for name, record in records.items() if name in manifest.files
        }


def is_plain(folder: Path, name: str) -> bool:
    """Whether no part of a listed path below the folder is a symbolic link."""
    place = folder
    for part in PurePosixPath(name).parts:
        place = place / part
        if place.is_symlink():
            return False
    return True


def state_of(folder: Path, name: str, entry: FileRecord, *, with_hash: bool = True) -> State:
    """Return whether a listed file is as it was written.

    with_hash: compare its digest. Otherwise a file above SMALL bytes counts as intact if it has the
    recorded size and time, so that reading a model of gigabytes takes no more time.
    """
    path = folder / name
    if not is_plain(folder, name):
        return "link"
    try:
        status = path.stat()
    except OSError:
        return "missing"
    if not path.is_file():
        return "changed"
    if entry.sha256 is None:
        return "growing"
    if status.st_size != entry.size:
        return "changed"
    if not with_hash and status.st_size > SMALL and status.st_mtime_ns == entry.mtime_ns:
        return "intact"
    return "intact" if file_digest(path) == entry.sha256 else "changed"


def verify(folder: Path) -> list[FileState]:
    """Return the state of every listed file of a marked folder and of marked folders inside it.

    All files are hashed. Raises UserError if the folder has no mark.
    """
    manifest = read(folder)
    if manifest is None:
        raise UserError(
            f"{folder} has no manifest ({MARK}): concept_eraser did not write it, or an "
            "early version did, or it was copied without its hidden files. Copy it with "
            "them (cp -r)"
        )
    states = [
        FileState(name, state_of(folder, name, entry))
        for name, entry in sorted(manifest.files.items())
    ]
    for inner in marked_inside(folder):
        prefix = inner.relative_to(folder).as_posix()
        content = read(inner) or Manifest("")
        states += [
            FileState(f"{prefix}/{name}", state_of(inner, name, entry))
            for name, entry in sorted(content.files.items())
        ]
    return states


def marked_inside(folder: Path) -> list[Path]:
    """Return the marked folders below a marked folder, outermost first.

    Results that were set aside are left out, and links are not followed.
    """
    places = []
    for place, folders, _ in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(ASIDE))
        if Path(place) != folder and (Path(place) / MARK).is_file():
            places.append(Path(place))
    return places


def unlisted_files(folder: Path) -> list[str]:
    """Return a user's own files below a marked folder.

    No manifest there lists them.
    """
    user_files = []
    for place, folders, files in os.walk(folder):
        path_of_folder = Path(place)
        manifest = read(path_of_folder) if (path_of_folder / MARK).is_file() else None
        if manifest is not None and path_of_folder != folder:
            user_files += [
                f"{path_of_folder.relative_to(folder).as_posix()}/{name}"
                for name in unlisted_files(path_of_folder)
            ]
            folders.clear()
            continue
        content = read(folder)
        for name in files:
            path = (path_of_folder / name).relative_to(folder).as_posix()
            is_internal = name in OURS or (name.startswith(".") and name.endswith(_HALF_WRITTEN))
            if (
                not is_internal
                and content is not None
                and path not in content.files
                and not _within(path, content.folders)
            ):
                user_files.append(path)
    return sorted(user_files)


def _within(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def require_intact(path: Path) -> None:
    """Raise UserError if a file, or a file below a folder, is no longer as it was written.

    Files that no manifest lists are not checked, since they are the user's. A link that leads out
    of a marked folder is refused: a run folder of a stranger must not give access to another file.
    """
    path = path.resolve() if ".." in path.parts else path
    folder = folder_of(path)
    if folder is None:
        return
    manifest = read(folder)
    if manifest is None:
        return
    below = "" if path == folder else path.relative_to(folder).as_posix()
    if manifest.kind in CLOSED:
        _require_no_way_out(folder, path)
    for name, entry in manifest.files.items():
        if below and name != below and not name.startswith(f"{below}/"):
            continue
        state = state_of(folder, name, entry, with_hash=False)
        if state == "changed":
            raise UserError(
                f"{folder / name} is not what concept_eraser wrote: it is damaged, or "
                "somebody changed it. Make it again, or accept it as it is with: "
                f"{shell_command('verify', folder, '--accept')}"
            )
        if state == "link":
            raise UserError(
                f"{folder / name} is a link where a file was written; it is not read. "
                "Put the file in its place"
            )
        if state == "missing" and name.endswith(".safetensors"):
            raise UserError(
                f"{folder / name} is missing, which was written with the others; copy the "
                "whole folder again"
            )


def _require_no_way_out(folder: Path, path: Path) -> None:
    """Raise UserError if a path, or its content, leads out of a marked folder by symbolic links."""
    root = os.path.realpath(folder)
    pending, targets = [path], set()
    while pending:
        place = pending.pop()
        target = os.path.realpath(place)
        if not Path(target).is_relative_to(root):
            raise UserError(
                f"{place} is, or lies behind, a link that leads out of {folder}; it is "
                "not followed. Put the file itself in its place"
            )
        if target not in targets:
            targets.add(target)
            below = (
                Path(top) / name
                for top, folders, files in os.walk(target)
                for name in (*folders, *files)
            )
            pending += [one for one in below if one.is_symlink()]
