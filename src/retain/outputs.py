"""What `LLM` gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from retain.engine.request import Logprob


@dataclass(frozen=True)
class RequestOutput:
    """One answer. `token_ids` are the generated ones; times are seconds; `kv` counts bytes and slots."""

    text: str
    token_ids: list[int]
    finish_reason: str  # stop, length or cancelled
    prompt_tokens: int
    cached_tokens: int  # of them, that were computed already
    logprobs: list[Logprob]
    ttft_s: float  # from the call to the first token
    decode_tok_s: float  # after it
    num_preemptions: int
    kv: dict[str, Any]
    speculate: dict[str, Any] | None = None  # what became of drafts


@dataclass(frozen=True)
class StreamChunk:
    """What a stream gives: new text, and with the last piece the whole answer."""

    text: str
    output: RequestOutput | None = None
