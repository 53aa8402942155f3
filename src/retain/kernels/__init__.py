"""Kernels: the only package that reads and writes the bytes of keys and values.

`api.py` is the contract of a backend. A backend is a folder of this package, and `load` finds it by that name.

Does not depend on: requests, the scheduler, policies, models. Of the package it imports only plugins and threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from retain.kernels.api import CPU, Backend
from retain.kernels.slots.pool_dtypes import dtype_name
from retain.plugins import load_module, plugin_names

logger = logging.getLogger(__name__)
BACKEND_PRIORITY = {"cpu": ("cpu", "reference"), "cuda": ("triton",)}  # backends of each device type, fastest first


def backend_names() -> list[str]:
    """Return the names of all backends: of the folders that lower operations."""
    names = plugin_names(__name__, folders=True)
    return [name for name in names if (Path(__file__).parent / name / "operations.py").exists()]


def load(name: str, device: torch.device = CPU) -> Backend:
    """Return a backend that can run here; `auto` is the fastest one for the device.

    Raises ValueError if the name is unknown, or if the backend cannot run on this machine or device.
    """
    if name == "auto":
        candidates = BACKEND_PRIORITY[device.type]
        usable = [n for n in candidates if import_backend(n).unavailable_reason() is None]
        chosen = (usable or candidates)[0]
        fastest = candidates[0]
        if chosen != fastest:
            reason = import_backend(fastest).unavailable_reason()
            logger.warning("the %s backend cannot run here: %s; %s is slower", fastest, reason, chosen)
        return import_backend(chosen)
    backend = cast(Backend, load_module(__name__, name, ("auto", *backend_names()), "backend"))
    reason = backend.unavailable_reason()
    if not reason and device.type not in backend.DEVICES:
        reason = f"it computes on {' or '.join(backend.DEVICES)}, not on {device.type}"
    if reason:
        raise ValueError(f"backend {name!r} cannot run here: {reason}")
    return backend


def check_dtype(backend: Backend, dtype: torch.dtype) -> None:
    """Raise ValueError, with the dtypes to choose from, for a dtype that a backend does not compute in."""
    if dtype not in backend.DTYPES:
        name = backend.__name__.rpartition(".")[2]
        supported = " or ".join(dtype_name(d) for d in backend.DTYPES)
        raise ValueError(f"the {name} backend does not compute in {dtype_name(dtype)}: choose dtype {supported}")


def check_pool_dtype(backend: Backend, dtype: torch.dtype) -> None:
    """Raise ValueError, with the backends to choose from, for a dtype of a pool that a backend does not have."""
    if dtype not in backend.POOL_DTYPES:
        names = _backends_where(lambda b: dtype in b.POOL_DTYPES)
        own = backend.__name__.rpartition(".")[2]
        raise ValueError(f"the {own} backend has no slots in {dtype_name(dtype)}: use backend {names}")


def check_prompt_activations(backend: Backend, activations: str) -> None:
    """Raise ValueError for activations of prompts that a backend cannot choose."""
    if activations != "int8" and not backend.QUANTIZES_ACTIVATIONS:
        names = _backends_where(lambda b: b.QUANTIZES_ACTIVATIONS)
        own = backend.__name__.rpartition(".")[2]
        raise ValueError(
            f"prompt_activations {activations} is for the {names} backend: {own} has no activations of 8 bits"
        )


def _backends_where(is_able: Callable[[Backend], bool]) -> str:
    return " or ".join(name for name in backend_names() if is_able(import_backend(name)))


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; `auto` is a GPU if the triton backend can use one, else the CPU.

    The backend uses the first GPU that CUDA_VISIBLE_DEVICES leaves. Raises ValueError if there is no such device.
    """
    if name == "auto":
        has_gpu = torch.cuda.is_available() and import_backend("triton").unavailable_reason() is None
        return torch.device("cuda" if has_gpu else "cpu")
    if name not in BACKEND_PRIORITY:
        raise ValueError(
            f"device {name!r} is not supported: choose auto, cpu or cuda (CUDA_VISIBLE_DEVICES selects the GPU)"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': no NVIDIA GPU was found, or torch was built without CUDA; use auto or cpu")
    return torch.device(name)


def import_backend(name: str) -> Backend:
    """Import and return a backend, even if it cannot run here."""
    return cast(Backend, load_module(__name__, name, backend_names(), "backend"))
