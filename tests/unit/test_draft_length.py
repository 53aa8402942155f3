"""The choice of draft lengths, on simulated machines."""

from __future__ import annotations

import random

import pytest

from retain.engine.request import Request
from retain.engine.spec_decode.draft_length import DraftLengthController, LinearFit
from tests.helpers.engines import make_request
from tests.helpers.marks import slow


def simulate(
    alpha: float, draft_s: float, token_s: float, num_rounds: int, num_requests: int = 1, noise: float = 0.05
) -> float:
    """Return the speed-up over plain decoding, whose steps take 1 second.

    Drafts are accepted with probability `alpha`; one more draft takes `draft_s` seconds to draft, `token_s` to verify.
    """
    rng, controller = random.Random(1), DraftLengthController(8)
    requests = [make_request([1]) for _ in range(num_requests)]
    seconds, num_tokens = 0.0, 0
    for _ in range(num_rounds):
        lengths = [n for _, n in controller.choose_lengths([(r, 8) for r in requests])]
        accepted = []
        for length in lengths:
            n = 0
            while n < length and rng.random() < alpha:
                n += 1
            accepted.append(n)
        factor = 1 + noise * rng.uniform(-1, 1)
        step = factor * (1 + token_s * sum(lengths) / num_requests)
        drafting = factor * draft_s * max(lengths)
        controller.record_step(num_requests + sum(lengths), step, max(lengths), drafting)
        for request, length, n in zip(requests, lengths, accepted, strict=True):
            controller.record_acceptance(request, length, n)
        seconds += step + drafting
        num_tokens += num_requests + sum(accepted)
    return num_tokens / num_requests / seconds


def best_fixed_speedup(alpha: float, draft_s: float, token_s: float) -> float:
    """Return the highest speed-up that a fixed draft length gives."""
    return max(sum(alpha**i for i in range(n + 1)) / (1 + token_s * n + draft_s * n) for n in range(9))


@pytest.mark.parametrize("num_requests", [1, *slow(8)])
@pytest.mark.parametrize("token_s", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("draft_s", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.02, 0.5, 0.8, 0.95])
def test_speed_is_near_the_best_fixed_length_and_never_far_below_plain_decoding(
    alpha: float, draft_s: float, token_s: float, num_requests: int
) -> None:
    speedup = simulate(alpha, draft_s, token_s, 600, num_requests)
    assert speedup > 0.95
    assert speedup > 0.85 * best_fixed_speedup(alpha, draft_s, token_s)


def final_lengths(controller: DraftLengthController, *requests: Request) -> dict[Request, int]:
    controller.num_rounds = 100  # a round that does not explore
    return dict(controller.choose_lengths([(r, 8) for r in requests]))


def test_each_request_has_its_own_acceptance_rate() -> None:
    controller, accepting, rejecting = DraftLengthController(8), make_request([1]), make_request([2])
    for _ in range(200):
        lengths = dict(controller.choose_lengths([(accepting, 8), (rejecting, 8)]))
        num_drafts = sum(lengths.values())
        controller.record_step(2 + num_drafts, 1 + 0.15 * num_drafts, max(lengths.values()), 0.0)
        controller.record_acceptance(accepting, lengths[accepting], lengths[accepting])
        controller.record_acceptance(rejecting, lengths[rejecting], 0)
    lengths = final_lengths(controller, accepting, rejecting)
    assert lengths[accepting] > 3 * max(lengths[rejecting], 1)


def test_a_drafter_that_seldom_proposes_keeps_its_length() -> None:
    """As in prompt lookup: proposing nothing costs nothing, so it is no reason to stop drafting."""
    controller, request = DraftLengthController(8), make_request([1])
    for i in range(100):
        ((_, length),) = controller.choose_lengths([(request, 8)])
        length = length if i > 20 and i % 3 == 0 else 0
        controller.record_step(1 + length, 1.0 + 0.01 * length, length, 1e-5)
        controller.record_acceptance(request, length, length)
    assert final_lengths(controller, request)[request] > 4


def test_no_length_exceeds_its_limit() -> None:
    controller, request = DraftLengthController(8), make_request([1])
    for _ in range(100):
        assert controller.choose_lengths([]) == []
        ((_, length),) = controller.choose_lengths([(request, 3)])
        assert length <= 3
        controller.record_step(1 + length, 1.0, length, 0.0)
        controller.record_acceptance(request, length, length)
    assert length == 3


def test_a_linear_fit_follows_the_latest_points() -> None:
    line = LinearFit()
    assert line.predict(5) == 0.0  # without points
    for x in range(100):
        line.add_point(x % 7, 2 + 3 * (x % 7))
    assert line.predict(10) == pytest.approx(32)
    for x in range(300):
        line.add_point(x % 7, 1)
    assert line.predict(10) == pytest.approx(1, abs=0.01)


def test_a_linear_fit_of_one_point_has_no_slope() -> None:
    line = LinearFit()
    for _ in range(10):
        line.add_point(4, 2.0)
    assert line.predict(9) == pytest.approx(2)
