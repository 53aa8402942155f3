"""What short convolutions and linear attention compute, in float32, one request and one head at a time.

A step reads what it needs of earlier tokens from slots, and its own tokens from its rows. Tokens whose slot is in the
trash page are not written: the step has later ones that take the room.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kernels.api import KV, GroupInputs
from retain.kernels.linear_attention import GatedDeltaRule, LinearAttention, Mamba2Rule


def convolve(x: Tensor, inputs: GroupInputs, positions: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return causal convolutions [T, C] of rows x [T, C] with weight float32 [C, W], and write the rows into slots."""
    C, W = weight.shape
    rows = x.float()
    kv = inputs.kv
    t = inputs.tables
    out = torch.empty_like(rows)
    starts = t.query_start_loc.tolist()
    for b, row in enumerate(t.rows.tolist()):
        begin = starts[b]
        end = starts[b + 1]
        if begin == end:
            continue
        pages = t.pages[row, :, : int(t.counts[row, 0])].long()  # [G, n]: a ring has as many in each head
        held = kv.pos[pages[0]].flatten()
        slots = torch.cat([kv.k[pages], kv.v[pages]], -1).flatten(1, 2)  # [G, n S, C / G]
        before = rows.new_zeros(W - 1, C)
        for i in range(W - 1):
            position = int(positions[begin]) - (W - 1) + i
            found = (held == position).nonzero().flatten()
            if len(found) and position >= 0:  # a hole has position -1
                before[i] = slots[:, found[0]].flatten()
        text = torch.cat([before, rows[begin:end]])
        y = torch.zeros(end - begin, C) if bias is None else bias.expand(end - begin, C).clone()
        for i in range(W):
            y = y + weight[:, i] * text[i : i + end - begin]
        out[begin:end] = y
    heads = rows.view(len(rows), -1, kv.k_dim + kv.v_dim)
    _write(kv, inputs.slot_mapping, heads[..., : kv.k_dim], heads[..., kv.k_dim :], positions)
    return out.to(x.dtype)


def attend_linearly(
    qkv: Tensor, gates: Tensor, tokens: GroupInputs, states: GroupInputs, positions: Tensor, p: LinearAttention
) -> Tensor:
    """Return outputs [T, value heads * v_dim] for rows [q | k | v] and rows of gates; write slots and states."""
    H = p.num_value_heads
    D = p.k_dim
    V = p.v_dim
    R = H // p.num_key_heads
    q, k, v = torch.split(qkv.float(), [p.num_key_heads * D, p.num_key_heads * D, H * V], dim=1)
    steps = F.softplus(gates[:, :H].float() + p.time_bias)  # [T, H]
    if isinstance(p.rule, Mamba2Rule):
        steps = steps.clamp(*p.rule.time_step_limits)
        factors = steps
    else:
        factors = gates[:, H:].float().sigmoid()
    g = p.decay * steps
    out = torch.zeros(len(qkv), H, V)
    starts = tokens.tables.query_start_loc.tolist()
    for b, row in enumerate(tokens.tables.rows.tolist()):
        for h in range(H) if starts[b] < starts[b + 1] else ():
            head = _Head(tokens, states, row, h, int(positions[starts[b]]), p)
            for t in range(starts[b], starts[b + 1]):
                key = slice(h // R * D, (h // R + 1) * D)
                value = v[t, h * V : (h + 1) * V]
                out[t, h] = head.step(t, int(positions[t]), q[t, key], k[t, key], value, g[t, h], factors[t, h])
    if isinstance(p.rule, Mamba2Rule):
        out = out + p.rule.skip[:, None] * v.view_as(out)
    return out.flatten(1).to(qkv.dtype)


class _Head:
    """One value head of a row: the state at the last page end, and the slots since then."""

    def __init__(self, tokens: GroupInputs, states: GroupInputs, row: int, h: int, position: int, p: LinearAttention):
        self.tokens = tokens
        self.states = states
        self.h = h
        self.k_dim = p.k_dim
        self.corrects = isinstance(p.rule, GatedDeltaRule)
        self.fold = states.kv.page_size
        base = position // self.fold * self.fold
        self.state = _read_state(states, row, h, base, p)  # [D, V]
        kv = tokens.kv
        pages = tokens.tables.pages[row, h, : int(tokens.tables.counts[row, h])].long()
        pos = kv.pos[pages].flatten()
        order = ((pos >= base) & (pos < position)).nonzero().flatten()
        order = order[pos[order].argsort()]
        k = kv.k[pages].flatten(0, 1)[order]
        self.k = list(k[:, : p.k_dim])
        self.decays = list(k[:, p.k_dim])
        self.u = list(kv.v[pages].flatten(0, 1)[order])

    def step(self, t: int, position: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, factor: Tensor) -> Tensor:
        """Return the output of one token, and write what it leaves. What it adds to the state is times `factor`."""
        decay = self.decays[-1] + g if self.decays else g
        u = factor * (v - self._read(k, decay)) if self.corrects else factor * v
        o = self._read(q, decay) + (k @ q) * u
        self.k.append(k)
        self.decays.append(decay)
        self.u.append(u)
        self._write(t, position)
        if position % self.fold == self.fold - 1:
            self._fold(t, decay)
        return o

    def _read(self, x: Tensor, decay: Tensor) -> Tensor:
        """Return the product of x with the state before a token, whose sum of log decays is given."""
        found = torch.exp(decay) * (x @ self.state)
        for k_j, decay_j, u_j in zip(self.k, self.decays, self.u, strict=True):
            found = found + torch.exp(decay - decay_j) * (k_j @ x) * u_j
        return found

    def _write(self, t: int, position: int) -> None:
        extended = torch.cat([self.k[-1], self.decays[-1][None], torch.zeros(7)])
        pos = torch.tensor([position], dtype=torch.int32)
        slot = self.tokens.slot_mapping[self.h : self.h + 1, t : t + 1]
        _write(self.tokens.kv, slot, extended.view(1, 1, -1), self.u[-1].view(1, 1, -1), pos)
        kv = self.states.kv
        for place in self._state_slots(t):
            if place >= kv.page_size:
                kv.pos[place // kv.page_size, place % kv.page_size] = position

    def _fold(self, t: int, decay: Tensor) -> None:
        """Let the slots of a page become part of the state, and write it into the page of the token."""
        state = torch.exp(decay) * self.state
        for k_j, decay_j, u_j in zip(self.k, self.decays, self.u, strict=True):
            state = state + torch.exp(decay - decay_j) * k_j[:, None] * u_j
        self.state = state
        self.k = []
        self.decays = []
        self.u = []
        kv = self.states.kv
        for i, slot in enumerate(self._state_slots(t)):
            rows = state[2 * i * self.fold : 2 * (i + 1) * self.fold]
            if slot >= kv.page_size:
                kv.k[slot // kv.page_size, : len(rows[: self.fold])] = rows[: self.fold]
                kv.v[slot // kv.page_size, : len(rows[self.fold :])] = rows[self.fold :]

    def _state_slots(self, t: int) -> list[int]:
        """Return the slots of a token in the pages of the head's state, [parts]."""
        parts = _num_parts(self.states, self.k_dim)
        found: list[int] = self.states.slot_mapping[self.h * parts : (self.h + 1) * parts, t].tolist()
        return found


def _num_parts(states: GroupInputs, num_rows: int) -> int:
    """Return the pages of a state: each has two rows in a slot."""
    return -(-num_rows // (2 * states.kv.page_size))


def _read_state(states: GroupInputs, row: int, h: int, end: int, p: LinearAttention) -> Tensor:
    """Return the state [k_dim, v_dim] of a head behind the first `end` tokens, a multiple of the tokens of a page.

    It is in the page whose last slot has the last of these tokens. Where a load failed there is none: it is 0.
    """
    if not end:
        return torch.zeros(p.k_dim, p.v_dim)
    kv = states.kv
    parts = _num_parts(states, p.k_dim)
    found: list[Tensor] = []
    for g in range(h * parts, (h + 1) * parts):
        pages = states.tables.pages[row, g, : int(states.tables.counts[row, g])].long()
        place = (kv.pos[pages, -1] == end - 1).nonzero().flatten()
        if not len(place):
            return torch.zeros(p.k_dim, p.v_dim)
        page = pages[place[0]]
        found += [kv.k[page], kv.v[page]]
    return torch.cat(found)[: p.k_dim]


def _write(kv: KV, slot_mapping: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Store numbers [T, G, ...] and positions [T] in slots [G, T], but for slots of the trash page."""
    g, t = (slot_mapping >= kv.page_size).nonzero(as_tuple=True)
    slots = slot_mapping[g, t].long()
    page = slots // kv.page_size
    place = slots % kv.page_size
    kv.k[page, place] = k[t, g].to(kv.k.dtype)
    kv.v[page, place] = v[t, g].to(kv.v.dtype)
    kv.pos[page, place] = positions[t]
    kv.mass.transpose(1, 2)[page, place] = 0.0
