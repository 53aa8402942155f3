"""What a server offers, found out by asking: endpoints, log-probabilities, counts, and ways to a cold answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from retain.cachecheck.answer import Answer
from retain.cachecheck.client import ServerClient, logprob_fields
from retain.cachecheck.texts import OPENING, Prompt, PromptSource
from retain.http_client import Json, RefusedError

NUM_WORDS = 150
SPARE_WORDS = 8  # that texts may share by chance, with rounding to tokens
BAD_SALT = 17  # no text: a server that knows salts refuses it


@dataclass(frozen=True)
class Capabilities:
    """What a server offers. `overhead`: prompt tokens besides the words of a text."""

    has_completions: bool
    has_chat: bool
    logprobs: frozenset[bool]  # of chats, of texts
    counts_cached: bool
    streams_usage: bool
    knows_salts: bool
    keeps_salts_apart: bool | None  # None: it does not count cached tokens
    opts_out: bool
    overhead: int
    tokens_per_word: float
    is_warm: bool  # most of the first text was cached

    @property
    def allowance(self) -> int:
        """Cached tokens that a text which nobody has sent may have: those of the template, and a few by chance."""
        return self.overhead + round(SPARE_WORDS * self.tokens_per_word)


class Discovery:
    """Finds out what a server offers."""

    def __init__(self, client: ServerClient, base_fields: Json, texts: PromptSource):
        self.client = client
        self.base_fields = base_fields
        self.texts = texts

    def run(self) -> Capabilities:
        """Ask the server. Raises ValueError where it answers neither texts nor chats."""
        kinds = {is_chat: self._works(is_chat, {}) for is_chat in (False, True)}
        if not any(kinds.values()):
            self._ask(Prompt((OPENING,), is_chat=True), {})  # raises what the server says
        self.texts.is_chat = not kinds[False]
        logprobs = frozenset(k for k, works in kinds.items() if works and self._has_logprobs(k))
        text = self.texts.prompt(NUM_WORDS)
        first, again = (self._ask(text, {}) for _ in range(2))
        overhead, tokens_per_word = self._measure_words(first)
        counts_cached = again.cached is not None
        knows_salts = self._works(None, {"cache_salt": "a"}) and not self._works(None, {"cache_salt": BAD_SALT})
        salted = self._ask(text, {"cache_salt": self.texts.name()}) if knows_salts else None
        return Capabilities(
            has_completions=kinds[False],
            has_chat=kinds[True],
            logprobs=logprobs,
            counts_cached=counts_cached,
            streams_usage=self._works(None, {"stream": True, "stream_options": {"include_usage": True}}),
            knows_salts=knows_salts,
            keeps_salts_apart=None if not (salted and counts_cached) else salted.num_cached <= first.num_cached,
            opts_out=self._opts_out(text, first, again),
            overhead=overhead,
            tokens_per_word=tokens_per_word,
            is_warm=2 * first.num_cached > (first.prompt_tokens or 0),
        )

    def _opts_out(self, text: Prompt, first: Answer, again: Answer) -> bool:
        """Return whether `cache_prompt: false`, a field of llama.cpp's server, has an effect that usage shows."""
        if again.num_cached <= first.num_cached or not self._works(None, {"cache_prompt": False}):
            return False
        return self._ask(text, {"cache_prompt": False}).num_cached <= first.num_cached

    def _has_logprobs(self, is_chat: bool) -> bool:
        fields = logprob_fields(is_chat)
        return self._works(is_chat, fields, lambda answer: bool(answer.tokens))

    def _measure_words(self, long: Answer) -> tuple[int, float]:
        """Return the prompt tokens besides the words, and those of a word: the words of the list are alike."""
        half = self._ask(self.texts.prompt(NUM_WORDS // 2), {})
        if long.prompt_tokens is None or half.prompt_tokens is None:
            return 0, 1.0
        per_word = (long.prompt_tokens - half.prompt_tokens) / (NUM_WORDS - NUM_WORDS // 2)
        per_word = max(per_word, 0.1)
        return max(0, round(long.prompt_tokens - per_word * NUM_WORDS)), per_word

    def _works(
        self, is_chat: bool | None, fields: Json, accepts: Callable[[Answer], bool] = lambda answer: True
    ) -> bool:
        kind = self.texts.is_chat if is_chat is None else is_chat
        prompt = Prompt((" ".join((OPENING, *self.texts.words(12))),), kind)
        try:
            return accepts(self._ask(prompt, fields))
        except RefusedError:
            return False

    def _ask(self, prompt: Prompt, fields: Json) -> Answer:
        return self.client.ask(prompt, {**self.base_fields, "max_tokens": 1, **fields})
