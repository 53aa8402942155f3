"""Measures a replica: runs real steps of an engine, and fits their times to their work."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import fields
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retain.bench.engines import greedy_request, random_prompts
from retain.config import Config
from retain.engine.runner import Runner
from retain.kernels.api import NO_WINDOW, Batch
from retain.llm import LLM
from tools.simulation.calibration import Calibration, StepWork, measure_work

Floats = np.ndarray[Any, np.dtype[np.float64]]
Sample = tuple[StepWork, float]  # the work of a step, its seconds

# Requests that run together: (prompt tokens, output tokens of the first, number). Each other asks for 4 tokens more,
# so that the number of rows that decode falls one by one.
ROUNDS = (
    *((n, 6, 1) for n in (2, 8, 16, 32, 64, 128, 256, 400, 512)),
    (3000, 16, 1),
    (300, 8, 8),
    (60, 8, 24),
    (1500, 12, 3),
    (200, 16, 2),
)
NUM_ITERATIONS = 50


class WorkRecorder:
    """Runs another runner, and notes the work of each step."""

    def __init__(self, runner: Runner):
        self.runner, self.work = runner, StepWork()

    def forward(self, batch: Batch) -> Tensor:
        """Run the step of the other runner, and keep the work that its batch is."""
        starts, ends = batch.query_start_loc[:-1].tolist(), batch.query_start_loc[1:].tolist()
        first_positions = batch.positions[batch.query_start_loc[:-1].long()].tolist()
        self.work = measure_work((p, end - start) for p, start, end in zip(first_positions, starts, ends, strict=True))
        return self.runner.forward(batch)

    @property
    def hidden_states(self) -> Tensor | None:
        """The hidden states of the last batch."""
        return self.runner.hidden_states

    @property
    def state_size(self) -> int:
        """Numbers of the hidden state that each request brings into a batch."""
        return self.runner.state_size


def calibrate(llm: LLM) -> Calibration:
    """Measure an engine that nobody else uses. Raises ValueError for one that cannot be simulated."""
    config, cache = llm.config, llm.cache
    if cache.planner.windows(llm.policy).min() < NO_WINDOW or llm.policy.has_budget or config.tier:
        raise ValueError("a simulated replica has no sliding layers, no KV budget and no --tier of its own")
    heads = llm.spec.num_layers * llm.spec.kv_cache.only_group.num_kv_heads
    seconds, error, num_steps = fit_steps(list(measure_steps(llm)))
    given = {f.name: getattr(config, f.name) for f in fields(config)}
    defaults = {f.name: f.default for f in fields(Config)}
    return Calibration(
        seconds=seconds,
        page_size=cache.page_size,
        page_bytes=cache.page_bytes * heads,
        num_pages=cache.total_pages // heads,
        max_running_requests=config.max_running_requests,
        max_batched_tokens=config.max_batched_tokens,
        max_model_len=llm.max_model_len,
        vocab_size=llm.spec.vocab_size,
        options={name: value for name, value in given.items() if value != defaults[name]},
        machine=f"{platform.system()} {platform.machine()}",
        num_threads=torch.get_num_threads(),
        num_steps=num_steps,
        median_error=round(error, 4),
    )


def measure_steps(llm: LLM) -> Iterable[Sample]:
    """Yield the steps of all rounds, after a first round that warms up.

    With one thread, times are those of the processor: what others run meanwhile does not count.
    """
    engine, rounds = llm.engine, (ROUNDS[4], *ROUNDS)
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    recorder = WorkRecorder(engine.runner)
    for number, (prompt_len, output_len, num_requests) in enumerate(rounds):
        prompts = random_prompts(llm.spec.vocab_size, prompt_len, num_requests, seed=number)
        requests = [greedy_request(llm.cache, p, llm.policy, output_len + 4 * i) for i, p in enumerate(prompts)]
        engine.add(*requests)
        while engine.has_unfinished_requests:
            engine.runner = recorder
            started = clock()
            try:
                engine.step()
            finally:
                elapsed, engine.runner = clock() - started, recorder.runner
            if number:
                yield recorder.work, elapsed


def fit_steps(samples: Sequence[Sample]) -> tuple[StepWork, float, int]:
    """Fit the seconds of each kind of work, none below 0, with the least sum of absolute relative errors.

    So steps that something else on the machine slowed down hardly count. Returns also the median of the relative
    errors, and the number of steps.
    """
    work, seconds = np.array([w for w, _ in samples]), np.array([s for _, s in samples])
    rows, weights = work / seconds[:, None], np.ones(len(samples))
    for _ in range(NUM_ITERATIONS):  # least squares whose weights make squares absolute values
        fitted = _fit_non_negative(rows, weights)
        errors = np.abs(rows @ fitted - 1)
        weights = 1 / np.sqrt(np.maximum(errors, 1e-6))
    return StepWork(*fitted.tolist()), float(np.median(errors)), len(samples)


def _fit_non_negative(rows: Floats, weights: Floats) -> Floats:
    """Return x >= 0 for which rows @ x is nearly 1: least squares, without the columns whose x would be below 0."""
    used = np.ones(rows.shape[1], bool)
    while True:
        x = np.zeros(rows.shape[1])
        x[used] = np.linalg.lstsq(weights[:, None] * rows[:, used], weights, rcond=None)[0]
        if (x >= 0).all():
            return x
        used &= x >= 0
