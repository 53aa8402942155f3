"""The pool against a plain model: a multiset of held pages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.kv.memory.pool import OutOfPagesError, PagePool


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "share"]), st.integers(0, 12)), max_size=60))
def test_pool_balances_after_every_operation(operations):
    pool, tables = PagePool(24), []
    for verb, n in operations:
        if verb == "take":
            free = pool.num_free
            try:
                tables.append(pool.allocate(n))
            except OutOfPagesError:
                assert n > free == pool.num_free
        elif tables and verb == "share":
            tables.append(tables[n % len(tables)].copy())
            pool.incref(tables[-1])
        elif tables:
            pool.free(tables.pop(n % len(tables)))
        held = np.concatenate(tables) if tables else np.zeros(0, np.int32)
        pool.check(held)
        assert pool.num_used == len(set(held.tolist())) <= pool.peak_used
    for table in tables:
        pool.free(table)
    assert pool.num_free == 23


def test_thousands_of_pages_in_one_call():
    pool = PagePool(50_001)
    pages = pool.allocate(50_000)
    assert sorted(pages.tolist()) == list(range(1, 50_001))
    with pytest.raises(OutOfPagesError):
        pool.allocate(1)
    pool.free(pages)
    pool.check(pages[:0])


@pytest.mark.parametrize("held", [[], [1, 2], [1, 2, 3, 3], [2, 3, 4], [1, 2, 30]])
def test_the_accountant_notices(held):
    pool = PagePool(24)
    assert sorted(pool.allocate(3).tolist()) == [1, 2, 3]
    with pytest.raises(AssertionError):
        pool.check(np.array(held, np.int32))
