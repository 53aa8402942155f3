"""Hugging Face folders: one file, shards, multimodal models; and damage, reported in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from retain.formats.checkpoint import open_checkpoint
from retain.formats.random_weights import CONFIGS, MARKER_FILE
from retain.formats.safetensors import SafetensorsCheckpoint
from retain.models import list_families
from retain.models.weights import Weights, open_weights
from tests.helpers.decoder_runner import build_model
from tests.helpers.folders import save_model_folder
from tests.helpers.tiny_models import tiny_checkpoint


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_folder_is_read_as_it_was_written(tmp_path: Path, shards: int, dtype: torch.dtype) -> None:
    checkpoint = tiny_checkpoint("llama")
    ours = open_checkpoint(save_model_folder(tmp_path, checkpoint, shards, dtype))
    assert ours.config == checkpoint.config
    assert ours.names() == checkpoint.names()
    for name in checkpoint.names():
        assert ours.read(name).dtype == dtype
        assert torch.equal(ours.read(name), checkpoint.read(name).to(dtype))
    build_model(open_weights(tmp_path, torch.float32))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_only_the_language_model_of_a_multimodal_model_is_read(tmp_path: Path, prefix: str) -> None:
    text = tiny_checkpoint("gemma3_text")
    text.shapes["model.vision_tower.x.weight"] = text.shapes["model.multi_modal_projector.y"] = (3, 3)
    save_model_folder(tmp_path, text)
    tensors = {n.replace("model.", prefix, 1) if "vis" not in n and "multi" not in n else n: n for n in text.names()}
    save_file({new: text.read(old) for new, old in tensors.items()}, tmp_path / "model.safetensors")
    beside = {"eos_token_id": [1, 106], "tie_word_embeddings": True}  # they count there
    inside = text.config | {"tie_word_embeddings": False, "eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": inside, **beside}))
    ours = SafetensorsCheckpoint(tmp_path)
    assert ours.config == text.config | beside
    assert ours.names() == tiny_checkpoint("gemma3_text").names()
    assert torch.equal(ours.read("model.norm.weight"), text.read("model.norm.weight"))
    build_model(open_weights(tmp_path, torch.float32))


def test_two_tensors_of_one_name_in_the_language_model_are_damage(tmp_path: Path) -> None:
    text = tiny_checkpoint("gemma3_text")
    tensors = {name.replace("model.", "model.language_model.", 1): text.read(name) for name in text.names()}
    save_file(tensors | {"language_model.model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text.config}))
    with pytest.raises(ValueError, match=r"^[^\n]*damaged: the tensors '[^']*' and '[^']*norm.weight' are one$"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.slow
def test_folder_saved_by_transformers_is_read(tmp_path: Path) -> None:
    """transformers splits the shards by its own rule."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {k: v for k, v in tiny_checkpoint("llama").config.items() if k not in ("model_type", "rope_theta")}
    theirs = LlamaForCausalLM(LlamaConfig(**config))
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = SafetensorsCheckpoint(tmp_path)
    assert ours.names() == theirs.state_dict().keys()
    assert all(torch.equal(ours.read(n), x) for n, x in theirs.state_dict().items())


def load_error(folder: Path, file: str, content: Any) -> str:
    """Return the error of a folder after one file's content is replaced; None removes the file."""
    path = folder / file
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError) as e:
        ours = SafetensorsCheckpoint(folder)
        for name in sorted(ours.names()):
            ours.read(name)
    assert str(e.value).startswith(str(folder)) and "\n" not in str(e.value)
    return str(e.value)


def test_damaged_files_are_reported(tmp_path: Path) -> None:
    config = save_model_folder(tmp_path, tiny_checkpoint("llama")).joinpath("config.json").read_bytes()
    whole = (tmp_path / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for content in (b"", b"\0" * 8, b"\xff" * 64, whole[:header], whole[:-1], whole[:8] + b"[" + whole[9:]):
        assert "damaged" in load_error(tmp_path, "model.safetensors", content)
    (tmp_path / "model.safetensors").write_bytes(whole)
    assert "cannot be read: No such file" in load_error(tmp_path, "config.json", None)
    for content in (b"", b"\xff\xfe", b"[1]", b"{" * 100_000, b'{"a": ' * 100_000, config[:-1]):
        assert "damaged" in load_error(tmp_path, "config.json", content)
    quantized = json.loads(config) | {"quantization_config": {"quant_method": "hqq"}}
    assert "quantized by 'hqq'" in load_error(tmp_path, "config.json", quantized)


def test_damaged_shards_and_indexes_are_reported(tmp_path: Path) -> None:
    save_model_folder(tmp_path, tiny_checkpoint("llama"), shards=3)
    index = "model.safetensors.index.json"
    weight_map = json.loads((tmp_path / index).read_text())["weight_map"]
    name = next(iter(weight_map))
    assert "'nothing'" in load_error(tmp_path, index, {"weight_map": {**weight_map, "nothing": weight_map[name]}})
    assert "not a file of this folder" in load_error(tmp_path, index, {"weight_map": {name: "../model.safetensors"}})
    assert "cannot be read" in load_error(tmp_path, index, {"weight_map": {name: "model-9.safetensors"}})
    for content in ({"weight_map": {name: 3}}, {"weight_map": []}, {}, []):
        assert "damaged" in load_error(tmp_path, index, content)


def test_pickles_are_refused(tmp_path: Path) -> None:
    save_model_folder(tmp_path, tiny_checkpoint("llama"))
    assert "no weights" in load_error(tmp_path, "model.safetensors", None)
    assert "pickled" in load_error(tmp_path, "pytorch_model.bin", b"cos\nsystem\n(S'true'\ntR.")


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    save_model_folder(tmp_path, tiny_checkpoint("llama"))
    save_file({"x": torch.ones(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="int8"):
        SafetensorsCheckpoint(tmp_path).read("x")


HUGE_TEXT = "x" * 5000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2**31),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 2.5),
        ("max_position_embeddings", "x"),
        ("max_position_embeddings", None),
        ("max_position_embeddings", math.nan),
        ("max_position_embeddings", -3),
        ("max_position_embeddings", 2**70),
        ("vocab_size", HUGE_TEXT),
        ("num_attention_heads", True),
        ("sliding_window", -5),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", HUGE_TEXT),
        ("rope_theta", -1),
        ("rope_theta", math.inf),
        ("rope_scaling", HUGE_TEXT),
        ("rope_scaling", {"rope_type": "linear", "factor": math.nan}),
    ],
)
def test_numbers_out_of_bounds_are_refused_before_they_are_used(tmp_path: Path, key: str, value: Any) -> None:
    checkpoint = tiny_checkpoint("llama")
    save_model_folder(tmp_path, checkpoint)
    message = load_error(tmp_path, "config.json", checkpoint.config | {key: value})
    assert key in message and "config.json" in message and len(message) < len(str(tmp_path)) + 250


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": HUGE_TEXT},
        {"model_type": HUGE_TEXT},
        {"rope_scaling": {"rope_type": HUGE_TEXT}},
        {"quantization_config": {"quant_method": HUGE_TEXT}},
        {HUGE_TEXT: {"a": 1}, "rope_scaling": {"rope_type": "yarn", "factor": HUGE_TEXT}},
    ],
)
def test_errors_quote_no_more_than_a_line_of_a_file(tmp_path: Path, change: dict[str, Any]) -> None:
    checkpoint = tiny_checkpoint("llama")
    save_model_folder(tmp_path, checkpoint)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config | change))
    with pytest.raises(ValueError) as e:
        build_model(Weights(SafetensorsCheckpoint(tmp_path), torch.float32))
    others = len(", ".join(list_families()))  # one message names them
    assert len(str(e.value)) < len(str(tmp_path)) + others + 300 and "\n" not in str(e.value)


def test_a_folder_of_random_weights_needs_a_known_config(tmp_path: Path) -> None:
    (tmp_path / MARKER_FILE).write_text("{}")
    for config in (
        {},
        {"model_type": "opt"},
        CONFIGS["tiny"] | {"num_hidden_layers": 2**31},
        {"model_type": ["llama"]},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"config\.json"):
            open_checkpoint(tmp_path)
