"""The desk, where texts become requests and requests become answers. What is not known here: when they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from retain.engine.request import FinishReason, Logprob, Request
from retain.engine.sampler import compute_logprobs
from retain.engine.spec_decode.speculator import NO_SPECULATION
from retain.kv.eviction import policies
from retain.kv.eviction.policies import Policy
from retain.kv.memory.cache import Cache
from retain.kv.stats.request import request_memory_stats
from retain.models.decoder import ModelSpec
from retain.outputs import RequestOutput
from retain.processing import IncrementalDetokenizer, Tokenizer
from retain.processing.grammar import GrammarCompiler
from retain.sampling_params import SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class GenerateRequest:
    """What somebody wants.

    `kv_policy` and `speculate` are the engine's own where they are None. The first `system` tokens of the prompt are a
    system prompt: policies with `protect=system` never forget them. Texts share prefixes with those of the same `salt`
    only. `form`: a grammar of what an answer may be (text/form.py). `scored`: log-probabilities of the prompt too.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    kv_policy: str | None = None
    speculate: str | None = None
    num_system_tokens: int = 0
    salt: str = ""
    grammar: str | None = None
    needs_prompt_logprobs: bool = False


class RequestOutputState:
    """An answer in the making: its request, and its text as far as it may be shown."""

    def __init__(self, request: Request, detokenizer: IncrementalDetokenizer, is_speculative: bool):
        self.request, self.detokenizer, self.is_speculative = request, detokenizer, is_speculative
        self.prompt_logprobs: list[Logprob] = []  # of the prompt's tokens but for the first, where it is scored
        self._pending_text: list[str] = []
        self._closed = False
        request.token_callback = self._on_token
        if request.needs_prompt_logits:
            request.logits_callback = self._on_prompt_logits

    def take_text(self) -> str:
        """The text that came since this was asked last; with the last token all the rest of it."""
        if self.request.finish_reason and not self._closed:
            self._closed = True
            self._pending_text.append(self.detokenizer.flush())
        text = "".join(self._pending_text)
        self._pending_text.clear()
        return text

    def _on_token(self, token: int) -> bool:
        self._pending_text.append(self.detokenizer.add_token(token))
        return self.detokenizer.stopped

    def _on_prompt_logits(self, logits: Tensor) -> None:
        """Rows [n, V] before the next tokens of the prompt, and then of the answer."""
        begin = len(self.prompt_logprobs) + 1
        tokens = self.request.prompt[begin : begin + len(logits)]
        self.prompt_logprobs += compute_logprobs(logits[: len(tokens)], tokens, self.request.params.logprobs or 0)


class Processor:
    """Of one engine, which has a drafter of its own or not (`drafted`). `drafts` makes it know another by its text, or
    raises ValueError.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        cache: Cache,
        policy: Policy,
        max_model_len: int,
        score_columns: int,
        register_drafter: Callable[[str], None],
        has_drafter: bool,
    ):
        self.tokenizer, self.spec, self.cache, self.policy, self.max_model_len = (
            tokenizer,
            spec,
            cache,
            policy,
            max_model_len,
        )
        self.score_columns, self.register_drafter, self.has_drafter = score_columns, register_drafter, has_drafter

    @cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        """The tokens, for forms."""
        return GrammarCompiler(self.tokenizer, self.spec.vocab_size)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids are checked. Raises ValueError."""
        # Of a text of ordinary length nobody asks how long the longest token is: that takes a while to find.
        if (
            len(prompt) > 4 * self.max_model_len
            and isinstance(prompt, str)
            and len(prompt) > self.max_model_len * self.tokenizer.max_token_bytes
        ):
            raise ValueError(
                f"a text of {len(prompt)} characters exceeds the context of {self.max_model_len}: shorten it"
            )
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self._check_token_ids(ids)
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        return ids

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        vocab = self.spec.vocab_size
        if wrong := [t for t in token_ids if not 0 <= t < vocab]:
            raise ValueError(f"token id {wrong[0]} is outside the model's vocabulary of {vocab}")

    def process(self, generate_request: GenerateRequest) -> list[RequestOutputState]:
        """The requests for a prompt, `params.n` of them. Raises ValueError where it cannot be run."""
        ids, params = self.encode(generate_request.prompt), generate_request.params
        self._check_token_ids([*params.stop_token_ids, *(t for t, _ in params.logit_bias)])
        policy = self.policy if generate_request.kv_policy is None else policies.parse(generate_request.kv_policy)
        if (
            getattr(policy, "per_query", False)
            and self.score_columns == 1 < self.spec.num_heads // self.spec.num_kv_heads
        ):
            raise ValueError(
                f"{policies.to_spec(policy)} needs the masses of every query head: start the engine with such a policy"
            )
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ValueError(f"the prompt has {len(ids)} tokens and the context {self.max_model_len}: shorten it")
        if params.max_tokens and params.max_tokens > room:
            raise ValueError(
                f"{len(ids)} prompt tokens and max_tokens {params.max_tokens} exceed the context of {self.max_model_len}: "
                f"at most {room} fit"
            )
        if generate_request.speculate not in (None, NO_SPECULATION):
            self.register_drafter(generate_request.speculate)
        return [self._create_state(generate_request, ids, policy, i) for i in range(params.n)]

    def _create_state(
        self, generate_request: GenerateRequest, token_ids: list[int], policy: Policy, sample_index: int
    ) -> RequestOutputState:
        params = generate_request.params
        if params.seed is not None and sample_index:
            params = replace(params, seed=params.seed + sample_index)  # n answers must differ
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self.tokenizer.stop_token_ids
        )
        request = Request(
            prompt=token_ids,
            params=params,
            policy=policy,
            max_tokens=params.max_tokens or self.max_output_tokens(len(token_ids), policy),
            stop_ids=stop_ids,
            max_model_len=self.max_model_len,
            num_system_tokens=generate_request.num_system_tokens,
            salt=generate_request.salt,
            drafter_name=generate_request.speculate or "",
            grammar=self.grammar_compiler.compile(generate_request.grammar) if generate_request.grammar else None,
            needs_prompt_logits=generate_request.needs_prompt_logprobs,
        )
        drafted = (
            self.has_drafter if generate_request.speculate is None else generate_request.speculate != NO_SPECULATION
        )
        return RequestOutputState(request, self.tokenizer.create_detokenizer(params.stop), drafted)

    def max_output_tokens(self, num_prompt_tokens: int, policy: Policy | None = None) -> int:
        """How many tokens can follow a prompt of so many.

        To the end of the context, or as far as the empty pool reaches.
        """
        policy = self.cache.effective_policy((policy or self.policy).resolve(num_prompt_tokens))
        lo, hi = 1, max(self.max_model_len - num_prompt_tokens, 1)
        while lo < hi:
            mid = (lo + hi + 1) // 2
            length = num_prompt_tokens + mid - 1  # the last token is never written
            fits = self.cache.pages_needed(policy, length, length) <= self.cache.total_pages
            lo, hi = (mid, hi) if fits else (lo, mid - 1)
        return lo

    def to_output(self, state: RequestOutputState) -> RequestOutput:
        """What came of it."""
        request, text = state.request, state.detokenizer
        state.take_text()
        decoding = request.finish_time - request.first_token_time
        tok_s = (len(request.output_tokens) - 1) / decoding if decoding > 0 else 0.0
        return RequestOutput(
            text=text.text,
            token_ids=request.output_tokens,
            finish_reason=(request.finish_reason or FinishReason.CANCELLED).value,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.num_cached_tokens,
            logprobs=request.logprobs,
            ttft_s=request.first_token_time - request.arrival_time,
            decode_tok_s=tok_s,
            num_preemptions=request.num_preemptions,
            kv=self.kv_usage(request),
            speculate=request.spec_decode_stats.summarize(tok_s) if state.is_speculative else None,
        )

    def kv_usage(self, request: Request) -> dict[str, Any]:
        """Bytes and slots of a request that has ended."""
        return request_memory_stats(
            *(
                self.cache,
                request.policy,
                len(request.tokens) - 1,
                request.peak_slots,
                request.final_slots,
                request.num_final_pages,
            )
        )
