"""The tensors of one model by their Hugging Face names, in the precision that the caller chose."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Set
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retain.config import check_weights
from retain.files import quote
from retain.formats.checkpoint import Checkpoint, open_checkpoint
from retain.kernels.ranks import ProcessGroup
from retain.kernels.weights.quantized import GROUP_SIZE, Int4, Int8, Kind, is_quantizable, to_kind
from retain.kernels.weights.stored_weight import StoredWeight
from retain.kernels.weights.weight import Weight, dense_chunks
from retain.models.adapter_bank import AdapterBank
from retain.models.family_config import FamilyConfig, add_defaults


class Weights:
    """Tensors of a checkpoint: `w["model.norm.weight"]`, `"lm_head.bias" in w`, `w.load_matrix("lm_head.weight")`.

    `quantization` sets the kind of matrices: auto (as the file stores them), bf16 (dense), int8, or int4 (embeddings
    and heads int8). Dense matrices have `dtype`; all other tensors have `vector_dtype`, by default `dtype`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        quantization: str = "auto",
        prefix: str = "",
        on_read: Callable[[int], None] = lambda num_elements: None,
        vector_dtype: torch.dtype | None = None,
        context_limit: int | None = None,
        has_head: bool = True,
    ):
        """`prefix` is put before every name. `on_read` gets the number of elements of each tensor after it is read.

        `context_limit`: the longest text of the engine, by default the model's own. `has_head`: logits are wanted, else
        the states that the head would read.
        """
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.quantization = quantization
        self.prefix = prefix
        self.vector_dtype = vector_dtype or dtype
        self.context_limit = context_limit
        self.has_head = has_head
        self.config = FamilyConfig(checkpoint.config)
        self.adapters: AdapterBank | None = None
        self.group: ProcessGroup | None = None
        self._on_read = on_read
        self._names = checkpoint.names()
        self._aliases: Mapping[str, str] = {}
        self._used: set[str] = set()  # full names; shared by all scopes

    def __contains__(self, name: str) -> bool:
        full = self.prefix + name
        return full in self._names or full in self._aliases

    def names(self) -> Set[str]:
        """Return the full names of all tensors, under which they may be asked for."""
        return self._names | self._aliases.keys()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.checkpoint.read(self.full_name(name)).to(self.vector_dtype)
        self._on_read(tensor.numel())
        return tensor

    def load_matrix(self, name: str, embedding: bool = False, transposed: bool = False) -> Weight:
        """Load a matrix [out, in], or an embedding or head [V, E]. `transposed`: the file stores [in, out].

        A matrix that the file does not store in the chosen kind is quantized here. It stays dense when its rows do
        not divide into whole groups. One in blocks stays as it is: a program converts it.
        """
        matrix = self._read_matrix(self.full_name(name), embedding, transposed)
        self._on_read(matrix.shape.numel())
        return matrix

    def load_stack(self, name: str, n: int, transposed: bool = False) -> Weight:
        """Load the matrices [n, out, in] of one tensor, one below the other: [n out, in]. See load_matrix.

        `transposed`: dense ones are stored [n, in, out]; blocks never are. Raises ValueError for another shape.
        """
        if (stored := self.checkpoint.read_stored(self.full_name(name), transposed)) is not None:
            self._on_read(stored.shape.numel())
            if stored.shape[0] % n:
                raise ValueError(f"the tensor {name!r} has {stored.shape[0]} rows, not those of {n} experts")
            return self._with_kind(stored, embedding=False)
        tensor = self.checkpoint.read(self.full_name(name))
        if tensor.ndim != 3 or len(tensor) != n:
            raise ValueError(f"the tensor {name!r} has the shape {list(tensor.shape)}, not that of {n} experts")
        tensor = (tensor.transpose(1, 2) if transposed else tensor).flatten(0, 1)
        self._on_read(tensor.numel())
        return self._to_kind(name, tensor, embedding=False)

    def scope(self, prefix: str) -> Weights:
        """Return the same weights with `prefix` put before every name."""
        scoped = copy(self)
        scoped.prefix = self.prefix + prefix
        return scoped

    def with_config(self, config: FamilyConfig) -> Weights:
        """Return the same weights with another config."""
        changed = copy(self)
        changed.config = config
        return changed

    def with_passes(self, adapters: AdapterBank | None = None, group: ProcessGroup | None = None) -> Weights:
        """Return the same weights; a program of them adds the adapters of a bank, and is divided among ranks."""
        changed = copy(self)
        changed.adapters = adapters
        changed.group = group
        return changed

    def with_aliases(self, aliases: Mapping[str, str]) -> Weights:
        """Return the same weights, where some tensors have further names; `aliases` maps those to the file's."""
        changed = copy(self)
        changed._aliases = aliases
        return changed

    def with_defaults(self, defaults: Mapping[str, Any], other_names: Mapping[str, str] | None = None) -> Weights:
        """Return the same weights with the defaults of a family in their config (see add_defaults)."""
        return self.with_config(add_defaults(self.config, defaults, other_names))

    def logits_factor(self, factor: float) -> float:
        """Return the factor of logits that a family's last norm takes over; 1 where states are wanted."""
        return factor if self.has_head else 1.0

    def full_name(self, name: str) -> str:
        """Return the name in the checkpoint of a tensor to be used. Raises ValueError where there is no such tensor."""
        full = self._aliases.get(self.prefix + name, self.prefix + name)
        if full not in self._names:
            model = quote(self.config.get("model_type"))
            raise ValueError(f"the model file has no tensor {full!r}: it is damaged, or not a {model} model")
        self._used.add(full)
        return full

    def equal(self, name: str, other: str) -> bool:
        """Return whether two matrices hold the same numbers. Raises ValueError where one is missing."""
        a, b = (self._read_exact(self.full_name(n)) for n in (name, other))
        if a.shape != b.shape:
            return False
        return all(torch.equal(x, y) for x, y in zip(dense_chunks(a), dense_chunks(b), strict=True))

    def _read_exact(self, name: str) -> Weight:
        stored = self.checkpoint.read_stored(name)
        return self.checkpoint.read(name) if stored is None else replace(stored, kind=torch.float32)

    def uses(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of this full name, and somebody has asked for it."""
        return name in self._used

    def unused_names(self) -> list[str]:
        """Return the full names of the checkpoint's tensors that nobody has asked for until now, sorted."""
        return sorted(self._names - self._used)

    def _read_matrix(self, name: str, embedding: bool, transposed: bool) -> Weight:
        if (stored := self.checkpoint.read_stored(name, transposed)) is not None:
            return self._with_kind(stored, embedding)
        tensor = self.checkpoint.read(name)
        return self._to_kind(name, tensor.T.contiguous() if transposed else tensor, embedding)

    def _with_kind(self, stored: StoredWeight, embedding: bool) -> StoredWeight:
        kind = self._choose_kind(stored.kind, embedding)
        if not isinstance(kind, torch.dtype) and stored.shape[1] % GROUP_SIZE:
            kind = self.dtype
        return replace(stored, kind=kind)

    def _to_kind(self, name: str, dense: Tensor, embedding: bool) -> Weight:
        kind = self._choose_kind(self.dtype, embedding)
        try:
            return to_kind(dense, kind if isinstance(kind, torch.dtype) or is_quantizable(dense) else self.dtype)
        except ValueError as e:
            raise ValueError(f"the tensor {name!r} cannot be quantized: {e}") from e

    def _choose_kind(self, stored: Kind, embedding: bool) -> Kind:
        """Return the kind of a matrix that the file stores in the kind `stored`."""
        if self.quantization == "bf16":
            return self.dtype
        if self.quantization == "auto":
            return self.dtype if self.dtype == torch.float32 or isinstance(stored, torch.dtype) else stored
        return Int4 if self.quantization == "int4" and not embedding else Int8


def open_weights(
    path: Path,
    dtype: torch.dtype,
    quantization: str = "auto",
    progress: bool = False,
    vector_dtype: torch.dtype | None = None,
    context_limit: int | None = None,
    has_head: bool = True,
    checkpoint: Checkpoint | None = None,
) -> Weights:
    """Open the model at `path` (see Weights for the options). `progress` shows a bar if stderr is a terminal.

    `checkpoint`: that of `path` where it is open already.

    Raises ValueError as open_checkpoint does, and for a quantization that is unknown or does not fit `dtype`.
    A damaged tensor raises ValueError when it is read.
    """
    check_weights(quantization, str(dtype).removeprefix("torch."))
    checkpoint = checkpoint or open_checkpoint(path)
    create = partial(
        Weights,
        checkpoint,
        dtype,
        quantization,
        vector_dtype=vector_dtype,
        context_limit=context_limit,
        has_head=has_head,
    )
    if not (progress and sys.stderr.isatty()):
        return create()
    from tqdm import tqdm

    num_tensors = len(checkpoint.names())
    bar = tqdm(total=num_tensors, desc=f"loading {path.name}", unit="tensor", leave=False, file=sys.stderr)

    def on_read(num_elements: int) -> None:
        bar.update()
        if bar.n >= num_tensors:
            bar.close()

    return create(on_read=on_read)
