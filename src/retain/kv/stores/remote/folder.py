"""Objects as files of a folder, such as a network file system that engines share.

Only their owner may read them. What else is in the folder is left alone: a link in the place of an object, or in a
listing, is not followed, and what is no file or cannot be entered is skipped.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from retain.files import make_private_folder
from retain.kv.stores.remote.bucket import ObjectInfo
from retain.types import Bytes

MAX_PARTS = 3  # of an object's name
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR)  # in the place of an object


class Folder:
    """The files below `file://` and a path. See `Bucket` for the methods. Raises ValueError for what is no folder."""

    def __init__(self, url: str):
        self.url = url
        self.path = Path(url.removeprefix("file://"))
        if not self.path.is_absolute():
            raise ValueError(f"remote: url={url} should be file:// and an absolute path")
        with suppress(OSError):  # a folder that cannot be made now is a store that is away
            self._create()

    def _create(self) -> None:
        try:
            make_private_folder(self.path)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"remote: url={self.url} is no folder: choose another") from None

    def get(self, name: str, begin: int, end: int) -> Bytes:
        """Read bytes `begin` to `end` of an object; fewer where it ends earlier."""
        try:
            # Without O_NONBLOCK a pipe would be waited for.
            file = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _missing(name) if error.errno in NO_FILE else error from None
        with os.fdopen(file, "rb", buffering=0) as opened:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise _missing(name)
            data = np.empty(max(min(end, found.st_size) - begin, 0), np.uint8)
            opened.seek(begin)
            filled = 0
            while filled < len(data) and (size := opened.readinto(data[filled:].data)):
                filled += size
        return data[:filled]

    def put(self, name: str, parts: Sequence[Any], overwrite: bool = False) -> bool:
        """Write an object of these buffers. False where it exists and must not be overwritten, or cannot be."""
        path = self.path / name
        self._create()
        try:
            make_private_folder(path.parent)
        except OSError as error:
            if error.errno in (*NO_FILE, errno.EEXIST):  # something else has the folder's name
                return False
            raise
        written = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            try:
                for part in parts:
                    file.write(part)
                file.flush()
                return _publish(written, path, overwrite)
            finally:
                written.unlink(missing_ok=True)

    def find(self, name: str) -> ObjectInfo | None:
        """Return the size and age of an object, None where it is missing."""
        try:
            found = os.lstat(self.path / name)
        except OSError as error:
            if error.errno in NO_FILE:
                return None
            raise
        return ObjectInfo(name, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None

    def list(self, folder: str, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects in a folder, or all for an empty name, by name; only those after `after`."""
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
        """Delete an object, if it is there."""
        with suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(self.path / name)


def _publish(written: Path, path: Path, overwrite: bool) -> bool:
    """Give a file the name of an object. False where something has it."""
    try:
        if overwrite:
            os.replace(written, path)
        else:
            os.link(written, path)  # fails where the name is taken, as nothing else does
    except (FileExistsError, IsADirectoryError):
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        if os.path.lexists(path):  # a file system without links
            return False
        os.replace(written, path)
    return True


def _missing(name: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "there is no such object", name)
