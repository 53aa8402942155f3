"""The triton backend for tests that hold CPU tensors: on a GPU every call moves its arguments there and back.

Under Triton's interpreter it is the backend itself.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retain.kernels import triton
from retain.kernels.api import KV, Backend, DemotedTables, EvictionLists, Tables
from retain.kernels.attention_params import AttentionParams

HOST_FIELDS = ("rows", "query_start_loc")  # fields of Tables that stay on the host
HOST_FUNCTIONS = ("unavailable_reason", "program", "allocate", "reinterpret")  # they make what the tests hold
KERNEL_FUNCTIONS = {name for name in vars(Backend) if callable(getattr(triton, name, None))} - {*HOST_FUNCTIONS}


class DeviceAdapter:
    """The functions of the triton backend on a device, called with CPU tensors."""

    def __init__(self, device: str):
        self.device = torch.device(device)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(triton, name)
        return partial(self._call_on_device, attribute) if name in KERNEL_FUNCTIONS else attribute

    def _call_on_device(self, function: Any, *args: Any, **options: Any) -> Any:
        device_args = [self._to_device(x) for x in args]
        device_options = {name: self._to_device(x) for name, x in options.items()}
        result = function(*device_args, **device_options)
        for arg, device_arg in zip((*args, *options.values()), (*device_args, *device_options.values()), strict=True):
            self._copy_back(arg, device_arg)
            if isinstance(arg, Tensor) and function is triton.punch:  # the holes
                arg.copy_(device_arg)
            if isinstance(arg, Tables) and arg.demoted:
                self._copy_back(arg.demoted.kv, device_arg.demoted.kv)
        if isinstance(result, tuple):
            return tuple(x.cpu() for x in result)
        return None if result is None else result.cpu()

    def _copy_back(self, arg: Any, device_arg: Any) -> None:
        for part in ("k", "v", "pos", "mass") if isinstance(arg, KV) else ():
            getattr(arg, part).copy_(getattr(device_arg, part))

    def _to_device(self, x: Any) -> Any:
        if isinstance(x, (KV, Tables, DemotedTables, EvictionLists)):
            parts = {f.name: getattr(x, f.name) for f in fields(x) if f.name not in HOST_FIELDS}
            parts = {n: part for n, part in parts.items() if isinstance(part, (Tensor, KV, DemotedTables))}
            return replace(x, **{n: self._to_device(part) for n, part in parts.items()})
        if isinstance(x, AttentionParams):
            return x.map_tensors(self._to_device)
        return x.to(self.device) if isinstance(x, Tensor) else x


def triton_backend() -> Backend:
    """Return the triton backend for CPU tensors."""
    return triton if triton.is_interpreted() else DeviceAdapter("cuda")  # type: ignore[return-value]
