"""The peer of kvpress: it sees what the bench sees, and a press of ours evicts what a policy of ours does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from retain import LLM
from retain.bench.documents import Document, Question
from retain.bench.tasks import ForcedItem, fidelity, ruler_ask_later
from tools import kvpress_table
from tools.kvpress_peer import FULL, PressedModel, ResultsFile, compression_ratio, list_specs, measure_task

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
TEXT = list(range(100, 148))
SPECS = list_specs(["window"], ["50%", "25%"])
OURS = [f"{spec},interval=64" for spec in SPECS]


class WindowPress:
    """Keeps the newest tokens."""

    def __init__(self, budget: str):
        self.ratio = compression_ratio(budget)

    def compress(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        kept = int(keys.shape[2] * (1 - self.ratio))
        return keys[:, :, -kept:], values[:, :, -kept:]


class MaskedWindowPress(WindowPress):
    """Keeps the same, and says which slots attention must not see, as AdaKV does."""

    def compress(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        _, heads, slots, _ = keys.shape
        dropped = slots - int(slots * (1 - self.ratio))
        index = torch.cartesian_prod(torch.arange(1), torch.arange(heads), torch.arange(dropped))
        module.masked_key_indices = tuple(index.T)
        return keys, values


@pytest.fixture(scope="module")
def llm(tiny_smollm2: str) -> LLM:
    return LLM(tiny_smollm2, dtype="float32", kv_memory="64MiB")


@pytest.fixture(scope="module")
def peer(tiny_smollm2: str, llm: LLM) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_smollm2, dtype=torch.float32).eval()
    presses = {spec: WindowPress(spec.partition("=")[2]) for spec in SPECS}
    return PressedModel(model, llm.tokenizer, presses, DynamicCache)


def test_presses_are_measured_as_policies_are(llm: LLM, peer: Any) -> None:
    items = [ForcedItem(TEXT[i:], TEXT[:9]) for i in (0, 3)]
    found = list(measure_task(peer, fidelity, items, SPECS))
    _, state = fidelity.measure(llm, items, [FULL], None)
    rows, _ = fidelity.measure(llm, items, [FULL, *OURS], state)
    for spec, expected in zip((FULL, *SPECS), (rows[:2], rows[2:4], rows[4:]), strict=True):
        for columns, row in zip(found, expected, strict=True):
            assert columns[spec]["loss"] == pytest.approx(row["loss"], abs=1e-4)
            assert columns[spec]["kl"] == pytest.approx(row["kl"], abs=2e-3)
    assert all(columns[SPECS[1]]["kl"] > 0.01 for columns in found)


def test_questions_behind_a_pressed_document_are_answered_as_under_a_policy(llm: LLM, peer: Any) -> None:
    forms = [(llm.tokenizer.decode([token]),) for token in range(60, 90)]
    questions = tuple(Question(kind, TEXT[:n], tuple(forms)) for kind, n in (("single", 5), ("multikey", 2)))
    documents = [Document(TEXT, questions)]
    (found,) = measure_task(peer, ruler_ask_later, documents, SPECS)
    rows, _ = ruler_ask_later.measure(llm, documents, [FULL, *OURS], None)
    assert list(found.values()) == rows


def test_masked_slots_reach_attention_with_their_row_of_the_batch(peer: Any) -> None:
    masked = {"a": MaskedWindowPress("50%"), "b": MaskedWindowPress("25%")}
    model = PressedModel(peer.model, peer.tokenizer, masked, DynamicCache)
    kept = model.compute(TEXT).kept
    model.extend([kept["a"], kept[FULL], kept["b"]], len(TEXT), TEXT[:3])
    rows, heads, slots = model.attentions[0].masked_key_indices
    num_heads = int(heads.max()) + 1
    assert {(int(r), int(s)) for r, s in zip(rows, slots, strict=True)} == {
        *((0, s) for s in range(24)),
        *((2, s) for s in range(36)),
    }
    assert len(rows) == num_heads * 60
    model.extend([kept[FULL]], len(TEXT), TEXT[:3])
    assert model.attentions[0].masked_key_indices is None


def test_files_grow_by_items_and_columns(tmp_path: Path) -> None:
    file = tmp_path / "fidelity.json"
    for i in range(2):
        ResultsFile(file).put(i, {FULL: {"kl": 0.0}, "a": {"kl": float(i)}})
    assert ResultsFile(file).count_measured(["a"]) == 2 and ResultsFile(file).count_measured(["a", "b"]) == 0
    ResultsFile(file).put(0, {FULL: {"kl": 0.0}, "b": {"kl": 2.0}})
    found = json.loads(file.read_text())
    assert found == {FULL: [{"kl": 0.0}] * 2, "a": [{"kl": 0.0}, {"kl": 1.0}], "b": [{"kl": 2.0}]}
    kvpress_table.keep_common_items([{"fidelity": found}])
    assert {spec: len(rows) for spec, rows in found.items()} == {FULL: 1, "a": 1, "b": 1}


@pytest.mark.parametrize("budget", ["100%", "12", "x"])
def test_presses_take_shares(budget: str) -> None:
    with pytest.raises(ValueError):
        compression_ratio(budget)


def test_a_table_has_rows_of_both_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(kl: float, loss: float) -> dict[str, float]:
        return {"kl": kl, "loss": loss, "top1_agreement": 1 - kl}

    ours = {FULL: [row(0, 2)] * 2, "h2o:budget=50%,recent=9": [row(0.25, 2.5)] * 2}
    theirs = {FULL: [row(0, 2)] * 2, "snapkv:budget=25%": [row(0.125, 2.25)] * 2}
    for name, columns in (("ours", ours), ("theirs", theirs)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fidelity.json").write_text(json.dumps(columns))
    kvpress_table.main([f"retain={tmp_path / 'ours'}", f"kvpress={tmp_path / 'theirs'}", "--budgets", "50%,25%"])
    lines = capsys.readouterr().out.splitlines()
    assert "retain, fidelity: 2 items, full cache loss 2.0000" in lines
    assert "| retain | h2o:recent=9 | 0.250 ±0.000 / - | 0.500 ±0.000 / - | 0.750 ±0.000 / - |" in lines
    assert "| kvpress | snapkv | - / 0.125 ±0.000 | - / 0.250 ±0.000 | - / 0.875 ±0.000 |" in lines
