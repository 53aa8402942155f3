"""Eviction policies: their specs, and what every policy file must define."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from retain.kernels.slots.kv_cache_spec import KVCacheSpec, uniform_layers
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView, KeyTransform
from tests.helpers.attention_case import assert_close
from tests.helpers.gates import random_gate
from tests.helpers.policy_specs import spec_of
from tests.unit.test_kv_cache import cached_positions, compute, make_cache


def view_of(pos: Tensor) -> CacheView:
    """Return a view of slots with these positions [L, G, S], and random masses, keys and values."""
    mass = torch.rand(*pos.shape[:2], 1, pos.shape[2])
    return CacheView(pos, mass, 100, lambda: (torch.randn(*pos.shape, 8), torch.randn(*pos.shape, 8)))


def test_a_score_of_all_layers_is_of_tokens_wherever_layers_hold_them() -> None:
    """Heads may keep different numbers of tokens, and holes have the masses of their earlier owners."""
    pos = torch.tensor([[[0, 3, 7, 5]], [[3, 0, -1, -1]], [[7, -1, 3, 0]]], dtype=torch.int32)
    view = view_of(pos)
    priority = policies.parse("h2o:budget=9,scope=shared").priority(view)
    for p in (0, 3, 5, 7):
        expected = sum(view.mass[:, :, 0][pos == p].tolist())
        assert_close(priority[pos == p], torch.full((int((pos == p).sum()),), expected))


@pytest.mark.parametrize("num_layers", [2, 5, 30])
def test_a_score_of_all_layers_does_not_depend_on_empty_slots(num_layers: int) -> None:
    """To the bit: how many slots a row owns depends on its history."""
    pos = torch.arange(80, dtype=torch.int32).masked_fill_(torch.arange(80) >= 40, -1).expand(num_layers, 1, -1)
    view = view_of(pos)
    fewer = dataclasses.replace(view, pos=pos[..., :48], mass=view.mass[..., :48].contiguous())
    policy = policies.parse("h2o:budget=9,scope=shared")
    assert torch.equal(policy.priority(view)[..., :40], policy.priority(fewer)[..., :40])


def test_the_priority_of_a_ring_defines_what_it_overwrites() -> None:
    """Punching the lowest priority of a head over its budget keeps what slot = pos mod capacity keeps."""
    policy = policies.parse("ring:window=24")
    assert policy.ring_window
    cache = make_cache([None], page_size=16)
    row = cache.open(policy, 1)
    kept: list[int] = []
    for p in range(150):
        compute(cache, row, p, 1)
        kept.append(p)
        if len(kept) > policy.ring_window:
            kept.pop(int(policy.priority(view_of(torch.tensor([[kept]]))).argmin()))
        visible = [q for q in cached_positions(cache, row, 0, 0) if p - q < cache.tables.window[row.index, 0]]
        assert sorted(visible) == kept


@pytest.mark.parametrize("name", policies.names())
def test_every_policy_defines_a_priority_that_the_cache_carries_out(name: str) -> None:
    """A budget evicts by it; otherwise the oldest must have the lowest, as in slot = pos mod capacity."""
    cls = importlib.import_module(f"retain.kv.eviction.policies.{name}").Policy
    view = view_of(torch.randperm(100).int().view(2, 2, 25))
    if issubclass(cls, BudgetPolicy):
        policy = policies.parse(spec_of(name, "budget=50%")).resolve(100)
        assert isinstance(policy, BudgetPolicy)
        if policy.scores_slots:
            gate = random_gate(KVCacheSpec(uniform_layers(2, 8, (None, None))))
            policy = policy.fit(200, lambda file: gate)
            scores = policy.score_slots(dataclasses.replace(view, transform=KeyTransform()))
            view = dataclasses.replace(view, slot_scores=scores)
        assert policy.priority(view).shape == view.pos.shape and policy.budget_tokens == 50
        return
    policy = cls(**{f.name: 24 for f in dataclasses.fields(cls)})
    if policy.ring_window is not None:
        assert torch.equal(policy.priority(view).argsort(-1), view.pos.argsort(-1))


@pytest.mark.parametrize(
    "spec",
    [
        "full",
        "ring:window=9",
        "h2o:budget=25%",
        "keyformer:budget=1024,recent=40,sinks=3,interval=1,noise=gaussian,tau=1..3",
        "random:budget=1%,keep=prompt",
        "h2o:budget=50%,shrink=20%",
        "h2o:budget=50%,prefill=stream,chunk=256,demote=int4:10%,protect=system,resume=off",
        "reread:budget=9,chunk=32",
    ],
)
def test_a_policy_is_written_back_as_its_spec(spec: str) -> None:
    policy = policies.parse(spec)
    assert policies.parse(policies.to_spec(policy)) == policy
    assert policies.to_spec(policy).count(",") == spec.count(",")


@pytest.mark.parametrize("name", policies.names())
def test_a_policy_is_one_short_file_with_its_name(name: str) -> None:
    module = importlib.import_module(f"retain.kv.eviction.policies.{name}")
    assert module.__file__ and module.__doc__
    assert len(Path(module.__file__).read_text().splitlines()) <= 100
    assert module.__doc__.startswith(f"{name}: ")


@pytest.mark.parametrize(("alias", "name"), policies.ALIASES.items())
def test_an_alias_names_the_same_policy(alias: str, name: str) -> None:
    """`streaming_llm` and `kvzip` are what the papers call `sinks` and `reread`."""
    assert policies.parse(f"{alias}:budget=8") == policies.parse(f"{name}:budget=8")
    assert policies.to_spec(policies.parse(f"{alias}:budget=8")) == f"{name}:budget=8"


def test_equal_policies_go_on_from_the_same_checkpoints() -> None:
    """A share of the prompt and as many tokens keep the same, and are told apart: the next prompt is longer."""
    share, tokens = (policies.parse(f"h2o:budget={budget}").resolve(100) for budget in ("50%", "50"))
    assert share.resume_key != tokens.resume_key and share != tokens
    assert policies.parse("h2o:budget=50%").resolve(100) == share


def test_a_budget_that_has_begun_is_not_halved_where_it_would_wait() -> None:
    """It held the prompt, so that nothing waited; a smaller one would wait for `first` tokens of the answer."""
    for prompt_len, first, is_halved in ((60, 0, True), (60, 200, False), (100, 200, True)):
        policy = policies.parse(f"reread:budget=64,first={first},shrink=16").resolve(prompt_len)
        assert isinstance(policy, BudgetPolicy)
        assert (policy.halved() is not None) == is_halved
