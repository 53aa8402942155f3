"""Where fresh tokens are written, as tables on a device say it: a program there computes the slots."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SlotRule:
    """What the slots of a group's fresh tokens follow from: tables of N rows on the device, and the tokens' holes.

    The token at position p of row r has in head g of layer l the hole `holes[r, l, g, i]`, where `hole_indices` gives
    it i >= 0 and the layer has no window. Any other has slot `place % S` of page `pages[r, l, g, place // S]`, where
    `place = (p - ring_base[r, l]) mod capacity[r, l]`. With `keeps_last` a token whose place a later token of the step
    takes has slot 0. All int32.
    """

    pages: Tensor  # [N, L, G, n]
    windows: Tensor  # [N, L]
    ring_base: Tensor  # [N, L]
    capacity: Tensor  # [N, L]
    holes: Tensor  # [N, L, G, i]: slots
    hole_indices: Tensor | None  # host [T]: -1 for tokens that fill no hole; None if none does
    keeps_last: bool
