"""Programs of the cpu backend: C++ computes the whole forward pass in one call. See `Program` in kernels/api.py.

Rows are float32 between operations. Activations are rounded to bfloat16 for bfloat16 weights, and to 8 bits in groups
of 32 for weights of 8 and 4 bits; to bfloat16 there, too, for tokens in `Batch.bfloat16_rows`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels import ops
from retain.kernels.api import Batch
from retain.kernels.cpu import ffi
from retain.kernels.cpu.operations import LOWERINGS, CppOperands
from retain.kernels.cpu.packing import block_row_energies
from retain.kernels.ranks import RankError
from retain.kernels.shape_checks import check_batch
from retain.kernels.weights.weight import Weight


@dataclass(frozen=True)
class CacheOp:
    """An operation over caches: its index in the list of operations, and the buffer that holds its queries."""

    caches: tuple[int, ...]
    op_index: int
    queries: ops.Buffer
    num_heads: int = 0  # of queries: only attention has them
    head_dim: int = 0


class CpuProgram:
    """A program that C++ executes."""

    def __init__(self, beside: CpuProgram | None = None) -> None:
        """`beside`: a program whose weights it may share."""
        self._program = _C.Program()
        self.operands: CppOperands = CppOperands(self._program, beside.operands if beside else None)
        self.lowerings = dict(LOWERINGS)
        self._cache_ops: list[CacheOp] = []
        self._logits = torch.empty(0, 0)  # [the largest N until now, V]
        self._hidden_states: ops.Buffer | None = None
        self.hidden_states: Tensor | None = None  # of the last step
        self.state_size = 0  # until an operation loads hidden states

    def load(self, operations: Iterable[ops.Operation]) -> None:
        """Append a model's operations to the program, lowered to those of C++."""
        o = self.operands
        for op in operations:
            op.check()
            lower = self.lowerings.get(type(op))
            for name, fields in lower(o, op) if lower else [o.record(op)]:
                if name == type(op).__name__:
                    self._note_caches(op)
                self._program.add(name, fields)
            if op.out.name == ops.HIDDEN_STATES:
                self._hidden_states = op.out
            if isinstance(op, ops.LoadHiddenStates):
                self.state_size = op.out.width
            del op  # its weights are packed: they may be freed before the next ones are read
        self._logits = torch.empty(0, o.logits_width)

    def _note_caches(self, op: ops.Operation) -> None:
        """Note an operation over caches, which is added next."""
        index = self._program.num_ops()
        if isinstance(op, ops.Attend):
            H, _, D = op.heads
            self._cache_ops.append(CacheOp((op.cache,), index, op.qkv, H, D))
        elif isinstance(op, ops.Convolve | ops.WriteCache):
            queries = op.x if isinstance(op, ops.Convolve) else op.out
            self._cache_ops.append(CacheOp((op.cache,), index, queries))
        elif isinstance(op, ops.AttendLinearly):
            self._cache_ops.append(CacheOp(op.caches, index, op.qkv))

    def row_energies(self, weight: Weight, factors: Tensor) -> Tensor:
        """Compute the energies of rows, those of blocks in C++."""
        return block_row_energies(weight, factors)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights, as they are stored."""
        return sum(len(x) for x in self.operands.owned_tensors if x.dtype == torch.uint8)

    @property
    def vector_dtype(self) -> torch.dtype:
        """Return float32, in which C++ computes all but products."""
        return torch.float32

    def compile_ahead(self, compute: Callable[[], None]) -> None:
        """Do nothing: there is nothing to compile."""

    def run(self, batch: Batch) -> Tensor:
        """Run all operations for the tokens of a batch. Returns the logits. Raises RankError."""
        check_batch(batch)
        N = len(batch.logits_indices)
        input_ids = batch.token_ids()
        T = len(input_ids)
        ffi.check_scoring(batch.scoring, T, len(batch.rows))
        if len(self._logits) < N:
            self._logits = torch.empty(N, self.operands.logits_width)
        c_args = (
            [ffi.to_c_group(group) for group in batch.groups], batch.caches,
            input_ids.data_ptr(), batch.positions.data_ptr(), batch.logits_indices.data_ptr(),
            self._logits.data_ptr(), T, N, ffi.to_c_scoring(batch.scoring), batch.bfloat16_rows,
            *ffi.to_c_hidden_states(batch.hidden_states, len(batch.rows)),
            0 if batch.adapters is None else batch.adapters.data_ptr(),
        )  # fmt: skip
        begin = 0
        if batch.before_attention:
            for op in self._cache_ops:
                self._run(*c_args, begin, op.op_index)
                for cache in op.caches:
                    batch.before_attention(cache, self._queries(op, T))
                begin = op.op_index
        self._run(*c_args, begin, self._program.num_ops())
        if self._hidden_states:
            self.hidden_states = self._view(self._hidden_states, N)
        return self._logits[:N]

    def _run(self, *args: Any) -> None:
        if not self._program.run(*args):
            raise RankError

    def _queries(self, op: CacheOp, T: int) -> Tensor:
        """Return a layer's queries [T, H, D] as a view of the buffer in C++."""
        qkv = self._view(op.queries, T)
        return qkv[:, : op.num_heads * op.head_dim].view(T, op.num_heads, op.head_dim)

    def _view(self, buffer: ops.Buffer, num_rows: int) -> Tensor:
        """Return the first rows of a buffer in C++, [num_rows, width]."""
        width = buffer.width
        if not num_rows:
            return torch.empty(0, width)
        address = self._program.buffer_address(self.operands.buffers[buffer])
        numbers = (ctypes.c_float * (num_rows * width)).from_address(address)
        return torch.frombuffer(numbers, dtype=torch.float32).view(num_rows, width)
