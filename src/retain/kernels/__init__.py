"""Kernels: the only package that touches the bytes of keys and values. `api.py` is the contract of a backend.

A backend is a folder here and is found by its name: `load("cpu")`.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import torch

from retain.kernels.api import CPU

BACKEND_PRIORITY = {"cpu": ("cpu", "reference"), "cuda": ("triton",)}  # backends of a device, the fastest first


def backend_names() -> list[str]:
    """The backends in this folder, by name."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.ispkg)


def load(name: str, device: torch.device = CPU) -> ModuleType:
    """The backend of that name; `auto` is the fastest on that device. Raises ValueError where it cannot run."""
    if name == "auto":
        able = [n for n in BACKEND_PRIORITY[device.type] if import_backend(n).unavailable_reason() is None]
        return import_backend((able or BACKEND_PRIORITY[device.type])[0])
    if name not in backend_names():
        raise ValueError(f"unknown backend {name!r}: choose one of auto, {', '.join(backend_names())}")
    backend = import_backend(name)
    why: str | None = backend.unavailable_reason()
    if not why and device.type not in backend.DEVICES:
        why = f"it computes on {' or '.join(backend.DEVICES)}, not on {device.type}"
    if why:
        raise ValueError(f"backend {name!r} cannot run here: {why}")
    return backend


def resolve_device(name: str) -> torch.device:
    """`cpu` or `cuda`; `auto` is a GPU where there is one for the triton backend. Raises ValueError.

    Which GPU is for CUDA_VISIBLE_DEVICES to say: kernels are launched on the first that there is.
    """
    if name == "auto":
        return torch.device(
            "cuda" if torch.cuda.is_available() and import_backend("triton").unavailable_reason() is None else "cpu"
        )
    if name not in BACKEND_PRIORITY:
        raise ValueError(
            f"device {name!r} is not supported: choose auto, cpu or cuda (CUDA_VISIBLE_DEVICES says which)"
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': there is no NVIDIA GPU here, or torch was built without CUDA")
    return torch.device(name)


def import_backend(name: str) -> ModuleType:
    """The backend of that name, whether it can run here or not."""
    return importlib.import_module(f"{__name__}.{name}")
