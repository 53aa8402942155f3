"""Checks of `retain cachecheck`. One check is one file here, found by its name.

A file defines `run(probe)`: it asks prompts of the probe's texts, and states what must hold. Every statement has a name
of its own, the same in each run. Where a server lacks what the check needs it ends by `probe.skip_unless`. The first
line of the file's docstring says what is checked.

Does not depend on: how cold answers are had, how results are shown.
"""

from __future__ import annotations

from types import ModuleType

from retain.plugins import load_module, plugin_names

ORDER = ("lengths", "logprobs", "edits", "branches", "rounds", "concurrency", "streams", "salts", "keys", "usage")
LAST = ("restart", "reload")  # what they leave behind is not what the others expect


def check_names() -> list[str]:
    """Return the names of the checks in the order in which they run."""
    names = plugin_names(__name__)
    others = [name for name in names if name not in ORDER + LAST]
    return [*ORDER, *others, *LAST]


def load_check(name: str) -> ModuleType:
    """Return the check of that name. Raises ValueError."""
    return load_module(__name__, name, check_names(), "check")
