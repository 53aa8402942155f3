"""Time whole models: decode steps, budgets, speculation, and transformers beside."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from statistics import mean
from time import perf_counter

import torch

from tools.gpu_bench.cases import BF16
from tools.gpu_bench.timing import Line, kernel_ms, time_call

TIMED_TAIL_TOKENS = 512  # the speed at the end of an output is measured this many tokens before it
BUDGETS = {  # policy: its budget as a share of the prompt
    "full": 0.0,
    "keyformer:budget=50%": 0.5,
    "keyformer:budget=20%": 0.2,
    "h2o:budget=50%": 0.5,
    "h2o:budget=20%": 0.2,
}


def bench_decode(model: str, device: str, memory: str | None, prompt_len: int, output_len: int) -> Iterator[Line]:
    """Measure decode speed at full cache and at budgets of a half and a fifth of the prompt.

    Batch sizes: 1, the most requests whose full caches fit, and the most that fit with the budget. Steps of the full
    cache slow down evenly, so its speed is the mean of the output's begin and end; steps of a budget do not.
    """
    from retain.bench.budget import time_side_by_side
    from retain.llm import LLM

    max_model_len = prompt_len + output_len
    llm = LLM(
        model,
        device=device,
        prefix_cache="off",
        kv_memory=memory,
        max_model_len=max_model_len,
        max_running_requests=256,
        max_batched_tokens=min(8192, prompt_len),
    )
    heads = llm.spec.num_layers * llm.spec.kv_cache.only_group.num_kv_heads
    S, pages = llm.cache.page_size, llm.cache.total_pages // heads  # of a head
    full_pages = -(-max_model_len // S)  # pages that a request with a full cache needs
    full_batch = min(pages // full_pages, 64)
    if not full_batch:
        sys.exit(f"gpu.py: no memory for one request of {prompt_len} + {output_len} tokens; raise --kv-memory")
    full_speed: dict[int, float] = {}  # by batch size
    for policy, share in BUDGETS.items():
        # Two requests are in prefill. Each of the others has its budget, a page that fills, and one in reserve.
        budget_batch = min(int((pages - 2 * full_pages) / (prompt_len * share / S + 2)), 256) if share else full_batch
        lengths = (prompt_len,) if share else (prompt_len, max_model_len - TIMED_TAIL_TOKENS)
        for batch in sorted({1, full_batch, max(budget_batch, full_batch)}):
            # The first steps capture graphs. The mean includes the evictions that some steps make.
            times = [mean(time_side_by_side(llm, [policy], length, batch, 40)[0][8:]) for length in lengths]
            speed = batch / mean(times)
            full_speed.setdefault(batch, speed)
            line = {"model": model, "policy": policy, "batch": batch, "tok_s": speed}
            yield {**line, "speedup_over_full": speed / full_speed[min(batch, full_batch)]}


def bench_step(model: str, device: str, batch_sizes: Sequence[int], prompt_len: int) -> Iterator[Line]:
    """Time decode steps of a full cache, with one and with two pending steps (see Engine.launch).

    `gpu_ms` is what the kernels of a step take; the rest of `wall_ms` the device is idle.
    """
    from retain.bench.engines import greedy_request, random_prompts
    from retain.kv.eviction import policies
    from retain.llm import LLM

    max_batch = max(batch_sizes)
    llm = LLM(
        model,
        device=device,
        prefix_cache="off",
        max_model_len=prompt_len + 256,
        max_running_requests=max_batch,
        max_batched_tokens=max(2048, max_batch + 1),
    )
    for batch in batch_sizes:
        for depth in (1, 2):
            llm.engine.depth = depth
            prompts = random_prompts(llm.spec.vocab_size, prompt_len, batch, seed=0)
            requests = [greedy_request(llm.cache, prompt, policies.parse("full"), 200) for prompt in prompts]
            llm.engine.add(*requests)
            while any(not request.output_tokens for request in requests):
                llm.engine.step()
            for _ in range(16):  # captures graphs
                llm.engine.step()
            times = [time_call(llm.engine.step) for _ in range(48)]
            line = {"model": model, "batch": batch, "depth": depth, "wall_ms": 1e3 * mean(times)}
            if device == "cuda":
                line["gpu_ms"] = kernel_ms(llm.engine.step, 8)
            yield line
            for request in requests:
                llm.engine.cancel(request)
            while llm.engine.has_unfinished_requests:
                llm.engine.step()
    llm.close()


def bench_speculate(model: str, device: str, prompt_len: int) -> Iterator[Line]:
    """Measure decode speed after a long prompt, with and without drafts of the model itself on a few pages."""
    from retain.llm import LLM
    from retain.processing.input import GenerateRequest
    from retain.sampling_params import SamplingParams

    params, plain = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True), 0.0
    for drafter in (None, "self:k=4", "self:k=4,budget=1024", "self:k=4,dtype=int4", "self"):
        llm = LLM(
            model,
            device=device,
            max_model_len=prompt_len + 256,
            max_running_requests=2,
            speculate=drafter,
            prefix_cache="off",
        )
        rng = torch.Generator().manual_seed(0)
        prompt = torch.randint(300, llm.spec.vocab_size, (prompt_len,), generator=rng).tolist()
        output = llm.generate_from_requests([GenerateRequest(prompt, params)])[0]
        speed = output.decode_tok_s
        plain = plain or speed
        line = {"model": model, "prompt": prompt_len, "drafter": drafter or "none", "tok_s": speed}
        yield line | {"speedup": speed / plain} | (output.speculate or {})
        llm.close()
        del llm
        gc.collect()  # the engine's objects refer to each other
        if device == "cuda":
            torch.cuda.empty_cache()


def bench_transformers(model: str, device: str, prompt_len: int, output_len: int) -> Iterator[Line]:
    """Measure the decode speed of transformers on the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from retain.models.resolve import resolve_model

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
