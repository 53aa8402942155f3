"""A pass that divides a program among ranks: tensor parallelism by rows of matrices alone.

Each rank has some rows of matrices, and some kv heads of attention with the query heads of these. Where the next
operation needs a whole row, ranks gather the columns that they have computed. Megatron-LM (arXiv 1909.08053) divides
every other matrix along its inputs, and adds up. Here no sum is divided, so a backend whose products do not depend on
the number of rows computes the bits of one rank. Mixtures are divided by expert: their sums are added in rank order.

Whole on every rank are small matrices, those of heads (`HeadMatMul`), attention whose kv heads cannot be divided alike
in all layers, states, and mixtures of fewer experts than ranks.

Parts are of equal size. Where a number of rows or heads does not divide, the last ranks repeat the last row or head,
and what they compute of it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from retain.kernels import ops
from retain.kernels.experts import TILE_ROWS
from retain.kernels.ops import AllGather, Attend, Buffer, MatMul, NamedRows, Norm, Operation, Scale
from retain.kernels.ranks import ProcessGroup
from retain.kernels.slots.kv_cache_spec import (
    AttentionSpec,
    DraftHeadSpec,
    FullAttentionSpec,
    LayerCacheSpec,
    SlidingWindowSpec,
)
from retain.kernels.weights.weight import Weight, parts_of, select_rows, stack_rows
from retain.models.decoder import ModelSpec
from retain.models.layers import copy_run


def shard(
    operations: Iterable[Operation], spec: ModelSpec, group: ProcessGroup, key_factors: dict[int, Tensor] | None = None
) -> Iterator[Operation]:
    """Return the operations of this rank, and those between ranks. `spec` is of the whole model.

    Before an attention is yielded, `key_factors` of its cache become those of the rank's heads: see passes/balance.py.
    """
    return Sharding(spec, group, {} if key_factors is None else key_factors).shard(operations)


def shard_spec(spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """Return the spec of a rank's program: it has some of the kv heads. Other caches are whole on every rank."""
    num_heads = own_query_heads(spec, num_ranks)
    if num_heads is None:
        return spec
    caches = tuple(
        replace(cache, num_kv_heads=-(-cache.num_kv_heads // num_ranks)) if has_heads(cache) else cache
        for cache in spec.caches
    )
    return replace(spec, caches=caches, num_heads=num_heads)


def own_query_heads(spec: ModelSpec, num_ranks: int) -> int | None:
    """Return the query heads of a rank; None where each has all: kv heads cannot be divided alike in all layers."""
    kv_heads = {cache.num_kv_heads for cache in spec.caches if has_heads(cache)}
    own = {spec.num_heads // G * -(-G // num_ranks) for G in kv_heads}
    return own.pop() if len(own) == 1 and min(kv_heads) > 1 else None


def has_heads(cache: LayerCacheSpec) -> TypeGuard[AttentionSpec]:
    """Return whether a cache is one of attention, whose heads may lie on several ranks."""
    return isinstance(cache, FullAttentionSpec | SlidingWindowSpec) and not isinstance(cache, DraftHeadSpec)


@dataclass(frozen=True)
class HeadPart:
    """The heads of an attention that a rank has, and the columns of its rows [q | k | v]."""

    op: Attend
    kv_heads: Tensor  # int64 [g]

    @property
    def query_heads(self) -> Tensor:
        """The heads of q that read them, int64 [R g]."""
        H, G, _ = self.op.heads
        return expand(self.kv_heads, H // G)

    @property
    def columns(self) -> Tensor:
        """The columns of the whole rows, int64 [n]."""
        H, G, D = self.op.heads
        q = expand(self.query_heads, D)
        if not self.op.has_kv:
            return q
        k = H * D + expand(self.kv_heads, D)
        v = (H + G) * D + expand(self.kv_heads, self.op.v_dim)
        return torch.cat((q, k, v))

    def attend(self, qkv: Buffer, out: Buffer) -> Attend:
        """Return the attention of these heads alone."""
        p = self.op.params
        query_heads = self.query_heads
        params = replace(
            p,
            alibi_slopes=None if p.alibi_slopes is None else p.alibi_slopes[query_heads],
            sink_logits=None if p.sink_logits is None else p.sink_logits[query_heads],
            key_offset=None if p.key_offset is None else p.key_offset[self.kv_heads],
            first_head=int(self.kv_heads[0]),
        )
        heads = len(query_heads), len(self.kv_heads), self.op.heads[2]
        return replace(self.op, qkv=qkv, out=out, heads=heads, params=params)


class Sharding:
    """The state of a pass: what a rank has of matrices that several operations use."""

    def __init__(self, spec: ModelSpec, group: ProcessGroup, key_factors: dict[int, Tensor]):
        self.group = group
        self.has_all_heads = own_query_heads(spec, group.size) is None
        self.key_factors = key_factors
        # By matrix: the rows that were selected last. A matrix that is gone is forgotten.
        self._selected: MutableMapping[Weight, tuple[Tensor, Weight]] = WeakIdKeyDictionary()

    def shard(self, operations: Iterable[Operation]) -> Iterator[Operation]:
        """Yield what a rank computes in place of each operation."""
        held: list[Operation] = []  # a product, and what changes its output in place
        for op in operations:
            if held and op.out == held[0].out and isinstance(op, Norm | Scale | ops.Clip | ops.ScaleByPosition):
                held.append(op)
            elif isinstance(op, Attend):
                yield from self._divide_attention(held, op)
                held = []
            elif held and isinstance(op, ops.Activate) and op.x == held[0].out and len(held) == 1:
                yield from self._divide_activation(held[0], op)
                held = []
            else:
                yield from self._divide_rows(held)
                held = [op] if isinstance(op, MatMul) and not op.add else []
                if not held:
                    yield from self._divide(op)
            del op  # its weights may be freed before the next ones are read
        yield from self._divide_rows(held)

    def _divide(self, op: Operation) -> Iterator[Operation]:
        """Yield what a rank computes in place of an operation that stands alone."""
        if isinstance(op, MatMul):
            yield from self._divide_rows([op])
        elif isinstance(op, ops.Embed) and self._can_divide(op.table.shape[0]):
            index = self._part(op.table.shape[0], TILE_ROWS)
            part = Buffer(f"part of an embedding {op.out.width}", op.out.width)
            first = self.group.rank * len(index)  # a rank may begin behind the last row: then it finds no token
            yield replace(op, out=part, table=self._select(op.table, index), first=first)
            yield ops.AllReduce(part, op.out, self.group)
        elif isinstance(op, ops.MixExperts) and op.experts.num_experts >= self.group.size:
            yield from self._divide_experts(op)
        else:
            yield op

    def _divide_rows(self, held: Sequence[Operation]) -> Iterator[Operation]:
        """Yield a product of some rows, and the gathering of its whole output; then the other held operations."""
        if not held:
            return
        op, *others = held
        assert isinstance(op, MatMul)
        n = op.out.width
        if not self._can_divide(n):
            yield from held
            return
        index = self._part(n, TILE_ROWS)
        part = Buffer(f"part of rows {len(index)}", len(index))
        own = len(torch.unique_consecutive(index))
        if op.add:
            yield copy_run(op.out, part, int(index[0]), 0, own)
        yield self._select_product(op, index, part)
        yield from self._gather(part, op.out)
        yield from others

    def _divide_activation(self, product: Operation, op: ops.Activate) -> Iterator[Operation]:
        """Yield a product and an activation of some columns: of gates, and of what they multiply.

        No later operation may read the product's whole output, which is not computed.
        """
        assert isinstance(product, MatMul)
        n = op.out.width
        if not self._can_divide(n):
            yield product
            yield op
            return
        index = self._part(n, TILE_ROWS)
        rows = torch.cat((index, n + index)) if op.gated else index
        inputs = Buffer(f"part of inputs {len(rows)}", len(rows))
        part = Buffer(f"part of rows {len(index)}", len(index))
        yield self._select_product(product, rows, inputs)
        yield replace(op, x=inputs, out=part)
        yield from self._gather(part, op.out)

    def _divide_attention(self, held: Sequence[Operation], op: Attend) -> Iterator[Operation]:
        """Yield the attention of some heads. Where nothing before it needs whole rows, only theirs are computed."""
        if self.has_all_heads:
            yield from self._divide_rows(held)
            yield op
            return
        part = HeadPart(op, self._part(op.heads[1], 1))
        if op.cache in self.key_factors:
            self.key_factors[op.cache] = self.key_factors[op.cache][part.kv_heads]
        columns = part.columns
        qkv = Buffer(f"part of qkv {len(columns)}", len(columns))
        changes = [select_columns(x, columns, qkv) for x in held[1:]]
        if held and isinstance(held[0], MatMul) and held[0].out == op.qkv and None not in changes:
            yield self._select_product(held[0], columns, qkv)
            yield from (x for x in changes if x)
        else:
            yield from self._divide_rows(held)
            yield from copy_columns(op.qkv, columns, qkv)
        width = len(part.query_heads) * op.v_dim
        out = Buffer(f"part of o {width}", width)
        yield part.attend(qkv, out)
        yield from self._gather(out, op.out)

    def _divide_experts(self, op: ops.MixExperts) -> Iterator[Operation]:
        """Yield the sum of some experts, and that of all ranks."""
        e = op.experts
        begin, end = (rank * e.num_experts // self.group.size for rank in (self.group.rank, self.group.rank + 1))
        inner, outer = (torch.arange(begin * n, end * n) for n in (e.inner_size, e.hidden_size))
        experts = replace(
            e,
            num_experts=end - begin,
            gate_up=select_parts(e.gate_up, inner),
            down=select_parts(e.down, outer),
            gate_up_bias=None if e.gate_up_bias is None else e.gate_up_bias[inner],
            down_bias=None if e.down_bias is None else e.down_bias[outer],
            first=begin,
        )
        part = Buffer(f"part of experts {op.out.width}", op.out.width)
        yield replace(op, out=part, experts=experts, add=False)
        yield ops.AllReduce(part, op.out, self.group, op.add)

    def _can_divide(self, num_rows: int) -> bool:
        return num_rows >= TILE_ROWS * self.group.size

    def _part(self, n: int, unit: int) -> Tensor:
        """Return this rank's part of n things, int64: as many as the others have, a multiple of `unit`."""
        size = -(-n // (self.group.size * unit)) * unit
        return torch.arange(self.group.rank * size, (self.group.rank + 1) * size).clamp(max=n - 1)

    def _select(self, weight: Weight, index: Tensor) -> Weight:
        """Return rows of a matrix: the same ones as before where another operation asked for these."""
        if weight not in self._selected or not torch.equal(self._selected[weight][0], index):
            self._selected[weight] = index, select_parts(weight, index)
        return self._selected[weight][1]

    def _select_product(self, op: MatMul, index: Tensor, out: Buffer) -> MatMul:
        bias = None if op.bias is None else op.bias[index]
        return replace(op, out=out, weight=self._select(op.weight, index), bias=bias, rows=select_names(op.rows, index))

    def _gather(self, part: Buffer, out: Buffer) -> Iterator[Operation]:
        """Yield the all-gather of a part into `out`; columns behind its width are dropped."""
        width = part.width * self.group.size
        if width == out.width:
            yield AllGather(part, out, self.group)
            return
        parts = Buffer(f"parts of all ranks {width}", width)
        yield AllGather(part, parts, self.group)
        yield copy_run(parts, out, 0, 0, out.width)


def expand(index: Tensor, n: int) -> Tensor:
    """Return the numbers of n columns for each of these places, int64 [len(index) n]."""
    return (index[:, None] * n + torch.arange(n)).flatten()


def select_parts(weight: Weight, index: Tensor) -> Weight:
    """Return rows of a matrix; those of each part of a stack keep its kind."""
    parts = parts_of(weight)
    return stack_rows([select_rows(parts[i], own) for i, own in split_index([p.shape[0] for p in parts], index)])


def select_names(rows: tuple[NamedRows, ...], index: Tensor) -> tuple[NamedRows, ...]:
    """Return what a checkpoint calls these rows of a product; where it has none of a layer here, no rows of it."""
    if not rows:
        return ()
    found = list(split_index([x.num_rows for x in rows], index))
    missing = sorted(set(range(len(rows))) - {i for i, _ in found})
    return tuple(rows[i].select(own) for i, own in [*found, *((i, index[:0]) for i in missing)])


def split_index(sizes: Sequence[int], index: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the numbers of parts of these sizes that an index names, in its order, and each time the rows of the part.

    A part comes several times where others lie between its rows.
    """
    ends = torch.tensor(sizes).cumsum(0)
    found, counts = torch.unique_consecutive(torch.bucketize(index, ends, right=True), return_counts=True)
    for i, own in zip(found.tolist(), torch.split(index, counts.tolist()), strict=True):
        yield i, own - (int(ends[i]) - sizes[i])


def select_columns(op: Operation, columns: Tensor, out: Buffer) -> Operation | None:
    """Return an operation in place on some columns alone; None where it needs the others."""
    if isinstance(op, ops.Clip):
        return replace(op, out=out)
    if isinstance(op, Scale | ops.ScaleByPosition):
        n = len(op.factors) if isinstance(op, Scale) else op.n
        own = columns[columns < n]
        if not torch.equal(own, columns[: len(own)]):
            return None
        return (
            replace(op, out=out, factors=op.factors[own]) if isinstance(op, Scale) else replace(op, out=out, n=len(own))
        )
    if not isinstance(op, Norm) or not op.is_by_head or op.add or op.x != op.out:
        return None
    n = op.weight.shape[1]
    is_own = (columns >= op.first) & (columns < op.first + op.heads * n)
    places = torch.where(is_own)[0]
    own = columns[places] - op.first
    heads = own[::n] // n
    first = int(places[0]) if len(places) else 0
    is_whole = torch.equal(own, expand(heads, n)) and torch.equal(places, first + torch.arange(len(places)))
    return replace(op, x=out, out=out, weight=op.weight[heads], first=first) if is_whole and len(heads) else None


def copy_columns(x: Buffer, columns: Tensor, out: Buffer) -> Iterator[Operation]:
    """Yield copies of columns of x to those of out, one run of adjacent ones after another."""
    begin = 0
    ends = (torch.where(columns.diff() != 1)[0] + 1).tolist()
    for end in [*ends, len(columns)]:
        yield copy_run(x, out, int(columns[begin]), begin, end - begin)
        begin = end
