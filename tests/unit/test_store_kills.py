"""A process that is killed at any call leaves a store that opens, and that has lost what it was doing at most."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from retain.kv.stores.tiers.disk import DiskStore
from tests.helpers.stored_spans import count_intact, key_of, make_span, names_in, open_disk_store, span_files

CHANGES = ("mkdir", "pwritev", "fsync", "replace", "unlink", "utime")
CAPACITY = str(4 * 16384)
NUMBERS = range(9)


class Killed(OSError):
    """The process is dead: nothing that it calls from here on has an effect."""


def kill_at(patch: pytest.MonkeyPatch, last: int, calls: list[str]) -> None:
    """Let no change of files but the first `last` happen. The last write is cut in the middle."""

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) <= last:
                return call(*args, **kwargs)
            if name == "pwritev" and len(calls) == last + 1:
                call(args[0], [args[1][0][:4096]], args[2])
            raise Killed(name)

        return counted

    for name in CHANGES:
        patch.setattr(os, name, wrap(name, getattr(os, name)))


def found_in(store: DiskStore) -> set[int]:
    return {number for number in NUMBERS if store.find(key_of(number))}


def work(store: DiskStore, is_dead: Callable[[], bool]) -> set[int]:
    """Write, evict, use, reorder and delete spans, until killed. Returns what the store had before the fatal action."""

    def reorder() -> None:
        span, data = make_span([7])
        span.is_reordered = True
        old = store.find(key_of(7))
        store.put(span, data, replaces=old[0] if old else None)

    def on_found(number: int, action: Callable[[Any], None]) -> None:
        if found := store.find(key_of(number)):
            action(found[0])

    actions: list[Callable[[], None]] = [
        *(lambda n=n: store.put(*make_span([n])) for n in range(6)),  # type: ignore[misc]
        lambda: on_found(2, lambda span: store.touch([span])),
        *(lambda n=n: store.put(*make_span([n])) for n in (6, 7)),  # type: ignore[misc]
        reorder,
        lambda: on_found(6, store.delete),
        lambda: store.put(*make_span([8])),
    ]
    for action in actions:
        before = found_in(store)
        action()
        store.sync()
        if is_dead():
            return before
    return found_in(store)


def test_a_store_opens_after_a_kill_at_each_call(tmp_path: Path) -> None:
    seen = set[str]()
    for last in count():
        path, calls = tmp_path / str(last), list[str]()
        with pytest.MonkeyPatch.context() as patch:
            store = open_disk_store(path, CAPACITY)
            kill_at(patch, last, calls)
            before = work(store, lambda calls=calls, last=last: len(calls) > last)  # type: ignore[misc]
            store.close()
        store = open_disk_store(path, CAPACITY)
        store.sync()
        found = found_in(store)
        assert len(before - found) <= 1 and len(found - before) <= 1, (last, calls[-1])
        assert count_intact(store, len(NUMBERS)) == len(found) and store.counts["damaged"] == 0
        assert {f.name for f in span_files(path)} == names_in(store)
        assert store.span_index.used_bytes == sum(f.stat().st_size for f in span_files(path)) <= int(CAPACITY)
        store.close()
        if len(calls) <= last:
            break
        seen.add(calls[last])
    assert seen >= {"pwritev", "fsync", "replace", "unlink", "utime"} and last > 50
