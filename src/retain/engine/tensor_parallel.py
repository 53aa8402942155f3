"""Several ranks that compute one model: the first schedules, the others repeat what it does to its cache and compute.

One message a step goes from the first rank to the others: calls of its cache, then the tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from retain.engine.runner import Runner
from retain.engine.step_tokens import StepTokens
from retain.formats.lora import LoRAAdapter
from retain.kernels.ranks import Ranks
from retain.kv.journal import CacheJournal, Call, JournalReader
from retain.kv.manager import KVCacheManager
from retain.models.adapter_bank import AdapterBank


class RankGroup(Ranks, Protocol):
    """Ranks, and messages from the first to the others."""

    def broadcast(self, message: Any = None) -> Any:
        """Return the message of the first rank, on all of them. Raises RankError where a rank has gone."""


@dataclass(frozen=True)
class StepMessage:
    """What the other ranks do in a step: repeat calls, forget texts, and compute."""

    calls: Sequence[Call]
    forgotten: Sequence[int]
    tokens: StepTokens


@dataclass(frozen=True)
class AdapterMessage:
    """An adapter that the other ranks put into a place of their banks."""

    number: int
    adapter: LoRAAdapter


class Leader:
    """The first rank's side: it notes what is done to its cache, and sends it with the tokens of each step."""

    def __init__(self, cache: KVCacheManager, ranks: RankGroup):
        self.ranks = ranks
        self.journal = CacheJournal()
        cache.parts.journal = self.journal
        cache.prefix_cache.set_clock(lambda: self.journal.time)

    def announce(self, tokens: StepTokens) -> None:
        """Let the other ranks compute a step. Raises RankError where one has ended."""
        self.ranks.broadcast(StepMessage(*self.journal.take(), tokens))

    def load_adapter(self, number: int, adapter: LoRAAdapter) -> None:
        """Let the other ranks have an adapter. Raises RankError where one has ended."""
        self.ranks.broadcast(AdapterMessage(number, adapter))


def follow(runner: Runner, cache: KVCacheManager, ranks: RankGroup, bank: AdapterBank | None = None) -> None:
    """Do what the first rank says until it ends. Raises RankError where it has gone, and DivergedError.

    `bank` has the adapters of the runner's program.
    """
    reader = JournalReader(cache)
    cache.prefix_cache.set_clock(lambda: reader.time)
    while (message := ranks.broadcast()) is not None:
        if isinstance(message, AdapterMessage):
            assert bank is not None
            bank.write(message.number, message.adapter)
            continue
        reader.repeat(message.calls, message.forgotten)
        runner.forward(message.tokens.build_step(cache))
