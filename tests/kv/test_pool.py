"""The pool against a plain model: a multiset of held pages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retain.kv.pool import OutOfPages, Pool


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "share"]), st.integers(0, 12)), max_size=60))
def test_pool_balances_after_every_operation(operations):
    pool, tables = Pool(24), []
    for verb, n in operations:
        if verb == "take":
            free = pool.free
            try:
                tables.append(pool.take(n))
            except OutOfPages:
                assert n > free == pool.free
        elif tables and verb == "share":
            tables.append(tables[n % len(tables)].copy())
            pool.share(tables[-1])
        elif tables:
            pool.give(tables.pop(n % len(tables)))
        held = np.concatenate(tables) if tables else np.zeros(0, np.int32)
        pool.check(held)
        assert pool.used == len(set(held.tolist())) <= pool.peak
    for table in tables:
        pool.give(table)
    assert pool.free == 23


def test_thousands_of_pages_in_one_call():
    pool = Pool(50_001)
    pages = pool.take(50_000)
    assert sorted(pages.tolist()) == list(range(1, 50_001))
    with pytest.raises(OutOfPages):
        pool.take(1)
    pool.give(pages)
    pool.check(pages[:0])


@pytest.mark.parametrize("held", [[], [1, 2], [1, 2, 3, 3], [2, 3, 4], [1, 2, 30]])
def test_the_accountant_notices(held):
    pool = Pool(24)
    assert sorted(pool.take(3).tolist()) == [1, 2, 3]
    with pytest.raises(AssertionError):
        pool.check(np.array(held, np.int32))
