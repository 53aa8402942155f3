"""Every backend has the functions of `Backend` with the same parameters. Every argument of attention can vary."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from retain import kernels
from retain.kernels.api import KV, NO_WINDOW, Backend, Program, Tables
from retain.kv.memory.demoted_tables import DemotedBlockTables
from retain.kv.memory.device_tables import DeviceTables
from retain.kv.memory.page_store import PageStore
from retain.kv.memory.pool import PagePool


def parameters(function: object) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults of a function's parameters, without `self`."""
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


def members(protocol: type) -> list[str]:
    return [name for name, member in vars(protocol).items() if inspect.isfunction(member) and not name.startswith("_")]


@pytest.mark.parametrize("name", kernels.backend_names())
def test_backend_implements_the_contract(name: str) -> None:
    backend = kernels.import_backend(name)
    assert set(backend.DEVICES) <= {"cpu", "cuda"} and {torch.float32, torch.bfloat16} <= set(backend.DTYPES)
    for function in members(Backend):
        assert parameters(getattr(backend, function)) == parameters(getattr(Backend, function)), function


@pytest.mark.parametrize(
    ("module", "name"),
    [("cpu.forward", "CpuProgram"), ("reference.program", "ReferenceProgram"), ("triton.forward", "TritonProgram")],
)
def test_program_implements_the_contract(module: str, name: str) -> None:
    program = getattr(pytest.importorskip(f"retain.kernels.{module}", exc_type=ImportError), name)
    for function in members(Program):
        assert parameters(getattr(program, function)) == parameters(getattr(Program, function)), function
    assert isinstance(program.weight_bytes, property) and isinstance(program.vector_dtype, property)


def test_load_gives_the_backend_of_a_name() -> None:
    assert kernels.load("reference") is kernels.reference
    assert kernels.load("auto").__name__.rpartition(".")[2] in kernels.BACKEND_PRIORITY["cpu"]
    with pytest.raises(ValueError, match="unknown backend 'cpus': choose one of auto, cpu, reference, triton"):
        kernels.load("cpus")
    with pytest.raises(ValueError, match="backend 'reference' cannot run here: it computes on cpu, not on cuda"):
        kernels.load("reference", torch.device("cuda"))
    with pytest.raises(ValueError, match="device 'tpu' is not supported: choose auto, cpu or cuda"):
        kernels.resolve_device("tpu")


def test_auto_says_that_the_fastest_backend_cannot_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a compiler the extension is not built, and torch computes."""
    monkeypatch.setattr(kernels.import_backend("cpu"), "_import_error", "its extension is not built")
    assert kernels.load("auto") is kernels.reference
    (record,) = caplog.records
    assert record.getMessage() == "the cpu backend cannot run here: its extension is not built; reference is slower"


def tables_of_step(fill: int, window: int, dense: bool, fresh: int, demoted: DemotedBlockTables | None) -> Tables:
    """Build the tables of a step: two rows of two layers with two kv heads, of which row `fill` has fresh tokens."""
    pages, counts = (np.full(shape, fill, np.int32) for shape in ((2, 2, 2, 3), (2, 2, 2)))
    device_tables = DeviceTables([pages, counts, np.full((2, 2), window, np.int32)], torch.device("cpu"), demoted)
    device_tables.mark_dirty(fill, dense=dense)
    int32 = torch.int32
    return device_tables.build_tables(torch.tensor([fill], dtype=int32), torch.tensor([0, fresh], dtype=int32))


def test_no_field_of_the_tables_is_constant() -> None:
    """A field that is the same for every request, policy and layer would cost every kernel an argument for nothing."""
    pos = torch.zeros(1, 16, dtype=torch.int32)
    kv = KV(torch.empty(0), torch.empty(0), pos, torch.empty(0), page_size=16, k_dim=8, v_dim=8, layout="reference")
    store = PageStore(PagePool(2), kv, kernels.reference, page_bytes=1)
    demoted = DemotedBlockTables(store, num_rows=2, num_layers=2, kv_heads=2, max_tokens=48)
    one = tables_of_step(0, NO_WINDOW, dense=False, fresh=1, demoted=None)
    other = tables_of_step(1, 24, dense=True, fresh=2, demoted=demoted)
    other = replace(other, looks=torch.ones(2))  # the engine adds what requests look at: build_looks
    constant = [f.name for f in fields(Tables) if np.array_equal(getattr(one, f.name), getattr(other, f.name))]
    assert not constant
