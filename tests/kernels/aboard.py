"""The triton backend for tests that hold CPU tensors: on a GPU every call takes what it is given there and back.

Where the interpreter runs it, it is the backend itself.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from retain.kernels import KV, Tables, triton

HOST = ("rows", "starts")  # of tables: the host's in any case
WORK = ("write", "attend", "read", "copy", "move", "lowest")


class Aboard:
    """Its functions, on a device."""

    def __init__(self, device: str):
        self.device = torch.device(device)

    def __getattr__(self, name: str) -> Any:
        found = getattr(triton, name)
        return partial(self._there, found) if name in WORK else found

    def _there(self, work: Any, *args: Any) -> Any:
        up = [self._up(x) for x in args]
        found = work(*up)
        for here, there in zip(args, up, strict=True):
            for part in ("k", "v", "pos", "mass") if isinstance(here, KV) else ():
                getattr(here, part).copy_(getattr(there, part))
        return tuple(x.cpu() for x in found) if isinstance(found, tuple) else found.cpu() if found is not None else None

    def _up(self, x: Any) -> Any:
        if isinstance(x, (KV, Tables)):
            names = [f.name for f in fields(x) if isinstance(getattr(x, f.name), Tensor) and f.name not in HOST]
            return replace(x, **{n: getattr(x, n).to(self.device) for n in names})
        return x.to(self.device) if isinstance(x, Tensor) else x


def aboard() -> ModuleType:
    """The triton backend, for tests."""
    return triton if triton.interpreted() else Aboard("cuda")  # type: ignore[return-value]
