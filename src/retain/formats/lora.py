"""Low-rank adapters (LoRA, arXiv 2106.09685) in PEFT's layout: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retain.files import quote, read_json_object
from retain.formats.tensor_file import TensorFile

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 256
DIGEST_BYTES = 16
NAME = re.compile(r"(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<side>[AB])\.(?:default\.)?weight")
PATTERN_KEY = re.compile(r"\^?[\w.]+")  # PEFT takes any regular expression; it writes these
CHANGED_BASE = ("pissa", "corda", "olora", "loftq")  # PEFT subtracts these adapters from the base model as they begin
# What changes the products of an adapter otherwise, and is not computed.
UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
)


@dataclass(frozen=True)
class LowRankUpdate:
    """What an adapter adds to the outputs of a linear layer: (x a^T) b^T."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank], float32, with the adapter's scale

    @property
    def rank(self) -> int:
        """Return the rank."""
        return self.a.shape[0]


@dataclass(frozen=True)
class LoRAAdapter:
    """An adapter: the updates of linear layers by their names in the base model, and a digest of all of them.

    With `invocation_tokens` it changes only what follows where a prompt has them last, and these tokens themselves
    (activated LoRA, arXiv 2504.12397).
    """

    updates: Mapping[str, LowRankUpdate]
    digest: bytes
    invocation_tokens: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """Return the largest rank of a layer."""
        return max(update.rank for update in self.updates.values())


def read_lora(folder: Path) -> LoRAAdapter:
    """Read the adapter in a folder. Raises ValueError where it is missing, damaged or not supported."""
    config = read_config(folder)
    file = TensorFile(folder / WEIGHTS_FILE)
    sides: dict[str, dict[str, Tensor]] = {}
    for name in sorted(file.names):
        match = NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{folder}: the tensor {quote(name)} is not of a linear layer's adapter: not supported")
        own = sides.setdefault(match["layer"], {})
        if match["side"] in own:
            raise ValueError(f"{folder}: the tensor {quote(name)} is there twice")
        own[match["side"]] = file.read(name)
    if not sides:
        raise ValueError(f"{folder}: the adapter has no tensors")
    updates = {}
    digest = blake2b(digest_size=DIGEST_BYTES)
    for layer, tensors in sides.items():
        updates[layer] = update = read_update(f"{folder}: {quote(layer)}", tensors, config, layer)
        for part in (layer.encode(), update.a.numpy().tobytes(), update.b.numpy().tobytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return LoRAAdapter(updates, digest.digest(), tuple(config.get("alora_invocation_tokens") or ()))


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the config of an adapter. Raises ValueError."""
    path = folder / CONFIG_FILE
    config = read_json_object(path)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: only adapters of the type LORA are supported")
    for key in UNSUPPORTED:
        if config.get(key):
            raise ValueError(f"{path}: {key}={quote(config[key])} is not supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(CHANGED_BASE):  # such an adapter is of another base model
        raise ValueError(f"{path}: init_lora_weights={quote(start)}: only converted adapters are supported")
    tokens = config.get("alora_invocation_tokens")
    if tokens is not None and not (isinstance(tokens, list) and tokens and all(is_token(t) for t in tokens)):
        raise ValueError(f"{path}: alora_invocation_tokens is {quote(tokens)}, not a list of token ids")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{path}: bias={quote(config['bias'])} is not supported")
    if not isinstance(config.get("use_rslora", False), bool):
        raise ValueError(f"{path}: use_rslora is {quote(config['use_rslora'])}, neither true nor false")
    if not is_number(config.get("lora_alpha")):
        raise ValueError(f"{path}: lora_alpha is {quote(config.get('lora_alpha'))}, not a number")
    pattern = config.get("alpha_pattern") or {}
    if not isinstance(pattern, dict) or not all(is_number(x) for x in pattern.values()):
        raise ValueError(f"{path}: alpha_pattern is not a table of numbers")
    for key in pattern:
        if not PATTERN_KEY.fullmatch(key):
            raise ValueError(f"{path}: alpha_pattern has the key {quote(key)}: only names of layers are supported")
    return config


def is_token(x: object) -> bool:
    """Return whether a value of a config may be a token id."""
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**31


def is_number(x: object) -> bool:
    """Return whether a value of a config is a finite number."""
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e9


def read_update(place: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], layer: str) -> LowRankUpdate:
    """Return the update of a layer with its scale. Raises ValueError for tensors that do not fit each other."""
    if len(tensors) < 2:
        raise ValueError(f"{place} has one of two matrices")
    if not all(x.is_floating_point() for x in tensors.values()):
        raise ValueError(f"{place} has matrices of whole numbers")
    a, b = (tensors[side].float().clone() for side in "AB")
    if a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1] or not 1 <= len(a) <= MAX_RANK:
        raise ValueError(f"{place}: matrices {list(a.shape)} and {list(b.shape)} are none of a rank up to {MAX_RANK}")
    scale = find_alpha(config, layer) / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
    b = b * scale
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise ValueError(f"{place} has numbers that are not finite")
    return LowRankUpdate(a.contiguous(), b.contiguous())


def find_alpha(config: Mapping[str, Any], layer: str) -> float:
    """Return the alpha of a layer: of the first key of `alpha_pattern` that ends its name, as in PEFT, or of all."""
    for key, alpha in (config.get("alpha_pattern") or {}).items():
        if f".{layer}".endswith(f".{key.removeprefix('^')}") and (key[0] != "^" or layer == key[1:]):
            return float(alpha)
    return float(config["lora_alpha"])
