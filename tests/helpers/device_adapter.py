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

from retain.kernels import triton
from retain.kernels.api import KV, Tables

HOST_FIELDS = ("rows", "query_start_loc")  # of tables: the host's in any case
KERNEL_FUNCTIONS = ("write", "attend", "read", "copy", "move", "select_victims")


class DeviceAdapter:
    """Its functions, on a device."""

    def __init__(self, device: str):
        self.device = torch.device(device)

    def __getattr__(self, name: str) -> Any:
        found = getattr(triton, name)
        return partial(self._call_on_device, found) if name in KERNEL_FUNCTIONS else found

    def _call_on_device(self, function: Any, *args: Any) -> Any:
        up = [self._to_device(x) for x in args]
        found = function(*up)
        for here, there in zip(args, up, strict=True):
            for part in ("k", "v", "pos", "mass") if isinstance(here, KV) else ():
                getattr(here, part).copy_(getattr(there, part))
        return tuple(x.cpu() for x in found) if isinstance(found, tuple) else found.cpu() if found is not None else None

    def _to_device(self, x: Any) -> Any:
        if isinstance(x, (KV, Tables)):
            names = [f.name for f in fields(x) if isinstance(getattr(x, f.name), Tensor) and f.name not in HOST_FIELDS]
            return replace(x, **{n: getattr(x, n).to(self.device) for n in names})
        return x.to(self.device) if isinstance(x, Tensor) else x


def triton_backend() -> ModuleType:
    """The triton backend, for tests."""
    return triton if triton.is_interpreted() else DeviceAdapter("cuda")  # type: ignore[return-value]
