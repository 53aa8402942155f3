"""Laws of trained draft heads that attend to the target's cache. Random schedules draw them, too."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from retain import LLM
from retain.engine import drafters
from retain.engine.request import Request
from retain.kernels import import_backend
from retain.kernels.api import Batch
from retain.kernels.slots.pool_dtypes import INT4
from retain.models import build
from retain.models.weights import Weights
from retain.processing.input import GenerateRequest
from retain.sampling_params import SamplingParams
from tests.helpers import tiny_heads
from tests.helpers.drafts import (
    RecordingRunner,
    check_drafts_follow,
    check_greedy_and_hits,
    record_drafts,
)
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.folders import save_model_folder, save_tiny_smollm2
from tests.helpers.gguf_hybrids import STORABLE
from tests.helpers.marks import slow
from tests.helpers.tiny_heads import AssistantCheckpoint, tiny_assistant, write_assistant_gguf
from tests.helpers.tiny_models import CONFIGS, TinyCheckpoint, tiny_checkpoint
from tests.models.test_families import build_transformers_model

PROMPT = [random.Random(3).randrange(128) for _ in range(60)]
E_SERIES = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}


@torch.inference_mode()
def transformers_drafts(prompt: list[int], k: int, ordered: bool) -> tuple[list[int], Tensor]:
    """Return the target's next token and k drafts, and the logits of these [k, V], by transformers.

    As its SinglePositionMultiTokenCandidateGenerator does. Of a sliding layer an assistant gets the tokens that the
    newest token will see; transformers gives it one more.
    """
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    model = build_transformers_model(tiny_checkpoint("gemma4_text"))
    checkpoint = tiny_assistant(tiny_checkpoint("gemma4_text").config, ordered=ordered)
    settings = {k: v for k, v in checkpoint.config.items() if k != "model_type"}
    assistant = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**settings)).eval()
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    missing = assistant.load_state_dict(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, strict=False
    )
    assert not missing.missing_keys and not missing.unexpected_keys, missing
    done = model(torch.tensor([prompt]), output_hidden_states=True, return_shared_kv_states=True)
    window = model.config.get_text_config().sliding_window - 1
    shared = dict(done.shared_kv_states)
    shared["sliding_attention"] = tuple(x[:, :, -window:] for x in shared["sliding_attention"])
    state = done.hidden_states[-1][:, -1:]
    tokens = [int(done.logits[0, -1].argmax())]
    logits = []
    for _ in range(k):
        embedded = model.get_input_embeddings()(torch.tensor([tokens[-1:]]))
        position = torch.tensor([[len(prompt)]])
        out = assistant(inputs_embeds=torch.cat((embedded, state), -1), position_ids=position, shared_kv_states=shared)
        state = out.last_hidden_state
        logits.append(out.logits[0, 0])
        tokens.append(int(logits[-1].argmax()))
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("config", [{}, E_SERIES, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}], ids=str)
@pytest.mark.parametrize("length", [9, 60])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "reference", *slow("triton")])
def test_drafts_equal_those_of_transformers(
    config: dict[str, Any], length: int, ordered: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "gemma4_text", CONFIGS["gemma4_text"] | config)
    if reason := import_backend(backend).unavailable_reason():
        pytest.skip(reason)
    tokens, expected = transformers_drafts(PROMPT[:length], 4, ordered)
    drafter = drafters.parse(f"assistant:k=4,model={'ordered' if ordered else 'any'}")
    engine = make_engine("gemma4_text", backend=backend, drafter=drafter)
    drafter._runner = runner = RecordingRunner(drafter._runner)  # type: ignore[attr-defined]
    request = make_request(PROMPT[:length], 8)
    engine.add(request)
    engine.step()
    assert request.output_tokens == tokens[:1]
    engine.step()
    found = torch.cat(runner.logits[:4])
    named = found > -torch.inf
    assert named.all() != ordered
    torch.testing.assert_close(found[named], expected[named], rtol=1e-3, atol=1e-3)
    if ordered:  # transformers gives the others less than all of these
        assert (expected[~named].max() < expected[named].max()) and int(named.sum(1).min()) == 4 * 128 // 16


@pytest.mark.parametrize(
    "spec", ["assistant:k=5,model=any", *slow("assistant:k=3,model=ordered", "assistant:model=any")]
)
@pytest.mark.parametrize("backend", ["cpu", *slow("reference", "triton")])
@pytest.mark.parametrize("kv_dtype", [None, *slow(torch.int8, INT4)])
def test_greedy_tokens_and_hits_are_those_of_plain_decoding(
    spec: str, backend: str, kv_dtype: torch.dtype | None
) -> None:
    check_greedy_and_hits("gemma4_text", spec, backend, kv_dtype)


@pytest.mark.parametrize("backend", ["cpu", *slow("reference", "triton")])
def test_an_assistant_that_copies_its_target_is_always_right(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that add nothing make a target of the newest token alone, and its assistant the same."""
    if reason := import_backend(backend).unavailable_reason():
        pytest.skip(reason)
    read = TinyCheckpoint.read

    def read_copy(checkpoint: TinyCheckpoint, name: str) -> Tensor:
        if name.endswith("pre_projection.weight"):
            return torch.eye(64, 128)  # the token's embedding
        return read(checkpoint, name) * (0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)

    monkeypatch.setattr(TinyCheckpoint, "read", read_copy)
    monkeypatch.setattr(tiny_heads, "HIDDEN_SIZE", 64)
    engine = make_engine("gemma4_text", backend=backend, drafter=drafters.parse("assistant:k=4,model=any"))
    request = make_request(PROMPT, 31)
    run_to_completion(engine, [request])
    stats = request.stats.spec_decode
    assert stats.num_accepted_per_position == stats.num_drafted_per_position == [6] * 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backbone_hidden_size": 32}, "for a model with states of 32 numbers, not 64"),
        ({"vocab_size": 64}, "the assistant knows 64 tokens, the target 128"),
        ({"model_type": "llama"}, "model type 'llama' is no draft head: one of gemma4_assistant"),
        ({"head_dim": 32}, "the tensors of the draft head do not fit its config"),
        ({"rope_parameters": 3}, "config.json has a value that cannot be used"),
        ({"num_centroids": 15}, "the best 4 of 15 clusters are wanted, of which 16 are there"),
        *[
            ({"centroid_intermediate_top_k": k}, "clusters are wanted, of which 16 are there")
            for k in (0, 17, "4", None)
        ],
    ],
    ids=str,
)
def test_assistants_of_other_models_are_refused(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_config = tiny_heads.assistant_config

    def change_config(target: dict[str, Any], ordered: bool = False) -> dict[str, Any]:
        config = make_config(target, ordered)
        text = {k: v for k, v in changes.items() if k not in config}
        return config | changes | {"text_config": config["text_config"] | text}

    monkeypatch.setattr(tiny_heads, "assistant_config", change_config)
    with pytest.raises(ValueError, match=reason):
        make_engine("gemma4_text", backend="cpu", drafter=drafters.parse("assistant:model=ordered"))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_target_without_both_kinds_of_layers_has_no_assistant(family: str) -> None:
    with pytest.raises(ValueError, match="needs a target with full and with sliding layers"):
        make_engine(family, backend="cpu", drafter=drafters.parse("assistant:model=any"))


def test_an_assistant_is_named_when_the_engine_starts() -> None:
    llm = LLM("random:tiny", kv_memory="32MiB")
    with pytest.raises(ValueError, match="assistant: model=x: it reads hidden states: name it when the engine starts"):
        llm.generate_from_requests([GenerateRequest("a", speculate="assistant:model=x")])
    with pytest.raises(ValueError, match="say which model= drafts"):
        LLM("random:tiny", kv_memory="32MiB", speculate="assistant")


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_folders_and_files_give_the_same_drafts(weights: str, tmp_path: Path) -> None:
    """From a folder with clusters or without, and from a .gguf file, which has none."""
    target = save_tiny_smollm2(make_folder(tmp_path / "target"), "gemma4_text", **STORABLE["gemma4_text"])
    config = json.loads((target / "config.json").read_text())
    plain = tiny_assistant(config)
    models = [
        save_model_folder(make_folder(tmp_path / "plain"), plain),
        write_assistant_gguf(tmp_path / "file.gguf", plain),
        save_model_folder(make_folder(tmp_path / "ordered"), tiny_assistant(config, ordered=True)),
    ]
    dtype = "float32" if weights == "auto" else "bfloat16"
    options: dict[str, Any] = {"dtype": dtype, "kv_memory": "64MiB", "max_model_len": 256}
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    expected = LLM(str(target), **options).generate("Rings of", params)[0].token_ids
    drafts = []
    for model in models:
        llm = LLM(str(target), speculate=f"assistant:k=3,model={model},weights={weights}", **options)
        proposed: list[list[int]] = []
        with patch.object(Request, "set_drafts", record_drafts(proposed)):
            assert llm.generate("Rings of", params)[0].token_ids == expected
        drafts.append(proposed)
    assert drafts[0] == drafts[1] and any(drafts[0])
    assert drafts[2] != drafts[0]  # it leaves out most tokens


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("backend", ["cpu", "reference", *slow("triton")])
def test_an_assistant_shares_the_token_embeddings_of_its_target(backend: str) -> None:
    kernel = import_backend(backend)
    if reason := kernel.unavailable_reason():
        pytest.skip(reason)
    device = torch.device(kernel.DEVICES[0])
    program = kernel.program(torch.float32, device)
    checkpoint = tiny_checkpoint("gemma4_text")
    target = build(Weights(checkpoint, torch.float32), program, gives_states=True)
    sizes = []
    for beside in (None, program):
        head = kernel.program(torch.float32, device, beside)
        tiny_heads.load_assistant(head, target, checkpoint.config, torch.float32)
        sizes.append(head.weight_bytes)
    assert sizes[0] - sizes[1] == 4 * 128 * 64


@pytest.mark.parametrize("backend", ["cpu", *slow("reference")])
def test_drafts_follow_from_the_text_whatever_happened(backend: str) -> None:
    check_drafts_follow("gemma4_text", "assistant:k=3,model=any", backend, prefix_cache="exact")


def test_a_replayed_graph_gives_its_own_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device a replay runs no Python: it only writes the memory of what was captured."""
    if reason := import_backend("triton").unavailable_reason():
        pytest.skip(reason)
    from retain.kernels.triton import graphs

    original = graphs.CUDAGraphRunner._capture
    num_replays = []

    def capture(runner: graphs.CUDAGraphRunner, shape: Any, batch: Batch) -> graphs.CapturedStep:
        step = original(runner, shape, batch)
        captured: list[Any] = []

        def replay() -> Any:
            output = step.replay()
            if not captured:
                captured.append(output)
            num_replays.append(shape)
            for own, new in zip(captured[0], output, strict=True):
                own.copy_(new)
            return captured[0]

        return graphs.CapturedStep(step.inputs, replay)

    monkeypatch.setattr(graphs.CUDAGraphRunner, "_capture", capture)
    drafts = []
    for backend in ("reference", "triton"):
        found: list[list[int]] = []
        engine = make_engine("gemma4_text", backend=backend, drafter=drafters.parse("assistant:k=1,model=any"))
        requests = [make_request(PROMPT[:20], 9), make_request(PROMPT[:9], 4)]
        with patch.object(Request, "set_drafts", record_drafts(found)):
            run_to_completion(engine, requests)
        drafts.append((found, [r.output_tokens for r in requests]))
    assert drafts[0] == drafts[1] and len(set(num_replays)) > 1


@pytest.mark.parametrize("temperature", [0.0, 20.0])
def test_a_damaged_assistant_drafts_nothing(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in its weights costs time, and no answer: an acceptance by NaN would take any token."""
    read = AssistantCheckpoint.read

    def read_damaged(checkpoint: AssistantCheckpoint, name: str) -> Tensor:
        tensor = read(checkpoint, name)
        return torch.full_like(tensor, torch.nan) if name == "model.norm.weight" else tensor

    monkeypatch.setattr(AssistantCheckpoint, "read", read_damaged)
    params = SamplingParams(temperature=temperature, seed=3, ignore_eos=True)
    answers = []
    for spec in (None, "assistant:k=3,model=any"):
        engine = make_engine("gemma4_text", backend="cpu", drafter=drafters.parse(spec) if spec else None)
        request = make_request(PROMPT, 20, params=params)
        answers.append(run_to_completion(engine, [request]))
        assert not request.stats.spec_decode.num_rounds
    assert temperature or answers[0] == answers[1]  # each draft that is tried takes a random number


def test_requests_may_name_an_assistant_that_was_announced(tmp_path: Path) -> None:
    """As those of a server do, and benches; the assistant's name is in what is said of it."""
    target = save_tiny_smollm2(make_folder(tmp_path / "target"), "gemma4_text")
    config = json.loads((target / "config.json").read_text())
    head = save_model_folder(make_folder(tmp_path / "head"), tiny_assistant(config))
    spec = f"assistant:k=2,model={head}"
    llm = LLM(str(target), kv_memory="64MiB", max_model_len=256, drafters=[spec])
    llm.add_drafter(spec)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    requests = [GenerateRequest("The sea", params, speculate=s) for s in (None, spec)]
    plain, drafted = llm.generate_from_requests(requests)
    assert drafted.token_ids == plain.token_ids and drafted.speculate and not plain.speculate
    (head / "config.json").write_text(json.dumps(tiny_assistant(config).config | {"backbone_hidden_size": 32}))
    with pytest.raises(ValueError, match=f"model={head}: the assistant is for a model with states of 32 numbers"):
        LLM(str(target), kv_memory="64MiB", max_model_len=256, speculate=spec)
