"""Writers of files and of folders. If the process is killed, the old or the new version is whole.

A file writer never removes a folder, and a folder writer never removes a file that it did not
write. Files in a marked folder (see `manifest`) are listed there with their SHA-256.

An existing file is replaced only if the manifest of its folder lists it, or if the user asked for
it (`overwrite`). New content is written beside its place, flushed to the disk (fsync), then
renamed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from concept_eraser.storage import locks, manifest
from concept_eraser.storage.readers import cannot
from concept_eraser.utils.errors import UserError, quote

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# safetensors and torch wrap the system's error in their own
_FULL_TEXTS = ("No space left", "File too large", "os error 28", "os error 27", "unexpected pos")
# Windows flushes only a file that may be written to
_FLUSHED = os.O_RDWR if sys.platform == "win32" else os.O_RDONLY
_PARTIAL = re.compile(r"\.(.+)\.(\d+)-[0-9a-f]{8}\.partial")


def write_file(
    path: Path, write: Callable[[Path], None], *, overwrite: bool = False, growing: bool = False
) -> None:
    """Write a file whole or not at all.

    Args:
        path: the file; missing folders above it are made.
        write: writes the content to the path in its argument, in the same folder.
        overwrite: also replace a file that no manifest lists. A folder is never replaced.
        growing: the file will change, so its digest is recorded when its folder is sealed.

    Raises:
        UserError: `path` is a folder or a link, holds a file of the user, cannot be written to, or
            the disk is full.
    """
    require_free(path, overwrite=overwrite)
    locks.make_folder(path.parent)
    with _Staged(path) as partial:
        write(partial)
        _finish(partial)
        _expect([path])
        os.replace(partial, path)
    _sync_folder(path.parent)
    if not growing:
        manifest.record([path])
        _EXPECTED.discard(path.absolute())


def write_text(path: Path, text: str, *, overwrite: bool = False) -> None:
    """Write a text in UTF-8. Raises UserError as `write_file`."""
    write_file(path, lambda partial: _put(partial, text.encode()), overwrite=overwrite)


def write_bytes(path: Path, content: bytes, *, overwrite: bool = False) -> None:
    """Write bytes. Raises UserError as `write_file`."""
    write_file(path, lambda partial: _put(partial, content), overwrite=overwrite)


def write_json(path: Path, content: Any, *, overwrite: bool = False) -> None:
    """Write a value as JSON, with null for a number that is not finite.

    Raises UserError as `write_file`.
    """
    write_text(path, json.dumps(finite(content), indent=1) + "\n", overwrite=overwrite)


def finite(value: Any) -> Any:
    """Return a value with None for each number that is not finite, since JSON has no nan."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def write_tensors(
    path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str], *, overwrite: bool = False
) -> None:
    """Write tensors by name as safetensors. Equal tensors and metadata give equal bytes.

    Raises UserError as `write_file`.
    """
    from safetensors.torch import save_file

    contiguous = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    # without tensors and metadata safetensors writes a file that it cannot read
    header = dict(metadata) or None
    write_file(
        path, lambda partial: save_file(contiguous, partial, metadata=header), overwrite=overwrite
    )


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append a mapping as one line of JSON, after the fragment of a killed process.

    Raises UserError if the file is a folder or a link, cannot be written to, or the disk is full.
    """
    manifest.require_inside(path)
    locks.make_folder(path.parent)
    _expect([path])
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            fragment = size > 0 and ends_otherwise(file, size)
            file.write((b"\n" if fragment else b"") + (json.dumps(row) + "\n").encode())
    except OSError as error:
        raise UserError(_failure(path, error)) from error


def ends_otherwise(file: IO[bytes], size: int) -> bool:
    """Whether the last byte of an open file of `size` bytes is no line break."""
    file.seek(size - 1)
    return file.read(1) != b"\n"


_EXPECTED: set[Path] = set()  # files that this process has listed without a digest


def _expect(paths: list[Path]) -> None:
    """List files before they are written.

    So no file is missing in the manifest if the process is killed.
    """
    new = [path for path in paths if path.absolute() not in _EXPECTED]
    manifest.expect(new)
    _EXPECTED.update(path.absolute() for path in new)


def expect_anew(folder: Path) -> None:
    """Clear the list of files of a folder, since its manifest is new or its files are sealed."""
    own = folder.absolute()
    _EXPECTED.difference_update([path for path in _EXPECTED if own in path.parents])


def write_growing(path: Path, text: str) -> None:
    """Write the first lines of a file that grows, whole or not at all.

    Raises UserError as `write_file`.
    """
    write_file(path, lambda partial: _put(partial, text.encode()), growing=True)


def write_folder(path: Path, write: Callable[[Path], None], *, kind: str | None = None) -> None:
    """Write a folder whole or not at all, and list its files.

    Args:
        path: the folder. An existing one is replaced only if a manifest lists all of its files.
        write: fills the empty folder in its argument.
        kind: mark the folder as one of this kind, with its own manifest. Otherwise its files are
            listed in the manifest of the marked folder above it.

    Raises:
        UserError: `path` is a file or a link, holds files of the user, cannot be written to, or the
            disk is full.
    """
    require_free_folder(path)
    locks.make_folder(path.parent)
    with _Staged(path) as partial:
        partial.mkdir()
        write(partial)
        names = sorted(p.relative_to(partial) for p in partial.rglob("*") if p.is_file())
        for name in names:
            _finish(partial / name)
        if kind is not None:
            records = {name.as_posix(): manifest.FileRecord.of(partial / name) for name in names}
            manifest.write(partial, manifest.Manifest(kind, records))
        else:
            manifest.expect([path / name for name in names])
        earlier = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.earlier")
        if path.is_dir():
            os.rename(path, earlier)
        os.rename(partial, path)
        shutil.rmtree(earlier, ignore_errors=True)  # all of it is listed, see require_free_folder
    _sync_folder(path.parent)
    if kind is not None:
        return
    manifest.record([path / name for name in names])
    # not earlier: no file may be missing in the list if the process is killed
    manifest.forget(path, keep=[path / name for name in names])


_COPIES: set[Path] = set()  # files that this process has copied, whose bytes stay as they are


def copy_file(path: Path, place: Path) -> None:
    """Copy a file byte for byte to a new place, for the writer of a folder.

    A link is followed, so that the copy is a plain file. The two share no name on the disk, so a
    later change of one does not reach the other. File systems with shared blocks copy no data.

    Raises:
        OSError: The file cannot be read, the place cannot be written, or the disk is full.
    """
    _COPIES.add(place.absolute())
    with path.open("rb") as source, place.open("xb") as target:
        size = os.fstat(source.fileno()).st_size
        try:
            while size > 0 and (part := _copy_range(source.fileno(), target.fileno(), size)) > 0:
                size -= part
        except OSError as error:
            if is_full(error) or target.tell():
                raise
        if size > 0:  # this system has no such call
            shutil.copyfileobj(source, target, 2**20)


def _copy_range(source: int, target: int, count: int) -> int:
    """Copy bytes inside the system. Returns their number, 0 if the system cannot."""
    if not hasattr(os, "copy_file_range"):
        return 0
    return os.copy_file_range(source, target, count)


def give_second_name(path: Path, place: Path) -> None:
    """Give a file a second name, or copy it if the file system has no links."""
    try:
        os.link(path, place)
    except OSError:
        shutil.copyfile(path, place)


def write_files(folder: Path, contents: Mapping[str, Callable[[], bytes]]) -> None:
    """Write many files into a folder, each whole or not at all.

    The manifest is changed once, not for each file.

    Args:
        folder: the folder; a missing one is made.
        contents: functions that return the content of a file, by its name.

    Raises:
        UserError: as `write_file`. Files that were written before the error stay, and are listed.
    """
    paths = [folder / name for name in contents]
    for path in paths:
        require_free(path)
    locks.make_folder(folder)
    manifest.expect(paths)
    written_paths = []
    try:
        for path, content in zip(paths, contents.values(), strict=True):
            with _Staged(path, clear=False) as partial:
                _put(partial, content())
                _finish(partial)
                os.replace(partial, path)
            written_paths.append(path)
    finally:
        _sync_folder(folder)
        manifest.record(written_paths)


def remove_file(path: Path) -> None:
    """Remove a file that a manifest lists, if it is there.

    Raises UserError for a file that none lists.
    """
    if not os.path.lexists(path):
        return
    if not is_listed(path):
        raise UserError(
            f"{path} was not written by concept_eraser, so it is not removed; remove it yourself"
        )
    path.unlink()
    manifest.forget(path)


def require_free(path: Path, *, overwrite: bool = False) -> None:
    """Raise UserError if a path holds something that prevents writing a file there."""
    if "\0" in str(path):
        raise UserError(f"{quote(str(path))} cannot be the name of a file; give another one")
    manifest.require_inside(path)
    if not os.path.lexists(path):
        return
    if path.is_dir() and not path.is_symlink():
        raise UserError(f"{path} is a folder; give the name of a file")
    if overwrite and not path.is_symlink():
        return
    if path.is_symlink():
        raise UserError(
            f"{path} is a link, which is not written through; give another name with "
            "--output, or remove the link"
        )
    if not is_listed(path):
        raise UserError(
            f"{path} exists and was not written by concept_eraser; give another name "
            "with --output, or move it away"
        )


def require_free_folder(path: Path) -> None:
    """Raise UserError if a path holds something that prevents writing a folder there."""
    manifest.require_inside(path)
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise UserError(
            f"{path} is {'a link' if path.is_symlink() else 'a file'}; give the name of "
            "a new folder"
        )
    if (path / manifest.MARK).is_file():
        raise UserError(
            f"{path} holds another result of concept_eraser, which is not replaced; give "
            "another --output, or remove it"
        )
    for place, _, files in os.walk(path):
        for name in files:
            if not is_listed(Path(place) / name):
                raise UserError(
                    f"{Path(place) / name} was not written by concept_eraser, so {path} "
                    "is not replaced; give another --output, or move it away"
                )


def probe(path: Path) -> None:
    """Raise UserError if nothing can be written beside a path. It is called before the work.

    Folders that are made for the probe are removed again.
    """
    new_folders = locks.make_folder(path.parent)
    partial = path.with_name(f".probe.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        _put(partial, b"")
    except OSError as error:
        raise UserError(_failure(path, error)) from None
    finally:
        _remove(partial)
        locks.remove_empty(new_folders)


def is_listed(path: Path) -> bool:
    """Whether the nearest marked folder lists a file."""
    folder = manifest.folder_of(path.parent)
    content = manifest.read(folder) if folder is not None else None
    return (
        folder is not None
        and content is not None
        and path.relative_to(folder).as_posix() in content.files
    )


class _Staged:
    """A temporary path beside a target for its content. It is removed after an error."""

    def __init__(self, path: Path, *, clear: bool = True) -> None:
        self.path, self.clear = path, clear
        self.partial = path.with_name(
            f".{path.name[:120]}.{os.getpid()}-{secrets.token_hex(4)}.partial"
        )

    def __enter__(self) -> Path:
        if self.clear:
            _remove_left_over(self.path)
        return self.partial

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        _remove(self.partial)
        if isinstance(error, UserError):
            return
        if is_full(error) or isinstance(error, OSError):
            raise UserError(_failure(self.path, error)) from error


def _remove_left_over(path: Path) -> None:
    """Remove the unfinished files of a killed process for the same target."""
    for other in (
        path.parent.glob(f".{_escape(path.name[:120])}.*.partial") if path.parent.is_dir() else ()
    ):
        parts = _PARTIAL.fullmatch(other.name)
        if parts and parts[1] == path.name[:120] and not locks.is_alive(int(parts[2])):
            _remove(other)


def _escape(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _put(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)


def _finish(path: Path) -> None:
    """Flush a file to the disk.

    The header of safetensors is sorted first, so that equal content has equal bytes. A copy stays
    as it is.
    """
    is_copy = path.absolute() in _COPIES
    _COPIES.discard(path.absolute())
    if not is_copy and (path.suffix == ".safetensors" or _is_tensors(path)):
        order_header(path)
    descriptor = os.open(path, _FLUSHED)
    try:
        permissions = os.fstat(descriptor).st_mode & 0o777
        # safetensors sets these; the user's umask decides what others may read
        if permissions == 0o600:
            os.fchmod(descriptor, 0o666 & ~_umask())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """Return the permissions that this process removes from new files.

    Reading them also sets them for a moment.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _is_tensors(path: Path) -> bool:
    parts = _PARTIAL.fullmatch(path.name)
    return parts is not None and parts[1].endswith(".safetensors")


def order_header(path: Path) -> None:
    """Sort the metadata in the header of a safetensors file, in place.

    The library writes them in random order.
    """
    with path.open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        text = file.read(length)
        header = json.loads(text)
        if "__metadata__" not in header or len(header["__metadata__"]) < 2:
            return
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text_in_order = (
            json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        )
        if len(text_in_order) == length:
            file.seek(8)
            file.write(text_in_order)


def _sync_folder(folder: Path) -> None:
    """Flush a rename to the disk, if the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk is full or a limit of size is reached."""
    return getattr(error, "errno", None) in _FULL or any(text in str(error) for text in _FULL_TEXTS)


def _failure(path: Path, error: BaseException) -> str:
    if is_full(error):
        return (
            f"cannot write {path}: the disk is full or a size limit is reached; earlier "
            "files are intact. Free some space, then repeat the command"
        )
    code = getattr(error, "errno", None)
    if code == errno.ELOOP:
        return (
            f"{path} is a link, which is not written through; give another name with "
            "--output, or remove the link"
        )
    if code == errno.EISDIR:
        return f"{path} is a folder; give the name of a file"
    if code in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"cannot write {path}: this user may not, or it is read-only; give another --output"
    if code == errno.ENAMETOOLONG:
        return f"cannot write {path}: the name is too long for this system; give a shorter one"
    return cannot("write", path, error)
