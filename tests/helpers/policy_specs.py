"""What the specs of policies may be joined with, so that tests can run over every policy of the folder."""

from __future__ import annotations

from retain.kv.eviction import policies


def goes_with(spec: str, options: str) -> bool:
    """Return whether a spec takes more options beside its own; it need not have a budget yet."""
    name, _, own = spec.partition(":")
    budget = "" if "budget=" in own + options else "budget=9"
    try:
        policies.parse(f"{name}:{','.join(filter(None, [budget, own, options]))}")
    except ValueError:
        return False
    return True
