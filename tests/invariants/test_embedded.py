"""Law 7: the embedded models answer as transformers does, on real text, beyond Gemma's window too.

The text is this project's licence. `tools/equal.py` does the same on as many prompts as one likes.
"""

from pathlib import Path

import pytest
import torch

from retain import LLM, SamplingParams
from retain.models.resolve import resolve_model

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()
NEW = 16


def transformers_answers(model, prompts):
    """Greedy float32 answers of transformers, from the same GGUF file."""
    from transformers import AutoModelForCausalLM, GgufConfig

    path = resolve_model(model)
    peer = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    answers = []
    for ids in prompts:
        x = torch.tensor([ids])
        with torch.inference_mode():
            out = peer.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=NEW, do_sample=False)
        answers.append(out[0, len(ids) :].tolist())
    return answers


@pytest.mark.parametrize(("model", "lengths"), [("smollm2", (25, 400, 1100)), ("gemma3", (40, 700, 1300))])
def test_the_embedded_models_answer_as_transformers_does(model, lengths):
    llm = LLM(model, dtype="float32", kv_memory="512MiB")
    ids = llm.encode(TEXT)
    prompts = [ids[:n] for n in lengths]
    answers = llm.generate(prompts, SamplingParams(max_tokens=NEW, temperature=0))  # all in one batch
    assert [a.token_ids for a in answers] == transformers_answers(model, prompts)
    if model == "gemma3":
        full, ring = answers[2].kv["groups"]
        assert (len(full["layers"]), len(ring["layers"]), ring["policy"]) == (3, 15, "ring:window=512")
        assert full["slots_peak"] >= 1300 > 1024 >= ring["slots_peak"]  # window + fresh
        assert ring["bytes_peak"] < ring["bytes_if_full"]
