"""How often requests find their beginning cached behind the routers that people run, and what an indexer knows.

    python -m tools.routers                                  vllm-router, by policy
    python -m tools.routers --sglang-python PYTHON           sglang-router too
    python -m tools.routers --dynamo-python PYTHON           and Dynamo's indexer

Every line is a run of its own: fresh replicas, one router, the same requests: a few system prompts, each of many
users, in random order. The pool of a replica holds some of the system prompts only. Nothing is installed. Needed are
`pip install 'retain[serve,events,client]' vllm-router==0.1.17`; for PYTHON `pip install sglang-router==0.3.2`, or
`pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1` with pydantic and uvloop.
"""

from __future__ import annotations

import argparse
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

MODEL, PAGE_SIZE = "tiny", 64
QUESTION_LENGTH = 100  # bytes
VLLM_ROUTER = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Replica:
    """A server, and where it publishes events and replays."""

    url: str
    events: str
    replays: str


def find_free_ports(n: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [s.getsockname()[1] for s in sockets]


def wait_until_up(url: str) -> None:
    """Wait until an address answers 200. Raises TimeoutError."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{url} does not answer")


@contextmanager
def run(*command: str) -> Iterator[None]:
    """Run a program until the block ends."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def run_replicas(num_replicas: int, kv_memory: str) -> Iterator[list[Replica]]:
    """Run servers of a tiny random model whose tokens are bytes."""
    with ExitStack() as stack:
        replicas, ports = [], iter(find_free_ports(3 * num_replicas))
        for port, events, replays in zip(ports, ports, ports, strict=True):
            command = [sys.executable, "-m", "retain.cli", "serve", "--model", "random:tiny"]
            command += ["--served-model-name", MODEL, "--port", str(port), "--kv-memory", kv_memory]
            command += ["--kv-events", f"tcp://127.0.0.1:{events},replay={replays}"]
            stack.enter_context(run(*command))
            local = "tcp://127.0.0.1"
            replicas.append(Replica(f"http://127.0.0.1:{port}", f"{local}:{events}", f"{local}:{replays}"))
        for replica in replicas:
            wait_until_up(f"{replica.url}/ready")
        yield replicas


@contextmanager
def run_router(command: Sequence[str], policy: str, replicas: Sequence[Replica]) -> Iterator[str]:
    """Run a router in front of replicas. Yields its URL."""
    port, metrics_port = find_free_ports(2)
    options = ["--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    options += ["--worker-urls", *(r.url for r in replicas), "--balance-abs-threshold", "4"]
    options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    options += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"]
    if policy == "kv_aware":
        options += ["--kv-event-block-size", str(PAGE_SIZE), "--kv-event-model", MODEL]
        for r in replicas:
            options += ["--kv-event-source", f"{r.url}={r.events}", "--kv-event-replay-source", f"{r.url}={r.replays}"]
    with run(*command, *options):
        url = f"http://127.0.0.1:{port}"
        wait_until_up(f"{url}/health")
        yield url


def make_trace(num_system_prompts: int, num_users: int, length: int, seed: int = 0) -> list[str]:
    """Return prompts, each a system prompt of `length` bytes and a user's question, in random order."""
    rng = random.Random(seed)

    def write(n: int) -> str:
        return "".join(rng.choices("abcdefgh ", k=n))

    prompts = [
        system + write(QUESTION_LENGTH)
        for system in map(write, [length] * num_system_prompts)
        for _ in range(num_users)
    ]
    rng.shuffle(prompts)
    return prompts


def replay(choose_url: Callable[[], str], prompts: Sequence[str], concurrency: int) -> float:
    """Send all prompts. Returns the share of their tokens that was cached."""
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(concurrency) as pool:

        def ask(prompt: str) -> tuple[int, int]:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
            answer = client.post(f"{choose_url()}/v1/completions", json=body).raise_for_status().json()
            usage = answer["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

        counts = list(pool.map(ask, prompts))
    return sum(cached for cached, _ in counts) / sum(total for _, total in counts)


def query_indexer(python: str, replicas: Sequence[Replica], prompts: Sequence[str]) -> None:
    """Compute each prompt on one replica in turn, and print whose the indexer says it is."""
    (port,), num_right = find_free_ports(1), 0
    with run(python, "-m", "dynamo.indexer", "--port", str(port)):
        url = f"http://127.0.0.1:{port}"
        wait_until_up(f"{url}/health")
        for i, r in enumerate(replicas):
            worker = {"instance_id": i, "endpoint": r.events, "replay_endpoint": r.replays}
            worker |= {"model_name": MODEL, "block_size": PAGE_SIZE}
            httpx.post(f"{url}/register", json=worker).raise_for_status()
        replay(lambda: replicas[0].url, ["warm up"], 1)
        time.sleep(1)
        found = []
        for i, prompt in enumerate(prompts):
            home = i % len(replicas)
            replay(lambda home=home: replicas[home].url, [prompt], 1)  # type: ignore[misc]
            body = {"model": MODEL, "prompt": prompt}
            (rendered,) = httpx.post(f"{replicas[home].url}/v1/completions/render", json=body).json()
            found.append((home, rendered["token_ids"]))
        time.sleep(1)
        for home, token_ids in found:
            answer = httpx.post(f"{url}/query", json={"token_ids": token_ids, "model_name": MODEL}).json()
            matched = {i: x["longest_matched"] for i, x in answer.get("instances", {}).items()}
            expected = len(token_ids) // PAGE_SIZE * PAGE_SIZE
            num_right += matched.get(str(home)) == expected and max(matched, key=lambda i: matched[i]) == str(home)
    print(
        f"dynamo.indexer: the longest match is where the prompt was computed, to the page: {num_right}/{len(prompts)}"
    )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--system-prompts", type=int, default=8)
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024, help="bytes of a system prompt")
    parser.add_argument("--kv-memory", default="2MiB", help="pool of a replica")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--sglang-python", metavar="PYTHON", help="a Python that has sglang-router")
    parser.add_argument("--dynamo-python", metavar="PYTHON", help="a Python that has dynamo.indexer")
    args = parser.parse_args()
    if not VLLM_ROUTER:
        parser.error("pip install vllm-router==0.1.17")
    prompts = make_trace(args.system_prompts, args.users, args.length)
    runs = [("vllm-router", [VLLM_ROUTER], policy) for policy in ("random", "round_robin", "cache_aware", "kv_aware")]
    if args.sglang_python:
        command = [args.sglang_python, "-m", "sglang_router.launch_router"]
        runs += [("sglang-router", command, policy) for policy in ("random", "cache_aware")]
    for name, command, policy in runs:
        with run_replicas(args.replicas, args.kv_memory) as replicas, run_router(command, policy, replicas) as url:
            share = replay(lambda url=url: url, prompts, args.concurrency)  # type: ignore[misc]
            print(f"{name:14} {policy:12} {share:6.1%} of the prompt tokens cached", flush=True)
    if args.dynamo_python:
        with run_replicas(args.replicas, "64MiB") as replicas:
            query_indexer(args.dynamo_python, replicas, prompts[:16])


if __name__ == "__main__":
    main()
