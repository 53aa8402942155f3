"""The inspector reports what the cache holds; and its page works, where there is a browser."""

import re
import shutil
import threading
from contextlib import closing

import numpy as np
import pytest

from retain import LLM, SamplingParams
from retain.engine import drafters
from retain.kv.stats.attention_trace import AttentionTrace
from retain.kv.stats.pool import PAGE_STATES
from retain.processing.input import GenerateRequest
from retain.server.observers.inspector.routes import Inspector
from retain.server.request_group import RequestGroup
from tests.helpers.engines import iter_steps, make_engine, make_request, random_prompts, row_of
from tests.helpers.folders import save_tiny_smollm2
from tests.helpers.marks import slow
from tests.helpers.tiny_models import CONFIGS
from tests.server.conftest import API_KEYS, ENGINE_OPTIONS, HTTP, INSPECTOR_API_KEYS, run_server

STORY = "Once upon a time there was a lamp that nobody could put out, and the people of the town came to see it. " * 4


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        "h2o:budget=24,interval=4",
        *slow("ring:window=24", "sinks:budget=30", "h2o:budget=24,prefill=stream,chunk=32"),
    ],
)
@pytest.mark.parametrize("family", ["gemma3_text", *slow("llama")])
def test_attention_trace_equals_cached_positions(family, policy):
    """After every step it has the positions in slots that queries may see; evicted tokens keep their mass."""
    engine = make_engine(family, max_batched_tokens=48)
    tables = engine.cache.tables
    requests = [make_request(p, 30, policy) for p in random_prompts(3, max_prompt_len=90)]
    L, G = len(engine.cache.spec.windows), engine.cache.spec.only_group.num_kv_heads
    for r in requests:
        r.attention_trace, r.score_decay = AttentionTrace(L, G), 1.0
        engine.add(r)
    before = {r: (np.zeros((L, G, 0), bool), np.zeros((L, G, 0))) for r in requests}
    for _ in iter_steps(engine):
        for r in requests:
            if r not in engine.scheduler.running or not r.num_computed_tokens:
                continue
            trace = r.attention_trace
            row_of(engine, r).record_attention(trace)
            window = tables.window[row_of(engine, r).index]
            for layer, heads in enumerate(row_of(engine, r).positions()):
                for head, positions in enumerate(heads):
                    visible = [p for p in positions if r.num_computed_tokens - 1 - p < window[layer]]
                    assert np.flatnonzero(trace.is_kept[layer, head]).tolist() == visible
            evicted, mass = before[r]
            unchanged = trace.mass[..., : evicted.shape[-1]][evicted] == mass[evicted]
            assert unchanged.all(), "evicted tokens receive no more"
            before[r] = ~trace.is_kept, trace.mass.copy()
    for r in requests:
        mass, observed = r.attention_trace.mass, r.attention_trace.is_observed
        assert mass.shape[-1] == r.num_computed_tokens
        assert mass[observed][..., 0].min(initial=1) > 0 and not mass[~observed].any()
        assert observed.any() == (not policy.startswith("ring"))


def test_attention_trace_changes_no_token():
    outputs = []
    for traced in (False, True):
        engine = make_engine("qwen2")
        policies = ["full", "h2o:budget=30", "sinks:budget=30"]
        requests = [make_request(p, 20, policy) for p, policy in zip(random_prompts(3), policies, strict=True)]
        for r in requests:
            if traced:
                r.attention_trace, r.score_decay = AttentionTrace(3, 2), 1.0
            engine.add(r)
        for _ in iter_steps(engine):
            pass
        outputs.append([r.output_tokens for r in requests])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("prefix_cache", ["off", "exact"])
@pytest.mark.parametrize("drafter", [None, "self:k=2,dtype=int4"])
def test_pool_stats_count_every_page_once(prefix_cache, drafter):
    sizes = {"max_running_requests": 8, "num_pages": 3000}
    drafter = drafter and drafters.parse(drafter)
    engine = make_engine("gemma3_text", prefix_cache=prefix_cache, drafter=drafter, **sizes)
    policies = ["full", "h2o:budget=30", "full", "ring:window=20", "sinks:budget=16"]
    requests = [make_request(p, 20, policy) for p, policy in zip(random_prompts(5), policies, strict=True)]
    for r in requests:
        engine.add(r)
    cache, states = engine.cache, set()
    for _ in iter_steps(engine):
        stats, (page_states, page_rows) = cache.pool_stats(), cache.classify_pages()
        assert sum(stats.pages_by_state.values()) == cache.total_pages
        assert stats.pages_by_state["free"] == cache.pool.num_free
        held_once = np.maximum(cache.prefix_cache.tree.num_holders, 1)  # by several snapshots: by the cache alone
        assert stats.pages_by_state["shared"] == int((cache.pool.ref_counts > held_once).sum())
        num_slots = cache.total_pages * cache.page_size
        for copies in cache.copies.by_dtype.values():  # whose pages have more slots
            num_slots += cache.copies.num_pages * (copies.store.page_size - cache.page_size)
        assert sum(stats.slots_by_state.values()) + stats.num_holes == num_slots
        rows = {row.index for row in engine.scheduler.running.values()}
        assert set(page_rows[page_rows >= 0].tolist()) <= rows
        states |= {PAGE_STATES[s] for s in np.unique(page_states)}
    assert {"free", "full", "ring", "budgeted"} <= states and ("cached" in states) == (prefix_cache == "exact")


def test_layers_of_a_hybrid_have_the_numbers_of_the_model(tmp_path, caplog):
    """Those without attention have nothing to show. The start says that budgets are not for them."""
    save_tiny_smollm2(tmp_path, "qwen3_5_text")
    with closing(LLM(str(tmp_path), kv_memory="16MiB", max_model_len=256, kv_policy="h2o:budget=90%")) as llm:
        assert "budgets apply to full attention, in 1 of 4 layers" in caplog.text
        inspector = Inspector(llm)
        (state,) = llm.input_processor.process(GenerateRequest("Once upon a time", SamplingParams(max_tokens=4)))
        inspector.on_request(state.request, RequestGroup([state], "ann"))
        llm.output_processor.add([state])
        while llm.engine.has_unfinished_requests:
            llm.output_processor.process(llm.engine.step())
        full = [i for i, name in enumerate(CONFIGS["qwen3_5_text"]["layer_types"]) if name == "full_attention"]
        shown = inspector.get_state("ann", is_operator=True)
        assert shown["layers"] == full and shown["windows"] == [None] * len(full)
        detail = [inspector.get_request_detail(state.request.id, "ann", layer) for layer in (*full, None)]
        assert all(max(d["mass"]) > 0 and d["kept"][0] == 1 for d in detail)
        assert len(inspector.get_token_detail(state.request.id, "ann", 0)["mass"]) == len(full)


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def test_inspector_is_off_by_default(tiny_server):
    assert HTTP.get(f"{tiny_server.url.removesuffix('/v1')}/inspect").status_code == 404


def test_inspector_isolates_api_keys(secured_server):
    """The keys of this test are used by no other."""
    root = secured_server.url.removesuffix("/v1")
    carol, dave = ({"Authorization": f"Bearer {key}"} for key in INSPECTOR_API_KEYS.values())
    body = {"model": "smollm2", "prompt": "A secret", "max_tokens": 2}
    assert HTTP.post(f"{secured_server.url}/completions", json=body, headers=carol).status_code == 200
    (request,) = HTTP.get(f"{root}/inspect/state", headers=carol).json()["requests"]
    assert HTTP.get(f"{root}/inspect/state", headers=dave).json()["requests"] == []
    for path in ("", "/tokens/0"):
        url = f"{root}/inspect/requests/{request['id']}{path}"
        assert HTTP.get(url, headers=carol).status_code == 200
        assert HTTP.get(url, headers=dave).status_code == 404
        assert HTTP.get(url).status_code == 401
    assert HTTP.get(f"{root}/inspect").status_code == 200  # the page itself contains no data


def test_what_the_inspector_reads_is_admitted(secured_server):
    """Each read takes the engine's time, so a key has as many at once as it has requests."""
    root, choices = secured_server.url.removesuffix("/v1"), secured_server.service.admission.choices
    dave = {"Authorization": f"Bearer {INSPECTOR_API_KEYS['dave']}"}
    paths = ("state", "requests/0", "requests/0/tokens/0")
    choices.add("dave", 4)
    assert [HTTP.get(f"{root}/inspect/{path}", headers=dave).status_code for path in paths] == [429] * 3
    choices.add("dave", -4)
    assert [HTTP.get(f"{root}/inspect/{path}", headers=dave).status_code for path in paths] == [200, 404, 404]


def test_inspector_lists_prefix_misses_of_the_key(secured_server):
    """Two prompts of a key part at a date; another key sees neither, and its equal prompt is no miss."""
    root, names = secured_server.url.removesuffix("/v1"), ("ann", "bob")
    ann, bob = ({"Authorization": f"Bearer {API_KEYS[name]}"} for name in names)
    prompts = [f"The clock says {time}. Nobody believes it, and they ask me." for time in ("10:31", "10:42")]
    for headers, prompt in ((ann, prompts[0]), (ann, prompts[1]), (bob, prompts[1])):
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 2}
        answer = HTTP.post(f"{secured_server.url}/completions", json=body, headers=headers).json()
        assert "prefix" not in answer["retain"][0]  # only the inspector asked
    misses = HTTP.get(f"{root}/inspect/state", headers=ann).json()["prefix_misses"]
    assert misses[0]["cause"] == "diverged" and misses[0]["before"].endswith("clock says 10:")
    assert misses[0]["prompt_text"].startswith("42.") and misses[0]["nearest_text"].startswith("31.")
    others = HTTP.get(f"{root}/inspect/state", headers=bob).json()["prefix_misses"]
    assert not [m for m in others if "clock" in m["nearest_text"]]


def test_inspector_page_uses_the_fields_that_the_server_sends(secured_server):
    """Every `state.`, request and detail field that the script reads is in the JSON."""
    root, headers = secured_server.url.removesuffix("/v1"), {"Authorization": f"Bearer {API_KEYS['ann']}"}
    for day in (1, 2):
        body = {"model": "smollm2", "prompt": f"2026-01-0{day}: a prompt", "max_tokens": 2}
        assert HTTP.post(f"{secured_server.url}/completions", json=body, headers=headers).status_code == 200
    state = HTTP.get(f"{root}/inspect/state", headers=headers).json()
    request = HTTP.get(f"{root}/inspect/requests/{state['requests'][0]['id']}", headers=headers).json()
    token = HTTP.get(f"{root}/inspect/requests/{request['id']}/tokens/0", headers=headers).json()
    script = HTTP.get(f"{root}/inspect/inspect.js").text
    assert set(re.findall(r"\b(?:state|latestState)\.(\w+)", script)) <= state.keys()
    assert set(re.findall(r"\br\.(\w+)", script)) <= request.keys()
    assert set(re.findall(r"\bmiss\.(\w+)", script)) <= state["prefix_misses"][0].keys()
    assert set(re.findall(r"\bdetail\.(\w+)", script)) | {"mass", "kept"} <= token.keys()
    page = HTTP.get(f"{root}/inspect").text
    assert set(re.findall(r'\$\("([\w-]+)"\)', script)) <= set(re.findall(r'id="([\w-]+)"', page))


@pytest.fixture
def browser():
    """A browser; the test is skipped without one, before a server starts."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    chromium = shutil.which("chromium") or pytest.skip("no chromium")
    with playwright.sync_playwright() as p:
        found = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.mark.slow
def test_inspector_page_in_browser(browser):
    """The page follows a running request, shows a token's scores at a click, and uses no other host."""
    from playwright.sync_api import expect

    with run_server(engine_options={**ENGINE_OPTIONS, "dtype": "bfloat16"}, enable_inspector=True) as server:
        page, root = browser.new_page(), server.url.removesuffix("/v1")
        problems, urls = [], []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        page.goto(f"{root}/inspect")
        body = {"model": "smollm2", "prompt": STORY, "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        body["kv_policy"] = "h2o:budget=40"
        generation = threading.Thread(target=HTTP.post, args=(f"{server.url}/completions",), kwargs={"json": body})
        generation.start()
        page.wait_for_selector("#text .token.answer")
        count = page.locator("#text .token").count()
        page.locator("#text .token").nth(count + 5).wait_for(state="attached")
        generation.join()
        expect(page.locator("#requests button span").first).to_contain_text("length")
        page.locator("#text .token").nth(5).click()
        page.wait_for_selector("#token:not([hidden])")
        assert "heads keep it" in page.locator("#token-detail").inner_text()
        page.locator("#text").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#token-name")).to_contain_text("Token 6")
        evicted = page.locator("#text .token").evaluate_all(
            "x => x.filter(t => Number(t.dataset.evicted) > 0.9).length"
        )
        assert evicted > 50, "a budget of 40 evicts most of the text"
        page.select_option("#layer", "3")
        expect(page.locator("#summary")).to_contain_text("In layer 3")
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") in ("dark", "light")
        assert not problems and all(url.startswith(root) for url in urls)
