"""Measure what many large bodies of one key cost another: its chat and /health beside them, and memory.

    python -m tools.bodies --num-bodies 24 48

Starts a server of SmolLM2 with two keys on a free port and ends it by SIGTERM. Each body is wrong in its last message,
so it is parsed and validated, and nothing else. Give ratios of one run: the machine may be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import aiohttp

from tools.serve import resident_mib, start_server

KEYS = {"ann": "sk-ann-0123456789", "bob": "sk-bob-0123456789"}
NUM_MESSAGES = 16_000
SMALL = {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
BODIES = {
    "messages": {**SMALL, "messages": [{"role": "user", "content": "x" * 50}] * NUM_MESSAGES + [{"content": 1}]},
    "token ids": {"model": "smollm2", "prompt": [[12345] * 1000] * 186, "max_tokens": 1, "x": 1},
    "unfinished": None,  # 8 MiB announced, and all but the end sent
}
UNFINISHED_SIZE = 2**23


@contextmanager
def start_server_with_keys() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server that has the keys; give its URL and its process."""
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as file:
        file.write("".join(f"{name} {key}\n" for name, key in KEYS.items()))
        file.flush()
        with start_server("--api-keys", file.name) as started:
            yield started


async def time_of(call: Callable[[], Awaitable[int]]) -> float:
    """Return the seconds that a request takes, which must succeed."""
    started = perf_counter()
    status = await call()
    assert status == 200, status
    return perf_counter() - started


async def measure(url: str, process: subprocess.Popen[str], kind: str, counts: list[int]) -> None:
    """Send the bodies of one kind at once, for each count, and print what the other key sees."""
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in KEYS.items()}
    body = BODIES[kind]
    data = json.dumps(body).encode() if body else b" " * UNFINISHED_SIZE

    async def unfinished():  # type: ignore[no-untyped-def]
        yield data
        await asyncio.sleep(3)
        raise asyncio.CancelledError

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post_large() -> int:
            content = data if body else unfinished()
            path = "completions" if kind == "token ids" else "chat/completions"
            try:
                async with session.post(f"{url}/{path}", data=content, headers=headers["ann"]) as response:
                    await response.read()
                    return response.status
            except (aiohttp.ClientError, asyncio.CancelledError):
                return 0

        async def chat() -> int:
            async with session.post(f"{url}/chat/completions", json=SMALL, headers=headers["bob"]) as response:
                await response.read()
                return response.status

        async def health() -> int:
            async with session.get(f"{url.removesuffix('/v1')}/health") as response:
                await response.read()
                return response.status

        quiet = [statistics.median([await time_of(call) for _ in range(9)]) for call in (chat, health)]
        print(f"{kind}, {len(data)} bytes; quiet: chat {quiet[0]:.3f} s, /health {1000 * quiet[1]:.1f} ms")
        for count in counts:
            memory = [resident_mib(process)]
            tasks = [asyncio.create_task(post_large()) for _ in range(count)]

            async def probe(call: Callable[[], Awaitable[int]], tasks=tasks, memory=memory) -> list[float]:  # type: ignore[no-untyped-def]
                times: list[float] = []
                while not all(task.done() for task in tasks):
                    await asyncio.sleep(0.05)
                    times.append(await time_of(call))
                    memory.append(resident_mib(process))
                return times

            chats, healths = await asyncio.gather(probe(chat), probe(health))
            statuses = dict(Counter([await task for task in tasks]))
            print(
                f"  {count:3} bodies {statuses}: chat at most {max(chats):.2f} s ({max(chats) / quiet[0]:.0f} x), "
                f"median {statistics.median(chats):.2f} s; /health at most {max(healths):.3f} s, "
                f"median {1000 * statistics.median(healths):.1f} ms; memory +{max(memory) - memory[0]:.0f} MiB",
                flush=True,
            )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-bodies", type=int, nargs="+", default=[24, 48])
    parser.add_argument("--kinds", nargs="+", default=list(BODIES), choices=list(BODIES))
    args = parser.parse_args()
    with start_server_with_keys() as (url, process):
        for kind in args.kinds:
            asyncio.run(measure(url, process, kind, args.num_bodies))


if __name__ == "__main__":
    main()
