"""Programs of the cpu backend: a model's whole forward pass in one call (see `Program` in kernels/__init__.py).

Rows are float32 between operations. Weights are packed in tiles (linear.h); activations are rounded to bfloat16 for
bfloat16 weights and to 8 bits, in groups of 32, for int8 and int4 ones. What is not known here: layers, families.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels import KV, Observe, Tables
from retain.kernels.cpu import told
from retain.kernels.cpu.memory import Arena
from retain.kernels.matrix import Int4, Int8, Matrix
from retain.kernels.widths import LOGITS, Widths, size

KINDS = {torch.float32: 0, torch.bfloat16: 1, Int8: 2, Int4: 3}
ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix [out, in] as products want it: kind, and its tiles as uint8 [bytes]."""

    out: int
    columns: int
    kind: int
    data: Tensor

    @property
    def told(self) -> tuple[int, int, int, int]:
        """What C++ is told."""
        return self.data.data_ptr(), self.out, self.columns, self.kind


def pack(matrix: Matrix, arena: Arena) -> Packed:
    """Tiles of a dense matrix (float32 or bfloat16) or of a quantised one. It runs at the speed of memory."""
    rows, columns = matrix.shape
    if isinstance(matrix, Tensor):
        kind, numbers, scale, shift = KINDS[matrix.dtype], matrix.contiguous(), None, None
    else:
        kind, numbers, scale = KINDS[type(matrix)], matrix.q.contiguous(), matrix.scale.contiguous()
        shift = matrix.shift.contiguous() if isinstance(matrix, Int4) else None
    data = arena.take(_C.packed_bytes(rows, columns, kind))
    _C.pack(numbers.data_ptr(), _address(scale), _address(shift), data.data_ptr(), rows, columns, kind)
    return Packed(rows, columns, kind, data)


@dataclass(frozen=True)
class Look:
    """Where a layer looks: the operations up to there, and the buffer with its queries."""

    layer: int
    at: int
    qkv: int
    heads: int
    dim: int


class CpuProgram:
    """See `Program`: operations over buffers of rows; `run` goes through all of them."""

    def __init__(self) -> None:
        self._c = _C.Program()
        self._widths = Widths()
        self._ropes: dict[int, int] = {}  # id of freqs -> number
        self._arena = Arena()
        self._packed: dict[int, tuple[ref[Matrix], Packed]] = {}  # by id of the matrix
        self._kept: list[Tensor] = []  # C++ holds addresses of these
        self._looks: list[Look] = []
        self._logits = torch.empty(0, 0)  # [most N so far, V]

    # ---- the operations ------------------------------------------------------------------------------------------

    def buffer(self, name: str, width: int) -> int:  # noqa: D102
        number = self._widths.number(name, width)
        return self._widths.add(name, self._c.buffer(width), width) if number is None else number

    def logits(self, width: int) -> int:  # noqa: D102
        self._logits = torch.empty(0, width)
        return self._widths.add("logits", LOGITS, width)

    def lookup(self, out: int, table: Matrix, factor: float = 1.0) -> None:  # noqa: D102
        self._widths.looked_up(out, table.shape[1])
        self._c.lookup(out, *self._pack(table).told, False, 0, factor, False)

    def lookup_position(self, out: int, table: Matrix, offset: int = 0) -> None:  # noqa: D102
        self._widths.looked_up(out, table.shape[1])
        self._c.lookup(out, *self._pack(table).told, True, offset, 1.0, True)

    def normalise(  # noqa: D102
        self, x: int, out: int, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, add: bool = False
    ) -> None:
        heads, n = self._widths.normalised(x, out, weight.shape, size(bias))
        self._c.normalise(x, out, self._keep(weight), self._keep(bias), eps, centred, n, heads, add)

    def linear(self, x: int, out: int, weight: Matrix, bias: Tensor | None = None, add: bool = False) -> None:  # noqa: D102
        self._widths.multiplied(x, out, weight.shape, size(bias))
        self._c.linear(x, out, *self._pack(weight).told, self._keep(bias), add)

    def activate(self, x: int, out: int, act: str, n: int, gated: bool = False) -> None:  # noqa: D102
        self._widths.activated(x, out, n, gated)
        self._c.activate(x, out, ACTIVATIONS[act], n, gated)

    def clip(self, x: int, at: float) -> None:  # noqa: D102
        self._c.clip(x, at)

    def turn(self, x: int, freqs: Tensor, gain: float, pairs: bool, heads: int, head_dim: int) -> None:  # noqa: D102
        self._widths.turned(x, heads, head_dim, len(freqs))
        if id(freqs) not in self._ropes:
            self._ropes[id(freqs)] = self._c.rope(self._keep(freqs), len(freqs), gain, pairs)
        self._c.turn(x, self._ropes[id(freqs)], heads, head_dim)

    def attend(  # noqa: D102
        self, qkv: int, out: int, layer: int, heads: tuple[int, int, int], scale: float, slopes: Tensor | None
    ) -> None:
        H, G, D = heads
        self._widths.attended(qkv, out, heads, size(slopes))
        self._looks.append(Look(layer, self._c.size(), qkv, H, D))
        self._c.attend(qkv, out, layer, H, G, D, scale, self._keep(slopes))

    def pick(self, x: int, out: int) -> None:  # noqa: D102
        self._widths.picked(x, out)
        self._c.pick(x, out)

    def finish(self) -> None:  # noqa: D102
        self._packed.clear()

    @property
    def weight_bytes(self) -> int:  # noqa: D102
        return sum(len(x) for x in self._kept if x.dtype == torch.uint8)

    # ---- a step --------------------------------------------------------------------------------------------------

    def run(  # noqa: D102
        self,
        kv: KV,
        tables: Tables,
        slots: Tensor,
        ids: Tensor,
        pos: Tensor,
        wanted: Tensor,
        observe: Observe | None = None,
        before: Callable[[int, Tensor], None] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> Tensor:
        N, T, B = len(wanted), len(ids), len(tables.rows)
        layers, _, G, _ = tables.pages.shape
        if pos.shape != (T,) or slots.shape != (layers, G, T) or tables.starts.shape != (B + 1,):
            raise ValueError(f"run: {T} ids, positions {list(pos.shape)} and slots {list(slots.shape)} do not fit")
        told.check_observe(observe, T, B)
        if len(self._logits) < N:
            self._logits = torch.empty(N, self._widths.of[LOGITS])
        step = (
            told.pool(kv), told.tables(tables), layers,
            tables.pages.stride(0), tables.counts.stride(0), tables.windows.stride(0),
            ids.data_ptr(), pos.data_ptr(), wanted.data_ptr(), self._logits.data_ptr(), T, N,
            slots.data_ptr(), *slots.stride(), told.observe(observe),
        )  # fmt: skip
        begin = 0
        for look in self._looks if before or after else []:
            if before:
                self._c.run(*step, begin, look.at)
                before(look.layer, self._queries(look, T))
                begin = look.at
            if after:
                self._c.run(*step, begin, look.at + 1)
                after(look.layer)
                begin = look.at + 1
        self._c.run(*step, begin, self._c.size())
        return self._logits[:N]

    def _queries(self, look: Look, T: int) -> Tensor:
        """[T, H, D], where C++ has them."""
        width = self._widths.of[look.qkv]
        rows = (ctypes.c_float * (T * width)).from_address(self._c.rows(look.qkv))
        every = torch.frombuffer(rows, dtype=torch.float32).view(T, -1, look.dim)  # q, k and v
        return every[:, : look.heads]

    # ---- what C++ points to --------------------------------------------------------------------------------------

    def _pack(self, matrix: Matrix) -> Packed:
        """Packed once, however often it is used (an embedding may be the head too), and not kept from being freed."""
        whose, packed = self._packed.get(id(matrix), (None, None))
        if packed is None or whose is None or whose() is not matrix:
            packed = pack(matrix, self._arena)
            self._packed[id(matrix)] = ref(matrix), packed
            self._kept.append(packed.data)
        return packed

    def _keep(self, x: Tensor | None) -> int:
        if x is None:
            return 0
        x = x.float().clone()  # what a file maps is not kept
        self._kept.append(x)
        return x.data_ptr()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
