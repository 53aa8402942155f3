"""A press of kvpress scores under this engine what it scores in transformers, and its tokens are kept."""

from __future__ import annotations

import random
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from retain import models
from retain.kv.checkpoints.masses import read_masses
from retain.kv.eviction import policies
from tests.helpers import presses
from tests.helpers.decoder_runner import random_tokens
from tests.helpers.engines import iter_steps, make_engine, make_request, row_of, run_to_completion
from tests.helpers.tiny_models import tiny_checkpoint
from tests.unit.test_kv_cache import cached_positions

N = 60
HELPERS = "tests.helpers.presses"
FAMILIES = ["llama", "qwen2", "qwen3"]
KVPRESS: dict[str, dict[str, int]] = {
    "CURPress": {},
    "CapPress": {},
    "CompactorPress": {"chunk_size": 64, "sketch_dimension": 8},
    "ExpectedAttentionPress": {"n_future_positions": 64},
    "KeyDiffPress": {},
    "KnormPress": {},
    "LagKVPress": {"lag_size": 16},
    "LeverageScorePress": {"sketch_dimension": 8},
    "NonCausalAttnPress": {"chunk_size": 64},
    "RandomPress": {"seed": 3},
    "SnapKVPress": {"window_size": 32},
    "TOVAPress": {},
}
PRESSES = ["KeyNorm", "KeyDifference", "WindowAttention", "ExpectedAttention", "Leverage"]


@torch.inference_mode()
def scores_in_transformers(family: str, press: Any, prompt: Tensor) -> list[Tensor]:
    """Return the scores [G, n] of each layer without a window, of the modules and the cache of transformers."""
    checkpoint = tiny_checkpoint(family)
    windows = models.load_family(family).spec_from_config({**checkpoint.config}).kv_cache.windows
    config = dict(checkpoint.config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).eval()
    model.load_state_dict({name: checkpoint.read(name) for name in checkpoint.names()}, strict=False)
    calls: list[tuple[Any, dict[str, Any]]] = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress does
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, output: calls.append((module, kwargs)), with_kwargs=True
        )
    layers = model(prompt[None], use_cache=True).past_key_values.layers
    found = []
    for (module, kwargs), layer in zip(calls, layers, strict=True):
        if windows[module.layer_idx] is None:
            torch.manual_seed(0)
            found.append(press.score(module, kwargs["hidden_states"], layer.keys, layer.values, None, kwargs)[0])
    return found


def scores_in_engine(family: str, spec: str, prompt: list[int]) -> Tensor:
    """Return what the prompt's tokens have before the answer begins, [M, G, n]."""
    engine = make_engine(family, backend="cpu", max_batched_tokens=37)
    request = make_request(prompt, 2, spec)
    engine.add(request)
    next(step for step in iter_steps(engine) if request.num_output_tokens)
    row = row_of(engine, request)
    masses = read_masses(row.groups, row.index, len(prompt))[0]  # [M, G, pages, 1, S]
    return masses.transpose(2, 3).flatten(3)[:, :, 0, : len(prompt)]


def assert_scores_alike(family: str, press: Any, name: str, prompt: Tensor) -> None:
    """Compare a press, which the engine finds by its name in the module of helpers."""
    press.compression_ratio = 0.0
    expected = torch.stack(scores_in_transformers(family, press, prompt))
    expected = expected - expected.amin((1, 2), keepdim=True)
    found = scores_in_engine(family, f"press:press={HELPERS}.{name},budget={len(prompt)}", prompt.tolist())
    scale = expected.amax()
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PRESSES)
def test_a_press_scores_what_it_scores_in_transformers(name: str, family: str) -> None:
    assert_scores_alike(family, getattr(presses, name)(), name, random_tokens(N))


@pytest.mark.skipif(not find_spec("kvpress"), reason="kvpress is an environment of its own: tools/kvpress_peer.txt")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "options"), KVPRESS.items())
def test_presses_of_kvpress_score_what_they_score_in_transformers(
    name: str, options: dict[str, int], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    press = getattr(import_module("kvpress"), name)(**options)
    monkeypatch.setattr(presses, "tuned", press)
    assert_scores_alike(family, press, "tuned", random_tokens(150))


def test_the_highest_scores_stay() -> None:
    prompt = random_tokens(N).tolist()
    scores = scores_in_engine("llama", f"press:press={HELPERS}.KeyNorm,budget=60", prompt)
    engine = make_engine("llama", backend="cpu")
    request = make_request(prompt, 9, f"press:press={HELPERS}.KeyNorm,budget=20,recent=1,interval=16")
    engine.add(request)
    next(step for step in iter_steps(engine) if request.num_output_tokens == 2)
    row = row_of(engine, request)
    for m in range(len(scores)):
        for g in range(scores.shape[1]):
            kept = {p for p in cached_positions(engine.cache, row, m, g) if p < N - 1}
            best = scores[m, g, : N - 1].argsort(descending=True)[: len(kept)].tolist()
            assert len(kept) >= 18 and kept == set(best)


def test_an_object_of_a_module_is_a_press_as_well_as_a_class() -> None:
    prompt = random_tokens(N).tolist()
    tuned, plain = (
        scores_in_engine("llama", f"press:press={HELPERS}.{name},budget={N}", prompt)
        for name in ("tuned", "WindowAttention")
    )
    assert not torch.equal(tuned, plain)
    assert (tuned[..., N - 20 :] > 1).all() and (tuned[..., : N - 20] < 1).all()


def test_a_press_that_draws_numbers_changes_no_other_request() -> None:
    """It draws the same for equal prompts, and leaves the generators of torch as they were."""
    prompt = random_tokens(N).tolist()
    spec = f"press:press={HELPERS}.Leverage,budget={N}"
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = scores_in_engine("llama", spec, prompt)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(random.randrange(1000))
    assert torch.equal(scores_in_engine("llama", spec, prompt), first)


def test_a_press_is_told_the_share_that_goes() -> None:
    request = make_request([1] * N, 2, f"press:press={HELPERS}.tuned,budget=25%")
    run_to_completion(make_engine("llama"), [request])
    assert presses.tuned.compression_ratio == 0.75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("press=no_such_module.Press", "press: no_such_module.Press cannot be used: No module named 'no_such_module'"),
        ("press=Press", "press: Press cannot be used"),
        (f"press={HELPERS}.no_press", "has no attribute 'no_press'"),
        (f"press={HELPERS}.not_a_press", "press: tests.helpers.presses.not_a_press has no method `score`"),
        (f"press={HELPERS}.KeyNorm,share=all", "share is none, fitted or layer"),
        (f"press={HELPERS}.KeyNorm,value=norm", "value=none"),
        (f"press={HELPERS}.KeyNorm,prefill=stream", "prefill=stream"),
    ],
)
def test_what_is_no_press_is_refused_in_a_line(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as raised:
        policies.parse(f"press:budget=9,{options}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("WindowAttention", 5, "WindowAttention cannot score a prompt of 5 tokens: too short"),
        ("Failing", 9, "Failing cannot score a prompt of 9 tokens: scores (1, 2, 9) are not"),
    ],
)
def test_a_press_that_fails_is_named_and_its_request_goes_on(
    name: str, length: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = scores_in_engine("llama", f"press:press={HELPERS}.{name},budget={length}", [1] * length)
    assert message in caplog.text and not found.any()
