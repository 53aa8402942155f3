"""The eviction state of one row: when its policy evicts, and the holes that its next tokens fill."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.demoter import Demoter
from retain.kv.eviction.layerwise import LayerwisePrefill
from retain.kv.eviction.operations import compact, punch
from retain.kv.eviction.slot_scores import SlotScores
from retain.kv.eviction.view import KeyTransform
from retain.kv.memory.block_tables import UNBOUNDED, BlockTables
from retain.types import Ints


class BudgetEvictor:
    """Evict from the unwindowed layers [M] of one row as a resolved policy says.

    Where there are `holes` [M, G, n], the token at position `holes_from` + i is written into holes[..., i].
    """

    def __init__(self, policy: BudgetPolicy, tables: BlockTables, row: int, transform: KeyTransform):
        self.policy = policy
        self.tables = tables
        self.row = row
        self.layers = tables.full_layers(row)
        self.key_factors = transform.factors_of(tables.layers[self.layers], tables.kv.device)
        shape = len(self.layers), tables.counts.shape[2]
        self.head_budgets: Ints = np.full(shape, policy.budget_tokens, np.int32)  # tokens that each head keeps
        self.next_eviction = policy.next_eviction(0)  # computed tokens at that moment
        self.holes: Tensor | None = None
        self.holes_from = 0
        self.compacts_at = policy.prompt_len + policy.eviction_delay  # computed tokens when the budget begins
        self._num_left = 0  # tokens of all heads that have left the budget, so far
        self.slot_scores = SlotScores(tables.store, transform, self.key_factors)
        self.demoter = Demoter(policy, tables, row, self.layers, self.key_factors) if policy.demote else None
        self.layerwise: LayerwisePrefill | None = None  # until the prompt is computed
        if policy.prefill == "layers" and policy.prompt_len > policy.budget_tokens:
            self.layerwise = LayerwisePrefill(policy, tables, row, self.layers, self.key_factors)
        tables.capacity[row, self.layers] = min(policy.prefill_slots, tables.max_pages * tables.page_size)
        if policy.prompt_len > policy.budget_tokens:  # a streamed prompt takes all its slots at once, and reuses them
            tables.headroom[row, self.layers] = UNBOUNDED if policy.prefill == "stream" else policy.interval
        tables.mark_dirty(row, dense=False)

    @property
    def scratch_pages(self) -> Ints:
        """Pages that the row holds beside its tables."""
        scratch = self.layerwise.scratch if self.layerwise else None
        spare = self.demoter.spare if self.demoter else np.zeros(0, np.int32)
        return spare if scratch is None else scratch.ravel()

    @property
    def num_evicted(self) -> int:
        """Slots of all heads that were evicted so far. Where tokens are demoted, the host waits for the device."""
        return self._num_left - (self.demoter.num_tokens if self.demoter else 0)

    def begin_reserve(self) -> bool:
        """Take scratch pages where the prompt goes layer by layer. False if there are too few.

        Pages for demoted tokens are free until they are reserved again: a second reading of the prompt comes first.
        """
        if self.demoter:
            self.demoter.release()
        return self.layerwise is None or self.layerwise.allocate()

    def finish_reserve(self, end_position: int, pages_after_demotion: Callable[[BudgetPolicy, int], int]) -> bool:
        """Own the pages of the tokens that are demoted when `end_position` are computed. False if there are too few.

        `pages_after_demotion(policy, length)` returns the most pages of a head then, see GroupPlanner.
        """
        if self.demoter and self.demotes_by(end_position):
            num_pages = self.head_budgets.size * pages_after_demotion(self.policy, end_position)
            if not self.demoter.reserve(end_position, num_pages):
                return False
        if self.layerwise and self.layerwise.scratch is not None:  # in one layer at a time
            t = self.tables
            layer = self.layers[0]
            t.peaks[self.row, layer] = t.counts[self.row, layer] + self.layerwise.scratch.shape[1]
        return True

    def demotes_by(self, num_computed_tokens: int) -> bool:
        """Return whether tokens are demoted when so many are computed."""
        return num_computed_tokens >= self.next_eviction and self.policy.demoted_slots(num_computed_tokens) > 0

    def evict(self, num_computed_tokens: int) -> None:
        """Evict, because `next_eviction` is reached.

        At the end of the prompt, or so many tokens later as the policy waits, the budget begins: what stays is
        compacted, and the layers never grow again. Later the slots of the interval fill up and are emptied.
        """
        policy = self.policy
        self.next_eviction = policy.next_eviction(num_computed_tokens)
        if num_computed_tokens < policy.prompt_len:
            self._punch_chunk(num_computed_tokens)
        elif num_computed_tokens < self.compacts_at:  # what slots have now, before the answer adds to it
            self.slot_scores.update(policy, self._layer_tables(), num_computed_tokens - 1)
            return
        elif num_computed_tokens > self.compacts_at:
            used = self.head_budgets + np.int32(policy.interval)
            self._punch(num_computed_tokens, used, policy.interval)
        elif num_computed_tokens > policy.budget_tokens:
            if policy.prefill == "stream" and self.demoter:  # the last chunk is demoted as the others were
                self._punch_chunk(num_computed_tokens)
            if policy.prefill != "layers":
                self._compact(num_computed_tokens, None)
            self.tables.capacity[self.row, self.layers] = 1  # from now on slots are holes, not a closed form
        self._publish(num_computed_tokens)

    def finish_layer(self, layer: int) -> None:
        """Evict from a layer right after its attention, where the prompt goes layer by layer."""
        assert self.layerwise
        if self.layerwise.finish_layer(layer):
            self.holes = self.layerwise.holes
            self.holes_from = self.policy.prompt_len
            self.layerwise = None
            self._upload_holes()

    def shrink(self, num_computed_tokens: int) -> bool:
        """Halve the budget, where the policy allows it. Returns whether pages were freed."""
        smaller = self.policy.halved()
        counts = self.tables.counts[self.row]
        if smaller is None or self.holes is None or num_computed_tokens < self.policy.prompt_len:
            return False
        before = int(counts.sum())
        protected = smaller.sinks + smaller.recent.resolve(smaller.budget_tokens)
        budgets = torch.from_numpy(self.head_budgets).long() * smaller.budget_tokens // self.policy.budget_tokens
        self.policy = smaller
        self._compact(num_computed_tokens, budgets.clamp(min=protected))
        self.next_eviction = num_computed_tokens + smaller.interval
        self._publish(num_computed_tokens)
        return int(counts.sum()) < before

    def _compact(self, num_computed_tokens: int, head_budgets: Tensor | None) -> None:
        t = self.tables
        policy = self.policy
        last = num_computed_tokens - 1
        pages = self._layer_tables()
        scores = self.slot_scores.update(policy, pages, last)
        demoted = self.demoter.take(pages, last, scores) if self.demoter and not self.demoter.has_begun else None
        done = compact(t.store, pages, policy, last, head_budgets, slot_scores=scores, key_factors=self.key_factors)
        self.head_budgets = done.head_budgets
        self.holes = done.holes
        self.holes_from = num_computed_tokens
        counts = -(-(self.head_budgets + policy.interval) // t.page_size)
        self._trim_pages(counts)
        if self.demoter and demoted:
            self.demoter.begin(*demoted, num_computed_tokens)
        self.slot_scores.keep(done.places, int(counts.max()) * t.page_size)

    def _punch_chunk(self, num_computed_tokens: int) -> None:
        """Evict all tokens over the budget, behind a chunk of a streamed prompt."""
        owned = self.tables.counts[self.row, self.layers] * np.int32(self.tables.page_size)
        self._punch(num_computed_tokens, owned, int(owned.min()) - self.policy.budget_tokens)

    def _punch(self, num_computed_tokens: int, slots_used: Ints, n: int) -> None:
        last = num_computed_tokens - 1
        pages = self._layer_tables()
        scores = self.slot_scores.update(self.policy, pages, last)
        victims = punch(self.tables.store, pages, self.policy, last, slots_used, n, scores, self.key_factors)
        if self.demoter:
            self.demoter.add(victims, last, scores)
        self.holes = victims.slots
        self.holes_from = num_computed_tokens

    def _publish(self, num_computed_tokens: int) -> None:
        """Count evicted slots, and tell the tables about holes."""
        kept = int(np.minimum(self.head_budgets, num_computed_tokens).sum())
        self._num_left = num_computed_tokens * self.head_budgets.size - kept
        self._upload_holes()

    def _upload_holes(self) -> None:
        self.tables.mark_dirty(self.row)
        if self.holes is not None:
            self.tables.device.set_holes(self.row, self.layers, self.holes)

    def _layer_tables(self) -> Ints:
        """Return the tables of the layers, [M, G, n]; entries beyond a head's pages are the trash page."""
        n = int(self.tables.counts[self.row, self.layers].max())
        pages: Ints = np.where(self.tables.owned(self.row), self.tables.pages[self.row], 0)[self.layers, :, :n]
        return pages

    def _trim_pages(self, counts: Ints) -> None:
        """Free all but the first `counts` [M, G] pages of each head."""
        t = self.tables
        over = t.owned(self.row)[self.layers] & (np.arange(t.pages.shape[3]) >= counts[..., None])
        t.pool.free(t.pages[self.row, self.layers][over])
        t.counts[self.row, self.layers] = counts
