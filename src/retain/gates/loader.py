"""What was fitted for a model, gates and shares of heads: find its files, and load them.

The files in this folder come with the package; README.md says what they were fitted on. A gate belongs to a model's
fingerprint: its norms, which quantization leaves alone, so that one gate serves every file of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from xxhash import xxh3_128

from retain.formats.checkpoint import open_checkpoint
from retain.kernels.ranks import ALL_HEADS, KVHeads
from retain.kernels.slots.kv_cache_spec import KVCacheSpec
from retain.kv.eviction.gate_weights import Gate, GateShape, load_gate, read_header

SUFFIX = ".gate.safetensors"
PACKAGED = Path(__file__).parent


class GateLoader:
    """Load the gates of the model at `path`, each file once, and of them the numbers of this rank's `kv_heads`.

    `default` is the file that the engine was started with.
    """

    def __init__(self, path: Path, spec: KVCacheSpec, default: str = "", kv_heads: KVHeads = ALL_HEADS):
        self.path = path
        self.spec = spec
        self.default = default
        self.kv_heads = kv_heads
        self._shape: GateShape | None = None
        self._gates: dict[str, Gate] = {}

    def __call__(self, file: str) -> Gate:
        """Return the gates and shares in a file; "" is the engine's own, or what is found.

        Found are those beside the model, then those of this package: the first file with gates, the first with shares.
        Raises ValueError where there is none, or where one is damaged or for another model.
        """
        file = file or self.default
        if file not in self._gates:
            found = [load_gate(path, self.shape) for path, _ in self._find(file)]
            if not found:
                message = "`retain fit` makes a file, gate:file=... names one"
                raise ValueError(f"gate: nothing is fitted for {self.path.name}: {message}")
            with_gates = next((gate for gate in found if gate.attention), Gate())
            shares = next((gate.shares for gate in found if gate.shares), None)
            self._gates[file] = replace(with_gates, shares=shares).of_heads(self.kv_heads)
        return self._gates[file]

    @property
    def shape(self) -> GateShape:
        """What a gate of this model must fit."""
        if self._shape is None:
            group = self.spec.full_attention_group
            fingerprint = model_fingerprint(self.path)
            num_heads = self.kv_heads.num_of_all(group.num_kv_heads)
            self._shape = GateShape(len(group.caches), num_heads, group.k_dim, group.v_dim, fingerprint)
        return self._shape

    def policy_names(self, file: str) -> Sequence[str]:
        """Return the policies that the gate in a file is for, the best one first; "" is as in a call.

        Raises OSError.
        """
        try:
            return next((names for _, names in self._find(file or self.default) if names), ())
        except ValueError:
            return ()

    def _find(self, file: str) -> Iterator[tuple[Path, Sequence[str]]]:
        """Yield the file of this name, or all that are found for the model, with the policies that its gates serve."""
        for path in [Path(file).expanduser()] if file else gate_files(self.path):
            fingerprint, names = read_header(path)
            if file or fingerprint == self.shape.fingerprint:
                yield path, names


def gate_files(path: Path) -> Iterator[Path]:
    """Yield the gates in the folder of a model, then those of this package."""
    yield from sorted((path if path.is_dir() else path.parent).glob(f"*{SUFFIX}"))
    yield from sorted(PACKAGED.glob(f"*{SUFFIX}"))


def model_fingerprint(path: Path) -> str:
    """Hash the norms of the model at `path`, 32 hex digits. Raises ValueError or OSError.

    They are rounded to bfloat16: some formats store 1 + w in place of w, which costs the last bits.
    """
    checkpoint = open_checkpoint(path)
    found = xxh3_128()
    for name in sorted(n for n in checkpoint.names() if n.endswith(".weight") and ("norm" in n or "ln" in n)):
        found.update(name.encode())
        found.update(checkpoint.read(name).to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return found.hexdigest()
