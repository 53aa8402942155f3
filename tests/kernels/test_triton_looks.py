"""What looks on a GPU have of their own: a choice by digits, tiles in parts, pages that are longer than their slots."""

from __future__ import annotations

import pytest
import torch

from retain.kernels import reference, triton
from retain.kernels.api import NO_WINDOW, Backend
from retain.kernels.slots.pool_dtypes import FP8, INT8, K8V4
from retain.kernels.slots.reinterpret import PageFormat
from tests.helpers.attention_case import AttentionCase
from tests.helpers.device_adapter import triton_backend

if triton.unavailable_reason():
    pytest.skip(f"triton: {triton.unavailable_reason()}", allow_module_level=True)

from retain.kernels.triton import look_kernels, plan

CASE = AttentionCase(
    fresh=(1, 3), pages=((20, 18), (15, 20)), D=64, dtype=torch.float32, holes=0.01, looks=(60, 50, 70, 100)
)


@pytest.fixture
def backend() -> Backend:
    return triton_backend()


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.float16, {"D": 96, "V": 40, "S": 48}),
        (FP8, {"S": 96, "pages": ((4, 3), (2, 4))}),
        (K8V4, {"S": 48, "pages": ((6, 6), (5, 7)), "alibi": True}),
        (torch.bfloat16, {"D": 256, "R": 9, "softcap": 5.0}),
        (torch.float32, {"D": 320, "V": 64, "sinks": True}),
        (torch.float32, {"D": 32, "V": 33}),
        (INT8, {"D": 264, "V": 64, "R": 36, "S": 32}),
        (torch.float32, {"D": 264, "V": 32, "R": 2, "S": 128, "fresh": (1,), "pages": ((36,),), "looks": (150,)}),
    ],
)
def test_pools_of_any_form_agree_with_the_reference(
    backend: Backend, dtype: torch.dtype, changes: dict[str, object]
) -> None:
    """Up to slots whose weights are nearly equal: each has a small part in the output."""
    case = CASE.with_changes(dtype=dtype, **changes)
    expected = case.attend(reference)
    error = (case.attend(backend) - expected).abs().mean()
    looks = case.looks or ()
    others = [case.with_changes(looks=tuple(n // 2 for n in looks)), case.with_changes(looks=(0,) * len(looks))]
    changes_of_others = [(other.attend(reference) - expected).abs().mean() for other in others]
    assert error < 0.2 * min(changes_of_others), (error, changes_of_others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, INT8])
def test_tiles_in_parts_have_the_same_bits(
    backend: Backend, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASE.with_changes(dtype=dtype)
    expected = case.attend(backend)
    monkeypatch.setattr(plan, "LOOK_BYTES", 1)
    monkeypatch.setattr(plan, "ALIGNED_TILES", 1)
    assert torch.equal(case.attend(backend), expected)


def test_means_of_the_largest_values_are_finite(backend: Backend) -> None:
    """Rounded to bfloat16 they are larger than any number of float16."""
    case = CASE.with_changes(dtype=torch.float16)
    q, q_pos = case.build_queries()
    for of in (reference, backend):
        kv = case.build_cache(of)
        slots = torch.arange(case.S, kv.num_pages * case.S)
        v = torch.full((len(slots), 1, case.D), 65504.0)
        of.write(kv, slots[None].int(), 0 * v, v, kv.pos.view(-1)[slots])
        assert (of.attend(q, kv, case.build_tables(), q_pos, case.params) > 65000).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, INT8, K8V4])
def test_pages_may_be_longer_than_their_slots(backend: Backend, dtype: torch.dtype) -> None:
    """As in a pool whose pages hold slots of several kinds: then slots of 16 bits are copied, too."""
    case = CASE.with_changes(dtype=dtype)
    q, q_pos = case.build_queries()
    kv = case.build_cache(backend)
    format = PageFormat(case.S, dtype, case.D, case.D, has_sketches=True)
    sizes = [n + 192 for n in format.bytes]
    longer = backend.allocate(kv.num_pages, case.S, case.D, dtype, page_bytes=(sizes[0], sizes[1]))
    longer = longer.with_sketches(format.sketch_bytes)
    longer.k.copy_(kv.k)
    longer.v.copy_(kv.v)
    longer.pos.copy_(kv.pos)
    assert longer.sketches is not None and kv.sketches is not None
    longer.sketches.copy_(kv.sketches)
    expected = backend.attend(q, kv, case.build_tables(), q_pos, case.params)
    assert torch.equal(backend.attend(q, longer, case.build_tables(), q_pos, case.params), expected)


@pytest.mark.parametrize("num_priorities", [1, 3, 300, 10**9])
def test_the_highest_ranks_are_found(num_priorities: int) -> None:
    """Also among many equal priorities, and where there are too few candidates, none, or no slots."""
    rng = torch.Generator().manual_seed(num_priorities)
    J, S, n = 12, 64, 5
    ranks = torch.randint(0, num_priorities, (J, 1, n * S), generator=rng) << 32
    ranks += torch.stack([torch.randperm(n * S, generator=rng) for _ in range(J)])[:, None]
    ranks[torch.rand(ranks.shape, generator=rng) < 0.2] = -1
    ranks[torch.rand(ranks.shape, generator=rng) < 0.05] = look_kernels.SEEN.value
    ranks[10] = -1
    counts = torch.full((J, 1), n, dtype=torch.int32)
    counts[11] = 0
    looks = torch.tensor([1, 2, 3, 17, 64, 100, 150, 200, 239, 1000, 5, 5]).int()
    tiles = torch.zeros(J, 6, dtype=torch.int32)
    tiles[:, 1] = tiles[:, 2] = torch.arange(J)
    tiles[:, 3] = 1
    pages = torch.randperm(J * n, generator=rng).view(J, 1, n).int()
    windows = torch.full((J,), NO_WINDOW, dtype=torch.int32)
    thresholds = torch.zeros(J, 1, dtype=torch.int64)
    chosen = torch.full((J, 1, n * S), -7, dtype=torch.int32)
    num_chosen = torch.zeros(J, 1, dtype=torch.int32)
    look_kernels.choose_slots[(J, 1)](
        pages=pages, page_row=n, page_head=n, counts=counts, count_row=1, count_head=1, windows=windows, window_row=1,
        tiles=tiles, looks=looks, ranks=ranks, thresholds=thresholds, chosen=chosen,
        num_chosen=num_chosen, max_slots=n * S, G=1, S=S, SLOTS=128,
    )  # fmt: skip
    for j in range(J):
        own = ranks[j, 0, : int(counts[j]) * S]
        is_candidate = (own >= 0) & (own != look_kernels.SEEN.value)
        highest = torch.where(is_candidate, own, -1).argsort(descending=True)[: int(looks[j])]
        attended = own == look_kernels.SEEN.value
        attended[highest[is_candidate[highest]]] = True
        places = attended.nonzero()[:, 0]
        expected = pages[j, 0, places // S] * S + places % S
        assert torch.equal(chosen[j, 0, : int(num_chosen[j])].long(), expected.long())
        assert (chosen[j, 0, int(num_chosen[j]) :] == -7).all()
