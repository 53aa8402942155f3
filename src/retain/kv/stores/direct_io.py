"""Reads and writes of files past the page cache, where the file system allows it."""

from __future__ import annotations

import os
from pathlib import Path

from retain.types import Bytes

WRITE_CHUNK = 2**24  # bytes of one write


def open_direct(path: Path, flags: int) -> int:
    """Open a file with O_DIRECT, or without it if the file system refuses. Returns the file descriptor."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except FileNotFoundError:
        raise
    except OSError:
        return os.open(path, flags, 0o600)


def write_and_sync(path: Path, data: Bytes) -> None:
    """Write a new file, and wait until its bytes are on the disk. `data` is aligned in address and size."""
    fd = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        at = 0
        while at < len(data):
            at += os.pwritev(fd, [data[at : at + WRITE_CHUNK].data], at)
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
