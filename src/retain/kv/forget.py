"""Which slots of a request stay, where its policy has to look: over all its layers and heads at once.

What is not known here: rows, requests, when to forget.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels import KV
from retain.kv.budget import Budget

Ints = NDArray[np.int32]
PROTECTED = 2**32  # in the place of a priority; above all of them


@dataclass
class Keeper:
    """The state of one row: `layers` forget as `policy` says, next when `due` tokens are computed.

    Where there are holes, fresh tokens come into them: that at position `since` + i into holes[..., i].
    """

    policy: Budget
    layers: Ints  # [M]
    due: int = 0
    since: int = 0
    holes: Ints | None = None  # slots [M, G, n]


def ranks(kv: KV, pages: Ints, policy: Budget, now: int) -> Tensor:
    """A number for every slot of tables [M, G, n], int64 [M, G, n S]: the lowest goes first. `now`: newest position.

    Holes are below everything and those that must stay above; older before newer where priorities are equal.
    """
    p = torch.from_numpy(pages).long()
    pos = kv.pos[p].flatten(-2)  # [M, G, n S]
    mass = kv.mass[p].sum(-2).flatten(-2)  # [M, G, n S]; of the query heads together
    bits = policy.priority(pos, mass, now).float().contiguous().view(torch.int32).long()
    order = 2**31 + torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # positive, in the order of the floats
    order = torch.where(policy.protected(pos, now), PROTECTED, order)
    return torch.where(pos < 0, -1, (order << 30) + pos)


def slots(pages: Ints, places: Tensor, page_size: int) -> Tensor:
    """Slot numbers of places [M, G, n] in tables [M, G, pages], int32."""
    table = torch.from_numpy(pages)
    return table.gather(-1, places // page_size) * page_size + (places % page_size).int()


def punch(kv: KV, pages: Ints, policy: Budget, now: int) -> Ints:
    """Make holes of all but `size` slots of each head. All holes that there are now, [M, G, n]."""
    rank = ranks(kv, pages, policy, now)
    places = rank.topk(rank.shape[-1] - policy.size, largest=False).indices
    gone = slots(pages, places, kv.page_size)
    kv.pos.view(-1)[gone.long()] = -1
    return gone.numpy()


def compact(kv: KV, backend: ModuleType, pages: Ints, policy: Budget, now: int) -> None:
    """Keep `size` slots of each head and move them to the front of their table; all others are holes."""
    n, S = policy.size, kv.page_size
    stay = ranks(kv, pages, policy, now).topk(n).indices.sort().values  # [M, G, n]
    src = slots(pages, stay, S).flatten(0, 1)
    dst = slots(pages, torch.arange(n).expand_as(stay), S).flatten(0, 1)
    backend.move(kv, src, dst)
    left = torch.from_numpy(pages).flatten(0, 1)[:, :, None] * S + torch.arange(S, dtype=torch.int32)  # [M G, pages, S]
    kv.pos.view(-1)[left.flatten(1)[:, n:].long()] = -1
