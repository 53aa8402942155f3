"""The option --kv-events: an address to publish at, and options behind it.

tcp://127.0.0.1:5557                            replays are at the next port
tcp://10.0.0.7:5557,replay=6000,insecure=yes    whoever reaches the address can read all prompts
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from retain.options import Port, PositiveInt, check_bounds
from retain.plugins import check_choice, from_strings, parse_spec
from retain.server import hosts

SCHEME = "tcp"


@dataclass(frozen=True)
class KVEventsOptions:
    """What follows the address in a spec. Raises ValueError."""

    replay: Port = 0  # port of the socket that repeats events; 0 is the port behind that of the events
    buffer: PositiveInt = 10_000  # batches of events that can be repeated
    topic: str = ""  # first frame of a batch; vllm-router wants none, llm-d kv@HOST:PORT@MODEL
    insecure: str = "no"  # or yes: publish beyond this machine

    def __post_init__(self) -> None:
        check_choice("--kv-events: insecure", self.insecure, "yes", "no")
        check_bounds(self)


@dataclass(frozen=True)
class KVEventsConfig:
    """Where events are published, and how many are kept. Port 0 picks a free one."""

    host: str
    port: int
    replay_port: int
    buffer: int
    topic: str = ""

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 address."""
        return ":" in self.host

    def endpoint(self, port: int) -> str:
        """Return the ZeroMQ endpoint of a port of this host; ZeroMQ writes a free port as `*`."""
        host = f"[{self.host}]" if self.is_ipv6 else self.host
        return f"{SCHEME}://{host}:{port or '*'}"


def parse(spec: str) -> KVEventsConfig:
    """Return the configuration that a spec describes. Raises ValueError.

    An address that others can reach needs `insecure=yes`: token ids are texts.
    """
    address, _, rest = spec.partition(",")
    host, port = _split_address(address)
    options: Any = from_strings(KVEventsOptions, "--kv-events", parse_spec(f"{SCHEME}:{rest}")[1])
    if options.insecure != "yes" and not hosts.is_loopback(host):
        raise ValueError(
            f"--kv-events {address}: everybody who reaches that address could read all prompts, as token ids: bind to "
            "127.0.0.1, or to a private network and accept that with insecure=yes"
        )
    return KVEventsConfig(_resolve(host), port, options.replay or (port and port + 1), options.buffer, options.topic)


def _split_address(address: str) -> tuple[str, int]:
    try:
        url = urlsplit(address.replace("*", "0.0.0.0"))
        host = url.hostname
        port = url.port
    except ValueError:
        host = None
        port = None
    if not host or port is None or url.scheme != SCHEME or url.path or not 0 <= port < 2**16 - 1:
        raise ValueError(f"--kv-events is an address such as tcp://127.0.0.1:5557, not {address!r}")
    return host, port


def _resolve(host: str) -> str:
    """Return the address of a name: ZeroMQ binds to addresses only."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        raise ValueError(f"--kv-events: the name {host} has no address") from None
