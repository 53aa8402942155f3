"""The page pool against a simple model: a list of the page arrays that were allocated or shared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.kv.memory.pool import OutOfPagesError, PagePool


@given(st.lists(st.tuples(st.sampled_from(["allocate", "free", "share"]), st.integers(0, 12)), max_size=60))
def test_the_accountant_balances_after_every_operation(operations: list[tuple[str, int]]) -> None:
    pool, tables = PagePool(24), []
    for operation, n in operations:
        if operation == "allocate":
            num_free = pool.num_free
            try:
                tables.append(pool.allocate(n))
            except OutOfPagesError:
                assert n > num_free == pool.num_free
        elif tables and operation == "share":
            tables.append(tables[n % len(tables)].copy())
            pool.incref(tables[-1])
        elif tables:
            pool.free(tables.pop(n % len(tables)))
        used = np.concatenate(tables) if tables else np.zeros(0, np.int32)
        pool.check(used)
        assert pool.num_used == len(set(used.tolist())) <= pool.peak_used
    for table in tables:
        pool.free(table)
    assert pool.num_free == 23


def test_thousands_of_pages_are_allocated_in_one_call() -> None:
    pool = PagePool(50_001)
    pages = pool.allocate(50_000)
    assert sorted(pages.tolist()) == list(range(1, 50_001))
    with pytest.raises(OutOfPagesError):
        pool.allocate(1)
    pool.free(pages)
    pool.check(pages[:0])


@pytest.mark.parametrize("pages", [[], [1, 2], [1, 2, 3, 3], [2, 3, 4], [1, 2, 30]])
def test_the_accountant_raises_when_the_tables_do_not_hold_the_allocated_pages(pages: list[int]) -> None:
    pool = PagePool(24)
    assert sorted(pool.allocate(3).tolist()) == [1, 2, 3]
    with pytest.raises(AssertionError):
        pool.check(np.array(pages, np.int32))
