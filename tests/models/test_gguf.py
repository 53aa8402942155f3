"""GGUF files come out as they went in: every quantised type, every architecture; and damage is told, not suffered."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from retain import models
from retain.formats.gguf import GGUFCheckpoint
from retain.formats.gguf.config import recover_llama3_scaling
from retain.formats.gguf.dequantize import GGML_BLOCK_SIZES, dequantize_tensor
from retain.formats.gguf.reader import GGUFReader
from retain.models.resolve import resolve_model
from retain.models.weights import Weights, open_checkpoint, open_weights
from tests.helpers.gguf_files import BYTE_LEVEL_VOCABULARY, GGUF_ARCHS, write_gguf
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint

FLOAT_TYPES = [k for k in GGMLQuantizationType if k.name not in ("I8", "I16", "I32", "I64", "F64")]


def tiny_for_gguf(model_type: str) -> TinyCheckpoint:
    """Without what a GGUF file of that architecture cannot say."""
    if model_type == "gemma3_text":  # every sixth layer sees everything, whatever the file
        return tiny_checkpoint(model_type, sliding_window_pattern=6, num_hidden_layers=7, query_pre_attn_scalar=16)
    if model_type == "qwen2":
        return tiny_checkpoint(model_type, use_sliding_window=False)
    return tiny_checkpoint(model_type)


# Numbers


@pytest.mark.parametrize("kind", FLOAT_TYPES, ids=lambda k: k.name)
def test_numbers_are_those_of_the_library(kind: GGMLQuantizationType) -> None:
    block, width = GGML_BLOCK_SIZES[kind]
    shape = (5, 2 * block if block > 1 else 7)
    raw = np.random.default_rng(kind).integers(0, 256, (5 * shape[1] // block) * width, dtype=np.uint8)
    try:
        with np.errstate(all="ignore"):
            right = gguf.quants.dequantize(raw.reshape(5, -1), kind)
    except NotImplementedError:
        with pytest.raises(ValueError, match="not supported"):
            dequantize_tensor(raw, kind, shape)
        return
    ours = dequantize_tensor(raw, kind, shape)
    assert ours.shape == shape
    assert np.array_equal(ours.float().numpy().view(np.uint32), right.astype(np.float32).view(np.uint32)) or (
        np.array_equal(ours.float().numpy(), right, equal_nan=True)  # NaNs may have another payload
    )


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_quantised_file(tmp_path: Path, kind: str) -> None:
    source = tiny_for_gguf("llama")
    path = write_gguf(tmp_path / "m.gguf", source, kind)
    ours, exact = GGUFCheckpoint(path), {}
    for tensor in gguf.GGUFReader(path).tensors:
        exact[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert np.array_equal(ours.read("model.layers.1.mlp.down_proj.weight").float(), exact["blk.1.ffn_down.weight"])
    assert np.array_equal(ours.read("model.embed_tokens.weight").float(), exact["token_embd.weight"])
    wanted = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert ours.read("lm_head.weight").dtype == wanted
    assert ours.read("model.norm.weight").dtype == torch.float32


# Architectures


@pytest.mark.parametrize("model_type", GGUF_ARCHS)
def test_every_architecture_comes_back(tmp_path: Path, model_type: str) -> None:
    source = tiny_for_gguf(model_type)
    ours = open_checkpoint(write_gguf(tmp_path / "m.gguf", source, vocabulary=BYTE_LEVEL_VOCABULARY))
    assert isinstance(ours, GGUFCheckpoint)
    assert ours.names() == source.names()
    for name in source.names():
        assert torch.allclose(ours.read(name), source.read(name), rtol=0, atol=1e-6), name
    family = models.load_family(ours.config["model_type"])
    assert family.spec_from_config(ours.config) == family.spec_from_config(source.config)
    assert (ours.config["bos_token_id"], ours.config["eos_token_id"]) == (125, 126)
    assert ours.metadata["tokenizer.ggml.pre"] == "gpt-2"
    models.build(Weights(ours, torch.float32))


def test_biases_of_llama_are_put_back_in_order(tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", attention_bias=True)
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", source))
    assert all(torch.equal(ours.read(n), source.read(n)) for n in source.names())


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2"])
def test_transformers_reads_the_same(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = write_gguf(
        tmp_path / "m.gguf", tiny_for_gguf(model_type), "Q8_0", BYTE_LEVEL_VOCABULARY, {"general.name": "tiny"}
    )
    theirs = load_gguf_checkpoint(str(path))["config"]
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.for_model(**theirs))
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    ours = GGUFCheckpoint(path)
    assert ours.names() == state.keys()
    for name in ours.names():
        assert torch.equal(ours.read(name).float(), state[name]), name
    same = theirs.keys() & ours.config.keys()
    assert len(same) > 8 or model_type == "gpt2"
    assert {key: theirs[key] for key in same} == {key: ours.config[key] for key in same}


def test_the_embedded_llama() -> None:
    path = resolve_model("smollm2")
    ours = GGUFCheckpoint(path)
    config = ours.config
    assert config["num_hidden_layers"] == 30
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["vocab_size"] == 49152
    assert config["max_position_embeddings"] == 8192
    assert config["tie_word_embeddings"] and "lm_head.weight" not in ours.names()
    exact = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for theirs, name in (("token_embd", "embed_tokens"), ("blk.29.ffn_up", "layers.29.mlp.up_proj")):
        tensor = exact[f"{theirs}.weight"]
        assert np.array_equal(
            ours.read(f"model.{name}.weight"), gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        ), name


def test_the_embedded_gemma() -> None:
    start = time.perf_counter()
    ours = GGUFCheckpoint(resolve_model("gemma3"))
    assert time.perf_counter() - start < 3  # ten seconds with the library; 0.1 when nothing else runs
    config = ours.config
    assert config["model_type"] == "gemma3_text"
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert (config["sliding_window"], config["head_dim"], config["query_pre_attn_scalar"]) == (512, 256, 256)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1_000_000.0, 10_000.0)
    assert len(ours.names()) == 236
    assert ours.read("model.layers.0.self_attn.q_norm.weight").abs().max() < 10
    assert ours.read("model.embed_tokens.weight").shape == (262144, 640)


# What the config says


def read_config(tmp_path: Path, model_type: str = "llama", **extra: Any) -> dict[str, Any]:
    arch = GGUF_ARCHS[model_type]
    more = {f"{arch}.{key.replace('__', '.')}": value for key, value in extra.items()}
    return GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf(model_type), extra=more)).config


def test_rope_scaling(tmp_path: Path) -> None:
    assert read_config(tmp_path)["rope_scaling"] is None
    assert read_config(tmp_path, rope__scaling__type="none")["rope_scaling"] is None
    assert read_config(tmp_path, rope__scale_linear=2.0)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    linear = read_config(tmp_path, rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 128}
    right = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_config(tmp_path, **yarn)["rope_scaling"] == right
    with pytest.raises(ValueError, match="attn_factor"):
        read_config(tmp_path, **yarn, rope__scaling__attn_factor=2.0)


def llama3_rope_factors(dim: int, theta: float, factor: float = 8.0) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter computes them."""
    low, high, old = 1.0, 4.0, 8192
    factors = []
    for freq in 1.0 / theta ** (np.arange(0, dim, 2) / dim):
        wavelength = 2 * np.pi / freq
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path: Path, factor: float) -> None:
    """And gives the frequencies that llama.cpp would use."""
    from retain.models.rope import get_rope, get_rope_parameters

    source = tiny_checkpoint("llama", head_dim=128, num_attention_heads=2, num_key_value_heads=1, rope_theta=500000.0)
    factors = llama3_rope_factors(128, 500000.0, factor)
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", source, tensors={"rope_freqs.weight": factors}))
    assert ours.config["rope_scaling"]["rope_type"] == "llama3"
    assert ours.names() == source.names()
    freqs = get_rope(128, get_rope_parameters(ours.config)).freqs
    plain = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    assert torch.allclose(freqs, plain / torch.from_numpy(factors), rtol=1e-5)


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    factors = llama3_rope_factors(16, 10000.0)
    assert recover_llama3_scaling(torch.ones(8), 10000.0) is None
    for wrong in (factors[::-1].copy(), factors + 0.5, factors[:4], np.full(8, np.nan, np.float32), factors * 0):
        with pytest.raises(ValueError, match="rope_freqs"):
            GGUFCheckpoint(
                write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), tensors={"rope_freqs.weight": wrong})
            )


def test_gemma_scales_its_queries(tmp_path: Path) -> None:
    assert read_config(tmp_path, "gemma3_text")["query_pre_attn_scalar"] == 16
    large = tiny_checkpoint("gemma3_text", num_hidden_layers=62, hidden_size=96, head_dim=16)
    assert GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", large)).config["query_pre_attn_scalar"] == 24


def test_gemma_may_list_which_layers_slide(tmp_path: Path) -> None:
    slides = [True, False] * 3 + [True]
    types = read_config(tmp_path, "gemma3_text", attention__sliding_window_pattern=slides)["layer_types"]
    assert [kind == "sliding_attention" for kind in types] == slides
    assert read_config(tmp_path, "gemma3_text", attention__sliding_window_pattern=2)["layer_types"] == types
    with pytest.raises(ValueError, match="for 2 layers, there are 7"):
        read_config(tmp_path, "gemma3_text", attention__sliding_window_pattern=slides[:2])


def test_layers_that_agree_may_be_listed(tmp_path: Path) -> None:
    assert read_config(tmp_path, attention__head_count_kv=[2, 2, 2])["num_key_value_heads"] == 2
    with pytest.raises(ValueError, match="differs between layers"):
        read_config(tmp_path, attention__head_count_kv=[2, 1, 2])


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported: only llama, "),
        ({"llama.block_count": 2**31}, "2147483648"),
        ({"llama.block_count": None}, "llama.block_count is missing or 0"),
        ({"llama.block_count": "three"}, "'three'"),
        ({"llama.block_count": 2}, r"blk\.2\..*not known"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.attention.value_length": 8}, "not supported"),
        ({"llama.rope.dimension_count": 8}, "not supported"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_is_not_supported_is_said(tmp_path: Path, extra: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why) as e:
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), extra=extra))
    name, said = str(e.value).split(".gguf: ")
    assert name == str(tmp_path / "m") and "\n" not in said
    assert said.startswith("damaged GGUF file: ") != any(word in said for word in ("supported", "parts", "not known"))


def test_a_tensor_that_is_not_known_is_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"blk\.0\.attn_sinks"):
        GGUFCheckpoint(
            write_gguf(
                tmp_path / "m.gguf", tiny_for_gguf("llama"), tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
            )
        )


# Weights


def test_weights_have_one_dtype_and_tell_of_progress(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), "Q8_0")
    w = open_weights(path, torch.bfloat16, progress=True)  # no terminal here, so no bar
    assert w["model.norm.weight"].dtype == torch.bfloat16
    assert "weight" not in w.scope("model.norm.x.") and "weight" in w.scope("model.norm.")
    with pytest.raises(ValueError, match=r"no tensor 'model\.norm\.bias'"):
        w["model.norm.bias"]


def test_the_bar_is_drawn_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"))
    for progress in (False, True):
        w = open_weights(path, torch.float32, progress=progress)
        for name in w.checkpoint.names():
            w[name]
        out, err = capsys.readouterr()
        assert not out and ("loading m.gguf" in err) == progress


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        open_weights(tmp_path / "nothing.gguf", torch.float32)


# Damage


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
def test_damage_is_found_at_once(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(ValueError) as e:
        GGUFReader(path)
    assert time.perf_counter() - start < 1
    assert str(e.value).startswith(f"{path}: damaged GGUF file: ") or "begin with 'GGUF'" in str(e.value)
    assert "\n" not in str(e.value)


def test_huge_counts_in_a_huge_file(tmp_path: Path) -> None:
    """Zeros are strings of no length, as many as you like: the count is compared with the file before any is made."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(n_pairs=1, pairs=string_bytes("a") + struct.pack("<II", 9, 8) + HUGE_COUNT))
    with path.open("ab") as f:
        f.truncate(1 << 30)  # holes, no bytes
    start = time.perf_counter()
    with pytest.raises(ValueError, match="1152921504606846976 strings"):
        GGUFReader(path)
    assert time.perf_counter() - start < 1


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """Every type of metadata; version 2 is the same as 3."""
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
        header = GGUFReader(path)
        meta = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in header.metadata.items()}
        assert meta == {
            "general.architecture": "x",
            **values,
            **{"f32": 0.5, "f64": 0.1, "bool": True, "string": "Größe\n"},
            **{"strings": ["a", "", "é"], "ints": [1, 2, 3], "bools": [True, False]},
        }
        stored = header.tensors["t"]
        assert dequantize_tensor(header.tensor_bytes(stored), stored.ggml_type, stored.shape).tolist() == [
            [0, 1, 2],
            [3, 4, 5],
        ]


@pytest.mark.parametrize(("version", "why"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_other_versions_are_refused(tmp_path: Path, version: int, why: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(version=version))
    with pytest.raises(ValueError, match=f"{why} GGUF files are not supported: only"):
        GGUFReader(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        GGUFReader(tmp_path / "nothing.gguf")
