"""Output processing: sampled tokens become text. Stop strings and grammars end answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from retain.engine.engine import Engine
from retain.engine.output import StepOutput
from retain.engine.request import FinishReason, Logprob, Request
from retain.engine.sampler import compute_logprobs
from retain.kv.prefix.start import PrefixDiagnosis
from retain.outputs import RequestOutput
from retain.processing.detokenizer import IncrementalDetokenizer
from retain.processing.tokenizer import Tokenizer

log = logging.getLogger(__name__)
SHOWN_TOKENS = 20  # of a prompt and of the nearest text where they part, and before that place


def is_logging_prefixes() -> bool:
    """Whether the log tells of every prompt why it began with no more cached tokens."""
    return log.isEnabledFor(logging.DEBUG)


def describe_prefix(d: PrefixDiagnosis, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the object `retain.prefix` of a choice: why no more was cached, and texts around where they part."""
    at = d.common_length
    end = at + SHOWN_TOKENS
    return {
        "cached_tokens": d.num_cached_tokens,
        "computed_tokens": d.num_computed_tokens,
        "is_miss": d.reason.is_miss,
        "cause": d.reason.value,
        "detail": d.detail,
        "age_s": None if d.age is None else round(d.age, 1),
        "common_tokens": at,
        "known_tokens": max(d.known_length, d.num_cached_tokens),
        "before": tokenizer.decode_raw(d.prompt[max(at - SHOWN_TOKENS, 0) : at]),
        "prompt_text": tokenizer.decode_raw(d.prompt[at:end]),
        "nearest_text": tokenizer.decode_raw(d.nearest[at:end]),
    }


class RequestOutputState:
    """A request with the text of its answer, as far as it may be shown.

    `on_logits`: reads the logits [n, V] before the next n tokens, for requests that need them.
    """

    def __init__(
        self,
        request: Request,
        detokenizer: IncrementalDetokenizer,
        is_speculative: bool,
        on_logits: Callable[[Tensor], None] | None = None,
    ):
        self.request = request
        self.detokenizer = detokenizer
        self.is_speculative = is_speculative
        self.on_logits = on_logits or self._add_prompt_logprobs
        self.prompt_logprobs: list[Logprob] = []  # of the prompt's tokens but the first, where the caller wants them
        self._pending_text: list[str] = []
        self._flushed = False

    def add_token(self, token: int) -> bool:
        """Detokenize one more token. Returns whether a stop string is complete."""
        self._pending_text.append(self.detokenizer.add_token(token))
        return self.detokenizer.stopped

    def take_text(self) -> str:
        """Return the text since the last call; after the last token all that was held back."""
        if self.request.finish_reason and not self._flushed:
            self._flushed = True
            self._pending_text.append(self.detokenizer.flush())
        text = "".join(self._pending_text)
        self._pending_text.clear()
        return text

    def _add_prompt_logprobs(self, logits: Tensor) -> None:
        begin = len(self.prompt_logprobs) + 1
        tokens = self.request.prompt[begin : begin + len(logits)]
        num_top = self.request.params.logprobs or 0
        self.prompt_logprobs += compute_logprobs(logits[: len(tokens)], tokens, num_top)


def find_end(
    request: Request, token_ids: Sequence[int], state: RequestOutputState | None
) -> tuple[FinishReason, int] | None:
    """Read the new tokens of a request. Returns why its text ends, and after how many of them; None if it goes on."""
    grammar = request.grammar
    for i, token in enumerate(token_ids):
        if grammar and not grammar.accept_token(token):
            return FinishReason.FAILED, i
        if state and token not in request.input.stop_ids and state.add_token(token):
            return FinishReason.STOP, i + 1
        if grammar and grammar.is_complete:
            return FinishReason.STOP, i + 1
    return None


class OutputProcessor:
    """Run behind each step of an engine: detokenize the answers, and finish the requests whose text ends."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        self.engine = engine
        self.tokenizer = tokenizer
        self._states: dict[Request, RequestOutputState] = {}  # of requests that have not ended

    def add(self, states: Sequence[RequestOutputState]) -> None:
        """Enqueue requests, whose answers are detokenized from now on. Raises ValueError as `Engine.add` does."""
        self.engine.add(*(state.request for state in states))
        self._states |= {state.request: state for state in states}

    def cancel(self, request: Request) -> None:
        """End a request now. One that has ended stays as it is."""
        self.engine.cancel(request)
        self._states.pop(request, None)

    def process(self, output: StepOutput) -> None:
        """Process what a step gave, before the next step begins."""
        for request, logits in output.logits.items():
            if state := self._states.get(request):
                state.on_logits(logits)
        for request, token_ids in output.token_ids.items():
            if end := find_end(request, token_ids, self._states.get(request)):
                reason, num_kept = end
                self.engine.finish(request, reason, len(token_ids) - num_kept)
            if request.finish_reason:
                self._states.pop(request, None)
                self._log_prefix(request)

    def _log_prefix(self, request: Request) -> None:
        """Write a line to the log, where it wants one; it has no text of a prompt."""
        if is_logging_prefixes() and (d := request.stats.prefix_diagnosis):
            cached = f"{d.num_cached_tokens} of {len(d.prompt)} tokens cached"
            shared = f"{d.common_length} shared with the nearest text"
            log.debug("prefix of request %d: %s, %s; %s (%s)", request.id, cached, shared, d.reason.value, d.detail)

    def to_output(self, state: RequestOutputState) -> RequestOutput:
        """Return the output of a request that has ended."""
        request = state.request
        stats = state.request.stats
        state.take_text()
        decode_s = stats.finish_time - stats.first_token_time
        diagnosis = stats.prefix_diagnosis if request.input.explain_prefix else None
        decode_tok_s = max(request.num_output_tokens - 1, 0) / decode_s if decode_s > 0 else 0.0
        return RequestOutput(
            text=state.detokenizer.text,
            token_ids=request.output_tokens,
            finish_reason=(request.finish_reason or FinishReason.CANCELLED).value,
            prompt_tokens=len(request.prompt),
            cached_tokens=stats.num_cached_tokens,
            logprobs=request.logprobs,
            ttft_s=stats.first_token_time - stats.arrival_time,
            decode_tok_s=decode_tok_s,
            num_preemptions=stats.num_preemptions,
            kv=self.engine.cache.request_stats(request.policy, len(request.tokens) - 1, stats.memory),
            speculate=stats.spec_decode.summarize(decode_tok_s) if state.is_speculative else None,
            prefix=describe_prefix(diagnosis, self.tokenizer) if diagnosis else None,
        )
