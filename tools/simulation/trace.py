"""Requests with arrival times: a recorded trace, or generated conversations."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np

from retain.bench.engines import plain_token_ids
from retain.bench.tasks import load_records
from retain.kv.text import hash_blocks
from retain.types import Ints
from tools.simulation.calibration import Calibration

TRACE = "mooncake_conversation_trace"
TOKENS_PER_TRACE_BLOCK = 512  # tokens that a hash of the trace stands for (Mooncake, FAST'25)
TRACE_TIME_STEP = 3.0  # seconds: the resolution of the trace's timestamps

NUM_SYSTEM_PROMPTS = 4
SYSTEM_PROMPT_LEN = 300
MEAN_MESSAGE_LEN = 150  # tokens that a turn adds to its conversation
MEAN_OUTPUT_LEN = 30
MEAN_TURNS = 4


@dataclass(frozen=True)
class TracedRequest:
    """A prompt, due `arrival_time` seconds after the start. `keys` are the chained hashes of its whole pages."""

    arrival_time: float
    prompt: Ints
    output_len: int
    session: int  # its conversation
    keys: Sequence[bytes] = ()


def load_trace(data_dir: Path, num_requests: int, length_divisor: int, calibration: Calibration) -> list[TracedRequest]:
    """Return the first requests of the recorded trace, with lengths divided by `length_divisor`.

    Prompts share prefixes where the trace's hashes do. Requests that exceed the model's context are cut to it. The
    second block names the conversation, for all prompts begin with the same one. Raises ValueError or OSError.
    """
    block = max(TOKENS_PER_TRACE_BLOCK // length_divisor, 1)
    requests = []
    for record in load_records(data_dir, TRACE, num_requests):
        try:
            hashes, output_len = record["hash_ids"], max(record["output_length"] // length_divisor, 1)
            prompt_len, due = max(record["input_length"] // length_divisor, 1), record["timestamp"] / 1000
            session = hashes[:2][-1]
        except (KeyError, TypeError, IndexError):
            raise ValueError(f"{TRACE}.jsonl has a record without timestamp, lengths and hash_ids") from None
        output_len = min(output_len, calibration.max_model_len - 1)
        prompt_len = min(prompt_len, calibration.max_model_len - output_len)
        tokens = (np.array(hashes)[:, None] * block + np.arange(block)).ravel().astype(np.int32)
        requests.append(TracedRequest(due, tokens[:prompt_len], output_len, session))
    return [_with_keys(r, calibration.page_size) for r in _spread(requests)]


def _spread(requests: Sequence[TracedRequest]) -> list[TracedRequest]:
    """Spread the requests of one timestamp evenly over the time up to the next."""
    spread = []
    for due, group in groupby(requests, key=lambda r: r.arrival_time):
        same = list(group)
        gap = TRACE_TIME_STEP / len(same)
        spread += [replace(r, arrival_time=due + gap * i) for i, r in enumerate(same)]
    return spread


def generate_conversations(num_requests: int, seed: int, calibration: Calibration) -> list[TracedRequest]:
    """Return turns of conversations that begin with one of a few system prompts, in the order of their arrival.

    A turn's prompt is that of the turn before, and more. On average a conversation begins each second, and its turns
    are a 32th of `num_requests` seconds apart: scale_arrivals makes other times of it.
    """
    rng, ids = random.Random(seed), plain_token_ids(calibration.vocab_size)
    systems = [rng.choices(ids, k=SYSTEM_PROMPT_LEN) for _ in range(NUM_SYSTEM_PROMPTS)]
    requests: list[TracedRequest] = []
    upcoming = [(0.0, 0, systems[0])]  # turns: their time, their conversation, and what it has so far
    num_sessions = 1
    while len(requests) < num_requests:
        due, session, before = heapq.heappop(upcoming)
        if session == num_sessions - 1:  # the next conversation begins after this one
            heapq.heappush(upcoming, (due + rng.expovariate(1.0), num_sessions, rng.choice(systems)))
            num_sessions += 1
        prompt = before + rng.choices(ids, k=1 + int(rng.expovariate(1 / MEAN_MESSAGE_LEN)))
        output_len = 2 + int(rng.expovariate(1 / MEAN_OUTPUT_LEN))
        if len(prompt) + output_len > calibration.max_model_len:
            continue
        requests.append(TracedRequest(due, np.array(prompt, np.int32), output_len, session))
        if rng.random() > 1 / MEAN_TURNS:
            heapq.heappush(upcoming, (due + rng.expovariate(32 / num_requests), session, prompt))
    return [_with_keys(r, calibration.page_size) for r in requests]


def _with_keys(request: TracedRequest, page_size: int) -> TracedRequest:
    return replace(request, keys=hash_blocks(b"", request.prompt, page_size))


def scale_arrivals(
    requests: Sequence[TracedRequest], calibration: Calibration, num_replicas: int, load: float
) -> list[TracedRequest]:
    """Stretch or compress the arrival times, so that replicas are offered the share `load` of what they can do.

    What is offered are the seconds that all requests would take one by one, with no cached prefix.
    """
    work_s = sum(calibration.seconds_alone(len(r.prompt), r.output_len) for r in requests)
    span_s = max(r.arrival_time for r in requests) or 1.0
    factor = work_s / (num_replicas * load * span_s)
    return [replace(r, arrival_time=r.arrival_time * factor) for r in requests]
