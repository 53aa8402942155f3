"""Faults of a place for a store, injected where Python and SQLite write; none needs root or a mount."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

Fault = Callable[[Path], AbstractContextManager[None]]

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@contextmanager
def no_room(path: Path) -> Iterator[None]:
    """No file of this process can grow, as on a full disk; this holds for SQLite, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Nothing below `path` can be opened for writing, created or removed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, writes in (
            ("open", lambda flags=0, *_: flags & WRITING),
            ("mkdir", lambda *_: True),
            ("unlink", lambda *_: True),
            ("rename", lambda *_: True),
        ):
            patch.setattr(os, name, _refuse_below(path, getattr(os, name), writes))
        yield


def _refuse_below(path: Path, call: Callable[..., Any], writes: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(name: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(name, str | Path) and Path(name).is_relative_to(path) and writes(*args):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(name))
        return call(name, *args, **kwargs)

    return refusing


FAULTS: dict[str, Fault] = {"no room": no_room, "read-only": read_only}
