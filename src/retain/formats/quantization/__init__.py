"""Quantized Hugging Face folders: which tensors make up a matrix, by the method that config.json names.

What is quantized is seen by the tensors that are there. So exceptions of single modules need no list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from retain.files import quote
from retain.formats.errors import UnsupportedError
from retain.formats.quantization import awq, compressed_tensors, fp8, gptq, mxfp4
from retain.kernels.weights.stored_weight import StoredWeight

WEIGHT = "weight"  # the part that has the name of the matrix
MAX_BLOCK = 2**16
# Scales of activations and of cached keys and values, which are computed in other ways here.
IGNORED_ENDINGS = (
    ".input_scale",
    ".output_scale",
    ".activation_scale",
    ".input_zero_point",
    ".output_zero_point",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".k_zero_point",
    ".v_zero_point",
)
MatrixReader = Callable[[str, Mapping[str, Tensor]], StoredWeight]


@dataclass(frozen=True)
class Quantization:
    """How a method names the tensors of a matrix, and reads them.

    `endings` maps the end of a tensor's name to the end of the matrix's name, and to the tensor's part of the matrix.
    `forms` are the sets of parts that a matrix may have; the first of the nearest ones counts.
    """

    endings: Mapping[str, tuple[str, str]]
    forms: tuple[frozenset[str], ...]
    read_matrix: MatrixReader
    by_column: bool = False  # a row lies in all of a tensor

    def find(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the stored names of a matrix's parts, by the names of the matrices. Raises ValueError for damage."""
        names = frozenset(names)
        found: dict[str, dict[str, str]] = {}
        for stored in sorted(names):
            for ending, (own_ending, part) in self.endings.items():
                if stored.endswith(ending):
                    found.setdefault(stored.removesuffix(ending) + own_ending, {})[part] = stored
                    break
        for name, parts in found.items():
            if name in names:
                parts[WEIGHT] = name
            nearest = min(self.forms, key=lambda form: len(form - parts.keys()))
            if missing := sorted(nearest - parts.keys()):
                raise ValueError(f"the matrix {quote(name)} has {', '.join(sorted(parts))}, but no {missing[0]}")
            if WEIGHT in parts and WEIGHT not in nearest:
                raise ValueError(f"the tensor {quote(name)} is there twice, once quantized")
        return found


def find_quantization(config: Any) -> Quantization | None:
    """Return how a config's `quantization_config` stores matrices, None where it is absent.

    Raises UnsupportedError for a method or an option that is not read, ValueError for a value that makes no sense.
    """
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    reader = READERS.get(method) if isinstance(method, str) and isinstance(config, Mapping) else None
    if reader is None:
        raise UnsupportedError(_refuse(method))
    return reader(config)


def _refuse(what: Any) -> str:
    return f"weights quantized by {quote(what)} are not supported: use a .gguf file, or the original"


def _read_mxfp4(config: Mapping[str, Any]) -> Quantization:
    endings = {"_blocks": ("", "blocks"), "_scales": ("", "scales")}
    return Quantization(endings, (frozenset(("blocks", "scales")),), mxfp4.read_matrix)


def _read_fp8(config: Mapping[str, Any]) -> Quantization:
    endings = {"_scale_inv": ("", "scale"), ".weight_scale": (".weight", "scale")}
    block = _read_block(config.get("weight_block_size"))
    return Quantization(endings, (frozenset((WEIGHT, "scale")),), partial(fp8.read_matrix, block=block))


def _read_awq(config: Mapping[str, Any]) -> Quantization:
    version = config.get("version") or config.get("checkpoint_format") or "gemm"
    if str(version).lower() != "gemm" or config.get("bits", 4) != 4:
        raise UnsupportedError(_refuse(f"awq, version {version} of {config.get('bits', 4)} bits"))
    return Quantization(_endings(awq.PARTS), (_required(awq.PARTS),), awq.read_matrix, by_column=True)


def _read_gptq(config: Mapping[str, Any]) -> Quantization:
    version = config.get("checkpoint_format") or "gptq"
    bits = config.get("bits", 4)
    if version not in ("gptq", "gptq_v2") or bits not in (4, 8):
        raise UnsupportedError(_refuse(f"gptq, format {version} of {bits} bits"))
    read = partial(gptq.read_matrix, zero_offset=1 if version == "gptq" else 0, bits=bits)
    return Quantization(_endings(gptq.PARTS), (_required(gptq.PARTS),), read, by_column=True)


def _read_compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    groups = config.get("config_groups") or {}
    schemes = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    for name in (config.get("format") or "dense", *(scheme.get("format") or "dense" for scheme in schemes)):
        if name not in compressed_tensors.FORMATS:
            raise UnsupportedError(_refuse(f"compressed-tensors, format {name}"))
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise UnsupportedError(_refuse(f"compressed-tensors, sparse format {sparsity['format']}"))
    if config.get("transform_config"):
        raise UnsupportedError(_refuse("compressed-tensors with transforms of activations"))
    weights = [scheme["weights"] for scheme in schemes if isinstance(scheme.get("weights"), Mapping)]
    bits = [x.get("num_bits", 4) for x in weights]
    if other := [n for n in bits if n not in (4, 8)]:
        raise UnsupportedError(_refuse(f"compressed-tensors of {quote(other[0], 20)} bits"))
    blocks = [block for x in weights if (block := _read_block(x.get("block_structure")))]
    if len(set(blocks)) > 1:
        raise UnsupportedError(_refuse("compressed-tensors, blocks of several shapes"))
    own_bits = 8 if bits and 4 not in bits else 4
    read = partial(compressed_tensors.read_matrix, block=blocks[0] if blocks else None, bits=own_bits)
    packed = frozenset(("weight_packed", "weight_scale", "weight_shape"))
    return Quantization(_endings(compressed_tensors.PARTS), (packed, frozenset((WEIGHT, "weight_scale"))), read)


def _endings(parts: Iterable[str]) -> dict[str, tuple[str, str]]:
    return {f".{part}": (".weight", part) for part in parts}


def _required(parts: Mapping[str, bool]) -> frozenset[str]:
    return frozenset(part for part, is_required in parts.items() if is_required)


def _read_block(value: Any) -> fp8.Block | None:
    """Return the rows and columns of a block. Raises ValueError unless it is two whole numbers in bounds, or null."""
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(x) is int and 1 <= x <= MAX_BLOCK for x in value):
        return value[0], value[1]
    raise ValueError(f"the block of weights is {quote(value)}, not two whole numbers from 1 to {MAX_BLOCK}")


READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "mxfp4": _read_mxfp4,
    "fp8": _read_fp8,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed_tensors,
}
