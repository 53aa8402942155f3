"""The desk, where texts become requests and requests become answers. What is not known here: when they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from retain.answer import Answer
from retain.engine.drafting import NO_SPECULATION
from retain.engine.request import Logprob, Request, SamplingParams, FinishReason
from retain.engine.sampler import compute_logprobs
from retain.kv import policies
from retain.kv.account import request_memory_stats
from retain.kv.cache import Cache
from retain.kv.policies import Policy
from retain.models.decoder import ModelSpec
from retain.text import IncrementalDetokenizer, Tokenizer
from retain.text.form import GrammarCompiler

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Ask:
    """What somebody wants.

    `kv_policy` and `speculate` are the engine's own where they are None. The first `system` tokens of the prompt are a
    system prompt: policies with `protect=system` never forget them. Texts share prefixes with those of the same `salt`
    only. `form`: a grammar of what an answer may be (text/form.py). `scored`: log-probabilities of the prompt too.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    kv_policy: str | None = None
    speculate: str | None = None
    system: int = 0
    salt: str = ""
    form: str | None = None
    scored: bool = False


class Reply:
    """An answer in the making: its request, and its text as far as it may be shown."""

    def __init__(self, request: Request, text: IncrementalDetokenizer, drafted: bool):
        self.request, self.text, self.drafted = request, text, drafted
        self.prompt_logprobs: list[Logprob] = []  # of the prompt's tokens but for the first, where it is scored
        self._new: list[str] = []
        self._closed = False
        request.token_callback = self._watch
        if request.needs_prompt_logits:
            request.logits_callback = self._read

    def new(self) -> str:
        """The text that came since this was asked last; with the last token all the rest of it."""
        if self.request.finish_reason and not self._closed:
            self._closed = True
            self._new.append(self.text.flush())
        text = "".join(self._new)
        self._new.clear()
        return text

    def _watch(self, token: int) -> bool:
        self._new.append(self.text.add_token(token))
        return self.text.stopped

    def _read(self, logits: Tensor) -> None:
        """Rows [n, V] before the next tokens of the prompt, and then of the answer."""
        begin = len(self.prompt_logprobs) + 1
        tokens = self.request.prompt[begin : begin + len(logits)]
        self.prompt_logprobs += compute_logprobs(logits[: len(tokens)], tokens, self.request.params.logprobs or 0)


class Desk:
    """Of one engine, which has a drafter of its own or not (`drafted`). `drafts` makes it know another by its text, or
    raises ValueError.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        cache: Cache,
        policy: Policy,
        context: int,
        columns: int,
        drafts: Callable[[str], None],
        drafted: bool,
    ):
        self.tokenizer, self.spec, self.cache, self.policy, self.context = tokenizer, spec, cache, policy, context
        self.columns, self.drafts, self.drafted = columns, drafts, drafted

    @cached_property
    def words(self) -> GrammarCompiler:
        """The tokens, for forms."""
        return GrammarCompiler(self.tokenizer, self.spec.vocab_size)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids are checked. Raises ValueError."""
        # Of a text of ordinary length nobody asks how long the longest token is: that takes a while to find.
        if (
            len(prompt) > 4 * self.context
            and isinstance(prompt, str)
            and len(prompt) > self.context * self.tokenizer.max_token_bytes
        ):
            raise ValueError(f"a text of {len(prompt)} characters exceeds the context of {self.context}: shorten it")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self._known(ids)
        if not ids:
            raise ValueError("the prompt is empty: give at least one token")
        return ids

    def _known(self, ids: Sequence[int]) -> None:
        vocab = self.spec.vocab_size
        if wrong := [t for t in ids if not 0 <= t < vocab]:
            raise ValueError(f"token id {wrong[0]} is outside the model's vocabulary of {vocab}")

    def open(self, ask: Ask) -> list[Reply]:
        """The requests for a prompt, `params.n` of them. Raises ValueError where it cannot be run."""
        ids, params = self.encode(ask.prompt), ask.params
        self._known([*params.stop_token_ids, *(t for t, _ in params.logit_bias)])
        policy = self.policy if ask.kv_policy is None else policies.parse(ask.kv_policy)
        if getattr(policy, "per_query", False) and self.columns == 1 < self.spec.num_heads // self.spec.num_kv_heads:
            raise ValueError(
                f"{policies.to_spec(policy)} needs the masses of every query head: start the engine with such a policy"
            )
        room = self.context - len(ids)
        if room < 1:
            raise ValueError(f"the prompt has {len(ids)} tokens and the context {self.context}: shorten it")
        if params.max_tokens and params.max_tokens > room:
            raise ValueError(
                f"{len(ids)} prompt tokens and max_tokens {params.max_tokens} exceed the context of {self.context}: "
                f"at most {room} fit"
            )
        if ask.speculate not in (None, NO_SPECULATION):
            self.drafts(ask.speculate)
        return [self._reply(ask, ids, policy, i) for i in range(params.n)]

    def _reply(self, ask: Ask, ids: list[int], policy: Policy, i: int) -> Reply:
        params = ask.params
        if params.seed is not None and i:
            params = replace(params, seed=params.seed + i)  # n answers must differ
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.tokenizer.stop_token_ids)
        request = Request(
            prompt=ids,
            params=params,
            policy=policy,
            max_tokens=params.max_tokens or self.longest_answer(len(ids), policy),
            stop_ids=stop_ids,
            max_model_len=self.context,
            num_system_tokens=ask.system,
            salt=ask.salt,
            drafter_name=ask.speculate or "",
            grammar=self.words.compile(ask.form) if ask.form else None,
            needs_prompt_logits=ask.scored,
        )
        drafted = self.drafted if ask.speculate is None else ask.speculate != NO_SPECULATION
        return Reply(request, self.tokenizer.create_detokenizer(params.stop), drafted)

    def longest_answer(self, prompt: int, policy: Policy | None = None) -> int:
        """How many tokens can follow a prompt of so many.

        To the end of the context, or as far as the empty pool reaches.
        """
        policy = self.cache.effective_policy((policy or self.policy).resolve(prompt))
        lo, hi = 1, max(self.context - prompt, 1)
        while lo < hi:
            mid = (lo + hi + 1) // 2
            length = prompt + mid - 1  # the last token is never written
            fits = self.cache.pages_needed(policy, length, length) <= self.cache.total_pages
            lo, hi = (mid, hi) if fits else (lo, mid - 1)
        return lo

    def answer(self, reply: Reply) -> Answer:
        """What came of it."""
        request, text = reply.request, reply.text
        reply.new()
        decoding = request.finish_time - request.first_token_time
        tok_s = (len(request.output_tokens) - 1) / decoding if decoding > 0 else 0.0
        return Answer(
            text=text.text,
            token_ids=request.output_tokens,
            why=(request.finish_reason or FinishReason.CANCELLED).value,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.num_cached_tokens,
            logprobs=request.logprobs,
            ttft_s=request.first_token_time - request.arrival_time,
            decode_tok_s=tok_s,
            preempted=request.num_preemptions,
            kv=self.cost(request),
            speculate=request.spec_decode_stats.summarize(tok_s) if reply.drafted else None,
        )

    def cost(self, request: Request) -> dict[str, Any]:
        """Bytes and slots of a request that has ended."""
        return request_memory_stats(
            *(self.cache, request.policy, len(request.tokens) - 1, request.peak_slots, request.final_slots, request.num_final_pages)
        )
