"""Several ranks that compute one model: the first drives, the others repeat what it does to its cache, and compute.

One message a step goes from the first rank to the others: calls of its cache, then the tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from retain.engine.runner import Runner
from retain.engine.step_tokens import StepTokens
from retain.formats.lora import LoRAAdapter
from retain.kernels.ranks import ProcessGroup, RankError
from retain.kv.journal import CacheJournal, Call, JournalReader
from retain.kv.manager import KVCacheManager
from retain.models.adapter_bank import AdapterBank


class RankGroup(ProcessGroup, Protocol):
    """A process group, and messages from the first rank to the others."""

    def broadcast(self, message: Any = None) -> Any:
        """Return the message of the first rank, on all of them. Raises RankError where a rank has ended."""

    def least(self, number: int) -> int:
        """Return the least of the numbers that all ranks give. Raises ValueError with why a rank has none."""

    def connect(self, device: torch.device) -> None:
        """Prepare `all_gather` on a device, with all ranks. Raises RankError where one has ended."""

    def is_shared(self, value: object) -> bool:
        """Return whether all ranks give this value. Raises RankError where a rank has ended."""

    def abort(self) -> None:
        """Let all exchanges end, now and later: the other ranks end."""

    def name_ended(self) -> str:
        """Return which rank has ended, if that is known within a moment."""


@dataclass(frozen=True)
class StepMessage:
    """What the other ranks do in a step: repeat calls, forget texts, and compute."""

    calls: Sequence[Call]
    released_texts: Sequence[int]
    tokens: StepTokens | None  # None: there is nothing to compute yet


@dataclass(frozen=True)
class AdapterMessage:
    """An adapter that the other ranks put into a place of their banks."""

    number: int
    adapter: LoRAAdapter


class Driver(CacheJournal):
    """The journal of the first rank's cache, which goes to the others with the tokens of each step."""

    def __init__(self, cache: KVCacheManager, group: RankGroup):
        super().__init__()
        self.group = group
        self.cache = cache
        cache.parts.journal = self
        cache.prefix_cache.set_clock(lambda: self.time)
        self._has_tiers = cache.prefix_cache.offloader is not None
        if self._has_tiers:
            cache.prefix_cache.set_agreement(group)

    @classmethod
    def of(cls, cache: KVCacheManager) -> Driver | None:
        """Return the driver of a cache; None where there are no other ranks."""
        journal = cache.parts.journal
        return journal if isinstance(journal, Driver) else None

    def is_sent_ahead(self, name: str, owner: Any) -> bool:
        """Return whether ranks ask in this call what all of them have in stores, or have loaded."""
        asks = name in ("start", "prefetch", "finish_prefetch", "demote") or (
            name == "finish_load" and owner.load is not None
        )
        return self._has_tiers and asks

    def expire(self) -> None:
        """Drop the pins whose time is over."""
        self.cache.prefix_cache.expire_pins()

    def abort(self) -> None:
        """Let the other ranks end."""
        self.group.abort()

    def flush(self) -> None:
        """Let the other ranks repeat the calls now. Raises RankError where one has ended."""
        self.group.broadcast(StepMessage(*self.take(), None))

    def broadcast_step(self, tokens: StepTokens) -> None:
        """Let the other ranks compute a step. Raises RankError where one has ended."""
        self.group.broadcast(StepMessage(*self.take(), tokens))

    def load_adapter(self, number: int, adapter: LoRAAdapter) -> None:
        """Let the other ranks have an adapter. Raises RankError where one has ended."""
        self.group.broadcast(AdapterMessage(number, adapter))

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Raise RankError where a step fails that the others compute: they would wait for its exchanges."""
        try:
            yield
        except RankError as error:
            raise RankError(self.group.name_ended()) from error
        except Exception as error:
            self.group.abort()
            raise RankError(f"the first rank failed ({type(error).__name__}: {error}), and") from error
        except BaseException:  # such as KeyboardInterrupt
            self.group.abort()
            raise


def run_worker(runner: Runner, cache: KVCacheManager, group: RankGroup, bank: AdapterBank | None = None) -> None:
    """Do what the first rank says, until a message is None. Raises RankError where it has ended, and DivergedError.

    `bank` has the adapters of the runner's program.
    """
    reader = JournalReader(cache)
    cache.prefix_cache.set_clock(lambda: reader.time)
    if cache.prefix_cache.offloader:
        cache.prefix_cache.set_agreement(group)
    while (message := group.broadcast()) is not None:
        if isinstance(message, AdapterMessage):
            assert bank is not None
            bank.write(message.number, message.adapter)
            continue
        reader.repeat(message.calls, message.released_texts)
        if message.tokens is not None:
            runner.forward(message.tokens.build_step(cache))
