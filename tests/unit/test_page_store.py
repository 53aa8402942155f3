"""Pages that are taken hold no token, whatever their owners before left in them, in slots of any kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.kernels import reference
from retain.kernels.slots.reinterpret import PageFormat
from retain.kv.memory import page_store
from retain.kv.memory.page_store import PageStore
from retain.kv.memory.pool import PagePool

NUM_PAGES = 24


def make_stores() -> list[PageStore]:
    """Two stores over one pool, whose slots differ in size."""
    kv = reference.allocate(NUM_PAGES, 16, 8, torch.float32)
    store = PageStore(PagePool(NUM_PAGES), kv, reference, page_bytes=1)  # type: ignore[arg-type]
    return [store, store.reinterpret(PageFormat(32, torch.float32, 4, 4))]


@settings(deadline=None)
@given(data=st.data(), ahead=st.integers(1, 30))
def test_taken_pages_are_holes(data: st.DataObject, ahead: int) -> None:
    stores = make_stores()
    pool = stores[0].pool
    held: list[tuple[PageStore, np.ndarray]] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(page_store, "PUNCHED_AHEAD", ahead)
        for _ in range(data.draw(st.integers(1, 20))):
            if held and data.draw(st.booleans()):
                _, pages = held.pop(data.draw(st.integers(0, len(held) - 1)))
                pool.free(pages)
                continue
            store = data.draw(st.sampled_from(stores))
            pages = store.allocate(data.draw(st.integers(0, pool.num_free)))
            assert (store.kv.pos[pages] == -1).all()
            assert all((own.kv.pos[others] >= 0).all() for own, others in held), "a page of another lost its tokens"
            store.kv.pos[pages] = 7
            held.append((store, pages))


def test_pages_are_made_ready_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that take a page each write positions once for all of them."""
    store = make_stores()[0]
    num_writes: list[int] = []
    to_index = type(store.kv).to_index
    monkeypatch.setattr(type(store.kv), "to_index", lambda kv, x: num_writes.append(len(x)) or to_index(kv, x))
    rows = [store.allocate(1) for _ in range(9)]
    assert num_writes == [NUM_PAGES - 1]
    store.pool.free(np.concatenate(rows))
    for _ in range(9):
        store.allocate(1)
    assert num_writes == [NUM_PAGES - 1, 9]
