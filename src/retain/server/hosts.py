"""Who can reach a server without API keys: which addresses it binds, and which Host headers it accepts.

The name of a web page's server may be made to resolve to this machine (DNS rebinding). A browser then lets the page
read what this server answers, but it sends the page's own name as Host.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection

LOCAL_NAME = "localhost"


def is_loopback(host: str) -> bool:
    """Return whether a name or an address to bind is reachable from this machine only."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host or None, None, flags=socket.AI_PASSIVE)}
    except (OSError, UnicodeError):
        return False  # binding will fail, and say why
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in found)


def check_exposure(host: str, has_keys: bool, insecure: bool) -> None:
    """Raise ValueError, in one line, for a server that everybody on the network could use."""
    if not has_keys and not insecure and not is_loopback(host):
        raise ValueError(
            f"without API keys everybody who reaches {host or 'this machine'} could use the server: give --api-keys "
            "FILE or $RETAIN_API_KEYS, bind to 127.0.0.1, or accept that with --insecure-no-api-key"
        )


class HostRule:
    """Which Host headers are accepted: local ones and the given names.

    With `any_address` every address is, for a server that listens beyond this machine: a web page's name is no address.
    """

    def __init__(self, names: Collection[str], any_address: bool = False):
        self.names = {LOCAL_NAME, *(name.lower().rstrip(".") for name in names)}
        self.any_address = any_address

    def accepts(self, header: str) -> bool:
        """Return whether a Host header, with or without a port, is accepted."""
        name = _without_port(header.strip().lower())
        if name.rstrip(".") in self.names:
            return True
        try:
            address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return self.any_address or address.is_loopback


def _without_port(header: str) -> str:
    """Return the host of `host`, `host:port`, `[address]` or `[address]:port`; unchanged if it is none of them."""
    host, colon, port = header.rpartition(":")
    return host if colon and port.isdigit() and (":" not in host or host.endswith("]")) else header
