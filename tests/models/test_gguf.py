"""GGUF files of every architecture and type are read as they were written; unsupported ones are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from retain import models
from retain.formats.checkpoint import open_checkpoint
from retain.formats.gguf import GGUFCheckpoint
from retain.formats.gguf.metadata import recover_llama3_scaling
from retain.formats.gguf.types import GGML_BLOCK_SIZES
from retain.kernels.weights.ggml_blocks import dequantize_blocks, is_supported
from retain.models.resolve import resolve_model
from retain.models.rope import get_rope, get_rope_parameters
from retain.models.weights import Weights, open_weights
from tests.helpers import counted_work
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.family_variants import YARN
from tests.helpers.gguf_files import (
    BYTE_LEVEL_VOCABULARY,
    FLOAT_TYPES,
    GGUF_ARCHS,
    list_tensors,
    tiny_for_gguf,
    write_gguf,
)
from tests.helpers.gguf_hybrids import VARIANTS
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint

# Values


@pytest.mark.parametrize("ggml_type", FLOAT_TYPES, ids=lambda t: t.name)
def test_dequantized_values_equal_the_library(ggml_type: GGMLQuantizationType) -> None:
    block_size, block_bytes = GGML_BLOCK_SIZES[ggml_type]
    shape = (5, 2 * block_size if block_size > 1 else 7)
    num_bytes = (5 * shape[1] // block_size) * block_bytes
    raw = np.random.default_rng(ggml_type).integers(0, 256, num_bytes, dtype=np.uint8)
    try:
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(raw.reshape(5, -1), ggml_type)
    except NotImplementedError:
        assert not is_supported(ggml_type)
        return
    assert is_supported(ggml_type)
    ours = dequantize_blocks(raw, ggml_type, shape)
    assert ours.shape == shape
    values, bits = ours.float().numpy(), expected.astype(np.float32).view(np.uint32)
    # NaNs may have another payload.
    assert np.array_equal(values.view(np.uint32), bits) or np.array_equal(values, expected, equal_nan=True)


@pytest.mark.parametrize("ggml_type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_tensors_of_a_quantized_file_equal_the_library(tmp_path: Path, ggml_type: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), ggml_type)
    ours, exact = GGUFCheckpoint(path), {}
    for tensor in gguf.GGUFReader(path).tensors:
        exact[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    assert np.array_equal(ours.read("model.layers.1.mlp.down_proj.weight").float(), exact["blk.1.ffn_down.weight"])
    assert np.array_equal(ours.read("model.embed_tokens.weight").float(), exact["token_embd.weight"])
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(ggml_type, torch.float32)
    assert ours.read("lm_head.weight").dtype == dtype
    assert ours.read("model.norm.weight").dtype == torch.float32


# Architectures


OLMO3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, **YARN, "attention_factor": 1.25},
}
LONGROPE = {
    **{"rope_type": "longrope", "original_max_position_embeddings": 64},
    **{"long_factor": [1.5 + i for i in range(6)], "short_factor": [1.25] * 6},
}
MINISTRAL3_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 500.0, **YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    **{"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.25},
}

MUSE_LAYERS = {
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
    "layer_rope_theta": [0, 10000.0, 0, 10000.0, 0],
}


def check_read_as_written(path: Path, checkpoint: TinyCheckpoint) -> None:
    """Compare the tensors, the spec and the logits of a written checkpoint with its own."""
    ours = open_checkpoint(write_gguf(path, checkpoint, vocabulary=BYTE_LEVEL_VOCABULARY))
    assert isinstance(ours, GGUFCheckpoint)
    tensors = list_tensors(checkpoint)
    assert ours.names() == tensors.keys()
    for name, x in tensors.items():
        assert torch.allclose(ours.read(name), torch.from_numpy(x), rtol=0, atol=1e-6), name
    family = models.load_family(ours.config["model_type"])
    assert family.spec_from_config(ours.config) == family.spec_from_config(checkpoint.config)
    assert (ours.config["bos_token_id"], ours.config["eos_token_id"]) == (125, 126)
    assert ours.metadata["tokenizer.ggml.pre"] == "gpt-2"
    text = random_tokens(40)
    both = (build_model(Weights(c, torch.float32)) for c in (ours, checkpoint))
    of_file, expected = (run_decoder(model, [text], [[40]])[0] for model in both)
    torch.testing.assert_close(of_file, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", GGUF_ARCHS)
def test_every_architecture_is_read_as_written(tmp_path: Path, model_type: str) -> None:
    check_read_as_written(tmp_path / "m.gguf", tiny_for_gguf(model_type))


STORED_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("olmo2", {"tie_word_embeddings": True, "rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 8.0}}),
    ("olmo3", {"layer_types": None, "rope_scaling": None}),
    ("olmo3", {"rope_parameters": OLMO3_ROPE, "rope_scaling": None, "rope_theta": None}),
    ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    ("phi3", {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.75}),
    ("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "attention_multiplier": 0.25}),
    ("glm4", {"attention_bias": False, "partial_rotary_factor": 0.25}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("ministral3", {"rope_parameters": MINISTRAL3_ROPE, "tie_word_embeddings": True}),
    ("muse_glimmer_text", {**MUSE_LAYERS, "qk_scale_factor": 0.5}),
]


@pytest.mark.parametrize(("model_type", "changes"), STORED_VARIANTS, ids=lambda x: "+".join(x))
def test_variants_are_read_as_written(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    check_read_as_written(tmp_path / "m.gguf", tiny_checkpoint(model_type, **changes))


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS, ids=lambda x: "+".join(x))
def test_variants_of_hybrids_are_read_as_written(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    check_read_as_written(tmp_path / "m.gguf", tiny_for_gguf(model_type, **changes))


def test_llama_biases_are_put_back_in_order(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", attention_bias=True)
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint))
    assert all(torch.equal(ours.read(n), checkpoint.read(n)) for n in checkpoint.names())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "phi3"])
def test_transformers_reads_the_same_tensors_and_config(tmp_path: Path, model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = write_gguf(
        tmp_path / "m.gguf", tiny_for_gguf(model_type), "Q8_0", BYTE_LEVEL_VOCABULARY, {"general.name": "tiny"}
    )
    theirs = load_gguf_checkpoint(str(path))["config"]
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{"pad_token_id": 0, **theirs})
        )  # of Phi-3: 32000
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    ours = GGUFCheckpoint(path)
    assert ours.names() == state.keys()
    for name in ours.names():
        assert torch.equal(ours.read(name).float(), state[name]), name
    shared = theirs.keys() & ours.config.keys()
    assert len(shared) > 8 or model_type == "gpt2"
    assert {key: theirs[key] for key in shared} == {key: ours.config[key] for key in shared}


@pytest.mark.slow
def test_bundled_smollm2_equals_the_library() -> None:
    path = resolve_model("smollm2")
    ours = GGUFCheckpoint(path)
    config = ours.config
    assert config["num_hidden_layers"] == 30
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert config["vocab_size"] == 49152
    assert config["max_position_embeddings"] == 8192
    assert config["tie_word_embeddings"] and "lm_head.weight" not in ours.names()
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    for gguf_name, name in (("token_embd", "embed_tokens"), ("blk.29.ffn_up", "layers.29.mlp.up_proj")):
        tensor = tensors[f"{gguf_name}.weight"]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.read(f"model.{name}.weight"), expected), name


@pytest.mark.slow
def test_bundled_gemma_opens_quickly_and_has_its_config() -> None:
    with counted_work.at_most(10 * 262144):  # it has 262144 tokens; the library takes ten seconds
        ours = GGUFCheckpoint(resolve_model("gemma3"))
    config = ours.config
    assert config["model_type"] == "gemma3_text"
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert (config["sliding_window"], config["head_dim"], config["query_pre_attn_scalar"]) == (512, 256, 256)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1_000_000.0, 10_000.0)
    assert len(ours.names()) == 236
    assert ours.read("model.layers.0.self_attn.q_norm.weight").abs().max() < 10
    assert ours.read("model.embed_tokens.weight").shape == (262144, 640)


# The config


def read_config(tmp_path: Path, model_type: str = "llama", **extra: Any) -> dict[str, Any]:
    arch = GGUF_ARCHS[model_type]
    metadata = {f"{arch}.{key.replace('__', '.')}": value for key, value in extra.items()}
    return GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf(model_type), extra=metadata)).config


def test_rope_scaling_is_read_from_the_metadata(tmp_path: Path) -> None:
    assert read_config(tmp_path)["rope_scaling"] is None
    assert read_config(tmp_path, rope__scaling__type="none")["rope_scaling"] is None
    assert read_config(tmp_path, rope__scale_linear=2.0)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    linear = read_config(tmp_path, rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 128}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    expected |= {"beta_fast": 32.0, "beta_slow": 1.0}
    assert read_config(tmp_path, **yarn)["rope_scaling"] == expected
    with pytest.raises(ValueError, match="attn_factor"):
        read_config(tmp_path, **yarn, rope__scaling__attn_factor=2.0)


def llama3_rope_factors(dim: int, theta: float, factor: float = 8.0) -> np.ndarray[Any, Any]:
    """Compute the divisors as llama.cpp's converter does."""
    low, high, context = 1.0, 4.0, 8192
    factors = []
    for freq in 1.0 / theta ** (np.arange(0, dim, 2) / dim):
        wavelength = 2 * np.pi / freq
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path: Path, factor: float) -> None:
    """The recovered scaling gives the frequencies that llama.cpp uses."""
    checkpoint = tiny_checkpoint(
        "llama", head_dim=128, num_attention_heads=2, num_key_value_heads=1, rope_theta=500000.0
    )
    factors = llama3_rope_factors(128, 500000.0, factor)
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint, tensors={"rope_freqs.weight": factors}))
    assert ours.config["rope_scaling"]["rope_type"] == "llama3"
    assert ours.names() == checkpoint.names()
    freqs = get_rope(128, get_rope_parameters(ours.config)).freqs
    plain = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    assert torch.allclose(freqs, plain / torch.from_numpy(factors), rtol=1e-5)


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    factors = llama3_rope_factors(16, 10000.0)
    assert recover_llama3_scaling(torch.ones(8), 10000.0) is None
    for unknown in (factors[::-1].copy(), factors + 0.5, factors[:4], np.full(8, np.nan, np.float32), factors * 0):
        with pytest.raises(ValueError, match="rope_freqs"):
            write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), tensors={"rope_freqs.weight": unknown})
            GGUFCheckpoint(tmp_path / "m.gguf")


def test_gemma_query_scale_depends_on_the_model_size(tmp_path: Path) -> None:
    assert read_config(tmp_path, "gemma3_text")["query_pre_attn_scalar"] == 16
    large = tiny_checkpoint("gemma3_text", num_hidden_layers=62, hidden_size=96, head_dim=16)
    assert GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", large)).config["query_pre_attn_scalar"] == 24


def test_gemma_files_may_list_the_sliding_layers(tmp_path: Path) -> None:
    is_sliding = [True, False] * 3 + [True]
    types = read_config(tmp_path, "gemma3_text", attention__sliding_window_pattern=is_sliding)["layer_types"]
    assert [kind == "sliding_attention" for kind in types] == is_sliding
    assert read_config(tmp_path, "gemma3_text", attention__sliding_window_pattern=2)["layer_types"] == types
    with pytest.raises(ValueError, match="for 2 layers, there are 7"):
        read_config(tmp_path, "gemma3_text", attention__sliding_window_pattern=is_sliding[:2])


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_a_window_counts_in_the_families_that_have_one(tmp_path: Path, model_type: str) -> None:
    config = read_config(tmp_path, model_type, attention__sliding_window=8)
    windows = models.load_family(model_type).spec_from_config(config).kv_cache.windows
    assert set(windows) == ({8, None} if model_type == "gemma3_text" else {None})
    without = models.load_family(model_type).spec_from_config(
        read_config(tmp_path, model_type, attention__sliding_window=None)
    )
    assert set(without.kv_cache.windows) == {None}


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"mlp_bias": True}])
def test_the_tensors_of_a_file_say_whether_there_are_biases(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint = tiny_checkpoint("llama", **changes)
    ours = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", checkpoint))
    assert (ours.config["attention_bias"], ours.config["mlp_bias"]) == (
        "attention_bias" in changes,
        "mlp_bias" in changes,
    )
    build_model(Weights(ours, torch.float32))


def test_values_listed_by_layer_must_be_equal(tmp_path: Path) -> None:
    assert read_config(tmp_path, attention__head_count_kv=[2, 2, 2])["num_key_value_heads"] == 2
    with pytest.raises(ValueError, match="differs between layers"):
        read_config(tmp_path, attention__head_count_kv=[2, 1, 2])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported: only cohere2, "),
        ({"llama.block_count": 2**31}, "2147483648"),
        ({"llama.block_count": None}, "llama.block_count is missing or 0"),
        ({"llama.block_count": "three"}, "'three'"),
        ({"llama.block_count": 2}, r"blk\.2\..*not known"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"llama.context_length": 2**31}, "max_position_embeddings is 2147483648"),
        ({"llama.rope.freq_base": float("nan")}, "rope_theta is nan"),
        ({"llama.block_count": "x" * 5000}, r"'x{50,100}\.\.\."),
        ({"general.architecture": "x" * 5000}, r"'x{50,100}\.\.\. is not supported"),
        ({"llama.expert_count": 8}, "experts"),
        ({"llama.attention.value_length": 8}, "not supported"),
        ({"llama.rope.dimension_count": 8}, "not supported"),
        ({"split.count": 3}, "one of 3 parts: name each"),
    ],
)
def test_unsupported_metadata_is_reported(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as e:
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), extra=extra))
    name, reason = str(e.value).split(".gguf: ")
    assert name == str(tmp_path / "m") and "\n" not in reason
    is_unsupported = any(word in reason for word in ("supported", "parts", "not known"))
    assert reason.startswith("damaged GGUF file: ") != is_unsupported


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"blk\.0\.attn_sinks"):
        tensors = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), tensors=tensors))


def test_scales_of_whole_tensors_are_refused(tmp_path: Path) -> None:
    """Some files in NVFP4 have them. Left out, the matrix would be wrong by that factor."""
    with pytest.raises(ValueError, match=r"the tensor 'blk\.0\.ffn_up\.scale' is not known") as error:
        tensors = {"blk.0.ffn_up.scale": np.full(1, 0.5, np.float32)}
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), tensors=tensors))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "blk.0.attn_norm.bias"),
        ("llama", "output.bias"),
        ("qwen2", "blk.0.attn_output.bias"),
        ("qwen3", "blk.0.ffn_up.bias"),
        ("gemma3_text", "blk.0.ffn_down.bias"),
    ],
)
def test_biases_that_a_family_does_not_have_are_refused(tmp_path: Path, model_type: str, name: str) -> None:
    """The file has no flag that denies them: they are part of the model."""
    with pytest.raises(ValueError, match=re.escape(f"the tensor {name!r} is not known in a {model_type} model")):
        tensors = {name: np.ones(64, np.float32)}
        GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tiny_for_gguf(model_type), tensors=tensors))


# Weights


def test_weights_have_the_chosen_dtype(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_for_gguf("llama"), "Q8_0")
    w = open_weights(path, torch.bfloat16, progress=True)  # no terminal, so no bar
    assert w["model.norm.weight"].dtype == torch.bfloat16
    assert "weight" not in w.scope("model.norm.x.") and "weight" in w.scope("model.norm.")
    with pytest.raises(ValueError, match=r"no tensor 'model\.norm\.bias'"):
        w["model.norm.bias"]


def test_progress_bar_is_drawn_on_a_terminal(
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


def test_missing_path_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        open_weights(tmp_path / "nothing.gguf", torch.float32)
