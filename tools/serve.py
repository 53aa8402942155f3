"""What a server bears: many streams, many that hang up, whatever is sent; and its throughput beside the engine's own.

    python tools/serve.py soak --streams 200 --seconds 120
    python tools/serve.py fuzz --bodies 10000
    python tools/serve.py throughput --streams 32 --rounds 5

Each starts `retain serve` of SmolLM2 on a port of its own and ends it by SIGTERM.
"""

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
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import aiohttp

from retain.bench import serve as load

RETAIN = Path(sys.executable).parent / "retain"
IN_PROCESS_SCRIPT = """
import sys
from time import perf_counter
from retain import LLM, SamplingParams
from retain.bench.serve import poisson
llm = LLM("smollm2")
for line in sys.stdin:
    n, new, seed = map(int, line.split())
    prompts = [c.prompt for c in poisson(n, None, 128, new, seed)]
    began = perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=new, temperature=0, ignore_eos=True))
    print(n * new / (perf_counter() - began), flush=True)
"""


@contextmanager
def start_server(*options):
    """A server and its process."""
    command = [RETAIN, "serve", "--model", "smollm2", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    url = next(m[0] for line in process.stderr if (m := re.search(r"http://\S+/v1", line)))
    try:
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        print("exit code", process.wait(120))


def resident_mib(process):
    """MiB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]) / 1024


async def fetch_metrics(session, url):
    """Samples by name and labels."""
    async with session.get(f"{url.removesuffix('/v1')}/metrics") as said:
        lines = (await said.text()).splitlines()
    return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


async def soak(url, process, concurrency, seconds):
    """A third hang up somewhere; nobody else may notice."""
    rng, found, end = random.Random(0), Counter(), perf_counter() + seconds
    words = load.WORDS

    async def one(session):
        while perf_counter() < end:
            text = " ".join(rng.choice(words) for _ in range(rng.randint(8, 300)))
            body = {"model": "smollm2", "prompt": text, "max_tokens": rng.randint(8, 64), "stream": True}
            body |= {"ignore_eos": True, "kv_policy": rng.choice(["full", "h2o:budget=50%", "ring:window=64"])}
            gone = rng.randint(0, 40) if rng.random() < 1 / 3 else None
            try:
                async with session.post(f"{url}/completions", json=body) as said:
                    if said.status != 200:
                        found[f"status {said.status}"] += 1
                        continue
                    events, last = 0, b""
                    async for line in said.content:
                        events += line.startswith(b"data: {")
                        last = line.strip() or last
                        if events == gone:
                            said.close()
                            break
                    if gone is not None and events >= gone:
                        found["hung up"] += 1
                    else:
                        found["whole" if last == b"data: [DONE]" else f"cut short: {last[:80]!r}"] += 1
            except (aiohttp.ClientError, OSError) as error:
                found[f"{type(error).__name__}"] += 1

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        tasks = [asyncio.create_task(one(session)) for _ in range(concurrency)]
        while perf_counter() < end:
            await asyncio.sleep(seconds / 8)
            now = await fetch_metrics(session, url)
            names = ("running", "waiting")
            state = " ".join(f"{n} {now[f'retain_num_requests_{n}']:.0f}" for n in names)
            print(
                f"{seconds - (end - perf_counter()):6.0f} s: {resident_mib(process):6.0f} MiB  {state}  {dict(found)}"
            )
        await asyncio.gather(*tasks)
        await asyncio.sleep(1)
        now = await fetch_metrics(session, url)
    held = sum(now[f'retain_pages{{state="{s}"}}'] for s in ("full", "ring", "budgeted", "shared"))
    print("pages that somebody holds", held, "preempted", now["retain_num_preemptions_total"], dict(found))


async def fuzz(url, bodies):
    """Good bodies, of which some field is anything, or some bytes are others, or the end is missing."""
    rng, found = random.Random(0), Counter()
    good = {
        "/v1/completions": {"model": "smollm2", "prompt": "The sea", "max_tokens": 2},
        "/v1/chat/completions": {"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [5]},
    }
    fields = "model prompt messages max_tokens temperature top_p n stop stream seed logprobs echo logit_bias kv_policy"
    fields += " tools speculate cache_salt pin response_format tool_choice stream_options tokens suffix best_of x"
    values = [None, True, -1, 0, 1, 2**70, 1e308, -0.5, "", "x", "\ud800", "../../etc", [], {}, [[]], {"type": "x"}]
    values += [[1, "x"], {"0": 1}, "h2o:budget=0", "ring:window=" + "9" * 30, [{"role": "user"}], {"a": {"b": [None]}}]

    def body():
        path = rng.choice(sorted(good))
        what = dict(good[path])
        for _ in range(rng.randint(1, 3)):
            what[rng.choice(fields.split())] = rng.choice(values)
        data = bytearray(json.dumps(what).encode())
        kind = rng.random()
        if kind < 0.2:
            del data[rng.randint(0, len(data)) :]
        elif kind < 0.4:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        return path, bytes(data)

    async def some(session, n):
        for _ in range(n):
            path, data = body()
            headers = {"Content-Type": "application/json"}
            async with session.post(url.removesuffix("/v1") + path, data=data, headers=headers) as said:
                text = await said.text()
                found[said.status] += 1
                if said.status >= 500 or "Traceback" in text or "site-packages" in text:
                    print(said.status, path, data[:300], text[:300])

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(some(session, bodies // 8) for _ in range(8)))
        now = await fetch_metrics(session, url)
    held = sum(now[f'retain_pages{{state="{s}"}}'] for s in ("full", "ring", "budgeted", "shared"))
    print("answers by status", dict(found), "pages that somebody holds", held)


def compare_throughput(url, concurrency, rounds, output_len):
    """New tokens a second of the same prompts, through HTTP and inside, in turns; both begin with nothing cached."""
    env_inside = subprocess.Popen(
        [sys.executable, "-c", IN_PROCESS_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    ratios = []
    for i in range(rounds + 1):
        env_inside.stdin.write(f"{concurrency} {output_len} {2 * i}\n")
        env_inside.stdin.flush()
        inside = float(env_inside.stdout.readline())
        about = load.LoadConfig(url, "smollm2", None, 1.0, 0.1)
        outside = load.run(about, load.poisson_requests(concurrency, None, 128, output_len, 2 * i + 1))["new_tok_s"]
        print(
            f"inside {inside:7.1f}  through HTTP {outside:7.1f}  ratio {outside / inside:.3f}", "" if i else "(warm-up)"
        )
        ratios += [outside / inside] if i else []
    env_inside.stdin.close()
    env_inside.wait()
    print(f"median ratio {statistics.median(ratios):.3f} of {rounds}, {concurrency} streams, {output_len} tokens each")


def main():
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("soak", "fuzz", "throughput"))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=256)
    a = parser.parse_args()
    with start_server("--kv-memory", "1GiB", "--queue", "1000") as (url, process):
        if a.what == "soak":
            asyncio.run(soak(url, process, a.streams, a.seconds))
        elif a.what == "fuzz":
            asyncio.run(fuzz(url, a.bodies))
        else:
            compare_throughput(url, a.streams, a.rounds, a.new)


if __name__ == "__main__":
    main()
