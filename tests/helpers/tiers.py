"""Helpers for engines with tiers below the pool."""

from __future__ import annotations

import random
from pathlib import Path

from retain.engine.engine import Engine
from retain.kv.stores.manager import Offloader
from retain.kv.stores.tiers.disk import DiskStore
from tests.helpers.stored_spans import data_offset, span_files


def disk_spec(path: Path, capacity: str = "100MB") -> str:
    return f"disk:path={path},capacity={capacity}"


def offloader_of(engine: Engine) -> Offloader:
    offloader = engine.cache.prefix_cache.offloader
    assert isinstance(offloader, Offloader)
    return offloader


def disk_store_of(engine: Engine) -> DiskStore:
    store = offloader_of(engine).stores[-1]
    assert isinstance(store, DiskStore)
    return store


def clear_pool(engine: Engine) -> None:
    """Drop the prefixes in the pool; the tiers keep theirs."""
    engine.cache.prefix_cache.tree.clear()


def flip_a_bit(path: Path) -> None:
    """Damage every file of a disk store."""
    for file in span_files(path):
        data = bytearray(file.read_bytes())
        data[data_offset(data) + random.Random(1).randrange(1000)] ^= 4
        file.write_bytes(data)
