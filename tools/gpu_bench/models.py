"""Time whole models: decode steps, budgets, speculation, and transformers beside."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean
from time import perf_counter
from typing import Any

import torch

from tools.gpu_bench.cases import BF16
from tools.gpu_bench.timing import Line, describe_error, kernel_ms, time_call

PROFILED_STEPS = 16
DEPTHS = (1, 2)  # pending steps; see Engine.launch
BUDGETS = {  # policy: its budget as a share of the prompt; most important first
    "full": 0.0,
    "keyformer:budget=50%": 0.5,
    "h2o:budget=50%": 0.5,
    "keyformer:budget=20%": 0.2,
    "h2o:budget=20%": 0.2,
}
DRAFTERS = ("off", "self:k=4,budget=1024", "self:k=4", "self:k=4,dtype=int4", "self")


@dataclass(frozen=True)
class ModelBench:
    """A model, and where it runs.

    Without timed steps, each kind of step runs a few times, so that a later process finds its kernels compiled.
    """

    model: str
    device: str
    kv_memory: str | None = None
    timed_steps: int = 48
    warm_steps: int = 16  # before these; they compile kernels and capture graphs

    @property
    def steps(self) -> int:
        """The steps that `time_steps` takes."""
        return self.warm_steps + self.timed_steps + PROFILED_STEPS

    def load(self, **options: Any) -> Any:
        """Return the model with a cache; options are those of `LLM`. Frees what an earlier model has left."""
        from retain.llm import LLM

        gc.collect()  # the engine's objects refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return LLM(self.model, device=self.device, kv_memory=self.kv_memory, **options)

    def time_steps(self, step: Callable[[], Any]) -> Line:
        """Return the mean milliseconds of a step, those of its kernels, and the share in which the device is idle."""
        for _ in range(self.warm_steps):
            step()
        if not self.timed_steps:
            return {}
        wall_ms = 1e3 * mean(time_call(step) for _ in range(self.timed_steps))
        line: Line = {"wall_ms": wall_ms}
        if self.device == "cuda":
            try:
                gpu_ms = kernel_ms(step, PROFILED_STEPS)
                line |= {"gpu_ms": gpu_ms, "idle_share": 1 - gpu_ms / wall_ms}
            except RuntimeError as error:
                line["gpu_ms"] = describe_error(error)
        return line


def bench_step(bench: ModelBench, sizes: Sequence[tuple[int, int]], kv_dtype: str = "auto") -> Iterator[Line]:
    """Time decode steps of a full cache, with one and with two pending steps.

    `sizes` are numbers of requests, and tokens of their prompts.
    """
    llm = bench.load(
        prefix_cache="off",
        kv_dtype=kv_dtype,
        max_model_len=max(prompt_len for _, prompt_len in sizes) + 512,
        max_running_requests=max(batch for batch, _ in sizes),
        max_batched_tokens=max(2048, max(batch for batch, _ in sizes) + 1),
    )
    for batch, prompt_len in sizes:
        line = {"model": bench.model, "kv_dtype": kv_dtype, "prompt": prompt_len}
        for times in time_batches(bench, llm, "full", prompt_len, [batch]):
            yield line | times
    llm.close()


def time_batches(bench: ModelBench, llm: Any, policy: str, prompt_len: int, batches: Sequence[int]) -> Iterator[Line]:
    """Time decode steps of the most requests, then of fewer, which are the first of them: one prefill for all."""
    from retain.bench.engines import cancel_all, greedy_request, make_engine, random_prompts, run_until_first_tokens
    from retain.kv.eviction import policies

    most = max(batches)
    num_steps = len(batches) * len(DEPTHS) * bench.steps
    prefill_steps = 2 * most * (prompt_len // llm.config.max_batched_tokens + 1)
    output_len = min(num_steps + prefill_steps, llm.max_model_len - prompt_len)
    prompts = random_prompts(llm.spec.vocab_size, prompt_len, most, seed=0)
    requests = [greedy_request(llm.cache, p, policies.parse(policy), output_len, i) for i, p in enumerate(prompts)]
    engine = make_engine(llm, requests)
    run_until_first_tokens(engine)
    for batch in sorted(set(batches), reverse=True):
        for request in requests[batch:]:
            engine.cancel(request)
        for depth in DEPTHS:
            engine.depth = depth
            times = bench.time_steps(engine.step)
            if any(request.finish_reason for request in requests[:batch]):
                times = {"error": "a request ended before the last step"}
            yield {"batch": batch, "depth": depth, **times}
    cancel_all(engine)
    while engine.has_unfinished_requests:
        engine.step()


def bench_decode(bench: ModelBench, prompt_len: int, output_len: int, done: Sequence[Line] = ()) -> Iterator[Line]:
    """Measure decode speed at full cache and at budgets of a half and a fifth of the prompt.

    Batch sizes: the most requests that fit with the budget, the most whose full caches fit, and 1. Steps of the full
    cache slow down evenly, so its speed is that in the middle of the output; steps of a budget do not. Policies that
    `done` lines have in all batches are left out.
    """
    max_model_len = prompt_len + output_len
    llm = bench.load(
        prefix_cache="off",
        max_model_len=max_model_len,
        max_running_requests=256,
        max_batched_tokens=max(min(8192, prompt_len), 257),
    )
    heads = llm.spec.num_layers * llm.spec.kv_cache.only_group.num_kv_heads
    S = llm.cache.page_size
    pages = llm.cache.total_pages // heads  # of a head
    full_pages = -(-max_model_len // S)  # pages that a request with a full cache needs
    full_batch = min(pages // full_pages, 64)
    if not full_batch:
        sys.exit(f"gpu.py: no memory for one request of {prompt_len} + {output_len} tokens; raise --kv-memory")
    sizes = {"model": bench.model, "kv_memory": bench.kv_memory, "input_len": prompt_len, "output_len": output_len}
    own_lines = [line for line in done if line | sizes == line and "tok_s" in line]
    full_speed: dict[tuple[int, int], float] = {  # by batch and depth
        (line["batch"], line["depth"]): line["tok_s"] for line in own_lines if line["policy"] == "full"
    }
    for policy, share in BUDGETS.items():
        # Two requests are in prefill. Each of the others has its budget, a page that fills, and one in reserve.
        own_batch = min(int((pages - 2 * full_pages) / (prompt_len * share / S + 2)), 256) if share else full_batch
        batches = [1] if not bench.timed_steps else [max(own_batch, full_batch), full_batch, 1]
        timed = {(line["batch"], line["depth"]) for line in own_lines if line["policy"] == policy}
        if timed >= {*product(batches, DEPTHS)}:
            continue
        length = prompt_len if share else prompt_len + output_len // 2
        for times in time_batches(bench, llm, policy, length, batches):
            line = sizes | {"policy": policy, **times}
            if "wall_ms" in times:
                batch, depth = times["batch"], times["depth"]
                speed = 1e3 * batch / times["wall_ms"]
                full = full_speed.setdefault((min(batch, full_batch), depth), speed)
                line |= {"tok_s": speed, "speedup_over_full": speed / full}
            yield line


def bench_speculate(bench: ModelBench, prompt_len: int) -> Iterator[Line]:
    """Measure decode speed after a long prompt, with and without drafts of the model itself on a few pages.

    Each drafter answers twice, and the second answer counts: the first compiles kernels and captures graphs.
    """
    from retain.processing.input import GenerateRequest
    from retain.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True)
    llm = bench.load(max_model_len=prompt_len + 256, max_running_requests=2)
    rng = torch.Generator().manual_seed(0)
    prompt = torch.randint(300, llm.spec.vocab_size, (prompt_len,), generator=rng).tolist()
    plain = 0.0
    for drafter in DRAFTERS:
        line: Line = {"model": bench.model, "prompt": prompt_len, "drafter": drafter}
        try:
            for _ in range(2):
                (output,) = llm.generate_from_requests([GenerateRequest(prompt, params, speculate=drafter)])
        except Exception as error:
            yield line | {"error": describe_error(error)}
            continue
        speed = output.decode_tok_s
        plain = plain or speed
        yield line | (output.speculate or {}) | {"tok_s": speed, "speedup": speed / plain}


def bench_transformers(bench: ModelBench, prompt_len: int, output_len: int) -> Iterator[Line]:
    """Measure the decode speed of transformers on the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from retain.models.resolve import resolve_model

    model, device = bench.model, bench.device
    config = AutoConfig.from_pretrained(resolve_model(model))
    with torch.device(device):
        peer = AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
    for batch in (1, 4):
        ids = torch.randint(300, config.vocab_size, (batch, prompt_len), device=device)
        times = []
        for n in (1, output_len + 1):
            started = perf_counter()
            with torch.no_grad():
                peer.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False).tolist()  # tolist waits
            times.append(perf_counter() - started)
        speed = batch * output_len / (times[1] - times[0])
        yield {"engine": "transformers", "model": model, "prompt": prompt_len, "batch": batch, "tok_s": speed}
