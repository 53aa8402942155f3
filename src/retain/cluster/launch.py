"""`retain cluster up`: starts Ray on this machine, runs the replicas, and ends both."""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory

from retain.cluster.config import ClusterSettings
from retain.signals import END_SIGNALS, interrupt_at_first_signal, restored_handlers

log = logging.getLogger(__name__)
APP_NAME = "retain"


def set_environment() -> None:
    """Close Ray to other machines and users, and switch its telemetry off; it starts processes with this environment.

    Call it before Ray is imported.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listen on 127.0.0.1, on Linux as on desktops
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")  # Ray Serve logs to files; a replica's own log is shown
    # Ray gives its workers niceness 15: replicas would get a thirtieth of a core beside any other work.
    os.environ.setdefault("RAY_worker_niceness", "0")


def up(settings: ClusterSettings) -> None:
    """Run the replicas until SIGTERM or SIGINT, then let running requests finish; a second signal ends at once.

    Raises ValueError for options that cannot work here, and for a replica that does not start.
    """
    server = settings.server
    with restored_handlers(), _ray():
        try:
            interrupt_at_first_signal(END_SIGNALS)  # Ray has set handlers of its own
            _run_application(settings)
            host = f"[{server.host}]" if ":" in server.host else server.host
            url = f"http://{host}:{server.port}/v1"
            log.info("serving %s at %s with %d replicas", server.served_model_name[0], url, settings.cluster.replicas)
            threading.Event().wait()
        except KeyboardInterrupt:
            log.info("draining")
            _end_application(time.monotonic() + settings.graceful_shutdown_s)
    log.info("shut down")


@contextmanager
def _ray() -> Iterator[None]:
    """Start Ray on this machine, with its files in a folder that only this user may enter. Raises ValueError."""
    set_environment()
    import ray

    with TemporaryDirectory(prefix="retain-ray-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        try:
            ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING, configure_logging=False)
        except Exception as error:  # Ray raises bare ones too, such as when it starts too slowly
            raise ValueError(f"Ray did not start: {_last_line(str(error))}") from None
        try:
            yield
        finally:
            ray.shutdown()


def _run_application(settings: ClusterSettings) -> None:
    """Start Ray Serve and the replicas. Raises ValueError with what the proxy or a replica failed with."""
    from ray import serve

    from retain.cluster.replica import build_application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": settings.server.host, "port": settings.server.port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        serve.run(build_application(settings), name=APP_NAME, route_prefix="/")
    except Exception as error:
        application = serve.status().applications.get(APP_NAME)
        messages = [d.message for d in application.deployments.values()] if application else []
        reason = max(messages, key=len, default="") or str(error)
        raise ValueError(f"the replicas did not start: {_last_line(reason)}") from None


def _end_application(deadline: float) -> None:
    """Delete the application: each replica ends with its last request. Waits for them."""
    from ray import serve

    while APP_NAME in serve.status().applications and time.monotonic() < deadline:
        with suppress(TimeoutError):  # after a minute
            serve.delete(APP_NAME)


def _last_line(text: str) -> str:
    """Return what an exception says at the end of a traceback, without the names of Ray's exceptions."""
    errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): (.+)$", text, re.MULTILINE)
    lines = errors or [line for line in text.splitlines() if line.strip()] or ["no reason given"]
    return str(lines[-1]).strip()
