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

from retain.kernels import KV, Observe, Tables
from retain.kernels.matrix import Matrix
from retain.kernels.triton import attention, rows
from retain.kernels.triton.attention import Turn, tile
from retain.kernels.triton.graphs import Graphs
from retain.kernels.triton.step import Call, Step
from retain.kernels.widths import LOGITS, Widths, size

Op = Callable[[Step], None]


class TritonProgram:
    """See `Program`: operations over rows; `run` goes through all of them."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self._widths = Widths()
        self._ops: list[Op] = []
        self._turns: dict[int, Turn] = {}  # of buffers that are not turned yet
        self._dense: dict[int, tuple[ref[Matrix], Tensor]] = {}  # by id of the matrix
        self._bytes = 0
        self._heads = 0  # query heads of a kv head
        self._dim = 0
        self._graphs = Graphs(self._compute, device)

    # ---- the operations ------------------------------------------------------------------------------------------

    def buffer(self, name: str, width: int) -> int:  # noqa: D102
        number = self._widths.number(name, width)
        return self._widths.add(name, len(self._widths.numbers), width) if number is None else number

    def logits(self, width: int) -> int:  # noqa: D102
        return self._widths.add("logits", LOGITS, width)

    def lookup(self, out: int, table: Matrix, factor: float = 1.0) -> None:  # noqa: D102
        self._widths.looked_up(out, table.shape[1])
        weight = self._matrix(table)

        def op(s: Step) -> None:
            found = F.embedding(s.ids, weight)
            s.rows[out] = found if factor == 1 else found * factor

        self._ops.append(op)

    def lookup_position(self, out: int, table: Matrix, offset: int = 0) -> None:  # noqa: D102
        self._widths.looked_up(out, table.shape[1])
        weight = self._matrix(table)

        def op(s: Step) -> None:
            s.rows[out] = s.rows[out] + F.embedding((s.pos + offset).clamp(min=0), weight)  # nobody's is -1

        self._ops.append(op)

    def normalise(  # noqa: D102
        self, x: int, out: int, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, add: bool = False
    ) -> None:
        heads, n = self._widths.normalised(x, out, weight.shape, size(bias))
        w, b = self._vector(weight), None if bias is None else self._vector(bias)

        def op(s: Step) -> None:
            given = s.rows[x]
            to = s.rows[out] if add or out == x or heads > 1 else torch.empty_like(given)
            T, some = len(given), tile(len(given), 8 if n <= 256 else 1)
            if T:
                rows.norm[(triton.cdiv(T, some), heads)](
                    given, given.stride(0), to, to.stride(0), w, w if b is None else b, T, n, eps,
                    T=some, BLOCK=triton.next_power_of_2(n), CENTRED=centred, BIAS=b is not None, ADD=add,
                    num_warps=8 if n > 2048 else 4,
                )  # fmt: skip
            s.rows[out] = to

        self._ops.append(op)

    def linear(self, x: int, out: int, weight: Matrix, bias: Tensor | None = None, add: bool = False) -> None:  # noqa: D102
        self._widths.multiplied(x, out, weight.shape, size(bias))
        w, b = self._matrix(weight), None if bias is None else bias.to(self.device, self.dtype)

        def op(s: Step) -> None:
            if add and b is None:
                s.rows[out] = torch.addmm(s.rows[out], s.rows[x], w.T)
            else:
                y = F.linear(s.rows[x], w, b)
                s.rows[out] = s.rows[out] + y if add else y

        self._ops.append(op)

    def activate(self, x: int, out: int, act: str, n: int, gated: bool = False) -> None:  # noqa: D102
        self._widths.activated(x, out, n, gated)
        kind, block = rows.ACTIVATIONS[act], min(triton.next_power_of_2(n), 1024)

        def op(s: Step) -> None:
            given = s.rows[x]
            T, some = len(given), tile(len(given), 1)
            to = given.new_empty(T, n)
            if T:
                rows.activate[(triton.cdiv(T, some), triton.cdiv(n, block))](
                    given, given.stride(0), to, T, n, T=some, BLOCK=block, ACT=kind, GATED=gated
                )
            s.rows[out] = to

        self._ops.append(op)

    def clip(self, x: int, at: float) -> None:  # noqa: D102
        self._ops.append(lambda s: s.rows.update({x: s.rows[x].clamp(-at, at)}))

    def turn(self, x: int, freqs: Tensor, gain: float, pairs: bool, heads: int, head_dim: int) -> None:  # noqa: D102
        self._widths.turned(x, heads, head_dim, len(freqs))
        self._turns[x] = Turn(self._vector(freqs), gain, pairs)  # keys are turned where they are written

    def attend(  # noqa: D102
        self, qkv: int, out: int, layer: int, heads: tuple[int, int, int], scale: float, slopes: Tensor | None
    ) -> None:
        self._widths.attended(qkv, out, heads, size(slopes))
        H, G, D = heads
        self._heads, self._dim = H // G, D
        turn, alibi = self._turns.pop(qkv, None), None if slopes is None else self._vector(slopes)

        def op(s: Step) -> None:
            q, k, v = torch.split(s.rows[qkv].view(-1, H + 2 * G, D), [H, G, G], dim=1)
            if turn and len(q):
                some, given, q = tile(len(q), 8), q, torch.empty(len(q), H, D, dtype=q.dtype, device=q.device)
                rows.turn[(triton.cdiv(len(q), some), H)](
                    given, *given.stride()[:2], q, s.pos, len(q), turn.freqs, len(turn.freqs), turn.gain,
                    H=H, D=D, DP=triton.next_power_of_2(D), T=some, PAIRS=turn.pairs, num_warps=4 if some > 1 else 1,
                )  # fmt: skip
            if s.before:
                s.before(layer, q)
            attention.write(s.kv, s.slots[layer], k, v, s.pos, turn)
            o = attention.attend(q, s.kv, s.tables.of(layer), s.work, s.pos, scale, alibi, layer)
            s.rows[out] = o.flatten(1)
            if s.after:
                s.after(layer)

        self._ops.append(op)

    def pick(self, x: int, out: int) -> None:  # noqa: D102
        self._widths.picked(x, out)
        self._ops.append(lambda s: s.rows.update({out: s.rows[x] if s.wanted is None else s.rows[x][s.wanted]}))

    def finish(self) -> None:  # noqa: D102
        self._dense.clear()

    @property
    def weight_bytes(self) -> int:  # noqa: D102
        return self._bytes

    # ---- a step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
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
        T, (layers, _, G, _) = len(ids), tables.pages.shape
        if pos.shape != (T,) or slots.shape != (layers, G, T) or tables.starts.shape != (len(tables.rows) + 1,):
            raise ValueError(f"run: {T} ids, positions {list(pos.shape)} and slots {list(slots.shape)} do not fit")
        if not (before or after):
            found = self._graphs.run(Call(kv, tables, slots, ids, pos, wanted, observe), self._heads)
            if found is not None:
                return found
        work = attention.plan(tables, self._heads, self._dim, kv, observe)
        slots, ids, pos, wanted = (x.to(self.device, non_blocking=True) for x in (slots, ids, pos, wanted))
        return self._compute(Step(kv, tables, work, slots, ids, pos, wanted, before, after))

    def _compute(self, s: Step) -> Tensor:
        for op in self._ops:
            op(s)
        return s.rows[LOGITS].float()

    # ---- weights -------------------------------------------------------------------------------------------------

    def _matrix(self, matrix: Matrix) -> Tensor:
        """Dense, on the device; once, however often it is used (an embedding may be the head too)."""
        whose, dense = self._dense.get(id(matrix), (None, None))
        if dense is None or whose is None or whose() is not matrix:
            numbers = matrix if isinstance(matrix, Tensor) else matrix.dense(self.dtype)
            dense = numbers.to(self.device, self.dtype).contiguous()
            dense = dense.clone() if dense.data_ptr() == numbers.data_ptr() else dense  # what a file maps is not kept
            self._dense[id(matrix)] = ref(matrix), dense
            self._bytes += dense.numel() * dense.itemsize
        return dense

    def _vector(self, x: Tensor) -> Tensor:
        return x.to(self.device, torch.float32).clone().contiguous()
