"""What is below the pool in `retain bench prefix`: one method, its tiers, and how everything goes to sleep.

What is not known here: workloads, figures.
"""

from __future__ import annotations

import numpy as np

from retain import build
from retain.kv.fetch import LayerLoader
from retain.kv.reuse import SelectiveConfig, Ints, PrefixConfig, PrefixCache
from retain.kv.selective import SelectiveLoader
from retain.kv.tiers import parse
from retain.kv.tiers.disk import DiskStore
from retain.llm import LLM

DISK, SLOW = "disk:path={store},capacity=20GB", "disk:path={store},capacity=20GB,read=200MB"
METHODS = {
    "recompute": "",
    "memory": "",
    "ram": "ram:capacity=4GiB",
    "ssd": DISK,
    "h2o": DISK,
    "important": DISK,
    "ssd-200": SLOW,
    "h2o-200": SLOW,
    "important-200": SLOW,
    "important-lru": "ram:capacity={hot} " + SLOW,
    "important-lfu": "ram:capacity={hot},evict=lfu " + SLOW,
    "important-worth": "ram:capacity={hot},evict=worth " + SLOW,
    "lru": "ram:capacity=256MiB " + DISK,
    "lfu": "ram:capacity=256MiB,evict=lfu " + DISK,
}


class AllKeys(SelectiveLoader):
    """As H2O loads in the paper's comparison: all keys, to find what is important, and then the values of that; spans
    stay in the order of their text. (As many bytes are read, of whole rows, and in one go: kind to it.)
    """

    @property
    def is_selective(self) -> bool:
        """See Selective."""
        return True

    def _prefetch(self, m: int) -> Ints:
        for p in self.ranges:
            n = round((1 - self.probe_config.ratio) / 2 * p.span.num_blocks[m])  # the keys of chosen rows come with their values
            self._count_bytes(p.store, self.readers[p.span].read_blocks(m, 0, n).size)
        return np.zeros(0, np.int32)

    def finish(self) -> bool:
        """See Selective; nothing is remembered."""
        return LayerLoader.finish(self)


class Below:
    """The tiers of a method under an engine's pool. `store`: a folder for them."""

    def __init__(self, llm: LLM, reuse: PrefixCache, method: str, ratio: float, store: str, hot: str):
        self.llm, self.reuse, self.method, self.ratio = llm, reuse, method, ratio
        self.tiers = METHODS[method].format(store=store, hot=hot)
        self.before = 0  # bytes that were read before the last restart
        reuse.tree.clear()
        llm.cache.prefix_cache = None if method == "recompute" else reuse
        self._open()

    def _open(self) -> None:
        if self.tiers:
            chooses = self.method.startswith(("important", "h2o"))
            reused = SelectiveConfig(ratio=self.ratio) if chooses else PrefixConfig()
            tiers = [parse(t) for t in self.tiers.split()]
            self.reuse.set_offloader(build.stores(reused, tiers, self.llm.cache, self.llm.spec, b"bench"))
            self.reuse.selective_loader_class = AllKeys if self.method.startswith("h2o") else SelectiveLoader

    def restart(self) -> None:
        """As far as a disk is concerned."""
        if "disk" in self.tiers:
            self.before = self.read
            self.reuse.close_offloader()
            self._open()

    def sleep(self) -> None:
        """What is in the pool goes to sleep, where there is something below it."""
        if self.tiers:
            self.reuse.tree.evict(self.reuse.tree.num_evictable_pages)

    def settle(self) -> None:
        """Wait until what goes on in the background is done."""
        if self.reuse.offloader:
            self.reuse.offloader.sync()

    @property
    def read(self) -> int:
        """Bytes, from disks, so far."""
        stores = self.reuse.offloader.stores if self.reuse.offloader else ()
        return self.before + sum(s.counts["read"] for s in stores if isinstance(s, DiskStore))

    def close(self) -> None:
        """The engine is as it was."""
        self.llm.cache.prefix_cache, self.reuse.selective_loader_class = self.reuse, SelectiveLoader
        self.reuse.close_offloader()
        self.reuse.tree.clear()
