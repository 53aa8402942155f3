"""The environment of Ray, which it reads when it is imported."""

from __future__ import annotations

import os
import secrets

HAPROXY_ENV = "RAY_SERVE_ENABLE_HA_PROXY"
REPLICA_PORTS, PORTS_OF_CLUSTER = range(10000, 30000), 100


def set_environment(address: str | None) -> None:
    """Switch HAProxy on and telemetry off. Where Ray is started here (no address), close it to other machines.

    It asks for a token then. Call it before Ray is imported. The processes that Ray starts inherit it.
    """
    os.environ[HAPROXY_ENV] = "1"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")  # Ray Serve logs to files; a replica's own log is shown
    os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.3")  # a third of what the default costs when idle
    if address is None:
        # Listen on 127.0.0.1, not on every interface, on Linux as on desktops.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        os.environ["RAY_AUTH_MODE"] = "token"
        # Ray gives its workers niceness 15: replicas would get a thirtieth of a core beside any other work.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Two clusters on one machine must not share this range: HAProxy would send requests to a port that a replica
        # is about to take, where one of the other cluster answers.
        first = secrets.choice(REPLICA_PORTS[::PORTS_OF_CLUSTER])
        os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", str(first))
        os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT", str(first + PORTS_OF_CLUSTER - 1))
