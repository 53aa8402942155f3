"""The slot algebra of a batch: which pages a request owns, and the slots of fresh tokens, in all layers and heads.

A request that runs has a row. Row, layer and kv head have a list of pages; row and layer have a ring, given by two
numbers:

    place(pos) = (pos - base) mod capacity          slot = pages[place // S] * S + place % S

`full` is a ring whose capacity is never reached. A ring of window W that is written T fresh tokens at a time has room
for W + T - 1 slots, so that no chunk overwrites a key that one of its own queries still sees; rounded up to whole
pages, and at least W + S - 1, so that no page ever mixes tokens that are alive with tokens that are not. That makes
`settle` a change of labels: after the prompt the pages with live tokens come first, the others go back, and nothing
moves.

        pages  | 8 9 | 2 3 | 4 5 | 6 7 |     S = 2, capacity 8, W = 3, next token 10: 8 and 9 (and 7) are alive
    settle ->  | 6 7 | 8 9 |                 base 6, capacity 4

The verbs: `open` a row, `grow` it (takes pages), `place` fresh tokens (their slots), `settle`, `close` (gives pages
back). What is not known here: what K and V look like, who is scheduled and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels import CPU, NO_WINDOW, page_bytes
from retain.kv import policies
from retain.kv.begin import SPARE, fork
from retain.kv.budget import Budget
from retain.kv.forget import Turn
from retain.kv.keeper import Keeper
from retain.kv.mirror import Mirror
from retain.kv.needs import UNBOUNDED, Needs, Shape
from retain.kv.policies import Policy
from retain.kv.pool import Pool
from retain.kv.reuse import PrefixConfig, PrefixCache
from retain.kv.witness import AttentionTrace

Ints = NDArray[np.int32]


class Cache(Needs):
    """Rows of tables over one pool of pages. `n_rows` requests may run at once, each up to `context` tokens long.

    `columns`: of masses, one for each query head of a kv head, or one for all. `turn`: keys to other positions, where
    the model turns them. `prefix`: what requests leave to others; None: nothing.
    """

    def __init__(
        self,
        shape: Shape,
        backend: ModuleType,
        dtype: torch.dtype,
        kv_memory: int,
        page_size: int,
        n_rows: int,
        context: int,
        step_tokens: int,
        columns: int = 1,
        turn: Turn | None = None,
        prefix: PrefixConfig | None = None,
        device: torch.device = CPU,
    ):
        L, G, n = len(shape.windows), shape.kv_heads, -(-context // page_size)
        super().__init__(shape, page_size, n_rows, context, step_tokens)
        self.page_bytes = page_bytes(page_size, shape.head_dim, dtype, columns)
        self.pool = Pool(
            1 + min(max(kv_memory // self.page_bytes - 1, 0), n_rows * L * G * n)
        )  # page 0 is paid for too
        self.kv = backend.allocate(self.pool.n_pages, page_size, shape.head_dim, dtype, columns, device)
        self.pages: Ints = np.zeros((n_rows, L, G, n + SPARE), np.int32)
        self.counts: Ints = np.zeros((n_rows, L, G), np.int32)
        self.peaks: Ints = np.zeros((n_rows, L, G), np.int32)  # most pages ever owned
        self.base: Ints = np.zeros((n_rows, L), np.int32)
        self.spare: Ints = np.zeros((n_rows, L), np.int32)  # slots owned beyond those of the tokens there are
        self.capacity: Ints = np.full((n_rows, L), UNBOUNDED, np.int32)
        self.window: Ints = np.full((n_rows, L), NO_WINDOW, np.int32)
        self.paid = [0] * n_rows  # positions below this have their pages in every layer
        self.settled = [False] * n_rows
        self.shift: Ints = np.zeros(n_rows, np.int32)  # position = place in the text - shift
        self.rows = list(range(n_rows - 1, -1, -1))  # free rows
        self.keepers: dict[int, Keeper] = {}  # of rows with a budget
        self.forgotten: Counter[str] = Counter()  # slots of rows that are closed, by policy
        self.backend, self.turn = backend, turn
        self.reuse: PrefixCache | None = None
        if prefix:
            self.reuse = PrefixCache(self, prefix)
            self.pool.reclaim = self.reuse.tree.evict
        self.mirror = Mirror(self.pages, self.counts, self.window, device)  # where the kernels read them

    # ---- what there is ---------------------------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        """Pages that can be taken now."""
        return self.pool.free + (self.reuse.tree.num_evictable_pages if self.reuse else 0)

    @property
    def total_pages(self) -> int:
        """Pages that the empty pool has."""
        return self.pool.n_pages - 1

    @property
    def free_rows(self) -> int:
        """Requests that may still be opened."""
        return len(self.rows)

    # ---- the life of a row ---------------------------------------------------------------------------------------

    def open(self, policy: Policy, owed: int) -> int:
        """A row for a request that owes `owed` tokens. It owns no pages yet."""
        row = self.rows[-1]
        self.window[row] = self.windows(policy)
        self.capacity[row] = self.capacities(self.window[row], min(owed, self.step_tokens))
        self.base[row] = self.counts[row] = self.peaks[row] = self.paid[row] = 0
        self.settled[row] = False
        self.spare[row] = self.shift[row] = 0
        layers = np.flatnonzero(self.window[row] == NO_WINDOW).astype(np.int32)
        if isinstance(policy, Budget):
            self.keepers[row] = Keeper(
                *(policy, layers, self.kv, self.backend, self.pool, self.pages[row], self.counts[row], self.turn)
            )
            self.capacity[row, layers] = min(policy.slots_of_prompt, (self.pages.shape[3] - SPARE) * self.page_size)
            if policy.prompt > policy.size:  # streams all at once: chunks come into holes
                self.spare[row, layers] = UNBOUNDED if policy.prefill == "stream" else policy.interval
        self.mirror.touch(row, dense=not isinstance(policy, Budget))
        self.rows.pop()  # nothing has failed
        return row

    def fork(self, row: int, policy: Policy, computed: int) -> int | None:
        """A row with what another has computed, its prompt, to go on under a policy of its own.

        Whole pages that neither will write are shared, the others copied. None where there are no pages or no row, or
        where the row was born evicted.
        """
        if not self.rows or (self.reuse and row in self.reuse.sparse_rows):
            return None
        return fork(self, row, policy, computed)

    def stretch(self, row: int, computed: int) -> int:
        """How many tokens of the row may be computed at once: no budget may be passed over."""
        keeper = self.keepers.get(row)
        return keeper.due - computed if keeper else UNBOUNDED

    def whole(self, row: int) -> bool:
        """Whether what the row owes up to its next moment of forgetting must be computed in one step."""
        keeper = self.keepers.get(row)
        return keeper is not None and keeper.layered

    def grow(self, row: int, upto: int) -> bool:
        """Own the pages for all positions below `upto`. False, and none taken for them, when the pool has too few."""
        keeper = self.keepers.get(row)
        if keeper and keeper.tries(upto) and not keeper.save():
            return False
        if keeper and keeper.layered and not keeper.borrow():
            return False
        if upto <= self.paid[row]:
            return True
        S = self.page_size
        had = self.counts[row]  # [L, G]
        slots = np.minimum(upto - self.base[row] + self.spare[row], self.capacity[row])  # [L]
        want = np.maximum(-(-slots // S)[:, None], had)
        n = int((want - had).sum())
        if not self.pool.room(n):
            return False
        if n:
            taken = self.pool.take(n)
            self.kv.pos[self.kv.index(taken)] = -1  # whoever had them before left positions behind
            j = np.arange(want.max())
            new = (j >= had[..., None]) & (j < want[..., None])  # [L, G, n]
            self.pages[row, :, :, : len(j)][new] = np.sort(taken)  # a head's pages side by side, as far as they go
            self.counts[row] = want
            np.maximum(self.peaks[row], self.counts[row], out=self.peaks[row])
            self.mirror.touch(row)
        if keeper and keeper.lent is not None:  # in one layer at a time
            layer = keeper.layers[0]
            self.peaks[row, layer] = self.counts[row, layer] + keeper.lent.shape[1]
        owned = want[:, 0] * S
        paid = np.where(owned >= self.capacity[row], UNBOUNDED, self.base[row] + owned - self.spare[row])
        self.paid[row] = int(paid.min())
        return True

    def place(self, rows: Ints, pos: Ints) -> Tensor:
        """The slots of fresh tokens of these rows at these places in their texts, both [T] -> int32 [L, G, T]."""
        S = self.page_size
        places = ((pos[:, None] - self.base[rows]) % self.capacity[rows]).T  # [L, T]
        L = len(places)
        pages = self.pages[rows, np.arange(L)[:, None], :, places // S]  # [L, T, G]
        slots = (pages * np.int32(S) + (places % S)[:, :, None].astype(np.int32)).transpose(0, 2, 1)  # [L, G, T]
        since = np.full(len(self.paid), UNBOUNDED, np.int64)  # from where on tokens of a row come into holes
        for row, keeper in self.keepers.items():
            mine = np.flatnonzero(rows == row)
            if len(mine) and (lent := keeper.borrowed(pos[mine])) is not None:
                slots[keeper.layers[:, None], :, mine] = lent.T
            elif keeper.holes is not None:
                since[row] = keeper.since
        whose = np.flatnonzero(pos >= since[rows])
        forget, inside = rows[whose], self.window[rows[whose]].T == NO_WINDOW
        return self.mirror.through(slots, whose, forget, pos[whose] - since[forget], inside)

    def lend(self, rows: Sequence[int], witnesses: Sequence[AttentionTrace | None]) -> Callable[[int], None] | None:
        """Before a step: whose prompt goes layer by layer looks at borrowed pages. Who computes calls what this returns
        when a layer has looked; None: there is no need.
        """
        pairs = zip(rows, witnesses, strict=True)
        keepers = {row: k.lend(witness) for row, witness in pairs if (k := self.keepers.get(row)) and k.layered}
        self.mirror.touched.update(keepers)

        def after(layer: int) -> None:
            for row, keeper in keepers.items():
                keeper.looked(layer)
                self.mirror.touch(row)
                if keeper.lent is None:
                    self._punched(row)

        return after if keepers else None

    def _punched(self, row: int) -> None:
        """A row's keeper has other holes."""
        keeper = self.keepers[row]
        self.mirror.touch(row)
        if keeper.holes is not None:
            self.mirror.punched(row, keeper.layers, keeper.holes)

    def settle(self, row: int, computed: int, owed: int) -> None:
        """So many tokens are computed, so many more owed. Budgets forget what is over them. Where nothing is owed, one
        token a step will follow: rings shrink to their window and give the rest back.
        """
        keeper = self.keepers.get(row)
        if keeper and computed >= keeper.due:
            if keeper.forget(computed):
                self.capacity[row, keeper.layers] = 1  # where its tokens go is no closed form
            self._punched(row)
        self.shift[row] = keeper.shift if keeper else 0
        if owed or self.settled[row]:
            return
        self.settled[row] = True
        S = self.page_size
        capacity = self.capacities(self.window[row], 1)
        given = []
        for layer in np.flatnonzero((capacity < self.capacity[row]) & (self.window[row] < NO_WINDOW)):
            n = int(self.counts[row, layer, 0])
            oldest = max(computed - int(self.window[row, layer]), 0)  # alive, or one more
            place = (oldest - self.base[row, layer]) % self.capacity[row, layer]
            first, base = int(place // S), oldest - int(place % S)
            keep = -(-(computed - base) // S)
            table = np.roll(self.pages[row, layer, :, :n], -first, axis=1)
            self.pages[row, layer, :, :n] = table
            given.append(table[:, keep:].ravel())
            self.base[row, layer], self.capacity[row, layer] = base, capacity[layer]
            self.counts[row, layer] = keep
            self.paid[row] = min(self.paid[row], base + keep * S)
        if given:
            self.pool.give(np.concatenate(given))
            self.mirror.touch(row)

    def shrink(self, row: int, computed: int) -> bool:
        """Halve the row's budget, where its policy allows it. Whether pages were given back."""
        keeper = self.keepers.get(row)
        given = keeper is not None and keeper.shrink(computed)
        if keeper:
            self._punched(row)
        self.shift[row] = keeper.shift if keeper else 0
        return given

    def rewind(self, row: int, computed: int) -> None:
        """Everything from position `computed` on was only tried."""
        self.keepers[row].rewind(computed)

    def reject(self, slots: Tensor) -> None:
        """Fresh tokens in these slots were only guesses: they are holes."""
        self.kv.pos.view(-1)[slots.long()] = -1

    def positions(self, row: int) -> list[list[list[int]]]:
        """Those in the slots of every layer and head, [L][G], in order."""
        tables = zip(self.pages[row], self.counts[row], strict=True)
        held = [[self.kv.pos[self.kv.index(t[:n])] for t, n in zip(*lg, strict=True)] for lg in tables]
        return [[pos[pos >= 0].sort().values.tolist() for pos in heads] for heads in held]

    def owned(self, row: int) -> list[int]:
        """For each layer the slots that one head of the row owns now, at most."""
        return [int(n) for n in self.counts[row].max(axis=1) * self.page_size]

    def held(self, row: int) -> int:
        """Pages that the row owns now, of all layers and heads."""
        return len(self._held([row]))

    def close(self, row: int) -> list[int]:
        """Give every page of the row back, and the row. Returns for each layer the most slots that one head owned."""
        if self.reuse:
            self.reuse.cancel_load(row)
        self.pool.give(self._held([row]))
        if keeper := self.keepers.pop(row, None):  # after its other pages were given
            self.forgotten[policies.named_by(keeper.policy)] += keeper.forgot
        self.counts[row] = 0
        self.rows.append(row)
        return [int(n) for n in self.peaks[row].max(axis=1) * self.page_size]

    # ---- what people and the accountant read ---------------------------------------------------------------------

    def check(self) -> None:
        """The accountant: every page is free, or in the tables of open rows or of the tree. Raises AssertionError."""
        held = self._held(set(range(len(self.paid))) - set(self.rows))
        self.pool.check(np.concatenate([held, self.reuse.tree.all_pages]) if self.reuse else held)

    def _held(self, rows: Sequence[int] | set[int]) -> Ints:
        r = np.array(sorted(rows), np.int64)
        owned = np.arange(self.pages.shape[3]) < self.counts[r][..., None]
        besides = [k.besides() for row, k in self.keepers.items() if row in rows]
        held: Ints = np.concatenate([self.pages[r][owned], *besides])
        return held
