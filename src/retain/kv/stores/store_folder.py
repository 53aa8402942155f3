"""The folder of a store on a disk: only files of the store are in it, and only its owner may read them.

A store holds keys and values, from which prompts can be computed. So its folder has mode 0700 and its files 0600, and
a store that others can read is tightened when it is opened.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from pathlib import Path

from retain.files import make_private_folder, quote

log = logging.getLogger(__name__)

INDEX_FILES = ("index.db", "index.db-wal", "index.db-shm", "index.db-journal")
FILE_NAME = re.compile(r"lock|index\.db(-wal|-shm|-journal)?|\d+\.(kv|tmp)")  # every file of a store


def prepare_folder(path: Path) -> None:
    """Create the folder of a store, or tighten its mode and that of its index.

    Raises ValueError, in one line, for a folder that must not be used: others can read it and it holds other files too,
    or belongs to somebody else; or it or the index is of another kind. Raises OSError for one that cannot be written.
    """
    try:
        make_private_folder(path)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"the store {path} is no folder: choose another path") from None
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        _tighten_folder(path)
    for name in ("lock", *INDEX_FILES):
        file = path / name
        try:
            mode = file.lstat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode):  # opening a pipe would wait for its other end
            raise ValueError(f"{name} in the store {path} is no file: remove it, or choose another folder")
        if stat.S_IMODE(mode) & 0o177:
            _change_mode(file, 0o600)
    # SQLite would create it with the mode that the umask leaves; it gives this file's mode to its other files.
    os.close(os.open(path / "index.db", os.O_RDWR | os.O_CREAT, 0o600))


def _tighten_folder(path: Path) -> None:
    """Let only the owner into a folder. One with other files is left alone: it may be a folder like /tmp."""
    with os.scandir(path) as entries:
        foreign = next((entry.name for entry in entries if not FILE_NAME.fullmatch(entry.name)), None)
    if foreign is not None:
        mode = stat.S_IMODE(path.stat().st_mode)
        raise ValueError(
            f"others can read the folder {path} (mode {mode:o}), and {quote(foreign)} in it is no file of a store: "
            f"give the store a folder of its own, such as {path / 'retain'}"
        )
    _change_mode(path, 0o700)


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


def file_system(path: Path) -> int:
    """Return the number of the file system that a folder is on, or would be created on. Raises OSError."""
    return next(p for p in (path, *path.absolute().parents) if p.exists()).stat().st_dev


def is_store(path: Path) -> bool:
    """Whether a folder holds a store."""
    return (path / "lock").is_file()


def span_file(path: Path, file_number: int) -> Path:
    """Return the path of a span's file in the folder of a store."""
    return path / f"{file_number}.kv"


def is_complete(file: Path, size: int) -> bool:
    """Return whether this is a file, no folder or pipe, and has this size."""
    try:
        found = file.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def remove_file(file: Path) -> None:
    """Remove a file of a store. A folder in its place is ignored, with a warning. Raises OSError."""
    try:
        file.unlink(missing_ok=True)
    except OSError:
        if not file.is_dir():
            raise
        log.warning("%s is a folder, no file of a store: it is ignored", file)
