"""Programs of the triton backend: torch computes the matrix products, this folder's kernels everything between them.

Rows and weights have the program's dtype. Quantized weights become dense, because no kernel here reads them. A step in
which all requests have equally many fresh tokens runs as a CUDA graph (graphs.py), any other operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from retain.kernels.api import Batch
from retain.kernels.attention_params import AttentionParams
from retain.kernels.shape_checks import LOGITS_BUFFER, BufferShapes, check_batch, numel_or_none
from retain.kernels.transfers import to_device
from retain.kernels.triton import attention, elementwise, fresh_tokens
from retain.kernels.triton.fresh_tokens import RopeParams, rotate, tokens_per_program
from retain.kernels.triton.graphs import CUDAGraphRunner
from retain.kernels.triton.plan import plan_attention
from retain.kernels.triton.step import DeviceStep
from retain.kernels.weight import Weight

Op = Callable[[DeviceStep], None]


class TritonProgram:
    """A program as a list of Python closures. See `Program` for the operations."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self._shapes = BufferShapes()
        self._ops: list[Op] = []
        self._pending_ropes: dict[int, RopeParams] = {}  # by buffer, until `attend` applies them
        self._dense_weights: dict[int, tuple[ref[Weight], Tensor]] = {}  # by id of the weight
        self._weight_bytes = 0
        self._num_heads = 0  # H, known once an attention is emitted
        self._graphs = CUDAGraphRunner(self._forward, device)

    # ---- operations ----------------------------------------------------------------------------------------------

    def buffer(self, name: str, width: int) -> int:
        """Return the buffer of that name; create it at the first call."""
        buffer_id = self._shapes.find(name, width)
        return self._shapes.register(name, len(self._shapes.buffer_ids), width) if buffer_id is None else buffer_id

    def logits_buffer(self, width: int) -> int:
        """Create the buffer of the logits."""
        return self._shapes.register("logits", LOGITS_BUFFER, width)

    def embedding(self, out: int, table: Weight, factor: float = 1.0) -> None:
        """Emit a lookup by token id."""
        self._shapes.check_embedding(out, table.shape[1])
        weight = self._to_dense(table)

        def op(s: DeviceStep) -> None:
            rows = F.embedding(s.input_ids, weight)
            s.buffers[out] = rows if factor == 1 else rows * factor

        self._ops.append(op)

    def position_embedding(self, out: int, table: Weight, offset: int = 0) -> None:
        """Emit a lookup by position, added to `out`."""
        self._shapes.check_embedding(out, table.shape[1])
        weight = self._to_dense(table)

        def op(s: DeviceStep) -> None:
            index = (s.positions + offset).clamp(min=0)  # padding tokens have position -1
            s.buffers[out] = s.buffers[out] + F.embedding(index, weight)

        self._ops.append(op)

    def norm(
        self, x: int, out: int, weight: Tensor, bias: Tensor | None, eps: float, subtract_mean: bool, add: bool = False
    ) -> None:
        """Emit a LayerNorm or RMSNorm."""
        heads, n = self._shapes.check_norm(x, out, weight.shape, numel_or_none(bias))
        w, b = self._to_float32(weight), None if bias is None else self._to_float32(bias)

        def op(s: DeviceStep) -> None:
            rows = s.buffers[x]
            to = s.buffers[out] if add or out == x or heads > 1 else torch.empty_like(rows)
            T, block_t = len(rows), tokens_per_program(len(rows), 8 if n <= 256 else 1)
            if T:
                elementwise.norm[(triton.cdiv(T, block_t), heads)](
                    rows, rows.stride(0), to, to.stride(0), w, w if b is None else b, T, n, eps,
                    T=block_t, BLOCK=triton.next_power_of_2(n), SUBTRACT_MEAN=subtract_mean, BIAS=b is not None,
                    ADD=add, num_warps=8 if n > 2048 else 4,
                )  # fmt: skip
            s.buffers[out] = to

        self._ops.append(op)

    def linear(self, x: int, out: int, weight: Weight, bias: Tensor | None = None, add: bool = False) -> None:
        """Emit a matrix product."""
        self._shapes.check_linear(x, out, weight.shape, numel_or_none(bias))
        w, b = self._to_dense(weight), None if bias is None else bias.to(self.device, self.dtype)

        def op(s: DeviceStep) -> None:
            if add and b is None:
                s.buffers[out] = torch.addmm(s.buffers[out], s.buffers[x], w.T)
            else:
                y = F.linear(s.buffers[x], w, b)
                s.buffers[out] = s.buffers[out] + y if add else y

        self._ops.append(op)

    def activation(self, x: int, out: int, act: str, n: int, gated: bool = False) -> None:
        """Emit an activation function, gated or not."""
        self._shapes.check_activation(x, out, n, gated)
        kind, block = elementwise.ACTIVATIONS[act], min(triton.next_power_of_2(n), 1024)

        def op(s: DeviceStep) -> None:
            rows = s.buffers[x]
            T, block_t = len(rows), tokens_per_program(len(rows), 1)
            to = rows.new_empty(T, n)
            if T:
                elementwise.activation[(triton.cdiv(T, block_t), triton.cdiv(n, block))](
                    rows, rows.stride(0), to, T, n, T=block_t, BLOCK=block, ACT=kind, GATED=gated
                )
            s.buffers[out] = to

        self._ops.append(op)

    def clip(self, x: int, limit: float) -> None:
        """Emit a clamp."""
        self._ops.append(lambda s: s.buffers.update({x: s.buffers[x].clamp(-limit, limit)}))

    def scale(self, x: int, factors: Tensor) -> None:
        """Emit a product with factors."""
        self._shapes.check_scale(x, len(factors))
        n, factors = len(factors), factors.to(self.device, self.dtype)

        def op(s: DeviceStep) -> None:
            s.buffers[x][:, :n].mul_(factors)

        self._ops.append(op)

    def rope(
        self, x: int, freqs: Tensor, attention_factor: float, interleaved: bool, heads: int, head_dim: int
    ) -> None:
        """Emit a rotation by position."""
        self._shapes.check_rope(x, heads, head_dim, len(freqs))
        # `attend` rotates the queries, and writes the keys rotated.
        self._pending_ropes[x] = RopeParams(self._to_float32(freqs), attention_factor, interleaved)

    def attend(
        self,
        qkv: int,
        out: int,
        layer: int,
        heads: tuple[int, int, int],
        params: AttentionParams,
    ) -> None:
        """Emit a layer's write and attention."""
        v_dim, has_kv = self._shapes.check_attention(qkv, out, heads, params)
        H, G, D = heads
        self._num_heads = H
        rope = self._pending_ropes.pop(qkv, None)
        params = params.map_tensors(self._to_float32)

        def op(s: DeviceStep) -> None:
            q = s.buffers[qkv][:, : H * D].unflatten(1, (H, D))
            if rope and len(q):
                q = rotate(q, s.positions, rope)
            if s.before_attention:
                s.before_attention(layer, q)
            inputs = s.layer(layer)
            plan = s.plans[s.layers[layer][0]]
            if has_kv:
                k, v = torch.split(s.buffers[qkv][:, H * D :], [G * D, G * v_dim], dim=1)
                k, v = k.unflatten(1, (G, D)), v.unflatten(1, (G, v_dim))
                fresh_tokens.write(inputs.kv, inputs.slot_mapping, k, v, s.positions, rope, params.key_offset)
            else:
                plan = plan.without_masses()
            o = attention.attend(q, inputs.kv, inputs.tables, plan, s.positions, params, layer)
            s.buffers[out] = o.flatten(1)
            if s.after_attention:
                s.after_attention(layer)

        self._ops.append(op)

    def gather_rows(self, x: int, out: int) -> None:
        """Emit the selection of the rows whose logits the caller needs."""
        self._shapes.check_gather_rows(x, out)

        def op(s: DeviceStep) -> None:
            rows = s.buffers[x]
            s.buffers[out] = rows if len(s.logits_indices) == len(rows) else rows[s.logits_indices]

        self._ops.append(op)

    def finalize(self) -> None:
        """Forget the weights of which a copy exists; the copies stay."""
        self._dense_weights.clear()

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights, as they are stored."""
        return self._weight_bytes

    # ---- a step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self, batch: Batch) -> Tensor:
        """Compute one step."""
        check_batch(batch)
        if not (batch.before_attention or batch.after_attention):
            logits = self._graphs.run(batch, self._num_heads)
            if logits is not None:
                return logits
        plans = [
            plan_attention(g.tables, self._num_heads // g.tables.pages.shape[2], g.kv.k_dim, g.kv, batch.scoring)
            for g in batch.groups
        ]
        moved = ("input_ids", "positions", "logits_indices")
        tensors: dict[str, Any] = {name: to_device(getattr(batch, name), self.device) for name in moved}
        groups = [replace(g, slot_mapping=to_device(g.slot_mapping, self.device)) for g in batch.groups]
        on_device = replace(batch, groups=groups, **tensors)
        return self._forward(DeviceStep(**vars(on_device), plans=plans))

    def _forward(self, s: DeviceStep) -> Tensor:
        for op in self._ops:
            op(s)
        return s.buffers[LOGITS_BUFFER].float()

    # ---- weights -------------------------------------------------------------------------------------------------

    def _to_dense(self, weight: Weight) -> Tensor:
        """Return the dense weight on the device. A weight that several operations use, as tied embeddings do, is copied
        once. The weak reference lets the caller free the weight, and detects a new one with the same id.
        """
        copied_from, dense = self._dense_weights.get(id(weight), (None, None))
        if dense is None or copied_from is None or copied_from() is not weight:
            source = weight if isinstance(weight, Tensor) else weight.dequantize(self.dtype)
            dense = source.to(self.device, self.dtype).contiguous()
            dense = dense.clone() if dense.data_ptr() == source.data_ptr() else dense  # so a mapped file can be closed
            self._dense_weights[id(weight)] = ref(weight), dense
            self._weight_bytes += dense.numel() * dense.itemsize
        return dense

    def _to_float32(self, x: Tensor) -> Tensor:
        return x.to(self.device, torch.float32).clone().contiguous()
