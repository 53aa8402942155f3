"""Laws of adapters (LoRA): those of PEFT, mixed in steps, told apart by their content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from retain import LLM, SamplingParams
from retain.formats.lora import LoRAAdapter, LowRankUpdate, read_lora
from retain.kernels import import_backend
from retain.processing.input import GenerateRequest
from tests.helpers.adapters import write_adapter
from tests.helpers.attention_case import torch_threads
from tests.helpers.engines import make_engine
from tests.helpers.folders import save_tiny_smollm2
from tests.helpers.marks import slow
from tests.helpers.schedules import PlannedRequest

PROMPTS = ["Rings of the sea are", "Rings of the sea are many and", "A key", "x"]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
FAMILIES = {
    "llama": [*ATTENTION, *MLP],
    "qwen3_5_text": [*ATTENTION, *MLP, "in_proj_z", "out_proj"],
    "gemma3_text": [*ATTENTION, "down_proj"],
    "phi3": ["qkv_proj", "gate_up_proj", "o_proj"],
    "gpt_neox": ["query_key_value", "dense_h_to_4h"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}


def write_model(folder: Path, family: str) -> Path:
    folder.mkdir()
    return save_tiny_smollm2(folder, family)


def peft_logprobs(target: Path, adapter: Path, ids: list[int], num_tokens: int) -> torch.Tensor:
    """Return the log-probabilities [num_tokens, V] before each of the last tokens."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(target), adapter)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    return logits[-num_tokens - 1 : -1].log_softmax(-1)


def make_llm(target: Path, **options: Any) -> LLM:
    return LLM(str(target), dtype="float32", kv_memory="64MiB", max_model_len=256, **options)


@pytest.mark.parametrize("family", ["llama", *slow(*(f for f in FAMILIES if f != "llama"))])
@pytest.mark.parametrize("backend", ["cpu", *slow("reference", "triton")])
def test_logits_equal_those_of_peft(family: str, backend: str, tmp_path: Path) -> None:
    """Alone and in one step with other adapters and with none; ranks and scales of layers differ."""
    if reason := import_backend(backend).unavailable_reason():
        pytest.skip(reason)
    target = write_model(tmp_path / "target", family)
    modules = FAMILIES[family]
    more = {"rank_pattern": {modules[0]: 7}, "alpha_pattern": {modules[-1]: 3}, "use_rslora": True}
    folders = {
        "a": write_adapter(tmp_path / "a", target, modules, 1, 5, **more),
        "b": write_adapter(tmp_path / "b", target, modules[:1], 2),
        "c": write_adapter(tmp_path / "c", target, modules, 3, 1),
    }
    llm = make_llm(target, lora=[f"{name}={folder}" for name, folder in folders.items()], backend=backend)
    names = ["a", None, "b", "c"]
    requests = [GenerateRequest(p, PARAMS, lora=name) for p, name in zip(PROMPTS, names, strict=True)]
    answers = llm.generate_from_requests(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert llm.generate_from_requests([request])[0].token_ids == answer.token_ids
        if request.lora is None:
            expected = make_llm(target, backend=backend).generate(request.prompt, PARAMS)[0].logprobs
            assert [x.logprob for x in answer.logprobs] == pytest.approx([x.logprob for x in expected], abs=1e-4)
            continue
        ids = [*llm.encode(request.prompt), *answer.token_ids]
        logprobs = peft_logprobs(target, folders[request.lora], ids, PARAMS.max_tokens or 0)
        for found, row in zip(answer.logprobs, logprobs, strict=True):
            assert found.logprob == pytest.approx(float(row[found.token_id]), abs=2e-3)
            assert dict(found.top_logprobs) == pytest.approx(
                {t: float(row[t]) for t, _ in found.top_logprobs}, abs=2e-3
            )
    texts = {tuple(llm.generate(PROMPTS[0], PARAMS, lora=name)[0].token_ids) for name in (*folders, None)}
    assert len(texts) > 1


def test_adapters_are_told_apart_by_their_content(tmp_path: Path) -> None:
    """What takes the name of another never hits its cache; the same content does, under any name."""
    target = write_model(tmp_path / "target", "llama")
    a, b = (write_adapter(tmp_path / name, target, ["q_proj", "down_proj"], seed) for seed, name in enumerate("ab"))
    prompt = "the sea " * 100
    llm = make_llm(target, lora=f"x={a}", max_loras=2)

    def cached(lora: str | None) -> int:
        return llm.generate(prompt, PARAMS, lora=lora)[0].cached_tokens

    assert cached(None) == 0 < cached(None)
    assert cached("x") == 0 < cached("x")
    llm.unload_lora("x")
    llm.load_lora("x", b)
    assert cached("x") == 0 < cached("x")
    llm.load_lora("y", a)
    assert cached("y") > 0
    assert read_lora(a).digest != read_lora(b).digest
    (tmp_path / "a").rename(tmp_path / "c")
    assert read_lora(tmp_path / "c").digest == llm.input_processor.adapters.find("y").digest


def activated(folder: Path, target: Path, modules: list[str], tokens: list[int], seed: int) -> Path:
    return write_adapter(folder, target, modules, seed, task_type="CAUSAL_LM", alora_invocation_tokens=tokens)


@pytest.mark.parametrize("family", ["llama", *slow("qwen3_5_text", "gemma3_text")])
def test_logits_of_an_activated_adapter_equal_those_of_peft(family: str, tmp_path: Path) -> None:
    """It counts from where the prompt has its tokens last; in chunks, and in one step with a plain adapter."""
    target = write_model(tmp_path / "target", family)
    tokens = [40, 41, 42]
    folder = activated(tmp_path / "a", target, FAMILIES[family], tokens, 1)
    plain = write_adapter(tmp_path / "b", target, FAMILIES[family], 2)
    llm = make_llm(target, lora=[f"a={folder}", f"b={plain}"], max_batched_tokens=16, max_running_requests=4)
    ids = [5, *tokens, *range(60, 90), *tokens, 7, 8, *tokens, 40, 41, 9]
    requests = [GenerateRequest(p, PARAMS, lora=name) for p, name in ((ids, "a"), (ids[:9], "b"), (ids[1:], "a"))]
    for request, answer in zip(requests, llm.generate_from_requests(requests), strict=True):
        adapter = folder if request.lora == "a" else plain
        logprobs = peft_logprobs(target, adapter, [*request.prompt, *answer.token_ids], PARAMS.max_tokens or 0)
        assert [x.logprob for x in answer.logprobs] == pytest.approx(
            [float(row[x.token_id]) for x, row in zip(answer.logprobs, logprobs, strict=True)], abs=2e-3
        )
    with pytest.raises(ValueError, match=r"the prompt lacks the tokens that activate the adapter .*: 40, 41, 42"):
        llm.generate([1, 2, 3], PARAMS, lora="a")


@pytest.mark.parametrize("place", ["pool", "disk"])
@pytest.mark.parametrize("family", ["llama", *slow("qwen3_5_text", "gemma3_text")])
def test_an_activated_adapter_computes_no_token_of_the_base_model_again(
    family: str, place: str, tmp_path: Path
) -> None:
    """The base model has computed all that lies before; then its own answer goes on from there, and so does another's.

    Tiers keep whole blocks.
    """
    target = write_model(tmp_path / "target", family)
    tokens = [40, 41, 42]
    a, b = (activated(tmp_path / name, target, FAMILIES[family], tokens, seed) for seed, name in enumerate("ab"))
    tier = [f"disk:path={tmp_path / 'tier'},capacity=64MiB"] if place == "disk" else []
    options: dict[str, Any] = {"lora": [f"a={a}", f"b={b}"], "tier": tier, "snapshot_interval": 16}
    text = [5, *range(60, 140)]
    llm = make_llm(target, **options)
    expected = {
        name: make_llm(target, **options | {"tier": []}).generate([*text, *tokens, 3], PARAMS, lora=name)[0]
        for name in ("a", "b", None)
    }

    def answer(name: str | None) -> int:
        nonlocal llm
        if tier:
            llm.close()
            llm = make_llm(target, **options)
        found = llm.generate([*text, *tokens, 3], PARAMS, lora=name)[0]
        assert found.token_ids == expected[name].token_ids
        return found.cached_tokens

    llm.generate(text, SamplingParams(max_tokens=1))
    block = llm.cache.planner.block_size
    least = len(text) // block * block if tier else len(text)
    assert answer("a") >= least
    assert least <= answer("b") <= len(text)
    assert least <= answer(None) <= len(text)
    assert answer("a") >= least + (0 if tier else len(tokens))
    llm.close()


def test_a_diagnosis_knows_where_an_adapter_begins(tmp_path: Path) -> None:
    """Behind that place the model's text is another one: nothing of it was evicted."""
    target = write_model(tmp_path / "target", "llama")
    folder = activated(tmp_path / "a", target, ["k_proj"], [40], 1)
    llm = make_llm(target, lora=f"a={folder}")
    ids = [*range(60, 120), 40, *range(60, 99)]
    for name in (None, "a"):
        request = GenerateRequest(ids, PARAMS, lora=name, explain_prefix=True)
        prefix = llm.generate_from_requests([request])[0].prefix
    assert prefix and prefix["cached_tokens"] == 60 and prefix["cause"] in ("diverged", "new_text"), prefix


def test_an_adapter_in_use_is_not_overwritten(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", "llama")
    a, b = (write_adapter(tmp_path / name, target, ["q_proj"], seed) for seed, name in enumerate("ab"))
    llm = make_llm(target, lora=f"a={a}")
    expected = llm.generate(PROMPTS[0], PARAMS, lora="a")[0].text
    chunks = llm.stream_from_request(GenerateRequest(PROMPTS[0], PARAMS, lora="a"))
    found = next(chunks).text
    llm.unload_lora("a")
    with pytest.raises(ValueError, match="all 1 places of adapters are taken"):
        llm.load_lora("b", b)
    for chunk in chunks:
        found += chunk.text
    assert found == expected
    llm.load_lora("b", b)
    with pytest.raises(ValueError, match="there is no adapter 'a': known are 'b'"):
        llm.generate(PROMPTS[0], PARAMS, lora="a")


@pytest.mark.parametrize(
    "options",
    [
        {"kv_policy": "h2o:budget=40,interval=4"},
        {"kv_dtype": "int8", "weights": "int8", "dtype": "bfloat16"},
        *slow(
            {"speculate": "suffix:k=4"},
            {"speculate": "draft:weights=int4,k=3", "dtype": "bfloat16"},
            {"kv_policy": "keyformer:budget=50%", "max_batched_tokens": 16, "max_running_requests": 3},
        ),
    ],
    ids=str,
)
def test_answers_in_company_are_those_alone(options: dict[str, Any], tmp_path: Path) -> None:
    """With budgets, quantized slots and weights, and drafts, which change no answer, in chunks and turns."""
    target = write_model(tmp_path / "target", "llama")
    folders = [write_adapter(tmp_path / name, target, [*ATTENTION, *MLP], seed) for seed, name in enumerate("ab")]
    loras = [f"{folder.name}={folder}" for folder in folders]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, seed=0)
    requests = [
        GenerateRequest(f"{i} the sea " * (4 * i + 1), params, lora=name)
        for i, name in enumerate(["a", None, "b", "a", "b"])
    ]
    options = {"dtype": "float32", "kv_memory": "64MiB", "max_model_len": 256, "prefix_cache": "off"} | options
    llm = LLM(str(target), lora=loras, **options)
    together = [answer.token_ids for answer in llm.generate_from_requests(requests)]
    plain = {name: value for name, value in options.items() if name != "speculate"}
    alone = LLM(str(target), lora=loras[::-1], **plain)
    assert together == [alone.generate_from_requests([request])[0].token_ids for request in requests]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_of_adapters_that_are_computed_together_are_those_alone(num_threads: int) -> None:
    """More rows than are grouped at a time, of all adapters and of none, in turn and in runs."""
    if reason := import_backend("cpu").unavailable_reason():
        pytest.skip(reason)
    params = SamplingParams(temperature=0, ignore_eos=True, logprobs=2)
    names = [("", "a", "b", "activated")[i % 4 if i < 40 else i % 3 // 2] for i in range(75)]
    prompts = [[i + 1, i // 2 + 3, 7] for i in range(len(names))]

    def answer(chosen: list[int]) -> list[Any]:
        options = {"num_pages": 2000, "max_running_requests": 80, "max_batched_tokens": 300}
        engine = make_engine("llama", backend="cpu", adapters=True, **options)
        planned = [PlannedRequest(tuple(prompts[i]), 4, "full", params, adapter=names[i]) for i in chosen]
        requests = [p.build() for p in planned]
        engine.add(*requests)
        while engine.has_unfinished_requests:
            engine.step()
        return [(r.output_tokens, r.logprobs) for r in requests]

    with torch_threads(num_threads):
        assert answer(list(range(75))) == [answer([i])[0] for i in range(75)]


def test_tiers_tell_adapters_apart_after_a_restart(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", "llama")
    a, b = (write_adapter(tmp_path / name, target, ["k_proj"], seed) for seed, name in enumerate("ab"))
    prompt = "the sea " * 100
    tier = f"disk:path={tmp_path / 'tier'},capacity=64MiB"
    llm = make_llm(target, lora=f"x={a}", tier=[tier])
    assert llm.generate(prompt, PARAMS, lora="x")[0].cached_tokens == 0
    llm.close()
    llm = make_llm(target, lora=[f"x={b}", f"y={a}"], tier=[tier])
    cached = [llm.generate(prompt, PARAMS, lora=name)[0].cached_tokens > 0 for name in ("y", "x", None)]
    assert cached == [True, False, False]
    llm.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "LOHA"}, "only adapters of the type LORA"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"lora_alpha": None}, "lora_alpha is None, not a number"),
        ({"lora_alpha": 1e99}, "not a number"),
        ({"alpha_pattern": {"(": 1}}, "only names of layers"),
        ({"alpha_pattern": {"q{4294967296}": 1}}, "only names of layers"),
        ({"use_rslora": "false"}, "neither true nor false"),
        ({"init_lora_weights": "pissa_niter_4"}, "only converted adapters"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alora_invocation_tokens": []}, "not a list of token ids"),
        ({"alora_invocation_tokens": [1, "2"]}, "not a list of token ids"),
    ],
    ids=str,
)
def test_configs_that_are_not_computed_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", "llama")
    folder = write_adapter(tmp_path / "a", target, ["q_proj"])
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ValueError, match=reason):
        make_llm(target, lora=f"a={folder}")


def test_layers_behind_the_chosen_rows_take_no_adapter(tmp_path: Path) -> None:
    """OPT's last projection has rows of the tokens with logits alone."""
    (tmp_path / "target").mkdir()
    target = save_tiny_smollm2(tmp_path / "target", "opt", word_embed_proj_dim=32)
    ok, late = (write_adapter(tmp_path / name, target, [name]) for name in ("q_proj", "project_out"))
    llm = make_llm(target, lora=f"a={ok}")
    answers = llm.generate_from_requests(
        [GenerateRequest(p, PARAMS, lora=x) for p, x in ((PROMPTS[0], None), ("x", "a"))]
    )
    assert answers[1].token_ids == llm.generate("x", PARAMS, lora="a")[0].token_ids
    with pytest.raises(ValueError, match="project_out' is no linear layer of this model that takes an adapter"):
        make_llm(target, lora=f"a={late}")


def test_updates_are_of_one_layer_each_and_of_all_its_rows(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", "qwen3_5_text")
    llm = make_llm(target, max_loras=1)
    bank = llm.input_processor.adapters.bank
    q = next(name for name in bank.entries if name.endswith("q_proj"))
    width = bank.entries[q][0].a.shape[2]
    rows = bank.entries[q][0].rows.total
    for updates, reason in (
        ({q: (rows + 1, 1.0)}, "has another shape"),
        ({q: (rows, float("inf"))}, "not finite"),
        ({q: (rows, 1.0), f"model.{q}": (rows, 1.0)}, "two updates of one layer"),
        ({f"mtp.{q}": (rows, 1.0)}, "no linear layer of this model"),
    ):
        made = {n: LowRankUpdate(torch.ones(1, width), torch.full((m, 1), x)) for n, (m, x) in updates.items()}
        with pytest.raises(ValueError, match=reason):
            llm.input_processor.adapters.add("a", LoRAAdapter(made, b""))


def test_adapters_of_other_models_are_refused(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", "llama")
    (tmp_path / "wide").mkdir()
    wide = save_tiny_smollm2(tmp_path / "wide", "llama", hidden_size=96, intermediate_size=96)
    for model, modules, rank, reason in (
        (wide, ["q_proj"], 4, "has another shape than the adapter's"),
        (write_model(tmp_path / "phi", "phi3"), ["qkv_proj"], 4, "no linear layer of this model that takes an adapter"),
        (target, ["q_proj"], 32, "more than max_lora_rank, 8"),
        (target, ["embed_tokens"], 4, "not of a linear layer's adapter"),
    ):
        folder = write_adapter(tmp_path / f"{modules[0]} {rank} {model.name}", model, modules, rank=rank)
        with pytest.raises(ValueError, match=reason):
            make_llm(target, lora=f"a={folder}", max_lora_rank=8)
    for spec, reason in (("a", "lora is NAME=FOLDER"), ("a=x,a=y", "names 'a' twice"), ("a=nowhere", "nowhere")):
        with pytest.raises(ValueError, match=reason):
            make_llm(target, lora=spec)
