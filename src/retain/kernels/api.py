"""Kernels: the only rooms that touch the bytes of keys and values.

A backend is a folder here and is found by its name: `load("cpu")`. It is a module with `DEVICES`, the types of device
that it computes on, and nine functions, which `reference` (plain torch) defines and every other backend must equal:

    allocate(n_pages, page_size, head_dim, dtype, columns, device)  -> KV: room for a pool of pages
    write(kv, slots, k, v, pos)                                     put fresh tokens into their slots
    attend(q, kv, tables, q_pos, scale, slopes, observe)   -> o     look by position, and leave mass where asked
    read(kv, pages)                                        -> k, v  what they hold, in float32
    copy(kv, src, dst)                                              copy whole pages
    move(kv, src, dst)                                              move slots
    lowest(priority, pos, used, sinks, after, n)           -> places which slots go first
    available()                                     -> str | None   why this backend cannot run here, or None
    program(dtype, device)                          -> Program | None

A program is a whole forward pass as a list of operations (see `Program`); a backend that has none computes layer by
layer in torch, with `write` and `attend` between.

How K and V lie inside a page is the backend's own affair (`KV.layout` names it); elsewhere a page is opaque bytes.
Positions and masses are not opaque: `KV.pos` and `KV.mass` are plain tensors; the cache reads them and punches holes.

    page p, head dim D, page_size S         k[p], v[p]   S x D numbers, in the backend's layout
                                            pos[p]       S x int32; -1 is a hole
                                            mass[p]      C x S x float32; what observed queries left on the slots

Slot number s is page s // S, place s % S. Page 0 is the trash page: nobody owns it and it holds only holes, so a
table may be padded with it. Who takes another page makes holes of its slots first; nothing else is promised of them.

What is not known here: requests, policies, budgets, layers' meanings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.quantized import Weight

NO_WINDOW = 2**31 - 1  # a window that nothing falls out of
CPU = torch.device("cpu")


@dataclass(frozen=True)
class KV:
    """The memory of a pool of P pages of S slots. Shapes of `k` and `v` depend on `layout`.

    `mass` has a column for each query head of a kv head (C = R), or one for their sum (C = 1).
    """

    k: Tensor
    v: Tensor
    pos: Tensor  # int32 [P, S]
    mass: Tensor  # float32 [P, C, S]
    page_size: int
    head_dim: int
    layout: str

    @property
    def dtype(self) -> torch.dtype:
        """Of K and V."""
        return self.k.dtype

    @property
    def num_pages(self) -> int:
        """P, the trash page among them."""
        return self.pos.shape[0]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.pos.device

    def to_index(self, indices: NDArray[np.int32]) -> Tensor:
        """Numbers of pages or slots as they are asked for there, int64."""
        return torch.from_numpy(indices).long().to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Tables:
    """Whose pages the fresh tokens of a step look at, in one layer. All int32.

    Those of all layers have an L before the shapes of the first three.

    pages   [N, G, n]  page numbers of kv head g of the request in row N; entries from `counts` on mean nothing
    counts  [N, G]     how many of them are owned
    windows [N]        how far back the request in row N sees; NO_WINDOW where nothing falls out
    sinks   [N]        how many first positions it sees anyway
    rows    [B]        the row of each request of this step
    starts  [B + 1]    fresh tokens starts[b] : starts[b + 1] belong to request b
    dense   [N]        1: place i of every table without a window holds position i or a hole, so nobody has to look

    `rows` and `starts` are the host's, for they say what work there is; the others lie where the pool does. No head of
    these rows owns more than `most` pages, where that is known.
    """

    pages: Tensor
    counts: Tensor
    windows: Tensor
    sinks: Tensor
    rows: Tensor
    query_start_loc: Tensor
    dense: Tensor | None = None
    max_pages: int | None = None

    def for_layer(self, layer: int) -> Tables:
        """Those of one layer out of those of all."""
        return replace(self, pages=self.pages[layer], counts=self.counts[layer], windows=self.windows[layer])


# Kinds of noise. Their means and deviations are those of Keyformer's Gumbel (arXiv 2403.09054, table 4).
NO_NOISE, GUMBEL, GAUSSIAN, CONSTANT = range(4)


@dataclass(frozen=True)
class AttentionScoring:
    """What the fresh queries of a step leave on the slots of their request:

        mass = decay * mass + sum over its fresh queries of weight * softmax((x + noise) / tau)

    x are a query's scores, bias and what it does not see included; what it attends to is not changed. H2O is weight 1
    (arXiv 2306.14048, accumulated attention), Keyformer the same with its noise and tau (arXiv 2403.09054, eq. 9 and
    algorithm 1). Requests with a window are not observed: what they forget is known. Nor are those
    without fresh tokens. An observed request shares no page.

    The noise is a hash of (seed, layer, kv head, position of the slot) and, where it is drawn `anew`, of the query's
    position: nothing is stored, and every backend draws the same. Query heads that share a kv head share it.
    """

    weights: Tensor  # float32 [T]
    temperature: Tensor  # float32 [T], above 0
    decay: Tensor  # float32 [B]
    noise: Tensor  # int32 [B], one of the kinds above
    seed: Tensor  # int32 [B]
    redraw_noise: Tensor  # int32 [B]: 1, or 0 for noise drawn once


class Program(Protocol):
    """A forward pass as operations over buffers, which are numbers and hold a float32 row for every fresh token.

    Every operation raises ValueError where the widths of its buffers do not fit. `add`: to what `out` holds.
    """

    def buffer(self, name: str, width: int) -> int:
        """Rows of `width` numbers. The same name is the same buffer, so layers share them."""
        ...

    def logits_buffer(self, width: int) -> int:
        """The buffer that `run` returns, [N, width]."""
        ...

    def embedding(self, out: int, table: Weight, factor: float = 1.0) -> None:
        """out = factor * table[id]."""
        ...

    def position_embedding(self, out: int, table: Weight, offset: int = 0) -> None:
        """out += table[position + offset]."""
        ...

    def norm(
        self, x: int, out: int, weight: Tensor, bias: Tensor | None, eps: float, subtract_mean: bool, add: bool = False
    ) -> None:
        """out = norm(x) * weight + bias, by the deviation (`centred`) or the root of the mean square.

        weight [n], or [heads, n] where a row begins with so many heads, each normalised alone.
        """
        ...

    def linear(self, x: int, out: int, weight: Weight, bias: Tensor | None = None, add: bool = False) -> None:
        """out = x W^T + bias."""
        ...

    def activation(self, x: int, out: int, act: str, n: int, gated: bool = False) -> None:
        """out = act(x[:n]) for act silu, relu, gelu or gelu_tanh; `gated` times x[n : 2 n]."""
        ...

    def clip(self, x: int, limit: float) -> None:
        """Between -at and at, in place."""
        ...

    def rope(
        self, x: int, freqs: Tensor, attention_factor: float, interleaved: bool, heads: int, head_dim: int
    ) -> None:
        """Rotate the first 2 n numbers of the first `heads` heads by position; freqs [n]. See models/rope.py."""
        ...

    def attend(
        self, qkv: int, out: int, layer: int, heads: tuple[int, int, int], scale: float, alibi_slopes: Tensor | None
    ) -> None:
        """Write k and v of the rows [q | k | v] into their slots, then look; `heads` are H, G, D."""
        ...

    def gather_rows(self, x: int, out: int) -> None:
        """Only the rows whose logits are wanted; what follows sees only these."""
        ...

    def finalize(self) -> None:
        """Nothing more is added: matrices that were packed may go."""
        ...

    def run(
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
        """A step: ids int64 [T], pos int32 [T], slots int32 [L, G, T], wanted int64 [N] -> logits float32 [N, V].

        `tables` are those of all layers: pages [L, N, G, n], counts [L, N, G], windows [L, N]. `ids`, `pos`, `wanted`
        and `observe` are the host's; the rest, and the logits, lie where the pool does. The next step overwrites the
        logits. `before(layer, q)` is called before a layer writes and looks, with its queries [T, H, D], good until it
        returns; `after(layer)` when it has looked.
        """
        ...

    @property
    def weight_bytes(self) -> int:
        """Of all packed matrices."""
        ...


def page_bytes(page_size: int, head_dim: int, dtype: torch.dtype, score_columns: int = 1) -> int:
    """Bytes of one page: K, V, positions and masses."""
    return page_size * (2 * head_dim * dtype.itemsize + 4 + 4 * score_columns)
