"""API keys of two tenants: what one key has computed, the other does not find."""

from __future__ import annotations

from functools import partial

from cachecheck.isolation import keep_apart
from cachecheck.probe import Probe


def run(probe: Probe) -> None:
    """A text of one key is new to the other one."""
    probe.skip_unless(len(probe.server.clients) > 1, "no second key: give it as $OPENAI_API_KEY_2")
    keep_apart(probe, probe.ask, {"another key": partial(probe.ask, key=1)})
