"""Load-test `retain serve`: disconnects, malformed bodies, and throughput beside the engine's own.

    python -m tools.serve soak --max-concurrency 200 --seconds 120
    python -m tools.serve fuzz --num-requests 10000
    python -m tools.serve throughput --max-concurrency 32 --rounds 5

Each command starts a server of SmolLM2 on a free port of this machine and ends it by SIGTERM.

`soak` sends well-formed streams of one client, a third of which disconnect, and prints memory and metrics without
judging them. tools/soak.py has a client that attacks and another that must not notice, and fails where a law breaks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

from tools import load

IN_PROCESS_SCRIPT = """
import sys
from time import perf_counter
from retain import LLM, SamplingParams
from tools.load import poisson_requests
llm = LLM("smollm2")
for line in sys.stdin:
    n, output_len, seed = map(int, line.split())
    prompts = [r.prompt for r in poisson_requests(n, None, 128, output_len, seed)]
    started = perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True))
    print(n * output_len / (perf_counter() - started), flush=True)
"""
VALID_BODIES = {
    "/v1/completions": {"model": "smollm2", "prompt": "The sea", "max_tokens": 2},
    "/v1/chat/completions": {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"model": "smollm2", "input": "x", "max_output_tokens": 2},
    "/v1/messages": {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "smollm2", "messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
FIELD_NAMES = (
    "model prompt messages max_tokens temperature top_p n stop stream seed logprobs echo logit_bias kv_policy tools "
    "speculate cache_salt pin response_format tool_choice stream_options tokens suffix best_of x "
    "system thinking cache_control stop_sequences output_config metadata input instructions previous_response_id "
    "max_output_tokens include text store explain_prefix"
)
FIELDS = FIELD_NAMES.split()
POLICIES = ["full", "h2o:budget=50%", "ring:window=64", "keyformer:budget=64", "tova:budget=40", "reread:budget=50%"]
SCHEMAS = [
    {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
]
VALUES = [None, True, -1, 0, 1, 2**70, 1e308, -0.5, "", "x", "\ud800", "../../etc", [], {}, [[]], {"type": "x"}]
VALUES += [[1, "x"], {"0": 1}, "h2o:budget=0", "ring:window=" + "9" * 30, [{"role": "user"}], {"a": {"b": [None]}}]


@contextmanager
def start_server(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server; give its URL and its process."""
    command = [sys.executable, "-m", "retain.cli", "serve", "--model", "smollm2", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    url = next(m[0] for line in process.stderr if (m := re.search(r"http://\S+/v1", line)))
    try:
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        print("exit code", process.wait(120))


def resident_mib(process: subprocess.Popen[str]) -> float:
    """Return the resident memory of a process in MiB."""
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
    assert match
    return int(match[1]) / 1024


async def fetch_metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the server's metrics, by name with labels, but for those that all have."""
    async with session.get(f"{url.removesuffix('/v1')}/metrics") as response:
        text = re.sub(r'(engine|model_name)="[^"]*",?', "", await response.text()).replace("{}", "")
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}


def pages_of_requests(metrics: dict[str, float]) -> float:
    """Return the pages that running requests own."""
    return sum(metrics[f'retain_pages{{state="{s}"}}'] for s in ("full", "ring", "budgeted", "shared"))


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and a body: a completion, a chat, or a chat with a schema; of any policy, perhaps with drafts."""
    prompt = " ".join(rng.choice(load.WORDS) for _ in range(rng.randint(8, 300)))
    body: dict[str, Any] = {"model": "smollm2", "max_tokens": rng.randint(8, 64), "stream": True}
    body |= {"kv_policy": rng.choice(POLICIES), "speculate": rng.choice(["off", "ngram"])}
    if rng.random() < 0.5:
        return "/completions", {**body, "prompt": prompt, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": prompt}]
    if rng.random() < 0.5:
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": rng.choice(SCHEMAS)}}
    return "/chat/completions", body


async def complete_greedily(session: aiohttp.ClientSession, url: str, prompt: str) -> str:
    """Return the greedy answer to a prompt, with policy full."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 32, "temperature": 0, "kv_policy": "full"}
    async with session.post(f"{url}/completions", json=body) as response:
        return str((await response.json())["choices"][0]["text"])


async def stream_one(session: aiohttp.ClientSession, url: str, rng: random.Random, expected: dict[str, str]) -> str:
    """Stream one random request, disconnecting from a third of them. Returns how it ended.

    A sixth of the requests are those of `expected`, greedy answers by prompt, which must come out equal.
    """
    try:
        if rng.random() < 1 / 6:
            prompt = rng.choice(list(expected))
            is_equal = await complete_greedily(session, url, prompt) == expected[prompt]
            return "greedy answer equal" if is_equal else "GREEDY ANSWER DIFFERS"
        path, body = random_request(rng)
        disconnect_after = rng.randint(0, 40) if rng.random() < 1 / 3 else None  # events
        async with session.post(f"{url}{path}", json=body) as response:
            if response.status != 200:
                return f"status {response.status}"
            num_events, last = 0, b""
            async for line in response.content:
                num_events += line.startswith(b"data: {")
                last = line.strip() or last
                if num_events == disconnect_after:
                    response.close()
                    return "disconnected"
            return "complete" if last == b"data: [DONE]" else f"cut short: {last[:80]!r}"
    except (aiohttp.ClientError, OSError) as error:
        return type(error).__name__


async def soak(url: str, process: subprocess.Popen[str], concurrency: int, seconds: float) -> None:
    """Keep many streams running, a third of which disconnect, and print memory and metrics now and then."""
    rng, endings, expected = random.Random(0), Counter[str](), dict[str, str]()

    async def stream_until_end(session: aiohttp.ClientSession) -> None:
        while perf_counter() < end:
            endings[await stream_one(session, url, rng, expected)] += 1

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        for i in range(12):  # alone, on the quiet server
            prompt = " ".join(rng.choice(load.WORDS) for _ in range(20 * (i + 1)))
            expected[prompt] = await complete_greedily(session, url, prompt)
        end = perf_counter() + seconds
        tasks = [asyncio.create_task(stream_until_end(session)) for _ in range(concurrency)]
        while perf_counter() < end:
            await asyncio.sleep(seconds / 8)
            metrics = await fetch_metrics(session, url)
            state = " ".join(f"{n} {metrics[f'vllm:num_requests_{n}']:.0f}" for n in ("running", "waiting"))
            elapsed = seconds - (end - perf_counter())
            print(f"{elapsed:6.0f} s: {resident_mib(process):6.0f} MiB  {state}  {dict(endings)}")
        await asyncio.gather(*tasks)
        await asyncio.sleep(1)
        metrics = await fetch_metrics(session, url)
    print("pages of requests", pages_of_requests(metrics), "preempted", metrics["vllm:num_preemptions_total"])
    print(dict(endings))


def random_body(rng: random.Random) -> tuple[str, bytes]:
    """Return a path and a body in which fields have random values; some are truncated, some have random bytes."""
    path = rng.choice(sorted(VALID_BODIES))
    body = dict(VALID_BODIES[path])
    for _ in range(rng.randint(1, 3)):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    data, kind = bytearray(json.dumps(body).encode()), rng.random()
    if kind < 0.2:
        del data[rng.randint(0, len(data)) :]
    elif kind < 0.4:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return path, bytes(data)


async def fuzz(url: str, num_requests: int) -> None:
    """Send malformed bodies, and print every response that is an error of the server."""
    rng, statuses = random.Random(0), Counter[int]()

    async def send(session: aiohttp.ClientSession, count: int) -> None:
        for _ in range(count):
            path, data = random_body(rng)
            headers = {"Content-Type": "application/json"}
            async with session.post(url.removesuffix("/v1") + path, data=data, headers=headers) as response:
                text = await response.text()
                statuses[response.status] += 1
                if response.status >= 500 or "Traceback" in text or "site-packages" in text:
                    print(response.status, path, data[:300], text[:300])

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(send(session, num_requests // 8) for _ in range(8)))
        metrics = await fetch_metrics(session, url)
    print("responses by status", dict(statuses), "pages of requests", pages_of_requests(metrics))


def compare_throughput(url: str, concurrency: int, rounds: int, output_len: int) -> None:
    """Compare output tokens per second through HTTP and in a process, in turns, on prompts that are not cached."""
    command = [sys.executable, "-c", IN_PROCESS_SCRIPT]
    in_process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert in_process.stdin and in_process.stdout
    config = load.LoadConfig(model="smollm2", url=url)
    ratios = []
    for i in range(rounds + 1):
        in_process.stdin.write(f"{concurrency} {output_len} {2 * i}\n")
        in_process.stdin.flush()
        inside = float(in_process.stdout.readline())
        requests = load.poisson_requests(concurrency, None, 128, output_len, 2 * i + 1)
        outside = load.run(config, requests)["output_throughput"]
        note = "" if i else "(warm-up)"
        print(f"in process {inside:7.1f}  through HTTP {outside:7.1f}  ratio {outside / inside:.3f}", note)
        ratios += [outside / inside] if i else []
    in_process.stdin.close()
    in_process.wait()
    print(f"median ratio {statistics.median(ratios):.3f} of {rounds}, {concurrency} streams, {output_len} tokens each")


def main() -> None:
    """Run a test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("test", choices=("soak", "fuzz", "throughput"))
    parser.add_argument("--max-concurrency", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--num-requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-len", type=int, default=256)
    args = parser.parse_args()
    with start_server("--kv-memory", "1GiB", "--max-queued-requests", "1000", "--allow-drafter", "ngram") as (
        url,
        process,
    ):
        if args.test == "soak":
            asyncio.run(soak(url, process, args.max_concurrency, args.seconds))
        elif args.test == "fuzz":
            asyncio.run(fuzz(url, args.num_requests))
        else:
            compare_throughput(url, args.max_concurrency, args.rounds, args.output_len)


if __name__ == "__main__":
    main()
