"""Answers of a server: their tokens with log-probabilities, counts and times, whole or from the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cachecheck.http_client import Json

MAX_COUNT = 2**53  # of tokens
NOT_OPENAI = "the answer is not one of OpenAI's API"


@dataclass(frozen=True)
class Token:
    """A token of an answer, its log-probability, and those of the most likely tokens at its place."""

    text: str
    logprob: float
    top: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a server answered to one prompt. `cached`: prompt tokens from the cache, None where it does not say."""

    text: str
    tokens: Sequence[Token] = ()  # none where the server offers no log-probabilities
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached: int | None = None
    seconds: float = 0.0
    reasoning: str = ""  # with which the text begins

    @property
    def num_cached(self) -> int:
        """The cached tokens; 0 where the server does not say."""
        return self.cached or 0


def read_answer(body: Json, seconds: float) -> Answer:
    """Return the answer of a whole response, or of events joined by `join_events`. Raises ValueError."""
    try:
        choice = body["choices"][0]
        usage = body.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            text=_read_text(choice),
            tokens=tuple(_read_tokens(choice.get("logprobs") or {})),
            finish_reason=choice.get("finish_reason"),
            prompt_tokens=_read_count(usage, "prompt_tokens"),
            cached=_read_count(details, "cached_tokens"),
            seconds=seconds,
            reasoning=_read_reasoning(choice),
        )
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
        raise ValueError(NOT_OPENAI) from None


def join_events(events: Iterable[Json]) -> Json:
    """Join the events of a stream to the response that they stand for. Raises ValueError."""
    texts: list[str] = []
    logprobs: dict[str, list[Any]] = {}
    usage: Json | None = None
    finish_reason = None
    try:
        for event in events:
            usage = event.get("usage") or usage
            for choice in event.get("choices") or ():
                texts.append(_read_text(choice))
                finish_reason = choice.get("finish_reason") or finish_reason
                for name, values in (choice.get("logprobs") or {}).items():
                    logprobs.setdefault(name, []).extend(values or ())
    except (TypeError, AttributeError):
        raise ValueError(NOT_OPENAI) from None
    choice = {"text": "".join(texts), "logprobs": logprobs, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": usage}


def _read_text(choice: Json) -> str:
    """Return the text of a choice, whole or a piece; reasoning counts as text."""
    if "text" in choice:
        return "" + (choice["text"] or "")  # a TypeError for another type
    message = choice.get("message") or choice.get("delta") or {}
    return _read_reasoning(choice) + (message.get("content") or "")


def _read_reasoning(choice: Json) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    return "" + (message.get("reasoning_content") or message.get("reasoning") or "")  # a TypeError for another type


def _read_tokens(logprobs: Json) -> Iterator[Token]:
    """Yield tokens in the form of chat completions (`content`) or in that of completions."""
    for token in logprobs.get("content") or ():
        top = {t["token"]: float(t["logprob"]) for t in token.get("top_logprobs") or ()}
        yield Token(token["token"], float(token["logprob"]), top)
    texts = logprobs.get("tokens") or ()
    tops = logprobs.get("top_logprobs") or [None] * len(texts)
    for text, logprob, top in zip(texts, logprobs.get("token_logprobs") or (), tops, strict=False):
        yield Token(text, float(logprob), {t: float(p) for t, p in (top or {}).items()})


def _read_count(counts: Json, name: str) -> int | None:
    value = counts.get(name)
    if value is not None and not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name} is no number of tokens")
    return None if value is None else int(value)
