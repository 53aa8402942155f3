"""Law 4: a prefix that is there changes no token, whoever computed it, wherever it ends, and whatever was evicted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from retain.engine import drafters
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.sampling_params import SamplingParams
from tests.helpers.engines import iter_steps, make_engine, make_request, random_prompts, run_to_completion

FAMILIES = ["llama", "gpt2", "mpt", "gemma3_text", "mistral"]
POLICIES = [
    "full",
    "ring:window=24",
    "sinks:budget=40,interval=3",
    "snapkv:budget=40%",
    "h2o:budget=30%",
    "reread:budget=50%",
]
POLICIES += ["window:budget=30,prefill=stream,chunk=20", "keyformer:budget=40,positions=new", "knorm:budget=30%"]


def texts(seed: int, n: int = 14) -> list[list[int]]:
    """Some that begin alike, cut anywhere, some of whom are others' beginnings, some that are the same."""
    rng = random.Random(seed)
    stems = random_prompts(3, seed, 120)
    found = []
    for _ in range(n):
        stem = rng.choice(stems + found[-3:])
        cut = rng.choice([len(stem), rng.randint(1, len(stem)), len(stem) // 16 * 16 or 1])
        found.append(stem[:cut] + [rng.randrange(128) for _ in range(rng.choice([0, 1, 5, 16, 40]))])
    return found


def policy_of(i: int, family: str) -> str:
    """Half of them full."""
    allowed = [p for p in POLICIES if "new" not in p or family in ("llama", "gpt2")]
    return allowed[i // 2 % len(allowed)] if i % 2 else "full"


def asked(family: str, seed: int, plain: bool = False) -> list[Request]:
    """Greedy ones and drawn ones, of all policies, or all of them `plain`."""
    made = []
    for i, text in enumerate(texts(seed)):
        params = SamplingParams(temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        made.append(make_request(text, 5 + i, "full" if plain else policy_of(i + seed, family), params))
    return made


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("seed", [0, 2])
def test_cold_warm_and_without(family: str, backend: str, seed: int) -> None:
    """One after the other, so that each finds what those before it left; and once more, when everything is there."""
    plain = run_to_completion(make_engine(family, backend=backend), asked(family, seed))
    engine = make_engine(family, backend=backend, prefix_cache="exact")
    for again in range(2):
        made = asked(family, seed)
        assert [run_to_completion(engine, [r])[0] for r in made] == plain
        assert sum(r.stats.num_cached_tokens for r in made) > (again + 1) * 40
    whole = made[::2] if family in ("llama", "gpt2", "mpt") else []
    assert all(r.stats.num_cached_tokens == len(r.prompt) - 1 for r in whole)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prefix", ["exact", "exact:keep=prompt"])
@pytest.mark.parametrize("pages", [1000, 160])
def test_in_company_and_where_pages_are_short(family: str, prefix: str, pages: int) -> None:
    """All together, again and again, with a tree that has to give way, preemption and cancellation."""
    plain = run_to_completion(make_engine(family, backend="cpu"), asked(family, 3, plain=True))
    pages = pages if family != "gemma3_text" else pages * 2 // 5
    engine = make_engine(
        family, backend="cpu", prefix_cache=prefix, num_pages=pages, max_running_requests=8, max_batched_tokens=64
    )
    rng, cached = random.Random(5), 0
    for _ in range(3):
        cached += sum(r.stats.num_cached_tokens for r in disturbed(engine, family, rng, plain))
    assert cached > 100
    assert engine.cache.free_pages == engine.cache.total_pages


def disturbed(engine: Engine, family: str, rng: random.Random, plain: list[list[int]]) -> list[Request]:
    """All together; two are preempted and one is cancelled, and the others say what they must."""
    made = asked(family, 3, plain=True)
    engine.add(*made)
    for step in iter_steps(engine):
        if step in (3, 9) and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        if step == 6:
            engine.cancel(made[4])
    assert [r.output_tokens for i, r in enumerate(made) if i != 4] == plain[:4] + plain[5:]
    return made


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_with_drafts(family: str) -> None:
    """Rejected tokens are never in the tree."""
    plain = run_to_completion(make_engine(family, backend="cpu"), asked(family, 1, plain=True)[::2])
    engine = make_engine(
        family, backend="cpu", prefix_cache="exact", drafter=drafters.parse("self:k=5,budget=16,refresh=1")
    )
    for _ in range(3):
        made = asked(family, 1, plain=True)[::2]
        assert run_to_completion(engine, made) == plain
    assert (
        sum(r.stats.num_cached_tokens for r in made) > 60
        and sum(sum(r.stats.spec_decode.num_drafted_per_position) for r in made) > 20
    )


def test_a_conversation_computes_only_what_is_new() -> None:
    """Answers are kept too, to the token; or not, where only prompts are."""
    for prefix, expected in (("exact", 60 + 30 - 1), ("exact:keep=prompt", 60)):
        engine, (text,) = make_engine("llama", prefix_cache=prefix), [list(range(60))]
        first = make_request(text, 30)
        run_to_completion(engine, [first])
        then = make_request([*text, *first.output_tokens, 7, 8, 9], 5)
        assert run_to_completion(engine, [then]) == run_to_completion(
            make_engine("llama"), [make_request(then.prompt, 5)]
        )
        assert then.stats.num_cached_tokens == expected


def test_a_salt_never_matches_another_nor_do_windows() -> None:
    engine, text = make_engine("llama", prefix_cache="exact"), list(range(100))
    run_to_completion(engine, [salted(text, "a")])
    for salt, policy, cached in (("b", "full", 0), ("", "full", 0), ("a", "ring:window=30", 0), ("a", "full", 99)):
        made = salted(text, salt, policy)
        run_to_completion(engine, [made])
        assert made.stats.num_cached_tokens == cached


def salted(text: Sequence[int], salt: str, policy: str = "full") -> Request:
    return make_request(text, 4, policy, salt=salt)


def test_equal_prompts_of_two_tenants_asked_together_share_nothing() -> None:
    engine, text = make_engine("llama", prefix_cache="exact"), list(range(70))
    made = [salted(text, s) for s in "aab"]
    engine.add(*made)
    engine.step()
    pages = [set(engine.cache.tables.pages[r.row, :, :, :4].flatten().tolist()) for r in made]
    assert pages[0] == pages[1] and not pages[0] & pages[2]


def test_a_guess_or_a_neighbour_ends_no_pin() -> None:
    engine, text = make_engine("llama", prefix_cache="exact", num_pages=6 * 16, max_running_requests=4), list(range(64))
    run_to_completion(engine, [make_request(text, 2)])
    assert (
        engine.cache.prefix_cache and engine.cache.prefix_cache.pin(make_request(text).policy, text, "", 1000.0) == 64
    )
    engine.add(*[make_request([i] * 40, 80) for i in range(3)])
    for _ in iter_steps(engine):
        assert engine.cache.prefix_cache.tree.pins
    assert engine.cache.prefix_cache.tree.unpin_all()


def test_nodes_that_hold_nothing_go_too() -> None:
    """Where every layer slides only windows hold pages."""
    rng, engine = random.Random(0), make_engine("mistral", prefix_cache="exact", num_pages=300, max_running_requests=8)
    for _ in range(60):
        stem = [rng.randrange(128) for _ in range(48)]
        run_to_completion(engine, [make_request(stem + [rng.randrange(128) for _ in range(30)], 4) for _ in range(2)])
    assert engine.cache.prefix_cache
    leaves = [node for node in engine.cache.prefix_cache.tree.iter_nodes() if not node.children]
    assert sum(not node.all_pages.size for node in leaves) <= 2


def test_windows_are_found_beside_longer_texts_that_have_none_there() -> None:
    """Wherever the text ended that left them."""
    stem = list(range(1, 41))
    engine = make_engine("gemma3_text", prefix_cache="exact")
    for text in ([*stem, *[9] * 80], stem):
        run_to_completion(engine, [make_request(text, 1)])
    then = make_request([*stem, 7, 7, 7], 4)
    assert (
        run_to_completion(engine, [then])
        == run_to_completion(make_engine("gemma3_text"), [make_request(then.prompt, 4)])
        and then.stats.num_cached_tokens == 40
    )


def test_sliding_layers_go_on_where_texts_part() -> None:
    """The second one that parts from the first leaves windows there, so that the third begins there."""
    stem = list(range(1, 101))
    made = [make_request([*stem, *[x] * 60], 4) for x in (3, 4, 5, 6)]
    engine: Engine = make_engine("gemma3_text", prefix_cache="exact")
    for r in made:
        run_to_completion(engine, [r])
    assert [r.stats.num_cached_tokens for r in made] == [0, 0, 96, 96]
    assert [r.output_tokens for r in made] == run_to_completion(
        make_engine("gemma3_text"), [make_request(r.prompt, 4) for r in made]
    )


def test_requests_that_run_share_pages() -> None:
    """What is there is not there twice: more of them fit."""
    text = list(range(128))
    engine = make_engine("llama", prefix_cache="exact", num_pages=4 * 2 * 12, max_running_requests=8)
    run_to_completion(engine, [make_request(text, 2)])
    made = [make_request([*text, i], 14) for i in range(8)]
    engine.add(*made)
    engine.step()
    assert len(engine.scheduler.running) >= 3
    used = [set(engine.cache.tables.pages[r.row, 0, 0, :8]) for r in made if r.row is not None]
    assert all(u == used[0] for u in used)
    for _ in iter_steps(engine):
        pass


def test_what_is_pinned_stays_while_others_go_unless_somebody_could_not_run() -> None:
    engine, text = (
        make_engine("llama", prefix_cache="exact", num_pages=4 * 2 * 12, max_running_requests=4),
        list(range(64)),
    )
    run_to_completion(engine, [make_request(text, 2)])
    reuse = engine.cache.prefix_cache
    assert reuse and reuse.pin(make_request(text).policy, text, "", 1000.0) == 64
    for i in range(6):
        run_on(engine, make_request([i + 1] * 100, 4))
    again = make_request(text, 2)
    run_on(engine, again)
    assert again.stats.num_cached_tokens == 63
    run_on(engine, make_request([99] * 240, 8))  # needs every page
    again = make_request(text, 2)
    run_on(engine, again)
    assert again.stats.num_cached_tokens == 0 and engine.cache.free_pages == engine.cache.total_pages


def test_pins_end() -> None:
    engine, text = make_engine("llama", prefix_cache="exact", num_pages=4 * 2 * 12), list(range(64))
    run_to_completion(engine, [make_request(text, 2)])
    assert engine.cache.prefix_cache and engine.cache.prefix_cache.pin(make_request(text).policy, text, "", 0.0) == 64
    assert engine.cache.free_pages == engine.cache.total_pages


def run_on(engine: Engine, made: Request) -> None:
    engine.add(made)
    for _ in iter_steps(engine):
        pass
    assert (
        made.output_tokens
        == run_to_completion(make_engine("llama"), [make_request(made.prompt, made.input.max_tokens)])[0]
    )


def test_equal_prompts_asked_together_share_whole_pages() -> None:
    """Whether or not there is a tree."""
    for prefix in ("off", "exact"):
        engine, text = make_engine("llama", prefix_cache=prefix), list(range(100))
        made = [make_request(text, 20, params=SamplingParams(seed=i, ignore_eos=True)) for i in range(6)]
        engine.add(*made)
        engine.step()
        tables = [engine.cache.tables.pages[r.row, 0, 0].copy() for r in made]
        assert all((t[:6] == tables[0][:6]).all() for t in tables) and len({int(t[6]) for t in tables}) == 6
        for _ in iter_steps(engine):
            pass
        alone = [make_request(text, 20, params=SamplingParams(seed=i, ignore_eos=True)) for i in range(6)]
        assert [run_to_completion(make_engine("llama"), [r])[0] for r in alone] == [r.output_tokens for r in made]
