"""Salts (`cache_salt`): what one salt has computed, no other salt finds."""

from __future__ import annotations

from functools import partial

from cachecheck.isolation import Ask, keep_apart
from cachecheck.probe import Probe


def run(probe: Probe) -> None:
    """A text under one salt is new under another one, and without a salt."""
    probe.skip_unless(
        probe.capabilities.knows_salts, "the server takes any value of cache_salt: it does not know the field"
    )
    one, other = (probe.texts.name() for _ in range(2))
    others: dict[str, Ask] = {"another salt": partial(probe.ask, cache_salt=other), "no salt": probe.ask}
    keep_apart(probe, partial(probe.ask, cache_salt=one), others)
