"""The disk tier: a folder with everything that was computed, bounded, and found again after a restart.

A span's file is written completely and synced before it gets its name. Files are read and written past the page cache
where the file system allows it: memory has a tier of its own. See docs/design/stores.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from retain.kv.stores.folder import LockedFolder
from retain.kv.stores.span import UNKNOWN_FORMAT, Span, SpanFormat
from retain.kv.stores.store import Store
from retain.kv.stores.throttle import Throttle
from retain.options import Size, check_bounds
from retain.plugins import check_choice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tier:
    """Options of the disk tier. Raises ValueError."""

    path: str
    capacity: Size
    evict: str = "lru"  # or lfu
    read: Size | None = None  # most bytes read per second

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("evict", self.evict, "lru", "lfu")

    def of_rank(self, rank: int, size: int) -> Tier:
        """Return the tier of a rank: a folder of its own, and its part of the capacity."""
        return replace(self, path=f"{self.path}/rank-{rank}-of-{size}", capacity=self.capacity // size)

    def open(self, span_format: SpanFormat = UNKNOWN_FORMAT) -> DiskStore:
        """Open the store in the folder, which is created if needed.

        Raises ValueError for a folder that must not be used; one that cannot be written is used as far as it can be.
        """
        return DiskStore(self, span_format)


class DiskStore(Store):
    """A store in a folder of this engine alone. One thread writes."""

    name = "disk"

    def __init__(self, options: Tier, span_format: SpanFormat):
        self.folder = LockedFolder(expand_path(options.path))
        super().__init__(self.folder, span_format, options.capacity, options.evict)
        self.throttle = Throttle(options.read)
        try:
            self._claim()
            self._submit(self._change, "delete spans", self._delete_unusable)
        except OSError as error:
            self._fail("cannot be written: nothing is stored until it can be", error)
            with suppress(OSError):
                self.catalog.update_all()
        self._log_event("opened")

    def touch(self, spans: Sequence[Span]) -> None:
        """Record a use of these spans, also in their files."""
        super().touch(spans)
        self._submit(self._save_usage, list(spans))

    def close(self) -> None:
        """Finish pending writes, and let other processes use the folder."""
        try:
            super().close()
        finally:
            self.folder.close()

    def _claim(self) -> None:
        """Lock the folder that is there, and index what is in it. Raises ValueError or OSError."""
        if not self.folder.claim():
            return
        num_known = self.catalog.num_damaged
        self.catalog.unusable.clear()  # a folder that was away has its spans still, also those whose loads failed then
        try:
            self.catalog.update_all()
            if self.catalog.other_version:
                raise ValueError(
                    f"a file in the store {self.folder.path} cannot be used: {self.catalog.other_version}: "
                    "choose another folder, or remove this one"
                )
        except BaseException:
            self.folder.close()
            raise
        num_damaged = self.catalog.num_damaged - num_known
        num_excess = self.catalog.evict(0)
        self._count("damaged", num_damaged)
        if num_damaged or num_excess:
            log.info("tier disk: dropped %d damaged spans, and %d beyond the capacity", num_damaged, num_excess)

    def _change(self, action: str, task: Callable[[], None]) -> None:
        def claim_and_change() -> None:
            self._claim()
            task()
            self.breaker.close()
            self.breaker.reset_delay()

        super()._change(action, claim_and_change)

    def _save_usage(self, spans: Sequence[Span]) -> None:
        for span in spans:
            with suppress(OSError):
                self.folder.touch(span.name, span.last_used_at)


def expand_path(path: str) -> Path:
    """Return a path with `~` replaced. Raises ValueError."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"disk: path={path}: there is no such user") from None
