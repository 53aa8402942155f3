"""The choice of draft lengths, on simulated machines."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from retain.engine.request import Request
from retain.engine.spec_decode.draft_length import CostTable, DraftLengthController
from tests.helpers.engines import make_request
from tests.helpers.marks import slow

BLOCKS_OF_FOUR = [1.0, 1.1, 1.15, 1.2, 2.0, 2.1, 2.15, 2.2, 3.0]  # kernels take rows in blocks
EXPERTS = [1.0, 1.8, 2.2, 2.4, 2.5, 2.55, 2.58, 2.6, 2.62]  # the first rows wake most of the experts


def line(token_s: float) -> list[float]:
    return [1 + token_s * n for n in range(9)]


def simulate(
    alpha: float,
    draft_s: float,
    costs: Sequence[float],
    num_rounds: int,
    num_requests: int = 1,
    noise: float = 0.05,
    controller: DraftLengthController | None = None,
) -> float:
    """Return the speed-up over plain decoding.

    Drafts are accepted with probability `alpha`; one more draft takes `draft_s` seconds to draft, and a step takes the
    seconds in `costs` by the drafts of each request.
    """
    rng = random.Random(1)
    controller = controller or DraftLengthController(8)
    requests = [make_request([1]) for _ in range(num_requests)]
    seconds, num_tokens = 0.0, 0
    for _ in range(num_rounds):
        lengths = [n for _, n in controller.choose_lengths([(r, 8) for r in requests], num_requests)]
        accepted = []
        for length in lengths:
            n = 0
            while n < length and rng.random() < alpha:
                n += 1
            accepted.append(n)
        factor = 1 + noise * rng.uniform(-1, 1)
        mean = sum(lengths) / num_requests
        low = min(int(mean), 7)
        step = factor * (costs[low] + (mean - low) * (costs[low + 1] - costs[low]))
        drafting = factor * draft_s * max(lengths)
        controller.record_step(num_requests, num_requests + sum(lengths), step, max(lengths), drafting)
        for request, length, n in zip(requests, lengths, accepted, strict=True):
            controller.record_acceptance(request, length, n)
        seconds += step + drafting
        num_tokens += num_requests + sum(accepted)
    return num_tokens / num_requests / seconds


def best_fixed_speedup(alpha: float, draft_s: float, costs: Sequence[float]) -> float:
    """Return the highest speed-up that a fixed draft length gives."""
    return max(sum(alpha**i for i in range(n + 1)) / (costs[n] + draft_s * n) for n in range(9))


@pytest.mark.parametrize("num_requests", [1, *slow(8)])
@pytest.mark.parametrize("costs", [line(0.0), line(0.02), line(0.3), BLOCKS_OF_FOUR, EXPERTS], ids=str)
@pytest.mark.parametrize("draft_s", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.02, 0.5, 0.8, 0.95])
def test_speed_is_near_the_best_fixed_length_and_never_far_below_plain_decoding(
    alpha: float, draft_s: float, costs: list[float], num_requests: int
) -> None:
    speedup = simulate(alpha, draft_s, costs, 600, num_requests)
    assert speedup > 0.95
    assert speedup > 0.85 * best_fixed_speedup(alpha, draft_s, costs)


def final_lengths(controller: DraftLengthController, *requests: Request) -> dict[Request, int]:
    for table in controller.tables.values():
        table.next_exploration = 10**6  # not now
    return dict(controller.choose_lengths([(r, 8) for r in requests], len(requests)))


def test_each_request_has_its_own_acceptance_rate() -> None:
    controller, accepting, rejecting = DraftLengthController(8), make_request([1]), make_request([2])
    for _ in range(200):
        lengths = dict(controller.choose_lengths([(accepting, 8), (rejecting, 8)], 2))
        num_drafts = sum(lengths.values())
        controller.record_step(2, 2 + num_drafts, 1 + 0.15 * num_drafts, max(lengths.values()), 0.0)
        controller.record_acceptance(accepting, lengths[accepting], lengths[accepting])
        controller.record_acceptance(rejecting, lengths[rejecting], 0)
    lengths = final_lengths(controller, accepting, rejecting)
    assert lengths[accepting] > 3 * max(lengths[rejecting], 1)


def test_a_drafter_that_seldom_proposes_keeps_its_length() -> None:
    """As in prompt lookup: proposing nothing costs nothing, so it is no reason to stop drafting."""
    controller, request = DraftLengthController(8), make_request([1])
    for i in range(100):
        ((_, length),) = controller.choose_lengths([(request, 8)], 1)
        length = length if i > 20 and i % 3 == 0 else 0
        controller.record_step(1, 1 + length, 1.0 + 0.01 * length, length, 1e-5)
        controller.record_acceptance(request, length, length)
    assert final_lengths(controller, request)[request] > 4


def test_as_many_drafts_are_chosen_as_pay_also_where_all_are_alike() -> None:
    controller = DraftLengthController(1, longest_tried=1, num_rounds=100)
    table = controller.cost_table(8)
    table.step_s = 1.0
    table.factors |= {1.5: 1.0, 1.75: 3.0, 2.0: 3.0}
    lengths = controller.choose_lengths([(make_request([i]), 1) for i in range(8)], 8)
    assert sum(n for _, n in lengths) == 4


def test_no_length_exceeds_its_limit() -> None:
    controller, request = DraftLengthController(8), make_request([1])
    for _ in range(100):
        assert controller.choose_lengths([], 0) == []
        ((_, length),) = controller.choose_lengths([(request, 3)], 1)
        assert length <= 3
        controller.record_step(1, 1 + length, 1.0, length, 0.0)
        controller.record_acceptance(request, length, length)
    assert length == 3


def test_later_requests_start_from_what_was_learned() -> None:
    """Neither the trial of drafts nor their costs begin anew, also in batches of another size."""
    controller = DraftLengthController(8)
    simulate(0.02, 0.3, EXPERTS, 600, controller=controller)
    controller.cost_table(1).next_exploration = 10**6
    assert simulate(0.02, 0.3, EXPERTS, 20, controller=controller, noise=0) == 1
    controller = DraftLengthController(8)
    simulate(0.95, 0.1, EXPERTS, 600, controller=controller)
    controller.cost_table(1).next_exploration = 10**6
    assert [n for _, n in controller.choose_lengths([(make_request([1]), 8)], 1)] == [8]
    assert min(n for _, n in controller.choose_lengths([(make_request([i]), 8) for i in range(5)], 5)) > 4


def test_a_table_follows_what_changes_all_steps() -> None:
    table = CostTable()
    assert table.predict(5) == 0.0  # before the first measurement
    for n in [1, 1, 2, 4, 8] * 20:
        table.add_step(n, EXPERTS[n - 1])
    for n, cost in enumerate(EXPERTS[:8], start=1):
        assert table.predict(n) == pytest.approx(cost, rel=0.1)
    for i in range(100):  # contexts grow
        table.add_step(1, 1 + i / 50)
    assert table.predict(8) == pytest.approx(3 * 2.6, rel=0.15)


def test_a_table_of_one_point_has_no_slope() -> None:
    table = CostTable()
    for _ in range(10):
        table.add_step(1, 2.0)
    assert table.predict(1) == table.predict(9) == pytest.approx(2)


def test_an_outlier_counts_as_less() -> None:
    table = CostTable()
    for _ in range(10):
        table.add_step(1, 1.0)
    table.add_step(1, 100.0)
    assert table.predict(1) < 1.1
