"""What the specs of policies may be joined with, so that tests can run over every policy of the folder."""

from __future__ import annotations

from retain.kv.eviction import policies

NEEDED = {"ring": "window=64", "look": "slots=50%", "press": "press=tests.helpers.presses.ExpectedAttention"}


def spec_of(name: str, options: str) -> str:
    """Return a spec of a policy with what it needs, and these options where it has a budget."""
    if name == "full":
        return name
    given = [NEEDED.get(name, "")]
    if name not in ("ring", "look"):
        given.append(options)
    return f"{name}:{','.join(filter(None, given))}"


def goes_with(spec: str, options: str) -> bool:
    """Return whether a spec takes more options beside its own; it need not have a budget yet."""
    name, _, own = spec.partition(":")
    budget = "" if "budget=" in own + options else "budget=9"
    needed = "" if "press=" in own else NEEDED.get(name, "")
    try:
        policies.parse(f"{name}:{','.join(filter(None, [budget, needed, own, options]))}")
    except ValueError:
        return False
    return True
