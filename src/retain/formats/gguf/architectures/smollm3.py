"""SmolLM3."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of SmolLM3. llama.cpp rotates all layers but every fourth; the file does not say so."""
    c = llama.make_config(meta, "smollm3")
    return c | {
        "no_rope_layer_interval": 4,
        "no_rope_layers": None,
        "use_sliding_window": False,
        "sliding_window": None,
    }


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS,
    biases=llama.PROJECTION_BIASES,
    row_order=llama.pair_halves,
)
