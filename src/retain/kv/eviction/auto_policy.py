"""The policy `auto`: a name in a spec that stands for another policy, which the model and the other options decide.

What it stands for is what the table in docs/guide/policies.md recommends, from measurements of quality. To write down
which one it was, choose it first: `policies.parse` knows no `auto`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retain.kv.eviction import policies
from retain.kv.eviction.policy import EvictionPolicy
from retain.plugins import parse_spec

AUTO = "auto"


@dataclass(frozen=True)
class AutoPolicy:
    """What the choice depends on: a model's layers, and which policies a gate was fitted for, the best one first."""

    # Takes the file of a gate, or "". It is asked only where it matters: files are read for it.
    fitted: Callable[[str], Sequence[str]] = lambda file: ()
    can_compare_layers: bool = True  # see KVCacheSpec

    def choose(self, spec: str) -> str:
        """Return the spec that a spec stands for: of another policy for `auto`, with the same options; else the same.

        Raises ValueError for a spec that is none.
        """
        name, options = parse_spec(spec)
        if name != AUTO:
            return spec
        defaults: dict[str, str] = {}
        if options.get("prefill") == "stream":  # evicts before the whole prompt is there
            chosen = "h2o"
        elif names := self.fitted(options.get("file", "")):
            chosen = "gate" if options.get("resume") == "on" else names[0]
        else:
            chosen = "replay"
            defaults = {} if self.can_compare_layers else {"share": "layer"}
        if chosen in ("gate_replay", "replay") and "demote" in options:
            defaults["refit"] = "0"
        words = ",".join(f"{key}={value}" for key, value in (defaults | options).items())
        return f"{chosen}:{words}" if words else chosen


def check_spec(spec: str) -> EvictionPolicy:
    """Return a policy that a spec stands for on some model. Raises ValueError for one that no model could have."""
    errors = []
    for auto in (AutoPolicy(), AutoPolicy(lambda file: ("gate_replay",)), AutoPolicy(lambda file: ("gate",))):
        try:
            return policies.parse(auto.choose(spec))
        except ValueError as error:
            errors.append(error)
    raise errors[0]
