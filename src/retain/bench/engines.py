"""What the benches run: requests on random prompts, engines over one model and cache, and the times of their steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from retain.engine.engine import Engine
from retain.engine.request import Adapter, Request, RequestInput
from retain.engine.runner import Runner
from retain.kernels.api import Batch
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.manager import KVCacheManager
from retain.llm import LLM
from retain.sampling_params import SamplingParams

NUM_TOKENS = 40_000  # of a vocabulary, at most; the first hundred are often control tokens


def random_prompts(vocab_size: int, prompt_len: int, num_prompts: int, seed: int) -> list[list[int]]:
    """Return pseudo-random token ids."""
    rng = random.Random(seed)
    ids = plain_token_ids(vocab_size)
    return [[rng.randrange(ids.start, ids.stop) for _ in range(prompt_len)] for _ in range(num_prompts)]


def plain_token_ids(vocab_size: int) -> range:
    """Return the ids that prompts are made of."""
    end = min(NUM_TOKENS, vocab_size)
    return range(min(100, end - 1), end)


def greedy_request(
    cache: KVCacheManager,
    prompt: Sequence[int],
    policy: EvictionPolicy,
    output_len: int,
    seed: int = 0,
    adapter: Adapter | None = None,
) -> Request:
    """Return a request of exactly `output_len` tokens for an engine on this cache.

    `seed` is that of a policy's noise. Raises ValueError for a text that the context does not hold.
    """
    if len(prompt) + output_len > cache.max_model_len:
        needed = f"a prompt of {len(prompt)} tokens and {output_len} more"
        raise ValueError(f"{needed} do not fit the model's context of {cache.max_model_len}: see --max-model-len")
    params = SamplingParams(temperature=0, ignore_eos=True, seed=seed)
    planned = cache.plan_policy(policy, len(prompt))
    input = RequestInput(prompt=list(prompt), params=params, policy=planned, max_tokens=output_len, adapter=adapter)
    return Request(input)


def make_engine(llm: LLM, requests: Sequence[Request]) -> Engine:
    """Return another engine over the same model and cache."""
    engine = Engine(llm.engine.runner, llm.cache, prompt_activations=llm.config.prompt_activations)
    engine.add(*requests)
    return engine


def run_until_first_tokens(engine: Engine) -> None:
    """Step until every request has its first token, and its scoring passes are over."""
    scheduler = engine.scheduler
    while scheduler.waiting or any(r.scoring or not r.stats.first_token_time for r in scheduler.running):
        engine.step()


def cancel_all(engine: Engine) -> None:
    """Cancel all requests of an engine."""
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.cancel(request)


@dataclass
class DecodeTimer:
    """Runs steps of an engine and adds up those that decode and do nothing else.

    Such a step computes no prompt, admits no request and gives tokens to every running request, of which there are at
    least `min_batch`. Times come from the steps themselves: the difference of two long runs, one with and one without
    decoding, may be anything where decoding is a small part of both.
    """

    engine: Engine
    min_batch: int = 1
    clock: Callable[[], float] = perf_counter
    seconds: float = 0.0
    forward_seconds: float = 0.0  # of `seconds`, those in which the model computes
    num_steps: int = 0
    num_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests per second of those steps; 0 where there was no such step."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def host_share(self) -> float:
        """The share of those steps outside of the model: scheduling, building batches, sampling. On a CPU only."""
        return 1 - self.forward_seconds / self.seconds if self.seconds else 0.0

    def step(self) -> None:
        """Run one step of the engine, and count it if it only decodes."""
        before = list(self.engine.scheduler.running)
        can_count = len(before) >= self.min_batch and not any(map(_computes_prompt, before))
        num_tokens = sum(len(r.tokens) for r in before)
        self.engine.runner = timed = TimedRunner(self.engine.runner, self.clock)
        started = self.clock()
        try:
            sampled = self.engine.step().token_ids
        finally:
            self.engine.runner = timed.runner
        elapsed = self.clock() - started
        if can_count and set(sampled) == set(before) and not any(map(_computes_prompt, self.engine.scheduler.running)):
            self.seconds += elapsed
            self.forward_seconds += timed.seconds
            self.num_steps += 1
            self.num_tokens += sum(len(r.tokens) for r in before) - num_tokens


class TimedRunner:
    """Runs another runner and adds up its time."""

    def __init__(self, runner: Runner, clock: Callable[[], float]):
        self.runner = runner
        self.clock = clock
        self.seconds = 0.0

    def forward(self, batch: Batch) -> Tensor:
        """Run a batch, and add its time."""
        started = self.clock()
        logits = self.runner.forward(batch)
        self.seconds += self.clock() - started
        return logits

    @property
    def hidden_states(self) -> Tensor | None:
        """The hidden states of the last batch."""
        return self.runner.hidden_states

    @property
    def state_size(self) -> int:
        """Numbers of the hidden state that each request brings into a batch."""
        return self.runner.state_size


def _computes_prompt(request: Request) -> bool:
    """Whether the next step computes more than the last token: a prompt, or tokens that a preemption dropped."""
    return request.finish_reason is None and request.num_uncomputed_tokens > 1


class QueuedRun(NamedTuple):
    """A run of requests that were queued together: its time, the most that ran at once, and tokens of decode steps."""

    seconds: float
    max_running: int
    decode_tok_s: float


def run_queued(engine: Engine) -> QueuedRun:
    """Run all requests of an engine to their end."""
    timer = DecodeTimer(engine)
    max_running = 0
    started = perf_counter()
    while engine.has_unfinished_requests:
        timer.step()
        max_running = max(max_running, len(engine.scheduler.running))
    return QueuedRun(perf_counter() - started, max_running, timer.tokens_per_s)
