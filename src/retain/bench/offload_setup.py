"""The tiers of a method of `retain bench prefix`, under an engine's pool."""

from __future__ import annotations

import numpy as np

from retain import factory
from retain.bench.config import PrefixBenchConfig
from retain.kv.offload.loader import LayerLoader
from retain.kv.offload.selective.loader import SelectiveLoader
from retain.kv.offload.tiers import parse
from retain.kv.offload.tiers.disk import DiskStore
from retain.kv.offload.tiers.remote import RemoteStore
from retain.kv.prefix.cache import PrefixCache
from retain.kv.prefix.config import PrefixConfig, SelectiveConfig
from retain.kv.prefix.null_cache import NullPrefixCache
from retain.llm import LLM
from retain.plugins import format_size
from retain.types import Ints

DISK_TIER = "disk:path={store},capacity=20GB"
SLOW_DISK_TIER = "disk:path={store},capacity=20GB,read=200MB"
METHODS = {
    "recompute": "",
    "memory": "",
    "ram": "ram:capacity=4GiB",
    "ssd": DISK_TIER,
    "h2o": DISK_TIER,
    "selective": DISK_TIER,
    "ssd-200": SLOW_DISK_TIER,
    "h2o-200": SLOW_DISK_TIER,
    "selective-200": SLOW_DISK_TIER,
    "remote": "remote:{remote}",
    "remote-200": "remote:{remote},read=200MB",
    "selective-remote-200": "remote:{remote},read=200MB",
    "selective-lru": "ram:capacity={hot} " + SLOW_DISK_TIER,
    "selective-lfu": "ram:capacity={hot},evict=lfu " + SLOW_DISK_TIER,
    "selective-importance": "ram:capacity={hot},evict=importance " + SLOW_DISK_TIER,
    "lru": "ram:capacity=256MiB " + DISK_TIER,
    "lfu": "ram:capacity=256MiB,evict=lfu " + DISK_TIER,
}


class AllKeysLoader(SelectiveLoader):
    """Loads as H2O does in IMPRESS's comparison: all keys, to find the important tokens, then the values of those.

    Spans stay in the order of their text. The bytes are read as whole rows at once, which favours this method.
    """

    @property
    def is_selective(self) -> bool:
        """See SelectiveLoader."""
        return True

    def _prefetch(self, m: int) -> Ints:
        for p in self.ranges:
            n = round((1 - self.probe_config.ratio) / 2 * p.span.num_blocks[m])  # selected blocks bring their keys
            self._count_bytes(p.store, self.readers[p.span].read_blocks(m, 0, n).size)
        return np.zeros(0, np.int32)

    def finish(self) -> bool:
        """Return whether everything was loaded; unlike SelectiveLoader, record no attention for repacking."""
        return LayerLoader.finish(self)


class OffloadSetup:
    """The tiers of a method under an engine's pool. `store_dir` is an empty folder for them."""

    def __init__(self, llm: LLM, prefix_cache: PrefixCache, method: str, config: PrefixBenchConfig, store_dir: str):
        self.llm = llm
        self.prefix_cache = prefix_cache
        self.method = method
        self.ratio = config.selective_ratio
        remote = config.remote or f"url=file://{store_dir}"
        names = {"store": store_dir, "hot": format_size(config.ram_capacity), "remote": remote}
        self.tier_specs = METHODS[method].format(**names)
        self.fingerprint = f"bench {method} {store_dir}".encode()  # so that no run finds what another one stored
        self.bytes_before_restart = 0
        prefix_cache.tree.clear()
        if method == "recompute":
            llm.cache.set_prefix_cache(NullPrefixCache(llm.cache.total_pages + 1))
        self._attach_tiers()

    def _attach_tiers(self) -> None:
        if self.tier_specs:
            selects = self.method.startswith(("selective", "h2o"))
            config = SelectiveConfig(ratio=self.ratio) if selects else PrefixConfig()
            tiers = [parse(t) for t in self.tier_specs.split()]
            offloader = factory.open_offload_tiers(config, tiers, self.llm.cache, self.llm.spec, self.fingerprint)
            loader = AllKeysLoader if self.method.startswith("h2o") else SelectiveLoader
            self.prefix_cache.set_offloader(offloader, loader)

    def restart(self) -> None:
        """Open the tiers anew, if one of them outlives a process."""
        if "disk" in self.tier_specs or "remote" in self.tier_specs:
            self.bytes_before_restart = self.bytes_read
            self.prefix_cache.close_offloader()
            self._attach_tiers()

    def offload_all(self) -> None:
        """Offload every page of the pool, if there is a tier."""
        if self.tier_specs:
            self.prefix_cache.tree.evict(self.prefix_cache.tree.num_evictable_pages)

    def wait_for_writes(self) -> None:
        """Wait until background writes are done."""
        if self.prefix_cache.offloader:
            self.prefix_cache.offloader.sync()

    @property
    def bytes_read(self) -> int:
        """Bytes read from disks and object stores."""
        stores = self.prefix_cache.offloader.stores if self.prefix_cache.offloader else ()
        found = (s.counts["read"] for s in stores if isinstance(s, (DiskStore, RemoteStore)))
        return self.bytes_before_restart + sum(found)

    def close(self) -> None:
        """Restore the engine."""
        self.llm.cache.set_prefix_cache(self.prefix_cache)
        self.prefix_cache.close_offloader()
        self.prefix_cache.tree.clear()
