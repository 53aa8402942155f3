"""Law 4 for chats: the next turn goes on from the end of the answer, also where groups of layers differ in their pages.

All tokens of an answer but the last are in the cache, so the next turn finds these. Tiers keep whole blocks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from retain import models
from retain.config import Config
from retain.engine import drafters
from retain.engine.request import FinishReason, Request
from retain.kernels import cpu
from retain.kv.memory.group_pages import divide_pages, fold_states
from tests.helpers.cached_pages import check_cached_pages
from tests.helpers.engines import iter_steps, make_engine, make_request, row_of, run_to_completion
from tests.helpers.marks import slow
from tests.helpers.state_family import state_family as state_family
from tests.helpers.tiers import clear_pool, disk_spec, offloader_of
from tests.helpers.tiny_models import CONFIGS, tiny_checkpoint
from tests.helpers.unlike_family import UNLIKE
from tests.helpers.unlike_family import unlike_family as unlike_family

pytestmark = pytest.mark.usefixtures("unlike_family", "state_family")
BACKEND = "reference" if cpu.unavailable_reason() else "cpu"
PAGE_SIZES = sorted({16, 64, Config.page_size})
LENGTHS = (17, 70, 300)
ANSWER = 16
OF_TESTS = (UNLIKE, "unlike_full", "state_parts", "state_mamba2", "state_pages")


def page_sizes(family: str) -> set[int]:
    """Return the slots of a page in each group of layers."""
    spec = models.load_family(family).spec_from_config(tiny_checkpoint(family).config).kv_cache
    return {f.page_size for f in divide_pages(fold_states(spec, 16, torch.float32), 16, torch.float32).formats}


UNLIKE_FAMILIES = [family for family in CONFIGS if len(page_sizes(family)) > 1]
OTHERS = [family for family in UNLIKE_FAMILIES if family not in ("lfm2", "gemma4_text", "qwen3_next")]
FAMILIES = ["lfm2", "gemma4_text", "qwen3_next", *slow("llama", "gemma3_text", *OTHERS, *OF_TESTS)]
OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"max_batched_tokens": 72},
    "drafts": {"drafter": drafters.parse("ngram:k=4")},
    "slots of 8 bits": {"kv_dtype": torch.int8},
    "answers are not kept": {"prefix_cache": "exact:keep=prompt"},
}


def random_tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(128) for _ in range(n)]


class ComparedEngine:
    """An engine that keeps prefixes, and one that does not, which must give the same answers."""

    def __init__(self, family: str, page_size: int = 16, kv_dtype: torch.dtype | None = None, **options: Any):
        alike: dict[str, Any] = {"backend": BACKEND, "page_size": page_size, "kv_dtype": kv_dtype}
        self.engine = make_engine(family, **alike | {"prefix_cache": "exact"} | options)
        self.plain = make_engine(family, **alike)

    def answer(self, prompt: Sequence[int], max_tokens: int = ANSWER) -> Request:
        """Answer a prompt. The pages of all cached texts must hold these texts, before and after."""
        request = make_request(prompt, max_tokens)
        self.engine.add(request)
        for _ in iter_steps(self.engine):
            check_cached_pages(self.engine.cache)
        assert [request.output_tokens] == run_to_completion(self.plain, [make_request(prompt, max_tokens)])
        return request

    def found_by_next_turn(self, turn: Request, max_tokens: int = 4) -> int:
        """Answer the next turn of a chat, and return how many tokens it found."""
        return self.answer([*turn.tokens, 1, 2, 3], max_tokens).stats.num_cached_tokens


def test_the_families_that_mix_layers_have_pages_of_several_sizes() -> None:
    found = {"gemma4_text", "lfm2", "lfm2_moe", "granitemoehybrid", "nemotron_h", "qwen3_next", "qwen3_5_text"}
    assert found <= {*UNLIKE_FAMILIES} and not {"llama", "gemma3_text"} & {*UNLIKE_FAMILIES}


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_goes_on_from_the_end_of_the_answer(family: str, page_size: int) -> None:
    rng = random.Random(page_size)
    engine = ComparedEngine(family, page_size)
    for n in LENGTHS:
        turn = engine.answer(random_tokens(rng, n))
        assert engine.found_by_next_turn(turn) == n + ANSWER - 1


@pytest.mark.parametrize("option", ["chunks", *slow("drafts", "slots of 8 bits", "answers are not kept")])
@pytest.mark.parametrize("family", ["lfm2", *slow("gemma4_text", "nemotron_h", *OF_TESTS)])
def test_it_does_so_however_the_answer_was_computed(family: str, option: str) -> None:
    rng = random.Random(0)
    engine = ComparedEngine(family, **OPTIONS[option])
    for n in LENGTHS:
        turn = engine.answer(random_tokens(rng, n))
        kept = n if option == "answers are not kept" else n + ANSWER - 1
        assert engine.found_by_next_turn(turn) == kept


@pytest.mark.parametrize("family", ["lfm2", *slow("gemma4_text", "granitemoehybrid", *OF_TESTS)])
def test_an_answer_that_ends_anywhere_is_found_whole(family: str) -> None:
    """Also where a stop string drops its last tokens. A text that leaves it earlier has the right answer, too."""
    engine = ComparedEngine(family)
    rng = random.Random(0)
    for _ in range(12):
        length, num_tokens = rng.randint(1, 200), rng.randint(1, 40)
        turn = make_request(random_tokens(rng, length), num_tokens + 1)
        engine.engine.add(turn)
        while turn.num_output_tokens < num_tokens:
            engine.engine.step()
        engine.engine.finish(turn, FinishReason.STOP, rng.randint(0, num_tokens))
        assert engine.found_by_next_turn(turn) == min(len(turn.tokens), length + num_tokens - 1)
        engine.answer([*turn.tokens[: rng.randint(1, len(turn.tokens))], *random_tokens(rng, 5)], 4)


@pytest.mark.parametrize("family", ["lfm2", *slow("gemma4_text", "qwen3_next", *OF_TESTS)])
def test_a_request_that_was_preempted_goes_on_from_where_it_was(family: str) -> None:
    engine = ComparedEngine(family)
    request = make_request(random_tokens(random.Random(1), 70), 30)
    engine.engine.add(request)
    for _ in iter_steps(engine.engine):
        if request.num_output_tokens == 12 and not request.stats.num_preemptions:
            engine.engine.scheduler.preempt(request)
            num_computed = len(request.tokens) - 1
    assert engine.engine.cache.prefix_cache.num_reused_tokens == num_computed
    assert [request.output_tokens] == run_to_completion(engine.plain, [make_request(request.prompt, 30)])


@pytest.mark.parametrize("family", ["lfm2", *slow("gemma4_text", "qwen3_next", *OF_TESTS)])
def test_a_row_copies_one_page_of_each_head_at_most(family: str) -> None:
    """The others of the last block are shared, whatever the sizes of pages are."""
    engine = ComparedEngine(family)
    turn = engine.answer(random_tokens(random.Random(0), 70))
    request = make_request([*turn.tokens, 1, 2, 3], 4)
    engine.engine.add(request)
    engine.engine.step()
    row = row_of(engine.engine, request)
    for t in row.groups:
        layers = t.full_layers(row.index)
        whole = t.pages[row.index, layers, :, : request.stats.num_cached_tokens // t.page_size]
        assert (t.pool.ref_counts[whole] > 1).all()


@pytest.mark.parametrize("tier", ["ram", "disk", "disk after a restart"])
@pytest.mark.parametrize("family", ["lfm2", *slow("gemma4_text", "nemotron_h", "qwen3_next", *OF_TESTS)])
def test_tiers_have_whole_blocks_of_the_answer(family: str, tier: str, tmp_path: Path) -> None:
    """And nothing of a text that is shorter than a block."""
    rng = random.Random(2)
    tiers = ["ram:capacity=100MB" if tier == "ram" else disk_spec(tmp_path)]
    engine = ComparedEngine(family, tiers=tiers)
    block = engine.engine.cache.planner.block_size
    for n in LENGTHS:
        turn = engine.answer(random_tokens(rng, n))
        tree = engine.engine.cache.prefix_cache.tree
        tree.evict(tree.num_evictable_pages)
        offloader_of(engine.engine).sync()
        if tier == "disk after a restart":
            engine.engine.cache.prefix_cache.close_offloader()
            engine = ComparedEngine(family, tiers=tiers)
        assert engine.found_by_next_turn(turn) == (n + ANSWER - 1) // block * block
        clear_pool(engine.engine)
    engine.engine.cache.prefix_cache.close_offloader()
