"""Products in the tests' Triton interpreter: the bits of each element follow from its row and its column alone."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from retain.kernels import triton

pytestmark = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
if not triton.unavailable_reason():
    from tests.helpers.fast_interpreter import multiply_in_order

SIZES = (1, 2, 3, 16, 33, 64)


@pytest.mark.parametrize("K", [1, 2, 7, 16, 64, 129])
def test_elements_of_products_do_not_follow_from_sizes_and_strides(K: int) -> None:
    rng = np.random.default_rng(K)
    a, b = rng.standard_normal((64, K)).astype(np.float32), rng.standard_normal((K, 64)).astype(np.float32)
    whole = multiply_in_order(a, b)
    bound = K * np.finfo(np.float32).eps * np.abs(a).max() * np.abs(b).max()
    np.testing.assert_allclose(whole, a @ b, rtol=0, atol=bound)
    for M, N, is_transposed in product(SIZES, SIZES, (False, True)):
        x, y = a[:M], b[:, :N]
        if is_transposed:
            x, y = np.asfortranarray(x), np.asfortranarray(y)
        np.testing.assert_array_equal(multiply_in_order(x, y), whole[:M, :N])
        np.testing.assert_array_equal(multiply_in_order(np.stack((y.T, y.T)), x.T)[1], whole[:M, :N].T)
