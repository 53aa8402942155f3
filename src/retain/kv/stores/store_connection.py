"""The connection to a store's folder: its index while the folder can be written.

A folder that is full, read-only, gone or damaged stops nothing: what is in it is read, nothing is stored, and it is
opened again after a while.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from retain.kv.stores.circuit_breaker import CircuitBreaker
from retain.kv.stores.span import SpanFormat
from retain.kv.stores.sqlite_index import StoredSpan, StoreIndex, find_spans
from retain.kv.stores.store_folder import file_system, is_store
from retain.kv.stores.warning_log import WarningLog

Adopt = Callable[[Sequence[StoredSpan | None]], list[int]]  # spans of the folder to the file numbers not wanted


class StoreConnection:
    """The index of the store in a folder, while it can be written. One thread uses it, after it is opened."""

    def __init__(self, path: Path, span_format: SpanFormat, adopt: Adopt, warnings: WarningLog):
        """Open the index, or find what is in the folder. Raises ValueError for a folder that must not be used.

        `adopt` gets the spans of the folder, the last used first and None for each damaged one, whenever it is opened.
        """
        self.path = path
        self.span_format = span_format
        self.adopt = adopt
        self.warnings = warnings
        self.formats: dict[bytes, dict[str, Any]] = {}  # of all engines that used the folder
        self.breaker = CircuitBreaker()
        self._index: StoreIndex | None = None
        self._device: int | None = None  # of the folder, when it could last be written
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            self._break(error)
            adopt(find_spans(path))

    @property
    def is_writable(self) -> bool:
        """Whether the folder could be written when this was last tried, or may be tried again."""
        return not self.breaker.seconds_until_probe

    def get_index(self) -> StoreIndex | None:
        """Return the index, opened anew if needed; None while the folder cannot be written."""
        if self._index and not self._index.is_in_place():
            self._break(OSError("it was removed or replaced"))
        if not self._index and self.is_writable:
            try:
                self._open()
            except (OSError, ValueError, sqlite3.Error) as error:
                self._break(error)
        return self._index

    def on_error(self, error: Exception) -> None:
        """Close the index after an error that says that it is damaged, or that its files cannot be used any more."""
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorname", "") != "SQLITE_FULL":
            self._break(error)

    def close(self) -> None:
        """Close the index."""
        if self._index:
            self._index.close()

    def _open(self) -> None:
        """Open the folder for writing, and take over what is in it. Raises ValueError, OSError or sqlite3.Error."""
        if self._device is not None and file_system(self.path) != self._device and not is_store(self.path):
            raise OSError("the file system that it was on is gone")  # do not fill the one below
        index = StoreIndex(self.path)
        try:
            found = list(index.load_spans())
            if self.span_format.description:
                self.formats = index.register_format(self.span_format.fingerprint, self.span_format.description)
            index.delete(self.adopt(found))
        except BaseException:
            index.close()
            raise
        self._index = index
        self._device = file_system(self.path)
        self.breaker.close()
        self.breaker.reset_delay()

    def _break(self, error: Exception) -> None:
        """Store nothing for a while."""
        index = self._index
        self._index = None
        if index:
            with suppress(OSError, sqlite3.Error):
                index.close()
        self.breaker.record_failure()
        self.warnings.warn(f"tier disk: {self.path} cannot be written: nothing is stored until it can be", error)
