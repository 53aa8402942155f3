"""Qwen3.5 to 3.8 with experts."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama, qwen3next, qwen35

ARCHITECTURE = Architecture(
    lambda meta: qwen3next.make_config(meta, "qwen3_5_moe_text") | qwen3next.make_expert_config(meta),
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    qwen35.LAYER_TENSORS | qwen3next.EXPERT_LAYER_TENSORS,
    biases=frozenset(),
    expert_tensors=llama.EXPERT_TENSORS,
    whole_names=qwen3next.WHOLE_NAMES,
    row_order=qwen35.order_rows,
    column_order=qwen35.order_columns,
    values=qwen3next.VALUES,
)
