"""Properties of the cpu backend alone: bits that depend on nothing else, lazy memory, one OpenMP, plain errors."""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from retain.kernels import cpu
from retain.kernels.api import NO_WINDOW, EvictionLists, Tables
from retain.kernels.attention_params import AttentionParams
from retain.kernels.cpu.memory import Arena
from retain.kernels.cpu.packing import pack_weight
from retain.kernels.slots.scoring import AttentionScoring
from tests.helpers.attention_case import AttentionCase, torch_threads
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.marks import slow
from tools import isa_check

pytestmark = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason()))


def test_isa_selection() -> None:
    assert cpu._C.selected_isa() == ISAS[0] and "plain" in ISAS and ISAS[0] != "amx_emulated"
    with pytest.raises(
        ValueError, match=r"^instruction set 'z80' is not built \(RETAIN_ISAS of CMake\): choose .*plain"
    ):
        cpu._C.select_isa("z80")


@pytest.mark.parametrize("isa", sorted(isa_check.X86_ISAS.keys() | isa_check.ARM_ISAS.keys()))
def test_each_instruction_set_is_selected_or_one_line_says_why_not(isa: str) -> None:
    """`make test` builds all that the compiler can, so the line then says that the machine, or its kind, is another."""
    before = cpu._C.selected_isa()
    try:
        cpu._C.select_isa(isa)
    except ValueError as error:
        line = str(error)
        assert cpu._C.selected_isa() == before
        assert re.fullmatch(rf"instruction set '{isa}' (does not run here|is not built \(.*\)): choose one of .*", line)
        pytest.skip(line)
    assert cpu._C.selected_isa() == isa
    cpu._C.select_isa(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8, torch.int4])
@pytest.mark.parametrize("chunk", [3, 70, *slow(1, 50)])
@pytest.mark.parametrize("window", [300, *slow(NO_WINDOW)])
def test_chunk_size_changes_no_bit(chunk: int, window: int, dtype: torch.dtype) -> None:
    """140 tokens at once, or chunk by chunk: the same bits, although tiles and blocks are divided otherwise."""
    case = AttentionCase(fresh=(140,), pages=((50, 40),), dtype=dtype, holes=0.0, window=window)
    q, q_pos = case.build_queries()
    t = case.build_tables()
    for isa in ISAS:
        with use_isa(isa):
            kv = case.build_cache(cpu)
            whole = cpu.attend(q, kv, t, q_pos, AttentionParams(0.125))
            for at in range(0, 140, chunk):
                part = slice(at, min(at + chunk, 140))
                one = replace(t, query_start_loc=torch.tensor([0, part.stop - at], dtype=torch.int32))
                o = cpu.attend(q[part], kv, one, q_pos[part], AttentionParams(0.125))
                assert torch.equal(o, whole[part]), isa


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int4])
@pytest.mark.parametrize(("first", "dead"), [(7, 0), (40, 3)])
def test_where_a_ring_begins_changes_no_bit(first: int, dead: int, dtype: torch.dtype) -> None:
    """Tables of a ring that begin at another page, or hold pages from before the window, give the same bits."""
    S, D, n, begin = 16, 64, 45, 9  # n pages, from page `begin` of the text on
    window, end = (n - 3) * S + 5, (begin + n) * S - 4
    kv, torch_rng = cpu.allocate(1 + dead + n, S, D, dtype), torch.Generator().manual_seed(0)
    pos = torch.arange((begin - dead) * S, (begin + n) * S, dtype=torch.int32)
    pos[pos >= end] = -1
    k, v, q = torch.randn(3, len(pos), 1, D, generator=torch_rng)
    cpu.write(kv, torch.arange(S, S + len(pos), dtype=torch.int32)[None], k, v, pos)
    pages = torch.arange(1, 1 + dead + n, dtype=torch.int32)

    def attend(pages: torch.Tensor) -> torch.Tensor:
        tables = Tables(
            pages=pages.view(1, 1, -1),
            counts=torch.tensor([[len(pages)]], dtype=torch.int32),
            windows=torch.tensor([window], dtype=torch.int32),
            rows=torch.zeros(1, dtype=torch.int32),
            query_start_loc=torch.tensor([0, 3], dtype=torch.int32),
        )
        return cpu.attend(3 * q[:3], kv, tables, torch.arange(end - 3, end, dtype=torch.int32), AttentionParams(0.125))

    for isa in ISAS:
        with use_isa(isa):
            assert torch.equal(attend(pages[dead:]), attend(pages.roll(first))), isa


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int4])
@pytest.mark.parametrize(("num_pages", "fresh"), [(3, 13), (40, 200)])
def test_a_page_with_tokens_of_two_laps_changes_no_bit(num_pages: int, fresh: int, dtype: torch.dtype) -> None:
    """Where the newest tokens are in the page of the oldest that a query sees: as in a table that was never full."""
    S, D, capacity = 16, 64, 16 * num_pages
    window, torch_rng = capacity - fresh + 1, torch.Generator().manual_seed(0)
    for end in range(2 * capacity + 1, 2 * capacity + 18, 4):
        k, v, q = torch.randn(3, end, 1, D, generator=torch_rng)
        pos = torch.arange(end, dtype=torch.int32)

        def attend(num_pages: int, end: int = end, k=k, v=v, q=q, pos=pos) -> torch.Tensor:
            kv, pages = cpu.allocate(1 + num_pages, S, D, dtype), torch.arange(1, 1 + num_pages, dtype=torch.int32)
            kv.pos[:] = -1
            kept = slice(max(end - S * num_pages, 0), end)
            cpu.write(kv, (S + pos[kept] % (S * num_pages))[None].int(), k[kept], v[kept], pos[kept])
            tables = Tables(
                pages=pages.view(1, 1, -1),
                counts=torch.tensor([[num_pages]], dtype=torch.int32),
                windows=torch.tensor([window], dtype=torch.int32),
                rows=torch.zeros(1, dtype=torch.int32),
                query_start_loc=torch.tensor([0, fresh], dtype=torch.int32),
            )
            return cpu.attend(3 * q[-fresh:], kv, tables, pos[-fresh:], AttentionParams(0.125))

        for isa in ISAS:
            with use_isa(isa):
                assert torch.equal(attend(num_pages), attend(-(-end // S))), isa


def run_bfloat16_linear(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    packed, y = pack_weight(weight, Arena()), torch.empty(len(x), len(weight))
    integers = cpu._C.Products.integers  # only quantized weights have others
    cpu._C.packed_gemm(*packed.c_args, integers, x.data_ptr(), len(x), 0, y.data_ptr(), False)
    return y


def flush(x: np.ndarray) -> np.ndarray:
    """Count what is too small for a normal float32 as 0."""
    return np.where(abs(x) < 2.0**-126, np.float32(0), x)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.startswith("amx")])
@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**-63, 2.0**-64])
def test_tiles_multiply_as_the_manual_says(isa: str, scale: float) -> None:
    """Per 32 inputs even and odd products are summed from 0, then even + odd is added (TDPBF16PS, Intel's manual).

    Products are exact: sums are fused multiply-adds, and only they are flushed, as a machine with AMX does.
    """
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(n, 64)) * scale for n in (5, 16))
    weight, rows = torch.from_numpy(w).bfloat16(), torch.from_numpy(x).float()
    a, b = rows.bfloat16().float().numpy(), weight.float().numpy()
    expected = np.zeros((5, 16), np.float32)
    for begin in (0, 32):
        parts = np.zeros((2, 5, 16), np.float32)
        for k in range(begin, begin + 32):
            product = np.outer(flush(a[:, k]).astype(np.float64), flush(b[:, k]).astype(np.float64))
            parts[k % 2] = flush((parts[k % 2] + product).astype(np.float32))
        expected = flush(expected + flush(parts[0] + parts[1]))
    with use_isa(isa):
        assert np.array_equal(run_bfloat16_linear(weight, rows).numpy(), expected)
        assert np.array_equal(run_bfloat16_linear(weight, rows[:1]).numpy(), expected[:1])


def test_number_of_threads_changes_no_bit(isa: str) -> None:
    case = AttentionCase(fresh=(1, 90, 4), pages=((60, 50), (30, 31), (1, 0)))
    outputs = []
    for n in (1, 2, 3):
        with torch_threads(n):
            outputs.append(case.attend(cpu))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_invisible_pages_are_not_read(isa: str) -> None:
    """Invisible pages may hold anything, even NaN: the kernel does not even multiply them by 0."""
    case = AttentionCase(fresh=(1, 60), pages=((40, 20), (30, 30)), window=64, holes=0.0, seed=3)
    expected = case.attend(cpu)
    kv = case.build_cache(cpu)
    visible = (kv.pos >= case.build_queries()[1].min() - 64).any(1)
    kv.v[~visible] = torch.nan
    assert (~visible).sum() > 20
    assert torch.equal(case.attend(cpu, kv), expected)


def resident_bytes(x: torch.Tensor) -> int:
    """Return the bytes of the pages of a tensor that are in memory."""
    first, last = x.data_ptr() // mmap.PAGESIZE, (x.data_ptr() + x.nbytes - 1) // mmap.PAGESIZE
    pages = np.zeros(last - first + 1, np.uint8)
    libc = ctypes.CDLL(None)
    address, size = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(len(pages) * mmap.PAGESIZE)
    assert libc.mincore(address, size, ctypes.c_void_p(pages.ctypes.data)) == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mincore"), reason="no mincore here")
def test_allocation_is_lazy() -> None:
    """Also where the allocator has as much memory that others freed: it would give that, and write it all."""
    np.ones(31 << 20, np.uint8)  # from then on glibc takes less than that from its heap
    freed, _behind = [np.ones(30 << 20, np.uint8) for _ in range(10)], np.ones(20 << 20, np.uint8)
    del freed
    kv = cpu.allocate(2**15, 64, 64, torch.bfloat16)  # 512 MiB
    assert sum(resident_bytes(x) for x in (kv.k, kv.v, kv.pos, kv.mass)) < 2**26
    assert kv.k.data_ptr() % 64 == 0 and kv.v.data_ptr() % 64 == 0
    assert not kv.k[-1].any() and (kv.pos[0] == -1).all()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc here")
def test_single_openmp_runtime() -> None:
    """Two OpenMP runtimes would be two thread pools competing for the same cores."""
    code = (
        "import retain.kernels.cpu, pathlib;"
        "print(len({l.split()[-1] for l in pathlib.Path('/proc/self/maps').read_text().splitlines() if 'gomp' in l}))"
    )
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout) <= 1


def test_allocate_rejects_unsupported_shapes() -> None:
    for page_size, head_dim, dtype, why in (
        (24, 64, torch.float32, "page_size of 16, .* up to 512, not 24"),
        (1024, 64, torch.float32, "page_size"),
        (32, 60, torch.float32, r"head_dim\) of 8, .* up to 576, not 60"),
        (32, 576, torch.float32, r"v_dim \(head_dim\) of 8, .* up to 512, not 576"),
        (32, 64, torch.float16, "float32, bfloat16, int8, k8v4 or int4, not float16"),
    ):
        with pytest.raises(ValueError, match=why):
            cpu.allocate(4, page_size, head_dim, dtype)


def test_rejects_inconsistent_arguments() -> None:
    kv = cpu.allocate(4, 16, 16, torch.float32)
    i32 = torch.int32
    pages, counts = torch.tensor([[[1, 2]]], dtype=i32), torch.tensor([[2]], dtype=i32)
    zero = torch.zeros(1, dtype=i32)
    t = Tables(pages, counts, zero + NO_WINDOW, rows=zero, query_start_loc=torch.tensor([0, 1], dtype=i32))
    q, p = torch.zeros(1, 2, 16), torch.zeros(1, dtype=i32)

    def attend(q: torch.Tensor = q, p: torch.Tensor = p, **changes: torch.Tensor) -> torch.Tensor:
        return cpu.attend(q, kv, replace(t, **changes), p, AttentionParams(1.0))

    def score(**changes: torch.Tensor) -> torch.Tensor:
        scoring = AttentionScoring(torch.ones(1), torch.ones(1), torch.ones(1), zero, zero, zero)
        return cpu.attend(q, kv, t, p, AttentionParams(1.0), scoring=replace(scoring, **changes))

    room = torch.zeros(1, 1, 1, 4, dtype=i32)

    def punch(n: int = 1, holes: torch.Tensor = room, **changes: torch.Tensor) -> None:
        lists = EvictionLists(pages[None], zero, zero, counts[None], torch.zeros(1, 2, dtype=i32), zero, 2)
        cpu.punch(kv, replace(lists, **changes), holes, n)

    attend()
    score()
    punch()
    for error, message, call in (
        (ValueError, r"attend: expected q \[T, H, 16\]", lambda: attend(q=torch.zeros(1, 2, 8))),
        (ValueError, r"expected .*q_pos \[T\]; got .*q_pos \[2\]", lambda: attend(p=torch.zeros(2, dtype=i32))),
        (ValueError, r"windows \[1\]; got .*windows \[2\]", lambda: attend(windows=torch.zeros(2, dtype=i32))),
        (ValueError, r"counts \[1, 1\], .*got counts \[2, 1\]", lambda: attend(counts=torch.zeros(2, 1, dtype=i32))),
        (TypeError, "q_pos must be int32", lambda: attend(p=p.long())),
        (TypeError, "tables.pages must be int32", lambda: attend(pages=t.pages.long())),
        (ValueError, "contiguous", lambda: attend(q=torch.zeros(1, 2, 32)[:, :, ::2])),
        (ValueError, "outside the pool", lambda: attend(pages=t.pages + 2)),
        (ValueError, "outside the pool", lambda: attend(pages=t.pages - 2)),
        (ValueError, "exceeds", lambda: attend(counts=t.counts + 1)),
        (ValueError, "rows", lambda: attend(rows=t.rows + 1)),
        (ValueError, "query_start_loc ends beyond", lambda: attend(query_start_loc=t.query_start_loc * 2)),
        (ValueError, "query_start_loc must not descend", lambda: attend(query_start_loc=t.query_start_loc.flip(0))),
        (ValueError, r"scoring.weights must be \[1\]", lambda: score(weights=torch.ones(2))),
        (TypeError, "scoring.seed must be torch.int32", lambda: score(seed=zero.long())),
        (ValueError, "slot_mapping .* pool", lambda: cpu.write(kv, torch.tensor([[64]]).int(), q[:, :1], q[:, :1], p)),
        (ValueError, "slot_mapping .* pool", lambda: cpu.write(kv, torch.tensor([[-1]]).int(), q[:, :1], q[:, :1], p)),
        (ValueError, r"write: expected slot_mapping", lambda: cpu.write(kv, torch.tensor([[1]]).int(), q, q, p)),
        (TypeError, "int32", lambda: cpu.write(kv, torch.tensor([[1]]), q[:, :1], q[:, :1], p)),
        (ValueError, "pool", lambda: cpu.copy(kv, torch.tensor([1]), torch.tensor([4]))),
        (ValueError, "lengths exceeds", lambda: cpu.select_victims(pages[0].float(), pages[0], counts[0] + 1, 0, 9, 1)),
        (ValueError, r"punch: expected slots_used \[B, M, 1\]", lambda: punch(layers=torch.zeros(2, dtype=i32))),
        (ValueError, r"holes \[1, 1, 1, 5\]; got", lambda: punch(n=5)),
        (ValueError, "too few to select 3", lambda: punch(n=3)),
        (ValueError, "punch: a page is outside the pool", lambda: punch(pages=pages[None] + 3)),
        (ValueError, "punch: slots_used exceeds the tables", lambda: punch(slots_used=counts[None] + 31)),
        (ValueError, "punch: rows or layers", lambda: punch(rows=zero + 1)),
        (ValueError, "punch: rows or layers", lambda: punch(layers=zero - 1)),
        (TypeError, "punch: by_mass must be int32", lambda: punch(by_mass=zero == 0)),
        (ValueError, "holes must be contiguous", lambda: punch(holes=room[..., ::2])),
        (ValueError, "int64", lambda: cpu.copy(kv, torch.tensor([1]).int(), torch.tensor([2]).int())),
    ):
        with pytest.raises(error, match=message):
            call()


def test_the_check_of_other_machines_compiles_what_cmake_does() -> None:
    text = (isa_check.ROOT / "CMakeLists.txt").read_text()
    listed = re.search(r"add_library\(isa_.*?\)", text, re.S)
    assert listed and set(isa_check.FOR_EACH_ISA) == set(re.findall(r"csrc}/([\w/]+\.cpp)", listed[0]))
    assert isa_check.X86_ISAS.keys() | isa_check.ARM_ISAS.keys() == set(re.findall(r"set\(flags_(\w+)", text))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake here")
@pytest.mark.parametrize(
    ("isas", "line"),
    [
        ("native", r"retain: instruction sets plain(;\w+)?$"),
        ("plain,avx3", r"retain: RETAIN_ISAS names avx3: choose all, native or some of\s+plain;.*;amx_emulated$"),
    ],
)
def test_a_build_lists_its_instruction_sets_or_one_line_says_what_to_choose(
    isas: str, line: str, tmp_path: Path
) -> None:
    options = [f"-DRETAIN_ISAS={isas}", f"-DPython_EXECUTABLE={sys.executable}"]
    command = ["cmake", "-S", str(isa_check.ROOT), "-B", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert re.search(line, done.stdout + done.stderr, re.M), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_the_check_of_other_machines_instruction_sets_compiles() -> None:
    """It calls the kernels without Python, so nothing else notices that a signature has changed."""
    check = isa_check.ROOT / "tools/isa_check.cpp"
    command = ["g++", *isa_check.COMMON, "-Werror", "-fsyntax-only", f"-I{isa_check.SOURCES}", str(check)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
