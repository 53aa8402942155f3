"""Input processing: prompts and options become requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from weakref import WeakValueDictionary

from torch import Tensor

from retain.engine.request import Request, RequestInput
from retain.engine.spec_decode.speculator import NO_SPECULATION
from retain.kv.eviction import policies
from retain.kv.eviction.auto_policy import AutoPolicy
from retain.kv.eviction.cost import find_excess
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.manager import KVCacheManager
from retain.processing.adapters import Adapters
from retain.processing.grammar import GrammarCompiler, GrammarState
from retain.processing.output import RequestOutputState, is_logging_prefixes
from retain.processing.reasoning import Reasoning
from retain.processing.reasoning_limit import ReasoningLimit
from retain.processing.stop_strings import StopStrings
from retain.processing.tokenizer import Tokenizer
from retain.sampling_params import SamplingParams

Prompt = str | Sequence[int]
MAX_KNOWN_SPECS = 64  # of policies that requests named, and of their plans


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list: they may be given as one or several."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class GenerateRequest:
    """A prompt, and how it is to be answered.

    `kv_policy` and `speculate` default to the engine's own. The first `num_system_tokens` of the prompt are a system
    prompt: policies with `protect=system` never evict them. Later turns begin with the first `turn_end` tokens (0:
    unknown): the generation prompt is behind them. Prefixes are shared only with requests of the same `salt`.
    Requests of different owners take turns. `grammar` is the source of a grammar that the answer must match (see
    GrammarCompiler). The text of the answer shows the special tokens `shown_tokens`. Stop strings of the parameters are
    searched behind its `reasoning`.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    kv_policy: str | None = None
    speculate: str | None = None
    num_system_tokens: int = 0
    turn_end: int = 0
    salt: str = ""
    owner: str = ""  # who asks: requests of different owners take turns
    lora: str | None = None  # the name of an adapter
    grammar: str | None = None
    needs_prompt_logits: bool = False  # those before every token of the prompt but the first, too
    forced_tokens: tuple[int, ...] = ()  # the answer begins with these, whatever the model predicts
    explain_prefix: bool = False  # find out why the prompt began with no more cached tokens
    shown_tokens: frozenset[int] = frozenset()
    reasoning: Reasoning | None = None
    pools: bool = False  # a reader of pooling.py takes the states or logits of the prompt; no answer is wanted


class PromptTooLongError(ValueError):
    """A prompt leaves no room for an answer.

    `num_tokens` are the prompt's, at least. `max_context` are the tokens of a prompt and its answer, at most: what the
    model allows, or what the empty pool holds under the request's policy.
    """

    def __init__(self, num_tokens: int, max_context: int, limit: str, remedy: str = "shorten it"):
        """`limit`: what allows no more, in words."""
        super().__init__(f"the prompt has {num_tokens} tokens and {limit} {max_context}: {remedy}")
        self.num_tokens = num_tokens
        self.max_context = max_context


@dataclass(frozen=True)
class EngineInfo:
    """Facts about an engine that requests are checked against."""

    vocab_size: int
    heads_per_kv_head: int
    max_model_len: int
    policy: EvictionPolicy  # of requests that name none
    allowed_policies: Sequence[EvictionPolicy]  # that a client's request may choose, whatever they cost
    has_default_drafter: bool
    auto: AutoPolicy  # what `auto` stands for in a request
    has_head: bool = True  # without one it embeds, and generates nothing


class InputProcessor:
    """Turn prompts into requests for one engine.

    `register_drafter` makes a drafter known by its spec, or raises ValueError.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        info: EngineInfo,
        cache: KVCacheManager,
        register_drafter: Callable[[str], None],
        adapters: Adapters,
    ):
        """Raises ValueError where the cache cannot carry out the engine's own policy."""
        self.tokenizer = tokenizer
        self.info = info
        self.cache = cache
        self.register_drafter = register_drafter
        self.adapters = adapters
        self._instruction_ids: dict[str, list[int]] = {}
        # Of requests in progress: building one takes longer than finding it, and all choices of a body have the same.
        self._stop_strings: WeakValueDictionary[tuple[str, ...], StopStrings] = WeakValueDictionary()
        self._parse_policy = lru_cache(MAX_KNOWN_SPECS)(self._parse_policy_spec)
        self._plan = lru_cache(MAX_KNOWN_SPECS)(self._plan_policy)  # for a default max_tokens, then for the request
        cache.plan_policy(info.policy, info.max_model_len)  # refuse now what no request could have

    @cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        """The compiler of grammars over this vocabulary."""
        return GrammarCompiler(self.tokenizer, self.info.vocab_size)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, and check those that are given. Raises ValueError."""
        if isinstance(prompt, str):
            self.check_length(prompt)
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self._check_token_ids(token_ids)
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token")
        return token_ids

    def check_length(self, text: str) -> None:
        """Raise PromptTooLongError for a text that cannot fit the context, before it is tokenized."""
        limit = self.info.max_model_len
        # max_token_bytes takes a while to find, so texts of ordinary length do not ask for it.
        if len(text) > 4 * limit and len(text) > limit * self.tokenizer.max_token_bytes:
            raise PromptTooLongError(-(-len(text) // self.tokenizer.max_token_bytes), limit, "the context")

    def process(
        self, generate_request: GenerateRequest, on_logits: Callable[[Tensor], None] | None = None
    ) -> list[RequestOutputState]:
        """Return the requests for a prompt, `params.n` of them. Raises ValueError where it cannot be run."""
        g = generate_request
        limit = self.info.max_model_len
        if not (self.info.has_head or g.pools):
            raise ValueError("this model embeds texts and generates none (--pooling off loads it with its head)")
        token_ids = self.encode(g.prompt)
        params = g.params
        self._check_token_ids([*params.stop_token_ids, *(t for t, _ in params.logit_bias)])
        if len(token_ids) >= limit:
            raise PromptTooLongError(len(token_ids), limit, "the context")
        policy = self._plan(g.kv_policy, len(token_ids), g.num_system_tokens)
        self._check_prompt_fits(len(token_ids), policy)
        room = limit - len(token_ids)
        if params.max_tokens and params.max_tokens > room:
            raise ValueError(
                f"{len(token_ids)} prompt tokens and max_tokens {params.max_tokens} exceed the context of {limit}: "
                f"at most {room} fit"
            )
        if g.speculate not in (None, NO_SPECULATION):
            self.register_drafter(g.speculate)
        stop_ids = frozenset(params.stop_token_ids)
        shared = RequestInput(
            prompt=token_ids,
            params=params,
            policy=policy,
            max_tokens=params.max_tokens or self._find_longest_output(len(token_ids), policy),
            stop_ids=stop_ids if params.ignore_eos else stop_ids | self.tokenizer.stop_token_ids,
            forced_tokens=list(g.forced_tokens),
            num_system_tokens=g.num_system_tokens,
            turn_end=g.turn_end,
            salt=g.salt,
            owner=g.owner,
            adapter=None if g.lora is None else self.adapters.find(g.lora),
            drafter_name=g.speculate or "",
            needs_logits=on_logits is not None,
            needs_prompt_logits=g.needs_prompt_logits,
            explain_prefix=g.explain_prefix,
            pools=g.pools,
        )
        inputs = (replace(shared, params=params.for_answer(i)) for i in range(params.n))
        grammar = self.grammar_compiler.compile(g.grammar) if g.grammar else None
        if grammar and g.reasoning and g.reasoning.max_tokens is not None:
            grammar.reasoning_limit = ReasoningLimit(g.reasoning, g.reasoning.max_tokens, self.tokenizer)
        stop = self._share_stop_strings(params.stop)
        return [self._create_state(g, input, grammar.copy() if grammar else None, stop, on_logits) for input in inputs]

    def _share_stop_strings(self, strings: tuple[str, ...]) -> StopStrings:
        """Return the automaton of these stop strings: that of a request in progress, or a new one."""
        return self._stop_strings.get(strings) or self._stop_strings.setdefault(strings, StopStrings(strings))

    def _parse_policy_spec(self, spec: str | None) -> EvictionPolicy:
        """Return the policy of requests with this spec, or the engine's own. Raises ValueError."""
        policy = self.info.policy if spec is None else policies.parse(self.info.auto.choose(spec))
        if policy.instruction:
            ids = self._encode_instruction(policy.instruction)
            policy = policy.with_instruction(ids, self.tokenizer.special_token_ids)
        self._check_room(policy)
        return policy

    def _check_prompt_fits(self, num_tokens: int, policy: EvictionPolicy) -> None:
        """Raise PromptTooLongError for a prompt after which not one token fits the context or the empty pool."""

        def exceeds_pool(length: int) -> bool:
            return self.cache.pages_needed(policy, length, length) > self.cache.total_pages

        if num_tokens + policy.scoring_room > self.info.max_model_len:
            longest = self.info.max_model_len - policy.scoring_room
            raise PromptTooLongError(
                num_tokens, longest, f"the context, with the room that {policies.name_of(policy)} needs, holds"
            )
        if exceeds_pool(num_tokens):  # the last token is never written
            first = 1 + bisect_left(range(1, num_tokens), True, key=exceeds_pool)
            advice = "raise kv_memory (or the capacity of kv_offload), or shorten it"
            raise PromptTooLongError(num_tokens, first, "the KV memory holds", advice)

    def check_policy_cost(self, g: GenerateRequest) -> None:
        """Raise ValueError for a policy that costs more than a client's request may choose.

        The engine's own policy, and those that it allows, may cost anything.
        """
        if g.kv_policy is None:
            return
        policy = self._parse_policy(g.kv_policy)
        spec = policies.to_spec(policy)
        if spec in map(policies.to_spec, self.info.allowed_policies):
            return
        token_ids = self.encode(g.prompt)
        resolved = policy.resolve(len(token_ids), g.num_system_tokens)
        if excess := find_excess(resolved, token_ids, self.info.max_model_len - len(token_ids)):
            raise ValueError(f"kv_policy {spec} {excess}, or start the server with it (--allow-policy)")

    def _check_room(self, policy: EvictionPolicy) -> None:
        """Raise ValueError for a policy that the cache was built without room for."""
        c = self.cache.config
        lacks = ""
        if policy.per_query_head and c.score_columns == 1 < self.info.heads_per_kv_head:
            lacks = "needs the masses of every query head"
        elif policy.modes.demote and not c.demoted_page_size:
            lacks = "demotes tokens"
        elif policy.looks and not c.has_sketches:
            lacks = "looks at few slots"
        if lacks:
            remedy = "start the engine with such a policy, or allow it (--allow-policy)"
            raise ValueError(f"{policies.to_spec(policy)} {lacks}: {remedy}")

    def _encode_instruction(self, text: str) -> list[int]:
        if text not in self._instruction_ids:
            self._instruction_ids[text] = self.tokenizer.encode_next_turn(text)
        return self._instruction_ids[text]

    def protects_system(self, kv_policy: str | None) -> bool:
        """Return whether a request of this policy, or of the engine's own, keeps its system prompt. Raises ValueError.

        Only then its `num_system_tokens` matter.
        """
        return self._parse_policy(kv_policy).modes.protect == "system"

    def max_output_tokens(self, g: GenerateRequest, num_prompt_tokens: int) -> int:
        """Return how many tokens can follow a request's prompt, within the context and the empty pool; at least 1.

        The engine refuses a request of more. Raises ValueError for a policy that cannot be carried out.
        """
        policy = self._plan(g.kv_policy, num_prompt_tokens, g.num_system_tokens)
        return self._find_longest_output(num_prompt_tokens, policy)

    def _plan_policy(self, spec: str | None, num_prompt_tokens: int, num_system_tokens: int) -> EvictionPolicy:
        return self.cache.plan_policy(self._parse_policy(spec), num_prompt_tokens, num_system_tokens)

    def _find_longest_output(self, num_prompt_tokens: int, policy: EvictionPolicy) -> int:
        """Return how many tokens can follow a prompt under a policy that was planned for it."""
        total = self.cache.total_pages
        lo = 1
        hi = max(self.info.max_model_len - num_prompt_tokens, 1)
        while lo < hi:
            mid = (lo + hi + 1) // 2
            length = num_prompt_tokens + mid - 1  # the last token is never written
            fits = self.cache.pages_needed(policy, length, length) <= total
            lo, hi = (mid, hi) if fits else (lo, mid - 1)
        return lo

    def _create_state(
        self,
        g: GenerateRequest,
        input: RequestInput,
        grammar: GrammarState | None,
        stop: StopStrings,
        on_logits: Callable[[Tensor], None] | None,
    ) -> RequestOutputState:
        request = Request(input, grammar=grammar, max_model_len=self.info.max_model_len)
        request.explains_prefix = g.explain_prefix or is_logging_prefixes()
        drafts = self.info.has_default_drafter if g.speculate is None else g.speculate != NO_SPECULATION
        min_tokens = input.params.min_tokens
        detokenizer = self.tokenizer.create_detokenizer(stop, request.tokens, min_tokens, g.shown_tokens, g.reasoning)
        return RequestOutputState(request, detokenizer, drafts, on_logits)

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        size = self.info.vocab_size
        if wrong := [t for t in token_ids if not 0 <= t < size]:
            raise ValueError(f"token id {wrong[0]} is outside the model's vocabulary of {size}")
