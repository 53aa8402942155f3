"""Adapters (LoRA) of random weights, written by PEFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


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
