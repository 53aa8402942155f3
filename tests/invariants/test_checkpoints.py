"""Law 4 for all that a text leaves behind: kinds of checkpoints x where they lie x what happens to them.

The law of each cell: tokens are those of an engine without prefixes, or of one row without a pause where a budget goes
on from what it kept. As many tokens are cached as the kind allows there, accounts balance after each step, and nothing
is written into pages that others hold. What is absent or damaged costs time. Another key finds nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import DrafterNeeds, TargetModel
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kernels.slots.pool_dtypes import INT4
from retain.sampling_params import SamplingParams
from tests.helpers.cached_pages import check_cached_pages, check_unchanged, copy_cached_pages
from tests.helpers.chats import open_one_row, options_of, run_together
from tests.helpers.engines import make_engine, make_request
from tests.helpers.places import DAMAGES, PLACES, RESTARTED, Place
from tests.helpers.state_family import state_family as state_family
from tests.helpers.unlike_family import UNLIKE
from tests.helpers.unlike_family import unlike_family as unlike_family

pytestmark = pytest.mark.usefixtures("unlike_family", "state_family")
INTERVAL = 64  # of the ladder
LENGTH = 200  # tokens of the text
ANSWER = 12  # tokens
TEXT = random.Random(0).choices(range(128), k=LENGTH)


@dataclass(frozen=True)
class Kind:
    """A model and a policy whose texts leave checkpoints of one kind. `chunk` is that of a streamed prompt.

    `keys` are the fields of a request on which they depend beside the text.
    """

    family: str = "llama"
    policy: str = "full"
    chunk: int = 0
    keys: tuple[str, ...] = ("salt", "policy")
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of its engines."""
        return options_of(self.family, self.policy, snapshot_interval=INTERVAL, **self.options)

    @property
    def has_budget(self) -> bool:
        """Whether it goes on from what a row has kept of its text."""
        return "budget" in self.policy and "resume=off" not in self.policy

    def least_cached(self, prompt: str, cut: int, place: Place) -> int:
        """Return how many of the first `cut` tokens, which the prompt shares with the text, are cached at least."""
        block = place.engine.cache.planner.block_size
        whole = cut if place.is_pool else cut // block * block
        if self.has_budget and prompt == "next turn":
            return cut
        if self.chunk:
            return max(cut - INTERVAL - self.chunk, 0)
        if "budget" in self.policy:  # masses are in no store, and those of a prompt, whole
            return cut // block * block if place.is_pool and prompt in ("next turn", "again") else 0
        if prompt == "next turn" or self.family == "llama":
            return whole
        return max(cut - INTERVAL - block, 0)


MASSES = "h2o:budget=50%,resume=off"
NOISED = "keyformer:budget=25%"
STREAMED = "h2o:budget=30,prefill=stream,chunk=24"
KINDS = {
    "pages": Kind(),
    "windows": Kind("gemma3_text"),
    "states": Kind("state"),
    "masses": Kind(policy=MASSES),
    "budget": Kind(policy=NOISED, keys=("salt", "policy", "seed")),
    "streamed": Kind(policy=STREAMED, chunk=24),
    "slots of 4 bits": Kind(policy="h2o:budget=25%", options={"kv_dtype": INT4}),
    "budget beside windows": Kind("gemma3_text", "h2o:budget=25%,demote=int4:50%"),
    "streamed beside unlike windows": Kind(UNLIKE, STREAMED, chunk=24),
    "unlike windows": Kind(UNLIKE),
    "states of three pages": Kind("state_parts"),
    "states of Mamba-2": Kind("state_mamba2"),
}
OTHER_POLICY = {"full": "ring:window=40", MASSES: NOISED + ",resume=off"}


class WrongDrafter:
    """Draft tokens that greedy answers of a tiny model hardly ever have, all equal."""

    k = "3"
    max_draft_tokens = 3
    needs: ClassVar[DrafterNeeds] = DrafterNeeds()

    def attach(self, target: TargetModel) -> None:
        """Need nothing."""

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        """Draft the token 127."""
        for request, limit in draft_limits:
            request.set_drafts([127] * min(limit, 3))

    def remove_request(self, request: Request) -> None:
        """Keep nothing of a request."""


STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_batched_tokens": 72},
    "drafts": {"drafter": WrongDrafter()},
    "depth 2": {"depth": 2},
}


def prompts_of(kind: str, answer: Sequence[int]) -> dict[str, tuple[list[int], int]]:
    """Return prompts that begin with the text, and how many tokens of it, or of its answer, they share."""
    rng = random.Random(kind)
    turn = [*TEXT, *answer]
    found = {"next turn": ([*turn, 1, 2, 3], len(turn) - 1), "again": (TEXT, LENGTH - 1)}
    for cut in rng.sample(range(LENGTH // 3, LENGTH), 2):
        found[f"cut at {cut}"] = [*TEXT[:cut], (TEXT[cut] + 1) % 128, *rng.choices(range(128), k=15)], cut
    return found


@cache
def cold_answers(kind: str) -> tuple[list[int], dict[str, list[int]], list[int]]:
    """Return the answer to the text, those to the prompts, and that to the next turn in one row."""
    k = KINDS[kind]
    (answer,) = compute(make_engine(**k.engine_options), [(TEXT, {"policy": k.policy})])
    prompts = prompts_of(kind, answer)
    found = compute(make_engine(**k.engine_options), [(p, {"policy": k.policy}) for p, _ in prompts.values()])
    one_row: list[int] = []
    if k.has_budget:
        engine = open_one_row(**k.engine_options).engine
        _, one_row = (compute(engine, [(p, {"policy": k.policy})])[0] for p in (TEXT, prompts["next turn"][0]))
    return answer, dict(zip(prompts, found, strict=True)), one_row


def new_request(prompt: Sequence[int], policy: str, seed: int = 0, salt: str = "", system: int = 5) -> Request:
    params = SamplingParams(temperature=0, ignore_eos=True, seed=seed)
    return make_request(prompt, ANSWER, policy, params, system, salt=salt)


def compute(engine: Engine, requests: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> list[list[int]]:
    """Return the answers to prompts, one after the other."""
    found = [new_request(prompt, **more) for prompt, more in requests]
    for request in found:
        run_together(engine, [request])
    return [r.output_tokens for r in found]


class Cell:
    """A text of a kind, at a place, and what asks for it."""

    def __init__(self, kind: str, place: str, steps: str, path: Path):
        self.kind = KINDS[kind]
        options = dict(STEPS[steps])
        self.depth = options.pop("depth", 1)
        self.place = Place(place, path, **self.kind.engine_options, **options)
        self.answer, self.cold, self.one_row = cold_answers(kind)
        self.prompts = prompts_of(kind, self.answer)
        assert self.ask(TEXT) == (self.answer, 0)

    def ask(self, prompt: Sequence[int], **more: Any) -> tuple[list[int], int]:
        """Return the answer to a prompt, and how many tokens were cached. Nothing that is shared is written."""
        request = new_request(prompt, **{"policy": self.kind.policy, **more})
        self.run([request])
        return request.output_tokens, request.stats.num_cached_tokens

    def run(self, requests: Sequence[Request], after_step: Callable[[], None] = lambda: None) -> None:
        engine = self.place.engine
        engine.depth = self.depth
        before = copy_cached_pages(engine.cache)
        for request in requests:
            engine.add(request)
        while engine.has_unfinished_requests:
            engine.step()
            after_step()
            engine.cache.check()
        assert "drafter" not in self.place.options or all(r.stats.spec_decode.num_rounds for r in requests)
        check_cached_pages(engine.cache)
        check_unchanged(before, engine.cache)

    def find(self, prompt: str, finds: bool = True) -> int:
        """Ask one of the prompts. It finds at least what its kind allows, or nothing."""
        tokens, cut = self.prompts[prompt]
        least = self.kind.least_cached(prompt, cut, self.place)
        answer, cached = self.ask(tokens)
        self.check_answer(prompt, answer, cached)
        assert cached >= least if finds else cached == 0, (prompt, least, cached)
        return cached

    def check_answer(self, prompt: str, answer: list[int], cached: int) -> None:
        went_on = prompt == "next turn" and self.kind.has_budget and cached == self.prompts[prompt][1]
        assert answer == (self.one_row if went_on else self.cold[prompt]), (prompt, cached)


# ---- what happens ----------------------------------------------------------------------------------------------------


def text_is_left_anywhere(cell: Cell) -> None:
    """The text goes on, comes again, and is left by others; then all of that once more, from what these left."""
    for prompt in [*cell.prompts, *reversed(cell.prompts)]:
        cell.place.pause()
        cell.find(prompt)


def pool_runs_short(cell: Cell) -> None:
    """A third of what the pool has is evicted before each prompt, and in the end all of it."""
    tree = cell.place.engine.cache.prefix_cache.tree
    for prompt in ["next turn", *cell.prompts]:
        tree.evict(tree.num_evictable_pages // 3)
        cell.place.sync()
        answer, cached = cell.ask(cell.prompts[prompt][0])
        cell.check_answer(prompt, answer, cached)
    tree.evict(tree.num_evictable_pages)
    assert not tree.num_evictable_pages
    cell.place.sync()
    for prompt in ("next turn", "again"):
        cell.find(prompt, finds=not cell.place.is_pool)
        tree.evict(tree.num_evictable_pages)


def engine_is_killed(cell: Cell) -> None:
    """Another engine finds what stores outside the process have."""
    cell.place.pause()
    cell.place.kill()
    cell.find("next turn", cell.place.survives)
    if cell.place.survives:
        cell.place.pause()
        cell.find("again")


def row_is_preempted(cell: Cell) -> None:
    """In its answer, twice; what it left is evicted before it runs again."""
    cell.place.pause()
    engine = cell.place.engine
    for prompt in ("next turn", "cut"):
        name = next(p for p in cell.prompts if p.startswith(prompt))
        request = new_request(cell.prompts[name][0], cell.kind.policy)
        found: list[int] = []
        at = [8, 3]

        def preempt(request: Request = request, at: list[int] = at, found: list[int] = found) -> None:
            found[:] = found or [request.stats.num_cached_tokens] * bool(request.num_output_tokens)
            if at and request in engine.scheduler.running and request.num_output_tokens >= at[-1]:
                at.pop()
                engine.scheduler.preempt(request)
                if not cell.place.is_pool:
                    engine.cache.prefix_cache.tree.evict(engine.cache.prefix_cache.tree.num_evictable_pages)
                cell.place.sync()

        cell.run([request], preempt)
        assert request.stats.num_preemptions == 2
        cell.check_answer(name, request.output_tokens, found[0])


def prompts_arrive_together(cell: Cell) -> None:
    """Each prompt twice, at once."""
    cell.place.pause()
    requests = [(name, new_request(tokens, cell.kind.policy)) for name, (tokens, _) in [*cell.prompts.items()] * 2]
    cell.run([r for _, r in requests])
    went_on = requests[0][1].stats.num_cached_tokens
    for name, request in requests:  # who follows a leader goes on from where it began
        cell.check_answer(name, request.output_tokens, went_on if name == "next turn" else 0)


def span_is_damaged(cell: Cell, damage: str) -> None:
    """What is read of it is no hit; what is computed anew is kept again."""
    if cell.place.name in RESTARTED:  # before the engine runs; else while it does
        cell.place.sync()
        cell.place.damage(DAMAGES[damage])
        cell.place.restart()
    else:
        cell.place.pause()
        cell.place.damage(DAMAGES[damage])
    prompt, cut = cell.prompts["next turn"]
    answer, cached = cell.ask(prompt)
    cell.check_answer("next turn", answer, cached)
    has_pages = cell.place.is_pool and cell.kind == KINDS["pages"]
    assert has_pages or cached < max(cell.kind.least_cached("next turn", cut, cell.place), 1)
    again = [*prompt, *answer]
    least = cell.kind.least_cached("next turn", len(again) - 1, cell.place)
    for number in range(10):  # a store learns of each damaged span when it reads it
        cell.place.pause()
        cached = cell.ask([*again, number])[1]
        if cached >= least:
            return
    raise AssertionError((cached, least))


EVENTS: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (text_is_left_anywhere, pool_runs_short, engine_is_killed, row_is_preempted, prompts_arrive_together)
}
EVENTS |= {f"{d} is damaged": lambda cell, d=d: span_is_damaged(cell, d) for d in DAMAGES}


@pytest.mark.checked_cases(9)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", STEPS)
def test_cell(kind: str, place: str, event: str, steps: str, tmp_path: Path) -> None:
    cell = Cell(kind, place, steps, tmp_path)
    EVENTS[event](cell)
    cell.place.close()


# ---- other keys ------------------------------------------------------------------------------------------------------

OF_REQUESTS: dict[str, Any] = {"salt": "b", "seed": 1, "policy": ""}
OF_ENGINES: dict[str, dict[str, Any]] = {
    "model": {"family": "mpt"},
    "dtype": {"kv_dtype": torch.bfloat16},
    "page size": {"page_size": 32},
    "score columns": {"score_columns": 2},
}


@pytest.mark.checked_cases(7)
@pytest.mark.parametrize("key", [*OF_REQUESTS, *OF_ENGINES])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_another_key_finds_nothing(kind: str, place: str, key: str, tmp_path: Path) -> None:
    """Nor does it change what the own key finds."""
    cell = Cell(kind, place, "plain", tmp_path)
    prompt = cell.prompts["next turn"][0]
    k = cell.kind
    own = cell.place.options
    cell.place.pause()
    if key in OF_REQUESTS:
        value = OF_REQUESTS[key] or OTHER_POLICY.get(k.policy, "keyformer:budget=37%")
        other = {"policy": k.policy, key: value}
        (expected,) = compute(make_engine(**own), [(prompt, other)])
        answer, cached = cell.ask(prompt, **other)
        if key in k.keys:
            assert answer == expected
            assert cached <= (LENGTH if key == "policy" and k.policy == NOISED else 0)  # the same masses, and pages
        else:
            cell.check_answer("next turn", answer, cached)
    else:
        cell.place.restart(own | OF_ENGINES[key])
        (expected,) = compute(make_engine(**cell.place.options), [(prompt, {"policy": k.policy})])
        assert cell.ask(prompt) == (expected, 0)
        cell.place.restart(own)
    cell.place.pause()
    cell.find("next turn", cell.place.survives or key in OF_REQUESTS)
    cell.place.close()
