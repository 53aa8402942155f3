"""Small file helpers: the cache folder, atomic writes, JSON objects, and quotes of a file's text in errors."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def get_cache_dir() -> Path:
    """Return the folder of cached files: $RETAIN_CACHE, else retain/ in $XDG_CACHE_HOME or ~/.cache.

    The folder may not exist yet.
    """
    if folder := os.environ.get("RETAIN_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "retain"


def make_private_folder(path: Path) -> None:
    """Create a folder that only its owner may enter, and likewise its missing parents. Raises OSError.

    `Path.mkdir` would give the parents the mode that the umask leaves. A folder that exists keeps its mode.
    """
    for folder in reversed([each for each in path.parents if not each.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def atomic_write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that other processes see complete or not at all. Creates its folder. Raises OSError.

    Only its owner may read the file.
    """
    make_private_folder(path.parent)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
        try:
            write(f)
            f.flush()
            os.fsync(f.fileno())
            os.replace(f.name, path)
        except BaseException:
            os.unlink(f.name)
            raise


def quote(value: object, limit: int = 100) -> str:
    """Return a value from a file as an error shows it: one line, cut after `limit` characters."""
    return shorten(repr(value), limit)


def shorten(text: object, limit: int = 300) -> str:
    """Return a text as one line of at most `limit` characters. A library's error may contain a whole file."""
    line = " ".join(str(text)[: 4 * limit].split())
    return line if len(line) <= limit else line[:limit] + "..."


def read_json(path: Path) -> Any:
    """Read the JSON in a file. Raises ValueError when the file is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{path}: cannot be read: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: damaged: {shorten(e)}") from e


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises ValueError when the file is missing or holds no object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: damaged: it holds no object")
    return value
