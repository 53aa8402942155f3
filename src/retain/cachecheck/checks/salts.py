"""Salts (`cache_salt`): what one salt has computed, no other salt finds."""

from __future__ import annotations

from retain.cachecheck.isolation import keep_apart
from retain.cachecheck.probe import Probe


def run(probe: Probe) -> None:
    """A text under one salt is new under another one, and without a salt."""
    probe.skip_unless(probe.offers.knows_salts, "the server takes any value of cache_salt: it does not know the field")
    one, other = (probe.texts.name() for _ in range(2))
    keep_apart(
        probe,
        lambda prompt: probe.ask(prompt, cache_salt=one),
        {
            "another salt": lambda prompt: probe.ask(prompt, cache_salt=other),
            "no salt": probe.ask,
        },
    )
