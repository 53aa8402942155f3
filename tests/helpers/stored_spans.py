"""Spans whose content follows from their keys, and stores that hold them. Runs as a child process, without pytest."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

from retain.kv.stores.span import IO_ALIGNMENT, Span, alloc_aligned
from retain.kv.stores.span_file import header_size
from retain.kv.stores.store import Store
from retain.kv.stores.tiers import parse
from retain.kv.stores.tiers.disk import DiskStore

BLOCK_BYTES = 1536


def open_disk_store(path: Path, capacity: str = "1GB", options: str = "") -> DiskStore:
    store = parse(f"disk:path={path},capacity={capacity}{options}").open()
    assert isinstance(store, DiskStore)
    return store


def key_of(number: int) -> bytes:
    return blake2b(str(number).encode(), digest_size=16).digest()


def make_span(numbers: Sequence[int], num_layers: int = 3) -> tuple[Span, np.ndarray]:
    """A span with one key for each number, and its bytes."""
    span = Span(tuple(map(key_of, numbers)), (len(numbers),) * num_layers, BLOCK_BYTES)
    data = alloc_aligned(span.size)
    for layer in range(num_layers):
        span.view_layer(data, layer)[:] = expected_blocks(numbers, layer)
    return span, data


def expected_blocks(numbers: Sequence[int], layer: int) -> np.ndarray:
    return np.stack([_expected_block(number, layer) for number in numbers])


@cache
def _expected_block(number: int, layer: int) -> np.ndarray:
    return np.random.default_rng((number, layer)).integers(0, 256, BLOCK_BYTES, np.uint8)


def read_blocks(store: Store, span: Span, layer: int, begin: int, end: int) -> np.ndarray:
    with closing(store.open(span)) as reader:
        return reader.read_blocks(layer, begin, end).copy()


def count_intact(store: Store, num_keys: int) -> int:
    """Check the bytes of every key that the store has among the first `num_keys`, and return how many it has."""
    num_found = 0
    for number in range(num_keys):
        if found := store.find(key_of(number)):
            span, i = found
            num_found += 1
            with closing(store.open(span)) as reader:
                for layer in range(len(span.num_blocks)):
                    assert (reader.read_blocks(layer, i, i + 1) == expected_blocks([number], layer)).all()
    return num_found


def verify(store: Store) -> int:
    """Read every span, and delete those that cannot be read. Returns their number."""
    num_damaged = 0
    for span in store.span_index:
        try:
            with closing(store.open(span)) as reader:
                reader.read_all()
        except OSError:
            store.delete(span, is_corrupted=True)
            num_damaged += 1
    store.sync()
    return num_damaged


def span_files(path: Path) -> list[Path]:
    """The files of spans, and of what is being written, in a folder."""
    return [file for file in path.rglob("*") if file.is_file() and file.name != "lock"]


def data_offset(content: bytes) -> int:
    """Where a span's data begin in its file."""
    return -(-header_size(content) // IO_ALIGNMENT) * IO_ALIGNMENT


def names_in(store: Store) -> set[str]:
    """The names of the files of all spans that a store knows."""
    return {name.rpartition("/")[2] for name in store.catalog.span_of_name}


def write_until_killed(path: Path) -> None:
    """Write spans into a store without end, after a line on stdin says so."""
    sys.stdin.readline()
    store = open_disk_store(path, "3MB")
    print("ready", flush=True)
    for i in range(100_000):
        store.put(*make_span(range(3 * i, 3 * i + 3)))
        if i % 20 == 0:
            store.sync()


if __name__ == "__main__":
    write_until_killed(Path(sys.argv[1]))
