"""Laws of trained draft heads that attend to the target's cache. Random schedules draw them, too."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from retain.engine import drafters
from retain.engine.runner import Runner
from retain.kernels import import_backend
from retain.kernels.api import Batch
from tests.helpers.engines import make_engine, make_request
from tests.helpers.marks import slow
from tests.helpers.tiny_heads import tiny_assistant
from tests.helpers.tiny_models import CONFIGS, tiny_checkpoint
from tests.models.test_families import build_transformers_model

PROMPT = [random.Random(3).randrange(128) for _ in range(60)]
E_SERIES = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}


class RecordingRunner:
    """Records the logits of another runner."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.logits: list[Tensor] = []

    def forward(self, batch: Batch) -> Tensor:
        self.logits.append(self.runner.forward(batch).clone())
        return self.logits[-1]

    @property
    def hidden_states(self) -> Tensor | None:
        return self.runner.hidden_states


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
