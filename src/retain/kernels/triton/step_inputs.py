"""A step as the operations of a program of this backend see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import Batch, GroupInputs
from retain.kernels.reference.operations import Step
from retain.kernels.slots.slot_rule import SlotRule
from retain.kernels.transfers import to_device, upload
from retain.kernels.triton import step_kernels
from retain.kernels.triton.kernel_args import array_args
from retain.kernels.triton.plan import AttentionPlan

BLOCK_TOKENS = 128  # of a program


@dataclass(frozen=True, kw_only=True)
class DeviceStep(Step):
    """The tensors of a batch on the device (see `Batch`), and what attention needs beside them."""

    groups: Sequence[GroupInputs]  # with slot mappings on the device
    caches: Sequence[tuple[int, int]]  # see Batch
    plans: Sequence[AttentionPlan | None]  # of each KV cache group; None where no attention reads it
    requests: Tensor  # int32 [B, 6]: a tile for each request (see plan.py), whatever its length
    before_attention: Callable[[int, Tensor], None] | None = None

    def use_cache(self, cache: int, q: Tensor | None = None) -> GroupInputs:
        """Return what a layer reads and writes of a cache; call what the caller wants before it.

        `q` are the queries [T, H, D] of an attention.
        """
        if self.before_attention:
            no_queries = torch.zeros(len(self.positions), 0, 0, device=self.positions.device)
            self.before_attention(cache, no_queries if q is None else q)
        group, index = self.caches[cache]
        return self.groups[group].for_layer(index)

    def plan(self, cache: int) -> AttentionPlan:
        """Return the plan of the attention to a cache."""
        plan = self.plans[self.caches[cache][0]]
        assert plan is not None
        return plan


def insert_pending_tokens(input_ids: Tensor, sources: Tensor, sampled: Tensor) -> None:
    """Replace ids [T] of pending tokens in place; all tensors are those of `PendingTokens`, on the device."""
    T = len(input_ids)
    step_kernels.insert_pending_tokens[(triton.cdiv(T, BLOCK_TOKENS),)](input_ids, sources, sampled, T, T=BLOCK_TOKENS)


@dataclass(frozen=True)
class FreshTokens:
    """What slots follow from beside tables, of each fresh token, int32 [T] on the device."""

    rows: Tensor
    positions: Tensor  # -1 for those of padding requests
    last_positions: Tensor  # the newest position of the token's request

    def map_slots(self, rule: SlotRule, hole_indices: Tensor, page_size: int, out: Tensor) -> None:
        """Write the slots of a group into `out` [L, G, T]. `hole_indices` are those of the rule, on the device."""
        L, G, T = out.shape
        has_holes = rule.hole_indices is not None and rule.holes.shape[-1] > 0
        holes = array_args(rule.holes, "holes", "hole_row", "hole_layer", "hole_head")
        if not has_holes:
            holes["holes"] = rule.pages  # which the kernel does not read
        step_kernels.map_slots[(triton.cdiv(T, BLOCK_TOKENS), L * G)](
            slots=out, rows=self.rows, positions=self.positions, last_positions=self.last_positions,
            hole_indices=hole_indices, tokens=T, **array_args(rule.capacity, "capacity", "capacity_row"), **holes,
            **array_args(rule.pages, "pages", "page_row", "page_layer", "page_head"),
            **array_args(rule.windows, "windows", "window_row"), **array_args(rule.ring_base, "ring_base", "base_row"),
            G=G, S=page_size, T=BLOCK_TOKENS, HOLES=has_holes, KEEPS_LAST=rule.keeps_last,
        )  # fmt: skip


def fresh_token_arrays(batch: Batch) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the row and the newest position of the request of each fresh token, int32 [T] each."""
    starts = batch.query_start_loc.numpy()
    counts = np.diff(starts)
    last = batch.positions.numpy()[np.maximum(starts[1:] - 1, 0)]
    return np.repeat(batch.rows.numpy(), counts), np.repeat(last, counts)


def upload_step(
    batch: Batch, plans: Sequence[AttentionPlan | None], requests: Tensor, device: torch.device
) -> DeviceStep:
    """Return a step on the device, where its `plans` are; `requests` are on the host, see DeviceStep."""
    pending = batch.pending_tokens
    rules = [group.slot_rule for group in batch.groups]
    none = batch.positions[:0]
    adapters = none if batch.adapters is None else batch.adapters
    indices = [none if rule is None or rule.hole_indices is None else rule.hole_indices for rule in rules]
    rows, last_positions = map(torch.from_numpy, fresh_token_arrays(batch)) if any(rules) else (none, none)
    inputs = batch.input_ids, batch.positions, batch.logits_indices, pending.sources if pending else none
    uploaded = upload((*inputs, requests, adapters, rows, last_positions, *indices), device)
    input_ids, positions, logits_indices, sources, requests, adapters, rows, last_positions, *indices = uploaded
    if pending:
        insert_pending_tokens(input_ids, sources, pending.sampled)
    fresh = FreshTokens(rows, positions, last_positions)
    return DeviceStep(
        input_ids=input_ids,
        positions=positions,
        logits_indices=logits_indices,
        groups=[_map_group(group, fresh, own, device) for group, own in zip(batch.groups, indices, strict=True)],
        hidden_states=batch.hidden_states,
        adapters=None if batch.adapters is None else adapters,
        caches=batch.caches,
        plans=plans,
        requests=requests,
        before_attention=batch.before_attention,
    )


def _map_group(group: GroupInputs, fresh: FreshTokens, hole_indices: Tensor, device: torch.device) -> GroupInputs:
    """Return the inputs of a group with the slots of its fresh tokens on the device."""
    if group.slot_rule is None:
        return replace(group, slot_mapping=to_device(group.slot_mapping, device))
    L, G, _ = group.slot_mapping.shape
    slots = torch.empty(L, G, len(fresh.positions), dtype=torch.int32, device=device)
    fresh.map_slots(group.slot_rule, hole_indices, group.kv.page_size, slots)
    return replace(group, slot_mapping=slots, slot_rule=None)
