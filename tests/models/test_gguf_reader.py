"""The GGUF reader: it reads what was written, and refuses damaged files at once."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from retain import LLM
from retain.formats.gguf.reader import GGUFReader
from retain.kernels.weights.ggml_blocks import dequantize_blocks
from tests.helpers import counted_work
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, tiny_for_gguf, write_gguf


def gguf_bytes(
    tensors: bytes = b"", pairs: bytes = b"", n_tensors: int = 0, n_pairs: int = 0, version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs) + pairs + tensors


def string_bytes(s: str) -> bytes:
    return struct.pack("<Q", len(s)) + s.encode()


def tensor_info_bytes(name: str, *dims: int, kind: int = 0, offset: int = 0) -> bytes:
    return string_bytes(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE_COUNT = struct.pack("<Q", 1 << 60)
METADATA_PAIR = string_bytes("a") + struct.pack("<II", 4, 7)
ZERO_BYTES = bytes(200)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GG",
        b"GGUF",
        b"GGUF\x03\x00\x00\x00",
        gguf_bytes(n_tensors=1 << 60),
        gguf_bytes(n_pairs=1 << 60),
        gguf_bytes(n_pairs=1 << 60, pairs=ZERO_BYTES),
        gguf_bytes(n_pairs=1, pairs=HUGE_COUNT + b"abc"),
        gguf_bytes(n_pairs=1, pairs=string_bytes("a") + struct.pack("<I", 8) + HUGE_COUNT),
        gguf_bytes(n_pairs=1, pairs=string_bytes("a") + struct.pack("<I", 13) + ZERO_BYTES),
        gguf_bytes(n_pairs=1, pairs=string_bytes("a") + struct.pack("<II", 9, 8) + HUGE_COUNT + ZERO_BYTES),
        gguf_bytes(n_pairs=1, pairs=string_bytes("a") + struct.pack("<II", 9, 4) + HUGE_COUNT + ZERO_BYTES),
        gguf_bytes(n_pairs=1, pairs=string_bytes("a") + struct.pack("<IIQ", 9, 8, 3) + b"\xff" * 99),
        gguf_bytes(n_pairs=1, pairs=string_bytes("a") + struct.pack("<IIQ", 9, 9, 1) + ZERO_BYTES),
        gguf_bytes(n_pairs=2, pairs=METADATA_PAIR + METADATA_PAIR + ZERO_BYTES),
        gguf_bytes(n_pairs=1, pairs=struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 7)),
        gguf_bytes(tensor_info_bytes("t", 8) + tensor_info_bytes("t", 8, offset=32) + ZERO_BYTES, n_tensors=2),
        gguf_bytes(tensor_info_bytes("t", 8, 0) + ZERO_BYTES, n_tensors=1),
        gguf_bytes(tensor_info_bytes("t") + ZERO_BYTES, n_tensors=1),
        gguf_bytes(tensor_info_bytes("t", 1, 1, 1, 1, 1) + ZERO_BYTES, n_tensors=1),
        gguf_bytes(tensor_info_bytes("t", 8, offset=4) + ZERO_BYTES, n_tensors=1),
        gguf_bytes(tensor_info_bytes("t", 8, offset=320) + ZERO_BYTES, n_tensors=1),
        gguf_bytes(tensor_info_bytes("t", 8, offset=1 << 60) + ZERO_BYTES, n_tensors=1),
        gguf_bytes(tensor_info_bytes("t", 1 << 40, 1 << 40) + ZERO_BYTES, n_tensors=1),
        gguf_bytes(tensor_info_bytes("t", 16) + tensor_info_bytes("u", 16, offset=32) + ZERO_BYTES, n_tensors=2),
        gguf_bytes(tensor_info_bytes("t", 16, kind=8) + ZERO_BYTES, n_tensors=1),
        gguf_bytes(tensor_info_bytes("t", 8, kind=99) + ZERO_BYTES, n_tensors=1),
        gguf_bytes(
            tensor_info_bytes("t", 8) + ZERO_BYTES,
            n_tensors=1,
            pairs=string_bytes("general.alignment") + struct.pack("<II", 4, 3),
            n_pairs=1,
        ),
    ],
)
def test_damaged_files_are_refused_at_once(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with counted_work.at_most(10_000), pytest.raises(ValueError) as e:
        GGUFReader(path)
    assert str(e.value).startswith(f"{path}: damaged GGUF file: ") or "begin with 'GGUF'" in str(e.value)
    assert "\n" not in str(e.value)


def test_huge_counts_in_a_huge_file_are_refused_at_once(tmp_path: Path) -> None:
    """Zeros parse as empty strings without end, so the reader compares the count with the file size first."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(n_pairs=1, pairs=string_bytes("a") + struct.pack("<II", 9, 8) + HUGE_COUNT))
    with path.open("ab") as f:
        f.truncate(1 << 30)  # a sparse file
    with counted_work.at_most(10_000), pytest.raises(ValueError, match="1152921504606846976 strings"):
        GGUFReader(path)


def test_metadata_and_tensors_are_read_as_written(tmp_path: Path) -> None:
    """Every type of metadata, in versions 2 and 3."""
    path = tmp_path / "m.gguf"
    w = GGUFWriter(path, "x")
    values: dict[str, Any] = {"u8": 200, "i8": -3, "u16": 60000, "i16": -300, "u32": 1 << 31, "i32": -9, "u64": 1 << 63}
    for key, value in values.items():
        getattr(w, {"u": "add_uint", "i": "add_int"}[key[0]] + key[1:])(key, value)
    w.add_float32("f32", 0.5)
    w.add_float64("f64", 0.1)
    w.add_bool("bool", True)
    w.add_string("string", "Größe\n")
    w.add_array("strings", ["a", "", "é"])
    w.add_array("ints", [1, 2, 3])
    w.add_array("bools", [True, False])
    w.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    for version in (3, 2):
        data = bytearray(path.read_bytes())
        data[4] = version
        path.write_bytes(data)
        reader = GGUFReader(path)
        meta = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in reader.metadata.items()}
        assert meta == {
            "general.architecture": "x",
            **values,
            **{"f32": 0.5, "f64": 0.1, "bool": True, "string": "Größe\n"},
            **{"strings": ["a", "", "é"], "ints": [1, 2, 3], "bools": [True, False]},
        }
        info = reader.tensors["t"]
        tensor = dequantize_blocks(reader.tensor_bytes(info), info.ggml_type, info.shape)
        assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("version", "name"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions_are_refused(tmp_path: Path, version: int, name: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(version=version))
    with pytest.raises(ValueError, match=f"{name} GGUF files are not supported: only"):
        GGUFReader(path)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        GGUFReader(tmp_path / "nothing.gguf")


def test_a_model_that_starts_reads_its_metadata_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, tokenizer and pooling share it: a vocabulary takes a tenth of a second."""
    opened = []
    read = GGUFReader.__init__

    def count(self: GGUFReader, path: Path) -> None:
        opened.append(path)
        read(self, path)

    monkeypatch.setattr(GGUFReader, "__init__", count)
    path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), "Q8_0", BYTE_LEVEL_VOCABULARY)
    LLM(str(path), kv_memory="4MiB").close()
    assert opened == [path]
