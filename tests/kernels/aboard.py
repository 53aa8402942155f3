"""The triton backend for tests that hold CPU tensors: on a GPU every call takes what it is given there and back.

Where the interpreter runs it, it is the backend itself.
"""

from __future__ import annotations

from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from retain.kernels import KV, Tables, triton

HOST = ("rows", "starts")  # of tables: the host's in any case


class Aboard:
    """Its functions, on a device."""

    def __init__(self, device: str):
        self.device = torch.device(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(triton, name)

    def _up(self, x: Any) -> Any:
        if isinstance(x, (KV, Tables)):
            names = [f.name for f in fields(x) if isinstance(getattr(x, f.name), Tensor) and f.name not in HOST]
            return replace(x, **{n: getattr(x, n).to(self.device) for n in names})
        return x.to(self.device) if isinstance(x, Tensor) else x

    def _call(self, name: str, *args: Any) -> Any:
        kv = next((x for x in args if isinstance(x, KV)), None)
        there = [self._up(x) for x in args]
        found = getattr(triton, name)(*there)
        for x in there if kv else []:
            if isinstance(x, KV):
                for part in ("k", "v", "pos", "mass"):
                    getattr(kv, part).copy_(getattr(x, part))
        return tuple(x.cpu() for x in found) if isinstance(found, tuple) else found if found is None else found.cpu()

    def write(self, *args: Any) -> None:
        self._call("write", *args)

    def attend(self, *args: Any) -> Tensor:
        return self._call("attend", *args)

    def read(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._call("read", *args)

    def copy(self, *args: Any) -> None:
        self._call("copy", *args)

    def move(self, *args: Any) -> None:
        self._call("move", *args)

    def lowest(self, priority: Tensor, pos: Tensor, used: Tensor, *args: Any) -> Tensor:
        return triton.lowest(self._up(priority), self._up(pos), used, *args).cpu()


def aboard() -> ModuleType:
    """The triton backend, for tests."""
    return triton if triton.interpreted() else Aboard("cuda")  # type: ignore[return-value]
