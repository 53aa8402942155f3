"""Before torch: threads stay on their cores, as `retain` runs them (docs/log.md tells why). And what rooms share."""

import os

os.environ.setdefault("OMP_PROC_BIND", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator

import pytest

from retain.kernels import cpu


@pytest.fixture(params=cpu._C.isas() if cpu.available() is None else [])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that the cpu backend has here."""
    before = cpu._C.isa()
    cpu._C.set_isa(request.param)
    yield request.param
    cpu._C.set_isa(before)
