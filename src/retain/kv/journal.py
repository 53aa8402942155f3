"""The journal of a cache: calls that change it, which the caches of other ranks repeat.

Ranks have caches of equal shapes, so the same calls in the same order leave the same tables, pages and prefix tree in
all of them. What a clock says is in the journal, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import update_wrapper
from time import monotonic
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar
from weakref import WeakKeyDictionary, finalize

from retain.kernels.ranks import RankError
from retain.kv.capacity import CapacityPlanner
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.prefix.start import Begun, Start
from retain.kv.row_task import RowTask
from retain.kv.stats.request import LoadStats
from retain.kv.text import Text

P = ParamSpec("P")
R = TypeVar("R")


class HasJournal(Protocol):
    """What rows share of a cache."""

    journal: CacheJournal | None  # where calls are noted; None where there are no other ranks


class Journaled(Protocol):
    """A cache, or a row of one."""

    @property
    def parts(self) -> HasJournal:
        """What rows share of the cache."""

    def may_exchange(self, method: str) -> bool:
        """Return whether ranks compare their heads in a call of this method: they make it at once."""


J = TypeVar("J", bound=Journaled)


def journaled(method: Callable[Concatenate[J, P], R]) -> Callable[Concatenate[J, P], R]:
    """Note each call of a method that changes a cache. Arguments are given by their places."""

    def call(self: J, /, *args: P.args, **kwargs: P.kwargs) -> R:
        journal = self.parts.journal
        if journal is None or journal.is_calling:
            return method(self, *args, **kwargs)
        assert not kwargs
        return journal.note(self, method, *args)

    update_wrapper(call, method)
    return call


class TextUpdate(NamedTuple):
    """What a rank does not have yet of a text: its number, and the tokens behind the first `begin`."""

    number: int
    begin: int
    tokens: Sequence[int]
    salt: str = ""
    extra: bytes = b""
    extra_from: int = 0


@dataclass(frozen=True)
class Call:
    """A call of a method of the cache, of the row of this index or of HINTS, and what it returned: see `summarize`.

    `texts` and `num_scored` are of the row's task: parts that are new, and how far its scoring passes are.
    """

    name: str
    row: int | None
    args: tuple[Any, ...]
    result: Any
    time: float  # seconds, of the first rank's monotonic clock
    texts: Sequence[TextUpdate] = ()
    num_scored: Sequence[int] = ()
    exchanges: bool = False  # ranks compare heads in it: none may leave it early


class TextRef(NamedTuple):
    """A text as an argument of a call, by its number."""

    number: int


class CacheJournal:
    """Calls that other ranks have not repeated yet."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.released_texts: list[int] = []  # the numbers of texts that are no longer needed
        self.is_calling = False  # what a call does by other methods is not noted
        self.time = monotonic()
        self._texts: WeakKeyDictionary[Text, list[int]] = WeakKeyDictionary()  # number, and tokens that others have
        self._num_texts = 0

    def note(self, owner: Any, method: Callable[..., R], *args: Any) -> R:
        """Call a method, and note it."""
        row = getattr(owner, "index", None)
        task = task_of(owner, args)
        named = [x for x in args if isinstance(x, Text)] + [x.text for x in (*args, task) if isinstance(x, RowTask)]
        texts = [part for text in dict.fromkeys(named) if (part := self._update(text))]
        num_scored = [p.num_done for p in task.scoring_passes] if task else []
        given = tuple(self._to_plain(x) for x in args)
        self.time = monotonic()
        self.expire()
        result: Any = ERROR
        exchanges = bool(owner.may_exchange(method.__name__))
        is_ahead = exchanges or self.is_sent_ahead(method.__name__, owner)
        if is_ahead:  # the others agree on something while they repeat it
            self.calls.append(Call(method.__name__, row, given, UNKNOWN, self.time, texts, num_scored, exchanges))
            self.flush()
        self.is_calling = True
        try:
            returned = method(owner, *args)
            result = summarize(returned)
            return returned
        except Exception as error:
            if exchanges and not isinstance(error, RankError):  # the others wait for what this rank would have given
                self.abort()
                raise RankError(f"the first rank failed ({type(error).__name__}: {error}), and") from error
            raise
        except BaseException:  # such as KeyboardInterrupt, which the others do not have
            self.abort()
            raise
        finally:
            self.is_calling = False
            if not is_ahead:
                self.calls.append(Call(method.__name__, row, given, result, self.time, texts, num_scored))

    def is_sent_ahead(self, name: str, owner: Any) -> bool:
        """Return whether all ranks make a call at once, as they agree on something in it."""
        return False

    def expire(self) -> None:
        """Do what is due by the clock before a call, as the others do before they repeat it."""

    def abort(self) -> None:
        """Let the others end: they cannot repeat what is interrupted."""

    def flush(self) -> None:
        """Let the others repeat the calls now."""
        raise NotImplementedError

    def take(self) -> tuple[list[Call], list[int]]:
        """Return the calls that were noted, and the texts to be released; they are no longer here."""
        taken = self.calls, list(self.released_texts)
        self.calls = []
        del self.released_texts[: len(taken[1])]  # another thread may have added some
        return taken

    def _update(self, text: Text) -> TextUpdate | None:
        """Return what others do not have yet of a text."""
        if text not in self._texts:
            self._num_texts += 1
            self._texts[text] = [self._num_texts, len(text)]
            finalize(text, self.released_texts.append, self._num_texts)
            return TextUpdate(self._num_texts, 0, list(text.ids), text.salt, text.extra, text.extra_from)
        number, known = self._texts[text]
        begin = min(known, len(text))
        if known == len(text):
            return None
        self._texts[text][1] = len(text)
        return TextUpdate(number, begin, text.ids[begin:])

    def _to_plain(self, value: Any) -> Any:
        if isinstance(value, Text):
            return TextRef(self._texts[value][0])
        if isinstance(value, RowTask):
            passes = [replace(p) for p in value.scoring_passes]  # which go on
            return replace(value, text=self._to_plain(value.text), scoring_passes=passes, explain=False, trace=None)
        return None if isinstance(value, Start) else value


HINTS = -1  # in place of a row's index: those of the cache
ERROR = "an error"
UNKNOWN = "unknown yet"  # what a call returns that all ranks make at once


def task_of(owner: Any, args: Sequence[Any]) -> RowTask | None:
    """Return what the row of a call computes, or will compute."""
    return getattr(owner, "task", None) or next((x for x in args if isinstance(x, RowTask)), None)


def summarize(result: Any) -> Any:
    """Return what a call must return on all ranks: a row is its index, what it began with its position."""
    if isinstance(result, Begun):
        return result.position
    if isinstance(result, LoadStats):
        return result.failed
    return result if result is None or isinstance(result, bool | int) else getattr(result, "index", None)


class RepeatedCache(Protocol):
    """The cache of another rank; see kv/manager.py."""

    @property
    def rows(self) -> Mapping[int, Any]:
        """The open rows, by index."""

    @property
    def planner(self) -> CapacityPlanner:
        """What carries policies out here."""

    @property
    def prefix_cache(self) -> Any:
        """The cache of the prefixes of earlier texts."""

    @property
    def hints(self) -> Any:
        """What callers say about texts."""


class DivergedError(RuntimeError):
    """Raised where a call has not returned on this rank what it returned on the first."""


class JournalReader:
    """The cache of a rank that repeats the calls of the first."""

    def __init__(self, cache: RepeatedCache):
        self.cache = cache
        self.time = 0.0  # of the present call
        self._texts: dict[int, Text] = {}

    def repeat(self, calls: Sequence[Call], released_texts: Sequence[int]) -> None:
        """Repeat calls, then release texts. Raises DivergedError."""
        for call in calls:
            self._repeat(call)
        for number in released_texts:
            self._texts.pop(number, None)

    def _repeat(self, call: Call) -> None:
        self.time = call.time
        self.cache.prefix_cache.expire_pins()
        for part in call.texts:
            self._update(part)
        owner = self._owner_of(call)
        args = [self._to_objects(x) for x in call.args]
        if call.name == "start":
            args[1] = self.cache.prefix_cache.find(args[0].text, args[0].demand(owner.policy))
        task = task_of(owner, args)
        for progress, num_done in zip(task.scoring_passes if task else (), call.num_scored, strict=False):
            progress.num_done = num_done
        try:
            result = summarize(getattr(owner, call.name)(*args))
        except Exception:
            if call.result not in (ERROR, UNKNOWN) or call.exchanges:
                raise
            result = ERROR
        if result != call.result and call.result != UNKNOWN:
            raise DivergedError(f"{call.name} returned {result}, and {call.result} on the first rank")

    def _owner_of(self, call: Call) -> Any:
        """Return what a call is of on this rank."""
        if call.row is None:
            return self.cache
        return self.cache.hints if call.row == HINTS else self.cache.rows[call.row]

    def _update(self, part: TextUpdate) -> None:
        text = self._texts.get(part.number)
        if text is None:
            self._texts[part.number] = Text(part.tokens, part.salt, part.extra, part.extra_from)
            return
        text.drop(len(text) - part.begin)
        text.ids += part.tokens

    def _to_objects(self, value: Any) -> Any:
        if isinstance(value, TextRef):
            return self._texts[value.number]
        if isinstance(value, EvictionPolicy):
            return self.cache.planner.effective_policy(value)  # with the numbers of this rank's heads
        return replace(value, text=self._to_objects(value.text)) if isinstance(value, RowTask) else value
