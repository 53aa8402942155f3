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

BLOCK = 512  # tokens that a hash of a trace stands for (Mooncake, FAST'25)
COMMON = (  # most tokenizers have one token for each of these
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
)
WORDS = COMMON.split()


@dataclass(frozen=True)
class Call:
    """A request: due so many seconds after the beginning, of about `prompt` tokens, answered by `new`."""

    due: float
    prompt: str
    new: int


@dataclass
class Felt:
    """What came of a call."""

    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between pieces of text
    tokens: int = 0
    asked: int = 0  # tokens of its prompt
    error: str = ""

    @property
    def each(self) -> float:
        """Seconds a token, after the first."""
        return (self.last - self.first) / max(self.tokens - 1, 1)


@dataclass(frozen=True)
class Load:
    """What to send where. `ttft_s` and `each_s`: what a good answer takes at most, to its first token and a token."""

    url: str
    model: str
    key: str | None
    ttft_s: float
    each_s: float
    streams: int | None = None


def poisson(n: int, rate: float | None, prompt: int, new: int, seed: int = 0) -> list[Call]:
    """n calls, `rate` a second; all at once where there is none."""
    rng, due, calls = random.Random(seed), 0.0, []
    for _ in range(n):
        calls.append(Call(due, " ".join(rng.choice(WORDS) for _ in range(prompt)), new))
        due += rng.expovariate(rate) if rate else 0.0
    return calls


def trace(file: Path, n: int, faster: float, shorter: float) -> list[Call]:
    """The first n of a trace, so many times faster, their texts so many times shorter. Raises ValueError, OSError.

    Texts begin alike where the trace's hashes say so.
    """
    calls = []
    for record in _records(file, n):
        words: list[str] = []
        for block in record["hash_ids"]:
            rng = random.Random(block)
            words += (rng.choice(WORDS) for _ in range(max(int(BLOCK / shorter), 1)))
        length = max(int(record["input_length"] / shorter), 1)
        new = max(int(record["output_length"] / shorter), 1)
        calls.append(Call(record["timestamp"] / 1000 / faster, " ".join(words[:length]), new))
    return calls


def _records(file: Path, n: int) -> Iterator[dict[str, Any]]:
    with file.open() as lines:
        for i, line in enumerate(lines):
            if i == n:
                return
            try:
                record = json.loads(line)
                yield {k: record[k] for k in ("timestamp", "input_length", "output_length", "hash_ids")}
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{file}, line {i + 1}: not a record of such a trace") from None


def run(load: Load, calls: Sequence[Call]) -> dict[str, Any]:
    """Send them. Raises ValueError where nothing listens there."""
    try:
        import aiohttp
    except ImportError:
        raise ValueError("bench serve needs aiohttp: pip install 'retain[bench]'") from None
    return asyncio.run(_run(aiohttp, load, calls))


async def _run(aiohttp: Any, load: Load, calls: Sequence[Call]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {load.key}"} if load.key else {}
    places = asyncio.Semaphore(load.streams or len(calls))
    pool = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        headers=headers, connector=pool, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**18
    ) as session:
        began = perf_counter()

        async def one(call: Call) -> Felt:
            due = began + call.due
            await asyncio.sleep(max(due - perf_counter(), 0))
            async with places:
                return await _felt(session, load, call, perf_counter() if load.streams else due)

        felt = await asyncio.gather(*map(one, calls))
        took = perf_counter() - began
    if all(f.error for f in felt):
        raise ValueError(f"no answer from {load.url}: {felt[0].error}")
    return summary(load, felt, took)


async def _felt(session: Any, load: Load, call: Call, due: float) -> Felt:
    """One call, to its end."""
    felt, rest = Felt(), b""
    body = {
        "model": load.model,
        "prompt": call.prompt,
        "max_tokens": call.new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = due
    try:
        async with session.post(f"{load.url}/completions", json=body) as response:
            if response.status != 200:
                felt.error = f"{response.status}: {(await response.text())[:200]}"
                return felt
            async for data in response.content.iter_any():
                now, events = perf_counter(), (rest + data).split(b"\n\n")
                rest = events.pop()
                for event in events:
                    if event.startswith(b"data: {") and b'"text"' in event:
                        felt.gaps.append(now - last)
                        last = now
                    if b'"usage":{' in event.replace(b'"usage": {', b'"usage":{'):
                        usage = json.loads(event[6:])["usage"]
                        felt.tokens, felt.asked = usage["completion_tokens"], usage["prompt_tokens"]
                    if b'"error"' in event[:20]:
                        felt.error = event.decode(errors="replace")[:200]
    except Exception as error:  # whatever a network can do
        felt.error = str(error) or type(error).__name__
        return felt
    if not felt.gaps:
        felt.error = felt.error or "no text"
        return felt
    felt.first, felt.last = felt.gaps.pop(0), last - due
    felt.tokens = felt.tokens or len(felt.gaps) + 1  # of servers that count nothing
    return felt


def summary(load: Load, felt: Sequence[Felt], took: float) -> dict[str, Any]:
    """Percentiles in milliseconds, rates a second. `goodput`: answers a second that were good."""
    well = [f for f in felt if not f.error]
    good = [f for f in well if f.first <= load.ttft_s and f.each <= load.each_s]
    errors = sorted({f.error for f in felt if f.error})
    return {
        "url": load.url,
        "requests": len(felt),
        "errors": len(felt) - len(well),
        "seconds": round(took, 2),
        "requests_s": round(len(well) / took, 3),
        "prompt_tok_s": round(sum(f.asked for f in well) / took, 1),
        "new_tok_s": round(sum(f.tokens for f in well) / took, 1),
        **_percentiles("ttft", [f.first for f in well]),
        **_percentiles("token", [f.each for f in well]),
        **_percentiles("gap", [g for f in well for g in f.gaps]),
        **_percentiles("answer", [f.last for f in well]),
        "goodput": round(len(good) / took, 3),
        "good": round(len(good) / len(felt), 3),
        **({"first_error": errors[0]} if errors else {}),
    }


def _percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Of what there is."""
    ordered = sorted(seconds) or [0.0]
    at = {p: ordered[min(len(ordered) * p // 100, len(ordered) - 1)] for p in (50, 90, 99)}
    return {f"{name}_p{p}_ms": round(1e3 * x, 2) for p, x in at.items()}


def write(lines: Sequence[dict[str, Any]], out: Path) -> None:
    """Every number as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "serve.json").write_text(json.dumps(lines, indent=1))
