"""A head that tools/train_head.py trains drafts in an engine as it does in training."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from retain import LLM, SamplingParams
from retain.formats.checkpoint import open_checkpoint
from tests.helpers import engines
from tests.helpers.drafts import check_draft_logits
from tests.helpers.folders import save_tiny_smollm2
from tests.helpers.tiny_models import tiny_checkpoint
from tests.models.test_families import build_transformers_model
from tools import train_head

LAYERS = [2, 1, 0]


def make_head() -> train_head.Head:
    """Return a head for the tiny Llama whose weights are no longer those of the target's layer."""
    torch.manual_seed(0)
    target = build_transformers_model(tiny_checkpoint("llama"))
    head = train_head.Head(target, LAYERS, torch.arange(3, 125, 2), torch.float32)
    for name, x in head.w.items():
        scale = 0.1 if "norm" in name else 1.0
        x.data = (x.data + scale * x.shape[-1] ** -0.5 * torch.randn_like(x)).bfloat16().float()
    return head


@torch.inference_mode()
def draft(head: train_head.Head, prompt: list[int], k: int) -> tuple[list[int], Tensor]:
    """Return the target's next token and k drafts, and the logits of these [k, V]."""
    target = build_transformers_model(tiny_checkpoint("llama"))
    done = target(torch.tensor([prompt]), output_hidden_states=True)
    features = torch.cat([done.hidden_states[i] for i in LAYERS], -1)
    tokens = [int(done.logits[0, -1].argmax())]
    logits = torch.full((k, 128), -torch.inf)
    for depth in range(1, k + 1):
        ids = torch.tensor([[*prompt, *tokens]])
        unread = torch.full((1, depth, features.shape[-1]), 9.0)  # of the newest tokens
        known = torch.cat((features, unread), 1)
        *_, x = head.draft(target.get_input_embeddings()(ids), known, depth)
        logits[depth - 1, head.known] = head.linear("lm_head", x)[0, -1]
        tokens.append(int(logits[depth - 1].argmax()))
    return tokens, logits


@pytest.mark.parametrize("length", [1, 9, 60])
def test_a_head_drafts_as_in_training(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = make_head()
    train_head.save(head, build_transformers_model(tiny_checkpoint("llama")), LAYERS, tmp_path)
    monkeypatch.setattr(engines, "tiny_eagle3", lambda config, kind: open_checkpoint(tmp_path))
    check_draft_logits("llama", "eagle3:k=4,model=saved", "reference", length, partial(draft, head))


def test_losses_have_the_gradients_of_torch() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    p = torch.randn(300, 20).softmax(-1)
    loss = 2 * train_head.CrossEntropy.apply(x, weight, p)
    expected = 2 * -(p * (x @ weight.T).log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x, weight)))


def test_the_command_writes_a_head_that_an_engine_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target").mkdir()
    target = save_tiny_smollm2(tmp_path / "target", num_hidden_layers=4)
    (tmp_path / "texts.txt").write_text("A head learns what the model says. " * 200)
    monkeypatch.setattr(train_head, "TEXT_LEN", 96)
    monkeypatch.setattr(train_head, "PASSAGE_LEN", 10)
    monkeypatch.setattr(train_head, "NUM_HELD_OUT", 2)
    options = ["--num-answers", "6", "--minutes", "0.02", "--draft-vocab", "64", "--batch-size", "2"]
    folder = tmp_path / "head"
    train_head.main(["--model", str(target), "--texts", str(tmp_path / "texts.txt"), "--out", str(folder), *options])
    assert {len(text) for text in json.loads((folder / "texts.json").read_text())} == {96}
    assert "right at last:" in capsys.readouterr().out
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    answers = [
        LLM(str(target), speculate=spec, kv_memory="64MiB", max_model_len=256).generate("Rings of", params)[0]
        for spec in (None, f"eagle3:k=3,model={folder}")
    ]
    assert answers[0].token_ids == answers[1].token_ids
