"""Output folders: a run, an evaluation, an attack, a set of images. A mark identifies them.

    with locks.hold_lock(folder, "erase"):
        claim(folder, "run", alone=True)
        ...                                  # writers list what they write
        seal(folder); remove_set_aside(folder)

With `--overwrite` earlier files are first moved aside, into `.replaced-1` of the same folder. They
are removed when the new result is complete. A file that the user has changed, or that the manifest
does not list, is not removed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from concept_eraser.storage import locks, manifest, writers
from concept_eraser.storage.manifest import ASIDE, MARK, OURS, Manifest
from concept_eraser.storage.readers import cannot
from concept_eraser.utils.errors import UserError


def is_empty(folder: Path) -> bool:
    """Whether a folder holds nothing but the lock and half-written marks, or does not exist."""
    if not folder.is_dir():
        return True
    try:
        return all(
            (path.name in OURS and path.name != MARK) or manifest.is_half_written(path.name)
            for path in folder.iterdir()
        )
    except OSError as error:
        raise UserError(cannot("read", folder, error)) from None


def require_claimable(
    folder: Path, kind: str, *, alone: bool = False, inside: Path | None = None
) -> bool:
    """Whether a folder has the mark of this package already. Nothing is changed.

    Args:
        folder: the output folder; it may be missing.
        kind: the kind of result: "run", "evaluation", "attack", "images", ...
        alone: the folder must be empty, or marked as of this kind. Otherwise it may also hold a
            user's files.
        inside: a run folder that the output folder belongs to: no link may lead out of it.

    Raises:
        UserError: the folder is a file or a link out of `inside`, or (alone) holds something else.
    """
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is a file; give a folder with --output")
    if inside is not None and not folder.resolve().is_relative_to(inside.resolve()):
        raise UserError(
            f"{folder} is a link that leads out of {inside}; remove it, or give another "
            "place with --output"
        )
    mark = manifest.read(folder)
    if not alone:
        return mark is not None
    is_occupied = mark is None and not is_empty(folder)
    if is_occupied:
        mark = manifest.read(folder)  # another process may have written it since the first look
    if is_occupied and mark is None:
        raise UserError(
            f"{folder} is not empty and concept_eraser did not make it, so nothing in it "
            "is replaced; give a new folder with --output"
        )
    if mark is not None and mark.kind != kind:
        raise UserError(
            f"{folder} is the folder of another kind of result ({mark.kind}, not "
            f"{kind}); give another one with --output"
        )
    return mark is not None


def claim(folder: Path, kind: str, *, alone: bool = False, inside: Path | None = None) -> None:
    """Mark a folder if it has no mark. Arguments and errors: see `require_claimable`."""
    if not require_claimable(folder, kind, alone=alone, inside=inside):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with manifest.hold(folder):
                # another process of the same launch may have been first
                if manifest.read(folder) is None:
                    manifest.write(folder, Manifest(kind))
                    writers.expect_anew(folder)
        except OSError as error:
            raise UserError(
                f"{cannot('write to', folder, error)}, or give another --output"
            ) from None


@contextmanager
def results(
    folder: Path, kind: str, names: Iterable[str] = (), *, inside: Path | None = None
) -> Iterator[None]:
    """Hold the lock of a folder of results. The caller marks it with `claim` before writing.

    Errors in writing are raised here, before the work: the folder must be writable, and must not
    hold other files with the names `names`.

    Args:
        folder: where results go; it may be a run folder, or hold a user's own files.
        kind: the kind of the results, e.g. "evaluation"; also the lock's purpose.
        names: the names of the files that will be written.
        inside: a run folder that the folder belongs to: no link may lead out of it.

    Raises:
        UserError: see `require_claimable`, `locks.hold_lock` and `writers.require_free`. Or the
            folder has the name of a file.
    """
    if folder.suffix in (".json", ".html", ".md") and not folder.is_dir():
        raise UserError(
            f"output is a folder, found {folder}; give the folder that the files go into"
        )
    require_claimable(folder, kind, inside=inside)
    with locks.hold_lock(folder, f"write the {kind}"):
        for name in names:
            writers.require_free(folder / name)
        yield


def seal(folder: Path) -> None:
    """Record the digests of the files of a marked folder that no longer grow."""
    manifest.seal(folder)
    writers.expect_anew(folder)


def accept(folder: Path) -> list[str]:
    """Record the present state of the files of a marked folder.

    Returns the names whose record changed.

    A missing file is removed from the record. A link is never accepted: put the file itself in its
    place.
    """
    names = []
    for place in [folder, *manifest.marked_inside(folder)]:
        with manifest.change(place) as content:
            for name, entry in list(content.files.items()):
                state = manifest.state_of(place, name, entry)
                if state == "missing" or (state == "changed" and not (place / name).is_file()):
                    del content.files[name]
                elif state == "changed":
                    content.files[name] = manifest.FileRecord.of(place / name)
                else:
                    continue
                names.append((place / name).relative_to(folder).as_posix())
    return names


def make(folder: Path, kind: str) -> bool:
    """Make a new marked folder. Returns False if the name is taken.

    Of two processes that call it at once, one gets the folder. Raises UserError if it cannot be
    made.
    """
    locks.make_folder(folder.parent)
    try:
        folder.mkdir()
        manifest.write(folder, Manifest(kind))
    except FileExistsError:
        return False
    except OSError as error:
        raise UserError(f"{cannot('make', folder, error)}, or give another place") from None
    writers.expect_anew(folder)
    return True


def discard(folder: Path) -> None:
    """Remove a marked folder with the files and folders that its manifest lists.

    A user's own files stay, and then the folder too. An unmarked folder is only removed if it is
    empty.
    """
    content = manifest.read(folder) or Manifest("")
    for name in content.files:
        if manifest.is_plain(folder, name) and (folder / name).is_file():
            (folder / name).unlink()
            _remove_empty_folders((folder / name).parent, folder)
    for name in content.folders:
        if manifest.is_plain(folder, name):
            _remove_tree(folder / name)
    (folder / MARK).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def own_folder(folder: Path, name: str) -> Path:
    """Make a folder below a marked one for another library, e.g. a tracker.

    If this package made it, its whole content belongs to the result. Raises UserError if the name
    is taken by a file or a link.
    """
    place = folder / name
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise UserError(f"{place} is no folder; move it away, or give another --output")
    if not place.exists():
        place.mkdir(parents=True)
        if manifest.read(folder) is not None:
            with manifest.change(folder) as content:
                content.folders = sorted({*content.folders, name})
    return place


def set_aside(folder: Path, keep: Collection[str] = ()) -> Path | None:
    """Move every listed file of a marked folder and of marked folders inside it into `.replaced-N`.

    The mark is moved too, so that the earlier result stays complete. The folder gets a new mark.

    Args:
        folder: a marked folder.
        keep: names of listed files that are not moved, e.g. prompt files that the new recipe reads.

    Returns:
        their new place; None if there was nothing to move.

    Raises:
        UserError: the folder has no mark, or a file cannot be moved.
    """
    content = manifest.read(folder)
    if content is None:
        raise UserError(
            f"{folder} has no mark of concept_eraser, so nothing in it is replaced; give a new "
            "folder with --output"
        )
    aside = next(
        place for n in range(1, 10_000) if not os.path.lexists(place := folder / f"{ASIDE}{n}")
    )
    try:
        any_moved = _move(folder, aside, content, keep)
        for inner in manifest.marked_inside(folder):
            inner_content = manifest.read(inner)
            if inner_content is not None:
                any_moved |= _move(inner, aside / inner.relative_to(folder), inner_content)
                (inner / MARK).unlink()
                _remove_empty_folders(inner, folder)
        remaining = {name: entry for name, entry in content.files.items() if name in keep}
        manifest.write(folder, Manifest(content.kind, remaining))
        writers.expect_anew(folder)
    except OSError as error:
        raise UserError(
            f"{cannot('set aside what is in', folder, error)}. The moved files are in {aside}"
        ) from None
    return aside if any_moved else None


def _move(folder: Path, aside: Path, content: Manifest, keep: Collection[str] = ()) -> bool:
    """Move the files that a manifest lists. Returns whether there were any."""
    any_moved = False
    inside = tuple(f"{name}/" for name in content.folders)
    for name in [*content.folders, *(one for one in content.files if not one.startswith(inside))]:
        path = folder / name
        if (
            name in keep
            or not os.path.lexists(path)
            or not manifest.is_plain(folder, str(PurePosixPath(name).parent))
        ):
            continue
        target = aside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(path, target)
        any_moved = True
        _remove_empty_folders(path.parent, folder)
    if any_moved:
        manifest.write(aside, content)
    return any_moved


def _remove_empty_folders(place: Path, root: Path) -> None:
    """Remove an empty folder, and its empty parents below the root."""
    while root in place.parents:
        try:
            place.rmdir()
        except OSError:
            return
        place = place.parent


def places_set_aside(folder: Path) -> list[Path]:
    """Return the places of earlier results of a folder that are not removed yet."""
    return sorted(
        place for place in folder.glob(f"{ASIDE}*") if place.is_dir() and not place.is_symlink()
    )


def remove_set_aside(folder: Path) -> list[Path]:
    """Remove the earlier results of a folder, since the new result is complete.

    Only files that their manifest lists and whose content is unchanged are removed.

    Returns:
        files that stay, since somebody changed or added them.
    """
    for aside in places_set_aside(folder):
        for place in [*reversed(manifest.marked_inside(aside)), aside]:
            content = manifest.read(place) if (place / MARK).is_file() else None
            for name, entry in (content.files if content else {}).items():
                path = place / name
                is_changed = manifest.state_of(place, name, entry, with_hash=False) not in (
                    "intact",
                    "growing",
                )
                if os.path.lexists(path) and not is_changed:
                    path.unlink()
                    _remove_empty_folders(path.parent, folder)
            for name in content.folders if content else ():
                if manifest.is_plain(place, name):
                    _remove_tree(place / name)
            remaining = [p for p in place.rglob("*") if p.name != MARK] if place.is_dir() else []
            if place.is_dir() and not remaining:
                (place / MARK).unlink(missing_ok=True)
                _remove_empty_folders(place, folder)
    return [
        path
        for aside in places_set_aside(folder)
        for path in aside.rglob("*")
        if path.is_file() and path.name != MARK
    ]


def _remove_tree(folder: Path) -> None:
    """Remove a folder whose whole content belongs to a result (a manifest names the folder)."""
    for place, folders, files in os.walk(folder, topdown=False):
        for name in files:
            (Path(place) / name).unlink(missing_ok=True)
        for name in folders:
            path = Path(place) / name
            with suppress(OSError):
                path.unlink() if path.is_symlink() else path.rmdir()
    with suppress(OSError):
        folder.rmdir()
