"""The results of `LLM`: the output of a request, and the chunks of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from retain.engine.request import Logprob


@dataclass(frozen=True)
class RequestOutput:
    """The output of one request. Times are seconds; `kv` and `speculate` are the objects of `retain run --json`."""

    text: str
    token_ids: list[int]  # the generated ones
    finish_reason: str  # stop, length, cancelled, failed by its grammar, or out_of_memory
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that the prefix cache held
    logprobs: list[Logprob]
    ttft_s: float  # from the call to the first token
    decode_tok_s: float  # tokens per second after the first
    num_preemptions: int
    kv: dict[str, Any]
    speculate: dict[str, Any] | None = None  # None without speculation
    prefix: dict[str, Any] | None = None  # why no more of the prompt was cached, where that was asked for


@dataclass(frozen=True)
class StreamChunk:
    """New text of a stream; the last chunk holds the whole output too."""

    text: str
    output: RequestOutput | None = None
