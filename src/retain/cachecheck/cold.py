"""Cold answers: what a prompt's answer is without a cache, on a server whose cache a client cannot clear.

The first answer to a text that nobody has sent is cold. Several texts with one beginning need another way: a salt that
nobody has used, a request that opts out of the cache, or a command that empties it. After one flush each family of
texts, those with one beginning, has one cold answer; so prompts are asked in rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from retain.cachecheck.answer import Answer
from retain.cachecheck.config import CachecheckConfig
from retain.cachecheck.offers import Offers
from retain.cachecheck.texts import Prompt, PromptSource
from retain.http_client import Json

Ask = Callable[[Prompt, Json], Answer]


class ColdAnswers:
    """Asks prompts without a cache, by the best way that the server offers. `way` names it; None: there is none."""

    def __init__(self, offers: Offers, config: CachecheckConfig, ask: Ask, flush: Callable[[], None]):
        self._ask = ask
        self._flush = flush
        self._replays = config.reference == "replay"
        self.way: str | None = None
        if offers.knows_salts and offers.keeps_salts_apart is not False:
            self.way = "salt"
        elif offers.opts_out and not self._replays:
            self.way = "cache_prompt=false"
        elif config.flush_command:
            self.way = "flush"

    def ask(self, prompts: Sequence[Prompt], texts: PromptSource) -> Iterator[tuple[int, Answer]]:
        """Yield the index and the cold answer of each prompt, in any order."""
        rounds: Iterable[Iterable[int]] = _rounds(prompts) if self.way == "flush" else [range(len(prompts))]
        for indices in rounds:
            if self.way == "flush":
                self._flush()
            for i in indices:
                yield i, self._ask_one(prompts[i], self._fields(texts))

    def _fields(self, texts: PromptSource) -> dict[str, Any]:
        if self.way == "salt":
            return {"cache_salt": texts.name()}
        return {"cache_prompt": False} if self.way == "cache_prompt=false" else {}

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
