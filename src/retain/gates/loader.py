"""Gates of the policy `gate`: find the file that was fitted for a model, and load it.

The files in this folder come with the package; README.md says what they were fitted on. A gate belongs to a model's
fingerprint: its norms, which quantization leaves alone, so that one gate serves every file of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from xxhash import xxh3_128

from retain.formats.checkpoint import open_checkpoint
from retain.kernels.slots.kv_cache_spec import KVCacheSpec
from retain.kv.eviction.gate_weights import Gate, GateShape, load_gate, read_header

SUFFIX = ".gate.safetensors"
PACKAGED = Path(__file__).parent


class GateLoader:
    """Load the gates of the model at `path`, each file once. `default` is the file that the engine was started with."""

    def __init__(self, path: Path, spec: KVCacheSpec, default: str = ""):
        self.path = path
        self.spec = spec
        self.default = default
        self._shape: GateShape | None = None
        self._gates: dict[str, Gate] = {}

    def __call__(self, file: str) -> Gate:
        """Return the gate in a file; "" is the engine's own, or the first that is found.

        Raises ValueError where there is none, or where it is damaged or for another model.
        """
        file = file or self.default
        if file not in self._gates:
            self._gates[file] = load_gate(self._path_of(file), self.shape)
        return self._gates[file]

    @property
    def shape(self) -> GateShape:
        """What a gate of this model must fit."""
        if self._shape is None:
            group = self.spec.full_attention_group
            fingerprint = model_fingerprint(self.path)
            self._shape = GateShape(len(group.caches), group.num_kv_heads, group.k_dim, group.v_dim, fingerprint)
        return self._shape

    def policy_names(self, file: str) -> Sequence[str]:
        """Return the policies that the gate in a file is for, the best one first; "" is as in a call.

        Raises OSError.
        """
        try:
            return read_header(self._path_of(file or self.default))[1]
        except ValueError:
            return ()

    def _path_of(self, file: str) -> Path:
        return Path(file).expanduser() if file else self._find()

    def _find(self) -> Path:
        """Return the gate beside the model, or the one of this package. Raises ValueError where there is none."""
        for candidate in gate_files(self.path):
            if read_header(candidate)[0] == self.shape.fingerprint:
                return candidate
        raise ValueError(f"gate: none is fitted for {self.path.name}: `retain fit` makes one, gate:file=... names it")


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
