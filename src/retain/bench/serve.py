"""`retain bench serve`: load on any OpenAI-compatible server, and what its users feel.

Requests of /v1/completions come when they come (`--rate`, Poisson; `--trace`, as they were recorded), whether the
server keeps up or not; or `--streams` are kept running, to find its throughput. Times are seconds from the moment at
which a request was due. What is not known here: engines.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

TOKENS_PER_TRACE_BLOCK = 512  # tokens that a hash of a trace stands for (Mooncake, FAST'25)
COMMON_WORDS = (  # most tokenizers have one token for each of these
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
WORDS = COMMON_WORDS.split()


@dataclass(frozen=True)
class TimedRequest:
    """A request: due so many seconds after the beginning, of about `prompt` tokens, answered by `new`."""

    arrival_time: float
    prompt: str
    output_len: int


@dataclass
class RequestTiming:
    """What came of a call."""

    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)  # between pieces of text
    completion_tokens: int = 0
    prompt_tokens: int = 0  # tokens of its prompt
    error: str = ""

    @property
    def tpot(self) -> float:
        """Seconds a token, after the first."""
        return (self.latency - self.ttft) / max(self.completion_tokens - 1, 1)


@dataclass(frozen=True)
class LoadConfig:
    """What to send where. `ttft_s` and `each_s`: what a good answer takes at most, to its first token and a token."""

    url: str
    model: str
    api_key: str | None
    ttft_slo_s: float
    tpot_slo_s: float
    max_concurrency: int | None = None


def poisson_requests(
    num_requests: int, request_rate: float | None, prompt_words: int, output_len: int, seed: int = 0
) -> list[TimedRequest]:
    """n calls, `rate` a second; all at once where there is none."""
    rng, due, calls = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        calls.append(TimedRequest(due, " ".join(rng.choice(WORDS) for _ in range(prompt_words)), output_len))
        due += rng.expovariate(request_rate) if request_rate else 0.0
    return calls


def load_trace(file: Path, num_requests: int, speedup: float, length_divisor: float) -> list[TimedRequest]:
    """The first n of a trace, so many times faster, their texts so many times shorter. Raises ValueError, OSError.

    Texts begin alike where the trace's hashes say so.
    """
    calls = []
    for record in _read_trace(file, num_requests):
        words: list[str] = []
        for block in record["hash_ids"]:
            rng = random.Random(block)
            words += (rng.choice(WORDS) for _ in range(max(int(TOKENS_PER_TRACE_BLOCK / length_divisor), 1)))
        length = max(int(record["input_length"] / length_divisor), 1)
        new = max(int(record["output_length"] / length_divisor), 1)
        calls.append(TimedRequest(record["timestamp"] / 1000 / speedup, " ".join(words[:length]), new))
    return calls


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


def run(config: LoadConfig, requests: Sequence[TimedRequest]) -> dict[str, Any]:
    """Send them. Raises ValueError where nothing listens there."""
    try:
        import aiohttp
    except ImportError:
        raise ValueError("bench serve needs aiohttp: pip install 'retain[bench]'") from None
    return asyncio.run(_run(aiohttp, config, requests))


async def _run(aiohttp: Any, config: LoadConfig, requests: Sequence[TimedRequest]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    places = asyncio.Semaphore(config.max_concurrency or len(requests))
    pool = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        headers=headers, connector=pool, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**18
    ) as session:
        began = perf_counter()

        async def one(call: TimedRequest) -> RequestTiming:
            due = began + call.arrival_time
            await asyncio.sleep(max(due - perf_counter(), 0))
            async with places:
                return await _send_request(session, config, call, perf_counter() if config.max_concurrency else due)

        felt = await asyncio.gather(*map(one, requests))
        took = perf_counter() - began
    if all(f.error for f in felt):
        raise ValueError(f"no answer from {config.url}: {felt[0].error}")
    return summarize(config, felt, took)


async def _send_request(session: Any, config: LoadConfig, request: TimedRequest, start_time: float) -> RequestTiming:
    """One call, to its end."""
    felt, rest = RequestTiming(), b""
    body = {
        "model": config.model,
        "prompt": request.prompt,
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = start_time
    try:
        async with session.post(f"{config.url}/completions", json=body) as response:
            if response.status != 200:
                felt.error = f"{response.status}: {(await response.text())[:200]}"
                return felt
            async for data in response.content.iter_any():
                now, events = perf_counter(), (rest + data).split(b"\n\n")
                rest = events.pop()
                for event in events:
                    if event.startswith(b"data: {") and b'"text"' in event:
                        felt.itl.append(now - last)
                        last = now
                    if b'"usage":{' in event.replace(b'"usage": {', b'"usage":{'):
                        usage = json.loads(event[6:])["usage"]
                        felt.completion_tokens, felt.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                    if b'"error"' in event[:20]:
                        felt.error = event.decode(errors="replace")[:200]
    except Exception as error:  # whatever a network can do
        felt.error = str(error) or type(error).__name__
        return felt
    if not felt.itl:
        felt.error = felt.error or "no text"
        return felt
    felt.ttft, felt.latency = felt.itl.pop(0), last - start_time
    felt.completion_tokens = felt.completion_tokens or len(felt.itl) + 1  # of servers that count nothing
    return felt


def summarize(config: LoadConfig, timings: Sequence[RequestTiming], duration_s: float) -> dict[str, Any]:
    """Percentiles in milliseconds, rates a second. `goodput`: answers a second that were good."""
    well = [f for f in timings if not f.error]
    good = [f for f in well if f.ttft <= config.ttft_slo_s and f.tpot <= config.tpot_slo_s]
    errors = sorted({f.error for f in timings if f.error})
    return {
        "url": config.url,
        "requests": len(timings),
        "errors": len(timings) - len(well),
        "seconds": round(duration_s, 2),
        "requests_s": round(len(well) / duration_s, 3),
        "prompt_tok_s": round(sum(f.prompt_tokens for f in well) / duration_s, 1),
        "new_tok_s": round(sum(f.completion_tokens for f in well) / duration_s, 1),
        **_percentiles("ttft", [f.ttft for f in well]),
        **_percentiles("token", [f.tpot for f in well]),
        **_percentiles("gap", [g for f in well for g in f.itl]),
        **_percentiles("answer", [f.latency for f in well]),
        "goodput": round(len(good) / duration_s, 3),
        "good": round(len(good) / len(timings), 3),
        **({"first_error": errors[0]} if errors else {}),
    }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Of what there is."""
    ordered = sorted(seconds) or [0.0]
    at = {p: ordered[min(len(ordered) * p // 100, len(ordered) - 1)] for p in (50, 90, 99)}
    return {f"{name}_p{p}_ms": round(1e3 * x, 2) for p, x in at.items()}


def write_results(results: Sequence[dict[str, Any]], out: Path) -> None:
    """Every number as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "serve.json").write_text(json.dumps(results, indent=1))
