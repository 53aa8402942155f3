"""The slots that a device computes from its tables are those that the host computes, whatever happens to rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.kernels import triton
from retain.kernels.api import GroupInputs, Tables
from retain.kernels.slots.slot_rule import SlotRule
from retain.kv.manager import KVCacheManager
from retain.kv.memory import demoted_tables, device_tables
from retain.kv.memory.cache import KVCache
from retain.kv.memory.device_rows import DeviceRows
from retain.types import Ints
from tests.helpers.marks import slow
from tests.helpers.schedule_runner import ScheduleRun
from tests.helpers.schedules import FAMILIES, STATE_FAMILIES, UNLIKE_FAMILIES, draw_schedule, families_of_tests

pytestmark = pytest.mark.skipif(not triton.is_interpreted(), reason="the tables are on a CPU here")


class CopiedRows(DeviceRows):
    """Tables that kernels read as they were when they were uploaded, on a CPU, too."""

    def __init__(self, arrays: Sequence[Ints], device: torch.device, counts: Ints):
        super().__init__(arrays, device, counts)
        self.tensors = [x.clone() for x in self.host_tensors]


@pytest.fixture
def num_compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Compare both in every step. Returns the numbers of slots, and of tokens that fill holes."""
    from retain.kernels.triton.step_inputs import FreshTokens

    for module in (demoted_tables, device_tables):
        monkeypatch.setattr(module, "DeviceRows", CopiedRows)
    counts = {"all": 0, "holes": 0}
    group_inputs = KVCacheManager.group_inputs

    def compare(self: KVCacheManager, rows: Ints, positions: Ints, tables: Sequence[Tables]) -> list[GroupInputs]:
        found = group_inputs(self, rows, positions, tables)
        last = np.array([positions[rows == row].max() for row in rows], np.int32)
        for group, inputs in zip(self.slots.groups, found, strict=True):
            rule = group.tables.on_device.slot_rule(
                self._hole_indices(group.tables, rows, positions), group.tables.is_state
            )
            slots = torch.full(inputs.slot_mapping.shape, -7, dtype=torch.int32)
            fresh = FreshTokens(*(torch.from_numpy(x) for x in (rows, positions, last)))
            indices = torch.zeros(0, dtype=torch.int32) if rule.hole_indices is None else rule.hole_indices
            fresh.map_slots(rule, indices, group.tables.page_size, slots)
            assert torch.equal(slots, inputs.slot_mapping)
            counts["all"] += slots.numel()
            counts["holes"] += int((indices >= 0).sum())
        return found

    monkeypatch.setattr(KVCacheManager, "group_inputs", compare)
    return counts


def run(seed: int, path: Path, families: Sequence[str]) -> None:
    with families_of_tests():
        ScheduleRun(draw_schedule(seed, families=families), path, depth=1 + seed % 2).run()


@pytest.mark.parametrize("seed", [2, 12, 14, *slow(*range(15, 30))])
def test_random_schedules(seed: int, num_compared: dict[str, int], tmp_path: Path) -> None:
    run(seed, tmp_path, (*FAMILIES, *UNLIKE_FAMILIES))
    assert num_compared["all"] and (num_compared["holes"] or seed not in (12, 14))


@pytest.mark.parametrize("seed", [4, *slow(*range(10, 17), *range(18, 21))])  # 17 compares nothing
def test_random_schedules_with_states(seed: int, num_compared: dict[str, int], tmp_path: Path) -> None:
    run(seed, tmp_path, STATE_FAMILIES)
    assert num_compared["all"]


@settings(max_examples=20, derandomize=True)
@given(seed=st.integers(0, 10**6), is_state=st.booleans(), steps=st.lists(st.integers(1, 90), min_size=1, max_size=3))
def test_random_rings(seed: int, is_state: bool, steps: list[int]) -> None:
    """Rings that one step passes more than once, too: of a state the last tokens stay."""
    from retain.kernels.triton.step_inputs import FreshTokens

    rng = np.random.default_rng(seed)
    N, L, G, n, S = 4, 3, 2, 6, 16

    def draw(low: int, high: int, *shape: int) -> Ints:
        return rng.integers(low, high, shape).astype(np.int32)

    pages = draw(1, 50, N, L, G, n)
    ring_base = draw(-2, 3, N, L) * np.int32(S)
    capacity = draw(1, n + 1, N, L) * np.int32(S)
    rows = np.repeat(draw(0, N, 1) + np.arange(len(steps), dtype=np.int32), steps) % np.int32(N)
    firsts = draw(3 * S, 200, len(steps))
    positions = np.concatenate([np.arange(f, f + m, dtype=np.int32) for f, m in zip(firsts, steps, strict=True)])
    last = np.repeat(firsts + np.array(steps, np.int32) - 1, steps).astype(np.int32)
    tables = SimpleNamespace(
        page_size=S, ring_base=ring_base, capacity=capacity, pages=pages, is_state=is_state, allocated_upto=[0] * N
    )
    expected = KVCache(tables, 1).slot_mapping(rows, positions)  # type: ignore[arg-type]
    arrays = [torch.from_numpy(x) for x in (pages, draw(1, 2, N, L), ring_base, capacity)]
    rule = SlotRule(*arrays, torch.zeros(N, L, G, 0, dtype=torch.int32), None, is_state)
    slots = torch.full((L, G, len(rows)), -7, dtype=torch.int32)
    fresh = FreshTokens(*(torch.from_numpy(x) for x in (rows, positions, last)))
    fresh.map_slots(rule, torch.zeros(0, dtype=torch.int32), S, slots)
    assert torch.equal(slots, torch.from_numpy(expected))
