"""What a check uses: prompts to ask, and equalities to state. It records a case for each of these."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from retain.cachecheck.answer import Answer
from retain.cachecheck.client import ServerClient, logprob_fields
from retain.cachecheck.cold import ColdAnswers, choose_method
from retain.cachecheck.commands import Commands
from retain.cachecheck.comparison import Difference, compare, find_foreign_words, largest_gap
from retain.cachecheck.config import CachecheckConfig
from retain.cachecheck.offers import Offers
from retain.cachecheck.results import Case, Outcome, SkipCheck
from retain.cachecheck.texts import Prompt, PromptSource
from retain.http_client import Json

LEAST_TOLERANCE = 0.1
LARGEST_NOISE = 1.0  # nats, by which repeated requests may differ before nothing can be told
NUM_NOISE_TEXTS = 3


@dataclass(frozen=True)
class Noise:
    """How repeated requests differ: of log-probabilities, and whether of tokens."""

    gap: float = 0.0
    turns_tokens: bool = False


class Server:
    """The server under test: its clients, what it offers, and what was seen of it in all checks."""

    def __init__(self, clients: Sequence[ServerClient], config: CachecheckConfig, offers: Offers, commands: Commands):
        self.clients = clients
        self.config = config
        self.offers = offers
        self.commands = commands
        self.model = config.model or clients[0].first_model()
        self.noise = Noise()
        self.cold = ColdAnswers(choose_method(offers, config, commands.flush), config, self.ask)
        self.block_size = 0  # of which all counts of cached tokens are multiples
        self.num_requests = 0
        self.num_cached_tokens = 0
        self._lock = threading.Lock()

    def ask(self, prompt: Prompt, fields: Json, key: int = 0) -> Answer:
        """Return the greedy answer to a prompt."""
        base: Json = {"model": self.model, "max_tokens": self.config.max_tokens}
        if prompt.is_chat in self.offers.logprobs:
            base |= logprob_fields(prompt.is_chat)
        answer = self.clients[key].ask(prompt, {**base, **fields})
        with self._lock:
            self.num_requests += 1
            self.num_cached_tokens += answer.num_cached
            if answer.num_cached > self.offers.allowance:
                self.block_size = math.gcd(self.block_size, answer.num_cached)
        return answer

    @property
    def tolerance(self) -> float:
        """The difference of log-probabilities that is no fault."""
        if self.config.tolerance is not None:
            return self.config.tolerance
        return max(LEAST_TOLERANCE, 3 * self.noise.gap)

    def measure_noise(self, texts: PromptSource) -> Noise:
        """Ask the same cold requests twice; where no answer but the first can be cold, the same hits."""
        gap = 0.0
        turns = False
        for prompt in (texts.prompt(60) for _ in range(NUM_NOISE_TEXTS)):
            if self.cold.method:
                pair = [answer for _ in range(2) for _, answer in self.cold.ask([prompt], texts)]
            else:
                pair = [self.ask(prompt, {}) for _ in range(3)][1:]
            gap = max(gap, largest_gap(*pair))
            turns = turns or [t.text for t in pair[0].tokens] != [t.text for t in pair[1].tokens]
            turns = turns or pair[0].text != pair[1].text
        return Noise(gap, turns)


class Probe:
    """One run of one check: its texts, and its cases."""

    def __init__(self, server: Server, texts: PromptSource):
        self.server = server
        self.offers = server.offers
        self.config = server.config
        self.texts = texts
        self.cases: list[Case] = []
        self._pending: list[tuple[Prompt, Answer, str]] = []

    def ask(self, prompt: Prompt, key: int = 0, **fields: Any) -> Answer:
        """Return the answer to a prompt; `fields` are further fields of the request."""
        return self.server.ask(prompt, fields, key)

    def stream(self, prompt: Prompt) -> Answer:
        """Return the answer to a prompt, from the events of a stream."""
        fields: Json = {"stream": True}
        if self.offers.streams_usage:
            fields["stream_options"] = {"include_usage": True}
        return self.server.ask(prompt, fields)

    def ask_together(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Ask all prompts at once."""
        with ThreadPoolExecutor(len(prompts)) as executor:
            return list(executor.map(self.ask, prompts))

    def equal(self, reference: Answer, answer: Answer, what: str) -> bool:
        """State that two answers are equal. Returns whether they are."""
        difference = compare(reference, answer, self.server.tolerance)
        self._record(what, difference, answer)
        return difference is None

    def equal_cold(self, prompt: Prompt, answer: Answer, what: str) -> None:
        """State that an answer is what the prompt's answer is without a cache. It is compared at the check's end."""
        self._pending.append((prompt, answer, what))

    def no_words_of(self, others: Sequence[Prompt], own: Prompt, answer: Answer, what: str) -> None:
        """State that an answer has no words that only other prompts have."""
        words = find_foreign_words(answer, own, others)
        self.judge(words is None, what, f"the answer has {words!r} of another text")

    def not_cached(self, answer: Answer, what: str) -> None:
        """State that nothing of a prompt's text was cached, as far as the server counts it."""
        is_cold = answer.num_cached <= self.offers.allowance
        self.judge(is_cold, what, f"{answer.num_cached} of {answer.prompt_tokens} tokens came from the cache")

    def judge(self, holds: bool, what: str, detail: str) -> None:
        """Record a fault with its detail unless a statement holds."""
        self.cases.append(Case(what, Outcome.PASSED) if holds else Case(what, Outcome.FAULT, detail))

    def unsure(self, what: str, why: str) -> None:
        """Record that nothing can be told."""
        self.cases.append(Case(what, Outcome.UNSURE, why))

    def skip_unless(self, condition: Any, why: str) -> None:
        """End the check with a reason unless a condition holds."""
        if not condition:
            raise SkipCheck(why)

    def settle(self) -> None:
        """Ask the cold answers of all pending cases, and compare."""
        pending = self._pending
        self._pending = []
        if pending and self.server.cold.method is None:
            hint = "the server offers neither salts nor a request without a cache; give a --flush-command"
            self.unsure("answers that have no cold reference", f"{len(pending)}: {hint}")
            return
        for i, reference in self.server.cold.ask([prompt for prompt, _, _ in pending], self.texts):
            _, answer, what = pending[i]
            if self.server.cold.has_failed(reference, self.offers.allowance):
                self.unsure(what, "the reference came from the cache, too")
            else:
                self.equal(reference, answer, what)

    def _record(self, what: str, difference: Difference | None, answer: Answer) -> None:
        noise = self.server.noise
        if noise.gap > LARGEST_NOISE:
            self.unsure(what, f"repeated requests differ by {noise.gap:.2g} nats")
            return
        if difference is None:
            self.cases.append(Case(what, Outcome.PASSED))
            return
        detail = f"{difference.detail} ({answer.prompt_tokens} tokens, {answer.cached} cached)"
        if noise.turns_tokens and not difference.is_certain:
            self.unsure(what, f"{detail}; repeated requests differ, too")
        else:
            self.cases.append(Case(what, Outcome.FAULT, detail, needs_confirmation=not difference.is_certain))
