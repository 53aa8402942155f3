"""The backends under test: every backend but the reference, and the cpu backend once for each instruction set."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from retain.kernels import backend_names, cpu, import_backend, triton
from retain.kernels.api import Backend
from tests.helpers.device_adapter import triton_backend


def _supported_isas() -> list[str]:
    """List the instruction sets of the cpu backend, fastest first: from TEST_ISA on where the environment names one."""
    if cpu.unavailable_reason() is not None:
        return []
    isas: list[str] = cpu._C.supported_isas()
    first = os.environ.get("TEST_ISA", isas[0])
    if first not in isas:
        sys.exit(
            f"TEST_ISA={first} is not built here (make test builds every set) or does not run here: {', '.join(isas)}"
        )
    return isas[isas.index(first) :]


ISAS = _supported_isas()


def backend_variants() -> list[str]:
    """The name of each backend, followed by an instruction set where it has several."""
    names = [name for name in backend_names() if name != "reference"]
    return [f"{name} {isa}".strip() for name in names for isa in (ISAS or [""] if name == "cpu" else [""])]


VARIANTS = backend_variants()
# Triton's interpreter would take minutes for all shapes; test_triton.py has a small choice of them.
FAST_VARIANTS = [v for v in VARIANTS if v != "triton" or not triton.is_interpreted()]


@contextmanager
def use_variant(variant: str) -> Iterator[Backend]:
    """Give the backend of a variant, with its instruction set selected. Skips the test if it cannot run here."""
    name, _, isa = variant.partition(" ")
    backend = triton_backend() if name == "triton" else import_backend(name)
    if reason := backend.unavailable_reason():
        pytest.skip(reason)
    with use_isa(isa or (ISAS or [""])[0]):
        yield backend


@contextmanager
def use_isa(isa: str) -> Iterator[None]:
    """Select an instruction set of the cpu backend for a while; "" selects none."""
    if not isa:
        yield
        return
    before = cpu._C.selected_isa()
    cpu._C.select_isa(isa)
    try:
        yield
    finally:
        cpu._C.select_isa(before)
