"""Programs of the cpu backend: C++ computes the whole forward pass in one call. See `Program` in kernels/api.py.

Rows are float32 between operations. Weights are packed in tiles (csrc/packed_gemm.h). Activations are rounded to
bfloat16 for bfloat16 weights, and to 8 bits in groups of 32 for weights of 8 and 4 bits; to bfloat16 there, too, for
tokens in `Batch.bfloat16_rows`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels.api import ACTIVATIONS, Batch
from retain.kernels.attention_params import AttentionParams
from retain.kernels.cpu import ffi
from retain.kernels.cpu.memory import Arena
from retain.kernels.cpu.packing import PackedWeight, block_row_energies, pack_weight
from retain.kernels.experts import Experts
from retain.kernels.head_columns import HeadColumns
from retain.kernels.linear_attention import LinearAttention
from retain.kernels.rope import Rope
from retain.kernels.shape_checks import LOGITS_BUFFER, BufferShapes, check_batch, numel_or_none
from retain.kernels.weight import ConvertedWeights, Weight, split_stack


@dataclass(frozen=True)
class CacheOp:
    """An operation over caches: its index in the list of operations, and the buffer that holds its queries."""

    layers: tuple[int, ...]
    op_index: int
    qkv: int
    num_heads: int = 0  # of queries: only attention has them
    head_dim: int = 0


class CpuProgram:
    """A program that C++ executes. See `Program` for the operations."""

    def __init__(self) -> None:
        self._program = _C.Program()
        self._shapes = BufferShapes()
        self._ropes: dict[Rope, int] = {}  # their ids in C++
        self._arena = Arena()
        self._weights = ConvertedWeights(self._pack_weight)
        self._owned_tensors: list[Tensor] = []  # tensors whose addresses C++ holds
        self._cache_ops: list[CacheOp] = []
        self._logits = torch.empty(0, 0)  # [the largest N until now, V]

    # ---- operations --------------------------------------------------------------------------------------------------

    def buffer(self, name: str, width: int) -> int:
        """Return the buffer of that name; create it at the first call."""
        buffer_id = self._shapes.find(name, width)
        return self._shapes.register(name, self._program.buffer(width), width) if buffer_id is None else buffer_id

    def logits_buffer(self, width: int) -> int:
        """Create the buffer of the logits."""
        self._logits = torch.empty(0, width)
        return self._shapes.register("logits", LOGITS_BUFFER, width)

    def embedding(self, out: int, table: Weight, factor: float = 1.0) -> None:
        """Emit a lookup by token id."""
        self._shapes.check_embedding(out, table.shape[1])
        self._program.embedding(out, *self._weights.get(table).c_args, False, 0, factor, False)

    def position_embedding(self, out: int, table: Weight, offset: int = 0) -> None:
        """Emit a lookup by position, added to `out`."""
        self._shapes.check_embedding(out, table.shape[1])
        self._program.embedding(out, *self._weights.get(table).c_args, True, offset, 1.0, True)

    def norm(
        self,
        x: int,
        out: int,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        subtract_mean: bool,
        add: bool = False,
        first: int = 0,
    ) -> None:
        """Emit a LayerNorm or RMSNorm."""
        heads, n = self._shapes.check_norm(x, out, weight.shape, numel_or_none(bias), first)
        weights = self._keep_alive(weight), self._keep_alive(bias)
        self._program.norm(x, out, *weights, eps, subtract_mean, n, heads, add, first)

    def linear(self, x: int, out: int, weight: Weight, bias: Tensor | None = None, add: bool = False) -> None:
        """Emit a matrix product."""
        self._shapes.check_linear(x, out, weight.shape, numel_or_none(bias))
        for part, first, b in split_stack(weight, bias):
            self._program.linear(x, out, *self._weights.get(part).c_args, self._keep_alive(b), add, first)

    def head_linear(self, x: int, out: int, weight: Weight, source: HeadColumns, target: HeadColumns) -> None:
        """Emit a matrix product of each head."""
        self._shapes.check_head_linear(x, out, weight.shape, source, target)
        self._program.head_linear(x, out, self._weights.get(weight).c_args, astuple(source), astuple(target))

    def copy_columns(self, x: int, out: int, source: HeadColumns, target: HeadColumns) -> None:
        """Emit a copy of the columns of heads."""
        self._shapes.check_copy_columns(x, out, source, target)
        self._program.copy_columns(x, out, astuple(source), astuple(target))

    def activation(self, x: int, out: int, act: str, n: int, gated: bool = False) -> None:
        """Emit an activation function, gated or not."""
        self._shapes.check_activation(x, out, act, n, gated)
        self._program.activation(x, out, ACTIVATIONS.index(act), n, gated)

    def experts(self, x: int, scores: int, out: int, experts: Experts, add: bool = False) -> None:
        """Emit a mixture of experts."""
        self._shapes.check_experts(x, scores, out, experts)
        k = experts.router.top_k
        width = k * experts.inner_size
        hidden = self.buffer(f"hidden of experts {width}", width)
        outputs = self.buffer(f"outputs of experts {k}", k * experts.hidden_size)
        c_experts = _C.Experts(
            ffi.to_c_router(experts, self._keep_alive), self._weights.get(experts.gate_up).c_args,
            self._weights.get(experts.down).c_args, self._keep_alive(experts.gate_up_bias),
            self._keep_alive(experts.down_bias), ACTIVATIONS.index(experts.act), experts.is_gated,
        )  # fmt: skip
        self._program.experts(x, scores, out, hidden, outputs, c_experts, add)

    def clip(self, x: int, limit: float) -> None:
        """Emit a clamp."""
        self._program.clip(x, limit)

    def softcap(self, x: int, limit: float) -> None:
        """Emit a bound that bends."""
        self._program.softcap(x, limit)

    def multiply(self, x: int, by: int, first: int = 0) -> None:
        """Emit a product of two buffers."""
        self._shapes.check_multiply(x, by, first)
        self._program.multiply(x, by, first)

    def scale(self, x: int, factors: Tensor) -> None:
        """Emit a product with factors."""
        self._shapes.check_scale(x, len(factors))
        self._program.scale(x, self._keep_alive(factors), len(factors))

    def scale_by_position(self, x: int, n: int, beta: float, period: int) -> None:
        """Emit a product with factors that grow with the position."""
        self._shapes.check_scale_by_position(x, n, period)
        self._program.scale_by_position(x, n, beta, period)

    def attend(
        self,
        qkv: int,
        out: int,
        layer: int,
        heads: tuple[int, int, int],
        params: AttentionParams,
        rope: Rope | None = None,
    ) -> None:
        """Emit a layer's rotation, write and attention."""
        H, G, D = heads
        v_dim, has_kv = self._shapes.check_attention(qkv, out, heads, params, rope)
        if rope:
            if rope not in self._ropes:
                freqs = self._keep_alive(rope.freqs)
                num_freqs = len(rope.freqs)
                self._ropes[rope] = self._program.rope_table(freqs, num_freqs, rope.attention_factor, rope.interleaved)
            self._program.rope(qkv, self._ropes[rope], H + G if has_kv else H, D)
        self._cache_ops.append(CacheOp((layer,), self._program.num_ops(), qkv, H, D))
        self._program.attend(qkv, out, layer, H, G, D, v_dim, has_kv, ffi.to_c_params(params, self._keep_alive))

    def convolve(self, x: int, out: int, layer: int, weight: Tensor, bias: Tensor | None = None) -> None:
        """Emit a short convolution."""
        self._shapes.check_convolve(x, out, weight.shape, numel_or_none(bias))
        self._cache_ops.append(CacheOp((layer,), self._program.num_ops(), x))
        weights = self._keep_alive(weight.T.contiguous()), self._keep_alive(bias)
        self._program.convolve(x, out, layer, *weights, *weight.shape)

    def linear_attention(
        self, qkv: int, gates: int, out: int, layers: tuple[int, int], params: LinearAttention
    ) -> None:
        """Emit linear attention."""
        self._shapes.check_linear_attention(qkv, gates, out, params)
        self._cache_ops.append(CacheOp(layers, self._program.num_ops(), qkv))
        self._program.linear_attention(qkv, gates, out, layers, *ffi.linear_attention_args(params, self._keep_alive))

    def row_energies(self, weight: Weight, factors: Tensor) -> Tensor:
        """Compute the energies of rows, those of blocks in C++."""
        return block_row_energies(weight, factors)

    def gather_rows(self, x: int, out: int) -> None:
        """Emit the selection of the rows whose logits the caller needs."""
        self._shapes.check_gather_rows(x, out)
        self._program.gather_rows(x, out)

    def finalize(self) -> None:
        """Forget the weights of which a copy exists; the copies stay."""
        self._weights.clear()

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights, as they are stored."""
        return sum(len(x) for x in self._owned_tensors if x.dtype == torch.uint8)

    @property
    def vector_dtype(self) -> torch.dtype:
        """Return float32, in which C++ computes all but products."""
        return torch.float32

    # ---- a step ------------------------------------------------------------------------------------------------------

    def compile_ahead(self, compute: Callable[[], None]) -> None:
        """See Program.compile_ahead: there is nothing to compile."""

    def run(self, batch: Batch) -> Tensor:
        """See Program.run."""
        check_batch(batch)
        N = len(batch.logits_indices)
        input_ids = batch.token_ids()
        T = len(input_ids)
        ffi.check_scoring(batch.scoring, T, len(batch.rows))
        if len(self._logits) < N:
            self._logits = torch.empty(N, self._shapes.widths[LOGITS_BUFFER])
        c_args = (
            [ffi.to_c_group(group) for group in batch.groups], batch.layers,
            input_ids.data_ptr(), batch.positions.data_ptr(), batch.logits_indices.data_ptr(),
            self._logits.data_ptr(), T, N, ffi.to_c_scoring(batch.scoring), batch.bfloat16_rows,
        )  # fmt: skip
        begin = 0
        if batch.before_attention:
            for op in self._cache_ops:
                self._program.run(*c_args, begin, op.op_index)
                for layer in op.layers:
                    batch.before_attention(layer, self._queries(op, T))
                begin = op.op_index
        self._program.run(*c_args, begin, self._program.num_ops())
        return self._logits[:N]

    def _queries(self, op: CacheOp, T: int) -> Tensor:
        """Return a layer's queries [T, H, D] as a view of the buffer in C++."""
        width = self._shapes.widths[op.qkv]
        rows = (ctypes.c_float * (T * width)).from_address(self._program.buffer_address(op.qkv))
        qkv = torch.frombuffer(rows, dtype=torch.float32).view(T, width)
        return qkv[:, : op.num_heads * op.head_dim].view(T, op.num_heads, op.head_dim)

    # ---- memory that C++ reads ---------------------------------------------------------------------------------------

    def _pack_weight(self, weight: Weight) -> PackedWeight:
        packed = pack_weight(weight, self._arena)
        self._owned_tensors.append(packed.data)
        return packed

    def _keep_alive(self, x: Tensor | None) -> int:
        """Copy a tensor to float32, own the copy, and return its address; 0 for None."""
        if x is None:
            return 0
        x = x.float().clone()  # a copy, so that a mapped file can be closed
        self._owned_tensors.append(x)
        return x.data_ptr()
