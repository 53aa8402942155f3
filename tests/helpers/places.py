"""Where a text's checkpoints lie between two requests: in the pool, in memory, in a folder or in an object store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from retain.engine.engine import Engine
from tests.helpers.engines import make_engine
from tests.helpers.stored_spans import data_offset, span_files
from tests.helpers.tiers import offloader_of

TIERS = {
    "memory": "ram:capacity=100MB",
    "folder": "disk:path={},capacity=100MB",
    "object store": "remote:url=file://{}/kv,refresh=0.01",
}
RESTARTED = ("folder after a restart", "object store after a restart")
PLACES = ("pool", *TIERS, *RESTARTED)


class Place:
    """An engine, and where the checkpoints lie of which its pool has been emptied. `options` are of `make_engine`."""

    def __init__(self, name: str, path: Path, **options: Any):
        self.name = name
        self.path = path
        self.options = options
        self.num_kills = 0
        self.engines = [self._open()]

    @property
    def engine(self) -> Engine:
        """The engine of the next request."""
        return self.engines[-1]

    @property
    def is_pool(self) -> bool:
        """Whether nothing is stored."""
        return self.name == "pool"

    @property
    def survives(self) -> bool:
        """Whether another engine finds what this one left."""
        return self.name not in ("pool", "memory")

    @property
    def folder(self) -> Path:
        """The folder of the store."""
        return self.path / str(self.num_kills)

    def _open(self) -> Engine:
        tier = TIERS.get(self.name.removesuffix(" after a restart"))
        tiers = [tier.format(self.folder)] if tier else []
        engine = make_engine(prefix_cache="exact", tiers=tiers, **{"max_running_requests": 8, **self.options})
        for store in offloader_of(engine).stores if tiers else ():
            store.sync()
        return engine

    def pause(self) -> None:
        """Empty the pool, unless that is the place, or open another engine."""
        if self.is_pool:
            return
        tree = self.engine.cache.prefix_cache.tree
        tree.evict(tree.num_evictable_pages)
        self.sync()
        if self.name in RESTARTED:
            self.restart()

    def sync(self) -> None:
        """Wait until all is written."""
        if not self.is_pool:
            offloader_of(self.engine).sync()

    def restart(self, options: dict[str, Any] | None = None) -> None:
        """Open another engine, with the same options or others."""
        self.close()
        self.options = options or self.options
        self.engines = [self._open()]

    def kill(self) -> None:
        """Go on with a copy of the files as they are, with no word to the engine that wrote them."""
        self.sync()
        before = self.folder
        self.num_kills += 1
        if before.exists():
            shutil.copytree(before, self.folder)
        self.engines.append(self._open())

    def close(self) -> None:
        """Close all stores."""
        for engine in self.engines:
            engine.cache.prefix_cache.close_offloader()

    def damage(self, how: Callable[[Path], None]) -> None:
        """Damage each span. Where there are no files they are gone, and so are checkpoints from the pool."""
        tree = self.engine.cache.prefix_cache.tree
        if self.is_pool:
            for node in list(tree.iter_nodes()):
                for key in list(node.checkpoints):
                    tree._drop_checkpoint(node, key)
                tree._prune(node)
        elif self.survives:
            for file in span_files(self.folder):
                how(file)
        else:
            (store,) = offloader_of(self.engine).stores
            for span in list(store.span_index.spans):
                store.delete(span)


def flip_a_first_bit(file: Path) -> None:
    """Change a bit of K."""
    _flip(file, data_offset(file.read_bytes()) + 100)


def flip_a_last_bit(file: Path) -> None:
    """Change a bit of the metadata, which lie behind the last pages, or of these."""
    _flip(file, int(np.flatnonzero(np.fromfile(file, np.uint8))[-1]))


def _flip(file: Path, place: int) -> None:
    data = np.fromfile(file, np.uint8)
    data[place] ^= 4
    data.tofile(file)


def truncate(file: Path) -> None:
    """Leave the first half."""
    os.truncate(file, file.stat().st_size // 2)


def unlink(file: Path) -> None:
    """Delete a file."""
    file.unlink()


DAMAGES = {"first bit": flip_a_first_bit, "last bit": flip_a_last_bit, "half": truncate, "file": unlink}
