"""While a folder is loaded, little of its files is in memory, and little of a matrix is unpacked."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from retain import kernels, model_loader
from retain.formats.checkpoint import open_checkpoint
from retain.formats.tensor_file import TensorFile
from retain.kernels.cpu import packing
from retain.kernels.cpu.memory import Arena
from retain.kernels.weights.quantized import QuantizedWeight
from retain.kernels.weights.stored_weight import StoredWeight
from tests.helpers.folders import save_model_folder
from tests.helpers.quantized_folders import METHODS, write_quantized_folder
from tests.helpers.tiny_models import tiny_checkpoint
from tests.models.test_mxfp4 import write_folder

CHUNK = 2**13


def write(path: Path, form: str) -> None:
    """Write a folder of experts, one by one or stacked, dense or quantized."""
    if form == "mxfp4":
        write_folder(path, tiny_checkpoint("gpt_oss", intermediate_size=64))
    elif form == "stacked":
        save_model_folder(path, tiny_checkpoint("gpt_oss", intermediate_size=64), dtype=torch.bfloat16)
    elif form == "dense":
        save_model_folder(path, tiny_checkpoint("qwen3_moe"), dtype=torch.bfloat16)
    else:
        write_quantized_folder(path, tiny_checkpoint("qwen3_moe"), form)


@pytest.mark.parametrize(
    ("form", "weights"),
    [*((form, "auto") for form in ("dense", "stacked", "mxfp4", "awq", "gptq", "ct-int4", "fp8")), ("stacked", "int4")],
)
def test_matrices_are_converted_in_chunks_and_given_back(
    tmp_path: Path, form: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large a matrix is. What is balanced, q over k over v, is unpacked as a whole."""
    unpacked: list[int] = []
    released: dict[str, set[Fraction]] = {}
    convert = StoredWeight.convert
    block_args = packing._block_args
    release = TensorFile.release

    def count(weight: StoredWeight, begin: int, end: int) -> Tensor | QuantizedWeight:
        if "self_attn" not in weight.name:
            unpacked.append((end - begin) * weight.shape[1] * 4)
        return convert(weight, begin, end)

    def count_blocks(part: StoredWeight, raw: NDArray[np.uint8]) -> tuple[Any, ...]:
        unpacked.append(len(raw) * part.shape[1] * 4)
        return block_args(part, raw)

    def record(file: TensorFile, name: str, begin: int, end: int, of: int) -> None:
        released.setdefault(name, set()).update(Fraction(i, of) for i in range(begin, end))
        released[name].add(Fraction(end, of))
        release(file, name, begin, end, of)

    monkeypatch.setattr(packing, "RELEASE_BYTES", CHUNK)
    monkeypatch.setattr(StoredWeight, "convert", count)
    monkeypatch.setattr(packing, "_block_args", count_blocks)
    monkeypatch.setattr(TensorFile, "release", record)
    write(tmp_path, form)
    model_loader.load_model(tmp_path, kernels.load("cpu"), torch.bfloat16, weights)
    tensors = load_file(tmp_path / "model.safetensors")
    assert max(unpacked) <= CHUNK + packing.TILE_ROWS * 4 * 64
    assert len(unpacked) > sum(x.numel() for name, x in tensors.items() if "self_attn" not in name) * 4 // CHUNK // 8
    experts = [name for name, x in tensors.items() if ".experts." in name and x.ndim > 1 and not name.endswith("bias")]
    for name in experts:
        assert {Fraction(0), Fraction(1)} <= released[name]
    stacked = [name for name in experts if tensors[name].ndim > 2]
    assert all(len(released[name]) > len(tensors[name]) for name in stacked)


def resident_bytes(file: Path) -> int:
    """Return how much of a mapped file this process has in memory."""
    found = 0
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            found += int(line.split()[1]) << 10 if is_ours else 0
        elif "-" in line.split(" ")[0]:
            is_ours = line.endswith(str(file))
    return found


@pytest.mark.parametrize("form", ["dense", "transposed", "fp8", "int8"])
@pytest.mark.parametrize("releases", [True, False])
def test_what_was_packed_is_not_resident(
    tmp_path: Path, form: str, releases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 MiB. Without the release, all of them are: so the measure works."""
    shape = (4, 1024, 1024) if form == "transposed" else (8192, 1024)
    dtypes = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
    x = torch.zeros(shape, dtype=dtypes.get(form, torch.bfloat16))
    scale = {"fp8": {"x.weight_scale_inv": torch.ones(512, 43)}, "int8": {"x.weight_scale": torch.ones(8192, 1)}}
    save_file({"x.weight": x, **scale.get(form, {})}, tmp_path / "model.safetensors")
    method = {"fp8": METHODS["fp8"], "int8": METHODS["ct-int8"]}.get(form)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": method}))
    monkeypatch.setattr(packing, "RELEASE_BYTES", 2**22)
    if not releases:
        monkeypatch.setattr(TensorFile, "release", lambda *args: None)
    checkpoint = open_checkpoint(tmp_path)
    weight = checkpoint.read_stored("x.weight", transposed=form == "transposed")
    assert isinstance(weight, StoredWeight) and weight.shape.numel() == math.prod(shape)
    packing.pack_weight(weight, Arena())
    size = x.numel() * x.element_size()
    resident = resident_bytes(tmp_path / "model.safetensors")
    assert resident < size / 4 if releases else resident > size * 3 / 4
