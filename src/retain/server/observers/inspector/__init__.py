"""The inspector: what running requests keep in their cache. Does not depend on: the OpenAI API."""

from __future__ import annotations

from contextlib import ExitStack

from retain.server.config import ServerConfig
from retain.server.observers import CreateObserver
from retain.server.observers.inspector.routes import Inspector


def open_observer(config: ServerConfig, stack: ExitStack) -> CreateObserver | None:
    """Return the inspector, if there is to be one."""
    return Inspector if config.enable_inspector else None
