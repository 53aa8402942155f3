"""Output processing: sampled tokens become text, and stop strings end answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from weakref import WeakValueDictionary

from torch import Tensor

from retain.engine.output import OutputProcessor as TokenProcessor
from retain.engine.request import FinishReason, Logprob, Request, SampledTokens
from retain.engine.sampler import compute_logprobs
from retain.kv.manager import KVCacheManager
from retain.outputs import RequestOutput
from retain.processing.detokenizer import IncrementalDetokenizer
from retain.processing.prefix_report import PrefixReport, build_report
from retain.processing.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def is_logging_prefixes() -> bool:
    """Whether the log tells of every prompt why it began with no more cached tokens."""
    return log.isEnabledFor(logging.DEBUG)


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
        self.request, self.detokenizer, self.is_speculative = request, detokenizer, is_speculative
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


class OutputProcessor(TokenProcessor):
    """Detokenize the answers of registered requests, and turn ended requests into outputs."""

    def __init__(self, cache: KVCacheManager, tokenizer: Tokenizer):
        self.cache, self.tokenizer = cache, tokenizer
        # By the request's id. Callers own the states, which refer to their requests: neither may live on here.
        self._states: WeakValueDictionary[int, RequestOutputState] = WeakValueDictionary()

    def register(self, state: RequestOutputState) -> None:
        """Detokenize this request's answer from now on, as long as the caller keeps the state."""
        self._states[state.request.id] = state

    def matches_stop_string(self, request: Request, token: int) -> bool:
        """See retain.engine.output."""
        state = self._states.get(request.id)
        return state is not None and state.add_token(token)

    def process_tokens(self, request: Request, tokens: SampledTokens) -> FinishReason | None:
        """See retain.engine.output."""
        reason = super().process_tokens(request, tokens)
        if reason and is_logging_prefixes() and (report := self.report_prefix(request)):
            log.debug("prefix of request %d: %s", request.id, report.summarize())
        return reason

    def report_prefix(self, request: Request) -> PrefixReport | None:
        """Return why a request began with no more cached tokens, where that was asked for."""
        diagnosis = request.stats.prefix_diagnosis
        return build_report(diagnosis, self.tokenizer) if diagnosis else None

    def process_logits(self, request: Request, logits: Tensor) -> None:
        """See retain.engine.output."""
        if state := self._states.get(request.id):
            state.on_logits(logits)

    def to_output(self, state: RequestOutputState) -> RequestOutput:
        """Return the output of a request that has ended."""
        request, stats = state.request, state.request.stats
        state.take_text()
        decode_s = stats.finish_time - stats.first_token_time
        prefix = self.report_prefix(request) if request.input.explain_prefix else None
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
            kv=self.cache.request_stats(request.policy, len(request.tokens) - 1, stats.memory),
            speculate=stats.spec_decode.summarize(decode_tok_s) if state.is_speculative else None,
            prefix=prefix.to_json() if prefix else None,
        )
