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
from retain.kernels.api import KV, AttentionScoring, Tables
from retain.kernels.cpu import ffi
from retain.kernels.cpu.memory import Arena
from retain.kernels.quantized import Int4, Int8, Weight
from retain.kernels.shape_checks import LOGITS_BUFFER, BufferShapes, numel_or_none

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, Int8: 2, Int4: 3}
ACTIVATIONS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3}


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix [out, in] as products want it: kind, and its tiles as uint8 [bytes]."""

    out_features: int
    in_features: int
    dtype_code: int
    data: Tensor

    @property
    def c_args(self) -> tuple[int, int, int, int]:
        """What C++ is told."""
        return self.data.data_ptr(), self.out_features, self.in_features, self.dtype_code


def pack_weight(weight: Weight, arena: Arena) -> PackedWeight:
    """Tiles of a dense matrix (float32 or bfloat16) or of a quantised one. It runs at the speed of memory."""
    rows, columns = weight.shape
    if isinstance(weight, Tensor):
        kind, numbers, scale, shift = DTYPE_CODES[weight.dtype], weight.contiguous(), None, None
    else:
        kind, numbers, scale = DTYPE_CODES[type(weight)], weight.q.contiguous(), weight.scale.contiguous()
        shift = weight.shift.contiguous() if isinstance(weight, Int4) else None
    data = arena.allocate(_C.packed_bytes(rows, columns, kind))
    _C.pack(numbers.data_ptr(), _data_ptr(scale), _data_ptr(shift), data.data_ptr(), rows, columns, kind)
    return PackedWeight(rows, columns, kind, data)


@dataclass(frozen=True)
class AttentionOp:
    """Where a layer looks: the operations up to there, and the buffer with its queries."""

    layer: int
    op_index: int
    qkv: int
    num_heads: int
    head_dim: int


class CpuProgram:
    """See `Program`: operations over buffers of rows; `run` goes through all of them."""

    def __init__(self) -> None:
        self._program = _C.Program()
        self._shapes = BufferShapes()
        self._ropes: dict[int, int] = {}  # id of freqs -> number
        self._arena = Arena()
        self._packed_weights: dict[int, tuple[ref[Weight], PackedWeight]] = {}  # by id of the matrix
        self._owned_tensors: list[Tensor] = []  # C++ holds addresses of these
        self._attention_ops: list[AttentionOp] = []
        self._logits = torch.empty(0, 0)  # [most N so far, V]

    # ---- the operations ------------------------------------------------------------------------------------------

    def buffer(self, name: str, width: int) -> int:  # noqa: D102
        number = self._shapes.find(name, width)
        return self._shapes.register(name, self._program.buffer(width), width) if number is None else number

    def logits_buffer(self, width: int) -> int:  # noqa: D102
        self._logits = torch.empty(0, width)
        return self._shapes.register("logits", LOGITS_BUFFER, width)

    def embedding(self, out: int, table: Weight, factor: float = 1.0) -> None:  # noqa: D102
        self._shapes.check_embedding(out, table.shape[1])
        self._program.lookup(out, *self._pack_once(table).c_args, False, 0, factor, False)

    def position_embedding(self, out: int, table: Weight, offset: int = 0) -> None:  # noqa: D102
        self._shapes.check_embedding(out, table.shape[1])
        self._program.lookup(out, *self._pack_once(table).c_args, True, offset, 1.0, True)

    def norm(  # noqa: D102
        self, x: int, out: int, weight: Tensor, bias: Tensor | None, eps: float, subtract_mean: bool, add: bool = False
    ) -> None:
        heads, n = self._shapes.check_norm(x, out, weight.shape, numel_or_none(bias))
        self._program.normalise(
            x, out, self._keep_alive(weight), self._keep_alive(bias), eps, subtract_mean, n, heads, add
        )

    def linear(self, x: int, out: int, weight: Weight, bias: Tensor | None = None, add: bool = False) -> None:  # noqa: D102
        self._shapes.check_linear(x, out, weight.shape, numel_or_none(bias))
        self._program.linear(x, out, *self._pack_once(weight).c_args, self._keep_alive(bias), add)

    def activation(self, x: int, out: int, act: str, n: int, gated: bool = False) -> None:  # noqa: D102
        self._shapes.check_activation(x, out, n, gated)
        self._program.activate(x, out, ACTIVATIONS[act], n, gated)

    def clip(self, x: int, limit: float) -> None:  # noqa: D102
        self._program.clip(x, limit)

    def rope(
        self, x: int, freqs: Tensor, attention_factor: float, interleaved: bool, heads: int, head_dim: int
    ) -> None:  # noqa: D102
        self._shapes.check_rope(x, heads, head_dim, len(freqs))
        if id(freqs) not in self._ropes:
            self._ropes[id(freqs)] = self._program.rope(
                self._keep_alive(freqs), len(freqs), attention_factor, interleaved
            )
        self._program.turn(x, self._ropes[id(freqs)], heads, head_dim)

    def attend(  # noqa: D102
        self, qkv: int, out: int, layer: int, heads: tuple[int, int, int], scale: float, alibi_slopes: Tensor | None
    ) -> None:
        H, G, D = heads
        self._shapes.check_attention(qkv, out, heads, numel_or_none(alibi_slopes))
        self._attention_ops.append(AttentionOp(layer, self._program.size(), qkv, H, D))
        self._program.attend(qkv, out, layer, H, G, D, scale, self._keep_alive(alibi_slopes))

    def gather_rows(self, x: int, out: int) -> None:  # noqa: D102
        self._shapes.check_gather_rows(x, out)
        self._program.pick(x, out)

    def finalize(self) -> None:  # noqa: D102
        self._packed_weights.clear()

    @property
    def weight_bytes(self) -> int:  # noqa: D102
        return sum(len(x) for x in self._owned_tensors if x.dtype == torch.uint8)

    # ---- a step --------------------------------------------------------------------------------------------------

    def run(  # noqa: D102
        self,
        kv: KV,
        tables: Tables,
        slot_mapping: Tensor,
        input_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        scoring: AttentionScoring | None = None,
        before_attention: Callable[[int, Tensor], None] | None = None,
        after_attention: Callable[[int], None] | None = None,
    ) -> Tensor:
        N, T, B = len(logits_indices), len(input_ids), len(tables.rows)
        layers, _, G, _ = tables.pages.shape
        if positions.shape != (T,) or slot_mapping.shape != (layers, G, T) or tables.query_start_loc.shape != (B + 1,):
            raise ValueError(
                f"run: {T} ids, positions {list(positions.shape)} and slots {list(slot_mapping.shape)} do not fit"
            )
        ffi.check_scoring(scoring, T, B)
        if len(self._logits) < N:
            self._logits = torch.empty(N, self._shapes.widths[LOGITS_BUFFER])
        step = (
            ffi.to_c_pool(kv), ffi.to_c_tables(tables), layers,
            tables.pages.stride(0), tables.counts.stride(0), tables.windows.stride(0),
            input_ids.data_ptr(), positions.data_ptr(), logits_indices.data_ptr(), self._logits.data_ptr(), T, N,
            slot_mapping.data_ptr(), *slot_mapping.stride(), ffi.to_c_scoring(scoring),
        )  # fmt: skip
        begin = 0
        for look in self._attention_ops if before_attention or after_attention else []:
            if before_attention:
                self._program.run(*step, begin, look.op_index)
                before_attention(look.layer, self._queries(look, T))
                begin = look.op_index
            if after_attention:
                self._program.run(*step, begin, look.op_index + 1)
                after_attention(look.layer)
                begin = look.op_index + 1
        self._program.run(*step, begin, self._program.size())
        return self._logits[:N]

    def _queries(self, op: AttentionOp, T: int) -> Tensor:
        """[T, H, D], where C++ has them."""
        width = self._shapes.widths[op.qkv]
        rows = (ctypes.c_float * (T * width)).from_address(self._program.rows(op.qkv))
        every = torch.frombuffer(rows, dtype=torch.float32).view(T, -1, op.head_dim)  # q, k and v
        return every[:, : op.num_heads]

    # ---- what C++ points to --------------------------------------------------------------------------------------

    def _pack_once(self, weight: Weight) -> PackedWeight:
        """Packed once, however often it is used (an embedding may be the head too), and not kept from being freed."""
        whose, packed = self._packed_weights.get(id(weight), (None, None))
        if packed is None or whose is None or whose() is not weight:
            packed = pack_weight(weight, self._arena)
            self._packed_weights[id(weight)] = ref(weight), packed
            self._owned_tensors.append(packed.data)
        return packed

    def _keep_alive(self, x: Tensor | None) -> int:
        if x is None:
            return 0
        x = x.float().clone()  # what a file maps is not kept
        self._owned_tensors.append(x)
        return x.data_ptr()


def _data_ptr(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
