"""Requests that are computed on a device before any other, so that no other waits for its kernels."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import perf_counter

from retain.engine.engine import Engine
from retain.kernels.api import Program
from retain.kv.eviction import policies
from retain.kv.eviction.cost import evicting_lengths
from retain.processing.input import GenerateRequest, InputProcessor
from retain.sampling_params import SamplingParams

log = logging.getLogger(__name__)
# Requests, and tokens of their prompts. Tiles of few query rows, and products of few rows, come in powers of 2.
WARM_UP_BATCHES = (*((1, 2**i) for i in range(7)), (1, 300), (9, 40), (32, 1), (64, 1), (65, 1))
WARM_UP_TOKENS = 6  # of an answer: a step that comes again is recorded
LONGEST_WARM_UP = (8192, 66)  # tokens of a prompt and of an answer, for policies that evict late


@dataclass(frozen=True)
class WarmUp:
    """Kernels of the default policy and of all that requests are allowed; then small steps, which are recorded.

    The requests leave no pages and no prefixes; what does not fit is left out.
    """

    engine: Engine
    input_processor: InputProcessor
    max_batched_tokens: int

    def run(self, program: Program) -> None:
        """Compile the kernels of a program and compute requests of the default policy. Raises ValueError."""
        started = perf_counter()
        cache = self.engine.cache
        with cache.without_prefixes():
            program.compile_ahead(self._launch_all_kernels)
            cache.copy_trash_pages()
            for num_requests, length in WARM_UP_BATCHES:
                self._compute_requests(num_requests, length)
        log.info("warmed up, %.1f s", perf_counter() - started)

    def _launch_all_kernels(self) -> None:
        """Compute the requests of a warm-up for each policy, and two prompts that take several steps.

        The first of these evicts, and has demoted tokens, beside the chunks of the second.
        """
        self.engine.cache.copy_trash_pages()
        for policy in self.input_processor.info.allowed_policies:
            spec = policies.to_spec(policy)
            for num_requests, length in WARM_UP_BATCHES:
                self._compute_requests(num_requests, length, spec)
            length, num_tokens = evicting_lengths(policy, LONGEST_WARM_UP[0])
            length = max(length, self.max_batched_tokens + 100)
            num_tokens = min(max(num_tokens, WARM_UP_TOKENS), LONGEST_WARM_UP[1])
            self._compute_requests(2, length, spec, num_tokens)

    def _compute_requests(
        self, num_requests: int, length: int, kv_policy: str | None = None, num_tokens: int = WARM_UP_TOKENS
    ) -> None:
        """Compute answers to equal prompts of a length. They mean nothing, and what does not fit is left out."""
        engine = Engine(self.engine.runner, self.engine.cache)
        engine.depth = self.engine.depth
        info = self.input_processor.info
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        length = max(min(length, info.max_model_len - num_tokens), 1)
        prompts = [[i % info.vocab_size] * length for i in range(num_requests)]
        try:
            requests = [GenerateRequest(p, params, kv_policy, pools=not info.has_head) for p in prompts]
            states = [s for g in requests for s in self.input_processor.process(g)]
            engine.add(*(state.request for state in states))
        except ValueError as error:
            log.info("not warming up %d requests of %d tokens: %s", num_requests, length, error)
            return
        while engine.has_unfinished_requests:
            engine.step()
