"""The fitted numbers of a gate, and their file: a linear function of each slot's key, value and statistics.

For a slot of layer m and kv head g, at position p behind which the newest query is at position q:

    score = bias + key . k + value . v + logs . [log |v|, log |k|, log (p + 1), log (mass / age), log age]

with age = q + 1 - p, and k the key before it was rotated. All but the last two terms are fixed when the slot is
written (`fixed_part`); they need K and V. The last two change with every query (`score`).

A file may have a second gate, for the policy `gate_replay`: its mass is what the prompt's queries give from behind it.
It may have the shares of heads (head_shares.py), or these alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from retain.files import atomic_write, quote, shorten
from retain.kernels.ranks import KVHeads
from retain.kv.eviction.head_shares import BUDGETS, HeadShares

FORMAT = "retain gate 1"
REPLAYED = "replayed."  # before the names of the second gate's tensors
SHARES = "shares"
NUM_LOGS = 5
# Beyond these a score is noise; of equal ones the oldest token goes first.
LOWEST = -8.0
HIGHEST = 12.0
# Added before a logarithm is taken.
NORM_FLOOR = 1e-3
MASS_FLOOR = 1e-7


@dataclass(frozen=True)
class GateShape:
    """What a gate is fitted for: M unwindowed layers with G kv heads of D and V numbers, of the model `fingerprint`."""

    num_layers: int
    kv_heads: int
    k_dim: int  # D, of a key
    v_dim: int  # V, of a value
    fingerprint: str


@dataclass(frozen=True, eq=False)
class GateWeights:
    """The numbers of a gate, all float32."""

    key: Tensor  # [M, G, D]
    value: Tensor  # [M, G, V]
    logs: Tensor  # [M, G, 5]
    bias: Tensor  # [M, G]

    @cached_property
    def fingerprint(self) -> bytes:
        """Return a hash of the weights, equal only for equal weights."""
        data = b"".join(getattr(self, f.name).cpu().numpy().tobytes() for f in fields(self))
        return blake2b(data, digest_size=16).digest()

    def of_heads(self, heads: KVHeads) -> GateWeights:
        """Return the numbers of a rank's heads alone."""
        return GateWeights(*(heads.select(getattr(self, f.name)) for f in fields(self)))

    def fixed_part(self, k: Tensor, v: Tensor, pos: Tensor, layers: slice) -> Tensor:
        """Return what K and V of slots contribute, [m, G, S]; k, v [m, G, S, D or V] float32, of these layers."""
        key, value, bias = (x[layers].to(k.device) for x in (self.key, self.value, self.bias))
        logs = self.logs[layers, :, :3].to(k.device)
        linear = (k @ key[..., None] + v @ value[..., None]).squeeze(-1)
        return linear + (fixed_logs(k, v, pos) @ logs[..., None]).squeeze(-1) + bias[..., None]

    def score(self, fixed: Tensor, mass: Tensor, pos: Tensor, query_position: int) -> Tensor:
        """Return the scores of all slots, [M, G, S]; `fixed` is what `fixed_part` returned, mass float32 [M, G, S].

        They are logarithms of what a slot is expected to give, bounded.
        """
        logs = self.logs[..., 3:].to(fixed.device)
        score = fixed + (changing_logs(mass, pos, query_position) @ logs[..., None]).squeeze(-1)
        return score.clamp(LOWEST, HIGHEST)


@dataclass(frozen=True)
class Gate:
    """What a gate's file has: the numbers for `gate`, for `gate_replay` where they rank better, and heads' shares."""

    attention: GateWeights | None = None
    replayed: GateWeights | None = None
    shares: HeadShares | None = None
    notes: dict[str, str] = field(default_factory=dict)  # on what they were fitted

    def of_heads(self, heads: KVHeads) -> Gate:
        """Return the numbers of a rank's heads alone."""
        return replace(
            self,
            attention=self.attention and self.attention.of_heads(heads),
            replayed=self.replayed and self.replayed.of_heads(heads),
            shares=self.shares and self.shares.of_heads(heads),
        )


def fixed_logs(k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    """Return [..., S, 3], the logarithms that do not change; k [..., S, D], v [..., S, V], pos [..., S]."""
    norms = torch.stack((v.norm(dim=-1), k.norm(dim=-1)), -1)
    return torch.cat(((norms + NORM_FLOOR).log(), (pos.clamp(min=0) + 1.0).log()[..., None]), -1)


def changing_logs(mass: Tensor, pos: Tensor, query_position: int) -> Tensor:
    """Return [..., S, 2], the logarithms that change with every query; mass and pos [..., S]."""
    age = (query_position + 1.0 - pos).clamp(min=1)
    return torch.stack(((mass / age + MASS_FLOOR).log(), age.log()), -1)


def save_gate(path: Path, gate: Gate, shape: GateShape, notes: dict[str, str]) -> None:
    """Write a gate's file; `notes` say what it was fitted on. Raises OSError."""
    tensors = {
        prefix + f.name: getattr(weights, f.name).contiguous()
        for prefix, weights in (("", gate.attention), (REPLAYED, gate.replayed))
        for f in fields(GateWeights)
        if weights
    }
    if gate.shares:
        tensors[SHARES] = gate.shares.kept.contiguous()
    data = save(tensors, {**notes, "format": FORMAT, "fingerprint": shape.fingerprint})
    atomic_write(path, lambda file: file.write(data))


def read_header(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return the fingerprint of the model that a gate's file is for, and the policies of its gates, the best one first.

    Raises ValueError where it is no gate.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
    except (OSError, SafetensorError) as e:
        raise ValueError(f"{path}: cannot be read as a gate: {shorten(e)}") from e
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: not a gate, or of another version: `retain fit` writes them")
    found = ("gate_replay" if any(x.startswith(REPLAYED) for x in names) else "", "gate" if names - {SHARES} else "")
    return metadata.get("fingerprint", ""), tuple(name for name in found if name)


def load_gate(path: Path, shape: GateShape) -> Gate:
    """Read a gate's file. Raises ValueError where it is damaged or for another model."""
    fingerprint, policies = read_header(path)
    if fingerprint != shape.fingerprint:
        raise ValueError(f"{path}: this gate is for another model: fit one with `retain fit`")
    with safe_open(path, "pt") as file:
        notes = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Gate(
        attention=_take_weights(path, tensors, "", shape) if "gate" in policies else None,
        replayed=_take_weights(path, tensors, REPLAYED, shape) if "gate_replay" in policies else None,
        shares=_take_shares(path, tensors, shape) if SHARES in tensors else None,
        notes=notes,
    )


def _take_shares(path: Path, tensors: dict[str, Tensor], shape: GateShape) -> HeadShares:
    """Return the shares of heads. Raises ValueError where they are damaged."""
    size = len(BUDGETS), shape.num_layers, shape.kv_heads
    kept = tensors[SHARES]
    if tuple(kept.shape) != size or not kept.is_floating_point():
        raise ValueError(f"{path}: damaged: {SHARES} is {kept.dtype} {quote(tuple(kept.shape))}, not of shape {size}")
    if not ((kept >= 0) & (kept <= 1)).all():
        raise ValueError(f"{path}: damaged: {SHARES} has numbers that are not between 0 and 1")
    kept = kept.float()
    if not (kept.double().mean((1, 2)) <= torch.tensor(BUDGETS).double() + 1e-6).all() or (kept.diff(dim=0) > 0).any():
        raise ValueError(f"{path}: damaged: heads do not divide budgets of {', '.join(f'{b:.1%}' for b in BUDGETS)}")
    return HeadShares(kept)


def _take_weights(path: Path, tensors: dict[str, Tensor], prefix: str, shape: GateShape) -> GateWeights:
    """Return the weights whose names begin with `prefix`. Raises ValueError where they are damaged."""
    M = shape.num_layers
    G = shape.kv_heads
    expected = {"key": (M, G, shape.k_dim), "value": (M, G, shape.v_dim), "logs": (M, G, NUM_LOGS), "bias": (M, G)}
    found: dict[str, Tensor] = {}
    for name, size in expected.items():
        tensor = tensors.get(prefix + name)
        if tensor is None or tuple(tensor.shape) != size or not tensor.is_floating_point():
            shown = "missing" if tensor is None else f"{tensor.dtype} {quote(tuple(tensor.shape))}"
            raise ValueError(f"{path}: damaged: {prefix}{name} is {shown}, not numbers of shape {size}")
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: damaged: {prefix}{name} has numbers that are not finite")
        found[name] = tensor.float()
    return GateWeights(**found)
