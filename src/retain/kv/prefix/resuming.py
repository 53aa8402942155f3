"""Rows with a budget go on from what an earlier row of the same text has kept: see eviction/evicted_state.py.

Evicted states lie in radix trees of their own, whose nodes hold no pages beside them. The root hash covers the tenant's
salt, the windows, the policy as the user wrote it, and the seed of its noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.evicted_state import EvictedState, EvictorState, used_pages
from retain.kv.eviction.evictor import BudgetEvictor
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.eviction.prompt_masses import read_masses, write_masses
from retain.kv.eviction.resumption import Resumption
from retain.kv.memory.block_layout import BlockLayout
from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.page_store import PageStore
from retain.kv.prefix.attach import AttachPlan, attach_pages
from retain.kv.prefix.windows import capture_sliding_windows
from retain.types import Ints


def state_root(root_hash: bytes, policy: EvictionPolicy, seed: int, in_prompt: bool = False) -> bytes:
    """Hash what every evicted state of this policy begins with; `root_hash` covers the salt and the windows."""
    kind = b"streamed" if in_prompt else b"evicted"
    key = (policy.streamed_key if in_prompt else policy.resume_key).encode(errors="surrogatepass")
    noise = seed.to_bytes(8, "little") if policy.uses_noise else b""
    return blake2b(root_hash + kind + noise + policy.weights_fingerprint + key, digest_size=16).digest()


def can_go_on(state: EvictedState, policy: BudgetPolicy) -> bool:
    """Return whether a text under a resolved policy may go on from a state of its root.

    One inside a prompt must have seen no more than the prompt, and the masses that this policy gives.
    """
    p = state.position
    return not state.in_prompt or (p < policy.prompt_len and policy.weighs_alike(state.policy, p))


def capture_evicted_state(
    groups: Sequence[BlockTables], evictors: Sequence[BudgetEvictor], position: int
) -> EvictedState | None:
    """Return the state of a row after `position` tokens, whose pages are held once more.

    None where it cannot go on: too much of a window is overwritten.
    """
    row = evictors[0].row
    windows = None
    if any(len(t.ring_layers(row)) for t in groups):
        windows = capture_sliding_windows(groups, row, position)
        if windows is None:
            return None
    parts = tuple(e.capture_state(position) for e in evictors)
    needs_masses = evictors[0].policy.score_key and parts[0].is_dense
    masses = read_masses(groups, row, position) if needs_masses else ()
    state = EvictedState(position, evictors[0].policy, parts, windows, masses=masses)
    groups[0].pool.incref(state.own_pages)
    return state


def copy_evicted_state(
    groups: Sequence[BlockTables], evictors: Sequence[BudgetEvictor], position: int
) -> EvictedState | None:
    """Return the state of a row that goes on after `position` tokens of a streamed prompt, in pages of its own.

    Its rings are shared from now on. None where it cannot go on, or the pool has no pages.
    """
    pool = groups[0].pool
    held = capture_evicted_state(groups, evictors, position)
    if held is None:
        return None
    if not pool.ensure_free(len(held.own_pages)):
        pool.free(held.page_list)
        return None
    if held.windows:
        for t in groups:
            t.note_shared_rings(evictors[0].row, position)
    parts = tuple(_copy_part(e, part) for e, part in zip(evictors, held.evictors, strict=True))
    pool.free(held.own_pages)
    return replace(held, evictors=parts, in_prompt=True)


def _copy_part(evictor: BudgetEvictor, part: EvictorState) -> EvictorState:
    demoter = part.demoter
    if demoter:
        assert evictor.tables.demoted
        pages = _copy_tables(evictor.tables.demoted.store, demoter.pages, demoter.counts)
        scores = None if demoter.scores is None else demoter.scores.clone()
        demoter = replace(demoter, pages=pages, scores=scores)
    pages = _copy_tables(evictor.tables.store, part.pages, part.counts)
    slot_scores, scored_pos = part.scores
    return replace(part, pages=pages, scores=(slot_scores.clone(), scored_pos.clone()), demoter=demoter)


def _copy_tables(store: PageStore, pages: Ints, counts: Ints) -> Ints:
    """Return tables [M, G, n] of new pages with the content of these."""
    found = np.zeros_like(pages)
    found[np.arange(pages.shape[-1]) < counts[..., None]] = store.copy_of(used_pages(pages, counts))
    return found


def attach_evicted_state(
    groups: Sequence[BlockTables], layout: BlockLayout, row: int, state: EvictedState, plan: Resumption
) -> bool:
    """Copy the pages of a state into the tables of an empty row, and share those of its windows.

    Demoted tokens are left to Demoter.resume. False, and nothing is attached, where the pool has too few pages for all
    that the row will own before its first eviction.
    """
    pool = groups[0].pool
    evicting = [t for t in groups if len(t.full_layers(row))]
    position = state.position
    pool.incref(state.page_list)  # before ensure_free, which may evict them
    num_pages = len(state.own_pages)
    for t, part, slots in zip(evicting, state.evictors, plan.slots, strict=True):
        num_pages += int(np.maximum(-(-slots // t.page_size) - part.counts, 0).sum())
    for t in groups:
        num_pages += len(t.ring_layers(row)) * t.counts.shape[2] * (position % t.page_size > 0)
    has_pages = pool.ensure_free(num_pages)
    if has_pages:
        rings = AttachPlan(position, np.zeros((0, 0), np.int32), state.windows)
        attach_pages(groups, layout, row, rings, must_copy=True)
        for t, part in zip(evicting, state.evictors, strict=True):
            layers = t.full_layers(row)
            width = part.pages.shape[-1]
            t.pages[row, layers, :, :width] = _copy_tables(t.store, part.pages, part.counts)
            t.counts[row, layers] = part.counts
            t.peaks[row] = t.counts[row]
            t.mark_dirty(row)
        if state.masses:
            write_masses(groups, row, position, state.masses)
    pool.free(state.page_list)
    return has_pages
