"""`retain cluster up`: starts Ray where there is none, runs the replicas, and stops what it started.

Importing this module imports Ray: set its environment before (see environment.py).
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from retain.cluster.application import build_application
from retain.cluster.config import ClusterSettings
from retain.signals import END_SIGNALS, interrupt_at_first_signal, restored_handlers

log = logging.getLogger(__name__)
APP_NAME = "retain"
POLL_S = 0.2


def up(settings: ClusterSettings) -> None:
    """Run the replicas until SIGTERM or SIGINT, then let running requests finish; a second signal ends at once.

    Raises ValueError or OSError for options that cannot work here, and for a replica that does not start.
    """
    server = settings.server
    settings = replace(settings, server=replace(server, port=_find_port(server.host, server.port)))
    with restored_handlers(), _ray(settings.cluster.address), ExitStack() as started:
        try:
            interrupt_at_first_signal(END_SIGNALS)  # Ray has set handlers of its own
            _start_serve(settings, started)
            started.callback(_delete_application, settings.graceful_shutdown_s)
            _run_application(settings)
            host = f"[{server.host}]" if ":" in server.host else server.host
            url = f"http://{host}:{settings.server.port}/v1"
            log.info("serving %s at %s with %d replicas", server.served_model_name[0], url, settings.cluster.replicas)
            threading.Event().wait()
        except KeyboardInterrupt:
            log.info("draining")
    log.info("shut down")


def _find_port(host: str, port: int) -> int:
    """Return a port that can be bound: this one, or a free one for 0. Raises OSError in one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(f"port {port} of {host} cannot be bound: {error.strerror}") from None
        return int(probe.getsockname()[1])


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """Connect to a running Ray cluster, or start one on this machine."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with ExitStack() as stack:
        options: dict[str, Any] = {"address": address}
        if address is None:
            # Only this user may enter the outer folder. Ray lets everybody into the inner one, whatever its mode was.
            folder = stack.enter_context(TemporaryDirectory(prefix="retain-ray-", ignore_cleanup_errors=True))
            options = {"address": "local", "include_dashboard": False, "_temp_dir": f"{folder}/ray"}
        try:
            ray.init(logging_level=logging.WARNING, configure_logging=False, **options)
        except Exception as error:  # Ray raises bare ones too, such as when it starts too slowly
            raise ValueError(f"Ray at {address or 'this machine'}: {_last_line(str(error))}") from None
        stack.callback(ray.shutdown)
        yield


def _start_serve(settings: ClusterSettings, started: ExitStack) -> None:
    """Start Ray Serve unless it runs, and let `started` stop it.

    Raises ValueError for another application `retain`, and where Ray Serve does not start.
    """
    applications = serve.status().applications
    if APP_NAME in applications:
        raise ValueError(f"the Ray cluster has an application {APP_NAME} already: delete it, or name another cluster")
    if serve.status().proxies:
        log.warning("Ray Serve runs in this cluster: its address holds, not --host and --port")
        return
    try:
        serve.start(
            proxy_location="HeadOnly" if settings.cluster.address is None else "EveryNode",
            http_options={"host": settings.server.host, "port": settings.server.port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
    except RayError as error:
        raise ValueError(f"Ray Serve did not start: {_last_line(str(error))}") from None
    if settings.cluster.address is not None:  # else Ray ends, and Serve with it
        started.callback(serve.shutdown)


def _run_application(settings: ClusterSettings) -> None:
    """Start the replicas. Raises ValueError with the first line that a replica failed with."""
    try:
        serve.run(build_application(settings), name=APP_NAME, route_prefix="/")
    except (RuntimeError, RayServeException) as error:
        application = serve.status().applications.get(APP_NAME)
        messages = [d.message for d in application.deployments.values()] if application else []
        raise ValueError(
            f"a replica did not start: {_last_line(max(messages, key=len, default='') or str(error))}"
        ) from None


def _last_line(text: str) -> str:
    """Return what an exception says at the end of a traceback, without the names of Ray's exceptions."""
    errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): (.+)$", text, re.MULTILINE)
    lines = errors or [line for line in text.splitlines() if line.strip()] or ["no reason given"]
    return str(lines[-1]).strip()


def _delete_application(timeout_s: float) -> None:
    """Delete the application: each replica ends with its last request. Waits for them."""
    serve.delete(APP_NAME, _blocking=False)
    deadline = time.monotonic() + timeout_s
    while APP_NAME in serve.status().applications and time.monotonic() < deadline:
        time.sleep(POLL_S)
