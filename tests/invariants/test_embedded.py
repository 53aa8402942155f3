"""Law 7: the bundled models answer as transformers does, on real text, with prompts longer than Gemma's window too.

The text is this project's licence. `tools/equal.py` compares as many prompts as needed.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from retain import LLM, SamplingParams
from retain.models.resolve import resolve_model
from retain.processing.input import GenerateRequest
from tests.helpers.transformers_gguf import load_transformers_model

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
NUM_TOKENS = 8


@torch.inference_mode()
def greedy_tokens(model, prompt, answer):
    """Return the likeliest token after the prompt and after each token of the answer but the last.

    They equal the answer exactly if the model's own greedy answer does, and take one forward pass.
    """
    ids = torch.tensor([prompt + answer[:-1]])
    return model(ids, logits_to_keep=len(answer)).logits[0].argmax(-1).tolist()


@pytest.mark.slow
def test_a_bundled_model_with_an_adapter_answers_as_peft_does(tmp_path):
    from peft import LoraConfig, get_peft_model

    peer = load_transformers_model(resolve_model("smollm2"))
    torch.manual_seed(0)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    peer = get_peft_model(peer, LoraConfig(r=16, lora_alpha=4, target_modules=layers, init_lora_weights=False))
    peer.save_pretrained(tmp_path)
    llm = LLM("smollm2", dtype="float32", kv_memory="256MiB", lora=f"a={tmp_path}", max_loras=4)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=3)
    requests = [GenerateRequest(llm.encode(TEXT)[:n], params, lora=name) for n, name in ((60, "a"), (80, None))]
    with_adapter, without = llm.generate_from_requests(requests)
    for request, answer in zip(requests, (with_adapter, without), strict=True):
        ids = [*request.prompt, *answer.token_ids[:-1]]
        with torch.inference_mode(), nullcontext() if request.lora else peer.disable_adapter():
            logprobs = peer(torch.tensor([ids]), logits_to_keep=NUM_TOKENS).logits[0].log_softmax(-1)
        assert logprobs.argmax(-1).tolist() == answer.token_ids
        found = [x.logprob for x in answer.logprobs]
        expected = [float(row[x.token_id]) for x, row in zip(answer.logprobs, logprobs, strict=True)]
        assert found == pytest.approx(expected, abs=0.05)  # products of the cpu backend are of 8 bits
    assert with_adapter.token_ids != without.token_ids


@pytest.mark.slow
@pytest.mark.parametrize(("model", "lengths"), [("smollm2", (25, 130, 300)), ("gemma3", (40, 130, 900))])
def test_bundled_models_answer_as_transformers_does(model, lengths):
    llm = LLM(model, dtype="float32", kv_memory="512MiB", max_batched_tokens=256)
    ids = llm.encode(TEXT)
    prompts = [ids[:n] for n in lengths]
    # All in one batch. What ends an answer is no part of the comparison: transformers knows fewer ends of a file.
    answers = llm.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))
    assert [len(a.token_ids) for a in answers] == [NUM_TOKENS] * 3
    peer = load_transformers_model(resolve_model(model))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert greedy_tokens(peer, prompt, answer.token_ids) == answer.token_ids
    if model == "gemma3":
        full, ring = answers[2].kv["groups"]
        assert (len(full["layers"]), len(ring["layers"]), ring["policy"]) == (3, 15, "ring:window=512")
        assert full["slots_peak"] >= 900 > 512 + 256 >= ring["slots_peak"]  # window + fresh
        assert ring["bytes_peak"] < ring["bytes_if_full"]
