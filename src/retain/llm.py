"""The composition root: builds every room, wires them, and gives the front door, `LLM`.

llm = LLM("smollm2")
for answer in llm.generate(["Once upon a time"], SamplingParams(max_tokens=20)):
    print(answer.text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from retain import factory, kernels
from retain.config import Config, check_weights, default_kv_memory
from retain.desk import GenerateRequest, Processor, Prompt, RequestOutputState
from retain.engine import drafters
from retain.engine.drafters import TargetModel
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.kv.eviction import policies
from retain.kv.memory.cache import Cache
from retain.kv.offload import tiers
from retain.kv.prefix import cache
from retain.models.decoder import ModelSpec
from retain.models.resolve import resolve_model
from retain.outputs import RequestOutput, StreamChunk
from retain.plugins import parse_size
from retain.processing import Tokenizer
from retain.sampling_params import SamplingParams


class LLM:
    """A model with its cache. Options are those of `Config`; sizes may be texts such as "512MiB". Raises ValueError."""

    def __init__(self, model: str, *, progress: bool = False, kv_memory: str | int | None = None, **options: Any):
        unknown = set(options) - {f for f in Config.__dataclass_fields__ if f != "model"}
        if unknown:
            raise ValueError(
                f"unknown option {sorted(unknown)[0]!r}: LLM takes {', '.join(Config.__dataclass_fields__)}"
            )
        started = perf_counter()
        self.config = c = Config(model, kv_memory=None if kv_memory is None else parse_size(kv_memory), **options)
        self.policy = policies.parse(c.kv_policy)
        reused = cache.parse_prefix_config(c.prefix_cache)
        below = tiers.parse_all([c.tier] if isinstance(c.tier, str) else c.tier)
        if below and not reused:
            raise ValueError("prefix_cache=off keeps nothing: there is nothing for a tier")
        drafter = drafters.parse(c.speculate) if c.speculate else None
        self.device = kernels.resolve_device(c.device)
        backend = kernels.load(c.backend, self.device)
        dtype: torch.dtype = getattr(torch, c.dtype)
        path = resolve_model(model)
        self.spec, self.weight_bytes, runner, turn = factory.load_model(
            path, backend, dtype, c.weights, progress, self.device
        )
        spec = self.spec
        self.tokenizer = Tokenizer.open(path)
        if c.max_model_len and c.max_model_len > spec.max_position_embeddings:
            raise ValueError(
                f"context {c.max_model_len} is longer than the model's own, {spec.max_position_embeddings}"
            )
        self.max_model_len = c.max_model_len or spec.max_position_embeddings
        self.score_columns = (
            spec.num_heads // spec.num_kv_heads if getattr(self.policy, "per_query", False) else 1
        )  # of masses
        whole = spec.num_layers * spec.num_kv_heads * -(-self.max_model_len // c.page_size)  # pages
        memory = c.kv_memory or default_kv_memory(
            whole * kernels.api.page_bytes(c.page_size, spec.head_dim, dtype, self.score_columns),
            torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else None,
        )
        self.cache = factory.build_cache(
            c, spec, backend, memory, self.max_model_len, self.score_columns, turn, reused, self.device
        )
        if self.cache.prefix_cache and reused and (below or isinstance(reused, cache.SelectiveConfig)):
            self.cache.prefix_cache.set_offloader(factory.build_offload(c, reused, below, self.cache, spec, path))
        self.engine = Engine(runner(self.cache), self.cache, c.max_batched_tokens, drafter)
        rooms = self.tokenizer, spec, self.cache, self.policy, self.max_model_len, self.score_columns
        self.processor = Processor(*rooms, self.add_drafter, drafter is not None)
        try:
            if drafter:
                drafter.attach(self.target)
        except BaseException:
            self.close()  # nobody will have this engine, and others want its store
            raise
        self.load_s = perf_counter() - started

    def add_drafter(self, drafter_spec: str) -> None:
        """From now on requests may ask for this drafter. Raises ValueError."""
        if drafter_spec not in self.engine.speculator.named:
            drafter = drafters.parse(drafter_spec)
            drafter.attach(self.target)
            self.engine.speculator.named[drafter_spec] = drafter

    @property
    def target(self) -> TargetModel:
        """What drafters are told of it."""
        return TargetModel(
            self.engine.runner,
            self.cache,
            self._load_model_and_cache,
            lambda weights: self._load_model(None, weights)[1](self.cache),
        )

    def _load_model(self, model: str | None, weights: str) -> tuple[ModelSpec, Callable[[Cache], Runner]]:
        """Another model, or this one, with these weights. Raises ValueError where its tokens are others."""
        path = resolve_model(model or self.config.model)
        check_weights(weights, self.config.dtype)
        if model and not self.tokenizer.has_same_vocab(Tokenizer.open(path)):
            raise ValueError(f"{model} has another vocabulary than {self.config.model}, so it cannot guess its tokens")
        spec, _, runner, _ = factory.load_model(
            path, self.cache.backend, self.cache.kv.dtype, weights, False, self.device
        )
        return spec, runner

    def _load_model_and_cache(self, model: str, weights: str) -> tuple[Runner, Cache]:
        """A model beside this one, with a cache for as many tokens."""
        c, (spec, runner) = self.config, self._load_model(model, weights)
        pages = self.cache.pool.num_pages // (self.spec.num_layers * self.spec.num_kv_heads) + 1  # of a head
        page = kernels.api.page_bytes(c.page_size, spec.head_dim, self.cache.kv.dtype)
        memory = pages * spec.num_layers * spec.num_kv_heads * page
        cache = factory.build_cache(
            c,
            spec,
            self.cache.backend,
            memory,
            min(self.max_model_len, spec.max_position_embeddings),
            device=self.device,
        )
        return runner(cache), cache

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        kv_policy: str | Sequence[str] | None = None,
        num_system_tokens: int = 0,
        salt: str = "",
    ) -> list[RequestOutput]:
        """Answer prompts (texts or token ids), `params.n` times each, in their order; all run together.

        Parameters and policies are for all, or one for each; the engine's own policy where none is given. The first
        `system` tokens of every prompt are a system prompt: policies with `protect=system` never forget them. Texts
        share prefixes with those of the same `salt` only.

        Raises ValueError when one of them cannot be run; then none is.
        """
        many = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(each)} sampling parameters")
        kept = [kv_policy] * len(many) if kv_policy is None or isinstance(kv_policy, str) else list(kv_policy)
        if len(kept) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(kept)} policies")
        asks = [
            GenerateRequest(p, q, k, None, num_system_tokens, salt)  # type: ignore[arg-type]
            for p, q, k in zip(many, each, kept, strict=True)
        ]
        return self.generate_from_requests(asks)

    def generate_from_requests(self, generate_requests: Sequence[GenerateRequest]) -> list[RequestOutput]:
        """The same for those who ask for more: `params.n` answers to each, in their order. Raises ValueError."""
        replies = [reply for ask in generate_requests for reply in self.processor.process(ask)]
        self._run_to_completion([reply.request for reply in replies])
        return [self.processor.to_output(reply) for reply in replies]

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Sequence[int]],
        kv_policy: str | Sequence[str] | None = None,
        logits_callback: Callable[[int, Tensor], None] | None = None,
        seed: int = 0,
    ) -> list[list[float]]:
        """Log-probabilities (nats) of answers that are given, token by token: teacher forcing.

        Every request forgets as it would have done had it drawn these tokens itself. `reader(i, logits)` is told the
        logits [n, V] before the next n tokens of answer i as they are computed; they are good until it returns.
        `seed` is that of a policy's noise. Raises ValueError.
        """
        found: list[list[float]] = [[] for _ in prompts]

        def listen(i: int, logits: Tensor) -> None:
            ids = continuations[i][len(found[i]) : len(found[i]) + len(logits)]
            found[i] += logits.log_softmax(-1)[range(len(ids)), ids].tolist()
            if logits_callback:
                logits_callback(i, logits)

        asked = []
        for i, (prompt, ids) in enumerate(zip(prompts, continuations, strict=True)):
            ids = self.encode(ids)
            policy = kv_policy if kv_policy is None or isinstance(kv_policy, str) else kv_policy[i]
            params = SamplingParams(max_tokens=len(ids), ignore_eos=True, seed=seed)
            (reply,) = self.processor.process(GenerateRequest(prompt, params, policy))
            asked.append(replace(reply.request, forced_tokens=ids[:-1], logits_callback=partial(listen, i)))
        self._run_to_completion(asked)
        return found

    def kept_positions(
        self, prompt: Prompt, kv_policy: str | None = None, num_system_tokens: int = 0
    ) -> list[list[list[int]]]:
        """Which positions of a prompt every layer and head keeps: [L][G], each in order. Raises ValueError."""
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        (reply,) = self.processor.process(
            GenerateRequest(prompt, params, kv_policy, num_system_tokens=num_system_tokens)
        )
        request = reply.request
        self.engine.add(request)
        try:
            while not request.first_token_time or request.reread_chunk:
                self.engine.step()
            assert request.row is not None
            return self.cache.positions(request.row)
        finally:
            self.engine.cancel(request)

    def pin(self, prompt: Prompt, seconds: float, salt: str = "") -> int:
        """Compute a prompt and let it stay for so long. How many tokens of it are there. Raises ValueError."""
        if not self.cache.prefix_cache:
            raise ValueError("prefix_cache=off keeps nothing: there is nothing to pin")
        (reply,) = self.processor.process(
            GenerateRequest(prompt, SamplingParams(max_tokens=1, temperature=0), "full", salt=salt)
        )
        request = reply.request
        self._run_to_completion([request])
        return self.cache.prefix_cache.pin(request.policy, request.prompt, salt, seconds)

    def close(self) -> None:
        """Finish what is being written to tiers, and let others open them. The engine can go on without them."""
        if self.cache.prefix_cache:
            self.cache.prefix_cache.close_offloader()

    def _run_to_completion(self, requests: Sequence[Request]) -> None:
        """All of them, to their ends."""
        try:
            self.engine.add(*requests)
            while any(r.finish_reason is None for r in requests):
                self.engine.step()
        finally:
            for request in requests:
                self.engine.cancel(request)  # after an error or Ctrl-C: nothing stays behind

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        kv_policy: str | None = None,
        num_system_tokens: int = 0,
        salt: str = "",
    ) -> Iterator[StreamChunk]:
        """One answer, piece by piece as its tokens come, the whole of it with the last piece.

        Closing the stream cancels the request.
        """
        (reply,) = self.processor.process(
            GenerateRequest(prompt, replace(params or SamplingParams(), n=1), kv_policy, None, num_system_tokens, salt)
        )
        self.engine.add(reply.request)
        return self._stream_chunks(reply)

    def _stream_chunks(self, state: RequestOutputState) -> Iterator[StreamChunk]:
        try:
            while state.request.finish_reason is None:
                self.engine.step()
                if state.request.finish_reason is None and (text := state.take_text()):
                    yield StreamChunk(text)
        finally:
            self.engine.cancel(state.request)
        yield StreamChunk(state.take_text(), self.processor.to_output(state))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids are checked. Raises ValueError."""
        return self.processor.encode(prompt)

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        """How many tokens can follow a prompt of so many."""
        return self.processor.max_output_tokens(num_prompt_tokens)
