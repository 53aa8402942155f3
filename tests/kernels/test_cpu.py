"""What only the cpu backend promises: bits that do not depend on chunks, memory on demand, one OpenMP, plain errors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.attention_case import AttentionCase, torch_threads

from retain.kernels import cpu
from retain.kernels.api import NO_WINDOW, Tables

pytestmark = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason()))

ISAS = cpu._C.isas() if cpu.unavailable_reason() is None else []


def test_isa_selection() -> None:
    assert cpu._C.isa() == ISAS[0] and ISAS[-1] == "plain"
    with pytest.raises(ValueError, match=r"'z80' does not run here: choose one of .*plain"):
        cpu._C.set_isa("z80")


@pytest.mark.parametrize("chunk", [1, 3, 50, 70])
@pytest.mark.parametrize("window", [NO_WINDOW, 300])
def test_chunk_size_invariance(isa: str, chunk: int, window: int) -> None:
    """140 tokens at once, or chunk by chunk: the same bits, although tiles and spans are cut otherwise."""
    scene = AttentionCase(fresh=(140,), pages=((50, 40),), dtype=torch.bfloat16, holes=0.0, window=window, sinks=4)
    q, q_pos = scene.build_queries()
    kv, t = scene.build_cache(cpu), scene.build_tables()
    whole = cpu.attend(q, kv, t, q_pos, 0.125)
    for at in range(0, 140, chunk):
        part = slice(at, min(at + chunk, 140))
        one = replace(t, query_start_loc=torch.tensor([0, part.stop - at], dtype=torch.int32))
        assert torch.equal(cpu.attend(q[part], kv, one, q_pos[part], 0.125), whole[part])


def test_thread_count_invariance(isa: str) -> None:
    scene = AttentionCase(fresh=(1, 90, 4), pages=((60, 50), (30, 31), (1, 0)))
    outputs = []
    for n in (1, 2, 3):
        with torch_threads(n):
            outputs.append(scene.attend(cpu))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_invisible_pages_are_not_read(isa: str) -> None:
    """Pages out of sight may hold anything, even NaN: they are not even multiplied by 0."""
    scene = AttentionCase(fresh=(1, 60), pages=((40, 20), (30, 30)), window=64, holes=0.0, seed=3)
    want = scene.attend(cpu)
    q, q_pos = scene.build_queries()
    kv, t = scene.build_cache(cpu), scene.build_tables()
    seen = (kv.pos >= q_pos.min() - 64).any(1)
    kv.v[~seen] = torch.nan
    assert (~seen).sum() > 20
    assert torch.equal(cpu.attend(q, kv, t, q_pos, scene.D**-0.5), want)


def test_allocation_is_lazy() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc here")
    before = resident()
    kv = cpu.allocate(2**15, 64, 64, torch.bfloat16)  # 512 MiB
    assert resident() - before < 2**26
    assert kv.k.data_ptr() % 64 == 0 and kv.v.data_ptr() % 64 == 0
    assert not kv.k[-1].any() and (kv.pos[0] == -1).all()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc here")
def test_single_openmp_runtime() -> None:
    """Two OpenMP libraries would be two pools of threads fighting for the same cores."""
    code = (
        "import retain.kernels.cpu, pathlib;"
        "print(len({l.split()[-1] for l in pathlib.Path('/proc/self/maps').read_text().splitlines() if 'gomp' in l}))"
    )
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout) <= 1


def test_allocate_rejects_unsupported_shapes() -> None:
    for page_size, head_dim, dtype, why in (
        (24, 64, torch.float32, "page_size of 16, .* up to 512, not 24"),
        (1024, 64, torch.float32, "page_size"),
        (32, 60, torch.float32, "head dim of 8, .* up to 256, not 60"),
        (32, 264, torch.float32, "head dim"),
        (32, 64, torch.float16, "float32 or bfloat16, not torch.float16"),
    ):
        with pytest.raises(ValueError, match=why):
            cpu.allocate(4, page_size, head_dim, dtype)


def test_rejects_inconsistent_arguments() -> None:
    kv = cpu.allocate(4, 16, 16, torch.float32)
    i32 = torch.int32
    pages, counts = torch.tensor([[[1, 2]]], dtype=i32), torch.tensor([[2]], dtype=i32)
    zero = torch.zeros(1, dtype=i32)
    t = Tables(pages, counts, zero + NO_WINDOW, zero, rows=zero, query_start_loc=torch.tensor([0, 1], dtype=i32))
    q, p = torch.zeros(1, 2, 16), torch.zeros(1, dtype=i32)

    def attend(q: torch.Tensor = q, p: torch.Tensor = p, **changes: torch.Tensor) -> torch.Tensor:
        return cpu.attend(q, kv, replace(t, **changes), p, 1.0)

    attend()
    bad = ValueError, "shapes disagree"
    for (error, why), call in (
        (bad, lambda: attend(q=torch.zeros(1, 2, 8))),
        (bad, lambda: attend(p=torch.zeros(2, dtype=i32))),
        ((ValueError, "windows and sinks"), lambda: attend(sinks=torch.zeros(2, dtype=i32))),
        (bad, lambda: attend(counts=torch.zeros(2, 1, dtype=i32))),
        ((TypeError, "int32"), lambda: attend(p=p.long())),
        ((TypeError, "int32"), lambda: attend(pages=t.pages.long())),
        ((ValueError, "contiguous"), lambda: attend(q=torch.zeros(1, 2, 32)[:, :, ::2])),
        ((ValueError, "outside the pool"), lambda: attend(pages=t.pages + 2)),
        ((ValueError, "outside the pool"), lambda: attend(pages=t.pages - 2)),
        ((ValueError, "exceeds"), lambda: attend(counts=t.counts + 1)),
        ((ValueError, "rows"), lambda: attend(rows=t.rows + 1)),
        ((ValueError, "beyond"), lambda: attend(query_start_loc=t.query_start_loc * 2)),
        ((ValueError, "not descend"), lambda: attend(query_start_loc=t.query_start_loc.flip(0))),
        ((ValueError, "pool"), lambda: cpu.write(kv, torch.tensor([[64]]).int(), q[:, :1], q[:, :1], p)),
        ((ValueError, "pool"), lambda: cpu.write(kv, torch.tensor([[-1]]).int(), q[:, :1], q[:, :1], p)),
        ((ValueError, "shapes"), lambda: cpu.write(kv, torch.tensor([[1]]).int(), q, q, p)),
        ((TypeError, "int32"), lambda: cpu.write(kv, torch.tensor([[1]]), q[:, :1], q[:, :1], p)),
        ((ValueError, "pool"), lambda: cpu.copy(kv, torch.tensor([1]), torch.tensor([4]))),
        ((ValueError, "int64"), lambda: cpu.copy(kv, torch.tensor([1]).int(), torch.tensor([2]).int())),
    ):
        with pytest.raises(error, match=why):
            call()
