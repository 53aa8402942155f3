"""Run a server under attack by one of its keys, and check that another key, and the process, stay as they were.

    python -m tools.soak --minutes 15
    python -m tools.soak --minutes 2 --model random:tiny --attacks send_many_bodies hold_uploads

Starts `retain serve` on loopback with two keys and a store on a disk. First key B asks a quiet server, then streams in
the company of a full batch of ordinary requests. Then key A attacks (tools/soak_attacks.py), while B chats, streams and
asks for /health. At the end SIGTERM must drain the server, and `retain cache verify` must find nothing.

Prints a table of what was measured, and the laws that it breaks; the exit status is 1 if there is one.

`python -m tools.serve soak` is another load: well-formed streams of one client, and nobody attacks. It judges nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import linear_regression, quantiles
from time import monotonic, sleep
from typing import Any

import aiohttp

from tools.soak_attacks import ATTACKS, find_workers

KEYS = {"a": "sk-attacker-0123456789", "b": "sk-bystander-0123456789"}
PROMPTS = ("Name three rivers.", "What is a cache?", "Count to ten. " * 8, "Tell me about the sea. " * 24)
STREAM_TOKENS = 48
CHAT_TOKENS = 12
NUM_COMPANIONS = 15  # requests at once that make a full batch
DRAIN_S = 120.0
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"  # of models without one
SERVER_OPTIONS = {
    "--served-model-name": "soak",
    "--kv-memory": "192MiB",
    "--max-stored-bytes": "16MiB",
    "--max-queued-requests": "64",
    "--sandbox-timeout": "5",
    "--drain-timeout": "60",
}
Answer = list[int]  # token ids


@dataclass
class Observations:
    """What key B and the machine saw in one phase."""

    answers: dict[str, Answer] = field(default_factory=dict)  # of a quiet server
    num_equal: int = 0
    problems: Counter[str] = field(default_factory=Counter)  # of B's requests
    firsts_s: list[float] = field(default_factory=list)  # until the first token of streams
    gaps_s: list[float] = field(default_factory=list)  # between the tokens of streams
    chats_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    samples: list[tuple[float, float, int, int]] = field(default_factory=list)  # seconds, MiB, descriptors, threads
    zombies: Counter[int] = field(default_factory=Counter)  # samples by process


# ---- the server ------------------------------------------------------------------------------------------------------


@contextmanager
def start_server(model: str, folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server with two keys and a store; give its URL and its process, and end it if it still runs."""
    keys = folder / "keys"
    log = folder / "server.log"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    options = {**SERVER_OPTIONS, "--model": model, "--api-keys": str(keys), "--port": "0"}
    options["--tier"] = f"disk:path={folder / 'store'},capacity=256MiB"
    if model.startswith("random:"):
        (folder / "template.jinja").write_text(TEMPLATE)
        options["--chat-template"] = str(folder / "template.jinja")
    command = [sys.executable, "-m", "retain.cli", "serve", *(word for pair in options.items() for word in pair)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True)
    try:
        yield wait_for_url(process, log), process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_for_url(process: subprocess.Popen[str], log: Path) -> str:
    """Return the URL that a server prints once it listens."""
    end = monotonic() + 120
    while not (found := re.search(r"http://\S+/v1", log.read_text())):
        if process.poll() is not None or monotonic() > end:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
        sleep(0.1)
    return found[0]


def sample_process(pid: int) -> tuple[float, int, int]:
    """Return the resident MiB of a process, and its numbers of descriptors and threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident, threads = (int(re.findall(rf"^{name}:\s+(\d+)", status, re.M)[0]) for name in ("VmRSS", "Threads"))
    return resident / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())), threads


def find_zombies(pid: int) -> list[int]:
    """Return the children of a process that have ended and that it has not waited for."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == pid:
                found.append(int(folder.name))
    return found


# ---- key B -----------------------------------------------------------------------------------------------------------


class Bystander:
    """Key B: asks for greedy answers and compares them with those of a quiet server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, pid: int):
        self.session = session
        self.url = url
        self.pid = pid
        self.headers = {"Authorization": f"Bearer {KEYS['b']}"}

    async def chat(self, prompt: str) -> Answer:
        """Return the answer to a prompt. Raises aiohttp.ClientError for a refusal."""
        async with self._post(prompt, CHAT_TOKENS, stream=False) as response:
            body = await response.json()
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"{response.status} {body['error']['message'][:80]}")
            return list(body["choices"][0]["token_ids"])

    async def stream(self, prompt: str) -> AsyncIterator[Answer]:
        """Yield the tokens of each event of a stream. Raises aiohttp.ClientError for a refusal."""
        async with self._post(prompt, STREAM_TOKENS, stream=True) as response:
            if response.status != 200:
                raise aiohttp.ClientPayloadError(f"{response.status} {(await response.text())[:80]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise aiohttp.ClientPayloadError(f"in a stream: {event['error']['message'][:80]}")
                    for choice in event["choices"]:
                        yield list(choice.get("token_ids") or ())

    def _post(self, prompt: str, max_tokens: int, stream: bool) -> Any:
        body = {"model": "soak", "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": stream}
        return self.session.post(f"{self.url}/chat/completions", json=body, headers=self.headers)

    async def ask(self, prompt: str, streams: bool, seen: Observations) -> Answer:
        """Ask once, and note the times."""
        started = monotonic()
        last = monotonic()
        if not streams:
            answer = await self.chat(prompt)
            seen.chats_s.append(monotonic() - started)
            return answer
        answer = []
        async for tokens in self.stream(prompt):
            now = monotonic()
            if tokens and answer:
                seen.gaps_s.append(now - last)
            elif tokens:
                seen.firsts_s.append(now - started)
            answer += tokens
            last = now
        return answer

    async def ask_until(self, end: float, streams: bool, seen: Observations) -> None:
        """Ask for the prompts in turns, compare the answers, and note the differences."""
        i = 0
        while monotonic() < end:
            prompt = PROMPTS[i % len(PROMPTS)]
            i = i + 1
            try:
                answer = await self.ask(prompt, streams, seen)
                is_equal = answer == seen.answers[prompt][: len(answer)] and len(answer) >= CHAT_TOKENS
                seen.num_equal += is_equal
                seen.problems["another answer than on a quiet server"] += not is_equal
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                seen.problems[f"{type(error).__name__}: {error}"] += 1
            await asyncio.sleep(0.05)

    async def watch_until(self, end: float, seen: Observations) -> None:
        """Ask for /health, which needs nothing but the event loop, and look at the process."""
        begin = monotonic()
        zombies = set[int]()
        while (started := monotonic()) < end:
            try:
                async with self.session.get(f"{self.url.removesuffix('/v1')}/health") as response:
                    seen.problems[f"/health: {response.status}"] += response.status != 200
                    await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                seen.problems[f"/health: {type(error).__name__}"] += 1
            seen.health_s.append(monotonic() - started)
            seen.samples.append((monotonic() - begin, *sample_process(self.pid)))
            zombies, before = set(find_zombies(self.pid)), zombies
            seen.zombies.update(zombies & before)  # one that was there a moment ago, too
            await asyncio.sleep(0.5)


async def keep_company(session: aiohttp.ClientSession, url: str, end: float) -> None:
    """Keep a full batch of ordinary requests of key A running, with prompts to compute now and then."""
    headers = {"Authorization": f"Bearer {KEYS['a']}"}

    async def generate(i: int) -> None:
        for num_sent in count():
            prompt = f"{i} {num_sent} " + "one two three " * 40
            body = {"model": "soak", "prompt": prompt, "max_tokens": 48, "ignore_eos": True}
            async with session.post(f"{url}/completions", json=body, headers=headers) as response:
                await response.read()

    tasks = [asyncio.create_task(generate(i)) for i in range(NUM_COMPANIONS)]
    done, running = await asyncio.wait(tasks, timeout=end - monotonic())
    for task in (*running, *done):
        task.cancel()


async def run_phases(args: argparse.Namespace, url: str, pid: int) -> tuple[Observations, Observations, Any, list[str]]:
    """Return what was seen in company and under attack, the attacks' results, and what B gets after them."""
    timeout = aiohttp.ClientTimeout(total=120)
    # A connection for each request: the server may close an idle one just when it is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        bystander = Bystander(session, url, pid)
        quiet = Observations()
        report(f"asking a quiet server at {url}")
        answers = {prompt: await bystander.ask(prompt, True, quiet) for prompt in PROMPTS}
        company = Observations(answers)
        attacked = Observations(answers)
        end = monotonic() + args.company_seconds
        await asyncio.gather(
            keep_company(session, url, end),
            bystander.ask_until(end, True, company),
            bystander.ask_until(end, False, company),
            bystander.watch_until(end, company),
        )
        report(f"in company: {company.num_equal} answers equal, {len(company.gaps_s)} gaps")
        seconds = args.minutes * 60
        command = [sys.executable, "-m", "tools.soak_attacks", url, KEYS["a"], str(pid), str(seconds), *args.attacks]
        attacker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        end = monotonic() + seconds
        output, *_ = await asyncio.gather(
            asyncio.wait_for(attacker.communicate(), seconds + 300),
            bystander.ask_until(end, True, attacked),
            bystander.ask_until(end, True, attacked),
            bystander.ask_until(end, False, attacked),
            bystander.watch_until(end, attacked),
        )
        report(f"under attack: {attacked.num_equal} answers equal, {len(attacked.gaps_s)} gaps")
        after = await drain(bystander, answers)
    return company, attacked, json.loads(output[0].splitlines()[-1]), after


async def drain(bystander: Bystander, answers: dict[str, Answer]) -> list[str]:
    """Send SIGTERM while B streams. Returns what is wrong with these streams."""

    async def stream(prompt: str) -> str:
        answer: Answer = []
        try:
            async for tokens in bystander.stream(prompt):
                answer += tokens
                started.set()
        except (aiohttp.ClientError, OSError) as error:
            started.set()
            return f"a stream at the drain: {type(error).__name__} {error}"
        return "" if answer == answers[prompt] else "a stream at the drain has another answer"

    started = asyncio.Event()
    tasks = [asyncio.create_task(stream(prompt)) for prompt in PROMPTS]
    await started.wait()
    os.kill(bystander.pid, signal.SIGTERM)
    return [problem for problem in await asyncio.gather(*tasks) if problem]


def report(progress: str) -> None:
    """Say how far the soak is."""
    print(progress, file=sys.stderr, flush=True)


# ---- the report ------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 99th percentile and the largest of some seconds, in ms."""
    if len(values) < 2:
        return (values[0] * 1000,) * 3 if values else (0.0, 0.0, 0.0)
    cuts = quantiles(values, n=100, method="inclusive")
    return cuts[49] * 1000, cuts[98] * 1000, max(values) * 1000


def growth_per_minute(samples: Sequence[tuple[float, ...]], column: int) -> float:
    """Return the slope of one column over the second half of the samples: the first is the warm-up."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        return 0.0
    return linear_regression([s[0] for s in half], [s[column] for s in half]).slope * 60


def find_broken_laws(
    args: argparse.Namespace, company: Observations, attacked: Observations, attacks: dict[str, dict[str, int]]
) -> list[str]:
    """Return what must not be, a line each."""
    broken = [f"key B: {n} x {problem}" for problem, n in attacked.problems.items() if n]
    broken += [f"key B in company: {n} x {problem}" for problem, n in company.problems.items() if n]
    ends_workers = bool(attacks.keys() & {"kill_workers", "stop_workers"})  # those of other attacks, too
    allowed = {"503"} if ends_workers else set[str]()
    for name, results in attacks.items():
        broken += [f"{name}: {n} x {r}" for r, n in results.items() if r[:1] == "5" and r not in allowed]
    for what, beside, alone in (
        ("first token of B's streams", attacked.firsts_s, company.firsts_s),
        ("gap of B's streams", attacked.gaps_s, company.gaps_s),
        ("answer of /health", attacked.health_s, company.health_s),
    ):
        limit = max(args.factor * spread(alone)[2], 1000 * args.floor_seconds)
        if spread(beside)[2] > limit:
            broken.append(f"the longest {what} took {spread(beside)[2]:.0f} ms, at most {limit:.0f} ms")
    broken += [f"process {pid} was a zombie in {n} samples" for pid, n in attacked.zombies.items()]
    minutes = args.minutes / 2
    for column, unit, allowed_growth in ((1, "MiB", args.growth_mib), (2, "descriptors", 16), (3, "threads", 16)):
        grown = growth_per_minute(attacked.samples, column) * minutes
        if grown > allowed_growth:
            broken.append(f"{grown:.0f} {unit} more in the second half, at most {allowed_growth:g}")
    return broken


def print_table(company: Observations, attacked: Observations, attacks: dict[str, dict[str, int]]) -> None:
    """Print what was measured."""
    print(f"{'':34}{'median':>9}{'p99':>9}{'longest':>9}   ms")
    for name, seen in (("in company", company), ("under attack", attacked)):
        columns = {"first tokens": seen.firsts_s, "gaps": seen.gaps_s, "chats": seen.chats_s, "/health": seen.health_s}
        for what, values in columns.items():
            median, p99, longest = spread(values)
            print(f"{f'{what} {name} ({len(values)})':34}{median:9.1f}{p99:9.1f}{longest:9.1f}")
    for name, seen in (("in company", company), ("under attack", attacked)):
        print(f"answers {name}: {seen.num_equal} equal, {sum(seen.problems.values())} problems")
    for column, unit in ((1, "MiB"), (2, "descriptors"), (3, "threads")):
        first = attacked.samples[0][column]
        last = attacked.samples[-1][column]
        slope = growth_per_minute(attacked.samples, column)
        peak = max(s[column] for s in attacked.samples)
        print(f"{unit}: {first:.0f} at first, {peak:.0f} at most, {last:.0f} at last, {slope:+.1f} a minute at the end")
    for name, results in attacks.items():
        print(f"{name:26} {' '.join(f'{result}: {n}' for result, n in sorted(results.items()))}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the phases, print the table and the broken laws, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--model", default="smollm2", help="a model, or random:tiny")
    parser.add_argument("--attacks", nargs="*", default=[], choices=ATTACKS, metavar="NAME", help=", ".join(ATTACKS))
    parser.add_argument("--company-seconds", type=float, default=20)
    parser.add_argument("--factor", type=float, default=3, help="of the longest times in company that are allowed")
    parser.add_argument("--floor-seconds", type=float, default=0.5, help="what any time may be")
    parser.add_argument("--growth-mib", type=float, default=64, help="allowed growth of memory in the second half")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with start_server(args.model, path) as (url, process):
            company, attacked, attacks, broken = asyncio.run(run_phases(args, url, process.pid))
            workers = find_workers(process.pid)
            try:
                exit_code = process.wait(DRAIN_S)
            except subprocess.TimeoutExpired:
                exit_code = -1
        broken += find_broken_laws(args, company, attacked, attacks)
        broken += [f"exit code {exit_code} after SIGTERM"] if exit_code else []
        broken += [f"worker {pid} outlives the server" for pid in workers if Path(f"/proc/{pid}").exists()]
        log = (path / "server.log").read_text()
        failures = Counter(re.findall(r"^Traceback.*\n(?:[ \n].*\n)*(.{,120})", log, re.M))
        broken += [f"{n} tracebacks in the log: {failure}" for failure, n in failures.items()]
        verify = [sys.executable, "-m", "retain.cli", "cache", "verify", str(path / "store")]
        verified = subprocess.run(verify, capture_output=True, text=True)
        broken += [f"retain cache verify: {verified.stdout}{verified.stderr}"] if verified.returncode else []
    print_table(company, attacked, attacks)
    print(f"exit code {exit_code}; store: {verified.stdout.strip()}")
    for law in broken:
        print("BROKEN", law)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
