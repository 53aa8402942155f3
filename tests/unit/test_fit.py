"""`retain fit`: what is fitted is what the cache ranks by, and the sums are those of the regression that they name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from retain import LLM, SamplingParams
from retain.fit import statistics
from retain.fit.dense import EVERY, DenseModel, LayerAttention
from retain.fit.evaluation import hold_out, kl_divergence
from retain.fit.gate import score_columns, score_replayed
from retain.fit.ridge import LINEAR_PENALTY, LOG_PENALTY, Moments
from retain.fit.shares import ShareCounter
from retain.fit.statistics import TARGET_FLOOR, Collector, FirstReading, Statistics
from retain.gates import loader as loader_module
from retain.gates.loader import SUFFIX, GateLoader
from retain.kernels import reference
from retain.kernels.attention_params import AttentionParams
from retain.kv.eviction.gate_weights import HIGHEST, LOWEST, NUM_LOGS, Gate, GateWeights, save_gate
from retain.kv.eviction.head_shares import HeadShares
from retain.kv.eviction.policies import gate as gate_policy
from retain.kv.eviction.view import CacheView
from retain.models.weights import Weights
from retain.processing.examples import Example
from tests.helpers.cli import assert_one_line_error, run_cli
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.folders import save_tiny_smollm2
from tests.helpers.gates import random_gate
from tests.helpers.marks import slow
from tests.helpers.slots import read_pages
from tests.helpers.tiny_models import tiny_checkpoint

FAMILIES = ["llama", *slow("gemma3_text", "mpt", "gpt2", "qwen2", "deepseek_v3")]
PROMPT = [11 * i % 127 for i in range(60)]
EXAMPLE = Example(PROMPT, [5, 9, 33, 70])


def dense_model(family: str) -> DenseModel:
    return DenseModel(Weights(tiny_checkpoint(family), torch.float32))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gate_is_fitted_on_the_numbers_that_a_cache_gives_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense_model(family)
    s = model.spec
    gate = random_gate(s.kv_cache)
    assert gate.attention and gate.replayed
    ranked: list[Tensor] = []
    priority = gate_policy.Policy.priority

    def record(self: gate_policy.Policy, view: CacheView) -> Tensor:
        ranked.append(priority(self, view).gather(-1, view.pos.masked_fill(view.pos < 0, 10**6).argsort(-1)))
        return priority(self, view)

    monkeypatch.setattr(gate_policy.Policy, "priority", record)
    for name in ("round_keys", "round_8bit"):
        monkeypatch.setattr(statistics, name, lambda x: x)
    options = "budget=30,recent=9,share=none"
    for policy in (f"gate:{options}", f"gate_replay:{options}"):
        run_to_completion(make_engine(family), [make_request(PROMPT, 1, policy)])
    found = Collector(model, "reread", lambda prompt: [prompt]).collect(EXAMPLE)
    expected = score_columns(gate.attention, found.columns), score_replayed(gate.replayed, found)
    for ours, theirs in zip(ranked, expected, strict=True):
        assert torch.allclose(ours[..., : len(PROMPT)], theirs.clamp(LOWEST, HIGHEST), atol=1e-3)


def test_a_gate_is_fitted_on_keys_and_values_as_8_bits_hold_them() -> None:
    k, v = torch.randn(2, 16, 1, 24, generator=torch.Generator().manual_seed(1))
    kv = reference.allocate(2, 16, 24, torch.int8)
    reference.write(kv, torch.arange(16, 32, dtype=torch.int32)[None], k, v, torch.arange(16, dtype=torch.int32))
    held_k, held_v = read_pages(reference, kv, torch.tensor([1]))
    assert torch.equal(statistics.round_keys(k[:, 0]), held_k[0])
    assert torch.equal(statistics.round_8bit(v[:, 0]), held_v[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_dense_model_computes_what_the_engine_does(family: str) -> None:
    model = dense_model(family)
    _, past = model.forward(PROMPT)
    for tokens, keys in ((EXAMPLE.prompt + EXAMPLE.answer, None), (EXAMPLE.answer, past)):
        found, _ = model.forward(tokens, past=keys, predicting=EVERY)
        if keys is None:
            whole = found
    assert torch.allclose(found, whole[len(PROMPT) :], atol=1e-4)
    answers = run_to_completion(make_engine(family), [make_request(PROMPT, 1)])
    assert answers == [[int(whole[len(PROMPT) - 1].argmax())]]


def test_what_an_answer_needs_is_the_derivative_by_a_weight_of_attention() -> None:
    """The likelihood's change, when a head attends a little more to one token, is what the formula says."""
    layer, head, token, step = 1, 1, 17, 1e-3

    class Nudged(DenseModel):
        def _attend(
            self, i: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams
        ) -> LayerAttention:
            found = super()._attend(i, q, k, v, mask, params)
            if i != layer:
                return found
            weights = found.weights.clone()
            weights[head, :, len(PROMPT), token] *= 1 + step
            weights = weights / weights.sum(-1, keepdim=True)
            return replace(found, weights=weights, output=weights @ v[:, None])

    weights = Weights(tiny_checkpoint("llama"), torch.float32)
    example = Example(PROMPT, [5, 9])  # one query counts: the first answer token's

    def log_likelihood(model: DenseModel) -> float:
        log_probs, _ = model.forward(example.prompt + example.answer, predicting=slice(len(PROMPT), -1))
        return float(log_probs[0, example.answer[1]])

    change = (log_likelihood(Nudged(weights)) - log_likelihood(DenseModel(weights))) / step
    needed = FirstReading(DenseModel(weights), len(PROMPT)).read_answer(example)[1]
    assert float(needed[layer, head, token]) == pytest.approx(abs(change), rel=0.05, abs=2e-3)


def test_moments_solve_the_ridge_regression_of_all_rows() -> None:
    rng = torch.Generator().manual_seed(0)
    M, G, D, V = 2, 3, 4, 2
    batches = [
        Statistics(
            torch.randn(M, G, n, D + V + NUM_LOGS, generator=rng) * 3 + 1,
            torch.rand(M, G, n, generator=rng) * 4,
            torch.zeros(M, G, n),
            torch.rand(M, G, n, generator=rng),
        )
        for n in (50, 80)
    ]
    moments = Moments(D)
    for batch in batches:
        moments.add(batch)
    gate = moments.solve()
    _, r2 = moments.r2(gate)
    x = torch.cat([b.columns for b in batches], 2).double()
    y = (torch.cat([b.target for b in batches], 2) + TARGET_FLOOR).log().double()
    N = x.shape[2]
    z = (x - x.mean(2, keepdim=True)) / x.std(2, correction=0, keepdim=True)
    penalty = torch.tensor([LINEAR_PENALTY * N] * (D + V) + [LOG_PENALTY] * NUM_LOGS).double()
    w = torch.linalg.solve(z.mT @ z + torch.diag(penalty), z.mT @ (y - y.mean(2, keepdim=True))[..., None])
    predicted = (z @ w)[..., 0] + y.mean(2, keepdim=True)
    batch_scores = torch.cat([score_columns(gate, b.columns) for b in batches], 2)
    assert torch.allclose(batch_scores.double(), predicted, atol=1e-4)
    assert r2 == pytest.approx(float(1 - (y - predicted).square().sum() / (y - y.mean()).square().sum()), abs=1e-5)


def test_keeping_every_token_changes_no_distribution() -> None:
    model = dense_model("llama")
    held = hold_out(model, EXAMPLE)
    scores = torch.rand(3, 2, len(PROMPT))
    assert kl_divergence(model, held, scores, 1.0, 0.1, "all") == pytest.approx(0, abs=1e-6)
    assert kl_divergence(model, held, scores, 0.2, 0.1, "all") > 0.001


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gate that the command fitted to a model with random weights."""
    folder = tmp_path_factory.mktemp("gate")
    data, out = folder / "data.jsonl", folder / f"tiny{SUFFIX}"
    texts = [f"{i} " + "the quick brown fox jumps over a lazy dog, " * 3 for i in range(8)]
    data.write_text("".join(json.dumps({"prompt": t, "answer": "so it was"}) + "\n" for t in texts))
    from retain.cli.main import main

    assert main(["fit", "--model", "random:tiny", "--data", str(data), "--out", str(out), "--json"]) == 0
    return out


def test_a_fitted_gate_is_used_by_its_file(fitted: Path) -> None:
    llm = LLM("random:tiny", dtype="float32", kv_memory="16MiB", kv_policy=f"gate:budget=40,file={fitted}")
    prompt = [i % 100 + 3 for i in range(90)]
    policies = [f"gate:budget=40,file={fitted}", "gate:budget=40"]
    answers = llm.generate([prompt] * 2, SamplingParams(temperature=0, max_tokens=40), kv_policy=policies)
    assert answers[0].token_ids == answers[1].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", *slow("gemma3")])
def test_the_package_has_gates_of_the_bundled_models(model: str) -> None:
    """Such a gate loads, keeps other tokens than masses alone would, and changes nothing where all are kept."""
    llm = LLM(model, dtype="float32", prefix_cache="off", kv_policy="gate:budget=50%")
    prompt = llm.encode("The harbour master counted seven boats, and the eighth was late. " * 6)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    full, whole = llm.generate([prompt] * 2, greedy, kv_policy=["full", "gate:budget=500"])
    assert whole.token_ids == full.token_ids
    gate, h2o = (llm.kept_positions(prompt, f"{name}:budget=50%,share=all,recent=15%") for name in ("gate", "h2o"))
    assert gate != h2o


def test_shares_are_added_to_a_gate_or_written_alone(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = fitted.with_name("data.jsonl")
    arguments = ["fit", "--model", "random:tiny", "--data", data, "--budgets", "--out"]
    alone = tmp_path / f"alone{SUFFIX}"
    result = run_cli(capsys, *arguments, alone)
    assert result.code == 0 and "h2o, share=fitted" in result.out and "share=fitted" in result.out.splitlines()[-1]
    beside = tmp_path / f"beside{SUFFIX}"
    beside.write_bytes(fitted.read_bytes())
    assert run_cli(capsys, *arguments, beside).code == 0
    before, added = (load_file(path) for path in (fitted, beside))
    assert load_file(alone).keys() == {"shares"}
    assert all(torch.equal(tensor, added[name]) for name, tensor in before.items())  # the texts are the same
    assert torch.equal(load_file(alone)["shares"], added["shares"])


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "replay"])
def test_heads_keep_what_their_shares_say(policy: str, fitted: Path) -> None:
    """Also of a policy that divides by priority otherwise. The mean head keeps the budget, or a token less."""
    shares = load_file(fitted)["shares"]
    spec = f"{policy}:budget=40,recent=10,share=fitted"
    llm = LLM("random:tiny", dtype="float32", kv_memory="16MiB", kv_policy=f"gate:budget=40,file={fitted}")
    kept = llm.kept_positions([i % 100 + 3 for i in range(90)], spec)
    found = torch.tensor([[len(head) for head in layer] for layer in kept])
    assert torch.equal(found, 10 + HeadShares(shares).divide(30, 80))
    assert 39 <= found.double().mean() <= 40


def test_shares_alone_hide_no_gate_of_the_package(
    fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (beside := tmp_path / "model").mkdir()
    (package := tmp_path / "package").mkdir()
    model = save_tiny_smollm2(beside, "llama")
    loader = GateLoader(model, tiny_spec := dense_model("llama").spec.kv_cache)
    weights = random_gate(tiny_spec)
    save_gate(package / f"a{SUFFIX}", replace(weights, shares=None), loader.shape, {})
    save_gate(beside / f"a{SUFFIX}", Gate(shares=weights.shares), loader.shape, {})
    monkeypatch.setattr(loader_module, "PACKAGED", package)
    found = loader("")
    assert found.attention and found.replayed and found.shares
    assert loader.policy_names("") == ("gate_replay", "gate")


def test_without_shares_a_share_of_them_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "--model", "random:tiny", "--kv-memory", "16MiB", "--max-tokens", "2", "Hello", "--kv-policy"]
    assert_one_line_error(run_cli(capsys, *arguments, "h2o:budget=9,share=fitted"), "`retain fit` makes a file")


@given(st.integers(1, 400), st.integers(0, 400), st.integers(0, 1000))
def test_shares_divide_every_budget(num_tokens: int, budget: int, seed: int) -> None:
    """The mean head keeps at most the budget; none keeps more than there is, or fewer of a larger budget."""
    budget = min(budget, num_tokens)
    counter = ShareCounter()
    for i in range(2):
        generator = torch.Generator().manual_seed(seed + i)
        scale = torch.rand(2, 3, 1, generator=generator)
        counter.add(torch.rand(2, 3, 64, generator=generator) * scale)
    shares = counter.solve()
    found = shares.divide(budget, num_tokens)
    assert int(found.sum()) <= budget * found.numel()
    assert budget - 2 < found.double().mean() and int(found.max()) <= num_tokens
    assert (shares.divide(budget + 1, num_tokens) >= found).all()


def test_a_gate_for_one_policy_is_refused_by_the_other(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(fitted, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in GateWeights.__annotations__}
        save_file(tensors, path := tmp_path / "x.safetensors", file.metadata())
    arguments = ["run", "--model", "random:tiny", "--kv-memory", "16MiB", "--max-tokens", "2", "Hello", "--kv-policy"]
    assert_one_line_error(run_cli(capsys, *arguments, f"gate_replay:budget=9,file={path}"), "is for `gate` alone")
    assert run_cli(capsys, *arguments, f"gate:budget=9,file={path}").code == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "cannot be read as a gate"),
        ("cut", "cannot be read as a gate"),
        ("text", "cannot be read as a gate"),
        ("weights", "not a gate"),
        ("shape", "damaged: key is"),
        ("second", "damaged: replayed.key is missing"),
        ("nan", "not finite"),
        ("shares", "shares has numbers that are not between 0 and 1"),
        ("sizes of shares", "damaged: shares is"),
        ("too much", "heads do not divide budgets of 50.0%, 25.0%, 12.5%"),
        ("shares alone", "has shares of heads alone"),
        ("model", "another model"),
        ("none", "gate: nothing is fitted"),
    ],
)
def test_a_gate_that_does_not_fit_is_one_line(
    damage: str, message: str, fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(fitted, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    path = tmp_path / "x.safetensors"
    if damage == "cut":
        path.write_bytes(fitted.read_bytes()[:-20])
    elif damage == "text":
        path.write_text("a gate")
    elif damage == "weights":
        save_file(tensors, path)
    elif damage == "shape":
        save_file({**tensors, "key": torch.zeros(2, 2, 2)}, path, metadata)
    elif damage == "second":
        save_file({name: tensor for name, tensor in tensors.items() if name != "replayed.key"}, path, metadata)
    elif damage == "nan":
        save_file({**tensors, "bias": tensors["bias"] * torch.nan}, path, metadata)
    elif damage == "shares":
        save_file({**tensors, "shares": tensors["shares"] * torch.nan}, path, metadata)
    elif damage == "sizes of shares":
        save_file({**tensors, "shares": tensors["shares"][1:]}, path, metadata)
    elif damage == "too much":
        save_file({**tensors, "shares": torch.ones_like(tensors["shares"])}, path, metadata)
    elif damage == "shares alone":
        save_file({"shares": tensors["shares"]}, path, metadata)
    elif damage == "model":
        save_file(tensors, path, {**metadata, "fingerprint": "0" * 32})
    policy = "gate:budget=9" if damage == "none" else f"gate:budget=9,file={path}"
    result = run_cli(capsys, "run", "--model", "random:tiny", "--kv-memory", "16MiB", "--kv-policy", policy, "Hello")
    assert_one_line_error(result, message)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "not an object"),
        ('{"body": 1}', "needs article and highlights"),
        (json.dumps({"prompt": "a b c " * 40}), "needs an answer"),
        ('{"prompt": "a", "answer": "a long enough answer"}', "7 are needed"),
    ],
)
def test_data_that_cannot_be_fitted_is_one_line(
    record: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(record + "\n")
    out = tmp_path / "x.gate.safetensors"
    result = run_cli(capsys, "fit", "--model", "random:tiny", "--data", data, "--out", out)
    assert_one_line_error(result, message)
    assert not out.exists()


def test_a_model_with_states_is_refused_before_its_prompts_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "model").mkdir()
    save_tiny_smollm2(folder, "lfm2")
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "%s", "answer": "a long enough answer"}\n' % ("a b c " * 40) * 7)
    out = tmp_path / "x.gate.safetensors"
    result = run_cli(capsys, "fit", "--model", folder, "--data", data, "--out", out)
    assert_one_line_error(result, "some layers cache states, with which no gate can be fitted")
