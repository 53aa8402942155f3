"""Laws of owners: what one of them asks for does not keep another waiting, and changes no token."""

from __future__ import annotations

import random

import pytest

from retain.engine.request import Request
from tests.helpers.engines import iter_steps, make_engine, make_request, random_prompts, run_alone
from tests.helpers.marks import slow


def num_steps_to_end(engine, request: Request) -> int:
    """Add a request, and return after how many steps it has ended."""
    engine.add(request)
    for num_steps in range(1, 1000):
        engine.step()
        engine.cache.check()
        if request.finish_reason:
            return num_steps
    raise AssertionError("it never ended")


def bobs() -> Request:
    return make_request([5, 6, 7] * 10, 8, owner="bob")


@pytest.mark.parametrize("num_running", [0, 1, 3])
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_an_owner_waits_for_no_long_prompts_of_another(num_running: int, max_tokens: int) -> None:
    """However many requests it has running itself: a prompt that fills each step has but one request running."""
    engine = make_engine("llama", backend="cpu", max_batched_tokens=65)
    alone = num_steps_to_end(engine, bobs())
    engine.add(*(make_request([i + 9] * 20, 200, owner="bob") for i in range(num_running)))
    engine.step()
    engine.add(*(make_request([i + 1] * 400, max_tokens, owner="ann") for i in range(8)))
    engine.step()
    for _ in range(3):
        assert num_steps_to_end(engine, bobs()) <= 2 * alone


@pytest.mark.parametrize("prompt_len", [1, 33], ids=["one token", "cached but for one token"])
def test_an_owner_waits_for_no_prompts_of_one_uncomputed_token(prompt_len: int) -> None:
    """They are admitted without a prompt to compute; that is a turn all the same."""
    engine = make_engine("llama", backend="cpu", max_running_requests=2, prefix_cache="exact")
    prompts = {"ann": [8] * 33, "ben": [9] * 33, "bob": [10] * 33}
    for owner, prompt in prompts.items():
        num_steps_to_end(engine, make_request(prompt, 4, owner=owner))
    for owner in ("ann", "ben") * 20:
        engine.add(make_request(prompts[owner][:prompt_len], 8, owner=owner))  # alone: equal ones would share a prompt
    engine.step()
    assert num_steps_to_end(engine, bobs()) <= 40


def test_an_owner_waits_for_no_running_places_of_another() -> None:
    engine = make_engine("llama", backend="cpu", max_running_requests=4)
    alone = num_steps_to_end(engine, bobs())
    engine.add(*(make_request([i + 1] * 20, 100, owner="ann") for i in range(20)))
    for _ in range(6):
        engine.step()
    assert num_steps_to_end(engine, bobs()) <= 2 * alone


def test_an_owner_waits_for_no_pages_of_another() -> None:
    engine = make_engine("llama", backend="cpu", num_pages=120)  # three of the requests below at their ends
    alone = num_steps_to_end(engine, bobs())
    anns = [make_request([i + 1] * 100, 200, owner="ann") for i in range(6)]
    engine.add(*anns)
    for _ in range(60):
        engine.step()
    assert num_steps_to_end(engine, bobs()) <= 2 * alone
    for _ in iter_steps(engine):
        pass
    assert [len(r.output_tokens) for r in anns] == [200] * 6


def test_an_owner_with_a_request_of_its_own_preempts_nobody() -> None:
    engine = make_engine("llama", backend="cpu", max_running_requests=4)
    engine.add(*(make_request([i + 1] * 20, 40, owner="ann") for i in range(3)))
    engine.step()
    many = [bobs() for _ in range(12)]
    engine.add(*many)
    for _ in iter_steps(engine):
        assert sum(r.input.owner == "ann" for r in engine.scheduler.running) >= 2 or many[0].finish_reason
    assert sum(r.stats.num_preemptions for r in many) == 0


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3, 4, 5)])
def test_company_of_other_owners_changes_no_token(seed: int) -> None:
    """In a pool down to preemption: every request ends, and equals itself alone."""
    rng = random.Random(seed)
    engine = make_engine("llama", backend="cpu", num_pages=90, max_running_requests=6, max_batched_tokens=65)
    prompts = random_prompts(24, seed=seed, max_prompt_len=90)
    requests = [make_request(p, rng.randrange(4, 40), owner=rng.choice("aaaabc")) for p in prompts]
    waiting = list(requests)
    for _ in range(2000):
        if waiting and rng.random() < 0.4:
            engine.add(waiting.pop())
        elif engine.has_unfinished_requests:
            engine.step()
            engine.cache.check()
        elif not waiting:
            break
    assert not waiting and sum(r.stats.num_preemptions for r in requests)
    for request in requests:
        assert request.output_tokens == run_alone("llama", request.prompt, request.input.max_tokens, backend="cpu")
