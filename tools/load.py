"""Load on an OpenAI-compatible server, and the latencies of its users.

python -m tools.load --url http://127.0.0.1:8000/v1 --model smollm2 --request-rate 4 --num-prompts 100

Requests of /v1/completions arrive at their times (`--request-rate`, Poisson, or `--trace`, as recorded), whether the
server keeps up or not; or `--max-concurrency` of them are kept running, to find its throughput. Latencies count from
the moment at which a request was due.

The HTTP client is aiohttp, not httpx as in `retain chat`: httpx parses in Python. Measured against a server that sends
a token every 50 ms, two cores, 32 requests at once: the median time to first token was 14 to 31 ms with aiohttp and 75
to 104 ms with httpx, and a token took 0.05 and 0.16 ms of the processor that the tested server may share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

from retain.cli.args import add_arguments, from_args
from retain.options import NonNegativeFloat, PositiveFloat, PositiveInt, Seed, check_bounds

TOKENS_PER_TRACE_BLOCK = 512  # tokens that a hash of a trace stands for (Mooncake, FAST'25)
COMMON_WORDS = (  # most tokenizers have one token for each of these
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
WORDS = COMMON_WORDS.split()


@dataclass(frozen=True)
class LoadConfig:
    """Options of the load. Raises ValueError for a number out of range."""

    model: str = field(metadata={"help": "the served model's name"})
    url: str = field(
        default="http://127.0.0.1:8000/v1", metadata={"help": "base URL of the server (key: $OPENAI_API_KEY)"}
    )
    num_prompts: PositiveInt = field(default=100, metadata={"help": "requests"})
    request_rate: PositiveFloat | None = field(
        default=None, metadata={"help": "requests per second, Poisson (default: all at once)"}
    )
    max_concurrency: PositiveInt | None = field(
        default=None, metadata={"help": "concurrent requests at most: measures throughput, not waiting times"}
    )
    input_len: PositiveInt = field(default=128, metadata={"help": "words of a prompt"})
    output_len: PositiveInt = field(default=64, metadata={"help": "output tokens of a request"})
    seed: Seed = field(default=0, metadata={"help": "seed of prompts and arrival times"})
    trace: Path | None = field(
        default=None,
        metadata={"help": "JSON lines of timestamp (ms), lengths and hash_ids, as Mooncake publishes them"},
    )
    trace_speedup: PositiveFloat = field(default=1.0, metadata={"help": "replay the trace this many times faster"})
    trace_length_divisor: PositiveFloat = field(
        default=1.0, metadata={"help": "divide the lengths of the trace by this"}
    )
    ttft_slo: NonNegativeFloat = field(
        default=1000.0, metadata={"help": "goodput: time to first token at most, in milliseconds"}
    )
    tpot_slo: NonNegativeFloat = field(
        default=100.0, metadata={"help": "goodput: time per output token at most, in milliseconds"}
    )
    output_dir: Path | None = field(default=None, metadata={"help": "write every number as JSON"})

    def __post_init__(self) -> None:
        if self.trace and self.request_rate:
            raise ValueError("--trace has arrival times of its own: it cannot be combined with --request-rate")
        check_bounds(self)


@dataclass(frozen=True)
class TimedRequest:
    """A prompt, of about as many tokens as words or of token ids, due `arrival_time` seconds after the start."""

    arrival_time: float
    prompt: str | list[int]
    output_len: int


@dataclass
class RequestTiming:
    """The measured response of one request; times are seconds."""

    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)  # between chunks of text
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    error: str = ""

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.latency - self.ttft) / max(self.completion_tokens - 1, 1)


def make_requests(config: LoadConfig) -> list[TimedRequest]:
    """Return the requests to send. Raises ValueError or OSError for a trace that cannot be read."""
    if config.trace:
        return load_trace(config.trace, config.num_prompts, config.trace_speedup, config.trace_length_divisor)
    return poisson_requests(config.num_prompts, config.request_rate, config.input_len, config.output_len, config.seed)


def poisson_requests(
    num_requests: int, request_rate: float | None, prompt_words: int, output_len: int, seed: int = 0
) -> list[TimedRequest]:
    """Return random prompts with exponential gaps between them, or all due at once without a rate."""
    rng = random.Random(seed)
    due = 0.0
    requests = []
    for _ in range(num_requests):
        requests.append(TimedRequest(due, " ".join(rng.choice(WORDS) for _ in range(prompt_words)), output_len))
        due += rng.expovariate(request_rate) if request_rate else 0.0
    return requests


def load_trace(file: Path, num_requests: int, speedup: float, length_divisor: float) -> list[TimedRequest]:
    """Return the first requests of a trace, `speedup` times faster and with lengths divided by `length_divisor`.

    Prompts share prefixes where the hashes of the trace do. Raises ValueError or OSError.
    """
    requests = []
    for record in _read_trace(file, num_requests):
        words: list[str] = []
        for block in record["hash_ids"]:
            rng = random.Random(block)
            words += (rng.choice(WORDS) for _ in range(max(int(TOKENS_PER_TRACE_BLOCK / length_divisor), 1)))
        input_len = max(int(record["input_length"] / length_divisor), 1)
        output_len = max(int(record["output_length"] / length_divisor), 1)
        arrival_time = record["timestamp"] / 1000 / speedup
        requests.append(TimedRequest(arrival_time, " ".join(words[:input_len]), output_len))
    return requests


def _read_trace(file: Path, num_records: int) -> Iterator[dict[str, Any]]:
    with file.open() as lines:
        for i, line in enumerate(lines):
            if i == num_records:
                return
            try:
                record = json.loads(line)
                yield {k: record[k] for k in ("timestamp", "input_length", "output_length", "hash_ids")}
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{file}, line {i + 1}: not a record of such a trace") from None


def run(config: LoadConfig, requests: Sequence[TimedRequest], api_key: str | None = None) -> dict[str, Any]:
    """Send the requests and return the line. Raises ValueError where no request is answered."""
    return asyncio.run(_run(config, requests, api_key))


async def _run(config: LoadConfig, requests: Sequence[TimedRequest], api_key: str | None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    slots = asyncio.Semaphore(config.max_concurrency or len(requests))
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**18,
    ) as session:
        started = perf_counter()

        async def send_when_due(request: TimedRequest) -> RequestTiming:
            due = started + request.arrival_time
            await asyncio.sleep(max(due - perf_counter(), 0))
            async with slots:
                start_time = perf_counter() if config.max_concurrency else due
                return await send_request(session, config.url, config.model, request, start_time)

        timings = await asyncio.gather(*map(send_when_due, requests))
        duration_s = perf_counter() - started
    if all(t.error for t in timings):
        raise ValueError(f"no answer from {config.url}: {timings[0].error}")
    return summarize(config, timings, duration_s)


async def send_request(
    session: aiohttp.ClientSession, url: str, model: str, request: TimedRequest, start_time: float
) -> RequestTiming:
    """Send a request to the server of a base URL, and read its stream. Times count from `start_time`."""
    timing = RequestTiming()
    rest = b""
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = start_time
    try:
        async with session.post(f"{url.rstrip('/')}/completions", json=body) as response:
            if response.status != 200:
                timing.error = f"{response.status}: {(await response.text())[:200]}"
                return timing
            async for data in response.content.iter_any():
                now = perf_counter()
                events = (rest + data).split(b"\n\n")
                rest = events.pop()
                for event in events:
                    if event.startswith(b"data: {") and b'"text"' in event:
                        timing.itl.append(now - last)
                        last = now
                    if b'"usage":{' in event.replace(b'"usage": {', b'"usage":{'):
                        usage = json.loads(event[6:])["usage"]
                        timing.completion_tokens = usage["completion_tokens"]
                        timing.prompt_tokens = usage["prompt_tokens"]
                        timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                    if b'"error"' in event[:20]:
                        timing.error = event.decode(errors="replace")[:200]
    except Exception as error:  # any failure of the network is a failed request
        timing.error = str(error) or type(error).__name__
        return timing
    if not timing.itl:
        timing.error = timing.error or "no text"
        return timing
    timing.ttft = timing.itl.pop(0)
    timing.latency = last - start_time
    timing.completion_tokens = timing.completion_tokens or len(timing.itl) + 1  # the server sent no usage
    return timing


def summarize(config: LoadConfig, timings: Sequence[RequestTiming], duration_s: float) -> dict[str, Any]:
    """Return the line: percentiles in milliseconds, throughputs per second.

    `request_goodput` counts the requests within both objectives (`--ttft-slo`, `--tpot-slo`); `slo_attainment` is
    their share.
    """
    answered = [t for t in timings if not t.error]
    good = [t for t in answered if 1e3 * t.ttft <= config.ttft_slo and 1e3 * t.tpot <= config.tpot_slo]
    errors = sorted({t.error for t in timings if t.error})
    return {
        "url": config.url,
        "requests": len(timings),
        "num_failed": len(timings) - len(answered),
        "duration_s": round(duration_s, 2),
        "request_throughput": round(len(answered) / duration_s, 3),
        "input_throughput": round(sum(t.prompt_tokens for t in answered) / duration_s, 1),
        "output_throughput": round(sum(t.completion_tokens for t in answered) / duration_s, 1),
        **_percentiles("ttft", [t.ttft for t in answered]),
        **_percentiles("tpot", [t.tpot for t in answered]),
        **_percentiles("itl", [gap for t in answered for gap in t.itl]),
        **_percentiles("e2el", [t.latency for t in answered]),
        "request_goodput": round(len(good) / duration_s, 3),
        "slo_attainment": round(len(good) / len(timings), 3),
        **({"first_error": errors[0]} if errors else {}),
    }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    at = {p: ordered[min(len(ordered) * p // 100, len(ordered) - 1)] for p in (50, 90, 99)}
    return {f"{name}_p{p}_ms": round(1e3 * x, 2) for p, x in at.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Send the requests and print the line. Returns 2 after an error."""
    parser = argparse.ArgumentParser(description="load on an OpenAI-compatible server")
    add_arguments(parser, LoadConfig)
    try:
        config = from_args(LoadConfig, parser.parse_args(argv))
        line = run(config, make_requests(config), os.environ.get("OPENAI_API_KEY"))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    text = json.dumps(line)
    print(text)
    if config.output_dir:
        config.output_dir.mkdir(parents=True, exist_ok=True)
        (config.output_dir / "load.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
