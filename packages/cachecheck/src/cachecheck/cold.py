"""Cold answers: what a prompt's answer is without a cache, on a server whose cache a client cannot clear.

The first answer to a text that nobody has sent is cold. Several texts with one beginning need another way: a salt that
nobody has used, a request that opts out of the cache, or a command that empties it. After one flush each family of
texts, those with one beginning, has one cold answer; so prompts are asked in rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from cachecheck.answer import Answer
from cachecheck.capabilities import Capabilities
from cachecheck.config import CachecheckConfig
from cachecheck.http_client import Json
from cachecheck.texts import Prompt, PromptSource

Ask = Callable[[Prompt, Json], Answer]


class ColdMethod:
    """A way to answers without a cache."""

    name = ""

    def rounds(self, prompts: Sequence[Prompt]) -> Iterator[Iterable[int]]:
        """Yield the indices of prompts that may be asked one after the other."""
        yield range(len(prompts))

    def fields(self, texts: PromptSource) -> Json:
        """Return the fields of a request by which it finds nothing in the cache."""
        return {}

    def has_failed(self, answer: Answer, allowance: int) -> bool:
        """Return whether an answer came from the cache in spite of the method."""
        return False


class NewSalt(ColdMethod):
    """A salt that nobody has used."""

    name = "salt"

    def fields(self, texts: PromptSource) -> Json:
        """Return a new random salt for the request, so that no cached prefix matches."""
        return {"cache_salt": texts.name()}


class OptOut(ColdMethod):
    """A field of a request by which llama.cpp's server uses no cache, which it may ignore."""

    name = "cache_prompt=false"

    def fields(self, texts: PromptSource) -> Json:
        """Return the field of the request that turns the prefix cache off."""
        return {"cache_prompt": False}

    def has_failed(self, answer: Answer, allowance: int) -> bool:
        """Return whether usage counts more cached tokens than a new text may have."""
        return answer.num_cached > allowance


class Flush(ColdMethod):
    """A command that empties the cache: the first text of each family is cold after it."""

    name = "flush"

    def __init__(self, flush: Callable[[], None]):
        self._flush = flush

    def rounds(self, prompts: Sequence[Prompt]) -> Iterator[Iterable[int]]:
        """Empty the cache before each round of prompts that share no beginning."""
        for indices in _rounds(prompts):
            self._flush()
            yield indices


def choose_method(capabilities: Capabilities, config: CachecheckConfig, flush: Callable[[], None]) -> ColdMethod | None:
    """Return the best method that the server offers, None where there is none."""
    if capabilities.knows_salts and capabilities.keeps_salts_apart is not False:
        return NewSalt()
    if capabilities.opts_out and config.reference != "replay":
        return OptOut()
    return Flush(flush) if config.flush_command else None


class ColdAnswers:
    """Asks prompts without a cache, by a method; where there is none, it can ask nothing."""

    def __init__(self, method: ColdMethod | None, config: CachecheckConfig, ask: Ask):
        self.method = method
        self._ask = ask
        self._replays = config.reference == "replay"

    @property
    def name(self) -> str | None:
        """The name of the method, None where there is none."""
        return self.method.name if self.method else None

    def ask(self, prompts: Sequence[Prompt], texts: PromptSource) -> Iterator[tuple[int, Answer]]:
        """Yield the index and the cold answer of each prompt, in any order."""
        if self.method is None:
            return
        for indices in self.method.rounds(prompts):
            for i in indices:
                yield i, self._ask_one(prompts[i], self.method.fields(texts))

    def has_failed(self, answer: Answer, allowance: int) -> bool:
        """Return whether an answer that should be cold came from the cache."""
        return self.method is not None and self.method.has_failed(answer, allowance)

    def _ask_one(self, prompt: Prompt, fields: Json) -> Answer:
        if self._replays:
            for earlier in prompt.history()[:-1]:
                self._ask(earlier, fields)
        return self._ask(prompt, fields)


def _rounds(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Divide prompts into rounds that have one prompt of each family at most."""
    families: dict[str, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        families[prompt.family].append(i)
    return [[i for i in indices if i is not None] for indices in zip_longest(*families.values())]
