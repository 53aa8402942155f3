"""`LLM`: a model with its cache, for Python.

llm = LLM("smollm2")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=20)):
    print(output.text)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from retain import factory, kernels
from retain.config import Config, check_weights
from retain.engine import drafters
from retain.engine.drafters import TargetModel
from retain.engine.engine import Engine
from retain.engine.output import StepOutput
from retain.engine.runner import Runner
from retain.formats.checkpoint import metadata_reader, open_checkpoint
from retain.formats.pooling import choose_pooling
from retain.kernels.pool_dtypes import pool_dtype
from retain.kv.capacity import CacheConfig
from retain.kv.eviction import policies
from retain.kv.eviction.auto_policy import AutoPolicy, check_spec
from retain.kv.eviction.cost import evicting_lengths
from retain.kv.manager import KVCacheManager
from retain.kv.prefix import config as prefix_configs
from retain.kv.stores import tiers
from retain.kv.text import Text
from retain.models.resolve import resolve_model
from retain.outputs import RequestOutput, StreamChunk
from retain.plugins import parse_size
from retain.processing.chat_template import read_chat_template
from retain.processing.input import EngineInfo, GenerateRequest, InputProcessor, Prompt, list_prompts
from retain.processing.output import OutputProcessor, RequestOutputState
from retain.processing.pooling import PooledPlan, plan_vectors
from retain.processing.reranking import INSTRUCTION, plan_scores
from retain.processing.tokenizer import Tokenizer
from retain.sampling_params import SamplingParams

log = logging.getLogger(__name__)
T = TypeVar("T")
PrefillCallback = Callable[[int, int], None]
# Requests, and tokens of their prompts. Tiles of few query rows, and products of few rows, come in powers of 2.
WARM_UP_BATCHES = (*((1, 2**i) for i in range(7)), (1, 300), (9, 40), (32, 1), (64, 1), (65, 1))
WARM_UP_TOKENS = 6  # of an answer: a step that comes again is recorded
LONGEST_WARM_UP = (8192, 66)  # tokens of a prompt and of an answer, for policies that evict late


class LLM:
    """A model with its cache. Options are those of `Config`; sizes may be texts such as "512MiB". Raises ValueError."""

    def __init__(self, model: str, *, progress: bool = False, kv_memory: str | int | None = None, **options: Any):
        known = Config.__dataclass_fields__
        if unknown := sorted(set(options) - {f for f in known if f != "model"}):
            raise ValueError(f"unknown option {unknown[0]!r}: LLM takes {', '.join(known)}")
        started = perf_counter()
        self.config = c = Config(model, kv_memory=None if kv_memory is None else parse_size(kv_memory), **options)
        for spec in (c.kv_policy, *c.allow_policy):
            check_spec(spec)  # refuse it before the model is loaded
        prefix_config = prefix_configs.parse(c.prefix_cache)
        tier_configs = tiers.parse_all(c.tier)
        if tier_configs and not prefix_config:
            raise ValueError("prefix_cache=off keeps nothing: there is nothing for a tier")
        drafter = drafters.parse(c.speculate) if c.speculate else None
        chat_template = read_chat_template(c.chat_template)
        self.device = kernels.resolve_device(c.device)
        self.dtype = pool_dtype(c.dtype)
        self.kv_dtype = pool_dtype(c.slot_dtype)
        backend = kernels.load(c.backend, self.device)
        if c.kv_dtype != "auto":
            kernels.check_pool_dtype(backend, self.kv_dtype)
        kernels.check_prompt_activations(backend, c.prompt_activations)
        path = resolve_model(model)
        limit = c.max_model_len
        checkpoint = open_checkpoint(path)
        reader = metadata_reader(checkpoint)
        self.pooling = choose_pooling(path, c.pooling, reader)
        has_head = self.pooling is None
        loaded = factory.load_model(
            path, backend, self.dtype, c.weights, progress, self.device, limit, has_head, checkpoint
        )
        self._program = loaded.runner.program
        self.spec = loaded.spec
        self.weight_bytes = loaded.weight_bytes
        self.tokenizer = Tokenizer.open(path, reader)
        del checkpoint, reader  # the cache may take their memory
        self.tokenizer.choose_chat_template(chat_template, name=c.chat_template)
        self.max_model_len = self._resolve_max_model_len()
        is_chat_model = self.tokenizer.chat_template is not None
        auto = AutoPolicy(loaded.gate_loader().has_gate, is_chat_model, self.spec.kv_cache.can_compare_layers)
        self.policy, *allowed = (policies.parse(auto.choose(spec)) for spec in (c.kv_policy, *c.allow_policy))
        self.allowed_policies = [self.policy, *allowed]  # there is room for them
        query_heads = self.spec.num_heads // min(g.num_kv_heads for g in self.spec.kv_cache.groups)  # of a kv head
        cache_config = self._cache_config(query_heads if any(p.per_query_head for p in self.allowed_policies) else 1)
        self.cache = factory.build_cache(
            loaded.cache_spec,
            cache_config,
            backend,
            self.kv_dtype,
            c.kv_memory or factory.default_pool_bytes(cache_config, self.spec, self.kv_dtype, self.device),
            prefix_config=prefix_config,
            key_transform=loaded.key_transform,
            load_gate=loaded.gate_loader(getattr(self.policy, "file", "")),
            device=self.device,
        )
        if any(p.has_budget for p in self.allowed_policies) and self.spec.kv_cache.has_states:
            log.warning(
                "budgets apply to full attention, in %d of %d layers: windows and states keep what they need",
                sum(window is None for window in self.spec.kv_cache.windows),
                self.spec.num_layers,
            )
        selective = isinstance(prefix_config, prefix_configs.SelectiveConfig)
        if prefix_config and (tier_configs or selective):
            offloader = factory.build_offload(c, prefix_config, tier_configs, self.cache, loaded)
            self.cache.prefix_cache.set_offloader(offloader)
        self.engine = Engine(loaded.runner, self.cache, drafter, c.prompt_activations)
        if self.device.type != "cpu":
            self.engine.depth = 2  # so that the device waits for the host as little as it can
        self.output_processor = OutputProcessor(self.engine, self.tokenizer)
        info = EngineInfo(
            vocab_size=self.spec.vocab_size,
            heads_per_kv_head=query_heads,
            max_model_len=self.max_model_len,
            policy=self.policy,
            allowed_policies=self.allowed_policies,
            has_default_drafter=drafter is not None,
            auto=auto,
            has_head=has_head,
        )
        self.input_processor = InputProcessor(self.tokenizer, info, self.cache, self.add_drafter)
        try:
            if drafter:
                drafter.attach(self.target)
        except BaseException:
            self.close()  # releases the store on the disk for others
            raise
        self.load_s = perf_counter() - started

    # ---- building ------------------------------------------------------------------------------------------------

    def _resolve_max_model_len(self) -> int:
        limit = self.spec.max_position_embeddings
        given = self.config.max_model_len
        if given and given > limit:
            raise ValueError(f"max_model_len {given} is longer than the model's own context, {limit}")
        return given or limit

    def _cache_config(self, columns: int) -> CacheConfig:
        c = self.config
        sizes = c.slots_per_page, c.max_running_requests, self.max_model_len, c.max_batched_tokens
        head_dim = max(g.k_dim for g in self.spec.kv_cache.groups)
        demoted = factory.demoted_page_size(self.allowed_policies, sizes[0], head_dim, self.kv_dtype)
        return CacheConfig(*sizes, columns, demoted, c.snapshot_interval)

    def add_drafter(self, spec: str) -> None:
        """Let requests name this drafter. Raises ValueError."""
        if spec not in self.engine.speculator.named:
            drafter = drafters.parse(spec)
            drafter.attach(self.target)
            self.engine.speculator.named[spec] = drafter

    @property
    def target(self) -> TargetModel:
        """What a drafter may use of this engine."""
        return TargetModel(
            self.engine.runner,
            self.cache,
            self._load_draft_model,
            lambda weights: self._load_model(None, weights).runner,
        )

    def _load_model(self, model: str | None, weights: str) -> factory.LoadedModel:
        """Load another model, or this one, with these weights. Raises ValueError where its vocabulary differs."""
        path = resolve_model(model or self.config.model)
        check_weights(weights, self.config.dtype)
        if model and not self.tokenizer.has_same_vocab(Tokenizer.open(path)):
            raise ValueError(f"{model} has another vocabulary than {self.config.model}, so it cannot draft for it")
        limit = self.max_model_len
        return factory.load_model(
            path, self.cache.backend, self.dtype, weights, device=self.device, context_limit=limit
        )

    def _load_draft_model(self, model: str, weights: str) -> tuple[Runner, KVCacheManager]:
        """Load a model beside this one, with a cache for as many tokens."""
        loaded = self._load_model(model, weights)
        config = self._cache_config(1)
        spec = loaded.spec
        block = self.cache.planner.block_size
        num_tokens = ((self.cache.total_pages + 1) // self.cache.planner.pages_of_text(block) + 1) * block
        cache = factory.build_cache(
            loaded.cache_spec,
            replace(config, max_model_len=min(self.max_model_len, spec.max_position_embeddings), demoted_page_size=0),
            self.cache.backend,
            self.kv_dtype,
            factory.text_bytes(config, spec, self.kv_dtype, num_tokens),
            device=self.device,
        )
        return loaded.runner, cache

    def warm_up(self) -> None:
        """Compute a few requests on a device, so that no other waits for its kernels.

        Kernels are compiled in threads, or read from Triton's cache on the disk: those of the default policy and of
        all that requests are allowed. Then the requests of the default policy are computed, and small steps are
        recorded. They leave no pages and no prefixes; what does not fit is left out. On a CPU there is nothing to do.

        Raises ValueError for a kernel that does not compile.
        """
        if self.device.type == "cpu":
            return
        started = perf_counter()
        with self.cache.without_prefixes():
            self._program.compile_ahead(self._launch_all_kernels)
            self.cache.copy_trash_pages()
            for num_requests, length in WARM_UP_BATCHES:
                self._compute_requests(num_requests, length)
        log.info("warmed up, %.1f s", perf_counter() - started)

    def _launch_all_kernels(self) -> None:
        """Compute the requests of a warm-up for each policy, and two prompts that take several steps.

        The first of these evicts, and has demoted tokens, beside the chunks of the second.
        """
        self.cache.copy_trash_pages()
        for policy in self.allowed_policies:
            spec = policies.to_spec(policy)
            for num_requests, length in WARM_UP_BATCHES:
                self._compute_requests(num_requests, length, spec)
            length, num_tokens = evicting_lengths(policy, LONGEST_WARM_UP[0])
            length = max(length, self.config.max_batched_tokens + 100)
            num_tokens = min(max(num_tokens, WARM_UP_TOKENS), LONGEST_WARM_UP[1])
            self._compute_requests(2, length, spec, num_tokens)

    def _compute_requests(
        self, num_requests: int, length: int, kv_policy: str | None = None, num_tokens: int = WARM_UP_TOKENS
    ) -> None:
        """Compute answers to equal prompts of a length. They mean nothing, and what does not fit is left out."""
        engine = Engine(self.engine.runner, self.cache)
        engine.depth = self.engine.depth
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        length = max(min(length, self.max_model_len - num_tokens), 1)
        prompts = [[i % self.spec.vocab_size] * length for i in range(num_requests)]
        try:
            requests = [GenerateRequest(p, params, kv_policy, pools=self.pooling is not None) for p in prompts]
            states = [s for g in requests for s in self.input_processor.process(g)]
            engine.add(*(state.request for state in states))
        except ValueError as error:
            log.info("not warming up %d requests of %d tokens: %s", num_requests, length, error)
            return
        while engine.has_unfinished_requests:
            engine.step()

    def close(self) -> None:
        """Finish writing to tiers, and release them. The engine can go on without them."""
        self.cache.prefix_cache.close_offloader()

    # ---- answering -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        kv_policy: str | Sequence[str] | None = None,
        num_system_tokens: int = 0,
        salt: str = "",
        explain_prefix: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts (texts or token ids), `params.n` times each, in their order; all run together.

        Parameters and policies are for all prompts, or one for each; without a policy the engine's own applies. The
        first `num_system_tokens` of every prompt are a system prompt, which policies with `protect=system` never evict.
        Prefixes are shared only among prompts of the same `salt`. `explain_prefix` adds why no more of a prompt was
        cached.

        Raises ValueError when one of them cannot be run; then none is.
        """
        many = list_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(each)} sampling parameters")
        specs = [kv_policy] * len(many) if kv_policy is None or isinstance(kv_policy, str) else list(kv_policy)
        if len(specs) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(specs)} policies")
        shared = GenerateRequest("", num_system_tokens=num_system_tokens, salt=salt, explain_prefix=explain_prefix)
        return self.generate_from_requests(
            [replace(shared, prompt=p, params=q, kv_policy=x) for p, q, x in zip(many, each, specs, strict=True)]
        )

    def generate_from_requests(self, generate_requests: Sequence[GenerateRequest]) -> list[RequestOutput]:
        """Answer requests with all their options, `params.n` times each, in their order. Raises ValueError."""
        states = [state for g in generate_requests for state in self.input_processor.process(g)]
        self._run_to_completion(states)
        return [self.output_processor.to_output(state) for state in states]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        kv_policy: str | None = None,
        num_system_tokens: int = 0,
        salt: str = "",
        prefill_callback: PrefillCallback | None = None,
    ) -> Iterator[StreamChunk]:
        """Yield one answer chunk by chunk as its tokens come; the last chunk has the whole output.

        `prefill_callback(num_computed, num_tokens)` is called after every step before the first token, with the
        computed tokens of the prompt and all of them. Closing the iterator, or an error of the callback, cancels the
        request.
        """
        params = params or SamplingParams()
        g = GenerateRequest(prompt, params, kv_policy, num_system_tokens=num_system_tokens, salt=salt)
        return self.stream_from_request(g, prefill_callback)

    def stream_from_request(
        self, generate_request: GenerateRequest, prefill_callback: PrefillCallback | None = None
    ) -> Iterator[StreamChunk]:
        """Yield one answer to a request with all its options, as `stream` does."""
        params = replace(generate_request.params or SamplingParams(), n=1)
        (state,) = self.input_processor.process(replace(generate_request, params=params))
        self.output_processor.add([state])
        return self._stream_chunks(state, prefill_callback)

    def _stream_chunks(self, state: RequestOutputState, callback: PrefillCallback | None) -> Iterator[StreamChunk]:
        request = state.request
        try:
            while request.finish_reason is None:
                self.step()
                if callback and not request.stats.first_token_time:
                    callback(request.num_computed_tokens, len(request.prompt))
                if request.finish_reason is None and (text := state.take_text()):
                    yield StreamChunk(text)
        finally:
            self.output_processor.cancel(request)
        yield StreamChunk(state.take_text(), self.output_processor.to_output(state))

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Sequence[int]],
        kv_policy: str | Sequence[str] | None = None,
        logits_callback: Callable[[int, Tensor], None] | None = None,
        seed: int = 0,
    ) -> list[list[float]]:
        """Return log-probabilities (nats) of given continuations, token by token (teacher forcing).

        Every request evicts as if it had sampled these tokens itself. `logits_callback(i, logits)` gets the logits
        [n, V] before the next n tokens of continuation i as they are computed; they are good until it returns.
        `seed` is that of a policy's noise. Raises ValueError.
        """
        found: list[list[float]] = [[] for _ in prompts]

        def on_logits(i: int, logits: Tensor) -> None:
            ids = continuations[i][len(found[i]) : len(found[i]) + len(logits)]
            found[i] += logits.log_softmax(-1)[range(len(ids)), ids].tolist()
            if logits_callback:
                logits_callback(i, logits)

        states = []
        for i, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
            ids = self.encode(continuation)
            spec = kv_policy if kv_policy is None or isinstance(kv_policy, str) else kv_policy[i]
            params = SamplingParams(max_tokens=len(ids), ignore_eos=True, seed=seed)
            g = GenerateRequest(prompt, params, spec, forced_tokens=tuple(ids[:-1]))
            states += self.input_processor.process(g, partial(on_logits, i))
        self._run_to_completion(states)
        return found

    def embed(self, prompts: Sequence[Prompt], dimensions: int | None = None, salt: str = "") -> list[list[float]]:
        """Return a vector for each text, pooled as the model says, or the first `dimensions` numbers of each.

        Raises ValueError for a model that generates (see `pooling`), and where one of them cannot be run; then none is.
        """
        if dimensions is not None and not 1 <= dimensions <= self.spec.hidden_size:
            raise ValueError(f"dimensions must be 1 to {self.spec.hidden_size}, not {dimensions}")
        shared = GenerateRequest("", salt=salt)
        plan = plan_vectors(self.input_processor, self.pooling, prompts, shared, dimensions)
        return [vector.tolist() for vector in self._run_plan(plan)]

    def rerank(
        self, query: str, documents: Sequence[str], instruction: str = INSTRUCTION, salt: str = ""
    ) -> list[float]:
        """Return how well each document fits a query: 0 to 1, by a model of Qwen3-Reranker's kind, or a cosine.

        What the prompts have in common is computed once. Raises ValueError for a model that can do neither.
        """
        pairs = [(query, document) for document in documents]
        plan = plan_scores(self.input_processor, self.pooling, pairs, GenerateRequest("", salt=salt), instruction)
        return self._run_plan(plan)

    def _run_plan(self, plan: PooledPlan[T]) -> T:
        for stage in plan.stages:
            self._run_to_completion([prepare() for prepare in stage])
        return plan.result()

    def kept_positions(
        self, prompt: Prompt, kv_policy: str | None = None, num_system_tokens: int = 0
    ) -> list[list[list[int]]]:
        """Return the positions of a prompt that every layer and head keeps, [L][G], ascending. Raises ValueError."""
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        g = GenerateRequest(prompt, params, kv_policy, num_system_tokens=num_system_tokens)
        (state,) = self.input_processor.process(g)
        request = state.request
        self.output_processor.add([state])
        request.needs_token_values = True  # else the next step has been launched when the first token is known
        try:
            while request.finish_reason is None and (not request.stats.first_token_time or request.scoring):
                self.step()
            if request in self.engine.scheduler.running:
                return self.cache.rows[self.engine.scheduler.running[request].index].positions()
            raise MemoryError("the request needs more KV memory than was planned")
        finally:
            self.output_processor.cancel(request)

    def pin(self, prompt: Prompt, seconds: float, salt: str = "") -> int:
        """Compute a prompt, keep its prefix for `seconds`, and return how many tokens of it. Raises ValueError."""
        if not self.cache.prefix_cache.enabled:
            raise ValueError("prefix_cache=off keeps nothing: there is nothing to pin")
        g = GenerateRequest(prompt, SamplingParams(max_tokens=1, temperature=0), "full", salt=salt)
        (state,) = self.input_processor.process(g)
        self._run_to_completion([state])
        return self.cache.prefix_cache.pin(state.request.policy, Text(state.request.prompt, salt), seconds)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; given ids are checked. Raises ValueError."""
        return self.input_processor.encode(prompt)

    def max_output_tokens(self, num_prompt_tokens: int, num_system_tokens: int = 0) -> int:
        """Return how many tokens can follow a prompt of that length, under the engine's own policy; at least 1."""
        g = GenerateRequest("", num_system_tokens=num_system_tokens)
        return self.input_processor.max_output_tokens(g, num_prompt_tokens)

    def step(self) -> StepOutput:
        """Compute one step of all requests, and process its output. Returns the tokens that it gave."""
        self.output_processor.process(output := self.engine.step())
        return output

    def _run_to_completion(self, states: Sequence[RequestOutputState]) -> None:
        """Step until all requests have ended; after an error or Ctrl-C cancel them."""
        try:
            self.output_processor.add(states)
            while any(state.request.finish_reason is None for state in states):
                self.step()
        finally:
            for state in states:
                self.output_processor.cancel(state.request)
