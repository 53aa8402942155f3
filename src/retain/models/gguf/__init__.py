"""Weights out of a GGUF file, llama.cpp's format: one file with everything, usually quantised.

header.py finds what is in the file, blocks.py makes numbers or quanta of it, configs.py and archs.py translate into
Hugging Face's language.
What is not known here: what the tensors mean, and the tokenizer that lies in the metadata (text/ reads that).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from retain.kernels.matrix import Quanta, fits, int8
from retain.models.gguf.archs import ARCHS
from retain.models.gguf.configs import Facts, llama3_scaling
from retain.models.gguf.header import Header, Stored, Unsupported

# Written by old converters, read by nobody.
UNUSED = ("attn_rot_embd.weight", "attn.masked_bias", "rotary_emb.inv_freq")


class GGUF:
    """A Source (models/weights.py). Raises ValueError for a file that is missing, damaged or of an unknown kind."""

    def __init__(self, path: Path):
        self._header = header = Header(path)
        self.meta: dict[str, Any] = header.meta
        with header.checked():
            if (parts := self.meta.get("split.count", 0)) > 1:
                raise Unsupported(f"one of {parts} parts: join them with `llama-gguf-split --merge`")
            name = self.meta.get("general.architecture", "")
            if name not in ARCHS:
                raise Unsupported(f"architecture {name!r} is not supported: only {', '.join(ARCHS)} are")
            self._arch = ARCHS[name]
            shapes = {name: t.shape for name, t in header.tensors.items()}
            self.config = self._arch.config(Facts(name, self.meta, shapes))
            self._stored = self._named()

    def names(self) -> frozenset[str]:
        """The Hugging Face names of all tensors."""
        return self._names

    def read(self, name: str) -> Tensor:
        """One tensor: float16 and bfloat16 as stored, everything else float32. Raises ValueError when it is damaged."""
        with self._header.checked():
            stem, stored = self._stored[name]
            return self._arch.undo(stem, self._tensor(stored), self.config)

    def quanta(self, name: str, transposed: bool = False) -> Quanta | None:
        """See models/weights.py. What llama.cpp's converter did to matrices permutes rows, or is what is asked for."""
        from retain.models.gguf.blocks import quanta

        with self._header.checked():
            stem, stored = self._stored[name]
            matrix = quanta(self._header.raw(stored), stored.kind, stored.shape)
            self._header.release(stored)
            if matrix is None:
                return None
            if (stem in self._arch.turned) != transposed:
                turned = matrix.dense().T
                return int8(turned) if fits(turned) else None
            order = self._arch.order(stem, matrix.shape[0], self.config)
            return matrix if order is None else matrix.rows(order)

    def _named(self) -> dict[str, tuple[str, Stored]]:
        """Hugging Face's name -> what llama.cpp calls the module in its layer, and where the tensor lies."""
        named = {}
        for name, stored in self._header.tensors.items():
            if name == "rope_freqs.weight":
                self._stretch(stored)
            elif not name.endswith(UNUSED):
                theirs = self._arch.hugging_face(name, self.config["num_hidden_layers"])
                if theirs is None:
                    raise Unsupported(f"the tensor {name!r} is not known in a {self.config['model_type']} model")
                named[theirs] = (name.split(".")[-2], stored)
        self._names = frozenset(named)
        return named

    def _stretch(self, stored: Stored) -> None:
        """Llama 3.1 and later divide the rotary frequencies by a tensor."""
        if "rope_scaling" not in self.config or self.config["rope_scaling"]:
            raise Unsupported(f"rope_freqs.weight in a {self.config['model_type']} model with another scaling")
        if len(stored.shape) != 1 or 2 * stored.shape[0] != self.config.get("head_dim"):
            raise ValueError(f"the tensor 'rope_freqs.weight' has the shape {stored.shape}")
        self.config["rope_scaling"] = llama3_scaling(self._tensor(stored).float(), self.config["rope_theta"])

    def _tensor(self, stored: Stored) -> Tensor:
        from retain.models.gguf.blocks import numbers

        return numbers(self._header.raw(stored), stored.kind, stored.shape)
