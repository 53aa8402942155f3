"""Programs of the triton backend: a model's forward pass as torch's products and the kernels of this folder.

Rows are of the program's dtype, and so are matrices: quantised ones are made dense (there is no kernel for them here).
Steps in which every request has as many fresh tokens go through graphs.py, all others one operation at a time. What is
not known here: layers, families.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from retain.kernels.api import KV, AttentionScoring, Tables
from retain.kernels.quantized import Weight
from retain.kernels.shape_checks import LOGITS_BUFFER, BufferShapes, numel_or_none
from retain.kernels.triton import attention, elementwise
from retain.kernels.triton.attention import RopeParams, tokens_per_program
from retain.kernels.triton.graphs import CUDAGraphRunner
from retain.kernels.triton.step import DeviceStep, HostStep

Op = Callable[[DeviceStep], None]


class TritonProgram:
    """See `Program`: operations over rows; `run` goes through all of them."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self._shapes = BufferShapes()
        self._ops: list[Op] = []
        self._pending_ropes: dict[int, RopeParams] = {}  # of buffers that are not turned yet
        self._dense_weights: dict[int, tuple[ref[Weight], Tensor]] = {}  # by id of the matrix
        self._weight_bytes = 0
        self._num_queries_per_kv = 0  # query heads of a kv head
        self._head_dim = 0
        self._graphs = CUDAGraphRunner(self._forward, device)

    # ---- the operations ------------------------------------------------------------------------------------------

    def buffer(self, name: str, width: int) -> int:  # noqa: D102
        number = self._shapes.find(name, width)
        return self._shapes.register(name, len(self._shapes.buffer_ids), width) if number is None else number

    def logits_buffer(self, width: int) -> int:  # noqa: D102
        return self._shapes.register("logits", LOGITS_BUFFER, width)

    def embedding(self, out: int, table: Weight, factor: float = 1.0) -> None:  # noqa: D102
        self._shapes.check_embedding(out, table.shape[1])
        weight = self._to_dense(table)

        def op(s: DeviceStep) -> None:
            found = F.embedding(s.input_ids, weight)
            s.buffers[out] = found if factor == 1 else found * factor

        self._ops.append(op)

    def position_embedding(self, out: int, table: Weight, offset: int = 0) -> None:  # noqa: D102
        self._shapes.check_embedding(out, table.shape[1])
        weight = self._to_dense(table)

        def op(s: DeviceStep) -> None:
            s.buffers[out] = s.buffers[out] + F.embedding((s.positions + offset).clamp(min=0), weight)  # nobody's is -1

        self._ops.append(op)

    def norm(  # noqa: D102
        self, x: int, out: int, weight: Tensor, bias: Tensor | None, eps: float, subtract_mean: bool, add: bool = False
    ) -> None:
        heads, n = self._shapes.check_norm(x, out, weight.shape, numel_or_none(bias))
        w, b = self._to_float32(weight), None if bias is None else self._to_float32(bias)

        def op(s: DeviceStep) -> None:
            given = s.buffers[x]
            to = s.buffers[out] if add or out == x or heads > 1 else torch.empty_like(given)
            T, some = len(given), tokens_per_program(len(given), 8 if n <= 256 else 1)
            if T:
                elementwise.norm[(triton.cdiv(T, some), heads)](
                    given, given.stride(0), to, to.stride(0), w, w if b is None else b, T, n, eps,
                    T=some, BLOCK=triton.next_power_of_2(n), SUBTRACT_MEAN=subtract_mean, BIAS=b is not None, ADD=add,
                    num_warps=8 if n > 2048 else 4,
                )  # fmt: skip
            s.buffers[out] = to

        self._ops.append(op)

    def linear(self, x: int, out: int, weight: Weight, bias: Tensor | None = None, add: bool = False) -> None:  # noqa: D102
        self._shapes.check_linear(x, out, weight.shape, numel_or_none(bias))
        w, b = self._to_dense(weight), None if bias is None else bias.to(self.device, self.dtype)

        def op(s: DeviceStep) -> None:
            if add and b is None:
                s.buffers[out] = torch.addmm(s.buffers[out], s.buffers[x], w.T)
            else:
                y = F.linear(s.buffers[x], w, b)
                s.buffers[out] = s.buffers[out] + y if add else y

        self._ops.append(op)

    def activation(self, x: int, out: int, act: str, n: int, gated: bool = False) -> None:  # noqa: D102
        self._shapes.check_activation(x, out, n, gated)
        kind, block = elementwise.ACTIVATIONS[act], min(triton.next_power_of_2(n), 1024)

        def op(s: DeviceStep) -> None:
            given = s.buffers[x]
            T, some = len(given), tokens_per_program(len(given), 1)
            to = given.new_empty(T, n)
            if T:
                elementwise.activation[(triton.cdiv(T, some), triton.cdiv(n, block))](
                    given, given.stride(0), to, T, n, T=some, BLOCK=block, ACT=kind, GATED=gated
                )
            s.buffers[out] = to

        self._ops.append(op)

    def clip(self, x: int, limit: float) -> None:  # noqa: D102
        self._ops.append(lambda s: s.buffers.update({x: s.buffers[x].clamp(-limit, limit)}))

    def rope(
        self, x: int, freqs: Tensor, attention_factor: float, interleaved: bool, heads: int, head_dim: int
    ) -> None:  # noqa: D102
        self._shapes.check_rope(x, heads, head_dim, len(freqs))
        self._pending_ropes[x] = RopeParams(
            self._to_float32(freqs), attention_factor, interleaved
        )  # keys are turned where they are written

    def attend(  # noqa: D102
        self, qkv: int, out: int, layer: int, heads: tuple[int, int, int], scale: float, alibi_slopes: Tensor | None
    ) -> None:
        self._shapes.check_attention(qkv, out, heads, numel_or_none(alibi_slopes))
        H, G, D = heads
        self._num_queries_per_kv, self._head_dim = H // G, D
        turn, alibi = (
            self._pending_ropes.pop(qkv, None),
            None if alibi_slopes is None else self._to_float32(alibi_slopes),
        )

        def op(s: DeviceStep) -> None:
            q, k, v = torch.split(s.buffers[qkv].view(-1, H + 2 * G, D), [H, G, G], dim=1)
            if turn and len(q):
                some, given, q = (
                    tokens_per_program(len(q), 8),
                    q,
                    torch.empty(len(q), H, D, dtype=q.dtype, device=q.device),
                )
                elementwise.rope[(triton.cdiv(len(q), some), H)](
                    given, *given.stride()[:2], q, s.positions, len(q), turn.freqs, len(turn.freqs), turn.attention_factor,
                    H=H, D=D, DP=triton.next_power_of_2(D), T=some, INTERLEAVED=turn.interleaved, num_warps=4 if some > 1 else 1,
                )  # fmt: skip
            if s.before_attention:
                s.before_attention(layer, q)
            attention.write(s.kv, s.slot_mapping[layer], k, v, s.positions, turn)
            o = attention.attend(q, s.kv, s.tables.for_layer(layer), s.plan, s.positions, scale, alibi, layer)
            s.buffers[out] = o.flatten(1)
            if s.after_attention:
                s.after_attention(layer)

        self._ops.append(op)

    def gather_rows(self, x: int, out: int) -> None:  # noqa: D102
        self._shapes.check_gather_rows(x, out)
        self._ops.append(
            lambda s: s.buffers.update(
                {out: s.buffers[x] if s.logits_indices is None else s.buffers[x][s.logits_indices]}
            )
        )

    def finalize(self) -> None:  # noqa: D102
        self._dense_weights.clear()

    @property
    def weight_bytes(self) -> int:  # noqa: D102
        return self._weight_bytes

    # ---- a step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
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
        T, (layers, _, G, _) = len(input_ids), tables.pages.shape
        if (
            positions.shape != (T,)
            or slot_mapping.shape != (layers, G, T)
            or tables.query_start_loc.shape != (len(tables.rows) + 1,)
        ):
            raise ValueError(
                f"run: {T} ids, positions {list(positions.shape)} and slots {list(slot_mapping.shape)} do not fit"
            )
        if not (before_attention or after_attention):
            found = self._graphs.run(
                HostStep(kv, tables, slot_mapping, input_ids, positions, logits_indices, scoring),
                self._num_queries_per_kv,
            )
            if found is not None:
                return found
        work = attention.plan_attention(tables, self._num_queries_per_kv, self._head_dim, kv, scoring)
        slot_mapping, input_ids, positions, logits_indices = (
            x.to(self.device, non_blocking=True) for x in (slot_mapping, input_ids, positions, logits_indices)
        )
        return self._forward(
            DeviceStep(
                kv, tables, work, slot_mapping, input_ids, positions, logits_indices, before_attention, after_attention
            )
        )

    def _forward(self, s: DeviceStep) -> Tensor:
        for op in self._ops:
            op(s)
        return s.buffers[LOGITS_BUFFER].float()

    # ---- weights -------------------------------------------------------------------------------------------------

    def _to_dense(self, weight: Weight) -> Tensor:
        """Dense, on the device; once, however often it is used (an embedding may be the head too)."""
        whose, dense = self._dense_weights.get(id(weight), (None, None))
        if dense is None or whose is None or whose() is not weight:
            numbers = weight if isinstance(weight, Tensor) else weight.dequantize(self.dtype)
            dense = numbers.to(self.device, self.dtype).contiguous()
            dense = dense.clone() if dense.data_ptr() == numbers.data_ptr() else dense  # what a file maps is not kept
            self._dense_weights[id(weight)] = ref(weight), dense
            self._weight_bytes += dense.numel() * dense.itemsize
        return dense

    def _to_float32(self, x: Tensor) -> Tensor:
        return x.to(self.device, torch.float32).clone().contiguous()
