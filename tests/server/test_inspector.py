"""The inspector: what it tells of a request is what the cache holds; and the page, in a browser where there is one."""

import shutil
import threading

import httpx
import numpy as np
import pytest

from retain.kv.stats.pool import PAGE_STATES, classify_pages, collect_pool_stats
from retain.server.auth import ApiKeys
from tests.helpers.engines import iter_steps, make_engine, make_request, random_prompts
from tests.server.conftest import API_KEYS, ENGINE_OPTIONS, run_server

STORY = "Once upon a time there was a lamp that nobody could put out, and the people of the town came to see it. " * 4


@pytest.mark.parametrize(
    "policy",
    ["full", "ring:window=24", "h2o:budget=24,interval=4", "sinks:budget=30", "h2o:budget=24,prefill=stream,chunk=32"],
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_attention_trace_equals_cached_positions(family, policy):
    """After every step: the positions that the slots hold and queries may see; and what is gone keeps its mass."""
    from retain.kv.stats.attention_trace import AttentionTrace

    engine = make_engine(family, max_batched_tokens=48)
    asked = [make_request(p, 30, policy) for p in random_prompts(3, max_prompt_len=90)]
    L, G = len(engine.cache.spec.windows), engine.cache.spec.kv_heads
    for r in asked:
        r.attention_trace, r.score_decay = AttentionTrace(L, G), 1.0
        engine.add(r)
    before = {r: (np.zeros((L, G, 0), bool), np.zeros((L, G, 0))) for r in asked}
    for _ in iter_steps(engine):
        for r in asked:
            if r.row is None or not r.num_computed_tokens:
                continue
            r.attention_trace.record(engine.cache, r.row, r.num_computed_tokens)
            window = engine.cache.window[r.row]
            for layer, heads in enumerate(engine.cache.positions(r.row)):
                for head, there in enumerate(heads):
                    seen = [p for p in there if r.num_computed_tokens - 1 - p < window[layer]]
                    assert np.flatnonzero(r.attention_trace.is_kept[layer, head]).tolist() == seen
            gone, had = before[r]
            assert (r.attention_trace.mass[..., : gone.shape[-1]][gone] == had[gone]).all(), (
                "what is gone receives no more"
            )
            before[r] = ~r.attention_trace.is_kept, r.attention_trace.mass.copy()
    for r in asked:
        mass, seen = r.attention_trace.mass, r.attention_trace.is_observed
        assert (
            mass.shape[-1] == r.num_computed_tokens and mass[seen][..., 0].min(initial=1) > 0 and not mass[~seen].any()
        )
        assert seen.any() == (not policy.startswith("ring"))


def test_attention_trace_of_layerwise_prefill():
    from retain.kv.stats.attention_trace import AttentionTrace

    engine = make_engine("llama", max_batched_tokens=128)
    (text,) = random_prompts(1, seed=3, max_prompt_len=1) and [list(range(100))]
    seen = []
    for prefill in ("exact", "layers"):
        r = make_request(text, 4, f"h2o:budget=20,prefill={prefill}")
        r.attention_trace = AttentionTrace(3, 2)
        engine.add(r)
        while not r.first_token_time:
            engine.step()
        seen.append(r.attention_trace.mass[..., :100].copy())
        engine.cancel(r)
    assert np.allclose(seen[0], seen[1], rtol=1e-5) and seen[0].min() > 0


def test_attention_trace_changes_no_token():
    from retain.kv.stats.attention_trace import AttentionTrace

    answers = []
    for watched in (False, True):
        engine = make_engine("qwen2")
        asked = [
            make_request(p, 20, policy)
            for p, policy in zip(random_prompts(3), ["full", "h2o:budget=30", "sinks:budget=30"], strict=True)
        ]
        for r in asked:
            if watched:
                r.attention_trace, r.score_decay = AttentionTrace(3, 2), 1.0
            engine.add(r)
        for _ in iter_steps(engine):
            pass
        answers.append([r.output_tokens for r in asked])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("prefix", ["off", "exact"])
def test_pool_stats_count_every_page_once(prefix):
    engine = make_engine("gemma3_text", prefix_cache=prefix, max_running_requests=8, num_pages=3000)
    asked = [
        make_request(p, 20, q)
        for p, q in zip(
            random_prompts(5), ["full", "h2o:budget=30", "full", "ring:window=20", "sinks:budget=16"], strict=True
        )
    ]
    for r in asked:
        engine.add(r)
    kindly = set()
    for _ in iter_steps(engine):
        found, (state, holder) = collect_pool_stats(engine.cache), classify_pages(engine.cache)
        pool = engine.cache.pool
        assert sum(found.pages_by_state.values()) == engine.cache.total_pages
        assert found.pages_by_state["free"] == pool.num_free
        assert found.pages_by_state["shared"] == int((pool.ref_counts > 1).sum())
        held = sum(found.slots_by_state.values()) + found.num_holes
        assert held == engine.cache.total_pages * engine.cache.page_size
        rows = {r.row for r in asked if r.row is not None}
        assert set(holder[holder >= 0].tolist()) <= rows
        kindly |= {PAGE_STATES[s] for s in np.unique(state)}
    assert {"free", "full", "ring", "budgeted"} <= kindly and ("cached" in kindly) == (prefix == "exact")


# ---- over HTTP -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inspector_server():
    with run_server(engine_options={**ENGINE_OPTIONS, "dtype": "bfloat16"}, enable_inspector=True) as up:
        yield up


def post_completion(server, max_tokens, kv_policy="h2o:budget=40", prompt=STORY):
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "kv_policy": kv_policy}
    return httpx.post(f"{server.url}/completions", json={**body, "ignore_eos": True}, timeout=120).json()


def test_inspector_is_off_by_default(server):
    assert httpx.get(f"{server.url.removesuffix('/v1')}/inspect").status_code == 404


def test_inspector_isolates_api_keys():
    with run_server(engine_options=ENGINE_OPTIONS, enable_inspector=True, api_keys=ApiKeys(API_KEYS)) as up:
        root, (ann, bob) = up.url.removesuffix("/v1"), ({"Authorization": f"Bearer {k}"} for k in API_KEYS.values())
        body = {"model": "smollm2", "prompt": "A secret", "max_tokens": 2}
        assert httpx.post(f"{up.url}/completions", json=body, headers=ann, timeout=120).status_code == 200
        (mine,) = httpx.get(f"{root}/inspect/state", headers=ann).json()["requests"]
        assert httpx.get(f"{root}/inspect/state", headers=bob).json()["requests"] == []
        for path in ("", "/tokens/0"):
            assert httpx.get(f"{root}/inspect/requests/{mine['id']}{path}", headers=ann).status_code == 200
            assert httpx.get(f"{root}/inspect/requests/{mine['id']}{path}", headers=bob).status_code == 404
            assert httpx.get(f"{root}/inspect/requests/{mine['id']}{path}").status_code == 401
        assert httpx.get(f"{root}/inspect").status_code == 200  # the page itself tells nothing


def test_inspector_page_in_browser(inspector_server, tmp_path):
    """It loads, goes on while a stream runs, a click on a token shows its scores, and nobody else is asked anything."""
    sync = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    chromium = shutil.which("chromium") or pytest.skip("no chromium")
    with sync.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page, root = browser.new_page(), inspector_server.url.removesuffix("/v1")
        wrong, asked = [], []
        page.on("console", lambda m: wrong.append(m.text))
        page.on("pageerror", lambda e: wrong.append(str(e)))
        page.on("request", lambda r: asked.append(r.url))
        page.goto(f"{root}/inspect")
        stream = threading.Thread(target=post_completion, args=(inspector_server, 700))
        stream.start()
        page.wait_for_selector("#text .token.answer")
        first = page.locator("#text .token").count()
        page.locator("#text .token").nth(first + 5).wait_for(state="attached")
        stream.join()
        sync.expect(page.locator("#requests button span").first).to_contain_text("length")
        page.locator("#text .token").nth(5).click()
        page.wait_for_selector("#token:not([hidden])")
        assert "heads keep it" in page.locator("#token-detail").inner_text()
        page.locator("#text").focus()
        page.keyboard.press("ArrowRight")
        sync.expect(page.locator("#token-name")).to_contain_text("Token 6")
        struck = page.locator("#text .token").evaluate_all("x => x.filter(t => Number(t.dataset.evicted) > 0.9).length")
        assert struck > 50, "a budget of 40 forgets most of it"
        page.select_option("#layer", "3")
        sync.expect(page.locator("#summary")).to_contain_text("In layer 3")
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") in ("dark", "light")
        assert not wrong and all(url.startswith(root) for url in asked)
        browser.close()
