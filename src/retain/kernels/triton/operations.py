"""What each operation launches: kernels of this folder where torch would launch several, else what the reference does.

Operations write in place where that saves a launch. Rows and weights have the program's dtype. Quantized weights of
linear layers, experts and embeddings stay in their bits (packed_weight.py); those of heads become dense, because no
kernel here reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from retain.kernels import ops
from retain.kernels.reference.operations import (
    WITHOUT_CACHES,
    Compute,
    Lowerings,
    Operands,
    find_rows,
    replace_or_add,
)
from retain.kernels.reference.rows import join_columns, split_heads
from retain.kernels.triton import attention, elementwise, fresh_tokens, linear_attention, packed_weight
from retain.kernels.triton.elementwise import tokens_per_program
from retain.kernels.triton.experts import DeviceExperts, mix_experts
from retain.kernels.triton.packed_weight import DeviceWeight
from retain.kernels.triton.step_inputs import DeviceStep
from retain.kernels.weights.weight import ConvertedWeights, Weight, split_kinds, unpack


class DeviceOperands(Operands):
    """Numbers of buffers, and weights on the device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, others: DeviceOperands | None = None):
        super().__init__(dtype, device, others)
        self.matrices: ConvertedWeights[Tensor | DeviceWeight] = ConvertedWeights(  # of linear layers and embeddings
            self.pack, others.matrices if others else None
        )

    def convert(self, weight: Weight) -> Tensor:
        """Return a dense weight, of heads or of positions."""
        matrix = unpack(weight)
        packed = self.pack(matrix if isinstance(matrix, Tensor) else matrix.dequantize(self.dtype))
        assert isinstance(packed, Tensor)
        return packed

    def to_float32(self, x: Tensor) -> Tensor:
        """Return a copy in float32 on the device."""
        return x.to(self.device, torch.float32).clone().contiguous()

    def pack(self, weight: Weight, num_experts: int = 1) -> Tensor | DeviceWeight:
        """Return a copy of a weight on the device, so a mapped file can be closed."""
        packed = packed_weight.pack_weight(weight, self.dtype, self.device, num_experts)
        self.weight_bytes += packed.nbytes
        return packed


def norm(o: DeviceOperands, op: ops.Norm) -> Compute:
    """Normalize in float32, with the addition in the same kernel."""
    x = o.buffers[op.x]
    out = o.buffers[op.out]
    heads = op.heads
    first = op.first
    n = op.weight.shape[-1]
    w = o.to_float32(op.weight)
    b = None if op.bias is None else o.to_float32(op.bias)
    keeps_rows = op.add or out == x or op.is_by_head
    constants = {"SUBTRACT_MEAN": op.subtract_mean, "BIAS": b is not None, "ADD": op.add}
    eps = op.eps

    def compute(s: DeviceStep) -> Tensor:
        rows = s.buffers[x]
        to = s.buffers[out] if keeps_rows else torch.empty_like(rows)
        T = len(rows)
        block_t = tokens_per_program(T, 8 if n <= 256 else 1)
        if T:
            elementwise.norm[(triton.cdiv(T, block_t), heads)](
                x=rows[:, first:], x_row=rows.stride(0), out=to[:, first:], out_row=to.stride(0), weight=w,
                bias=w if b is None else b, tokens=T, n=n, eps=eps,
                T=block_t, BLOCK=triton.next_power_of_2(n), **constants, num_warps=8 if n > 2048 else 4,
            )  # fmt: skip
        return to

    return compute


def embed(o: DeviceOperands, op: ops.Embed) -> Compute:
    """Look up rows by token id. Of a packed table only the rows of the given ids are made dense."""
    return find_rows(op, o.matrices(op.table), lambda index, table: packed_weight.look_up(index, table, o.dtype))


def linear(o: DeviceOperands, op: ops.MatMul) -> Compute:
    """Multiply with a matrix, with the addition in the same kernel, in place, where there is no bias."""
    x = o.buffers[op.x]
    out = o.buffers[op.out]
    add = op.add
    parts = [(o.matrices(w), o.to_dtype(b)) for w, _, b in split_kinds(op.weight, op.bias)]
    if len(parts) > 1:
        return replace_or_add(o, op, lambda s: join_columns([_multiply(s.buffers[x], w, b) for w, b in parts]), add)
    ((w, b),) = parts
    if isinstance(w, DeviceWeight):
        return lambda s: packed_weight.linear(s.buffers[x], w, b, s.buffers[out] if add else None)
    if add and b is None:
        return lambda s: s.buffers[out].addmm_(s.buffers[x], w.T)
    return replace_or_add(o, op, lambda s: F.linear(s.buffers[x], w, b), add)


def low_rank(o: DeviceOperands, op: ops.LowRank) -> Compute:
    """Multiply all rows with the matrices of all adapters, one below the other; each row keeps what its own gives."""
    x = o.buffers[op.x]
    out = o.buffers[op.out]
    n, rank, _ = op.a.shape
    columns = slice(op.first, op.first + op.b.shape[2])
    a = op.a.view(n * rank, -1)
    b = op.b.view(n * rank, -1)
    owners = torch.arange(n, dtype=torch.int32, device=o.device).repeat_interleave(rank)

    def compute(s: DeviceStep) -> Tensor:
        if s.adapters is not None:
            low = F.linear(s.buffers[x], a).masked_fill(s.adapters[:, None] != owners, 0)
            s.buffers[out][:, columns].addmm_(low, b)
        return s.buffers[out]

    return compute


def head_linear(o: DeviceOperands, op: ops.HeadMatMul) -> Compute:
    """Multiply the columns of all heads in one batch of products."""
    weight = o.weights(op.weight)
    assert isinstance(weight, Tensor)
    H = op.source.num_heads
    matrices = weight.view(H, -1, op.source.width).mT
    return map_columns(o, op, lambda heads: torch.bmm(heads.transpose(0, 1), matrices).transpose(0, 1))


def copy_columns(o: DeviceOperands, op: ops.CopyColumns) -> Compute:
    """Copy the columns of each head in place."""
    return map_columns(o, op, lambda heads: heads)


def mix(o: DeviceOperands, op: ops.MixExperts) -> Compute:
    """Add up the experts that the router chooses."""
    x = o.buffers[op.x]
    scores = o.buffers[op.scores]
    e = op.experts
    gate_up, down = (o.pack(w, e.num_experts) for w in (e.gate_up, e.down))
    on_device = DeviceExperts(
        num_experts=e.num_experts,
        intermediate_size=e.intermediate_size,
        router=e.router.map_tensors(o.to_float32),
        act=e.act,
        is_gated=e.is_gated,
        gate_up=gate_up,
        down=down,
        gate_up_bias=o.to_dtype(e.gate_up_bias),
        down_bias=o.to_dtype(e.down_bias),
        first=e.first,
    )
    return replace_or_add(o, op, lambda s: mix_experts(s.buffers[x], s.buffers[scores], on_device), op.add)


def activate(o: DeviceOperands, op: ops.Activate) -> Compute:
    """Apply an activation function."""
    x = o.buffers[op.x]
    return lambda s: elementwise.activate(s.buffers[x], op.act, op.out.width, op.gated)


def scale(o: DeviceOperands, op: ops.Scale) -> Compute:
    """Multiply the first columns with factors, in place."""
    out = o.buffers[op.out]
    n = len(op.factors)
    factors = op.factors.to(o.device, o.dtype)

    def compute(s: DeviceStep) -> Tensor:
        s.buffers[out][:, :n].mul_(factors)
        return s.buffers[out]

    return compute


def attend(o: DeviceOperands, op: ops.Attend) -> Compute:
    """Attend. One kernel rotates, and writes K and V, where slots are plain."""
    qkv = o.buffers[op.qkv]
    out = o.buffers[op.out]
    H, G, D = op.heads
    v_dim = op.v_dim
    has_kv = op.has_kv
    cache = op.cache
    rope = replace(op.rope, freqs=o.to_float32(op.rope.freqs)) if op.rope else None
    params = op.params.map_tensors(o.to_float32)

    def compute(s: DeviceStep) -> Tensor:
        q = split_heads(s.buffers[qkv][:, : H * D], H)
        rotates_first = not has_kv or s.before_attention is not None  # which wants rotated queries
        if rope and rotates_first and len(q):
            q = fresh_tokens.rotate(q, s.positions, rope)
        plan = s.plan(cache)
        inputs = s.use_cache(cache, q)
        if has_kv:
            k, v = torch.split(s.buffers[qkv][:, H * D :], [G * D, G * v_dim], dim=1)
            keys = split_heads(k, G)
            values = split_heads(v, G)
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
        held = inputs.kv, inputs.tables
        return attention.attend(q, *held, plan, s.positions, params, cache, earlier).flatten(1)

    return compute


def write_cache(o: DeviceOperands, op: ops.WriteCache) -> Compute:
    """Rotate keys, and write K and V. A token at position 0 gets position -1: its slot is a hole."""
    rows = o.buffers[op.out]
    H, G, D = op.heads
    sizes = [G * D, G * op.v_dim]
    cache = op.cache
    rope = replace(op.rope, freqs=o.to_float32(op.rope.freqs)) if op.rope else None

    def compute(s: DeviceStep) -> Tensor:
        inputs = s.use_cache(cache)
        k, v = torch.split(s.buffers[rows][:, H * D :], sizes, dim=1)
        k, v = split_heads(k, G), split_heads(v, G)
        if rope and len(k):
            k = fresh_tokens.rotate(k, s.positions, rope)
        seen = s.positions.masked_fill(s.positions == 0, -1)
        fresh_tokens.write(inputs.kv, inputs.slot_mapping, k, v, seen)
        return s.buffers[rows]

    return compute


def load_hidden_states(o: DeviceOperands, op: ops.LoadHiddenStates) -> Compute:
    """Shift rows by one token, as the reference does."""
    shift = WITHOUT_CACHES[ops.LoadHiddenStates](o, op)

    def compute(s: DeviceStep) -> Tensor:
        return shift(replace(s, first_tokens=s.requests[:, 2].long()))

    return compute


def convolve(o: DeviceOperands, op: ops.Convolve) -> Compute:
    """Convolve by one kernel, and write the rows by another."""
    x = o.buffers[op.x]
    cache = op.cache
    w = o.to_float32(op.weight)
    b = None if op.bias is None else o.to_float32(op.bias)

    def compute(s: DeviceStep) -> Tensor:
        return linear_attention.convolve(s.buffers[x], s.use_cache(cache), s.requests, s.positions, w, b)

    return compute


def attend_linearly(o: DeviceOperands, op: ops.AttendLinearly) -> Compute:
    """Attend linearly by one kernel, and write by another what the first one's programs must not overwrite."""
    qkv = o.buffers[op.qkv]
    gates = o.buffers[op.gates]
    caches = op.caches
    params = op.params.map_tensors(o.to_float32)

    def compute(s: DeviceStep) -> Tensor:
        tokens, states = map(s.use_cache, caches)
        rows = s.buffers[qkv], s.buffers[gates]
        return linear_attention.attend_linearly(*rows, tokens, states, s.requests, s.positions, params)

    return compute


def map_columns(
    o: DeviceOperands, op: ops.HeadMatMul | ops.CopyColumns, function: Callable[[Tensor], Tensor]
) -> Compute:
    """Return how to put a function of the source columns [T, H, n] into the target columns, in place."""
    x = o.buffers[op.x]
    out = o.buffers[op.out]
    width = op.out.width
    source = op.source
    target = op.target

    def compute(s: DeviceStep) -> Tensor:
        rows = s.buffers[x]
        to = s.buffers[out] if out in s.buffers else rows.new_empty(len(rows), width)
        target.view(to).copy_(function(source.view(rows)))
        return to

    return compute


def _multiply(x: Tensor, weight: Tensor | DeviceWeight, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else packed_weight.linear(x, weight, bias)


OPERATIONS: Lowerings = {
    **WITHOUT_CACHES,
    ops.Norm: norm,
    ops.Embed: embed,
    ops.MatMul: linear,
    ops.LowRank: low_rank,
    ops.HeadMatMul: head_linear,
    ops.CopyColumns: copy_columns,
    ops.MixExperts: mix,
    ops.Activate: activate,
    ops.Scale: scale,
    ops.Attend: attend,
    ops.WriteCache: write_cache,
    ops.LoadHiddenStates: load_hidden_states,
    ops.Convolve: convolve,
    ops.AttendLinearly: attend_linearly,
}
