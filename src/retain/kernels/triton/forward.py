"""Programs of the triton backend: those of the reference, with kernels of this folder where torch would launch several.

Rows and weights have the program's dtype. Quantized weights of linear layers, experts and embeddings stay in their
bits (packed_weight.py); those of heads become dense, because no kernel here reads them. A step in which all requests
have equally many fresh tokens runs as a CUDA graph (graphs.py), any other operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from retain.kernels.api import ACTIVATIONS, Batch
from retain.kernels.attention_params import AttentionParams
from retain.kernels.experts import Experts
from retain.kernels.head_columns import HeadColumns
from retain.kernels.linear_attention import LinearAttention
from retain.kernels.reference.program import TorchProgram
from retain.kernels.reference.rows import join_columns, split_heads
from retain.kernels.rope import Rope
from retain.kernels.shape_checks import check_batch, numel_or_none
from retain.kernels.triton import attention, compilation, elementwise, fresh_tokens, linear_attention, packed_weight
from retain.kernels.triton.experts import DeviceExperts, mix_experts
from retain.kernels.triton.fresh_tokens import rotate, tokens_per_program
from retain.kernels.triton.graphs import CUDAGraphRunner
from retain.kernels.triton.packed_weight import PackedExperts, PackedMatrix
from retain.kernels.triton.plan import plan_attention, request_tiles
from retain.kernels.triton.step_inputs import DeviceStep, upload_step
from retain.kernels.weight import ConvertedWeights, UnpackedWeight, Weight, split_stack, unpack


class TritonProgram(TorchProgram[DeviceStep]):
    """A program on the device. Operations write in place where that saves a launch. See `Program`."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        super().__init__(dtype, device)
        self._matrices = ConvertedWeights(self._pack_weight)  # of linear layers and embeddings
        self._num_heads = 0  # H, known once an attention is emitted
        self._attended: set[int] = set()  # the layers of attentions
        self._graphs = CUDAGraphRunner(self._run_ops, device, captures=device.type == "cuda")

    @property
    def vector_dtype(self) -> torch.dtype:
        """Return float32, in which norms are computed."""
        return torch.float32

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
        """Emit a LayerNorm or RMSNorm in float32, with the addition in the same kernel."""
        heads, n = self._shapes.check_norm(x, out, weight.shape, numel_or_none(bias), first)
        w, b = self._to_float32(weight), None if bias is None else self._to_float32(bias)

        def compute(s: DeviceStep) -> Tensor:
            rows = s.buffers[x]
            to = s.buffers[out] if add or out == x or weight.dim() == 2 else torch.empty_like(rows)
            T, block_t = len(rows), tokens_per_program(len(rows), 8 if n <= 256 else 1)
            if T:
                elementwise.norm[(triton.cdiv(T, block_t), heads)](
                    rows[:, first:], rows.stride(0), to[:, first:], to.stride(0), w, w if b is None else b, T, n, eps,
                    T=block_t, BLOCK=triton.next_power_of_2(n), SUBTRACT_MEAN=subtract_mean, BIAS=b is not None,
                    ADD=add, num_warps=8 if n > 2048 else 4,
                )  # fmt: skip
            return to

        self._emit(out, compute)

    def embedding(self, out: int, table: Weight, factor: float = 1.0) -> None:
        """Emit a lookup by token id. Of a packed table only the rows of the given ids are made dense."""
        self._shapes.check_embedding(out, table.shape[1])
        w = self._matrices.get(table)
        if factor == 1:
            self._emit(out, lambda s: packed_weight.look_up(s.input_ids, w, self.dtype))
        else:
            self._emit(out, lambda s: packed_weight.look_up(s.input_ids, w, self.dtype) * factor)

    def linear(self, x: int, out: int, weight: Weight, bias: Tensor | None = None, add: bool = False) -> None:
        """Emit a matrix product, with the addition in the same kernel, in place, where there is no bias."""
        self._shapes.check_linear(x, out, weight.shape, numel_or_none(bias))
        parts = [(self._matrices.get(w), self._to_dtype(b)) for w, _, b in split_stack(weight, bias)]
        if len(parts) > 1:
            self._emit(out, lambda s: join_columns([_multiply(s.buffers[x], w, b) for w, b in parts]), add)
            return
        ((w, b),) = parts
        if isinstance(w, PackedMatrix):
            self._emit(out, lambda s: packed_weight.linear(s.buffers[x], w, b, s.buffers[out] if add else None))
        elif add and b is None:
            self._emit(out, lambda s: s.buffers[out].addmm_(s.buffers[x], w.T))
        else:
            self._emit(out, lambda s: F.linear(s.buffers[x], w, b), add)

    def head_linear(self, x: int, out: int, weight: Weight, source: HeadColumns, target: HeadColumns) -> None:
        """Emit a matrix product of each head, whose weights become dense."""
        super().head_linear(x, out, _to_dense(weight, self.dtype), source, target)

    def experts(self, x: int, scores: int, out: int, experts: Experts, add: bool = False) -> None:
        """Emit a mixture of experts."""
        self._shapes.check_experts(x, scores, out, experts)
        gate_up, down = (self._pack_experts(w, experts.num_experts) for w in (experts.gate_up, experts.down))
        on_device = DeviceExperts(
            num_experts=experts.num_experts,
            intermediate_size=experts.intermediate_size,
            router=experts.router.map_tensors(self._to_float32),
            act=experts.act,
            is_gated=experts.is_gated,
            gate_up=gate_up,
            down=down,
            gate_up_bias=self._to_dtype(experts.gate_up_bias),
            down_bias=self._to_dtype(experts.down_bias),
        )
        self._emit(out, lambda s: mix_experts(s.buffers[x], s.buffers[scores], on_device), add)

    def activation(self, x: int, out: int, act: str, n: int, gated: bool = False) -> None:
        """Emit an activation function, with the product of a gated one in the same kernel."""
        self._shapes.check_activation(x, out, act, n, gated)
        kind, block = ACTIVATIONS.index(act), min(triton.next_power_of_2(n), 1024)

        def compute(s: DeviceStep) -> Tensor:
            rows = s.buffers[x]
            T, block_t = len(rows), tokens_per_program(len(rows), 1)
            to = rows.new_empty(T, n)
            if T:
                elementwise.activation[(triton.cdiv(T, block_t), triton.cdiv(n, block))](
                    rows, rows.stride(0), to, T, n, T=block_t, BLOCK=block, ACT=kind, GATED=gated
                )
            return to

        self._emit(out, compute)

    def scale(self, x: int, factors: Tensor) -> None:
        """Emit a product with factors, in place."""
        n = len(factors)
        self._shapes.check_scale(x, n)
        factors = factors.to(self.device, self.dtype)

        def compute(s: DeviceStep) -> Tensor:
            s.buffers[x][:, :n].mul_(factors)
            return s.buffers[x]

        self._emit(x, compute)

    def attend(
        self,
        qkv: int,
        out: int,
        layer: int,
        heads: tuple[int, int, int],
        params: AttentionParams,
        rope: Rope | None = None,
    ) -> None:
        """Emit a layer's attention. One kernel rotates, and writes K and V, where slots are plain."""
        v_dim, has_kv = self._shapes.check_attention(qkv, out, heads, params, rope)
        H, G, D = heads
        self._num_heads = H
        self._attended.add(layer)
        rope = replace(rope, freqs=self._to_float32(rope.freqs)) if rope else None
        params = params.map_tensors(self._to_float32)

        def compute(s: DeviceStep) -> Tensor:
            q = split_heads(s.buffers[qkv][:, : H * D], H)
            rotates_first = not has_kv or s.before_attention is not None  # which wants rotated queries
            if rope and rotates_first and len(q):
                q = rotate(q, s.positions, rope)
            plan = s.plan(layer)
            inputs = s.use_cache(layer, q)
            if has_kv:
                k, v = torch.split(s.buffers[qkv][:, H * D :], [G * D, G * v_dim], dim=1)
                keys, values = split_heads(k, G), split_heads(v, G)
                to = inputs.kv, inputs.slot_mapping
                offset = params.key_offset
                if rope and not rotates_first:
                    q = fresh_tokens.rotate_and_write(*to, (q, keys, values), s.positions, rope, offset)
                else:
                    fresh_tokens.write(*to, keys, values, s.positions, rope, offset)
            else:
                plan = plan.without_masses()
            # Rows of padding requests are not written: they are 0 in the first layer, and so finite in all others.
            earlier = s.buffers[out].view(len(q), H, v_dim) if out in s.buffers else None
            cache = inputs.kv, inputs.tables
            return attention.attend(q, *cache, plan, s.positions, params, layer, earlier).flatten(1)

        self._emit(out, compute)

    def convolve(self, x: int, out: int, layer: int, weight: Tensor, bias: Tensor | None = None) -> None:
        """Emit a short convolution. One kernel convolves, one writes the rows."""
        self._shapes.check_convolve(x, out, weight.shape, numel_or_none(bias))
        w = self._to_float32(weight)
        b = None if bias is None else self._to_float32(bias)

        def compute(s: DeviceStep) -> Tensor:
            return linear_attention.convolve(s.buffers[x], s.use_cache(layer), s.requests, s.positions, w, b)

        self._emit(out, compute)

    def linear_attention(
        self, qkv: int, gates: int, out: int, layers: tuple[int, int], params: LinearAttention
    ) -> None:
        """Emit linear attention. One kernel computes, one writes what its programs must not overwrite."""
        self._shapes.check_linear_attention(qkv, gates, out, params)
        params = params.map_tensors(self._to_float32)

        def compute(s: DeviceStep) -> Tensor:
            tokens, states = map(s.use_cache, layers)
            return linear_attention.attend_linearly(
                s.buffers[qkv], s.buffers[gates], tokens, states, s.requests, s.positions, params
            )

        self._emit(out, compute)

    def compile_ahead(self, compute: Callable[[], None]) -> None:
        """See Program.compile_ahead. No graph of these steps is kept: it would lack the kernels."""
        graphs, self._graphs = self._graphs, CUDAGraphRunner(self._run_ops, self.device, captures=False)
        try:
            compilation.compile_ahead(compute)
        finally:
            self._graphs = graphs

    @torch.no_grad()
    def run(self, batch: Batch) -> Tensor:
        """Compute one step."""
        check_batch(batch)
        attended = {batch.layers[layer][0] for layer in self._attended}
        num_heads = [self._num_heads if i in attended else 0 for i in range(len(batch.groups))]
        if not batch.before_attention:
            logits = self._graphs.run(batch, num_heads)
            if logits is not None:
                return logits
        plans = [
            plan_attention(g.tables, H // g.tables.pages.shape[2], g.kv.k_dim, g.kv, batch.scoring) if H else None
            for g, H in zip(batch.groups, num_heads, strict=True)
        ]
        requests = request_tiles(batch.groups[0].tables, self.device)
        return self._run_ops(upload_step(batch, plans, requests, self.device))

    def _emit_columns(
        self, x: int, out: int, source: HeadColumns, target: HeadColumns, compute: Callable[[Tensor], Tensor]
    ) -> None:
        """Append an operation from the columns of heads [T, H, n] to those of another buffer, in place."""
        width = self._shapes.widths[out]

        def write_heads(s: DeviceStep) -> Tensor:
            rows = s.buffers[x]
            to = s.buffers[out] if out in s.buffers else rows.new_empty(len(rows), width)
            target.view(to).copy_(compute(source.view(rows)))
            return to

        self._emit(out, write_heads)

    def _multiply_heads(self, heads: Tensor, weight: UnpackedWeight) -> Tensor:
        assert isinstance(weight, Tensor)
        H, width = heads.shape[1:]
        return torch.bmm(heads.transpose(0, 1), weight.view(H, -1, width).mT).transpose(0, 1)

    def finalize(self) -> None:
        """Forget which weights were converted; the operations keep what they use."""
        super().finalize()
        self._matrices.clear()

    def _convert_weight(self, weight: Weight) -> Tensor:
        """Return a dense weight on the device."""
        assert isinstance(weight, Tensor)  # of heads, or of positions
        packed = self._pack_weight(weight)
        assert isinstance(packed, Tensor)
        return packed

    def _pack_weight(self, weight: Weight) -> Tensor | PackedMatrix:
        """Return a copy of a weight on the device, so a mapped file can be closed."""
        packed = packed_weight.pack_weight(weight, self.dtype, self.device)
        self._weight_bytes += packed.nbytes
        return packed

    def _pack_experts(self, weight: Weight, num_experts: int) -> Tensor | PackedExperts:
        """Return a copy of the matrices of experts on the device."""
        packed = packed_weight.pack_experts(weight, num_experts, self.dtype, self.device)
        self._weight_bytes += packed.nbytes
        return packed

    def _to_float32(self, x: Tensor) -> Tensor:
        return x.to(self.device, torch.float32).clone().contiguous()


def _to_dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    matrix = unpack(weight)
    return matrix if isinstance(matrix, Tensor) else matrix.dequantize(dtype)


def _multiply(x: Tensor, weight: Tensor | PackedMatrix, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else packed_weight.linear(x, weight, bias)
