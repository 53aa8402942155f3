"""The config of a model, read as its family reads it.

Equal keys mean different things in different families: a `sliding_window` counts in Mistral, in Qwen 2 only beside
`use_sliding_window`, and in Llama never. So each family lists the keys that it reads with the defaults of its config
class in transformers, and reads no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from retain.files import quote


class FamilyConfig(dict[str, Any]):
    """A config with the defaults of a family. A key that is missing, and has no default, raises ValueError."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"config.json lacks {quote(key)}")


def add_defaults(
    config: Mapping[str, Any], defaults: Mapping[str, Any], other_names: Mapping[str, str] | None = None
) -> FamilyConfig:
    """Return a config with defaults for the keys that it lacks. `other_names` maps further names of keys to keys.

    A key under another name counts more, as in transformers. Adding the same defaults twice changes nothing.
    """
    renamed = {key: config[name] for name, key in (other_names or {}).items() if name in config}
    return FamilyConfig({**defaults, **config, **renamed})


def check_supported(config: Mapping[str, Any], **supported: Any) -> None:
    """Raise ValueError for a config that asks for an unsupported feature.

    `supported` maps each key to its only supported value; a key that is missing or None is supported too.
    """
    for key, value in supported.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"a model with {key}={quote(config[key])} is not supported (only {value!r})")


OLDER_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}  # names of transformers before 5
GPT2_NAMES: Mapping[str, str] = {  # of transformers, to the names in configs of GPT-2 and GPT-J
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
ATTENTION_TYPES = ("full_attention", "sliding_attention")


def get_layer_types(
    config: Mapping[str, Any],
    default: Sequence[str],
    known: Sequence[str] = ATTENTION_TYPES,
    key: str = "layer_types",
) -> list[str]:
    """Return the kind of each layer, one of `known`. Raises ValueError for other kinds.

    `default` is for configs that do not list them under `key`.
    """
    layer_types = config.get(key)
    layer_types = list(default) if layer_types is None else layer_types
    if isinstance(layer_types, list):
        layer_types = [OLDER_LAYER_TYPES.get(t, t) if isinstance(t, str) else t for t in layer_types]
    is_list = isinstance(layer_types, list) and len(layer_types) == config["num_hidden_layers"]
    if not is_list or not all(layer_type in known for layer_type in layer_types):
        raise ValueError(f"{key} {quote(layer_types)} is not supported: one of {', '.join(known)} for every layer")
    return list(layer_types)


def get_alternating_types(c: Mapping[str, Any], pattern: int) -> list[str]:
    """Return the type of each layer. By default each `pattern`-th has full attention, and the others slide."""
    layers = range(1, c["num_hidden_layers"] + 1)
    return get_layer_types(c, ["sliding_attention" if i % pattern else "full_attention" for i in layers])


def get_windows(layer_types: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, in tokens; None is full attention."""
    return tuple((window or None) if layer_type == "sliding_attention" else None for layer_type in layer_types)


def get_late_windows(c: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer in Qwen 2 and 3: of later layers by default, and with `use_sliding_window`."""
    first = c["max_window_layers"]
    layers = range(c["num_hidden_layers"])
    layer_types = get_layer_types(c, ["full_attention" if i < first else "sliding_attention" for i in layers])
    return get_windows(layer_types, c["sliding_window"] if c["use_sliding_window"] else None)


@dataclass(frozen=True)
class MTPLayer:
    """The layer behind the last one for multi-token prediction (MTP), as the files of a family have it."""

    add_layer: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # what a config says with this layer as its last
    norm_offset: float = 0.0  # its norms multiply by w + this
    passes_normed: bool = False  # whether a draft reads the state of the one before it behind the norm, as in vLLM

    def number(self, c: Mapping[str, Any]) -> int:
        """Return the number of the layer."""
        changed = self.add_layer(c)
        return int(changed.get("text_config", changed)["num_hidden_layers"]) - 1

    def tensor_names(self, c: Mapping[str, Any]) -> tuple[str, ...]:
        """Return what matches the ends of the names of its tensors, as regular expressions."""
        return rf"layers\.{self.number(c)}\..*", r"mtp\..*"

    def of_text(self) -> MTPLayer:
        """Return the same for a config that has the text model's inside."""
        return replace(
            self, add_layer=lambda c: {"text_config": {**c["text_config"], **self.add_layer(c["text_config"])}}
        )


def one_more_layer(c: Mapping[str, Any], **types: Sequence[str]) -> dict[str, Any]:
    """Return what a config says with one layer more. `types` has the types of all layers, by key."""
    return {"num_hidden_layers": c["num_hidden_layers"] + 1, **{key: list(own) for key, own in types.items()}}
