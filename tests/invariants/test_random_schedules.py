"""Laws 2, 3, 4 and 6 together: in a random schedule every request gets what it gets alone.

Schedules (tests/helpers/schedules.py) mix policies, drafters, prefixes, tiers with restarts, and pools down to
preemption.
`python -m tools.fuzz` runs as many as one likes, and makes those that fail smaller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from retain.config import Config
from retain.engine import drafters
from retain.engine.request import RequestInput
from retain.kernels import cpu
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.query_scored import QueryScoredPolicy
from retain.kv.prefix import config as prefix_configs
from retain.kv.prefix.config import PrefixConfig, SelectiveConfig
from retain.kv.stores import tiers
from retain.options import option_values
from retain.sampling_params import SamplingParams
from tests.helpers.attention_case import torch_threads
from tests.helpers.marks import slow
from tests.helpers.schedule_runner import ScheduleRun
from tests.helpers.schedules import (
    FAMILIES,
    STATE_FAMILIES,
    UNLIKE_FAMILIES,
    Schedule,
    draw_schedule,
    families_of_tests,
    parse_policy,
)
from tests.helpers.tiny_models import CONFIGS, MULTIMODAL

BACKENDS = ["cpu", "reference"] if cpu.unavailable_reason() is None else ["reference"]


# Seeds, and pending steps of an engine: with 2 each step is launched before the tokens of the last one are known.
CASES = [*((seed, 1 + seed % 2) for seed in range(4)), *slow(*((seed, 1) for seed in range(4, 24)))]
CASES += slow(*((seed, 2) for seed in range(4, 12)))


SCHEDULE_FIELDS = {  # of options of an engine that have another name there
    "Config.model": "family",
    "Config.kv_policy": "requests",
    "Config.tier": "tiers",
    "Config.speculate": "drafter",
    "Config.kv_memory": "pool_factor",
    "Config.kv_offload": "offloads",
}
NEVER_DRAWN = {
    "Config.pooling": "a model that embeds generates nothing: tests/unit/test_pooling.py",
    "RequestInput.pools": "the same",
    "Config.tensor_parallel": "schedules on ranks are those of tests/invariants/test_tensor_parallel.py",
    "Config.lora": "adapters of schedules are made in their engine",
    "Config.max_loras": "the same",
    "Config.max_lora_rank": "the same",
    "gate.file": "gates of schedules have random numbers",
    "disk.path": "each schedule has a folder of its own",
    "remote.url": "the same",
    "remote.endpoint": "there is no store but the folder",
    "remote.region": "the same",
    "remote.timeout": "no answer depends on it that is compared",
    "selective.keep": "with selective loading a request does not equal itself alone",
    "selective.ratio": "the same",
    "reread.prefill": "it reads a whole prompt again, and refuses stream",
    "Config.chat_template": "prompts are tokens",
    "Config.allow_policy": "input processing refuses policies",
    "Config.max_model_len": "input processing refuses longer texts",
    "Config.device": "a backend is of one device",
    "SamplingParams.max_tokens": "it is a field of the request's input",
    "SamplingParams.stop": "output processing ends texts",
    "SamplingParams.stop_token_ids": "they are `stop_ids` of the request's input",
    "SamplingParams.ignore_eos": "the same",
    "SamplingParams.n": "answers are requests here",
}
NEVER_DRAWN |= {
    f"{name}.{option}": "its scores are of a kv head and of a whole prompt: other values are refused"
    for name in policies.names()
    for option in ("prefill", "scope")
    if issubclass(import_module(f"{policies.__name__}.{name}").Policy, QueryScoredPolicy)
}
NEVER_DRAWN |= {
    "gate_replay.file": "gates of schedules have random numbers",
    "gate_replay.prefill": "it refuses stream",
    "press.heads": "scores of a press are of a kv head: other values are refused",
    "press.value": "the same",
}
NEVER_DRAWN |= {  # a turn that goes on does not equal itself alone: tests/invariants/test_resuming.py
    f"{name}.resume": "prompts of schedules do not go on from answers"
    for name in policies.names()
    if issubclass(cls := import_module(f"{policies.__name__}.{name}").Policy, BudgetPolicy)
    if cls.__dataclass_fields__["modes"].default.resume == "off"
}


@pytest.fixture(autouse=True)
def known_families() -> Iterator[None]:
    with families_of_tests():
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_request_of_a_random_schedule_equals_itself_alone(case: tuple[int, int], tmp_path: Path) -> None:
    seed, depth = case
    run = ScheduleRun(draw_schedule(seed, BACKENDS), tmp_path, depth)
    with torch_threads(1):
        run.run()
        assert not list(run.differences())


@pytest.mark.slow
def test_every_option_is_drawn_with_several_values() -> None:
    """Of policies, drafters, tiers, engines, sampling and requests, but for those that NEVER_DRAWN explains."""
    values: dict[str, set[str]] = defaultdict(set)
    plugins = [(policies, "Policy"), (drafters, "Drafter"), (tiers, "Tier")]
    classes = {name: getattr(import_module(f"{p.__name__}.{name}"), c) for p, c in plugins for name in p.names()}
    classes |= {"exact": PrefixConfig, "selective": SelectiveConfig}
    classes |= {c.__name__: c for c in (Config, SamplingParams, RequestInput)}
    for seed in range(330):
        schedule = draw_schedule(seed)
        for name, value in drawn_objects(schedule):
            for option in option_values(classes[name]):
                owner = value.modes if hasattr(getattr(value, "modes", None), option) else value
                found = getattr(owner, SCHEDULE_FIELDS.get(f"{name}.{option}", option), None)
                values[f"{name}.{option}"].add(repr(found))
    options = {f"{name}.{option}" for name, cls in classes.items() for option in option_values(cls)}
    assert {option for option in options if len(values[option]) < 2} == set(NEVER_DRAWN)


def drawn_objects(schedule: Schedule) -> Iterator[tuple[str, Any]]:
    """Yield what a schedule has options of, each with the name of its plug-in or class."""
    yield "Config", schedule
    if schedule.drafter:
        yield schedule.drafter.partition(":")[0], drafters.parse(schedule.drafter)
    for spec in schedule.tiers:
        yield spec.partition(":")[0], tiers.parse(spec)
    if prefix := prefix_configs.parse(schedule.prefix_cache):
        yield "exact", prefix
    for request in schedule.requests:
        yield "RequestInput", request
        yield "SamplingParams", request.params
        policy = parse_policy(request.policy)
        yield policies.name_of(policy), policy


def test_every_family_is_drawn() -> None:
    """But for those with vision, which are wrappers of their text models, and those that cache states."""
    assert {*CONFIGS} - {*MULTIMODAL, *STATE_FAMILIES} == {*FAMILIES, *UNLIKE_FAMILIES}
