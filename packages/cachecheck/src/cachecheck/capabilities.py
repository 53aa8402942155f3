"""What a server can do, found out by asking: endpoints, log-probabilities, counts, and ways to a cold answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cachecheck.answer import Answer
from cachecheck.client import ServerClient
from cachecheck.endpoint import Endpoint
from cachecheck.http_client import RefusedError
from cachecheck.texts import Prompt, PromptSource

NUM_WORDS = 150
LARGE_BLOCK_FACTOR = 3  # where half of this text has no whole block
NUM_TRIED = 12  # words of a text by which the server is asked whether it takes a field
SPARE_WORDS = 8  # that texts may share by chance, with rounding to tokens
BAD_SALT = 17  # no text: a server that knows salts refuses it


@dataclass(frozen=True)
class Capabilities:
    """What a server can do. `overhead`: prompt tokens besides the words of a text.

    `factor`: how many times as long texts have to be, so that they have several blocks.
    """

    endpoints: Sequence[Endpoint]
    with_logprobs: frozenset[Endpoint]
    counts_cached: bool
    streams_usage: bool
    knows_salts: bool
    keeps_salts_apart: bool | None  # None: it does not count cached tokens
    opts_out: bool
    overhead: int
    tokens_per_word: float
    factor: int
    is_warm: bool  # most of the first text was cached

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint of texts, which have no template; that of chats where there is no other."""
        return self.endpoints[-1]

    @property
    def allowance(self) -> int:
        """Cached tokens that a text which nobody has sent may have: those of the template, and a few by chance."""
        return self.overhead + round(SPARE_WORDS * self.tokens_per_word)


def detect_capabilities(client: ServerClient, model: str, seed: int) -> Capabilities:
    """Find out what a server can do. Raises ValueError where it answers neither texts nor chats."""
    detectors = {e: _Detector(client, model, PromptSource(f"{seed} capabilities {e}", e)) for e in Endpoint}
    endpoints = [endpoint for endpoint, detector in detectors.items() if detector.accepts()]
    if not endpoints:
        detectors[Endpoint.CHAT].try_fields()  # raises what the server says
    detector = detectors[endpoints[-1]]
    text = detector.texts.prompt(NUM_WORDS)
    first, again = (detector.ask(text) for _ in range(2))
    short = detector.texts.prompt(NUM_WORDS // 2)
    half, half_again = (detector.ask(short) for _ in range(2))
    overhead, tokens_per_word = measure_words(first, half)
    counts_cached = again.cached is not None
    knows_salts = detector.accepts(cache_salt="a") and not detector.accepts(cache_salt=BAD_SALT)
    salted = detector.ask(text, cache_salt=detector.texts.name()) if knows_salts else None
    return Capabilities(
        endpoints=endpoints,
        with_logprobs=frozenset(endpoint for endpoint in endpoints if detectors[endpoint].has_logprobs()),
        counts_cached=counts_cached,
        streams_usage=detector.accepts(stream=True, stream_options={"include_usage": True}),
        knows_salts=knows_salts,
        keeps_salts_apart=None if not (salted and counts_cached) else salted.num_cached <= first.num_cached,
        opts_out=detector.opts_out(text, first, again),
        overhead=overhead,
        tokens_per_word=tokens_per_word,
        factor=LARGE_BLOCK_FACTOR if again.num_cached > first.num_cached and not half_again.num_cached else 1,
        is_warm=2 * first.num_cached > (first.prompt_tokens or 0),
    )


@dataclass(frozen=True)
class _Detector:
    """Asks one endpoint of a server."""

    client: ServerClient
    model: str
    texts: PromptSource

    def ask(self, prompt: Prompt, **fields: Any) -> Answer:
        """Return the answer to a prompt, of one token. Raises RefusedError, ValueError."""
        return self.client.ask(prompt, {"model": self.model, "max_tokens": 1, **fields})

    def try_fields(self, **fields: Any) -> Answer:
        """Return the answer to a short text with fields of a body. Raises RefusedError where it does not take them."""
        return self.ask(self.texts.of(self.texts.words(NUM_TRIED)), **fields)

    def accepts(self, **fields: Any) -> bool:
        """Return whether the server takes fields of a body."""
        try:
            self.try_fields(**fields)
        except RefusedError:
            return False
        return True

    def has_logprobs(self) -> bool:
        """Return whether answers have log-probabilities."""
        try:
            return bool(self.try_fields(**self.texts.endpoint.logprob_fields).tokens)
        except RefusedError:
            return False

    def opts_out(self, text: Prompt, first: Answer, again: Answer) -> bool:
        """Return whether `cache_prompt: false`, a field of llama.cpp's server, has an effect that usage shows."""
        if again.num_cached <= first.num_cached or not self.accepts(cache_prompt=False):
            return False
        return self.ask(text, cache_prompt=False).num_cached <= first.num_cached


def measure_words(long: Answer, half: Answer) -> tuple[int, float]:
    """Return the prompt tokens besides the words, and those of a word: the words of the list are alike."""
    if long.prompt_tokens is None or half.prompt_tokens is None:
        return 0, 1.0
    per_word = (long.prompt_tokens - half.prompt_tokens) / (NUM_WORDS - NUM_WORDS // 2)
    per_word = max(per_word, 0.1)
    return max(0, round(long.prompt_tokens - per_word * NUM_WORDS)), per_word
