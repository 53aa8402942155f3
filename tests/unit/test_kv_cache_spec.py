"""What layers cache: groups of equal slots, layers that share a cache, and models whose layers differ."""

from __future__ import annotations

import pytest

from retain.kernels.slots.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheSpec,
    SharedCacheSpec,
    SlidingWindowSpec,
    convolution_spec,
    uniform_layers,
)

UNLIKE = KVCacheSpec(
    (
        SlidingWindowSpec(4, 64, 64, window=16),
        FullAttentionSpec(1, 128, 128),
        SlidingWindowSpec(4, 64, 64, window=16),
        SharedCacheSpec(1),
        FullAttentionSpec(4, 64, 64),
    )
)


def test_layers_with_equal_slots_are_a_group_whatever_their_windows() -> None:
    assert [g.caches for g in UNLIKE.groups] == [(0, 2, 4), (1,)]
    assert [g.windows for g in UNLIKE.groups] == [(16, 16, None), (None,)]
    assert [(g.num_kv_heads, g.k_dim, g.v_dim) for g in UNLIKE.groups] == [(4, 64, 64), (1, 128, 128)]


def test_a_shared_cache_has_the_sizes_and_the_window_of_the_layer_that_writes_it() -> None:
    assert UNLIKE.source_cache(3) == 1
    assert UNLIKE.attention(3) == UNLIKE.caches[1]
    assert UNLIKE.windows == (16, None, 16, None, None)


def test_what_needs_equal_layers_says_so() -> None:
    for name in ("only_group", "full_attention_group"):
        with pytest.raises(ValueError, match="must be alike"):
            getattr(UNLIKE, name)
    uniform = KVCacheSpec(uniform_layers(2, 8, (None, 4, None)))
    assert uniform.only_group.caches == (0, 1, 2)
    assert uniform.full_attention_group.caches == (0, 2)


@pytest.mark.parametrize("cache", [-1, 1, 2, 7])
def test_a_layer_shares_only_a_cache_before_it(cache: int) -> None:
    full = FullAttentionSpec(1, 8, 8)
    with pytest.raises(ValueError, match="which is none before it"):
        KVCacheSpec((full, SharedCacheSpec(cache), full))
    with pytest.raises(ValueError, match="which is none before it"):
        KVCacheSpec((full, SharedCacheSpec(0), SharedCacheSpec(1)))


@pytest.mark.parametrize("channels", [16, 48, 64, 160, 272, 1024, 2048, 8192])
@pytest.mark.parametrize("largest", [128, 32, 20])
def test_a_convolution_has_as_few_heads_as_slots_allow(channels: int, largest: int) -> None:
    spec = convolution_spec(channels, 3, largest)
    assert spec.num_kv_heads * (spec.k_dim + spec.v_dim) == channels
    assert spec.k_dim == spec.v_dim <= largest and spec.k_dim % 8 == 0
    fewer = range(1, spec.num_kv_heads)
    assert all(channels % (16 * heads) or channels // heads > largest // 8 * 16 for heads in fewer)


@pytest.mark.parametrize("channels", [8, 24, 100])
def test_channels_that_fill_no_slots_are_refused(channels: int) -> None:
    with pytest.raises(ValueError, match="only over multiples of 16"):
        convolution_spec(channels, window=3)
