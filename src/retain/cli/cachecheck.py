"""`retain cachecheck`: the command `cachecheck`, where that package is installed beside this one."""

from __future__ import annotations

from argparse import Namespace


def cachecheck(args: Namespace) -> int:
    """Run the checks. Returns the exit code of the package. Raises ValueError where it is not installed."""
    try:
        from cachecheck.command import run
    except ModuleNotFoundError:
        hint = "pip install ./packages/cachecheck, in the repository of retain"
        raise ValueError(f"checking a server needs the package cachecheck: {hint}") from None
    return run(args)
