"""`LLM`: a model with its cache, for Python.

llm = LLM("smollm2")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=20)):
    print(output.text)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from retain.config import Config
from retain.engine.hints import Hint, carry_out
from retain.engine.output import StepOutput
from retain.factory import EngineParts, build_engine
from retain.formats.lora import read_lora
from retain.outputs import RequestOutput, StreamChunk
from retain.plugins import parse_size
from retain.processing.input import GenerateRequest, Prompt, list_prompts
from retain.processing.output import RequestOutputState
from retain.processing.pooling import PooledPlan, plan_vectors
from retain.processing.reranking import INSTRUCTION, plan_scores
from retain.processing.warm_up import WarmUp
from retain.rank_processes import start_ranks
from retain.sampling_params import SamplingParams

T = TypeVar("T")
PrefillCallback = Callable[[int, int], None]


class LLM(EngineParts):
    """A model with its cache. Options are those of `Config`; sizes may be texts such as "512MiB". Raises ValueError.

    `drafters` are those beside `speculate` that requests will name.
    """

    def __init__(
        self,
        model: str,
        *,
        progress: bool = False,
        kv_memory: str | int | None = None,
        drafters: Sequence[str] = (),
        **options: Any,
    ):
        known = Config.__dataclass_fields__
        if unknown := sorted(set(options) - {f for f in known if f != "model"}):
            raise ValueError(f"unknown option {unknown[0]!r}: LLM takes {', '.join(known)}")
        started = perf_counter()
        config = Config(model, kv_memory=None if kv_memory is None else parse_size(kv_memory), **options)
        self._num_threads = torch.get_num_threads()  # of one rank: several divide the cores
        self.ranks = None
        if config.tensor_parallel > 1:
            self.ranks = start_ranks(config)
            torch.set_num_threads(max(self._num_threads // config.tensor_parallel, 1))
        try:
            super().__init__(**vars(build_engine(config, progress, drafters, self.ranks)))
            if self.ranks:
                self.ranks.await_start()
        except BaseException:
            self.end_ranks()
            raise
        self.load_s = perf_counter() - started

    def add_drafter(self, spec: str) -> None:
        """Let requests name this drafter. Raises ValueError."""
        self.input_processor.register_drafter(spec)

    def load_lora(self, name: str, folder: str | Path) -> None:
        """Let requests name the adapter (LoRA) in a folder, in PEFT's layout. Raises ValueError."""
        self.input_processor.adapters.add(name, read_lora(Path(folder).expanduser()))

    def unload_lora(self, name: str) -> None:
        """Let no further request name this adapter. Raises ValueError."""
        self.input_processor.adapters.remove(name)

    def warm_up(self) -> None:
        """Compute a few requests on a device, so that no other waits for its kernels (see `WarmUp`).

        They leave no pages and no prefixes. On a CPU there is nothing to do. Raises ValueError for a kernel that does
        not compile.
        """
        if self.device.type != "cpu" and not self.ranks:
            WarmUp(self.engine, self.input_processor, self.config.max_batched_tokens).run(self.program)

    def close(self) -> None:
        """Finish writing to tiers, and release them; end the processes of other ranks.

        An engine of one rank can go on without tiers.
        """
        self.cache.prefix_cache.close_offloader()
        self.end_ranks()

    def end_ranks(self) -> None:
        """End the processes of other ranks, if there are any."""
        if self.ranks:
            self.ranks.close()
            torch.set_num_threads(self._num_threads)

    # ---- answering -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        kv_policy: str | Sequence[str] | None = None,
        num_system_tokens: int = 0,
        salt: str = "",
        explain_prefix: bool = False,
        lora: str | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts (texts or token ids), `params.n` times each, in their order; all run together.

        Parameters and policies are for all prompts, or one for each; without a policy the engine's own applies. The
        first `num_system_tokens` of every prompt are a system prompt, which policies with `protect=system` never evict.
        Prefixes are shared only among prompts of the same `salt`. `explain_prefix` adds why no more of a prompt was
        cached. `lora` is the name of an adapter.

        Raises ValueError when one of them cannot be run; then none is.
        """
        many = list_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(each)} sampling parameters")
        specs = [kv_policy] * len(many) if kv_policy is None or isinstance(kv_policy, str) else list(kv_policy)
        if len(specs) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(specs)} policies")
        shared = GenerateRequest(
            "", num_system_tokens=num_system_tokens, salt=salt, explain_prefix=explain_prefix, lora=lora
        )
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
        lora: str | None = None,
    ) -> Iterator[StreamChunk]:
        """Yield one answer chunk by chunk as its tokens come; the last chunk has the whole output.

        `prefill_callback(num_computed, num_tokens)` is called after every step before the first token, with the
        computed tokens of the prompt and all of them. Closing the iterator, or an error of the callback, cancels the
        request.
        """
        params = params or SamplingParams()
        g = GenerateRequest(prompt, params, kv_policy, num_system_tokens=num_system_tokens, salt=salt, lora=lora)
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

    def embed(
        self, prompts: Sequence[Prompt], dimensions: int | None = None, salt: str = "", lora: str | None = None
    ) -> list[list[float]]:
        """Return a vector for each text, pooled as the model says, or the first `dimensions` numbers of each.

        Raises ValueError for a model that generates (see `pooling`), and where one of them cannot be run; then none is.
        """
        if dimensions is not None and not 1 <= dimensions <= self.spec.hidden_size:
            raise ValueError(f"dimensions must be 1 to {self.spec.hidden_size}, not {dimensions}")
        shared = GenerateRequest("", salt=salt, lora=lora)
        plan = plan_vectors(self.input_processor, self.pooling, prompts, shared, dimensions)
        return [vector.tolist() for vector in self._run_plan(plan)]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        instruction: str = INSTRUCTION,
        salt: str = "",
        lora: str | None = None,
    ) -> list[float]:
        """Return how well each document fits a query: 0 to 1, by a model of Qwen3-Reranker's kind, or a cosine.

        What the prompts have in common is computed once. Raises ValueError for a model that can do neither.
        """
        pairs = [(query, document) for document in documents]
        shared = GenerateRequest("", salt=salt, lora=lora)
        plan = plan_scores(self.input_processor, self.pooling, pairs, shared, instruction)
        return self._run_plan(plan)

    def _run_plan(self, plan: PooledPlan[T]) -> T:
        for stage in plan.stages:
            self._run_to_completion([prepare() for prepare in stage])
        return plan.result()

    def kept_positions(
        self, prompt: Prompt, kv_policy: str | None = None, num_system_tokens: int = 0
    ) -> list[list[list[int]]]:
        """Return the positions of a prompt that every layer and head keeps, [L][G], ascending. Raises ValueError."""
        if self.ranks:
            raise ValueError("kept positions are those of all heads: use tensor_parallel=1")
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

    def pin(self, prompt: Prompt, seconds: float, salt: str = "", lora: str | None = None) -> int:
        """Compute a prompt, keep its prefix for `seconds`, and return how many tokens of it. Raises ValueError."""
        if not self.cache.prefix_cache.enabled:
            raise ValueError("prefix_cache=off keeps nothing: there is nothing to pin")
        params = SamplingParams(max_tokens=1, temperature=0)
        g = GenerateRequest(prompt, params, "full", salt=salt, lora=lora)
        (state,) = self.input_processor.process(g)
        self._run_to_completion([state])
        text = state.request.text.head(len(state.request.prompt))
        return self.cache.hints.retain(state.request.policy, text, seconds)

    def hint(
        self,
        action: str,
        prompt: Prompt,
        seconds: float | None = None,
        *,
        num_kept: int = 0,
        salt: str = "",
        lora: str | None = None,
    ) -> int:
        """Tell the cache something of a text; see `Hint` for actions. Returns the tokens that it is done to.

        Nothing is computed. Raises ValueError, also where nothing is cached.
        """
        g = GenerateRequest(prompt, SamplingParams(max_tokens=1), salt=salt, lora=lora)
        (state,) = self.input_processor.process(g)
        text = state.request.text.head(len(state.request.prompt))
        return carry_out(self.cache, Hint(action, seconds, num_kept), state.request, text)

    def reset_cache(self, salt: str | None = None) -> int:
        """Forget the cached texts of a salt, or all, in the pool and in every tier. Returns the pool's tokens."""
        return self.cache.hints.reset_all() if salt is None else self.cache.hints.reset(salt)

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
