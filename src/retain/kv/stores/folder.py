"""Objects as files of a folder, for their owner alone. Files are written whole, and survive a power failure.

What else is in the folder is left alone: a link in the place of an object, or in a listing, is not followed, and what
is no file or cannot be entered is skipped.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from retain.files import make_private_folder, quote
from retain.kv.stores.bucket import ObjectInfo
from retain.kv.stores.span import IO_ALIGNMENT, alloc_aligned
from retain.types import Bytes

log = logging.getLogger(__name__)

MAX_PARTS = 3  # of an object's name
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR)  # in the place of an object
DRAFT_NAME = re.compile(r"(?:.*/)?\.[^/]+\.[0-9a-f]{16}")  # of a file that is being written
FOLDER_NAME = re.compile(r"lock|([0-9a-f]{2})+")  # all that a store has in its folder
OLD_NAME = re.compile(r"index\.db|\d+\.kv")  # of a store of version 1


class OpenFile:
    """An open file, read past the page cache where the file system allows it."""

    thread_local = threading.local()  # a buffer for each thread

    def __init__(self, fd: int):
        self.fd = fd

    def read(self, begin: int, end: int) -> Bytes:
        """Read bytes `begin` to `end`, fewer where it ends earlier. They are valid until this thread reads again."""
        skipped = begin % IO_ALIGNMENT  # direct reads start and end at multiples of it
        aligned = -(-(skipped + end - begin) // IO_ALIGNMENT) * IO_ALIGNMENT
        if len(getattr(self.thread_local, "buffer", ())) < max(aligned, 1):
            self.thread_local.buffer = alloc_aligned(max(aligned, IO_ALIGNMENT))
        buffer: Bytes = self.thread_local.buffer
        num_read = os.preadv(self.fd, [buffer[:aligned].data], begin - skipped)
        return buffer[skipped : min(skipped + end - begin, num_read)]

    def close(self) -> None:
        """Close the descriptor of the file."""
        os.close(self.fd)


class Folder:
    """The files of a folder, which other processes may use. See `LocalBucket` for the methods.

    Raises ValueError for what is no folder.
    """

    def __init__(self, path: Path):
        self.path = path
        self.url = str(path)
        with suppress(OSError):  # a folder that cannot be made now is a store that is away
            self._create()

    def _create(self) -> None:
        try:
            make_private_folder(self.path)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"the store {self.path} is no folder: choose another path") from None

    def open(self, name: str) -> OpenFile:
        """Open a file of the folder for reading past the page cache, where the system can."""
        return OpenFile(self._open(name, getattr(os, "O_DIRECT", 0)))

    def _open(self, name: str, flags: int = 0) -> int:
        """Return the descriptor of a file. Raises FileNotFoundError where its name is that of something else."""
        try:
            # Without O_NONBLOCK a pipe would be waited for.
            fd = open_direct(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags)
        except OSError as error:
            raise _missing(name) if error.errno in NO_FILE else error from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _missing(name)
        return fd

    def get(self, name: str, begin: int, end: int) -> Bytes:
        """Read bytes `begin` to `end` of a file; fewer where it ends earlier."""
        with closing(OpenFile(self._open(name))) as file:
            data = np.empty(max(min(end, os.fstat(file.fd).st_size) - begin, 0), np.uint8)
            num_read = os.preadv(file.fd, [data.data], begin) if len(data) else 0
        return data[:num_read]

    def put(self, name: str, parts: Sequence[Any], overwrite: bool = False) -> bool:
        """Write a file of these buffers. False where it exists and must not be overwritten, or cannot be."""
        path = self.path / name
        self._create()
        num_changed = 1 if path.parent.exists() else MAX_PARTS  # folders with a new name in them
        try:
            make_private_folder(path.parent)
        except OSError as error:
            if error.errno in (*NO_FILE, errno.EEXIST):  # something else has the folder's name
                return False
            raise
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            write_and_sync(draft, parts)
            is_published = _publish(draft, path, overwrite)
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        for folder in path.parents[:num_changed]:
            sync_folder(folder)
        return is_published

    def find(self, name: str) -> ObjectInfo | None:
        """Return the size and age of a file, None where it is missing."""
        try:
            found = os.lstat(self.path / name)
        except OSError as error:
            if error.errno in NO_FILE:
                return None
            raise
        return ObjectInfo(name, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None

    def list(self, folder: str, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the files in a folder, or all for an empty name, by name; only those after `after`."""
        self._create()
        os.stat(self.path)
        yield from self._walk(f"{folder}/" if folder else "", after)

    def _walk(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        """Yield the files below a folder, whose name ends in a slash."""
        try:
            with os.scandir(self.path / prefix) as found:
                entries = [(e.name + "/" * e.is_dir(follow_symlinks=False), e) for e in found]
        except OSError as error:
            if prefix and error.errno in (*NO_FILE, errno.EACCES, errno.EPERM):
                return  # no folder, or none that this user may read
            raise
        for suffix, entry in sorted(entries, key=lambda pair: pair[0]):
            name = prefix + suffix
            if suffix.endswith("/"):
                if name.count("/") < MAX_PARTS and (name > after or after.startswith(name)):
                    yield from self._walk(name, after)
            elif name > after and entry.is_file(follow_symlinks=False):
                with suppress(OSError):  # it was deleted since
                    info = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(name, info.st_size, info.st_mtime)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            os.unlink(self.path / name)


class LockedFolder(Folder):
    """The files of a folder that one process at a time uses, and that nobody else may enter."""

    _lock: int | None = None  # a file descriptor
    _file_system: int | None = None  # of the folder, when it was last locked

    def claim(self) -> bool:
        """Lock the folder that is there now. Returns whether it was not the one that is locked.

        Raises ValueError, in one line, for a folder that must not be used: another process uses it, it has other files
        and others can read them, or it holds a store of version 1. Raises OSError for one that cannot be written.
        """
        path = self.path / "lock"
        if self._lock is not None:
            with suppress(OSError):
                if os.path.samestat(os.fstat(self._lock), os.stat(path)):
                    return False
            self.close()
        file_system = find_file_system(self.path)
        if self._file_system not in (None, file_system) and not path.is_file():
            raise OSError("the file system that it was on is gone")  # do not fill the one below
        self._create()
        _check_folder(self.path)
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise ValueError(f"the store {self.path} is in use by another engine: give each its own") from None
        self._file_system = file_system
        return True

    def close(self) -> None:
        """Let other processes use the folder."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def list(self, folder: str, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the files of a folder, and delete those that nobody writes any more."""
        for info in super().list(folder, after):
            if self._lock is not None and DRAFT_NAME.fullmatch(info.name):
                self.delete(info.name)
            else:
                yield info

    def touch(self, name: str, used_at: float) -> None:
        """Set when a file was last used."""
        os.utime(self.path / name, (used_at, used_at))


def open_direct(path: Path, flags: int, mode: int = 0o600) -> int:
    """Open a file, without O_DIRECT if its file system refuses that. Returns the file descriptor."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags & ~getattr(os, "O_DIRECT", 0) | os.O_CLOEXEC, mode)


def write_and_sync(path: Path, parts: Sequence[Any]) -> None:
    """Write a new file of buffers with sizes that are multiples of IO_ALIGNMENT, and wait until it is on the disk."""
    buffers = [_align(np.frombuffer(part, np.uint8)) for part in parts]
    fd = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0))
    try:
        if os.pwritev(fd, [data.data for data in buffers], 0) < sum(map(len, buffers)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(fd)
    finally:
        os.close(fd)


def _align(data: Bytes) -> Bytes:
    """Return the same bytes at an address that direct writes can begin at."""
    if data.ctypes.data % IO_ALIGNMENT == 0:
        return data
    aligned = alloc_aligned(len(data))
    aligned[:] = data
    return aligned


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def find_file_system(path: Path) -> int:
    """Return the number of the file system that a folder is on, or would be created on. Raises OSError."""
    return next(p for p in (path, *path.absolute().parents) if p.exists()).stat().st_dev


def _publish(draft: Path, path: Path, overwrite: bool) -> bool:
    """Give a file the name of an object. False where something has it."""
    try:
        if overwrite:
            os.replace(draft, path)
        else:
            os.link(draft, path)  # fails where the name is taken, as nothing else does
    except (FileExistsError, IsADirectoryError):
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        if os.path.lexists(path):  # a file system without links
            return False
        os.replace(draft, path)
    return True


def _missing(name: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "there is no such object", name)


def check_version(path: Path) -> None:
    """Raise ValueError for the folder of a store of version 1."""
    if old := next(filter(OLD_NAME.fullmatch, sorted(os.listdir(path))), None):
        raise ValueError(
            f"the store {path} is of version 1, by its file {old}, which this version of retain cannot read: "
            "choose another folder, or remove this one"
        )


def _check_folder(path: Path) -> None:
    """Tighten the mode of a folder and of its lock. Raises ValueError for a folder that must not be used."""
    check_version(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        foreign = next((name for name in sorted(os.listdir(path)) if not FOLDER_NAME.fullmatch(name)), None)
        if foreign is not None:  # it may be a folder like /tmp
            raise ValueError(
                f"others can read the folder {path} (mode {mode:o}), and {quote(foreign)} in it is no file of a store: "
                f"give the store a folder of its own, such as {path / 'retain'}"
            )
        _change_mode(path, 0o700)
    with suppress(FileNotFoundError):
        mode = (path / "lock").lstat().st_mode
        if not stat.S_ISREG(mode):  # opening a pipe would wait for its other end
            raise ValueError(f"lock in the store {path} is no file: remove it, or choose another folder")
        if stat.S_IMODE(mode) & 0o177:
            _change_mode(path / "lock", 0o600)


def _change_mode(path: Path, mode: int) -> None:
    old = stat.S_IMODE(path.stat().st_mode)
    try:
        path.chmod(mode)
    except OSError as error:
        if error.errno != errno.EPERM:  # its owner may not be able to write it now
            raise
        raise ValueError(
            f"others can read {path} (mode {old:o}), which cannot be changed to {mode:o}: {error.strerror}: "
            "give the store a folder of its own"
        ) from None
    log.warning("others could use %s (mode %o): its mode is now %o", path, old, mode)
