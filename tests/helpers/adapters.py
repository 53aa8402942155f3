"""Adapters (LoRA) of random weights: written by PEFT, or in the bank of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from retain.engine.request import Adapter
from retain.formats.lora import LoRAAdapter, LowRankUpdate
from retain.models.adapter_bank import AdapterBank

ADAPTERS = ("a", "b", "activated")  # places of a bank
ADAPTER_RANK = 3


def fill_bank(bank: AdapterBank) -> None:
    """Put random adapters into all places; equal models get equal ones."""
    for number in range(bank.size):
        updates = {}
        for name, entries in bank.entries.items():  # whose order differs between ranks
            rng = torch.Generator().manual_seed(crc32(f"{number} {name}".encode()))
            a = torch.randn(ADAPTER_RANK, entries[0].a.shape[2], generator=rng)
            b = torch.randn(entries[0].rows.total, ADAPTER_RANK, generator=rng)
            updates[name] = LowRankUpdate(a / a.shape[1] ** 0.5, b / 2)
        bank.write(number, LoRAAdapter(updates, b""))


def find_adapter(name: str, prompt: Sequence[int]) -> Adapter | None:
    """Return the adapter of a name in a bank that was filled; "activated" begins somewhere in the prompt."""
    if not name:
        return None
    tokens = (prompt[len(prompt) * 2 // 3],) if name == "activated" else ()
    return Adapter(ADAPTERS.index(name), name.encode(), tokens)


def write_adapter(
    folder: Path, target: Path, modules: Sequence[str], seed: int = 0, rank: int = 4, **options: Any
) -> Path:
    """Write random weights of an adapter by PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=24, target_modules=list(modules), init_lora_weights=False, **options)
    get_peft_model(AutoModelForCausalLM.from_pretrained(target), config).save_pretrained(folder)
    return folder
