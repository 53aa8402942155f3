"""The matrices of several adapters (LoRA), side by side: a program adds those that the tokens of a step name."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from retain.files import quote
from retain.formats.lora import LoRAAdapter, LowRankUpdate
from retain.kernels.api import CPU
from retain.kernels.ops import LowRank, MatMul, NamedRows

WHOLE_MODELS = ("model", "language_model", "transformer", "decoder")


@dataclass(frozen=True, eq=False)
class BankEntry:
    """The matrices of all adapters for some rows of a linear layer."""

    rows: NamedRows
    a: Tensor  # [n, rank, in]
    b: Tensor  # [n, rank, num_rows]

    def fits(self, update: LowRankUpdate) -> bool:
        """Return whether an update has the inputs of these rows, and their outputs."""
        return (len(update.b), update.a.shape[1]) == (self.rows.total, self.a.shape[2])

    def write(self, number: int, update: LowRankUpdate | None) -> None:
        """Put an update into place `number`; None for an adapter that adds nothing here."""
        self.a[number].zero_()
        self.b[number].zero_()
        if update is not None and self.rows.num_rows:
            b = update.b if self.rows.index is None else update.b[self.rows.index]
            self.a[number, : update.rank] = update.a.to(self.a)
            self.b[number, : update.rank] = b.T.to(self.b)


@dataclass(frozen=True, eq=False)
class AdapterBank:
    """Room for `size` adapters of a rank up to `max_rank`, in the dtype of a program's matrices.

    A program reads it at every step, so `write` changes what later steps compute.
    """

    size: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device = CPU
    entries: dict[str, list[BankEntry]] = field(default_factory=dict)  # by `layer_key`
    ranks: Tensor = field(init=False)  # int32 [n]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", torch.zeros(self.size, dtype=torch.int32, device=self.device))

    def make_operation(self, op: MatMul, rows: NamedRows, first: int) -> LowRank | None:
        """Return the operation that adds to what a product has given, from column `first` on, and make room for it.

        None where other ranks have all rows of the layer.
        """
        shape = self.size, self.max_rank if rows.num_rows else 0
        a = torch.zeros(*shape, op.x.width, dtype=self.dtype, device=self.device)
        b = torch.zeros(*shape, rows.num_rows, dtype=self.dtype, device=self.device)
        self.entries.setdefault(layer_key(rows.name), []).append(BankEntry(rows, a, b))
        return LowRank(op.x, op.out, a, b, self.ranks, first) if rows.num_rows else None

    def check(self, adapter: LoRAAdapter) -> None:
        """Raise ValueError for an adapter of another model, or of a larger rank."""
        if adapter.rank > self.max_rank:
            raise ValueError(f"the adapter has rank {adapter.rank}: more than max_lora_rank, {self.max_rank}")
        if len({layer_key(name) for name in adapter.updates}) < len(adapter.updates):
            raise ValueError("the adapter has two updates of one layer")
        for name, update in adapter.updates.items():
            if not all(bool(x.to(self.dtype).isfinite().all()) for x in (update.a, update.b)):
                raise ValueError(f"{quote(name)} has numbers that are not finite in {self.dtype}")
            entries = self.entries.get(layer_key(name))
            if entries is None:
                raise ValueError(f"{quote(name)} is no linear layer of this model that takes an adapter")
            if not all(entry.fits(update) for entry in entries):
                shape = [update.b.shape[0], update.a.shape[1]]
                raise ValueError(f"{quote(name)} has another shape than the adapter's, {shape}")

    def write(self, number: int, adapter: LoRAAdapter) -> None:
        """Put an adapter into place `number`. Raises ValueError as `check`, and then writes nothing."""
        self.check(adapter)
        updates = {layer_key(name): update for name, update in adapter.updates.items()}
        for key, entries in self.entries.items():
            for entry in entries:
                entry.write(number, updates.get(key))
        self.ranks[number] = adapter.rank


def layer_key(name: str) -> str:
    """Return the name of a layer without the names of whole models, which differ between checkpoints and adapters."""
    parts = name.split(".")
    while parts[0] in WHOLE_MODELS and len(parts) > 1:
        del parts[0]
    return ".".join(parts)
