"""`min_tokens`: nothing ends an answer earlier, and an answer that is long enough is the same without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from retain.engine import drafters
from retain.engine.request import Request, RequestInput
from retain.engine.sampler import sample
from retain.kv.eviction.policies import parse
from retain.sampling_params import SamplingParams
from tests.helpers.engines import GREEDY, make_engine, make_request, random_prompts, run_to_completion
from tests.helpers.marks import slow

NUM_TOKENS = 24
SAMPLED = SamplingParams(temperature=1.5, ignore_eos=True, seed=3)


def run(
    prompt: Sequence[int], stop: int | frozenset[int] | None, min_tokens: int, params: SamplingParams, drafter: str
) -> list[int]:
    engine = make_engine("llama", backend="cpu", drafter=drafters.parse(drafter) if drafter else None)
    stop_ids = stop if isinstance(stop, frozenset) else frozenset() if stop is None else frozenset({stop})
    request = make_request(prompt, NUM_TOKENS, params=replace(params, min_tokens=min_tokens), stop_ids=stop_ids)
    return run_to_completion(engine, [request])[0]


DRAFTERS = ["", "ngram:k=5,min=1", *slow("draft:k=4,model=any")]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_only_a_stop_token_within_min_tokens_changes_a_greedy_answer(drafter: str) -> None:
    for prompt in random_prompts(4, seed=2, max_prompt_len=40):
        full = run(prompt, None, 0, GREEDY, "")
        stop = full[12]
        first = full.index(stop)  # tokens before it
        for min_tokens in (0, 1, first):
            assert run(prompt, stop, min_tokens, GREEDY, drafter) == full[: first + 1]
        longer = run(prompt, stop, first + 3, GREEDY, drafter)
        assert longer[:first] == full[:first] and stop not in longer[: first + 3] and len(longer) > first + 3
        assert longer == run(prompt, stop, first + 3, GREEDY, "")


@pytest.mark.parametrize("drafter", DRAFTERS[:2])
def test_no_sampled_answer_stops_within_min_tokens(drafter: str) -> None:
    """Of eight stop tokens in a vocabulary of 128. Certain drafts change no token."""
    for seed, prompt in enumerate(random_prompts(4, seed=5, max_prompt_len=40)):
        params = replace(SAMPLED, seed=seed)
        stop = frozenset(range(0, 128, 16))
        answer = run(prompt, stop, 15, params, drafter)
        assert not stop & {*answer[:15]} and len(answer) > 15
        assert answer == run(prompt, stop, 15, params, "")


@dataclass
class StopOnly:
    """A grammar that allows one token, from the second row on any."""

    token: int
    failed: bool = False
    seen: list[int] = field(default_factory=list)

    def mask_logits(self, logits: Tensor, drafts: Sequence[int]) -> None:
        allowed = logits[0, self.token].clone()
        logits[0] = -torch.inf
        logits[0, self.token] = allowed

    def accept_token(self, token: int) -> bool:
        return True


def test_a_grammar_that_is_complete_ends_an_answer_all_the_same() -> None:
    params = SamplingParams(temperature=0, min_tokens=5)
    inputs = RequestInput([1], params, parse("full"), 9, stop_ids=frozenset({3}))
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0, 4.0]])
    before = logits.clone()
    ((token, _),) = sample(logits, [Request(inputs)]).read()[0]
    assert token == 4, "without a grammar the stop token is masked"
    ((token, _),) = sample(logits, [Request(inputs, StopOnly(3))]).read()[0]
    assert token == 3 and torch.equal(logits, before)
