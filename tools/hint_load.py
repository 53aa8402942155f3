"""What a flood of hints of one API key costs a request of another.

python -m tools.hint_load --url http://127.0.0.1:8000/v1 --keys sk-one-0123 sk-other-4567

The second key sends hints of all kinds about one text, `--rate` a second, as far as `--in-flight` of them let it. The
first key streams an answer, before and meanwhile. Shown are the time to its first token and its longest gap between two
tokens, in seconds, then how many hints were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from itertools import cycle, pairwise
from time import perf_counter

import aiohttp

ACTIONS = ("retain", "demote", "prefetch", "signal", "release")
TEXT = "All pages of a text lie in the pool, until others need them. " * 30
NUM_TOKENS = 300


async def stream(client: aiohttp.ClientSession, url: str, model: str, key: str) -> dict[str, float]:
    """Stream an answer. Returns the seconds to its first token, and the longest between two."""
    body = {"model": model, "prompt": TEXT[:500], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    times = [perf_counter()]
    async with client.post(f"{url}/completions", json=body, headers=_headers(key)) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(perf_counter())
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return {"first_token_s": round(gaps[0], 3), "longest_gap_s": round(max(gaps[1:]), 3)}


async def flood(
    client: aiohttp.ClientSession, url: str, model: str, key: str, rate: float, in_flight: int, ended: asyncio.Event
) -> Counter[int]:
    """Send hints until the event is set. Returns the numbers of answers by HTTP status."""
    answers = Counter[int]()
    room = asyncio.Semaphore(in_flight)

    async def send(action: str) -> None:
        body = {"model": model, "prompt": TEXT, "seconds": 1}
        async with client.post(f"{url}/cache/{action}", json=body, headers=_headers(key)) as response:
            answers[response.status] += 1
        room.release()

    async with asyncio.TaskGroup() as tasks:
        for action in cycle(ACTIONS):
            if ended.is_set():
                break
            await room.acquire()
            tasks.create_task(send(action))
            await asyncio.sleep(1 / rate)
    return answers


async def run(args: argparse.Namespace) -> None:
    """Stream without and with the flood, and print what is seen."""
    first, other = args.keys
    connector = aiohttp.TCPConnector(limit=args.in_flight + 2)
    async with aiohttp.ClientSession(connector=connector) as client:
        await stream(client, args.url, args.model, other)
        print(json.dumps({"hints": "none", **await stream(client, args.url, args.model, first)}))
        ended = asyncio.Event()
        started = perf_counter()
        flooding = asyncio.create_task(flood(client, args.url, args.model, other, args.rate, args.in_flight, ended))
        for _ in range(args.rounds):
            print(json.dumps({"hints": "flood", **await stream(client, args.url, args.model, first)}))
        ended.set()
        answers = await flooding
        print(json.dumps({"seconds": round(perf_counter() - started, 1), "answers_by_status": dict(answers)}))


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def main() -> None:
    """Parse arguments, and run."""
    parser = argparse.ArgumentParser(description="measure what hints of one API key cost another")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--keys", nargs=2, required=True, metavar="KEY", help="who streams, and who sends hints")
    parser.add_argument("--rate", type=float, default=1000.0, help="hints a second")
    parser.add_argument("--in-flight", type=int, default=150, help="hints at once, at most")
    parser.add_argument("--rounds", type=int, default=3, help="answers that are streamed meanwhile")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
