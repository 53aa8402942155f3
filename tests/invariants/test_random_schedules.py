"""Laws 2, 3, 4 and 6 together: in a random schedule every request gets what it gets alone.

Schedules (tests/helpers/schedules.py) mix policies, drafters, prefixes, tiers with restarts, and pools down to
preemption.
`python -m tools.fuzz` runs as many as one likes, and makes those that fail smaller.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from retain.kernels import cpu
from tests.helpers.attention_case import torch_threads
from tests.helpers.marks import slow
from tests.helpers.schedule_runner import ScheduleRun
from tests.helpers.schedules import draw_schedule

BACKENDS = ["cpu", "reference"] if cpu.unavailable_reason() is None else ["reference"]


# Seeds, and pending steps of an engine: with 2 each step is launched before the tokens of the last one are known.
CASES = [*((seed, 1 + seed % 2) for seed in range(4)), *slow(*((seed, 1) for seed in range(4, 24)))]
CASES += slow(*((seed, 2) for seed in range(4, 12)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_request_of_a_random_schedule_equals_itself_alone(case: tuple[int, int], tmp_path: Path) -> None:
    seed, depth = case
    run = ScheduleRun(draw_schedule(seed, BACKENDS), tmp_path, depth)
    with torch_threads(1):
        run.run()
        assert not list(run.differences())
