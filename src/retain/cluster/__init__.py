"""Replicas of the server on Ray Serve (the extra `retain[ray]`).

Ray Serve imports the application from here: `serve run retain.cluster:build model=smollm2 replicas=2`, or
`serve run retain.cluster:app` with the same options as a JSON object in $RETAIN_CLUSTER.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from retain.cluster.arguments import parse_arguments

CLUSTER_ENV = "RETAIN_CLUSTER"
DEFAULT_ARGUMENTS = '{"model": "smollm2"}'


def build(arguments: Mapping[str, Any]) -> Any:
    """Build the Ray Serve application. `arguments` are options by name, as in a Serve config. Raises ValueError."""
    settings = parse_arguments(arguments, os.environ)
    from retain.cluster.application import build_application  # imports Ray, an optional package

    return build_application(settings)


def __getattr__(name: str) -> Any:
    """Build `app` when it is asked for, so that importing this package imports no Ray."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    arguments = json.loads(os.environ.get(CLUSTER_ENV, DEFAULT_ARGUMENTS))
    if not isinstance(arguments, dict):
        raise ValueError(f"${CLUSTER_ENV} is no JSON object of options")
    return build(arguments)
