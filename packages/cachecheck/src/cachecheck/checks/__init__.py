"""The checks. One check is one file here, found by its name.

A file defines `run(probe)`: it asks prompts of the probe's texts, and states what must hold. Every statement has a name
of its own, the same in each run. Where a server lacks what the check needs it ends by `probe.skip_unless`. The first
line of the file's docstring says what is checked.

Does not depend on: how cold answers are had, how results are shown.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from types import ModuleType

ORDER = ("lengths", "logprobs", "edits", "branches", "rounds", "concurrency", "streams", "salts", "keys", "usage")
LAST = ("reset", "restart", "reload")  # what they leave behind is not what the others expect


def check_names() -> list[str]:
    """Return the names of the checks in the order in which they run."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    others = [name for name in names if name not in ORDER + LAST]
    return [*ORDER, *others, *LAST]


def choose_checks(wanted: Collection[str]) -> list[str]:
    """Return the names of the checks that are wanted, of all where none is named. Raises ValueError."""
    known = check_names()
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown check {name!r}: choose from {', '.join(known)}")
    return [name for name in known if name in wanted or not wanted]


def load_check(name: str) -> ModuleType:
    """Return the check of that name, which is known."""
    return importlib.import_module(f"{__name__}.{name}")
