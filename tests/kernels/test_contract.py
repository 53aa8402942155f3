"""Every backend has the functions of `Backend`, with the same parameters, and is found by its name."""

from __future__ import annotations

import inspect

import pytest
import torch

from retain import kernels
from retain.kernels.api import Backend, Program


def parameters(function: object) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults of a function's parameters, without `self`."""
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


def members(protocol: type) -> list[str]:
    return [name for name, member in vars(protocol).items() if inspect.isfunction(member) and not name.startswith("_")]


@pytest.mark.parametrize("name", kernels.backend_names())
def test_backend_implements_the_contract(name: str) -> None:
    backend = kernels.import_backend(name)
    assert set(backend.DEVICES) <= {"cpu", "cuda"}
    for function in members(Backend):
        assert parameters(getattr(backend, function)) == parameters(getattr(Backend, function)), function


@pytest.mark.parametrize(("backend", "name"), [("cpu", "CpuProgram"), ("triton", "TritonProgram")])
def test_program_implements_the_contract(backend: str, name: str) -> None:
    program = getattr(pytest.importorskip(f"retain.kernels.{backend}.forward", exc_type=ImportError), name)
    for function in members(Program):
        assert parameters(getattr(program, function)) == parameters(getattr(Program, function)), function
    assert isinstance(program.weight_bytes, property)


def test_load_gives_the_backend_of_a_name() -> None:
    assert kernels.load("reference") is kernels.reference
    assert kernels.load("auto").__name__.rpartition(".")[2] in kernels.BACKEND_PRIORITY["cpu"]
    with pytest.raises(ValueError, match="unknown backend 'cpus': choose one of auto, cpu, reference, triton"):
        kernels.load("cpus")
    with pytest.raises(ValueError, match="backend 'reference' cannot run here: it computes on cpu, not on cuda"):
        kernels.load("reference", torch.device("cuda"))
    with pytest.raises(ValueError, match="device 'tpu' is not supported: choose auto, cpu or cuda"):
        kernels.resolve_device("tpu")
