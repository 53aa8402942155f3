"""Policies: which tokens a head keeps. One policy is one file here, found by its name: `parse("ring:window=512")`.

A file defines `class Policy`, a frozen dataclass whose fields are its options on the command line. `EvictionPolicy`
(eviction/policy.py) is the interface, `BudgetPolicy` (eviction/budget.py) has the options of every budget. `priority`
is the definition of a policy; where it is the position (`ring`), the cache uses a closed form that keeps the same
tokens. The names in `ALIASES` are what the papers or others call a policy.
"""

from __future__ import annotations

from retain.kv.eviction.policy import EvictionPolicy
from retain.options import option_values
from retain.plugins import load_module, load_plugin, parse_spec, plugin_names

ALIASES = {"streaming_llm": "sinks", "kvzip": "reread"}


def names() -> list[str]:
    """List the policies in this folder."""
    return plugin_names(__name__)


def parse(spec: str) -> EvictionPolicy:
    """Return the policy that a spec names. Raises ValueError with what is allowed."""
    name, colon, options = spec.partition(":")
    policy: EvictionPolicy = load_plugin(__name__, "Policy", "KV policy", ALIASES.get(name, name) + colon + options)
    return policy


def takes_budget(spec: str) -> bool:
    """Return whether the policy that a spec names has a budget; the spec may lack options. Raises ValueError."""
    name, _ = parse_spec(spec)
    module = load_module(__name__, ALIASES.get(name, name), names(), "KV policy")
    return bool(module.Policy.has_budget)


def name_of(policy: EvictionPolicy) -> str:
    """Return the name of the policy's file."""
    return type(policy).__module__.rpartition(".")[2]


def to_spec(policy: EvictionPolicy) -> str:
    """Return the spec that `parse` turns into this policy, without options at their defaults."""
    defaults = option_values(type(policy))
    given = [f"{option}={value}" for option, value in option_values(policy).items() if value != defaults[option]]
    name = name_of(policy)
    return f"{name}:{','.join(given)}" if given else name
