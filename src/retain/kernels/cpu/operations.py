"""What the C++ program gets for each operation: a name of csrc/program/operations.cpp, and fields that are numbers.

A record has the fields of its operation, converted. Only what C++ reads otherwise stands here. Weights are packed in
tiles (csrc/gemm/packed_gemm.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, fields
from typing import Any

import torch
from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels import ops
from retain.kernels.attention_params import AttentionParams
from retain.kernels.cpu import ffi
from retain.kernels.cpu.memory import Arena
from retain.kernels.cpu.packing import PackedWeight, pack_weight
from retain.kernels.head_columns import HeadColumns
from retain.kernels.linear_attention import LinearAttention
from retain.kernels.ranks import CHUNK_BYTES
from retain.kernels.rope import Rope
from retain.kernels.weights.weight import ConvertedWeights, Weight, split_kinds

Record = tuple[str, dict[str, Any]]


class CppOperands:
    """What the fields of operations are converted to, and the memory that C++ reads."""

    def __init__(self, program: _C.Program, others: CppOperands | None = None):
        """`others` are those of a program whose packed weights this one may use; it holds them."""
        self.others = others
        self.program = program
        self.buffers = ops.BufferNumbers(self._create_buffer)
        self.weights: ConvertedWeights[PackedWeight] = ConvertedWeights(
            self._pack_weight, others.weights if others else None
        )
        self.owned_tensors: list[Tensor] = []  # tensors whose addresses C++ holds
        self.logits_width = 0
        self._ropes: dict[Rope, int] = {}  # their ids in C++
        self._arena = Arena()

    def record(self, op: ops.Operation, **changes: object) -> Record:
        """Return an operation as C++ gets it, with some fields changed or added."""
        types = {field.name: str(field.type) for field in fields(op)}  # type: ignore[arg-type]  # all are dataclasses
        record = {}
        for name, value in (vars(op) | changes).items():
            if (value is None or isinstance(value, Tensor)) and "Tensor" not in types.get(name, "Tensor"):
                raise TypeError(f"{name} of {type(op).__name__} is {type(value).__name__}, not {types[name]}")
            record[name] = self._to_c(value)
        return type(op).__name__, record

    def rope_table(self, rope: Rope) -> int:
        """Return the number of a rope's table."""
        if rope not in self._ropes:
            freqs = self.address(rope.freqs)
            args = len(rope.freqs), rope.attention_factor, rope.interleaved
            self._ropes[rope] = self.program.rope_table(freqs, *args)
        return self._ropes[rope]

    def address(self, x: Tensor | None) -> int:
        """Copy a tensor to float32, own the copy, and return its address; 0 for None."""
        if x is None:
            return 0
        x = x.float().clone()  # a copy, so that a mapped file can be closed
        self.owned_tensors.append(x)
        return x.data_ptr()

    def shared_address(self, x: Tensor) -> int:
        """Own a contiguous tensor that others may write to, and return its address."""
        assert x.is_contiguous() and x.dtype in (torch.float32, torch.bfloat16, torch.int32)
        self.owned_tensors.append(x)
        return x.data_ptr()

    def weight(self, weight: Weight) -> tuple[int, int, int, int]:
        """Return a packed matrix as C++ gets it."""
        return self.weights(weight).c_args

    def _create_buffer(self, buffer: ops.Buffer) -> int:
        if buffer.name == ops.LOGITS:
            self.logits_width = buffer.width
            self.program.reserve_logits(buffer.width)
            return int(_C.Program.LOGITS)
        return self.program.buffer(buffer.width)

    def _pack_weight(self, weight: Weight) -> PackedWeight:
        packed = pack_weight(weight, self._arena)
        self.owned_tensors.append(packed.data)
        return packed

    def _to_c(self, value: object) -> object:
        if isinstance(value, ops.Buffer):
            return self.buffers[value]
        if value is None or isinstance(value, Tensor):
            return self.address(value)
        if isinstance(value, HeadColumns):
            return astuple(value)
        if isinstance(value, AttentionParams):
            return ffi.to_c_params(value, self.address)
        if isinstance(value, LinearAttention):
            return ffi.to_c_linear_attention(value, self.address)
        return value


def embed(o: CppOperands, op: ops.Embed) -> Iterator[Record]:
    """Record a lookup of embeddings, with its table packed for C++."""
    yield o.record(op, table=o.weight(op.table), first=op.first or 0, is_part=op.first is not None)


def embed_position(o: CppOperands, op: ops.EmbedPosition) -> Iterator[Record]:
    """Record a lookup of embeddings, with its table packed for C++."""
    yield o.record(op, table=o.weight(op.table))


def norm(o: CppOperands, op: ops.Norm) -> Iterator[Record]:
    """Record a normalization, with the numbers and the heads of a row."""
    yield o.record(op, n=op.weight.shape[-1], heads=op.heads)


def linear(o: CppOperands, op: ops.MatMul) -> Iterator[Record]:
    """Make an operation of each matrix of a stack."""
    for part, first, bias in split_kinds(op.weight, op.bias):
        yield o.record(op, weight=o.weight(part), bias=bias, first=first)


def low_rank(o: CppOperands, op: ops.LowRank) -> Iterator[Record]:
    """Record an addition of adapters, whose tensors C++ reads where they are: they change between steps."""
    n, rank, _ = op.a.shape
    addresses = {name: o.shared_address(x) for name, x in (("a", op.a), ("b", op.b), ("ranks", op.ranks))}
    is_bfloat16 = op.a.dtype == torch.bfloat16
    yield o.record(op, **addresses, n=n, rank=rank, columns=op.b.shape[2], is_bfloat16=is_bfloat16)


def head_linear(o: CppOperands, op: ops.HeadMatMul) -> Iterator[Record]:
    """Record a product with a matrix for each head, with the matrices packed for C++."""
    yield o.record(op, weight=o.weight(op.weight))


def activate(o: CppOperands, op: ops.Activate) -> Iterator[Record]:
    """Add the size; the activation is a number."""
    yield o.record(op, act=ops.ACTIVATIONS.index(op.act), n=op.out.width)


def mix_experts(o: CppOperands, op: ops.MixExperts) -> Iterator[Record]:
    """Add buffers for what each expert of a token computes."""
    e = op.experts
    k = e.router.top_k
    hidden = ops.Buffer(f"hidden of experts {k * e.inner_size}", k * e.inner_size)
    outputs = ops.Buffer(f"outputs of experts {k}", k * e.hidden_size)
    yield o.record(op, hidden=hidden, outputs=outputs, experts=_to_c_experts(o, op))


def _to_c_experts(o: CppOperands, op: ops.MixExperts) -> _C.Experts:
    e = op.experts
    router = ffi.to_c_router(e.router, op.scores.width, o.address)
    return _C.Experts(
        router, e.first, e.num_experts, o.weight(e.gate_up), o.weight(e.down), o.address(e.gate_up_bias),
        o.address(e.down_bias), ops.ACTIVATIONS.index(e.act), e.is_gated,
    )  # fmt: skip


def scale(o: CppOperands, op: ops.Scale) -> Iterator[Record]:
    """Record a multiplication of rows by factors, with their number."""
    yield o.record(op, n=len(op.factors))


def attend(o: CppOperands, op: ops.Attend) -> Iterator[Record]:
    """Rotate by an operation of its own."""
    H, G, D = op.heads
    yield from _rotate(o, op.qkv, op.rope, H + G if op.has_kv else H, D)
    yield o.record(op, rope=0, v_dim=op.v_dim, has_kv=op.has_kv)


def write_cache(o: CppOperands, op: ops.WriteCache) -> Iterator[Record]:
    """Rotate by an operation of its own."""
    H, G, D = op.heads
    yield from _rotate(o, op.out, op.rope, H + G, D)
    yield o.record(op, rope=0, v_dim=op.v_dim)


def _rotate(o: CppOperands, rows: ops.Buffer, rope: Rope | None, num_heads: int, head_dim: int) -> Iterator[Record]:
    if rope:
        fields = {"table": o.rope_table(rope), "heads": num_heads, "head_dim": head_dim}
        yield "Rotate", {"out": o.buffers[rows], **fields}


def load_hidden_states(o: CppOperands, op: ops.LoadHiddenStates) -> Iterator[Record]:
    """Record a shift of rows; without rows, those of the step alone."""
    yield o.record(op, x=-1 if op.x is None else op.x)


def convolve(o: CppOperands, op: ops.Convolve) -> Iterator[Record]:
    """Transpose the weight, and add its sizes."""
    channels, window = op.weight.shape
    yield o.record(op, weight=op.weight.T.contiguous(), channels=channels, window=window)


def exchange_rows(o: CppOperands, op: ops.AllGather | ops.AllReduce) -> Iterator[Record]:
    """Record an exchange of rows in memory that all ranks map. Raises ValueError where they share none."""
    memory = op.group.shared_memory
    if memory is None:
        raise ValueError("ranks of the cpu backend need memory that they share")
    if 4 * op.x.width > CHUNK_BYTES:
        raise ValueError(f"rows of {op.x.width} numbers are too long for ranks to exchange")
    total = ops.Buffer(f"sum of all ranks {op.out.width}", op.out.width)
    own = _C.RankMemory(memory.data_ptr(), op.group.rank, op.group.size, CHUNK_BYTES)
    yield o.record(op, group=own, **({"total": total} if isinstance(op, ops.AllReduce) else {}))


LOWERINGS: Mapping[type[ops.Operation], Callable[[CppOperands, Any], Iterator[Record]]] = {
    ops.Embed: embed,
    ops.EmbedPosition: embed_position,
    ops.Norm: norm,
    ops.MatMul: linear,
    ops.LowRank: low_rank,
    ops.HeadMatMul: head_linear,
    ops.Activate: activate,
    ops.MixExperts: mix_experts,
    ops.Scale: scale,
    ops.Attend: attend,
    ops.WriteCache: write_cache,
    ops.LoadHiddenStates: load_hidden_states,
    ops.Convolve: convolve,
    ops.AllGather: exchange_rows,
    ops.AllReduce: exchange_rows,
}
