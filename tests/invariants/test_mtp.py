"""Laws of the MTP layer, whose cache the target's program writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from retain import LLM
from retain.engine import drafters
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kernels import import_backend
from retain.kernels.api import CPU
from retain.kernels.slots.pool_dtypes import INT4
from retain.models import build, build_with_head, load_family
from retain.models.mtp import name_as_layer
from retain.models.weights import Weights, open_weights
from retain.processing.warm_up import WarmUp
from retain.sampling_params import SamplingParams
from tests.helpers.drafts import (
    PROMPT,
    check_draft_logits,
    check_drafts_follow,
    check_greedy_and_hits,
    record_drafts,
)
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.folders import save_model_folder, write_tokenizer_folder
from tests.helpers.gguf_files import tiny_for_gguf
from tests.helpers.marks import slow
from tests.helpers.tiny_heads import MTP_ENDS, NamedAsLayer, with_mtp_layer, write_mtp_gguf
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint
from tests.models.test_families import build_transformers_model

TEXT_FAMILIES = ["qwen3_5_text", "glm4_moe", "deepseek_v3", *slow("qwen3_next", "qwen3_5_moe_text", "glm4_moe_lite")]
HYBRID_AND_LATENT = ["qwen3_5_text", "deepseek_v3"]


ENDS = tuple(f"{end}.weight" for end in MTP_ENDS)


class ExtendedCheckpoint(NamedAsLayer):
    """The checkpoint of a model whose last layer is its MTP layer."""

    def names(self) -> set[str]:
        return {name for name in super().names() if not name.endswith(ENDS)}

    def read(self, name: str) -> Tensor:
        return TinyCheckpoint.read(self, self._file_names.get(name, name))

    @property
    def _file_names(self) -> dict[str, str]:
        return name_as_layer(set(self.shapes), self.config["num_hidden_layers"] - 1)


@torch.inference_mode()
def transformers_drafts(family: str, prompt: list[int], k: int) -> tuple[list[int], Tensor]:
    """Return the target's next token and k drafts, and the logits of these [k, V], from layers of transformers.

    The pairs of a token and the state before it begin with the second token. As its MtpModel, they have the positions
    of the tokens; what a further draft reads is as in vLLM.
    """
    checkpoint = with_mtp_layer(tiny_checkpoint(family))
    layer = load_family(family).MTP_LAYER
    number = layer.number(checkpoint.config)
    config = checkpoint.config | layer.add_layer(checkpoint.config)
    named = NamedAsLayer.of(checkpoint)
    extended = build_transformers_model(ExtendedCheckpoint(config, named.shapes, checkpoint.seed))
    model = build_transformers_model(tiny_checkpoint(family))
    base = model.get_decoder()
    block = extended.get_decoder().layers[number]
    tensors = {end: named.read(next(name for name in named.names() if name.endswith(end))) for end in ENDS}

    def norm(name: str) -> nn.Module:
        module = type(base.norm)(model.config.hidden_size, eps=model.config.rms_norm_eps)
        module.weight.data = tensors[f"{name}.weight"]
        return module

    done = model(torch.tensor([prompt]), output_hidden_states=True)
    states = done.hidden_states[-1]  # behind the final norm
    tokens = [int(done.logits[0, -1].argmax())]
    logits = []
    for _ in range(k):
        ids = torch.tensor([[*prompt[1:], *tokens]])
        embedded = model.get_input_embeddings()(ids)
        both = torch.cat((norm("enorm")(embedded), norm("hnorm")(states)), -1)
        x = both @ tensors["eh_proj.weight"].T
        n = x.shape[1]
        positions = torch.arange(1, n + 1)[None]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        angles = base.rotary_emb(x, position_ids=positions)
        x = block(x, position_embeddings=angles, attention_mask=mask, position_ids=positions)
        x = x[0] if isinstance(x, tuple) else x
        last = norm("shared_head.norm")(x[:, -1:])
        states = torch.cat((states, last if layer.passes_normed else x[:, -1:]), 1)
        logits.append(model.lm_head(last)[0, 0])
        tokens.append(int(logits[-1].argmax()))
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("length", [1, 9, 60])
@pytest.mark.parametrize("backend", ["cpu", "reference", *slow("triton")])
def test_drafts_equal_those_of_layers_of_transformers(family: str, length: int, backend: str) -> None:
    check_draft_logits(family, "mtp:k=4", backend, length, partial(transformers_drafts, family))


@pytest.mark.parametrize("family", [*HYBRID_AND_LATENT, *slow("qwen3_5_moe", "glm4_moe")])
@pytest.mark.parametrize("spec", ["mtp:k=5", *slow("mtp")])
@pytest.mark.parametrize("backend", ["cpu", *slow("reference", "triton")])
@pytest.mark.parametrize("kv_dtype", [None, *slow(torch.int8, INT4)])
def test_greedy_tokens_and_hits_are_those_of_plain_decoding(
    family: str, spec: str, backend: str, kv_dtype: torch.dtype | None
) -> None:
    check_greedy_and_hits(family, spec, backend, kv_dtype)


@pytest.mark.parametrize("family", HYBRID_AND_LATENT)
@pytest.mark.parametrize("backend", ["cpu", *slow("reference")])
def test_drafts_follow_from_the_text_whatever_happened(family: str, backend: str) -> None:
    check_drafts_follow(family, "mtp:k=3", backend)


@pytest.mark.parametrize("backend", ["cpu", *slow("reference", "triton")])
@pytest.mark.parametrize("family", HYBRID_AND_LATENT)
def test_an_mtp_layer_that_copies_its_target_is_always_right(
    family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that add nothing make a target of the newest token alone, and its MTP layer the same."""
    if reason := import_backend(backend).unavailable_reason():
        pytest.skip(reason)
    read = TinyCheckpoint.read
    offset = load_family(family).MTP_LAYER.norm_offset

    def read_copy(checkpoint: TinyCheckpoint, name: str) -> Tensor:
        if name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            return torch.eye(64, 128)  # the token's embedding
        if name.endswith(("enorm.weight", "pre_fc_norm_embedding.weight")):
            return torch.full((64,), 1 - offset)
        if name.endswith(("shared_head.norm.weight", "mtp.norm.weight")):
            return read(checkpoint, "model.norm.weight")
        return read(checkpoint, name) * (
            0 if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")) else 1
        )

    monkeypatch.setattr(TinyCheckpoint, "read", read_copy)
    engine = make_engine(family, backend=backend, drafter=drafters.parse("mtp:k=4"))
    request = make_request(PROMPT, 31)
    run_to_completion(engine, [request])
    stats = request.stats.spec_decode
    assert stats.num_accepted_per_position == stats.num_drafted_per_position == [6] * 4


@pytest.mark.parametrize("family", HYBRID_AND_LATENT)
@pytest.mark.parametrize("policy", ["full", "sinks:budget=40,interval=3", "h2o:budget=30,prefill=stream,chunk=16"])
def test_a_restart_finds_in_its_tier_what_plain_decoding_finds(family: str, policy: str, tmp_path: Path) -> None:
    """An MTP layer is stored and read with the others."""

    def run(drafter: str | None, folder: str) -> list[tuple[list[int], int]]:
        found = []
        for more in ([], [5, 9, 2, 7]):
            engine = make_engine(
                family,
                backend="cpu",
                prefix_cache="exact",
                tiers=[f"disk:path={tmp_path / folder},capacity=50MB"],
                drafter=drafters.parse(drafter) if drafter else None,
            )
            text = [*PROMPT, *(found[0][0] if more else []), *more]
            request = make_request(text, 20, policy)
            run_to_completion(engine, [request])
            engine.cache.prefix_cache.close_offloader()
            found.append((request.output_tokens, request.stats.num_cached_tokens))
        return found

    plain = run(None, "plain")
    assert run("mtp:k=3", "drafted") == plain and plain[1][1]


def test_a_row_keeps_as_many_tokens_of_its_mtp_layer_as_of_other_layers() -> None:
    """A budget bounds the layer, too: its newest tokens stay, and the sinks."""
    engine = make_engine("deepseek_v3", backend="cpu", drafter=drafters.parse("mtp:k=3"))
    request = make_request(PROMPT, 40, "h2o:budget=24,interval=4,sinks=2")
    engine.add(request)
    sizes = set()
    while request.num_output_tokens < 35:
        engine.step()
        if request.num_output_tokens > 2:
            *others, own = engine.cache.rows[0].positions()
            assert [p for p in own[0] if p < 2] == [1]  # the first token has no state before it
            assert own[0][2:] == list(range(own[0][2], own[0][-1] + 1))
            sizes |= {len(positions) for layer in others for positions in layer} | {len(own[0]) + 1}
    assert max(sizes) <= 24 + 4


def test_other_models_have_no_mtp_layer() -> None:
    for family, reason in (
        ("llama", "a llama model has no MTP layer"),
        ("deepseek_v3", "the model's file has no MTP layer"),
    ):
        program = import_backend("reference").program(torch.float32, torch.device("cpu"))
        with pytest.raises(ValueError, match=f"mtp: {reason}"):
            build_with_head(Weights(tiny_checkpoint(family), torch.float32), program, program)


@pytest.mark.parametrize("case", ["qwen3_5_text auto", "glm4_moe int8", *slow("qwen3_next auto", "deepseek_v3 auto")])
def test_folders_and_files_give_the_same_drafts(case: str, tmp_path: Path) -> None:
    family, weights = case.split()
    checkpoint = with_mtp_layer(tiny_for_gguf(family))
    (tmp_path / "folder").mkdir()
    save_model_folder(write_tokenizer_folder(tmp_path / "folder"), checkpoint)
    models = [tmp_path / "folder", write_mtp_gguf(tmp_path / "file.gguf", checkpoint)]
    dtype = "float32" if weights == "auto" else "bfloat16"
    options: dict[str, Any] = {"dtype": dtype, "kv_memory": "64MiB", "max_model_len": 256, "weights": weights}
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    found = []
    for model in models:
        plain = LLM(str(model), **options).generate([PROMPT], params)[0].token_ids
        proposed: list[list[int]] = []
        with patch.object(Request, "set_drafts", record_drafts(proposed)):
            llm = LLM(str(model), speculate="mtp:k=3", **options)
            assert llm.generate([PROMPT], params)[0].token_ids == plain
        found.append((plain, proposed))
    assert found[0] == found[1] and any(found[0][1])


@pytest.mark.parametrize("policy", ["snapkv:budget=40%,heads=union", "h2o:budget=40%,share=all"])
def test_what_other_layers_hold_is_counted_alone(policy: str) -> None:
    """Heads that share budgets, or are ranked in union, hold other numbers of tokens than the MTP layer."""
    counts = []
    for drafter in (None, drafters.parse("mtp:k=3")):
        engine = make_engine("glm4_moe", backend="cpu", drafter=drafter, score_columns=2)
        engine.add(make_request(PROMPT, 10, policy))
        engine.step()
        engine.step()
        counts.append(int(engine.cache.rows[0].count_held(np.array([64], np.int32))[0]))
    assert counts[0] == counts[1] < 64


@pytest.mark.parametrize("backend", ["cpu", "reference", *slow("triton")])
@pytest.mark.parametrize("kv_dtype", [None, INT4])
def test_a_prompt_of_one_token_writes_no_slot_of_the_mtp_layer(backend: str, kv_dtype: torch.dtype | None) -> None:
    """In slots of any kind, with sketches: no other token is there whose slot could be written."""
    if reason := import_backend(backend).unavailable_reason():
        pytest.skip(reason)
    drafter = drafters.parse("mtp:k=2")
    engine = make_engine("deepseek_v3", backend=backend, kv_dtype=kv_dtype, looks=True, drafter=drafter)
    requests = [make_request(PROMPT[:1], 6, policy) for policy in ("full", "look:slots=20")]
    run_to_completion(engine, requests)
    assert all(sum(r.stats.spec_decode.num_drafted_per_position) for r in requests)


def test_another_engine_over_the_same_model_brings_states(tmp_path: Path) -> None:
    """As a warm-up does, and benches: what a step brings follows from the program, and no engine can forget it."""
    (tmp_path / "m").mkdir()
    save_model_folder(write_tokenizer_folder(tmp_path / "m"), with_mtp_layer(tiny_for_gguf("glm4_moe")))
    llm = LLM(str(tmp_path / "m"), speculate="mtp:k=2", kv_memory="64MiB", max_model_len=256)
    WarmUp(llm.engine, llm.input_processor, 64).run(llm.program)
    other = Engine(llm.engine.runner, llm.cache)
    request = make_request(PROMPT, 5)
    other.add(request)
    run_to_completion(other, [])
    assert len(request.output_tokens) == 5 and request.hidden_state is None  # it has ended


def test_files_with_an_mtp_layer_load_without_it(tmp_path: Path) -> None:
    for family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        path = write_mtp_gguf(tmp_path / f"{family}.gguf", with_mtp_layer(tiny_for_gguf(family)))
        build(open_weights(path, torch.float32), import_backend("reference").program(torch.float32, CPU))
