"""The server under test: what it can do, how its repeated answers differ, and what was seen of it in all checks."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from cachecheck.answer import Answer
from cachecheck.capabilities import Capabilities
from cachecheck.client import ServerClient
from cachecheck.cold import ColdAnswers, choose_method
from cachecheck.commands import Commands
from cachecheck.comparison import largest_gap
from cachecheck.config import CachecheckConfig
from cachecheck.http_client import Json
from cachecheck.texts import Prompt, PromptSource

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

    def __init__(
        self,
        clients: Sequence[ServerClient],
        model: str,
        config: CachecheckConfig,
        capabilities: Capabilities,
        commands: Commands,
    ):
        self.clients = clients
        self.config = config
        self.capabilities = capabilities
        self.commands = commands
        self.model = model
        self.noise = Noise()
        self.cold = ColdAnswers(choose_method(capabilities, config, commands.flush), config, self.ask)
        self.block_size = 0  # of which all counts of cached tokens are multiples
        self.num_requests = 0
        self.num_cached_tokens = 0
        self.num_hits = 0  # requests of which more was cached than a new text may have
        self._lock = threading.Lock()

    def ask(self, prompt: Prompt, fields: Json, key: int = 0) -> Answer:
        """Return the greedy answer to a prompt."""
        base: Json = {"model": self.model, "max_tokens": self.config.max_tokens}
        if prompt.endpoint in self.capabilities.with_logprobs:
            base |= prompt.endpoint.logprob_fields
        answer = self.clients[key].ask(prompt, {**base, **fields})
        with self._lock:
            self.num_requests += 1
            self.num_cached_tokens += answer.num_cached
            if answer.num_cached > self.capabilities.allowance:
                self.num_hits += 1
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
