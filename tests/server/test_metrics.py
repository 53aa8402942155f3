"""A busy server has data for every panel of our dashboard, and for the queries of vLLM's."""

import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from retain.server.request_group import REPORTED_REASONS
from tests.helpers.promql import Scrapes
from tests.server.conftest import HTTP, run_tiny_server, wait_until

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "retain.json").read_text())
EXPRESSIONS = [(p["title"], t["expr"]) for p in DASHBOARD["panels"] for t in p.get("targets", ())]
VARIABLES = {"$job": ".*", "$model_name": ".*", "$__rate_interval": "1m"}
NOT_ON_DASHBOARD = {
    "retain_page_bytes",
    "retain_prefix_eviction_idle_seconds",
    "vllm:cache_config_info",
    "vllm:request_params_max_tokens",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    # These show the same as another panel.
    "retain_pages",
    "vllm:request_inference_time_seconds",
    "vllm:request_time_per_output_token_seconds",
}
# What the panels of vLLM's own dashboards ask for (examples/observability in its repository), one of each kind.
VLLM_RATES = (
    "e2e_request_latency_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_max_tokens",
)
VLLM_QUERIES = (
    'vllm:num_requests_running{model_name="$model_name"}',
    'vllm:num_requests_waiting{model_name="$model_name"}',
    'vllm:kv_cache_usage_perc{model_name="$model_name", engine="0"}',
    'rate(vllm:prompt_tokens_total{model_name="$model_name"}[$__rate_interval])',
    'rate(vllm:generation_tokens_total{model_name="$model_name"}[$__rate_interval])',
    'sum by(finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}[$__rate_interval]))',
    'rate(vllm:prefix_cache_hits_total{model_name="$model_name"}[1m])'
    ' / rate(vllm:prefix_cache_queries_total{model_name="$model_name"}[1m])',
    'rate(vllm:external_prefix_cache_hits_total{model_name="$model_name"}[1m])'
    ' / rate(vllm:external_prefix_cache_queries_total{model_name="$model_name"}[1m])',
    'rate(vllm:spec_decode_num_accepted_tokens_total{model_name="$model_name"}[1m])'
    ' / rate(vllm:spec_decode_num_drafts_total{model_name="$model_name"}[1m])',
    'sum by (position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="$model_name"}[1m]))',
    'vllm:cache_config_info{model_name="$model_name", enable_prefix_caching="True"}',
    *(f'rate(vllm:{name}_sum{{model_name="$model_name"}}[1m]) / rate(vllm:{name}_count[1m])' for name in VLLM_RATES),
    *(f"histogram_quantile(0.99, sum by(le) (rate(vllm:{name}_bucket[1m])))" for name in VLLM_RATES),
)


def fetch_page(server) -> str:
    return HTTP.get(f"{server.url.removesuffix('/v1')}/metrics").text


def complete(server, prompt: str, **fields) -> str:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    with HTTP.stream("POST", f"{server.url}/completions", json={**body, "stream": True}) as response:
        return "".join(response.iter_text())


def work(server) -> None:
    """Answer prompts that evict each other, come back, repeat, have drafts, or a budget."""
    texts = [f"{i} " * 200 for i in range(8)]
    with ThreadPoolExecutor(4) as executor:
        answers = [complete(server, texts[0]) for _ in range(2)]
        answers += executor.map(lambda text: complete(server, text), texts * 2)
        answers.append(complete(server, "a b " * 20, speculate="ngram:k=4", max_tokens=40))
        answers.append(complete(server, texts[0], kv_policy="h2o:budget=64"))
    assert all(answer.rstrip().endswith("[DONE]") for answer in answers)


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory):
    """Two pages of a busy server; on the second one request runs, and one waits."""
    tier = f"disk:path={tmp_path_factory.mktemp('tier')},capacity=64MiB"
    options = {"kv_memory": "1MiB", "tier": [tier], "max_running_requests": 1, "max_model_len": 1024}
    with (
        run_tiny_server(engine_options=options, allowed_drafters=("ngram:k=4",)) as server,
        ThreadPoolExecutor(2) as executor,
    ):
        work(server)
        before, started = fetch_page(server), time.monotonic()
        work(server)
        last = [executor.submit(complete, server, "c", max_tokens=900) for _ in range(2)]
        pages = []
        wait_until(lambda: pages.append(fetch_page(server)) or one_runs_and_one_waits(pages[-1]))
        yield Scrapes(before, pages[-1], time.monotonic() - started, {"job": "retain", "instance": "a"})
        assert all(future.result() for future in last)


def one_runs_and_one_waits(page: str) -> bool:
    return all(re.search(rf"num_requests_{state}{{.*}} 1\.0", page) for state in ("running", "waiting"))


def evaluate(scrapes: Scrapes, query: str, variables: dict[str, str]) -> list[float]:
    for name, value in variables.items():
        query = query.replace(name, value)
    return list(scrapes.evaluate(query).values())


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda x: x[0])
def test_panels_find_data(scrapes, expression):
    values = evaluate(scrapes, expression[1], VARIABLES)
    assert values and all(math.isfinite(x) and x >= 0 for x in values)


def test_variables_of_the_dashboard_find_values(scrapes):
    for variable in DASHBOARD["templating"]["list"][1:]:
        name, label = re.fullmatch(r"label_values\(([\w:]+).*, (\w+)\)", variable["query"]).groups()
        assert scrapes.label_values(name, label) == {{"job": "retain", "model_name": "smollm2"}[label]}


@pytest.mark.parametrize("query", VLLM_QUERIES)
def test_queries_of_dashboards_for_vllm_find_data(scrapes, query):
    values = evaluate(scrapes, query, {**VARIABLES, "$model_name": "smollm2"})
    assert values and all(math.isfinite(x) and x >= 0 for x in values)


def test_what_a_busy_server_does_is_counted(scrapes):
    counted = {name: sum(x for _, x in scrapes.samples(scrapes.after, name)) for name in metric_names(scrapes.after)}
    still = {name for name, value in counted.items() if not value}
    assert still <= {
        "vllm:num_preemptions_total",
        "retain_snapshots",
        "retain_snapshot_bytes",
        "retain_tier_events_total",
    }
    assert counted["vllm:num_requests_running"] == counted["vllm:num_requests_waiting"] == 1
    parts = counted["vllm:request_prefill_time_seconds_sum"] + counted["vllm:request_decode_time_seconds_sum"]
    inference, queue = (counted[f"vllm:request_{name}_time_seconds_sum"] for name in ("inference", "queue"))
    assert parts == pytest.approx(inference)
    assert inference + queue == pytest.approx(counted["vllm:e2e_request_latency_seconds_sum"])
    hits, queries = (counted[f"vllm:prefix_cache_{name}_total"] for name in ("hits", "queries"))
    assert queries - hits == counted["vllm:external_prefix_cache_queries_total"]
    assert counted["retain_tier_loaded_tokens_total"] == counted["vllm:external_prefix_cache_hits_total"] > 0


def metric_names(page: str) -> set[str]:
    """Return the names of all samples but buckets and times of creation."""
    names = set(re.findall(r"^([\w:]+){", page, re.M))
    return {name for name in names if not name.endswith(("_bucket", "_created"))}


def test_dashboard_shows_every_metric(scrapes):
    exported = set(re.findall(r"^# TYPE ([\w:]+) (?:counter|gauge|histogram)", scrapes.after, re.M))
    exported = {name.removesuffix("_total") for name in exported if not name.endswith("_created")}
    shown = {m for _, expression in EXPRESSIONS for m in re.findall(r"(?:vllm:|retain_)\w+", expression)}
    assert exported - {re.sub("_(bucket|total)$", "", m) for m in shown} == NOT_ON_DASHBOARD


def test_reasons_are_those_of_vllm(scrapes):
    reasons = scrapes.label_values("vllm:request_success_total", "finished_reason")
    assert reasons == set(REPORTED_REASONS.values()) == {"stop", "length", "abort", "error"}
