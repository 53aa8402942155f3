"""Laws of the policy `auto`: it stands for what the guide's table recommends, and keeps the options that were given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from retain import LLM, SamplingParams
from retain.kv.eviction import policies
from retain.kv.eviction.auto_policy import AutoPolicy, check_spec
from retain.plugins import parse_spec

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "policies.md"
SITUATIONS = {
    "`smollm2`, or a model that you have": AutoPolicy(lambda file: ("gate_replay", "gate")),
    "A model without a gate": AutoPolicy(),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_auto_is_what_the_guide_recommends(situation: str) -> None:
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith(f"| {situation}")]
    (recommended,) = re.findall(r"\| `(\w+:\S+)`", rows[0])
    assert policies.parse(SITUATIONS[situation].choose("auto:budget=50%")) == policies.parse(recommended)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize(
    "options",
    ["budget=7", "budget=50%,recent=3", "budget=9,share=layer", "budget=9,prefill=stream", "budget=9,demote=int4"],
)
def test_given_options_stay(situation: str, options: str) -> None:
    chosen = SITUATIONS[situation].choose(f"auto:{options}")
    assert parse_spec(f"x:{options}")[1].items() <= parse_spec(chosen)[1].items()
    policies.parse(chosen)


@pytest.mark.parametrize("spec", ["full", "h2o:budget=50%", "no_policy:x=1"])
def test_another_spec_stays(spec: str) -> None:
    assert AutoPolicy().choose(spec) == spec


@pytest.mark.parametrize("spec", ["auto:budget=64,block=64", "auto:budget=64,file=x", "auto:budget=64,prefill=stream"])
def test_an_option_of_any_policy_that_auto_stands_for_is_let_through(spec: str) -> None:
    check_spec(spec)


def test_engine_and_requests_have_the_policy_that_auto_stands_for() -> None:
    llm = LLM("random:tiny", kv_policy="auto:budget=50%", kv_memory="8MiB")
    try:
        params = SamplingParams(max_tokens=2)
        (default,) = llm.generate([1, 2, 3], params)
        (other,) = llm.generate([1, 2, 3], params, kv_policy="auto:budget=9")
    finally:
        llm.close()
    assert policies.to_spec(llm.policy) == "replay:budget=50%"
    assert default.kv["policy"].startswith("replay:budget=") and other.kv["policy"].startswith(
        "replay:budget=9,recent=1"
    )
