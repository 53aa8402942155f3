"""Laws of EAGLE-3 heads, which read states between layers of their target."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from retain import LLM
from retain.engine import drafters
from retain.engine.request import Request
from retain.kernels import import_backend
from retain.kernels.slots.pool_dtypes import INT4
from retain.sampling_params import SamplingParams
from tests.helpers import tiny_heads
from tests.helpers.drafts import PROMPT, check_draft_logits, check_drafts_follow, check_greedy_and_hits, record_drafts
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.folders import save_model_folder, save_tiny_smollm2
from tests.helpers.marks import slow
from tests.helpers.tiny_heads import Eagle3Checkpoint, tiny_eagle3, write_eagle3_gguf
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint
from tests.models.test_families import build_transformers_model


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate heads [T, H, 16]: pairs are i and i + 8."""
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(8) / 8)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


@torch.inference_mode()
def plain_drafts(family: str, kind: str, prompt: list[int], k: int) -> tuple[list[int], Tensor]:
    """Return the target's next token and k drafts, and the logits of these [k, V]: the format, written down in torch.

    States of the target are those of transformers. Pairs of a token and the state before it begin with the second
    token, and have the positions of the tokens.
    """
    checkpoint = tiny_eagle3(tiny_checkpoint(family).config, kind)
    w = {name.removeprefix("midlayer.").removeprefix("layers.0."): checkpoint.read(name) for name in checkpoint.names()}
    model = build_transformers_model(tiny_checkpoint(family))
    done = model(torch.tensor([prompt]), output_hidden_states=True)
    n = len(done.hidden_states) - 1
    layers = [2, n // 2, n - 3] if kind == "plain" else [0, 2]
    found = torch.cat([done.hidden_states[i][0] for i in layers], -1)
    found = rms(found, w["input_norm.weight"]) if kind == "other" else found
    states = found @ w["fc.weight"].T  # [T, h]
    table = w["embed_tokens.weight"] if kind == "other" else model.get_input_embeddings().weight
    tokens = [int(done.logits[0, -1].argmax())]
    logits = []
    for _ in range(k):
        ids = torch.tensor([*prompt[1:], *tokens])
        positions = torch.arange(1, len(ids) + 1)
        normed = rms(states, w["hidden_norm.weight"])
        x = normed if kind == "other" else states
        both = torch.cat((rms(table[ids], w["input_layernorm.weight"]), normed), -1)
        q, key, v = ((both @ w[f"self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, 16)) for part in "qkv")
        if kind == "other":
            q, key = rms(q, w["self_attn.q_norm.weight"]), rms(key, w["self_attn.k_norm.weight"])
        q, key, v = (part.transpose(0, 1) for part in (rotate(q, positions), rotate(key, positions), v))
        o = F.scaled_dot_product_attention(q[None], key[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = x + o.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
        y = rms(x, w["post_attention_layernorm.weight"])
        y = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x = x + y @ w["mlp.down_proj.weight"].T
        out = rms(x[-1:], w["norm.weight"])
        states = torch.cat((states, out if kind == "other" else x[-1:]))
        known = (out @ w["lm_head.weight"].T)[0]
        if "d2t" in w:
            row = torch.full((128,), -torch.inf)
            row[torch.arange(len(known)) + w["d2t"]] = known
            known = row
        logits.append(known)
        tokens.append(int(known.argmax()))
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("family", ["llama", *slow("qwen3", "gpt_oss")])
@pytest.mark.parametrize("kind", ["plain", "other"])
@pytest.mark.parametrize("length", [1, 9, 60])
@pytest.mark.parametrize("backend", ["cpu", "reference", *slow("triton")])
def test_drafts_equal_the_format_in_plain_torch(family: str, kind: str, length: int, backend: str) -> None:
    check_draft_logits(family, f"eagle3:k=4,model={kind}", backend, length, partial(plain_drafts, family, kind))


@pytest.mark.parametrize("family", ["gemma4_text", *slow("llama", "qwen3_5_text")])
@pytest.mark.parametrize("spec", ["eagle3:k=5,model=plain", *slow("eagle3:model=other")])
@pytest.mark.parametrize("backend", ["cpu", *slow("reference", "triton")])
@pytest.mark.parametrize("kv_dtype", [None, *slow(INT4)])
def test_greedy_tokens_and_hits_are_those_of_plain_decoding(
    family: str, spec: str, backend: str, kv_dtype: torch.dtype | None
) -> None:
    check_greedy_and_hits(family, spec, backend, kv_dtype)


@pytest.mark.parametrize("backend", ["cpu", *slow("reference")])
def test_drafts_follow_from_the_text_whatever_happened(backend: str) -> None:
    check_drafts_follow("llama", "eagle3:k=3,model=plain", backend)


@pytest.mark.parametrize("backend", ["cpu", *slow("reference", "triton")])
def test_a_head_that_knows_the_only_token_is_always_right(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target whose layers repeat one token, and a head that knows no other."""
    if reason := import_backend(backend).unavailable_reason():
        pytest.skip(reason)
    request = make_request(PROMPT, 31)
    run_to_completion(make_engine("llama", backend=backend), [request])
    (token,) = set(request.output_tokens)
    read = Eagle3Checkpoint.read
    monkeypatch.setitem(tiny_heads.EAGLE3_CONFIGS, "plain", {"draft_vocab_size": 1})
    monkeypatch.setattr(
        Eagle3Checkpoint, "read", lambda self, name: torch.tensor([token]) if name == "d2t" else read(self, name)
    )
    engine = make_engine("llama", backend=backend, drafter=drafters.parse("eagle3:k=4,model=plain"))
    request = make_request(PROMPT, 31)
    run_to_completion(engine, [request])
    stats = request.stats.spec_decode
    assert stats.num_accepted_per_position == stats.num_drafted_per_position == [6] * 4


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_folders_and_files_give_the_same_drafts(weights: str, tmp_path: Path) -> None:
    for name in ("target", "head"):
        (tmp_path / name).mkdir()
    target = save_tiny_smollm2(tmp_path / "target")
    head = tiny_eagle3(json.loads((target / "config.json").read_text()), "plain")
    models = [save_model_folder(tmp_path / "head", head), write_eagle3_gguf(tmp_path / "head.gguf", head, [2, 1, 0])]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {"kv_memory": "64MiB", "max_model_len": 256}
    plain = LLM(str(target), **options).generate("Rings of", params)[0].token_ids
    drafts = []
    for model in models:
        spec = f"eagle3:k=3,model={model},weights={weights}"
        proposed: list[list[int]] = []
        with patch.object(Request, "set_drafts", record_drafts(proposed)):
            llm = LLM(str(target), speculate=spec, **options)
            assert llm.generate("Rings of", params)[0].token_ids == plain
        drafts.append(proposed)
        with pytest.raises(ValueError, match="eagle3: name it when the engine starts"):
            LLM(str(target), **options).add_drafter(spec)
    assert drafts[0] == drafts[1] and any(drafts[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "phi3"}, "a head of 'phi3' is not supported"),
        ({"num_hidden_layers": 2}, "only one layer of Llama or Qwen 3"),
        ({"fc_norm": True}, "fc_norm and sliding windows of a head are not supported"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "the model has 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "the model has 3 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0]}, "do not fit"),
        ({"hidden_size": 32}, "do not fit"),
        ({"hidden_size": 2**40}, "hidden_size"),
    ],
    ids=str,
)
def test_heads_that_do_not_fit_are_refused(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tiny_heads.tiny_eagle3

    def change(target: dict[str, Any], kind: str) -> TinyCheckpoint:
        found = original(target, kind)
        return Eagle3Checkpoint(found.config | changes, found.shapes, 0)

    monkeypatch.setattr("tests.helpers.engines.tiny_eagle3", change)
    with pytest.raises(ValueError, match=reason):
        make_engine("llama", backend="cpu", drafter=drafters.parse("eagle3:model=plain"))


@pytest.mark.parametrize("distances", [[200] * 48, [-1] * 48, [0] * 47 + [-1], [0] * 47])
def test_a_damaged_vocabulary_is_refused(distances: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    read = Eagle3Checkpoint.read
    monkeypatch.setattr(
        Eagle3Checkpoint, "read", lambda self, name: torch.tensor(distances) if name == "d2t" else read(self, name)
    )
    with pytest.raises(ValueError, match="d2t does not name 48 of 128 tokens"):
        make_engine("llama", backend="cpu", drafter=drafters.parse("eagle3:model=plain"))


def test_an_engine_has_one_drafter_that_reads_states() -> None:
    with pytest.raises(ValueError, match="one drafter that reads hidden states"):
        LLM("random:tiny", kv_memory="32MiB", drafters=["eagle3:model=a", "eagle3:model=b"])
    with pytest.raises(ValueError, match="eagle3: say which model= drafts"):
        LLM("random:tiny", kv_memory="32MiB", speculate="eagle3")
