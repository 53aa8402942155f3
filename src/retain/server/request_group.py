"""A request group: the choices of one HTTP request, and the channel from the engine thread to its coroutine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from retain.engine.hints import Hint
from retain.engine.request import FinishReason, Logprob, Request
from retain.processing.output import RequestOutputState

REPORTED_REASONS = {  # vLLM's words, in metrics and traces
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.FAILED: "error",
    FinishReason.OUT_OF_MEMORY: "error",
}


class EngineError(Exception):
    """The engine could not finish a request, through no fault of the client. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 500):
        super().__init__(message)
        self.status = status


@dataclass(slots=True, eq=False)
class OutputDelta:
    """New output of one choice since its last delta.

    `prompt_logprobs` come with the first delta only, for the prompt's tokens but its first, where they were requested.
    """

    index: int
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[Logprob] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: Sequence[Logprob] = ()


class Pin(NamedTuple):
    """How many tokens of a prompt are pinned once it is computed (None: all), and for how many seconds."""

    seconds: float
    num_tokens: int | None = None


@dataclass(frozen=True)
class CallInfo:
    """What traces tell of the HTTP call of a group: its operation, the model that it names, its W3C trace headers."""

    operation: str = "chat"
    model: str = ""
    trace_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class PooledCallStats:
    """What a call computed whose texts are pooled, a group of them at a time. Its requests are not kept."""

    call: CallInfo
    num_texts: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason = FinishReason.CANCELLED  # until it has another
    start_time: float = field(default_factory=perf_counter)


@dataclass(eq=False)
class RequestGroup:
    """Choices that are generated together. The engine thread appends deltas; one coroutine takes them.

    `key_name` labels the requests in the inspector. `pins` are those of the first prompt.
    `stream_interval`: tokens of a delta, at least, but for the first and the last; None: one delta at the end.
    `call`: None where the group is a part of a call (see PooledCallStats). `hints` are about each text at its end.
    """

    request_states: Sequence[RequestOutputState]
    key_name: str
    pins: Sequence[Pin] = ()
    stream_interval: int | None = None
    call: CallInfo | None = None
    hints: Sequence[Hint] = ()

    def __post_init__(self) -> None:
        self.num_unfinished = len(self.request_states)  # counted by the engine thread
        self.num_pinned_tokens: int | None = 0 if self.pins else None  # None where nothing is to be pinned
        self.warnings: list[str] = []  # found while the requests ran
        self._error: Exception | None = None
        self._num_collected = [(0, 0)] * len(self.request_states)  # tokens and logprobs of each choice
        self._deltas: deque[OutputDelta] = deque()  # appended by the engine thread, taken by the event loop
        self._has_deltas = asyncio.Event()

    @property
    def requests(self) -> list[Request]:
        """The engine's requests, one for each choice."""
        return [state.request for state in self.request_states]

    def record_pin(self, num_wanted: int, num_pinned: int) -> None:
        """Record the tokens that a pin keeps, and warn where they are fewer than the full pages of what was wanted.

        Only whole answers show the warning: a stream's headers are sent by then. Called in the engine thread.
        """
        self.num_pinned_tokens = max(self.num_pinned_tokens or 0, num_pinned)
        if num_pinned < num_wanted:
            self.warnings.append(f"pin: {num_pinned} of {num_wanted} tokens are kept")

    def is_due(self, index: int) -> bool:
        """Return whether choice `index` has a delta for the client. Called in the engine thread."""
        request = self.request_states[index].request
        num_sent = self._num_collected[index][0]
        if request.finish_reason or self.stream_interval is None:
            return request.finish_reason is not None
        num_new = len(request.tokens) - len(request.prompt) - num_sent
        return num_new >= self.stream_interval or not num_sent

    def collect(self, index: int) -> None:
        """Append the new output of choice `index`. Called in the engine thread, which then schedules `notify`."""
        state = self.request_states[index]
        request = state.request
        num_tokens, num_logprobs = self._num_collected[index]
        delta = OutputDelta(
            index,
            text=state.take_text(),
            token_ids=request.tokens[len(request.prompt) + num_tokens :],
            logprobs=request.logprobs[num_logprobs:],
            finish_reason=request.finish_reason,
            prompt_logprobs=() if num_tokens else state.prompt_logprobs,
        )
        self._num_collected[index] = num_tokens + len(delta.token_ids), len(request.logprobs)
        self._deltas.append(delta)

    def notify(self) -> None:
        """Wake the coroutine that awaits deltas. Called in the event loop."""
        self._has_deltas.set()

    def fail(self, error: Exception) -> None:
        """Make `get_deltas` raise this error. Called in the event loop."""
        self._error = error
        self._has_deltas.set()

    async def get_deltas(self) -> list[OutputDelta]:
        """Wait for deltas and take them. Raises the error given to `fail`."""
        await self._has_deltas.wait()
        self._has_deltas.clear()
        if self._error:
            raise self._error
        return [self._deltas.popleft() for _ in range(len(self._deltas))]
