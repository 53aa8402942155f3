"""How many drafts are worth their time, on machines that are made up."""

from __future__ import annotations

import random

import pytest

from retain.engine.request import Request
from retain.engine.spec_decode.draft_length import DraftLengthController, LinearFit
from tests.helpers.engines import make_request


def play(alpha: float, draft: float, token: float, n: int, B: int = 1, noise: float = 0.05) -> tuple[float, list[int]]:
    """Times as fast as plain decoding over n rounds, and the most drafts of each; a plain step takes 1."""
    rng, pace, requests = random.Random(1), DraftLengthController(8), [make_request([1]) for _ in range(B)]
    seconds, tokens, chosen = 0.0, 0, []
    for _ in range(n):
        ks = [k for _, k in pace.choose_lengths([(r, 8) for r in requests])]
        chosen.append(max(ks))
        right = []
        for k in ks:
            good = 0
            while good < k and rng.random() < alpha:
                good += 1
            right.append(good)
        wobble = 1 + noise * rng.uniform(-1, 1)
        step, drafting = wobble * (1 + token * sum(ks) / B), wobble * draft * max(ks)
        pace.record_step(B + sum(ks), step, max(ks), drafting)
        for r, k, good in zip(requests, ks, right, strict=True):
            pace.record_acceptance(r, k, good)
        seconds += step + drafting
        tokens += B + sum(right)
    return tokens / B / seconds, chosen


def best(alpha: float, draft: float, token: float) -> float:
    """The most that a fixed number of drafts gives."""
    return max(sum(alpha**i for i in range(k + 1)) / (1 + token * k + draft * k) for k in range(9))


@pytest.mark.parametrize("B", [1, 8])
@pytest.mark.parametrize("token", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("draft", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("alpha", [0.02, 0.5, 0.8, 0.95])
def test_it_comes_near_the_best_fixed_number_and_never_falls_far_below_plain(
    alpha: float, draft: float, token: float, B: int
) -> None:
    times, _ = play(alpha, draft, token, 600, B)
    assert times > 0.95
    assert times > 0.85 * best(alpha, draft, token)


def test_requests_are_judged_apart() -> None:
    pace, lucky, unlucky = DraftLengthController(8), make_request([1]), make_request([2])
    for _ in range(200):
        asked = pace.choose_lengths([(lucky, 8), (unlucky, 8)])
        ks = {id(r): k for r, k in asked}
        pace.record_step(2 + sum(ks.values()), 1 + 0.15 * sum(ks.values()), max(ks.values()), 0.0)
        for r in (lucky, unlucky):
            pace.record_acceptance(r, ks[id(r)], ks[id(r)] if r is lucky else 0)
    assert dict(_last(pace, lucky, unlucky))[lucky] > 3 * max(dict(_last(pace, lucky, unlucky))[unlucky], 1)


def _last(pace: DraftLengthController, *requests: Request) -> list[tuple[Request, int]]:
    pace.num_rounds = 100  # not one that tries something else
    return pace.choose_lengths([(r, 8) for r in requests])


def test_who_seldom_finds_a_draft_is_asked_again() -> None:
    """As in prompt look-up: nothing at all for a while costs nothing, so there is no reason to stop."""
    pace, r = DraftLengthController(8), make_request([1])
    for i in range(100):
        ((_, k),) = pace.choose_lengths([(r, 8)])
        k = k if i > 20 and i % 3 == 0 else 0
        pace.record_step(1 + k, 1.0 + 0.01 * k, k, 1e-5)
        pace.record_acceptance(r, k, k)
    assert dict(_last(pace, r))[r] > 4


def test_room_is_a_bound() -> None:
    pace, r = DraftLengthController(8), make_request([1])
    for _ in range(100):
        assert pace.choose_lengths([]) == []
        ((_, k),) = pace.choose_lengths([(r, 3)])
        assert k <= 3
        pace.record_step(1 + k, 1.0, k, 0.0)
        pace.record_acceptance(r, k, k)
    assert k == 3


def test_a_line_follows_what_is_new() -> None:
    line = LinearFit()
    assert line.predict(5) == 0.0  # nothing is known
    for x in range(100):
        line.add_point(x % 7, 2 + 3 * (x % 7))
    assert line.predict(10) == pytest.approx(32)
    for x in range(300):
        line.add_point(x % 7, 1)
    assert line.predict(10) == pytest.approx(1, abs=0.01)
    steady = LinearFit()
    for _ in range(10):
        steady.add_point(4, 2.0)
    assert steady.predict(9) == pytest.approx(2)  # one point is no slope
