"""What one key of a server may try against the others: requests and connections, each bounded in number and time.

    python -m tools.soak_attacks http://127.0.0.1:8000/v1 KEY PID SECONDS [NAME ...]

`tools/soak.py` runs this in a process of its own, so that what an attack costs its client delays no measurement. The
last line is JSON: by attack, how often each result came. A result is a status, or how the request ended without one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import aiohttp

Json = dict[str, Any]
Results = Counter[str]
MODEL = {"model": "soak"}
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
REQUEST_S = 20.0  # until a client hangs up
NUM_PARALLEL = 2  # attacks at once


@dataclass(frozen=True)
class Target:
    """A server that is attacked: its URL, which ends in /v1, a key, and the process."""

    url: str
    key: str
    pid: int
    session: aiohttp.ClientSession

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request."""
        return {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}

    async def request(self, path: str, body: Json | bytes | None = None, **headers: str) -> tuple[str, bytes]:
        """Send a request and read its answer, for a limited time. Returns the result, and what was answered."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        method = "GET" if data is None else "POST"
        try:
            async with asyncio.timeout(REQUEST_S):
                async with self.session.request(
                    method, self.url + path, data=data, headers={**self.headers, **headers}
                ) as response:
                    answer = await response.read()
                    return f"{response.status}", answer
        except TimeoutError:
            return "hung up", b""
        except (aiohttp.ClientError, OSError) as error:
            return type(error).__name__, b""

    async def send_all(self, path: str, bodies: Iterable[Json | bytes]) -> Results:
        """Send some bodies at once."""
        answers = await asyncio.gather(*(self.request(path, body) for body in bodies))
        return Results(result for result, _ in answers)

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a bare connection."""
        address = urlsplit(self.url)
        return await asyncio.open_connection(address.hostname, address.port)

    def head(self, length: int, path: str = "/v1/chat/completions") -> bytes:
        """Return the line and the headers of a request whose body has so many bytes."""
        lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {length}"]
        return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in self.headers.items()), "", ""]).encode()


def chat(**fields: Any) -> Json:
    """Return the body of a chat completion."""
    return {**MODEL, "messages": MESSAGES, "max_tokens": 8, **fields}


def nested(depth: int, is_list: bool = False) -> Any:
    """Return objects or lists in each other."""
    value: Any = 0
    for _ in range(depth):
        value = [value] if is_list else {"a": value}
    return value


# ---- bodies ----------------------------------------------------------------------------------------------------------


async def send_long_stop_strings(target: Target) -> Results:
    """Stop strings that an answer looks like for as long as possible: over the bound, and at it."""
    results = Results()
    for length in (120_000, 250):
        stop = [f"{'#' * length}{i:x}" for i in range(16)]
        bias = {str(token): 100 - token % 7 for token in range(2, 400)}
        body = chat(stop=stop, n=16, max_tokens=200, logit_bias=bias, frequency_penalty=0.5)
        results += await target.send_all("/chat/completions", [body])
    return results


async def send_stored_histories(target: Target) -> Results:
    """Conversations of many items that each response continues, and lists of their items."""
    calls = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 4000
    body: Json = {**MODEL, "input": calls, "max_output_tokens": 2}
    results = Results()
    path = ""
    for _ in range(5):
        result, answer = await target.request("/responses", body)
        results[result] += 1
        if result != "200":
            break
        path = f"/responses/{json.loads(answer)['id']}"
        body["previous_response_id"] = path.rpartition("/")[2]
        references = {**MODEL, "input": [{"type": "item_reference", "id": "fc_1"}] * 10_000, "max_output_tokens": 2}
        results += await target.send_all("/responses", [references])
    if path:
        pages = [target.request(f"{path}/input_items?limit=100&order=asc") for _ in range(8)]
        results += Results(result for result, _ in await asyncio.gather(*pages))
    return results


async def send_many_bodies(target: Target) -> Results:
    """Bodies of 1.3 MB at once, which are long to parse."""
    parts = [{"type": "text", "text": "x" * 50}] * 16_000
    content = json.dumps(chat(messages=[{"role": "user", "content": parts}])).encode()
    return await target.send_all("/chat/completions", [content] * 48)


async def send_deep_items(target: Target) -> Results:
    """Values nested as deep as a body may be, in fields that are stored or rendered."""
    deep = nested(180)
    items = [
        {"type": "reasoning", "summary": [deep] * 200},
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": deep},
        {"type": "mcp_call", "output": nested(190, is_list=True)},
    ]
    bodies = [{**MODEL, "input": [item, *MESSAGES], "max_output_tokens": 2} for item in items]
    bodies.append({**MODEL, "input": [{"type": "reasoning", "summary": nested(260)}], "max_output_tokens": 2})
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}] * 100
    return await target.send_all("/responses", bodies) + await target.send_all("/chat/completions", [chat(tools=tools)])


async def send_costly_schemas(target: Target) -> Results:
    """Schemas of a few hundred bytes that are long to compile, several at once."""

    def schema(i: int) -> Json:
        patterns = [{"pattern": f".*{c}.{{{5 + i}}}x"} for c in "abcdefghijklmnopqrst"]
        return {"type": "json_schema", "json_schema": {"schema": {"type": "string", "allOf": patterns}}}

    return await target.send_all("/chat/completions", [chat(response_format=schema(i)) for i in range(8)])


async def send_costly_policies(target: Target) -> Results:
    """Policies that evict as often, and in as small parts, as options allow."""
    prompt = "one two three four " * 300
    policies = ("h2o:budget=1,prefill=stream,chunk=1", "keyformer:budget=2,interval=1", "reread:budget=1")
    bodies = [
        {**MODEL, "prompt": prompt + str(random.random()), "max_tokens": 64, "kv_policy": policy, "ignore_eos": True}
        for policy in policies
        for _ in range(4)
    ]
    return await target.send_all("/completions", bodies)


async def send_many_biases(target: Target) -> Results:
    """Biases of many tokens for many choices, with penalties and log-probabilities."""
    bias = {str(token): -1 for token in range(500)}
    body = chat(logit_bias=bias, n=16, max_tokens=64, frequency_penalty=0.1, logprobs=True, top_logprobs=20)
    return await target.send_all("/chat/completions", [body] * 2)


async def send_many_prompts(target: Target) -> Results:
    """As many prompts and token ids as a body holds."""
    prompts = {**MODEL, "prompt": ["x" * 40] * 16_000, "max_tokens": 1}
    results = await target.send_all("/completions/render", [prompts])
    results += await target.send_all("/completions", [prompts, {**MODEL, "prompt": [7] * 1_000_000}])
    results += await target.send_all("/responses/render", [{**MODEL, "input": "x " * 600_000}])
    return results


async def send_long_names(target: Target) -> Results:
    """Names that errors quote: roles, models, fields and types."""
    long = "a" * 500_000
    bodies = [chat(messages=[{"role": long, "content": "x"}]), chat(model=long), chat(**{long: 1})]
    bodies += [chat(messages=[{"role": "user", "content": [{"type": long}]}]), chat(kv_policy=long)]
    return await target.send_all("/chat/completions", bodies)


async def send_pins(target: Target) -> Results:
    """Pins of more prompts than the pool holds."""
    bodies = [{**MODEL, "prompt": f"{i} " * 400, "max_tokens": 1, "pin": 60, "cache_salt": str(i)} for i in range(24)]
    return await target.send_all("/completions", bodies)


# ---- connections -----------------------------------------------------------------------------------------------------


async def hold_uploads(target: Target) -> Results:
    """Bodies that are sent but for their end."""

    async def hold() -> str:
        reader, writer = await target.open()
        try:
            writer.write(target.head(8 * 2**20))
            async with asyncio.timeout(8):
                for _ in range(6):
                    writer.write(b" " * 2**20)
                    await writer.drain()
                return (await reader.readline()).decode().partition(" ")[2][:3] or "closed"
        except TimeoutError:
            return "held"
        finally:
            writer.close()

    return await gather(hold() for _ in range(24))


async def send_slowly(target: Target) -> Results:
    """Headers and bodies that come byte by byte."""

    async def send(text: bytes) -> str:
        reader, writer = await target.open()
        try:
            for i in range(8):
                writer.write(text[i : i + 1])
                await writer.drain()
                await asyncio.sleep(0.5)
            writer.write(text[8:])
            async with asyncio.timeout(4):
                return (await reader.readline()).decode().partition(" ")[2][:3] or "closed"
        except TimeoutError:
            return "held"
        finally:
            writer.close()

    return await gather(send(target.head(10 + i)) for i in range(48))


async def hang_up_inside_bodies(target: Target) -> Results:
    """Connections that end within a body, half of them with a reset."""

    async def hang_up(i: int) -> str:
        _, writer = await target.open()
        writer.write(target.head(100_000) + b'{"model": "' + b"x" * 50_000)
        await writer.drain()
        await asyncio.sleep(0.01 * i)
        if i % 2:
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        return "hung up"

    return await gather(hang_up(i) for i in range(32))


async def abandon_streams(target: Target) -> Results:
    """Streams whose client reads nothing, and those that it leaves."""

    async def abandon(i: int) -> str:
        _, writer = await target.open()
        body = json.dumps(chat(stream=True, max_tokens=300, ignore_eos=True)).encode()
        writer.write(target.head(len(body)) + body)
        await writer.drain()
        await asyncio.sleep(0.4 * i)
        writer.close()
        return "left"

    return await gather(abandon(i) for i in range(12))


async def send_odd_headers(target: Target) -> Results:
    """Headers that are long, many, repeated, or no ASCII."""
    body = json.dumps(chat()).encode()
    lines = [
        b"x-session-id: \xe4\xf6\xfc",
        b"x-session-id: " + b"a" * 30_000,
        b"\r\n".join(b"x-%d: 1" % i for i in range(2000)),
        b"Content-Encoding: gzip",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
        b"Authorization: Bearer \xff",
        b"Content-Length: -1",
    ]

    async def send(line: bytes) -> str:
        reader, writer = await target.open()
        try:
            writer.write(target.head(len(body))[:-2] + line + b"\r\n\r\n" + body)
            async with asyncio.timeout(10):
                return (await reader.readline()).decode("latin-1").partition(" ")[2][:3] or "closed"
        except (TimeoutError, OSError):
            return "closed"
        finally:
            writer.close()

    return await gather(send(line) for line in lines)


async def gather(sends: Iterable[Awaitable[str]]) -> Results:
    """Await some connections at once."""
    results = await asyncio.gather(*sends, return_exceptions=True)
    return Results(type(r).__name__ if isinstance(r, BaseException) else r for r in results)


# ---- processes -------------------------------------------------------------------------------------------------------


def find_workers(pid: int) -> list[int]:
    """Return the processes of a server's sandbox."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"sandbox_worker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


async def end_workers(target: Target, number: signal.Signals) -> Results:
    """Send a signal to the workers, and then requests that need them."""
    for worker in find_workers(target.pid):
        with suppress(ProcessLookupError):
            os.kill(worker, number)
    return await target.send_all("/chat/completions", [chat()] * 2)


async def kill_workers(target: Target) -> Results:
    """Kill the workers of the sandbox, as a machine without memory does."""
    return await end_workers(target, signal.SIGKILL)


async def stop_workers(target: Target) -> Results:
    """Stop the workers of the sandbox."""
    return await end_workers(target, signal.SIGSTOP)


ATTACKS: dict[str, Callable[[Target], Awaitable[Results]]] = {
    function.__name__: function
    for function in (
        *(send_long_stop_strings, send_stored_histories, send_many_bodies, send_deep_items, send_costly_schemas),
        *(send_costly_policies, send_many_biases, send_many_prompts, send_long_names, send_pins),
        *(hold_uploads, send_slowly, hang_up_inside_bodies, abandon_streams, send_odd_headers),
        *(kill_workers, stop_workers),
    )
}


async def attack(target: Target, seconds: float, names: list[str]) -> dict[str, Results]:
    """Run attacks in turns, a few at once, for some time. Returns their results."""
    results = {name: Results() for name in names}
    end = monotonic() + seconds

    async def take_turns(start: int) -> None:
        for i in count(start):
            if monotonic() > end:
                return
            name = names[i % len(names)]
            results[name] += await ATTACKS[name](target)
            results[name]["runs"] += 1

    await asyncio.gather(*(take_turns(i * len(names) // NUM_PARALLEL) for i in range(NUM_PARALLEL)))
    return results


async def main(url: str, key: str, pid: int, seconds: float, names: list[str]) -> None:
    """Attack a server, and print the results."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
        results = await attack(Target(url, key, pid, session), seconds, names or list(ATTACKS))
    print(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:]))
