"""The contract of a backend: the memory it works on, its functions, its programs, and two laws.

A backend is a package in this folder that implements `Backend` as a module. `reference` (plain torch) is the
definition of every function; `kernels.load(name)` finds a backend by the name of its folder.

Memory. A pool (`KV`) is P pages of S slots. A slot holds one token's K and V in one kv head of one layer, the token's
position, and the attention mass it has received. Slot number s is place s % S of page s // S.

    k[p], v[p]   S x k_dim and S x v_dim numbers, in the backend's own layout (`KV.layout` names it)
    pos[p]       S x int32; -1 marks a hole
    mass[p]      C x S x float32

Only the backend reads or writes K and V; other packages treat them as opaque bytes, page by page. Positions and masses
are plain tensors: the cache reads them, and punches holes by writing -1.

Ownership. The caller holds the pool and decides which request, layer and head owns a page. A backend touches only the
slots and pages that a call names, and remembers nothing about requests between calls. Page 0 is the trash page: no
request owns it and all of its slots stay holes, so 0 may pad a table or a slot mapping (with position -1). The caller
punches all slots of a page before the first use. Apart from that the content of a new page is undefined, but finite.

Visibility. A query at position p sees slot s iff `0 <= pos[s] <= p and p - pos[s] < window`.

Looks. Where `Tables.looks` gives a token n > 0, and its request has no window, it attends to few of the slots that it
sees. Slots 16 i to 16 i + 15 of a page are a group. A group that the token does not see whole is attended to. Of the
slots of the others the token chooses n: those with the largest product of weight and deviation, of equal ones the
newest. A weight is that of attention to the keys in 4 bits, the mean over the query heads of a kv head; a deviation is
the distance of a value from the mean of its group. For the slots of a group that it does not choose, it attends to that
mean, with the sum of their weights (as SparQ, arXiv 2312.04985, does with one mean of all values).

`KV.sketches` has what that needs. A page has its S keys in 4 bits, rounded from those that it stores (not in a pool of
4 bits: its own keys serve); then S / 16 means and S deviations in bfloat16. Whatever writes a slot writes its key in 4
bits, and computes the mean and deviations of its group; those of a group that is not full mean nothing. Tokens that see
all slots are before those of their request that look at few. A step in which tokens of a request look at few changes
none of its masses.

Laws, which the tests state as equalities:

1. Every backend and instruction set equals `reference`. Positions, copies, moves, victims and the rounding of stored
   K and V are equal to the bit; outputs and masses up to the rounding of the dtype in use (of queries, too).
2. Inside one backend and instruction set a token's bits depend neither on other requests of the step, nor on how its
   text is divided into steps or where its ring begins. (triton: for attention and the other requests only.)

Devices. Tensors lie on the pool's device; "host" tensors are small, to plan launches. A backend never waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.attention_params import AttentionParams
from retain.kernels.ops import Operation
from retain.kernels.pending_tokens import PendingTokens
from retain.kernels.slots.pool_dtypes import dtype_of_tensors
from retain.kernels.slots.reinterpret import PageFormat
from retain.kernels.slots.scoring import AttentionScoring
from retain.kernels.slots.slot_rule import SlotRule
from retain.kernels.transfers import to_device
from retain.kernels.weights.weight import Weight

NO_WINDOW = 2**31 - 1  # a window that every position is inside of
CPU = torch.device("cpu")


@dataclass(frozen=True)
class KV:
    """The memory of a pool: P pages of S slots. The shapes of `k` and `v` depend on `layout`."""

    k: Tensor
    v: Tensor
    pos: Tensor  # int32 [P, S]
    mass: Tensor  # float32 [P, C, S]: a column for each query head of a kv head (C = R), or for their sum (C = 1)
    page_size: int
    k_dim: int  # numbers of a key, and of a query
    v_dim: int  # numbers of a value, and of an output
    layout: str
    sketches: Tensor | None = None  # uint8 [P, n]: what looks choose slots by, in the backend's own layout
    file: PoolFile | None = None  # where K and V lie; else in memory
    resident: ResidentSlots | None = None  # of a pool with sketches in a file

    @classmethod
    def over(cls, k: Tensor, v: Tensor, format: PageFormat) -> KV:
        """Return a pool of layout "plain" over memory [P, ...] of K and V.

        Positions and masses are new, and 0. All slots of the trash page are holes.
        """
        pos = torch.zeros(len(k), format.page_size, dtype=torch.int32, device=k.device)
        pos[0] = -1
        mass = torch.zeros(len(k), format.score_columns, format.page_size, device=k.device)
        return cls(k, v, pos, mass, format.page_size, format.k_dim, format.v_dim, "plain")

    def with_sketches(self, page_bytes: int) -> KV:
        """Return the pool with sketches of so many bytes in a page; where they are 0, as it is.

        Raises ValueError where the pool lies in a file, and memory is too small for resident slots.
        """
        if not page_bytes:
            return self
        sketches = torch.zeros(self.num_pages, page_bytes, dtype=torch.uint8, device=self.device)
        kv = replace(self, sketches=sketches)
        return replace(kv, resident=self.file.resident_slots(kv)) if self.file else kv

    @property
    def sketch_bytes(self) -> int:
        """Return the bytes of the sketches of a page, 0 where there are none."""
        return 0 if self.sketches is None else self.sketches.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the pool; see pool_dtypes.py."""
        return dtype_of_tensors(self.k.dtype, self.v.dtype)

    @property
    def num_pages(self) -> int:
        """Return P, which includes the trash page."""
        return self.pos.shape[0]

    @property
    def device(self) -> torch.device:
        """Return the device of all tensors."""
        return self.pos.device

    def to_index(self, indices: NDArray[np.int32]) -> Tensor:
        """Return numbers of pages or slots as an int64 index on the pool's device."""
        return to_device(torch.from_numpy(indices).long(), self.device)


class ResidentSlots(Protocol):
    """Slots that are in memory, too, where K and V of the pool lie in a file: those that looks read last."""

    num_read: int  # slots that looks read, so far
    num_loaded: int  # of these, from the file

    def forget(self, pages: NDArray[np.int32], page_size: int) -> None:
        """Drop all slots of these pages, whose K and V may change in the file."""


class PoolFile(Protocol):
    """The file in which K and V of a pool lie."""

    def resident_slots(self, kv: KV) -> ResidentSlots:
        """Return memory for slots of a pool that lies here. Raises ValueError where it is too small."""


@dataclass(frozen=True)
class DemotedTables:
    """Tables of tokens whose slots take fewer bits than the pool's. All int32, with a leading L for all layers."""

    kv: KV  # the pool's pages as pages of those slots: what `reinterpret` returned
    pages: Tensor  # [N, G, n]
    counts: Tensor  # [N, G]
    max_pages: int | None = None  # an upper bound of `counts` of the step's rows, if known

    def for_layer(self, layer: int) -> DemotedTables:
        """Return the tables of one layer, given the tables of all layers."""
        return replace(self, pages=self.pages[layer], counts=self.counts[layer])


@dataclass(frozen=True)
class Tables:
    """The pages that the fresh tokens of a step attend to, in one layer (B requests, N rows, G kv heads). All int32.

    In the tables of all layers `pages`, `counts` and `windows` have a leading L.
    """

    pages: Tensor  # [N, G, n]: page numbers of each kv head of each row; undefined from counts[row, head] on
    counts: Tensor  # [N, G]: pages of each kv head
    windows: Tensor  # [N]: NO_WINDOW, or the number of latest positions that a query sees, its own included
    rows: Tensor  # host [B]: the row of each request of the step
    query_start_loc: Tensor  # host [B + 1]: fresh tokens query_start_loc[b] : query_start_loc[b + 1] are request b's
    dense: Tensor | None = None  # [N]: 1 if slot i of every table without a window holds position i or is a hole
    max_pages: int | None = None  # an upper bound of `counts`, if known
    demoted: DemotedTables | None = None  # queries attend to these tokens too, behind the others
    looks: Tensor | None = None  # host [T]: the slots of each head that a fresh token looks at; 0 for all

    def for_layer(self, layer: int) -> Tables:
        """Return the tables of one layer, given the tables of all layers."""
        demoted = self.demoted.for_layer(layer) if self.demoted else None
        pages = self.pages[layer]
        counts = self.counts[layer]
        windows = self.windows[layer]
        return replace(self, pages=pages, counts=counts, windows=windows, demoted=demoted)


@dataclass(frozen=True)
class EvictionLists:
    """Lists of slots that B rows evict from: one for each of M layers and G kv heads. All int32, on the device.

    The slots of a list are the first `slots_used` of its table.
    """

    pages: Tensor  # [N, L, G, n]: the tables of all rows and layers
    rows: Tensor  # [B]
    layers: Tensor  # [M]
    slots_used: Tensor  # [B, M, G]
    evictable: Tensor  # [B, 2]: the first and the last position that may be evicted; see `Backend.select_victims`
    by_mass: Tensor  # [B]: 1 where the priority of a slot is its mass, 0 where it is its position
    max_slots: int  # an upper bound of `slots_used`


@dataclass(frozen=True)
class GroupInputs:
    """What the layers of a KV cache group read and write in a step.

    `tables` and `slot_mapping` are of all L layers of the group, or of one of them, without the leading L.
    """

    kv: KV
    tables: Tables  # the pages that the tokens attend to
    slot_mapping: Tensor  # int32 [L, G, T]: the slot of each fresh token; of the trash page where it is not written
    slot_rule: SlotRule | None = None  # of all layers, on a device: gives the slots, and `slot_mapping` has T = 0

    def for_layer(self, index: int) -> GroupInputs:
        """Return the inputs of one layer, by its place in the group."""
        return GroupInputs(self.kv, self.tables.for_layer(index), self.slot_mapping[index])


@dataclass(frozen=True)
class Batch:
    """One step as flat tensors: T fresh tokens of B requests, one request behind the other.

    `caches` names, for each cache of the model, the group that has its slots, and its place in there. Rows and
    `query_start_loc` are the same in the tables of all groups.

    A program calls `before_attention(cache, q)` before a layer writes into a cache and attends to it. Its queries
    [T, H, D], rotated already, are valid until the call returns.
    """

    groups: Sequence[GroupInputs]
    caches: Sequence[tuple[int, int]]
    input_ids: Tensor  # host int64 [T]; undefined where a token is pending
    positions: Tensor  # host int32 [T]
    logits_indices: Tensor  # host int64 [N], ascending: the fresh tokens whose logits the caller needs
    scoring: AttentionScoring | None = None
    before_attention: Callable[[int, Tensor], None] | None = None
    pending_tokens: PendingTokens | None = None  # fresh tokens that only the device knows
    # Ranges [begin, end) of fresh tokens, ascending. A backend that rounds activations to 8 bits for quantized weights
    # rounds those of these tokens to bfloat16, in `MatMul` before `GatherRows`.
    bfloat16_rows: Sequence[tuple[int, int]] = ()
    # float32 [B, E] on the pool's device, for a program that loads them: before the first fresh token of each request.
    hidden_states: Tensor | None = None
    adapters: Tensor | None = None  # host int32 [T], of each fresh token: -1 for none; see `LowRank`

    def token_ids(self) -> Tensor:
        """Return the ids of all fresh tokens, int64 [T]: on the device if some are pending."""
        return self.pending_tokens.insert(self.input_ids) if self.pending_tokens else self.input_ids

    @property
    def rows(self) -> Tensor:
        """The row of each request, on the host [B]."""
        return self.groups[0].tables.rows

    @property
    def token_rows(self) -> Tensor:
        """The row of each fresh token, on the host [T]."""
        return self.rows.repeat_interleave(self.query_start_loc.diff())

    @property
    def query_start_loc(self) -> Tensor:
        """The first fresh token of each request, and the end of the last one, on the host [B + 1]."""
        return self.groups[0].tables.query_start_loc

    def cache(self, cache: int) -> GroupInputs:
        """Return what a layer reads and writes of a cache."""
        group, index = self.caches[cache]
        return self.groups[group].for_layer(index)


class Program(Protocol):
    """A forward pass: operations over buffers (see ops.py), which `run` executes for a step."""

    def load(self, operations: Iterable[Operation]) -> None:
        """Append operations. The weights of one are converted before the next one is asked for.

        Raises ValueError where the tensors of an operation do not fit its buffers.
        """

    def row_energies(self, weight: Weight, factors: Tensor) -> Tensor:
        """Return the sum of factors[i] * w[i]^2 over each row w, float32 [out], within rounding."""

    def compile_ahead(self, compute: Callable[[], None]) -> None:
        """Compile the kernels that the steps of `compute` need, before any is launched; what it computes means nothing.

        A program that has nothing to compile does not call it. Raises ValueError for a kernel that does not compile.
        """

    def run(self, batch: Batch) -> Tensor:
        """Compute one step: write the fresh tokens' K and V, attend, and return logits float32 [N, V].

        The next step overwrites the logits, which lie on the pool's device.
        """

    @property
    def hidden_states(self) -> Tensor | None:
        """The rows [N, E] of the buffer HIDDEN_STATES (ops.py) after a step, float32, where an operation writes it.

        The next step overwrites them.
        """

    @property
    def state_size(self) -> int:
        """Numbers of the hidden state that each request brings into a step; 0 where no operation loads it."""

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weight matrices, as the program stores them."""

    @property
    def vector_dtype(self) -> torch.dtype:
        """Return the dtype in which the program wants biases and the weights of norms."""


class Backend(Protocol):
    """The functions of a backend module. G, H and R are kv heads, query heads, and query heads of a kv head."""

    __name__: str
    DEVICES: tuple[str, ...]  # the types of torch.device it computes on
    DTYPES: tuple[torch.dtype, ...]  # the dtypes that it computes in
    POOL_DTYPES: tuple[torch.dtype, ...]  # the dtypes of its pools
    QUANTIZES_ACTIVATIONS: bool  # whether it rounds activations to 8 bits for quantized weights
    EXCHANGES_IN_MEMORY: bool  # whether its ranks exchange rows in memory that they share

    def unavailable_reason(self) -> str | None:
        """Return why the backend cannot run on this machine, or None if it can."""

    def program(self, dtype: torch.dtype, device: torch.device, beside: Program | None = None) -> Program:
        """Return an empty program. A backend without one of its own gives its functions to a ReferenceProgram.

        It holds no weight again that a program `beside` it, of the same backend, has converted.
        """

    def allocate(
        self,
        num_pages: int,
        page_size: int,
        k_dim: int,
        dtype: torch.dtype,
        score_columns: int = 1,
        device: torch.device = CPU,
        v_dim: int | None = None,
        page_bytes: tuple[int, int] | None = None,
    ) -> KV:
        """Allocate a pool with C = `score_columns`, and make the trash page all holes.

        `v_dim` is None where it is `k_dim`. `page_bytes` of K and of V are for pages that other slots need more room
        in. Raises ValueError if the backend does not support the dtype or a size, or if pages are too short.
        """

    def allocate_in_file(
        self, num_pages: int, format: PageFormat, page_bytes: tuple[int, int], folder: Path, memory_bytes: int
    ) -> KV:
        """Allocate a pool whose K and V lie in a file of a folder; it has no sketches yet.

        `memory_bytes` are for resident slots, of each format with sketches that the pool has. Raises OSError, and
        ValueError if they are too few or the backend has no such pools.
        """

    def reinterpret(self, kv: KV, format: PageFormat) -> KV:
        """Return the pages of a pool as pages of other slots, with positions and masses of their own.

        Their K and V share memory: a page is of one kind at a time. Raises ValueError if such a page is longer.
        """

    def write(self, kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
        """Store fresh tokens in their slots: K and V rounded to the pool's dtype, position, and mass 0.

        V becomes finite (`bound_values`), so that no hole reaches a result.
        slot_mapping int32 [G, T], distinct except for slots of the trash page; k [T, G, k_dim] and v [T, G, v_dim] of
        any float dtype; pos int32 [T]. Inputs may be strided, but the last dimension of k and v must be contiguous.
        """

    def attend(
        self,
        q: Tensor,
        kv: KV,
        tables: Tables,
        q_pos: Tensor,
        params: AttentionParams,
        *,
        scoring: AttentionScoring | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Return softmax(x) v of every fresh query over the visible slots of its own request; `params` say what x is.

        q [T, H, k_dim] with H = G * R, of any float dtype; query head h reads kv head h // R. q_pos int32 [T]. `tables`
        are one layer's. Slots hold keys less `params.key_offset` already. The result is [T, H, v_dim] in q's dtype, and
        0 for a query that sees nothing. `scoring` updates masses; `layer` only enters its noise.
        """

    def read_slots(self, kv: KV, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return K [..., k_dim] and V [..., v_dim] of slots int64 [...] in float32; numbers of holes are undefined."""

    def requantize(self, kv: KV, src: Tensor, to: KV, dst: Tensor, pos: Tensor) -> None:
        """Copy K, V (rounded as by `write`) and mass of slots int64 [n] to another pool, with positions int32 [n]."""

    def copy(self, kv: KV, src: Tensor, dst: Tensor) -> None:
        """Copy pages with positions and masses: src, dst int64 [n], without a page in common."""

    def move(self, kv: KV, src: Tensor, dst: Tensor) -> None:
        """Copy slots with positions and masses: M lists src, dst int32 [M, n]; lists share no page.

        A list is copied in order, and never writes a slot before it has read it. The caller punches what is left over.
        """

    def select_victims(
        self, priority: Tensor, pos: Tensor, lengths: Tensor, first_evictable: int, last_evictable: int, n: int
    ) -> Tensor:
        """Return the places of the n slots to evict first from each list, in that order: int64 [N, n].

        priority float32 and pos int32 [N, S]; lengths int32 [N] on the host: only the first lengths[i] >= n slots of
        list i are candidates. Positions before `first_evictable` and after `last_evictable` come last. See
        eviction_order.py for the order. Raises ValueError if a list is too short.
        """

    def punch(self, kv: KV, lists: EvictionLists, holes: Tensor, n: int) -> None:
        """Turn the n slots to evict first of each list into holes, and write their numbers to `holes`, in that order.

        The mass of a slot is that of its columns, added in their order. No list has fewer than n slots, and no page is
        in two of them. holes int32 [N, L, G, i], of all rows and layers: the first n of each list are written.
        """
